"""What makes a run less certain: drift, noise, outliers, differing processes, other load, too few repeats.

The drift test is a permutation test: without drift the visits of a cell are exchangeable, so the trend of their times,
centred within each cell and summed over cells, has a known mean and variance (Hoeffding 1951)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from latfit.messages import Message
from latfit.profiling.host.machine import LoadReading, sensible_threads
from latfit.profiling.result import OUTLIER_FACTOR, ProfileResult, Sample
from latfit.profiling.warnings import COOLING, QUIET, SEVERAL, warn
from latfit.stats import mad_sigma
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


def find_warnings(result: ProfileResult, load: LoadReading | None = None, design: str = "grid") -> list[Message]:
    """Return every warning; the adaptive design leaves cells out and measures others once on purpose."""
    symptoms = find_symptoms(result)
    text, found = "; ".join(text for text, _ in symptoms), []
    if load is not None and load.other_cpus > load.spare_cpus + MAX_OTHER_CPUS:
        unstable = f" {warn('unstable_timing', symptoms=text, remedy='').message}" if symptoms else ""
        found.append(warn("other_load", others=load.other_cpus, spare=load.spare_cpus, unstable=unstable))
    elif symptoms:
        found.append(warn("unstable_timing", symptoms=text, remedy=symptoms[0][1]))
    return found if design == "adaptive" else [*found, *warn_of_few_repeats(result), *warn_of_unmeasured(result)]


def find_symptoms(result: ProfileResult) -> list[tuple[str, str]]:
    """Return the signs of unstable timing in words, each with its remedy."""
    found = []
    drift = compute_drift(result.samples)
    if abs(drift.z) > DRIFT_Z and abs(drift.change) > result.precision:
        size = f"{100 * abs(drift.change):.1f} % {'slower' if drift.change > 0 else 'faster'}"
        change = f"{1 + drift.change:.1f} times as slow" if drift.change > 1 else size
        found.append((f"steps became {change} from start to end of the run", COOLING))
    times_ms = [times for times in result.times_ms if len(times)]
    spreads = [mad_sigma(T - np.median(T)) / np.median(T) for T in times_ms if len(T) >= MIN_SAMPLES]
    if spreads and np.median(spreads) > MAX_SCATTER:
        found.append((f"repeats of a typical cell scatter by {100 * np.median(spreads):.1f} %", QUIET))
    slow = sum(int(np.sum(T / np.median(T) > OUTLIER_FACTOR)) for T in times_ms)
    if slow > max(2, MAX_OUTLIER_SHARE * result.steps):
        text = f"{slow} of {result.steps} steps took more than {OUTLIER_FACTOR} times their cell's median"
        found.append((text, QUIET))
    between = result.between_processes
    if between is not None and 1.96 * between.sd / math.sqrt(between.processes) > result.precision:
        found.append((f"medians differ by {100 * between.sd:.1f} % between processes", SEVERAL))
    return found


def compute_drift(samples: Sequence[Sample]) -> DriftTest:
    """Test step times for a trend over the run, each relative to its cell; z = 0 if no cell was visited twice."""
    visits: dict[tuple[int, int], list[Sample]] = {}
    for sample in samples:
        if not sample.warmup:
            visits.setdefault((sample.cell, sample.visit), []).append(sample)
    by_cell: dict[int, list[tuple[float, float]]] = {}
    for (cell, _), rows in visits.items():
        middle = (rows[0].t_s + rows[-1].t_s) / 2
        by_cell.setdefault(cell, []).append((middle, math.log(np.median([row.T_ms for row in rows]))))
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


def warn_of_few_repeats(result: ProfileResult) -> list[Message]:
    """Warn of cells whose median is not known well enough, with the budget that would do."""
    pairs = zip(result.measured, result.within_precision, strict=True)
    missed = [index for index, (measured, within) in enumerate(pairs) if measured and not within]
    if not missed:
        return []
    # Half widths shrink with the root of the time. The median is not moved by the few cells that a disturbance hit.
    excess = np.median([result.intervals[index].relative_half_width / result.precision for index in missed])
    budget_s = min(result.elapsed_s * float(excess) ** 2, 2 * DAY_S)
    message = warn(
        "too_few_repeats" if budget_s <= DAY_S else "too_few_repeats_in_a_day",
        missed=len(missed),
        measured=sum(result.measured),
        precision=100 * result.precision,
        budget_s=math.ceil(budget_s / 10) * 10,
    )
    return [message]


def warn_of_unmeasured(result: ProfileResult) -> list[Message]:
    """Warn of cells that the budget did not reach."""
    limited = {limit.cell for limit in result.limits}
    pairs = zip(result.cells, result.measured, strict=True)
    missing = [cell for cell, measured in pairs if not measured and cell not in limited]
    if not missing:
        return []
    largest, budget = max(missing, key=lambda cell: cell.S), format_ms(result.budget_s * 1e3)
    return [warn("not_measured", missing=len(missing), cells=len(result.cells), largest=largest, budget=budget)]


def find_device_warnings(facts: Mapping[str, Any]) -> list[Message]:
    """Warn if fewer threads than CPUs ran because others keep CPUs busy."""
    threads, most = facts.get("threads"), sensible_threads()
    is_fewer = facts.get("threads_idle") and threads and threads < most
    return [warn("busy_cpus", threads=threads, most=most)] if is_fewer else []
