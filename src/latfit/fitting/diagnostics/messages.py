"""Messages about a fit: one table of texts with the action each asks for, and the conditions under which they apply.

A message whose `acts` is False changes no decision about predictions within the measured range: only `--verbose`,
`--json` and the report show it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import structs

from latfit.fitting.data import FitData
from latfit.fitting.diagnostics.diagnose import noise_floor
from latfit.fitting.problem import FitOptions, FitProblem
from latfit.fitting.uncertainty.what_to_measure import other_than
from latfit.messages import NO_ACTION, Message as LatfitWarning, Severity
from latfit.model import CONTEXT, Baseline, Cliff, Combination, Diagnostics, FitResult, Identifiability
from latfit.units import format_percent


@dataclass(frozen=True)
class Message:
    """A text and a hint with `{placeholders}`; acts: whether somebody should do something about it."""

    text: str
    hint: str
    acts: bool = True


MESSAGES: Mapping[str, Message] = {
    "at_bound": Message("{name} ends on the bound {end:g} that it was given.", "Widen --set bounds, or leave it out."),
    "not_identified": Message(
        "{names} not {separately}identifiable{from_data}.{known}",
        "{measure}Predictions within the measured range are not affected.",
        acts=False,
    ),
    "line_better": Message(
        "The linear baseline predicts held-out steps better ({line} vs {error}).",
        "Use --model linear, or --model auto, which compares all models.",
    ),
    "line_as_good": Message(
        "The linear baseline predicts held-out steps as well ({line} vs {error}).",
        "Use --model linear, or measure batches below saturation, where the two differ.",
    ),
    "no_better_than_constant": Message(
        "A constant predicts held-out steps as well as any model ({constant} off): B and S explain nothing.",
        "Check which columns are B, S and T_ms (--map), and what else decides the latency of these steps.",
    ),
    "decode_only": Message(
        "The trace contains decode steps only, so prefill is not identifiable.",
        "Measure steps with prefill (S > B) before predicting such steps.",
    ),
    "noise_floor": Message(
        "Noise is the limit: steps that agree in all that is known differ by {floor}, so no model can do better than"
        " {floor} on these steps (this one: {error}).",
        "Measure on a quieter machine, or longer steps; more repeats narrow the intervals, not the error.",
    ),
    "large_error": Message("The cross-validated MAPE is {error}.", "{why}"),
    "autocorrelated": Message(
        "Latencies are autocorrelated: fewer independent samples than steps ({phases}).",
        "The intervals allow for it. Fit several separate runs together (column run), or a much longer one.",
        acts=False,
    ),
    "drift": Message(
        "{sentence}",
        "Find what changed then (clocks, heat, other load, cached context) and measure again, or fit the rows of one"
        " side; the intervals are those of runs that drift in the same way.",
    ),
    "impossible_steps": Message(
        "{steps} far from those beside: {which}.",
        "Left out of the fit. Check how they were recorded (unit, clock, counters), or measure again.",
    ),
    "slow_steps": Message(
        "{steps} far slower than those beside: {which}.",
        "They count in the tail: where they should not, measure again, or leave them out with --drop outlier.",
    ),
    "slow_steps_of_log": Message(
        "{steps} far slower than those beside: {which}.",
        "They count in the tail, and the loss bounds what they do to the formula.",
        acts=False,
    ),
    "pooled_systems": Message(
        "These rows are of several systems: {column} ({count} values, {first} to {last}) explains {explained:.0f} % of"
        " the differences between steps of equal B and S, up to {ratio:.2g} times.",
        "Fit each by itself: --map path={column}.",
    ),
    "cliffs": Message(
        "{steps} take abruptly longer beyond {axis} = {sizes}.",
        "One above costs up to {cost} of the throughput; plans warn of such settings.",
        acts=False,
    ),
    "better_model": Message(
        "{better} predicts held-out steps far better than {name} ({theirs} vs {own}).",
        "Use --model auto, which compares all models.",
    ),
    "kept_out": Message(
        "The cross-validated MAPE of {model} is {error}, {why}.", "{remedy}, or enter it all the same with --force."
    ),
}
SHARED_CODES = {"line_better": "line_as_good", "slow_steps_of_log": "slow_steps"}
"""Texts that are variants of a message with another code."""

POOLED, OUTDONE = "pooled_systems", "outdone"
EXPLAINED_BY_POOLING = ("noise_floor", "large_error")  # say again that several systems differ

LARGE_ERROR_PCT, MIN_ERROR_PCT = 15.0, 5.0
MIN_CONSTANT_ERROR_PCT = 5.0  # below it, a constant's error is noise about a latency that does not vary
ROUNDING_PCT = 1e-6
MIN_FLOOR_PCT = 5.0  # a smaller noise floor is not worth a message
FLOOR_REACHED = 1.3  # times the noise floor: up to here noise limits the fit
REJECTED_FLOORS, REJECTED_OTHERS = 3.0, 2.0  # times the noise floor, or a better model's error: rejected as a path
AS_GOOD_PCT = 0.1
MIN_DRIFT = 0.05  # share of the residuals' variance due to changes of level
MIN_BEATEN_ERROR_PCT = 3.0  # of a named model, from which others are looked at
FAR_BETTER = 0.7  # times an error: clearly better
MAX_CLIFFS = 5  # named in a note
_NAME = re.compile(r"[A-Za-z]\w*")


def message(code: str, **values: Any) -> LatfitWarning:
    """Return a message with its values filled in; the hint of one that asks for nothing begins with NO_ACTION."""
    found = MESSAGES[code]
    hint = found.hint.format(**values)
    severity = Severity.WARNING if found.acts else Severity.NOTE
    hint = hint if found.acts else f"{NO_ACTION} {hint}"
    return LatfitWarning(SHARED_CODES.get(code, code), found.text.format(**values), hint, severity)


def cautions(
    problem: FitProblem,
    data: FitData,
    values: Mapping[str, float],
    identifiability: Identifiability,
    error: float,
    baselines: Mapping[str, Baseline],
) -> Iterator[LatfitWarning]:
    """Yield the messages on a usable fit. error: held-out MAPE in percent, in sample where nothing was held out."""
    for name, ends in problem.options.bounds.items():
        for end in ends:
            if np.isclose(values[name], end, rtol=1e-9, atol=0):
                yield message("at_bound", name=name, end=end)
    for group in identifiability.unidentified:
        yield _not_identified(problem, group, identifiability)
    held_out = {name: baseline.cv.mape_pct for name, baseline in baselines.items() if baseline.cv.mape_pct is not None}
    line, constant = held_out.get("linear"), held_out.get("constant")
    floor, model = noise_floor(data), problem.model.name
    noisy = floor is not None and error < FLOOR_REACHED * floor
    enough = FAR_BETTER * error if model == "constant" else error + AS_GOOD_PCT
    as_good = line is not None and (line <= enough or identifiability.line_as_good)
    if line is not None and as_good and model != "linear" and error > ROUNDING_PCT:
        variant = "line_better" if line < FAR_BETTER * error else "line_as_good"
        yield message(variant, line=format_percent(line), error=format_percent(error))
    if model == "constant":
        constant = error if line is not None and line > enough else None
    if constant is not None and MIN_CONSTANT_ERROR_PCT < constant <= error:
        yield message("no_better_than_constant", constant=format_percent(constant))
    if not identifiability.prefill:
        yield message("decode_only")
    if noisy and floor is not None and min(error, floor) > MIN_FLOOR_PCT:
        yield message("noise_floor", floor=format_percent(min(floor, error)), error=format_percent(error))
    elif error > LARGE_ERROR_PCT:
        best = min(held_out, key=lambda name: held_out[name], default="")
        why = _why_large(data, problem.model.columns)
        if best and held_out[best] <= FAR_BETTER * error:
            why = f"Use --model {best} ({format_percent(held_out[best])}), or --model auto, which compares all models."
        yield message("large_error", error=format_percent(error), why=why)


def may_be_beaten(error: float | None, data: FitData, options: FitOptions) -> bool:
    """Return whether another model may do much better: no noise limits the fit, and no parameter was constrained."""
    floor, constrained = noise_floor(data), any(options.fixed.values()) or options.bounds or options.priors
    noisy = floor is not None and error is not None and error < FLOOR_REACHED * floor
    return error is not None and error >= MIN_BEATEN_ERROR_PCT and not noisy and not constrained


def better_model(name: str, better: str, theirs: float, own: float) -> LatfitWarning:
    """Return the message on a named model that another beats, by their errors in percent."""
    beaten = message("better_model", better=better, name=name, theirs=format_percent(theirs), own=format_percent(own))
    return structs.replace(beaten, code=OUTDONE) if far_behind(own, theirs) else beaten


def cautions_in_time(intervals: Mapping[str, Any], diagnostics: Diagnostics) -> Iterator[LatfitWarning]:
    """Yield the messages on autocorrelation and drift."""
    told = [
        f"{phase}: {found['autocorrelated']}"
        for phase, found in intervals.get("by_phase", {}).items()
        if "autocorrelated" in found
    ]
    if told:
        yield message("autocorrelated", phases="; ".join(told))
    if diagnostics.drift and diagnostics.drift.variance_share >= MIN_DRIFT:
        yield message("drift", sentence=diagnostics.drift.sentence)


def floor_of(found: FitResult) -> float | None:
    """Return the noise floor of a fit's steps in percent; None where too few of them were repeated."""
    return (found.diagnostics.lack_of_fit or {}).get("noise_floor_pct")


def keeps_out(found: FitResult, max_error_pct: float | None = None) -> LatfitWarning | None:
    """Return why a usable fit should not be entered into a hardware profile; None where it may be.

    Steps of several systems are no path. Beyond that, an error above `max_error_pct` is rejected; without it, one that
    is above 5 % and twice that of a line or a better model, or above 15 % and three times the noise floor.
    """
    error = found.cross_validation.mape_pct or found.metrics.mape_pct
    if error is None or not found.status.ok:
        return None
    by_code = {each.code: each for each in found.warnings}
    if POOLED in by_code:
        return by_code[POOLED]
    remedy = "Measure it again" if found.cross_validation.selection else "Use --model auto"
    if max_error_pct is None and OUTDONE in by_code:
        text, hint = by_code[OUTDONE].message, MESSAGES["kept_out"].hint.format(remedy=remedy)
        return LatfitWarning("kept_out", text, hint)
    line, floor, why = found.baselines.get("linear", Baseline()), floor_of(found), ""
    beside = line.cv.mape_pct or line.mape_pct
    if max_error_pct is not None:
        why = f"above the allowed {format_percent(max_error_pct)}" if error > max_error_pct else ""
    elif beside is not None and far_behind(error, beside):
        why = f"and that of the linear baseline {format_percent(beside)}"
    elif floor is not None and error > max(REJECTED_FLOORS * floor, LARGE_ERROR_PCT):
        why = f"and repeats of the same step differ by {format_percent(floor)} only"
    shown = {"model": found.model, "error": format_percent(error), "why": why, "remedy": remedy}
    return message("kept_out", **shown) if why else None


def cliff_note(cliffs: Sequence[Cliff]) -> LatfitWarning | None:
    """Return a note on the cliffs of one kind of step, the highest first; None if there are none."""
    if not cliffs:
        return None
    highest = sorted(cliffs, key=lambda each: -each.step_pct)[:MAX_CLIFFS]
    return message(
        "cliffs",
        steps="Decode steps" if cliffs[0].axis == "B" else "Steps with prefill",
        axis=cliffs[0].axis,
        sizes=", ".join(f"{each.size:,} ({format_percent(each.step_pct, signed=True)})" for each in highest),
        cost=format_percent(max(each.cost_pct for each in cliffs)),
    )


def far_behind(error: float, other: float) -> bool:
    """Return whether an error in percent is so far above that of another model that the fit is rejected."""
    return error > max(REJECTED_OTHERS * other, MIN_ERROR_PCT)


def _not_identified(problem: FitProblem, group: Sequence[str], found: Identifiability) -> LatfitWarning:
    single = len(group) == 1
    text = {
        "names": f"{group[0]} is" if single else f"{', '.join(group[:-1])} and {group[-1]} are",
        "separately": "" if single else "separately ",
        "from_data": " from these data" if single else "",
        "known": _known_combinations(group, found.combinations),
    }
    wanted = list(dict.fromkeys(m.text for m in found.measure if set(m.parameters) & set(group)))
    said = "; or ".join(
        wanted or [other_than(problem, name) for name in ("B", "S") if np.ptp(problem.steps[name]) == 0]
    )
    return message("not_identified", measure=f"{said[0].upper()}{said[1:]}. " if said else "", **text)


def _known_combinations(group: Sequence[str], combinations: Sequence[Combination]) -> str:
    known = [c for c in combinations if set(_NAME.findall(c.expression)) & set(group)]
    shown = ", ".join(f"{c.expression} = {c.value:.3g} {c.unit} ({c.low:.3g} to {c.high:.3g})" for c in known)
    return f" Identifiable: {shown}." if shown else ""


def _why_large(data: FitData, columns: Sequence[str]) -> str:
    """Return the likely cause of a large error. columns: what the model reads of a step."""
    if CONTEXT not in columns and CONTEXT in data.steps and np.ptp(data.steps[CONTEXT]) > 0:
        return (
            "The cached context varies and this model does not use it: leave out --model, or fit rows of similar"
            " context with --where."
        )
    if data.run is not None and len(np.unique(data.run)) > 1:
        return "Check the residuals by run in the report: the runs may differ in more than B and S."
    return "Check the residuals in the report: latency depends on something besides B and S."
