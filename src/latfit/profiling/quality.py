"""What makes a run less certain: drift, scatter, outliers, differing processes, other load, too few repeats.

The drift test is a permutation test: without drift the visits of a cell are exchangeable, so the trend of their times,
centred within each cell and summed over cells, has a known mean and variance (Hoeffding 1951)."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from latfit.messages import Message as LatfitWarning
from latfit.profiling.host.machine import LoadReading, sensible_threads
from latfit.profiling.result import OUTLIER_FACTOR, ProfileResult, Sample
from latfit.profiling.warnings import warn
from latfit.stats import FloatArray, mad_sigma
from latfit.units import format_ms

DRIFT_Z = 3.0
MAX_SCATTER = 0.05  # robust relative sd within a cell; a quiet machine shows 1-2 %
MAX_OUTLIER_SHARE = 0.01
MAX_OTHER_CPUS = 0.1  # beyond the spare ones, on average; background services stay below
MIN_SAMPLES = 6
DAY_S = 86_400.0


class DriftTest(NamedTuple):
    """Standard score of the trend, and relative change of a step's time from start to end of the run."""

    z: float
    change: float


def find_warnings(
    result: ProfileResult, load: LoadReading | None = None, design: str = "grid"
) -> tuple[LatfitWarning, ...]:
    """Return every warning about a run; `load` is what others used of the machine meanwhile. The adaptive design leaves
    cells out and measures others once on purpose."""
    missing = [] if design == "adaptive" else [warn_of_few_repeats(result), warn_of_unmeasured(result)]
    return tuple(warning for warning in (warn_of_instability(result, load), *missing) if warning is not None)


def warn_of_instability(
    result: ProfileResult, load: LoadReading | None, names: Sequence[str] | None = None
) -> LatfitWarning | None:
    """Return one warning about all symptoms (or those named) that disturbed the timing; None if nothing did."""
    found = {name: text for name in names or SYMPTOMS if (text := SYMPTOMS[name][0](result)) is not None}
    text = "; ".join(found.values())
    if load is not None and load.other_cpus > load.spare_cpus + MAX_OTHER_CPUS:
        unstable = f" {warn('unstable_timing', symptoms=text, remedy='').message}" if found else ""
        return warn("other_load", others=load.other_cpus, spare=load.spare_cpus, unstable=unstable)
    return warn("unstable_timing", symptoms=text, remedy=SYMPTOMS[next(iter(found))][1]) if found else None


def compute_drift(samples: Sequence[Sample]) -> DriftTest:
    """Test step times for a trend over the run, each relative to its cell; z = 0 if no cell was visited twice."""
    by_cell: dict[int, list[tuple[float, float]]] = {}
    for rows in split_by_visit(samples):
        middle = (rows[0].t_s + rows[-1].t_s) / 2
        by_cell.setdefault(rows[0].cell, []).append((middle, math.log(np.median([row.T_ms for row in rows]))))
    shared = variance = spread_t = 0.0
    for points in by_cell.values():
        if len(points) > 1:
            t, r = (column - column.mean() for column in np.array(points, dtype=np.float64).T)
            shared, spread_t = shared + float(t @ r), spread_t + float(t @ t)
            variance += float(t @ t) * float(r @ r) / (len(points) - 1)
    if variance == 0:
        return DriftTest(0.0, 0.0)
    span = max(sample.t_s for sample in samples) - min(sample.t_s for sample in samples)
    return DriftTest(shared / math.sqrt(variance), math.expm1(shared / spread_t * span))


def split_by_visit(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return the samples of each visit, warm-up steps aside."""
    found: dict[tuple[int, int], list[Sample]] = {}
    for sample in samples:
        if not sample.warmup:
            found.setdefault((sample.cell, sample.visit), []).append(sample)
    return list(found.values())


def describe_drift(result: ProfileResult) -> str | None:
    """A trend over the run that is significant and larger than the precision."""
    test = compute_drift(result.samples)
    if abs(test.z) <= DRIFT_Z or abs(test.change) <= result.precision:
        return None
    size = f"{100 * abs(test.change):.1f} % {'slower' if test.change > 0 else 'faster'}"
    change = f"{1 + test.change:.1f} times as slow" if test.change > 1 else size
    return f"steps became {change} from start to end of the run"


def describe_scatter(result: ProfileResult) -> str | None:
    spreads = [relative_spread(times) for times in result.times_ms if len(times) >= MIN_SAMPLES]
    if not spreads or np.median(spreads) <= MAX_SCATTER:
        return None
    return f"repeats of a typical cell scatter by {100 * np.median(spreads):.1f} %"


def describe_outliers(result: ProfileResult) -> str | None:
    slow = sum(int(np.sum(times > OUTLIER_FACTOR * np.median(times))) for times in result.times_ms if len(times))
    if slow <= max(2, MAX_OUTLIER_SHARE * result.steps):
        return None
    return f"{slow} of {result.steps} steps took more than {OUTLIER_FACTOR} times their cell's median"


def describe_process_spread(result: ProfileResult) -> str | None:
    between = result.between_processes
    if between is None or 1.96 * between.sd / math.sqrt(between.processes) <= result.precision:
        return None
    return f"medians differ by {100 * between.sd:.1f} % between processes"


QUIET = "Close other programs, leave a core free (--threads), and measure longer (--budget)."
SYMPTOMS: Mapping[str, tuple[Callable[[ProfileResult], str | None], str]] = {
    "drift": (
        describe_drift,
        "The CPU or GPU may have heated up, changed its clock, or been shared: let it cool, fix its clock (cpupower"
        " frequency-set -g performance; nvidia-smi --lock-gpu-clocks), and measure again.",
    ),
    "scatter": (describe_scatter, QUIET),
    "outliers": (describe_outliers, QUIET),
    "processes": (describe_process_spread, "Take more processes (--processes 6), or pin them (--pin)."),
}
"""Signs of unstable timing in words, and the remedy if it is the first of them."""


def warn_of_few_repeats(result: ProfileResult) -> LatfitWarning | None:
    """Cells whose median is not known well enough, and the budget that would do."""
    pairs = zip(result.measured, result.within_precision, strict=True)
    missed = [index for index, (measured, within) in enumerate(pairs) if measured and not within]
    if not missed:
        return None
    # Half widths shrink with the root of the time. The median is not moved by the few cells that a disturbance hit.
    excess = np.median([result.intervals[index].relative_half_width / result.precision for index in missed])
    budget_s = min(result.elapsed_s * float(excess) ** 2, 2 * DAY_S)
    return warn(
        "too_few_repeats" if budget_s <= DAY_S else "too_few_repeats_in_a_day",
        missed=len(missed),
        measured=sum(result.measured),
        precision=100 * result.precision,
        budget_s=math.ceil(budget_s / 10) * 10,
    )


def warn_of_unmeasured(result: ProfileResult) -> LatfitWarning | None:
    """Cells that the budget did not reach."""
    limited = {limit.cell for limit in result.limits}
    pairs = zip(result.cells, result.measured, strict=True)
    missing = [cell for cell, measured in pairs if not measured and cell not in limited]
    if not missing:
        return None
    largest, budget = max(missing, key=lambda cell: cell.S), format_ms(result.budget_s * 1e3)
    return warn("not_measured", missing=len(missing), cells=len(result.cells), largest=largest, budget=budget)


def find_device_warnings(facts: Mapping[str, Any]) -> list[LatfitWarning]:
    """Warn if fewer threads than CPUs ran because others keep CPUs busy."""
    threads, most = facts.get("threads"), sensible_threads()
    return (
        [warn("busy_cpus", threads=threads, most=most)]
        if facts.get("threads_idle") and threads and threads < most
        else []
    )


def relative_spread(times: FloatArray) -> float:
    """Robust standard deviation of a cell's times over their median."""
    middle = float(np.median(times))
    return mad_sigma(times - middle) / middle
