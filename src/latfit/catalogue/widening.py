"""Widen a fit by the error that its times may have on another machine.

The error is one factor on all step times, log-normal with median 1: drawn for each parameter vector, and added in
quadrature to the limits of steps and to the held-out errors.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import structs
from scipy.special import ndtri

from latfit.model import FitResult, HeldOutErrors
from latfit.stats import FloatArray

TRANSFER = 0.2
"""Mean error of the only pair at hand: one-second windows of vLLM on an RTX 4090, predicted by the entry of that GPU
and model, which another machine measured (19 %, docs/how-to/start-without-measuring.md)."""

MEAN_TO_SD = math.sqrt(math.pi / 2)
"""Standard deviation of a normal variable over its mean absolute value."""


def widen(fit: FitResult, error: float) -> FitResult:
    """Return a fit whose limits and errors hold a mean error of its times as well, without baselines and the check
    against repeated steps, which are of the measured machine."""
    sd, tested = MEAN_TO_SD * math.log1p(error), fit.cross_validation
    if tested.errors is not None:
        tested = structs.replace(tested, errors=_add(tested.errors, error))
    wider, draws = _widen_limits(fit.intervals, sd), _scale_draws(fit, sd)
    diagnostics = structs.replace(fit.diagnostics, lack_of_fit=None)
    return structs.replace(
        fit, intervals=wider, draws=draws, cross_validation=tested, baselines={}, diagnostics=diagnostics
    )


def scale_times(fit: FitResult, names: tuple[str, ...], values: FloatArray, factors: FloatArray) -> FloatArray:
    """Return parameter vectors (n, k) of these names for times that are longer by a factor each (n,)."""
    kept = {*fit.structure.outer, "w_0", "w_1"}  # shapes, and work whose rate is P_max
    power = np.array([-1.0 if name == "P_max" else float(name not in kept) for name in names])
    return np.asarray(values * factors[:, None] ** power)


def _scale_draws(fit: FitResult, sd: float) -> Mapping[str, Any]:
    if not fit.draws:
        return fit.draws
    names, values = tuple(fit.draws["parameters"]), np.asarray(fit.draws["values"], dtype=np.float64)
    missing = [p.name for p in fit.structure.parameters if p.name not in names and p.fixed is None]
    names = (*names, *missing)
    columns = [p.name for p in fit.structure.parameters]
    same = np.tile([fit.theta[columns.index(name)] for name in missing], (len(values), 1))
    n = len(values)
    factors = np.exp(sd * ndtri((np.random.default_rng(0).permutation(n) + 0.5) / n))
    whole = np.hstack([values, same]) if missing else values
    return {**fit.draws, "parameters": list(names), "values": scale_times(fit, names, whole, factors).tolist()}


def _widen_limits(entry: Mapping[str, Any], sd: float) -> dict[str, Any]:
    def widen_limit(level: str, factor: float | None) -> float | None:
        if factor is None:
            return None
        return math.exp(math.copysign(math.hypot(math.log(factor), sd * float(ndtri(float(level)))), math.log(factor)))

    sides = {side: entry[side] for side in ("ratio_quantiles", "lower_quantiles") if side in entry}
    wider: dict[str, Any] = {
        side: {level: widen_limit(level, each) for level, each in limits.items()} for side, limits in sides.items()
    }
    if "by_phase" in entry:
        wider["by_phase"] = {phase: _widen_limits(each, sd) for phase, each in entry["by_phase"].items()}
    if "by_batch" in entry:
        wider["by_batch"] = [_widen_limits(each, sd) for each in entry["by_batch"]]
    return {**entry, **wider}


def _add(errors: HeldOutErrors, error: float) -> HeldOutErrors:
    pct = 100 * error
    by_phase = {phase: math.hypot(each, pct) for phase, each in (errors.by_phase or {}).items()}
    whole = {name: math.hypot(getattr(errors, name), pct) for name in ("mape_pct", "median_ape_pct", "mape_pct_mean")}
    return structs.replace(errors, by_phase=by_phase or None, **whole)
