"""Which of a fit's warnings decide a plan: then the answer is not supported by these data, and says so first.

A machine that changed while it was measured decides every plan whose margin is smaller than the change. Limits of
single steps hold whatever the model misses, for they are made of its errors on steps left out; but they say nothing
where B and S say nothing, nor of steps that nobody measured. Responses go by the mean steps that were measured, size by
size, so there an error of the curve is in the interval, and does not decide.
"""

import math
from collections.abc import Iterator, Sequence

from latfit.hardware.profile import ExecutionPath
from latfit.plan.result import Plan

TOLD = ("no_better_than_constant", "large_error", "drift", "autocorrelated")
"""Warnings of a fit that a plan repeats."""


def inherited(paths: Sequence[ExecutionPath]) -> list[str]:
    """What the fits warn of, in sentences with the path's name."""
    return [
        f"{path.name}: {warning.message}" for path in paths for warning in path.fit.warnings if warning.code in TOLD
    ]


def unsupported(plan: Plan, paths: Sequence[ExecutionPath]) -> list[str]:
    """Why the plan's answer is not supported by the data of the paths it rests on; empty where it is."""
    return [reason for path in paths for reason in _reasons(plan, path)]


def blind(path: ExecutionPath) -> bool:
    """Whether the fit knows nothing of what the size of a step does."""
    return path.fit.model == "constant" or any(w.code == "no_better_than_constant" for w in path.fit.warnings)


def _reasons(plan: Plan, path: ExecutionPath) -> Iterator[str]:
    if blind(path) and plan.rate_per_s is None:
        yield f"on {path.label} a constant predicts as well as B and S do, so no limit on them follows"
    shift = drift_of(path)
    chosen = next((row for row in plan.alternatives if row.chosen), None)
    margin = None if chosen is None else chosen.margin
    if shift is not None and (plan.rate_per_s is None or margin is None or abs(shift) > margin):
        yield f"steps on {path.label} changed by {shift:+.0%} while they were measured"
    rows = [row for row in plan.S_at_B if row.path == path.name]
    widest = max(rows, key=lambda row: math.inf if row.S_max is None else row.S_max, default=None)
    if plan.rate_per_s is None and path.quote is None and widest is not None and widest.extrapolated:
        yield f"steps of more than {path.fit.domain['S'][1]:,.0f} tokens on {path.label} were not measured"


def drift_of(path: ExecutionPath) -> float | None:
    """The largest relative shift of a path's steps within its trace; None where none was found."""
    if not any(warning.code == "drift" for warning in path.fit.warnings):
        return None
    by_phase = path.fit.intervals.get("by_phase", {}).values()
    runs = path.fit.diagnostics.get("drift", {}).get("runs", {}).values()
    shifts = [float(found["relative_shift"]) for found in (*by_phase, *runs) if "relative_shift" in found]
    return max(shifts, key=abs, default=None)
