"""Apply a finished fit: predictions with intervals, and errors on other steps.

Steps that name no contents decode where S = B, else one request prefills; their context is the trace's.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.errors import BadInput, WrongUsage
from latfit.fitting.data import weights_by_row
from latfit.model import CONTEXT, MAX_TESTED, SOURCES, FitResult
from latfit.stats import FloatArray, error_metrics
from latfit.trace import MIXED, PREFILL, UNKNOWN, Trace, phases

CANNOT_TELL = "No interval beyond the measured range: too few values of B or S to validate an extrapolation."
TOO_FAR = f"No interval more than {MAX_TESTED:g} times as far beyond the measured range as held-out steps test."
UNTESTED = "Too few measured steps to test how far those unlike them lie off: their intervals may be too narrow."
OUTSIDE = "outside the measured range"
NO_PREFILL = "prefill not identified: the fit contains decode steps only"


@dataclass(frozen=True)
class Predictions:
    """Latency of steps; every array is (n,)."""

    T_ms: FloatArray  # typical latency
    low: FloatArray  # end of the interval in ms; NaN where the data support none
    high: FloatArray
    level: FloatArray  # of the interval: the widest supported one up to the requested level; NaN without interval
    why_outside: NDArray[np.object_]  # empty inside the measured range
    why_no_interval: NDArray[np.object_]  # empty with an interval
    notes: tuple[str, ...] = ()  # assumptions, how far outside the steps lie, and why intervals are missing

    @property
    def outside(self) -> NDArray[np.bool_]:
        return np.asarray(self.why_outside != "")


def known_levels(fit: FitResult) -> list[float]:
    return [round(2 * level - 1, 9) for level in fit.limits.levels if level > 0.5]


def predict(fit: FitResult, steps: Trace, level: float = 0.9) -> Predictions:
    """Predict steps (columns B, S and what else the model reads). Raises BadInput, WrongUsage."""
    levels = known_levels(fit) if fit.intervals else []
    if levels and not any(math.isclose(level, known) for known in levels):
        shown = ", ".join(f"{known:g}" for known in levels)
        raise WrongUsage(f"the fit has no interval at {level:g}", where="--level", remedy=f"Choose one of: {shown}.")
    T = typical_ms(fit, steps)
    low, high, levels_of, without, narrower = _interval(fit, steps, T, level, widest=True)
    silent = [text for text in dict.fromkeys(without.tolist()) if text and NO_PREFILL not in text]
    notes = (*narrower, *outside_note(fit, steps), *taken(fit, steps), *silent)
    untested = fit.cross_validation.outside_support is None
    if untested and np.any(fit.outside_support(**_read(fit, steps)) & np.isfinite(high)):
        notes = (*notes, UNTESTED)
    return Predictions(T, low, high, levels_of, _why_outside(fit, steps), without, notes)


def _interval(
    fit: FitResult, steps: Trace, T: FloatArray, level: float, *, widest: bool = False
) -> tuple[FloatArray, FloatArray, FloatArray, NDArray[np.object_], list[str]]:
    """Return ends in ms (NaN: none), level, reasons and notes; `widest`: fall back to the widest level of a phase."""
    low, high, level_of = (np.full(len(steps), np.nan) for _ in range(3))
    without = np.full(len(steps), "", dtype=object)
    named, B, notes = _phases_of(steps), steps.floats("B"), []
    levels = [level, *sorted((each for each in known_levels(fit) if each < level), reverse=True)] if widest else [level]
    for phase in map(str, np.unique(named)):
        rows, missing = named == phase, fit.limits.of(phase).reason or "too few steps were measured"
        silent = f"No interval at {100 * level:g} % for {phase} steps: {missing}."
        for tried in levels:
            share = round((1 + tried) / 2, 9)
            lower, upper = (fit.limits.factors(phase, share, B[rows], side) for side in ("lower", "upper"))
            if lower is not None and upper is not None:
                low[rows], high[rows], level_of[rows] = T[rows] * lower, T[rows] * upper, tried
                if tried != level:
                    notes.append(f"Intervals of {phase} steps are at {100 * tried:g} %. {silent}")
                break
        else:
            without[rows] = silent
    blind, wider = _blind(fit, steps), fit.widening(**_read(fit, steps))
    without[np.isnan(wider) & (without == "")] = CANNOT_TELL
    without[np.isinf(wider) & (without == "")] = TOO_FAR
    without[blind] = f"No interval: {NO_PREFILL}."
    wider = np.where(np.isinf(wider), np.nan, wider)
    low, high = np.where(blind, np.nan, low / wider), np.where(blind, np.nan, high * wider)
    return low, high, np.where(np.isnan(low), np.nan, level_of), without, notes


def _blind(fit: FitResult, steps: Trace) -> NDArray[np.bool_]:
    return np.zeros(len(steps), dtype=bool) if fit.knows_prefill else fit.holds_prefill(**_read(fit, steps))


def outside_note(fit: FitResult, steps: Trace) -> list[str]:
    """Return how many steps lie outside the measured range and how far, in a sentence."""
    columns = _read(fit, steps)
    outside = [np.abs(times) > 0 for times in fit.times_outside(**columns).values()]
    unlike = fit.outside_support(**columns) & ~_blind(fit, steps)
    count = int(np.any([*outside, unlike], axis=0).sum())
    if not count:
        return []
    one = len(steps) == 1
    place = "The step lies" if one else f"{count:,} of {len(steps):,} steps {'lies' if count == 1 else 'lie'}"
    far = fit.farthest(**columns)
    if not far:
        return [f"{place} {OUTSIDE}: few steps like {'it' if one or count == 1 else 'them'}."]
    return [f"{place} {OUTSIDE}: {far if one or count == 1 else f'up to {far}'}."]


def typical_ms(fit: FitResult, steps: Trace) -> FloatArray:
    """Return the typical latency in ms (n,). Raises BadInput where a needed column has no typical value."""
    if fit.reads_context and CONTEXT not in steps and not fit.typical:
        raise BadInput(
            f"the fit needs {CONTEXT} of each step",
            remedy="Give it with --context, --context-tokens or --data.",
        )
    return fit.latency_ms(**_read(fit, steps))


def mean_ms(fit: FitResult, steps: Trace) -> FloatArray:
    """Return the mean latency in ms (n,): the typical one with the mean noise of its phase and batch."""
    found, named = typical_ms(fit, steps), _phases_of(steps)
    for phase in np.unique(named).tolist():
        rows = named == phase
        law = fit.step_noise(phase)
        if law is not None:
            T = found[rows] * law.levels.factors(steps.floats("S")[rows])
            found[rows] = law.mean_ms(T, steps.floats("B")[rows])
    return found


def taken(fit: FitResult, steps: Trace) -> list[str]:
    """Return what is assumed of steps that lack columns, in sentences."""
    found = []
    if fit.reads_context and CONTEXT not in steps and fit.assumed_context:
        found.append(f"No cached context is given; predicted {fit.assumed_context}.")
    holds = np.any(steps.floats("S") > steps.floats("B"))
    if holds and "prefill_tokens" in read_columns_of(fit) and "prefill_tokens" not in steps:
        found.append("Steps with S > B are taken as one request in prefill, the others in decode.")
    return found


def _why_outside(fit: FitResult, steps: Trace) -> NDArray[np.object_]:
    far = fit.how_far(**_read(fit, steps))
    why = np.where(far == "", "", OUTSIDE + ": " + far).astype(object)
    why[fit.outside_support(**_read(fit, steps)) & (why == "")] = f"{OUTSIDE}: few steps like it"
    why[_blind(fit, steps)] = NO_PREFILL
    return why


def _phases_of(steps: Trace) -> NDArray[np.object_]:
    """Return the phase of each step (n,), guessed from B and S where the columns do not name it."""
    named = phases(steps).astype(object)
    B, S = steps.floats("B"), steps.floats("S")
    unknown = named == UNKNOWN
    named[unknown & (B == 1)] = PREFILL
    named[unknown & (B > 1) & (S < 2 * B)] = MIXED
    return named


def read_columns_of(fit: FitResult) -> list[str]:
    return [name for name in fit.columns if name in ("B", "S") or name in fit.domain]


def _read(fit: FitResult, steps: Trace) -> dict[str, FloatArray]:
    names = dict.fromkeys(["B", "S", *read_columns_of(fit), *(name for name in SOURCES if name in fit.domain)])
    return {name: steps.floats(name) for name in names if name in steps}


def evaluate(fit: FitResult, trace: Trace) -> dict[str, Any]:
    """Return the `--json` of `latfit evaluate`."""
    trace = trace.select(weights_by_row(trace) > 0)  # a cell that stands for no step tells nothing
    observed, named, weights = trace.floats("T_ms"), phases(trace).astype(str), weights_by_row(trace)
    T = typical_ms(fit, trace)
    coverage, without = {}, []
    for level in known_levels(fit):
        low, high, *_ = _interval(fit, trace, T, level)
        known = np.isfinite(low) & np.isfinite(high)
        if not known.all():
            steps = round(float(weights[~known].sum()))
            without.append(f"{steps:,} steps have no {100 * level:g} % interval and are not counted in its coverage.")
        if known.any():
            inside = (observed >= low) & (observed <= high)
            coverage[f"{level:g}"] = float(np.average(inside[known], weights=weights[known]))
    if count := round(float(weights @ _blind(fit, trace))):
        without.insert(
            0, f"{count:,} steps contain prefill, which is not identified: the fit contains decode steps only."
        )
    rows_of = {str(phase): named == phase for phase in np.unique(named)}
    return {
        "metrics": error_metrics(observed, T, weights),
        "by_phase": {phase: error_metrics(observed[rows], T[rows], weights[rows]) for phase, rows in rows_of.items()},
        "interval_coverage": coverage,
        "outside_domain": round(float(weights[fit.outside_domain(**_read(fit, trace))].sum())),
        "notes": [*outside_note(fit, trace), *taken(fit, trace), *without],
    }
