"""Warnings about a run: drift, noise, outliers, differing processes, other load, too few repeats.

Drift is a permutation test: without drift the visits of a cell are exchangeable, so the trend of their centred times
has a known mean and variance (Hoeffding 1951).
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from latfit.messages import Message, message
from latfit.profiling.host.machine import LoadReading, sensible_threads
from latfit.profiling.result import OUTLIER_FACTOR, ProfileResult
from latfit.stats import mad_sigma
from latfit.units import format_ms

DRIFT_Z = 3.0
MAX_SCATTER = 0.05  # robust relative sd within a cell; a quiet machine shows 1-2 %
MAX_OUTLIER_SHARE = 0.01
MAX_OTHER_CPUS = 0.1  # beyond the spare ones, on average; background services stay below
MIN_SAMPLES = 6
QUIET = "Close other programs, leave a core free (--threads), and measure longer (--budget)."
COOLING = (
    "The CPU or GPU may have heated up, changed its clock, or been shared: let it cool, fix its clock (cpupower"
    " frequency-set -g performance; nvidia-smi --lock-gpu-clocks), and measure again."
)
SEVERAL = "Take more processes (--processes 6), or pin them (--pin)."


class DriftTest(NamedTuple):
    """Standard score of the trend, and relative change from start to end."""

    z: float
    change: float


def find_warnings(
    result: ProfileResult, load: LoadReading | None, device: Mapping[str, Any], design: str = "grid"
) -> list[Message]:
    """Return what makes a profile less certain; the adaptive design leaves out cells on purpose. device: its facts."""
    found = []
    threads, most = device.get("threads"), sensible_threads()
    spare = 0.0 if load is None else max(0.0, load.cpus - (threads or most))
    if load is not None and load.other_cpus > spare + MAX_OTHER_CPUS:
        found.append(message("other_load", others=load.other_cpus, spare=spare))
    elif device.get("threads_idle") and threads and threads < most:
        found.append(message("busy_cpus", threads=threads, most=most))
    elif symptoms := find_symptoms(result):
        text = "; ".join(text for text, _ in symptoms)
        found.append(message("unstable_timing", symptoms=text, remedy=symptoms[0][1]))
    return found if design == "adaptive" else [*found, *warn_of_few_repeats(result), *warn_of_unmeasured(result)]


def find_symptoms(result: ProfileResult) -> list[tuple[str, str]]:
    found = []
    drift = compute_drift(result)
    if abs(drift.z) > DRIFT_Z and abs(drift.change) > result.precision:
        size = f"{100 * abs(drift.change):.1f} % {'slower' if drift.change > 0 else 'faster'}"
        found.append((f"steps became {size} from start to end of the run", COOLING))
    cells = result.relative.groupby(result.frame.cell)
    spreads = [mad_sigma(times.to_numpy() - 1) for _, times in cells if len(times) >= MIN_SAMPLES]
    if spreads and np.median(spreads) > MAX_SCATTER:
        found.append((f"repeats of a typical cell scatter by {100 * np.median(spreads):.1f} %", QUIET))
    slow = int(np.sum(result.relative > OUTLIER_FACTOR))
    if slow > max(2, MAX_OUTLIER_SHARE * result.steps):
        text = f"{slow} of {result.steps} steps took more than {OUTLIER_FACTOR} times their cell's median"
        found.append((text, QUIET))
    between = result.between_processes
    if between is not None and 1.96 * between.sd_pct / math.sqrt(between.processes) > 100 * result.precision:
        found.append((f"medians differ by {between.sd_pct:.1f} % between processes", SEVERAL))
    return found


def compute_drift(result: ProfileResult) -> DriftTest:
    """Test times relative to their cell for a trend; z = 0 if no cell was visited twice."""
    visits = result.frame.groupby(["cell", "visit"]).agg(t=("t_s", "mean"), r=("T_ms", "median"))
    visits["r"] = np.log(visits.r)
    centred = visits - visits.groupby("cell").transform("mean")
    cells = centred.assign(tt=centred.t**2, rr=centred.r**2, tr=centred.t * centred.r, n=1.0).groupby("cell").sum()
    cells = cells[cells.n > 1]
    variance = float((cells.tt * cells.rr / (cells.n - 1)).sum())
    if variance == 0:
        return DriftTest(0.0, 0.0)
    starts = [sample.t_s for sample in result.samples]
    change = math.expm1(cells.tr.sum() / cells.tt.sum() * (max(starts) - min(starts)))
    return DriftTest(float(cells.tr.sum()) / math.sqrt(variance), change)


def warn_of_few_repeats(result: ProfileResult) -> list[Message]:
    """Warn of imprecise medians, with the budget that would do."""
    pairs = zip(result.measured, result.within_precision, strict=True)
    missed = [index for index, (measured, within) in enumerate(pairs) if measured and not within]
    if not missed:
        return []
    # Half widths shrink with the root of the time. The median is not moved by the few cells that a disturbance hit.
    excess = np.median([result.intervals[index].relative_half_width / result.precision for index in missed])
    budget_s = math.ceil(min(result.elapsed_s * float(excess) ** 2, 1e9) / 10) * 10
    facts = {"missed": len(missed), "measured": sum(result.measured), "precision": 100 * result.precision}
    return [message("too_few_repeats", **facts, budget_s=budget_s)]


def warn_of_unmeasured(result: ProfileResult) -> list[Message]:
    limited = {limit.cell for limit in result.limits}
    pairs = zip(result.cells, result.measured, strict=True)
    missing = [cell for cell, measured in pairs if not measured and cell not in limited]
    if not missing:
        return []
    largest, budget = max(missing, key=lambda cell: cell.S), format_ms(result.budget_s * 1e3)
    return [message("not_measured", missing=len(missing), cells=len(result.cells), largest=largest, budget=budget)]
