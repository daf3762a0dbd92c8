"""A finished fit applied: predictions with intervals, errors on steps it has not seen, and the difference of two fits.

A step's interval at level c lies between the lower and the upper factor at (1+c)/2 times its typical latency: factors
of its phase where the fit has them, else of all steps (split conformal, see `intervals`).

Two fits are compared where both have measured: on a geometric grid over the common box of B and S (S >= B), at the
middle of the common range of context. The verdict is on the median of T_other/T_first over that grid.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.errors import BadInput, WrongUsage
from latfit.model.result import FitResult
from latfit.stats import FloatArray, error_metrics
from latfit.trace.phases import phases
from latfit.trace.table import Trace

GRID_SIDE = 25


@dataclass(frozen=True)
class Predictions:
    """Typical latency, interval ends (NaN where the fit cannot tell) in ms, and whether a step lies outside the data;
    each (n,)."""

    T_ms: FloatArray
    low: FloatArray
    high: FloatArray
    outside: NDArray[np.bool_]


@dataclass(frozen=True)
class Change:
    """How the latency of one fit differs from another's: relative, over the common range of both."""

    median: float
    least: float
    most: float
    points: int


def known_levels(fit: FitResult) -> list[float]:
    """Levels of the two-sided intervals that a fit has factors for."""
    upper = fit.intervals.get("ratio_quantiles", {})
    return sorted(round(2 * float(name) - 1, 9) for name in upper if float(name) > 0.5)


def predict(fit: FitResult, steps: Trace, level: float = 0.9) -> Predictions:
    """Latency of steps (columns B, S and what else the model reads). Raises BadInput, WrongUsage."""
    if fit.intervals and not any(math.isclose(level, known) for known in known_levels(fit)):
        shown = ", ".join(f"{known:g}" for known in known_levels(fit))
        raise WrongUsage(f"the fit has no interval at {level:g}", where="--level", remedy=f"Choose one of: {shown}.")
    T = typical_ms(fit, steps)
    low, high = (np.full(len(steps), np.nan) for _ in range(2))
    named = phases(steps).astype(str)
    for phase in np.unique(named):
        rows = named == phase
        lower, upper = _factors(fit, str(phase), (1 + level) / 2)
        low[rows], high[rows] = T[rows] * lower, T[rows] * upper
    return Predictions(T, low, high, fit.outside_domain(**_read(fit, steps)))


def typical_ms(fit: FitResult, steps: Trace) -> FloatArray:
    """Typical latency in ms (n,) of steps. Raises BadInput where a column that the fit used is missing."""
    wanted = [name for name in read_columns_of(fit) if name not in steps]
    if wanted:
        raise BadInput(
            f"the fit needs {', '.join(wanted)} of each step",
            remedy="Give these columns with --data, or the options of the same names.",
        )
    return fit.latency_ms(**_read(fit, steps))


def read_columns_of(fit: FitResult) -> list[str]:
    """Columns that a fit's model reads and its data had."""
    return [name for name in fit.structure.columns if name in ("B", "S") or name in fit.domain]


def _read(fit: FitResult, steps: Trace) -> dict[str, FloatArray]:
    return {name: steps.floats(name) for name in read_columns_of(fit)}


def evaluate(fit: FitResult, trace: Trace) -> dict[str, Any]:
    """The contract of `latfit evaluate --json`: errors overall and by phase, coverage of intervals, steps outside."""
    observed, named = trace.floats("T_ms"), phases(trace).astype(str)
    T = typical_ms(fit, trace)
    coverage = {}
    for level in known_levels(fit):
        found = predict(fit, trace, level)
        known = np.isfinite(found.low) & np.isfinite(found.high)
        if known.any():
            inside = (observed >= found.low) & (observed <= found.high)
            coverage[f"{level:g}"] = float(inside[known].mean())
    return {
        "metrics": error_metrics(observed, T),
        "by_phase": {
            str(phase): error_metrics(observed[named == phase], T[named == phase]) for phase in np.unique(named)
        },
        "interval_coverage": coverage,
        "outside_domain": int(fit.outside_domain(**_read(fit, trace)).sum()),
    }


def change(first: FitResult, other: FitResult) -> Change:
    """How much slower `other` is than `first` where both have measured. Raises BadInput where that is nowhere."""
    box = {}
    for name in ("B", "S"):
        low = max(fit.domain[name][0] for fit in (first, other))
        high = min(fit.domain[name][1] for fit in (first, other))
        if low > high:
            raise BadInput(
                f"the fits have no common range of {name}", remedy="Compare fits of steps that overlap in B and in S."
            )
        box[name] = np.unique(np.round(np.geomspace(max(low, 1.0), high, GRID_SIDE))).astype(np.float64)
    B, S = (np.asarray(axis.ravel(), dtype=np.float64) for axis in np.meshgrid(box["B"], box["S"]))
    kept = np.asarray(S >= B)
    if not kept.any():
        raise BadInput("the fits have no common step (S >= B)", remedy="Compare fits of steps that overlap in B and S.")
    steps = _at_typical_context(first, other, B[kept], S[kept])
    ratio = typical_ms(other, steps) / typical_ms(first, steps)
    return Change(float(np.median(ratio)) - 1, float(ratio.min()) - 1, float(ratio.max()) - 1, int(kept.sum()))


def _at_typical_context(first: FitResult, other: FitResult, B: FloatArray, S: FloatArray) -> Trace:
    """Steps with the other columns at the middle of the common range, decode and prefill parts as B and S imply."""
    columns: dict[str, FloatArray] = {"B": B, "S": S}
    if "prefill_tokens" in {*read_columns_of(first), *read_columns_of(other)}:
        holds = S > B
        columns |= {"prefill_requests": holds.astype(np.float64), "prefill_tokens": np.where(holds, S - B + 1, 0.0)}
    for name in ("context_tokens", "prefill_context_tokens"):
        spans = [fit.domain[name] for fit in (first, other) if name in read_columns_of(fit)]
        if spans:
            middle = 0.5 * (max(low for low, _ in spans) + min(high for _, high in spans))
            columns[name] = np.full(len(B), max(middle, 0.0) if name == "context_tokens" else 0.0)
    return Trace(columns)


def _factors(fit: FitResult, phase: str, share: float) -> tuple[float, float]:
    """(lower, upper) factor on the typical latency at a share, of a phase or of all steps; NaN where unknown."""
    intervals = fit.intervals
    source = intervals.get("by_phase", {}).get(phase, intervals)
    found = []
    for kind in ("lower_quantiles", "ratio_quantiles"):
        value = source.get(kind, {}).get(f"{share:g}")
        found.append(math.nan if value is None else float(value))
    return found[0], found[1]
