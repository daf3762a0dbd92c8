"""Messages about a fit: the conditions under which they apply."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from latfit.fitting.checking.crossval import PHASE_ROWS
from latfit.fitting.data import FitData
from latfit.fitting.problem import FitProblem
from latfit.messages import Message as LatfitWarning, message
from latfit.model import CONTEXT, Baseline, Cliff, Diagnostics, FitResult, Identifiability
from latfit.units import format_percent

POOLED = "pooled_systems"
EXPLAINED_BY_POOLING = ("noise_floor", "large_error")  # say again that several systems differ

LARGE_ERROR_PCT, MIN_ERROR_PCT = 15.0, 5.0
MIN_CONSTANT_ERROR_PCT = 5.0  # below it, a constant's error is noise about a latency that does not vary
ROUNDING_PCT = 1e-6
MIN_FLOOR_PCT = 5.0  # a smaller noise floor is not worth a message
FLOOR_REACHED = 1.3  # times the noise floor: up to here noise limits the fit
REJECTED_FLOORS, REJECTED_LINES = 3.0, 2.0  # times the noise floor, or the line's error: rejected as a path
AS_GOOD_PCT = 0.1
MIN_DRIFT = 0.05  # share of the residuals' variance due to changes of level
FAR_BETTER = 0.7  # times an error: clearly better
MAX_CLIFFS = 5  # named in a note
MIN_CELLS_FOR_90_PCT = 19  # a conformal limit at 95 % exists from n = 1 / (1 - 0.95) - 1 on


def cautions(
    problem: FitProblem,
    data: FitData,
    values: Mapping[str, float],
    identifiability: Identifiability,
    error: float,
    baselines: Mapping[str, Baseline],
    diagnostics: Diagnostics,
) -> Iterator[LatfitWarning]:
    """Yield the messages on a usable fit. error: held-out MAPE in percent, in sample where nothing was held out."""
    for name, ends in problem.options.bounds.items():
        for end in ends:
            if np.isclose(values[name], end, rtol=1e-9, atol=0):
                yield message("at_bound", name=name, end=end)
    held_out = {name: baseline.cv.mape_pct for name, baseline in baselines.items() if baseline.cv.mape_pct is not None}
    line, constant = held_out.get("linear"), held_out.get("constant")
    floor, model = (diagnostics.lack_of_fit or {}).get("noise_floor_pct"), problem.model.name
    noisy = floor is not None and error < FLOOR_REACHED * floor
    enough = FAR_BETTER * error if model == "constant" else error + AS_GOOD_PCT
    as_good = line is not None and (line <= enough or identifiability.line_as_good)
    if line is not None and as_good and model != "linear" and error > ROUNDING_PCT:
        how = "better" if line < FAR_BETTER * error else "as well"
        yield message("line_as_good", how=how, line=format_percent(line), error=format_percent(error))
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
            why = f"Use --model {best} ({format_percent(held_out[best])})."
        yield message("large_error", error=format_percent(error), why=why)
    if diagnostics.drift and diagnostics.drift.variance_share >= MIN_DRIFT:
        yield message("drift", sentence=diagnostics.drift.sentence)


def missing_intervals(intervals: Mapping[str, Any]) -> Iterator[LatfitWarning]:
    """Yield a message where single steps have no 90 % interval: of all, or of a phase with rows enough to count."""
    found = intervals.get("by_phase", {})
    if not found:
        yield message("no_interval_at_all")
    silent = {p: one for p, one in found.items() if one["n"] >= PHASE_ROWS and one["ratio_quantiles"]["0.95"] is None}
    if silent:
        phases = [f"{phase} steps ({one['n']:,} in {one['cells']:,} cells)" for phase, one in silent.items()]
        remedy = f"Measure at least {MIN_CELLS_FOR_90_PCT} (B, S) cells of each."
        if any(one["in_time_share"] < 1 for one in silent.values()):
            remedy = "Neighbouring steps are alike: fit several separate runs together (column run), or a longer one."
        yield message("no_interval", phases=" and ".join(phases), remedy=remedy)


def keeps_out(found: FitResult, max_error_pct: float | None = None) -> LatfitWarning | None:
    """Return why a usable fit should not be entered into a hardware profile; None where it may be.

    Steps of several systems are no path, nor is an error above `max_error_pct`; without it, one above 5 % and twice
    that of a line, or above 15 % and three times the noise floor.
    """
    error = found.cross_validation.mape_pct or found.metrics.mape_pct
    if error is None or not found.status.ok:
        return None
    if (pooled := next((each for each in found.warnings if each.code == POOLED), None)) is not None:
        return pooled
    line, why = found.baselines.get("linear", Baseline()), ""
    floor, baseline = (found.diagnostics.lack_of_fit or {}).get("noise_floor_pct"), line.cv.mape_pct or line.mape_pct
    if max_error_pct is not None:
        why = f"above the allowed {format_percent(max_error_pct)}" if error > max_error_pct else ""
    elif baseline is not None and error > max(REJECTED_LINES * baseline, MIN_ERROR_PCT):
        why = f"and that of the linear baseline {format_percent(baseline)}"
    elif floor is not None and error > max(REJECTED_FLOORS * floor, LARGE_ERROR_PCT):
        why = f"and repeats of the same step differ by {format_percent(floor)} only"
    remedy = "Measure it again" if found.cross_validation.selection else "Use --model auto"
    if not why:
        return None
    return message("not_entered", model=found.model, error=format_percent(error), why=why, remedy=remedy)


def cliff_notes(cliffs: Sequence[Cliff]) -> Iterator[LatfitWarning]:
    """Yield a note on the cliffs of each kind of step, the highest first."""
    for axis, steps in (("B", "Decode steps"), ("S", "Steps with prefill")):
        highest = sorted((each for each in cliffs if each.axis == axis), key=lambda each: -each.step_pct)
        if highest:
            sizes = [f"{each.size:,} ({format_percent(each.step_pct, signed=True)})" for each in highest[:MAX_CLIFFS]]
            cost = format_percent(max(each.cost_pct for each in highest))
            yield message("cliffs", steps=steps, axis=axis, sizes=", ".join(sizes), cost=cost)


def _why_large(data: FitData, columns: Sequence[str]) -> str:
    """Return the likely cause of a large error. columns: what the model reads."""
    if CONTEXT not in columns and CONTEXT in data.steps and np.ptp(data.steps[CONTEXT]) > 0:
        return (
            "The cached context varies and this model does not use it: take --model context, or fit rows of similar"
            " context with --where."
        )
    if data.run is not None and len(np.unique(data.run)) > 1:
        return "Check the residuals by run in the report: the runs may differ in more than B and S."
    return "Check the residuals in the report: latency depends on something besides B and S."
