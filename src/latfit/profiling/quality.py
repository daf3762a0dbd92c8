"""What makes a run less certain: drift, scatter, outliers, settling, differing processes, other load, too few repeats.

The drift test is a permutation test: without drift the visits of a cell are exchangeable, so the trend of their times,
centred within each cell and summed over cells, has a known mean and variance (Hoeffding 1951)."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from latfit.messages import Message as LatfitWarning
from latfit.profiling.host.isa import best_float32_isa, cpu_flags
from latfit.profiling.host.machine import LoadReading, sensible_threads
from latfit.profiling.result import OUTLIER_FACTOR, ProfileResult, Sample
from latfit.profiling.warnings import SYMPTOMS, warn
from latfit.stats import FloatArray, mad_sigma
from latfit.units import format_ms

DRIFT_Z = 3.0
MAX_SCATTER = 0.05  # robust relative sd within a cell; a quiet machine shows 1-2 %
MAX_OUTLIER_SHARE = 0.01
MAX_OTHER_CPUS = 0.1  # beyond the spare ones, on average; background services stay below
MIN_SAMPLES = 6
DAY_S = 86_400.0

# 95 % interval of a median of n normal samples: +- 1.96 x sqrt(pi/2) x sigma / sqrt(n)
_MEDIAN_WIDTH = 1.96 * math.sqrt(math.pi / 2)

Facts = Mapping[str, Any]


class DriftTest(NamedTuple):
    """Standard score of the trend, and relative change of a step's time from start to end of the run."""

    z: float
    change: float


def find_warnings(result: ProfileResult, load: LoadReading | None = None) -> tuple[LatfitWarning, ...]:
    """Return every warning about a run; `load` is what others used of the machine meanwhile."""
    last = [prediction] if result.prediction_error is not None else [repeats, unmeasured]
    found = [instability(result, load), *(check(result) for check in last)]
    return tuple(warning for warning in found if warning is not None)


def instability(
    result: ProfileResult, load: LoadReading | None, symptoms: "Mapping[str, Symptom] | None" = None
) -> LatfitWarning | None:
    """Return one warning about everything that disturbed the timing; None if nothing did."""
    checks = CHECKS if symptoms is None else symptoms
    found = {name: facts for name, check in checks.items() if (facts := check(result)) is not None}
    text = "; ".join(SYMPTOMS[name][0].format(**facts) for name, facts in found.items())
    if load is not None and load.other_cpus > load.spare_cpus + MAX_OTHER_CPUS:
        unstable = f" {warn('unstable_timing', symptoms=text, remedy='').message}" if found else ""
        return warn("other_load", others=load.other_cpus, spare=load.spare_cpus, unstable=unstable)
    return warn("unstable_timing", symptoms=text, remedy=SYMPTOMS[next(iter(found))][1]) if found else None


def drift_test(samples: tuple[Sample, ...]) -> DriftTest:
    """Test step times for a trend over the run, each relative to its cell; z = 0 if no cell was visited twice."""
    by_cell: dict[int, list[tuple[float, float]]] = {}
    for (cell, _), rows in visits_of(samples).items():
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


def visits_of(samples: tuple[Sample, ...]) -> dict[tuple[int, int], list[Sample]]:
    """Return the samples of each (cell, visit), warm-up steps aside."""
    found: dict[tuple[int, int], list[Sample]] = {}
    for sample in samples:
        if not sample.warmup:
            found.setdefault((sample.cell, sample.visit), []).append(sample)
    return found


def drift(result: ProfileResult) -> Facts | None:
    """A trend over the run that is significant and larger than the precision."""
    test = drift_test(result.samples)
    if abs(test.z) <= DRIFT_Z or abs(test.change) <= result.precision:
        return None
    size = f"{100 * abs(test.change):.1f} % {'slower' if test.change > 0 else 'faster'}"
    return {"change": f"{1 + test.change:.1f} times as slow" if test.change > 1 else size}


def scatter(result: ProfileResult) -> Facts | None:
    spreads = [relative_spread(times) for times in result.times_ms if len(times) >= MIN_SAMPLES]
    return {"spread": 100 * np.median(spreads)} if spreads and np.median(spreads) > MAX_SCATTER else None


def outliers(result: ProfileResult) -> Facts | None:
    slow = sum(int(np.sum(times > OUTLIER_FACTOR * np.median(times))) for times in result.times_ms if len(times))
    if slow <= max(2, MAX_OUTLIER_SHARE * result.steps):
        return None
    return {"slow": slow, "steps": result.steps, "factor": OUTLIER_FACTOR}


def settling(result: ProfileResult) -> Facts | None:
    """Steps that become faster after the warm-up: first against last sample of each visit, over all visits."""
    falls = np.array(
        [math.log(rows[0].T_ms / rows[-1].T_ms) for rows in visits_of(result.samples).values() if len(rows) > 1]
    )
    if len(falls) < MIN_SAMPLES:
        return None
    fall = float(np.median(falls))
    noise = 3 * mad_sigma(falls - fall) * math.sqrt(math.pi / 2 / len(falls))
    return {"fall": 100 * math.expm1(fall)} if fall > max(result.precision, noise) else None


def processes(result: ProfileResult) -> Facts | None:
    between = result.between_processes
    if between is None or 1.96 * between.sd / math.sqrt(between.processes) <= result.precision:
        return None
    return {"sd": 100 * between.sd}


Symptom = Callable[[ProfileResult], Facts | None]
CHECKS: Mapping[str, Symptom] = {
    "drift": drift,
    "scatter": scatter,
    "outliers": outliers,
    "settling": settling,
    "processes": processes,
}


def repeats(result: ProfileResult) -> LatfitWarning | None:
    """Cells whose median is not known well enough, and the budget that would do."""
    pairs = zip(result.measured, result.within_precision, strict=True)
    missed = [index for index, (measured, within) in enumerate(pairs) if measured and not within]
    if not missed:
        return None
    typical = float(np.median([relative_spread(times) for times in result.times_ms if len(times)]))
    budget_s = result.elapsed_s + sum(_missing_s(result, index, typical) for index in missed)
    return warn(
        "too_few_repeats" if budget_s <= DAY_S else "too_few_repeats_in_a_day",
        missed=len(missed),
        measured=sum(result.measured),
        precision=100 * result.precision,
        budget_s=math.ceil(budget_s / 10) * 10,
    )


def _missing_s(result: ProfileResult, index: int, typical: float) -> float:
    """Time to bring a cell within the precision. A disturbed cell looks worse than it will with more repeats, so at
    most three times the typical scatter is believed."""
    times = result.times_ms[index]
    spread = max(typical, min(relative_spread(times), 3 * typical))
    wanted = max((_MEDIAN_WIDTH * spread / result.precision) ** 2, len(times) + MIN_SAMPLES)
    overhead = result.elapsed_s / max(result.step_s, 1e-9) * len(result.samples) / max(1, result.steps)
    return (wanted - len(times)) * float(np.median(times)) / 1e3 * overhead


def unmeasured(result: ProfileResult) -> LatfitWarning | None:
    limited = {limit.cell for limit in result.limits}
    missing = [
        c for c, measured in zip(result.cells, result.measured, strict=True) if not measured and c not in limited
    ]
    if not missing:
        return None
    largest, budget = max(missing, key=lambda cell: cell.S), format_ms(result.budget_s * 1e3)
    return warn("not_measured", missing=len(missing), cells=len(result.cells), largest=largest, budget=budget)


def prediction(result: ProfileResult) -> LatfitWarning | None:
    """An adaptive run leaves cells unmeasured on purpose, but the measured ones must determine a fit."""
    wide = result.prediction_error is not None and result.prediction_error >= 1
    return warn("prediction_wide", budget=format_ms(result.budget_s * 1e3)) if wide else None


def device_warnings(facts: Facts) -> list[LatfitWarning]:
    """Fewer threads than CPUs because others are busy; a BLAS that runs narrower kernels than the CPU could."""
    found, threads, most = [], facts.get("threads"), sensible_threads()
    if facts.get("threads_idle") and threads and threads < most:
        found.append(warn("busy_cpus", threads=threads, most=most))
    if facts.get("device") == "numpy" and facts.get("isa") == "avx2" and best_float32_isa(cpu_flags()) == "avx512":
        found.append(warn("narrow_kernels"))
    return found


def relative_spread(times: FloatArray) -> float:
    """Robust standard deviation of a cell's times over their median."""
    middle = float(np.median(times))
    return mad_sigma(times - middle) / middle
