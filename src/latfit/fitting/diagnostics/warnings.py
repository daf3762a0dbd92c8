"""What a user should know about a fit before trusting it, each with what to do about it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from latfit.fitting.data import FitData
from latfit.fitting.diagnostics.diagnose import noise_floor
from latfit.fitting.diagnostics.pooled import POOLED
from latfit.fitting.problem import FitProblem
from latfit.fitting.uncertainty.what_to_measure import other_than
from latfit.messages import NO_ACTION, Severity
from latfit.model import CONTEXT, Baseline, Combination, Diagnostics, FitResult, Identifiability, Measurement
from latfit.units import format_percent
from latfit.warning import LatfitWarning

LARGE_ERROR_PCT, LEAST_ERROR_PCT = 15.0, 5.0
FORCE = "enter it all the same with --force."
NOISE_PCT = 5.0
"""Errors of a constant below this are noise about a latency that does not vary."""
AT_THE_FLOOR = 1.3
"""Times the noise floor up to which the noise is what limits a fit."""

EXACT_PCT = 1e-6
"""Errors below it are rounding."""

LEAST_FLOOR_PCT = 5.0
"""A noise floor in percent from which it is one to point at."""

FLOORS, OTHERS = 3.0, 2.0
"""Times the noise floor, and the error of a line or a better model, beyond which an error keeps a fit out."""
OUTDONE = "outdone"
AS_GOOD_PCT = 0.1
LEAST_DRIFT = 0.05
"""Share of the residuals' variance from which a change of level within a run is one to point at."""
FAR_BETTER = 0.7
"""Share of an error from which another model's error is one to point at."""
_NAME = re.compile(r"[A-Za-z]\w*")


def cautions(
    problem: FitProblem,
    data: FitData,
    values: Mapping[str, float],
    identifiability: Identifiability,
    error: float,
    baselines: Mapping[str, Baseline],
) -> Iterator[LatfitWarning]:
    """Warnings of a usable fit. error: mean error in percent on rows left out, or on those of the fit where none
    were."""
    for name, (low, high) in problem.options.bounds.items():
        for end in (low, high):
            if np.isclose(values[name], end, rtol=1e-9, atol=0):
                found = f"{name} ends on the bound {end:g} that it was given."
                yield LatfitWarning("at_bound", found, "Widen --bounds, or leave it out.")
    for group in identifiability.unidentified:
        found = _cannot_tell(group) + _told(group, identifiability.combinations)
        severity, remedy = _what_to_measure(problem, group, values, identifiability.measure)
        yield LatfitWarning("not_identified", found, remedy, severity)
    held_out = {name: baseline.cv.mape_pct for name, baseline in baselines.items() if baseline.cv.mape_pct is not None}
    line, constant = held_out.get("linear"), held_out.get("constant")
    enough = FAR_BETTER * error if problem.model.name == "constant" else error + AS_GOOD_PCT
    as_good = line is not None and (line <= enough or identifiability.line_as_good)
    if line is not None and as_good and problem.model.name != "linear" and error > EXACT_PCT:
        yield _line_is_as_good(line, error)
    if problem.model.name == "constant":
        constant = error if line is not None and line > enough else None
    if constant is not None and max(EXACT_PCT, NOISE_PCT) < constant <= error:
        yield LatfitWarning(
            "no_better_than_constant",
            f"A constant predicts held-out steps as well as any model ({format_percent(constant)} off): B and S explain"
            " nothing.",
            "Check which columns are B, S and T_ms (--map), and what else decides the latency of these steps.",
        )
    if not identifiability.prefill:
        yield LatfitWarning(
            "decode_only",
            "The trace contains decode steps only, so prefill is not identifiable.",
            "Measure steps with prefill (S > B) before predicting such steps.",
        )
    floor = noise_floor(data) if error > LEAST_FLOOR_PCT else None
    if floor and floor > LEAST_FLOOR_PCT and error < AT_THE_FLOOR * floor:
        yield _at_the_floor(error, min(floor, error))
    elif error > LARGE_ERROR_PCT:
        found = f"The cross-validated MAPE is {format_percent(error)}."
        yield LatfitWarning("large_error", found, _better(error, held_out) or _why_large(data, problem.model.columns))


def cautions_in_time(intervals: Mapping[str, Any], diagnostics: Diagnostics) -> Iterator[LatfitWarning]:
    """Warnings of what steps share with their neighbours in time, from the `intervals` and the drift of a fit."""
    told = [
        f"{phase}: {found['autocorrelated']}"
        for phase, found in intervals.get("by_phase", {}).items()
        if "autocorrelated" in found
    ]
    if told:
        yield LatfitWarning(
            "autocorrelated",
            f"Latencies are autocorrelated: fewer independent samples than steps ({'; '.join(told)}).",
            "Measure several separate runs and fit them together (a column run tells them apart), or one much longer.",
        )
    if diagnostics.drift and diagnostics.drift.variance_share >= LEAST_DRIFT:
        yield LatfitWarning(
            "drift",
            diagnostics.drift.sentence,
            "Find what changed then (clocks, heat, other load, cached context) and measure again, or fit the rows of"
            " one side; the intervals are those of runs that drift in the same way.",
        )


def _at_the_floor(error: float, floor: float) -> LatfitWarning:
    return LatfitWarning(
        "noise_floor",
        f"Noise is the limit: steps that agree in all that is known differ by {format_percent(floor)}, so no model can"
        f" do better than {format_percent(floor)} on these steps (this one: {format_percent(error)}).",
        "Measure on a quieter machine, or longer steps; more repeats narrow the intervals, not the error.",
    )


def floor_of(found: FitResult) -> float | None:
    """The noise floor of a fit's steps in percent; None where too few of them were repeated to tell."""
    return (found.diagnostics.lack_of_fit or {}).get("noise_floor_pct")


def keeps_out(found: FitResult, max_error_pct: float | None = None) -> LatfitWarning | None:
    """Why a usable fit should not be entered into a hardware profile; None where it may be.

    Steps of several systems are no path of one. max_error_pct: the cross-validated error in percent that is allowed. By
    default a fit is kept out by an error above 5 % that is twice that of the linear baseline or of a better model, and
    by one above 15 % that is several times the noise floor of the steps.
    """
    error = found.cross_validation.mape_pct or found.metrics.mape_pct
    if error is None or not found.status.ok:
        return None
    if pooled := next((each for each in found.warnings if each.code == POOLED), None):
        return pooled
    remedy = f"{'Measure it again' if found.cross_validation.selection else 'Use --model auto'}, or {FORCE}"
    if max_error_pct is not None:
        why = f"above the allowed {format_percent(max_error_pct)}" if error > max_error_pct else ""
    elif outdone := next((each for each in found.warnings if each.code == OUTDONE), None):
        return LatfitWarning("kept_out", outdone.message, remedy)
    else:
        line = found.baselines.get("linear")
        why = _far_above((line.cv.mape_pct or line.mape_pct) if line else None, floor_of(found), error)
    if not why:
        return None
    return LatfitWarning(
        "kept_out", f"The cross-validated MAPE of {found.model} is {format_percent(error)}, {why}.", remedy
    )


def _far_above(line: float | None, floor: float | None, error: float) -> str:
    """Why an error is too large, beside those of a line and of repeats, all in percent; empty where it is not."""
    if line is not None and far_behind(error, line):
        return f"and that of the linear baseline {format_percent(line)}"
    if floor is not None and error > max(FLOORS * floor, LARGE_ERROR_PCT):
        return f"and repeats of the same step differ by {format_percent(floor)} only"
    return ""


def far_behind(error: float, other: float) -> bool:
    """Whether an error is so far above that of another model, both in percent, that it keeps a fit out."""
    return error > max(OTHERS * other, LEAST_ERROR_PCT)


def better_model(name: str, better: str, errors: tuple[float, float]) -> LatfitWarning:
    """A model that was named is beaten. errors: the better one's and its own in percent."""
    theirs, own = errors
    return LatfitWarning(
        OUTDONE if far_behind(own, theirs) else "better_model",
        f"{better} predicts held-out steps far better than {name} ({_versus(theirs, own)}).",
        "Use --model auto, which compares all models.",
    )


def _line_is_as_good(line: float, error: float) -> LatfitWarning:
    """What the error of the linear baseline says beside that of the model, in percent."""
    if line < FAR_BETTER * error:
        found = f"The linear baseline predicts held-out steps better ({_versus(line, error)})."
        return LatfitWarning("line_as_good", found, "Use --model linear, or --model auto, which compares all models.")
    return LatfitWarning(
        "line_as_good",
        f"The linear baseline predicts held-out steps as well ({_versus(line, error)}).",
        "Use --model linear, or measure batches below saturation, where the two differ.",
    )


def _versus(baseline: float, error: float) -> str:
    return f"{format_percent(baseline)} vs {format_percent(error)}"


def _cannot_tell(group: Sequence[str]) -> str:
    if len(group) == 1:
        return f"{group[0]} is not identifiable from these data."
    return f"{', '.join(group[:-1])} and {group[-1]} are not separately identifiable."


def _told(group: Sequence[str], combinations: Sequence[Combination]) -> str:
    """What is identified of a group, with its value."""
    told = [c for c in combinations if set(_NAME.findall(c.expression)) & set(group)]
    if not told:
        return ""
    shown = ", ".join(f"{c.expression} = {c.value:.3g} {c.unit} ({c.low:.3g} to {c.high:.3g})" for c in told)
    return f" Identifiable: {shown}."


def _full_at_once(problem: FitProblem, values: Mapping[str, float]) -> set[str]:
    """Rates whose saturation factor is one at every measured size, of which there are several."""
    return {
        rate
        for rate, column in problem.model.rates
        if values[rate] * float(problem.steps[column].min()) > 5 and np.ptp(problem.steps[column]) > 0
    }


def _what_to_measure(
    problem: FitProblem, group: Sequence[str], values: Mapping[str, float], wanted: Sequence[Measurement]
) -> tuple[Severity, str]:
    if problem.model.rates and set(group) <= _full_at_once(problem, values):
        return Severity.NOTE, (
            f"{NO_ACTION} Throughput is saturated at the smallest measured size, so the data carry no information on"
            f" {' and '.join(group)}."
        )
    texts = list(dict.fromkeys(m.text for m in wanted if set(m.parameters) & set(group)))
    single = [name for name in ("B", "S") if np.ptp(problem.steps[name]) == 0]
    if not texts and single:
        texts = [other_than(problem, name) for name in single]
    if not texts:
        return Severity.NOTE, f"{NO_ACTION} Predictions within the measured range are not affected."
    said = "; or ".join(texts)
    said = f"{said[0].upper()}{said[1:]}. Predictions within the measured range are not affected."
    return Severity.WARNING, said


def _better(error: float, scores: Mapping[str, float]) -> str:
    """The plain model that predicts held-out steps far better, where there is one."""
    best = min(scores, key=lambda name: scores[name], default="")
    if not best or scores[best] > FAR_BETTER * error:
        return ""
    return f"Use --model {best} ({format_percent(scores[best])}), or --model auto, which compares all models."


def _why_large(data: FitData, columns: Sequence[str]) -> str:
    """columns: what the model reads of a step."""
    if CONTEXT not in columns and CONTEXT in data.steps and np.ptp(data.steps[CONTEXT]) > 0:
        return (
            "The cached context varies and this model does not use it: leave out --model, or fit rows of similar"
            " context with --where."
        )
    if data.run is not None and len(np.unique(data.run)) > 1:
        return "Check the residuals by run in the report: the runs may differ in more than B and S."
    return "Check the residuals in the report: latency depends on something besides B and S."
