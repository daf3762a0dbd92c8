"""Two non-negative constants on top of a fit's step costs, so that a simulated run meets the start of a measured one.

What an engine does between steps (scheduling, sampling, copying tokens to the host) is in no kernel's time; this host
time costs a constant for each step, and where several devices exchange activations a constant for each token. Both
are searched where the squared relative errors of the mean TTFT, TPOT and latency are smallest. All
requests are simulated, since later arrivals slow earlier ones, but only the given ones are compared.

The error has small jumps, where a step more or less changes who is preempted, so the search compares values and uses no
slopes: a grid, then Nelder and Mead's simplex from its best points. (0, 0) is among the points, so calibrating never
makes the given requests worse.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latfit.simulation import EngineSettings, Routing, StepCosts, calibrated, serve_replicas
from latfit.stats import FloatArray
from latfit.validation.measured import Measured

GRID = (0.0, 0.01, 0.03, 0.1, 0.3)
"""Points of the grid, as a share of the mean time of a step, spread over steps or over tokens."""

STARTS, DESCENT = 3, 40
"""Points of the grid to search from, and simulations of a search."""


@dataclass(frozen=True)
class Constants:
    """ms on top of every step (the host time) and of every token in it; runs: simulations that the search took."""

    step_ms: float
    token_ms: float
    runs: int


def calibrate(
    measured: Measured,
    costs: StepCosts,
    settings: EngineSettings,
    given: NDArray[np.bool_],
    seed: int = 0,
    routing: Routing = Routing(),
) -> Constants:
    """The constants that fit the given requests (n,) best."""
    bare = serve_replicas(measured.requests, costs, settings, routing, seed)
    scale = bare.busy_ms / np.array([bare.counters.steps, max(bare.counters.computed_tokens, 1)])
    target = _means(measured, measured.first_ms, measured.last_ms, given)
    tried: dict[tuple[float, float], float] = {}

    def error(x: FloatArray) -> float:
        step_ms, token_ms = (np.maximum(x, 0.0) * scale).tolist()
        made = serve_replicas(measured.requests, calibrated(costs, step_ms, token_ms), settings, routing, seed)
        off = float(np.sum((_means(measured, made.first_ms, made.last_ms, given) / target - 1.0) ** 2))
        tried[step_ms, token_ms] = off
        # Outside the box, the distance to it decides: the simplex comes back.
        return off + float(np.sum(np.minimum(x, 0.0) ** 2))

    points = [np.array([a, b]) for a in GRID for b in GRID]
    for start in sorted(points, key=error)[:STARTS]:
        _descend(error, start, 0.3)
    for size in (0.2, 0.1):
        _descend(error, np.array(min(tried, key=lambda at: tried[at])) / scale, size)
    step_ms, token_ms = min(tried, key=lambda at: tried[at])
    return Constants(step_ms, token_ms, len(tried))


def _descend(error: Callable[[FloatArray], float], start: FloatArray, size: float) -> None:
    """Nelder and Mead's search from a triangle of this relative size."""
    from scipy.optimize import minimize

    edge = np.maximum(size * start, 0.01 * size)
    simplex = start + np.array([[0.0, 0.0], [edge[0], 0.0], [0.0, edge[1]]])
    minimize(error, start, method="Nelder-Mead", options={"initial_simplex": simplex, "maxfev": DESCENT})


def _means(measured: Measured, first_ms: FloatArray, last_ms: FloatArray, given: NDArray[np.bool_]) -> FloatArray:
    """Mean TTFT, latency and TPOT (3,) of the given requests; those of one token have no TPOT."""
    arrival, output = measured.requests.arrival_ms, measured.requests.output_tokens
    several = given & (output > 1)
    columns = [(first_ms - arrival)[given], (last_ms - arrival)[given]]
    if several.any():
        columns.append((last_ms - first_ms)[several] / (output[several] - 1))
    return np.array([float(np.mean(each)) for each in columns])
