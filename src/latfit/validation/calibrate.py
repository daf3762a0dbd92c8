"""Calibrate what step costs lack on the start of a run: factors by phase, host time per step, start delay.

Least squares over the times of single requests. Method: docs/theory/planning.md, "Validation".
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from latfit.records import Record
from latfit.simulation import EngineRun, EngineSettings, Routing, StepCosts, scaled_costs, serve_replicas
from latfit.stats import FloatArray, IntArray
from latfit.validation.measured import Measured

# Standard deviations before the run: factors, and host time and start delay as shares of the mean step time.
PRIOR = np.array([0.1, 0.1, 0.1, 3.0])
BOXES = (0.15, 0.1, 0.1)  # half widths
SLOPE_RUNS, CENTRE_RUNS = 32, 12  # simulations per box: for the slopes, and for the times at its centre
BLOCKS = 8  # of successive requests, whose errors are independent of each other
LOWEST, HIGHEST = np.array([0.2, 0.2, 0.0, 0.0]), np.array([5.0, 5.0, 10.0, 1e4])
NAMES = ("decode_factor", "prefill_factor", "step_ms", "start_ms")


class Calibration(Record, frozen=True):
    """Parameters with their standard errors: factors on the times of steps, host time of each step, start delay.

    requests: how many they were calibrated on.
    """

    decode_factor: float
    prefill_factor: float
    step_ms: float
    start_ms: float
    errors: Mapping[str, float]
    requests: int

    @property
    def text(self) -> str:
        """`decode steps ×1.020 ± 0.01, steps with prefill ×0.980 ± 0.02, host time 1.2 ± 0.1 ms per step, ...`"""
        factors, error = (("decode steps", "decode_factor"), ("steps with prefill", "prefill_factor")), self.errors
        parts = [f"{title} ×{getattr(self, name):.3f} ± {error[name]:.2g}" for title, name in factors]
        parts.append(f"host time {self.step_ms:.3g} ± {error['step_ms']:.2g} ms per step")
        return ", ".join([*parts, f"start delay {self.start_ms:.3g} ± {error['start_ms']:.2g} ms"])

    def costs(self, costs: StepCosts) -> StepCosts:
        return scaled_costs(costs, self.decode_factor, self.prefill_factor, self.step_ms)

    def delay(self, run: EngineRun) -> EngineRun:
        moments = {name: getattr(run, name) + self.start_ms for name in ("seen_ms", "start_ms", "first_ms", "last_ms")}
        return replace(run, **moments)


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

    requests, rows = measured.requests, np.flatnonzero(given)
    has_several = requests.output_tokens[rows] > 1
    several = rows[has_several]
    block = np.arange(len(rows)) * min(BLOCKS, len(rows)) // len(rows)
    block = np.concatenate([block, block[has_several]])

    def times_of(first_ms: FloatArray, last_ms: FloatArray) -> FloatArray:
        return np.concatenate([(first_ms - requests.arrival_ms)[rows], (last_ms - first_ms)[several]])

    bare = serve_replicas(requests, costs, settings, routing, seed)
    step_ms = bare.busy_ms / bare.counters.steps
    times = times_of(measured.first_ms, measured.last_ms)
    unit = np.sqrt(np.maximum(times, step_ms))  # a time is a sum of many steps: its variance grows with its length
    of_delay = np.repeat([1.0, 0.0], [len(rows), len(several)]) * step_ms / unit
    design = LatinHypercube(3, seed=seed)
    usual = np.array([1.0, 1.0, 0.0, 0.0])
    found, error = usual, PRIOR
    for half in BOXES:
        low = np.maximum(found[:3] - half, LOWEST[:3])
        offsets = low + (found[:3] + half - low) * design.random(SLOPE_RUNS) - found[:3]
        simulated = []
        for decode, prefill, host in found[:3] + np.vstack([offsets, np.zeros((CENTRE_RUNS, 3))]):
            seed += 1
            changed = scaled_costs(costs, decode, prefill, host * step_ms)
            run = serve_replicas(requests, changed, settings, routing, seed)
            simulated.append(times_of(run.first_ms, run.last_ms) / unit)
        # The level comes from runs at the centre, since times are convex in the parameters.
        residual = times / unit - np.mean(simulated[SLOPE_RUNS:], axis=0) - found[3] * of_delay
        around = np.column_stack([np.ones(SLOPE_RUNS), offsets])
        slopes = np.linalg.lstsq(around, np.array(simulated[:SLOPE_RUNS]), rcond=None)[0][1:]
        scale = np.sqrt(np.mean(residual**2)) + 1e-9
        matrix = np.vstack([np.column_stack([slopes.T, of_delay]) / scale, np.diag(1 / PRIOR)])
        target = np.concatenate([residual / scale, (usual - found) / PRIOR])
        move = lsq_linear(matrix, target, bounds=(LOWEST - found - 1e-12, HIGHEST - found)).x
        error = _errors(matrix, target - matrix @ move, block)
        move /= max(1.0, float(np.abs(move[:3]).max()) / (2 * half))
        found = np.maximum(found + move, LOWEST)
    units = np.array([1.0, 1.0, step_ms, step_ms])
    decode, prefill, host, start = np.round(found * units, 6).tolist()  # the solver stops just short of a bound
    errors = dict(zip(NAMES, (error * units).tolist(), strict=True))
    return Calibration(decode, prefill, host, start, errors, len(rows))


def _errors(matrix: FloatArray, residual: FloatArray, block: IntArray) -> FloatArray:
    """Return standard errors (4,) from the scores of blocks, at least those of independent rows."""
    inverse = np.linalg.inv(matrix.T @ matrix)
    rows = matrix[: len(block)] * residual[: len(block), None]
    scores = np.array([np.bincount(block, column) for column in rows.T])
    blocks = scores.shape[1]
    spread = scores @ scores.T * blocks / max(blocks - 4, 1) + np.diag(1 / PRIOR**2)
    return np.sqrt(np.maximum(np.diag(inverse), np.diag(inverse @ spread @ inverse)))
