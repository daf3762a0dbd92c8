"""Calibrate what a fit's step costs lack to the start of a run: factors by phase, host time per step, start delay.

Least squares over the times of single requests, from arrival to first token and from first to last token. The
simulated times are linear in the parameters within a box, which is moved to the solution three times. Method:
docs/theory/planning.md, "Validation".
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from latfit.simulation import EngineRun, EngineSettings, Routing, StepCosts, scaled_costs, serve_replicas
from latfit.stats import FloatArray, IntArray
from latfit.validation.measured import Measured

PRIOR = np.array([0.1, 0.1, 0.1, 3.0])
"""Standard deviations before the run: factors, and host time and start delay as shares of the mean step time."""
BOXES = (0.15, 0.1, 0.1)
"""Half widths of the boxes."""
AROUND, AT_CENTRE = 32, 12
"""Simulations per box: for the slopes, and for the times at its centre."""
BLOCKS = 8
"""Blocks of successive requests, whose errors are independent of each other."""
LOWEST, HIGHEST = np.array([0.2, 0.2, 0.0, 0.0]), np.array([5.0, 5.0, 10.0, 1e4])
NAMES = ("decode_factor", "prefill_factor", "step_ms", "start_ms")


@dataclass(frozen=True)
class Calibration:
    """Parameters with their standard errors, by `NAMES`.

    decode_factor, prefill_factor: on the time of decode steps and of steps with prefill. step_ms: host time added to
    each step. start_ms: delay before the scheduler has a request.
    """

    decode_factor: float
    prefill_factor: float
    step_ms: float
    start_ms: float
    errors: dict[str, float]

    def costs(self, costs: StepCosts) -> StepCosts:
        return scaled_costs(costs, self.decode_factor, self.prefill_factor, self.step_ms)

    def delay(self, run: EngineRun) -> EngineRun:
        """Shift a run by the start delay, which all its requests have."""
        moments = {name: getattr(run, name) + self.start_ms for name in ("seen_ms", "start_ms", "first_ms", "last_ms")}
        return replace(run, **moments)


@dataclass(frozen=True)
class _Times:
    """One time of each calibration request, (n,): its rows, their blocks, the measured time, the unit of its error.

    A time is a sum of many steps, so its variance grows with its length: the unit is the root of the time. factor of
    the start delay in it: 1 for times from the arrival, else 0.
    """

    rows: IntArray
    block: IntArray
    measured: FloatArray
    unit: FloatArray
    delayed: float


def calibrate(
    measured: Measured,
    costs: StepCosts,
    settings: EngineSettings,
    given: NDArray[np.bool_],
    seed: int = 0,
    routing: Routing = Routing(),
) -> Calibration:
    """Return the parameters that explain the given requests (n,) best."""
    from scipy.optimize import lsq_linear
    from scipy.stats.qmc import LatinHypercube

    requests = measured.requests
    bare = serve_replicas(requests, costs, settings, routing, seed)
    step_ms = bare.busy_ms / bare.counters.steps
    pieces = _pieces(measured, given, step_ms)
    design = LatinHypercube(3, seed=seed)
    usual = np.array([1.0, 1.0, 0.0, 0.0])
    found, error = usual, PRIOR
    for half in BOXES:
        low = np.maximum(found[:3] - half, LOWEST[:3])
        offsets = low + (found[:3] + half - low) * design.random(AROUND) - found[:3]
        offsets = np.vstack([offsets, np.zeros((AT_CENTRE, 3))])
        runs = []
        for decode, prefill, host in found[:3] + offsets:
            seed += 1
            changed = scaled_costs(costs, decode, prefill, host * step_ms)
            runs.append(serve_replicas(requests, changed, settings, routing, seed))
        surfaces = [_surface(piece, runs, offsets, found[3], step_ms) for piece in pieces]
        slopes, residual = (np.concatenate(parts) for parts in zip(*surfaces, strict=True))
        scale = np.sqrt(np.mean(residual**2)) + 1e-9
        matrix = np.vstack([slopes / scale, np.diag(1 / PRIOR)])
        target = np.concatenate([residual / scale, (usual - found) / PRIOR])
        move = lsq_linear(matrix, target, bounds=(LOWEST - found - 1e-12, HIGHEST - found)).x
        error = _errors(matrix, target - matrix @ move, np.concatenate([piece.block for piece in pieces]))
        move /= max(1.0, float(np.abs(move[:3]).max()) / (2 * half))
        found = np.maximum(found + move, LOWEST)
    unit = np.array([1.0, 1.0, step_ms, step_ms])
    decode, prefill, host, start = np.round(found * unit, 6).tolist()  # the solver stops just short of a bound
    return Calibration(decode, prefill, host, start, dict(zip(NAMES, (error * unit).tolist(), strict=True)))


def _pieces(measured: Measured, given: NDArray[np.bool_], step_ms: float) -> list[_Times]:
    """Return the times to the first token, and from it to the last one where there are several."""
    rows = np.flatnonzero(given)
    n = len(rows)
    block = np.arange(n) * min(BLOCKS, n) // n
    several = measured.requests.output_tokens[rows] > 1
    found = []
    for kept, start, end, delayed in (
        (np.ones(len(rows), dtype=bool), measured.requests.arrival_ms, measured.first_ms, 1.0),
        (several, measured.first_ms, measured.last_ms, 0.0),
    ):
        times = (end - start)[rows[kept]]
        found.append(_Times(rows[kept], block[kept], times, np.sqrt(np.maximum(times, step_ms)), delayed))
    return [each for each in found if len(each.rows)]


def _surface(
    piece: _Times, runs: Sequence[EngineRun], offsets: FloatArray, delay: float, step_ms: float
) -> tuple[FloatArray, FloatArray]:
    """Return slopes (n, 4) of simulated times in the parameters, and measured less simulated times at the centre (n,).

    Both are in units of the piece. The level comes from runs at the centre, since times are convex in the parameters.
    """
    times = np.array(
        [((run.ttft_ms if piece.delayed else run.last_ms - run.first_ms)[piece.rows]) / piece.unit for run in runs]
    )
    slopes = np.linalg.lstsq(np.column_stack([np.ones(AROUND), offsets[:AROUND]]), times[:AROUND], rcond=None)[0][1:]
    of_delay = piece.delayed * step_ms / piece.unit
    residual = piece.measured / piece.unit - times[AROUND:].mean(axis=0) - delay * of_delay
    return np.column_stack([slopes.T, of_delay]), residual


def _errors(matrix: FloatArray, residual: FloatArray, block: IntArray) -> FloatArray:
    """Return standard errors (4,) from the scores of blocks, at least those of independent rows."""
    inverse = np.linalg.inv(matrix.T @ matrix)
    rows = matrix[: len(block)] * residual[: len(block), None]
    scores = np.array([np.bincount(block, column) for column in rows.T])
    blocks = scores.shape[1]
    spread = scores @ scores.T * blocks / max(blocks - 4, 1) + np.diag(1 / PRIOR**2)
    return np.sqrt(np.maximum(np.diag(inverse), np.diag(inverse @ spread @ inverse)))
