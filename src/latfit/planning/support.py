"""Whether a fit supports a plan, and which steps to measure next. Rules: docs/theory/planning.md, "Support by the
data".
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from latfit.engines import graph_sizes_option
from latfit.hardware import CERTAIN, ExecutionPath
from latfit.messages import Message, message
from latfit.model import FitResult, fitted_identity, step_draws
from latfit.planning.result import Doubt, Plan, TokenRange
from latfit.planning.steps.limits import levels_for

MOST = 6
APART = 1.6  # steps within this factor of each other, in B and in S, count as duplicates
GRID = 24
REPEATED = ("no_better_than_constant", "large_error", "drift")  # fit warnings that a plan repeats


def doubtful_steps(path: ExecutionPath, sla_ms: float, percentile: float) -> list[Doubt]:
    """Return measured-range steps (B, S) whose chance to meet the SLA is 2.5 to 97.5 % over the fit's draws."""
    (B_low, B_high), (S_low, S_high) = path.fit.domain["B"], path.fit.domain["S"]
    sizes_B = np.unique(np.round(np.geomspace(max(B_low, 1), B_high, GRID)))
    sizes_S = np.unique(np.round(np.geomspace(max(S_low, 1), S_high, 3 * GRID)))
    B, S = (axis.ravel() for axis in np.meshgrid(sizes_B, sizes_S))
    kept = (S >= B) & (path.fit.knows_prefill | ~path.fit.holds_prefill(B, S))
    B, S = B[kept], S[kept]
    drawn = step_draws(path.fit, {"B": B, "S": S}) if len(B) else None
    if drawn is None:
        return []
    T = drawn * levels_for(path, percentile).factors(B, S)
    chance = np.mean(sla_ms >= T, axis=0)
    low, high = np.quantile(T, CERTAIN, axis=0)
    unsure = np.flatnonzero((chance > CERTAIN[0]) & (chance < CERTAIN[1]))
    found: list[Doubt] = []
    for i in unsure[np.argsort(np.abs(chance[unsure] - 0.5), kind="stable")]:
        b, s = int(B[i]), int(S[i])
        if all(max(b / d.B, d.B / b) > APART or max(s / d.S, d.S / s) > APART for d in found):
            found.append(Doubt(path.name, b, s, float(chance[i]), float(low[i]), float(high[i])))
        if len(found) == MOST:
            break
    return found


def inherited(paths: Sequence[ExecutionPath]) -> list[Message]:
    told = [warning.about(path.name) for path in paths for warning in path.fit.warnings if warning.code in REPEATED]
    kernels = [path.name for path in paths if path.fit.data.more.get("host_time") == "none"]
    return [*told, *(message("no_host_time", path=name) for name in kernels)]


def why_unsupported(plan: Plan, path: ExecutionPath) -> Iterator[Message]:
    """Yield why the data of a path do not support a plan's answer."""
    shift = drift_of(path)
    margins = [row.margin for row in plan.strategies if row.margin is not None and (row.chosen or not plan.chosen)]
    nearest = abs(max(margins)) if margins else math.inf if plan.strategies else 0.0
    if shift is not None and abs(shift) > nearest:
        yield message("drifted", path=path.label, shift=shift)
    used = plan.rate_per_s is None or (plan.chosen is not None and path.label in plan.chosen.paths)
    constant = path.fit.model == "constant" or any(each.code == "no_better_than_constant" for each in path.fit.warnings)
    if used and constant:
        yield message("no_limit_follows", path=path.label)
    if plan.rate_per_s is not None:
        return
    rows = [row for row in plan.S_at_B if row.path == path.name]
    widest = max(rows, key=lambda row: math.inf if row.S_max is None else row.S_max, default=None)
    if path.nominal is None and widest is not None and (far := how_far(path, widest)):
        yield message("beyond_measured", path=path.label, far=far)


def how_far(path: ExecutionPath, step: TokenRange) -> str:
    """Describe how far the largest step of a range lies beyond the measured ones; empty if inside."""
    if step.S_max is None:
        return f"S without an end, measured up to {path.fit.domain['S'][1]:,.0f}"
    return path.fit.farthest(np.array([float(step.B)]), np.array([float(step.S_max)]))


def above_cliffs(fits: Iterable[FitResult], max_num_seqs: int | None, budget: int | None) -> list[Message]:
    """Return warnings on settings just above a cliff, where a full step makes fewer tokens/s than at the cliff."""
    found = []
    settings = {"B": ("max_num_seqs", max_num_seqs), "S": ("max_num_batched_tokens", budget)}
    for fit in fits:
        graphs = graph_sizes_option(fitted_identity(fit).get("engine", ""))
        for cliff in fit.diagnostics.cliffs.found if fit.diagnostics.cliffs else ():
            (setting, value), longer = settings[cliff.axis], cliff.step_pct / 100
            if value is None or not cliff.size < value < cliff.size * (1 + longer):
                continue
            steps = "decode steps" if cliff.axis == "B" else "steps with prefill"
            hint = f", or add {value:,} to {graphs}" if graphs and cliff.axis == "B" else ""
            about = {"setting": setting, "steps": steps, "graphs": hint}
            found.append(message("above_cliff", **about, value=value, longer=longer, size=cliff.size))
    return found


def drift_of(path: ExecutionPath) -> float | None:
    """Return the largest relative drift of a path's steps; None if none was found."""
    if not any(warning.code == "drift" for warning in path.fit.warnings):
        return None
    by_phase = path.fit.intervals.get("by_phase", {}).values()
    drift = path.fit.diagnostics.drift
    shifts = [change.relative_shift for change in drift.runs.values()] if drift else []
    shifts += [float(found["relative_shift"]) for found in by_phase if "relative_shift" in found]
    return max(shifts, key=abs, default=None)
