"""Calibrate two non-negative constants on top of a fit's step costs, per step and per token, to the start of a run.

They stand for host time outside kernels and for communication between devices. A grid and Nelder-Mead minimise the
squared relative errors of mean TTFT, TPOT and latency. Method: docs/theory/planning.md, "Validation".
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latfit.simulation import EngineSettings, Routing, StepCosts, calibrated, serve_replicas
from latfit.stats import FloatArray
from latfit.validation.measured import Measured

GRID = (0.0, 0.01, 0.03, 0.1, 0.3)
"""Grid points, as a share of the mean time of a step or token."""

STARTS, DESCENT = 3, 40
"""Grid points to search from, and simulations per search."""


@dataclass(frozen=True)
class Constants:
    """ms added to each step (host time) and to each of its tokens. runs: simulations used."""

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
    """Return the constants that fit the given requests (n,) best."""
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
    """Run Nelder-Mead from a simplex of this relative size."""
    from scipy.optimize import minimize

    edge = np.maximum(size * start, 0.01 * size)
    simplex = start + np.array([[0.0, 0.0], [edge[0], 0.0], [0.0, edge[1]]])
    minimize(error, start, method="Nelder-Mead", options={"initial_simplex": simplex, "maxfev": DESCENT})


def _means(measured: Measured, first_ms: FloatArray, last_ms: FloatArray, given: NDArray[np.bool_]) -> FloatArray:
    """Return the mean TTFT, latency and TPOT (3,) of the given requests; one-token requests have no TPOT."""
    arrival, output = measured.requests.arrival_ms, measured.requests.output_tokens
    several = given & (output > 1)
    columns = [(first_ms - arrival)[given], (last_ms - arrival)[given]]
    if several.any():
        columns.append((last_ms - first_ms)[several] / (output[several] - 1))
    return np.array([float(np.mean(each)) for each in columns])
