"""What makes a run less certain, found in its samples and in what else the machine did.

Drift is tested with a trend that needs no assumption on the noise. A visit of a cell contributes the logarithm r of its
median time, at the middle t of the visit. Cells differ in level, so both are centred within the cell, and the statistic
is the sum over cells of sum (t - t_mean)(r - r_mean). Without drift the visits of a cell are exchangeable: under all
orders of r its term has mean 0 and variance sum (t - t_mean)^2 sum (r - r_mean)^2 / (n - 1), so z = sum / sqrt(sum of
variances) is about standard normal over many cells (Hoeffding's combinatorial central limit theorem). The order of the
cells is shuffled in every round, which is what makes t differ from the cell's place in the grid. An alarm needs both
|z| > 3 and a change over the run larger than the precision asked for: smaller drift is real but does not matter.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from latfit.profiling.host.machine import LoadReading
from latfit.profiling.result import OUTLIER_FACTOR, ProfileResult, Sample
from latfit.stats import FloatArray, mad_sigma
from latfit.units import format_ms
from latfit.warning import LatfitWarning

DRIFT_Z = 3.0
SPREAD = 0.05
"""Robust relative standard deviation within a cell from which timing is called unstable: a quiet machine
shows 1-2 %."""
HICCUP_SHARE = 0.01
OTHER_CPUS = 0.1
"""CPUs beyond the spare ones that others may use on average; background services stay below."""

LONGEST_S = 86_400.0

# 95 % interval of a median of n normal samples: +- 1.96 x sqrt(pi/2) x sigma / sqrt(n)
_MEDIAN_WIDTH = 1.96 * math.sqrt(math.pi / 2)
_FEWEST_SAMPLES = 6


@dataclass(frozen=True)
class DriftTest:
    """z: standard score of the trend. change: relative change of a step's time from start to end of the
    run."""

    z: float
    change: float


def find_warnings(result: ProfileResult, load: LoadReading | None = None) -> tuple[LatfitWarning, ...]:
    """Every warning about `result`; `load` is what others used of the machine meanwhile, where that is known."""
    symptoms = (symptom(result) for symptom in (drift, _scatter, _hiccups, _settling, _processes))
    adaptive = result.prediction_error is not None
    found = (
        instability(symptoms, load),
        *((_prediction(result),) if adaptive else (_repeats(result), _unmeasured(result))),
    )
    return tuple(warning for warning in found if warning is not None)


def drift_test(samples: tuple[Sample, ...]) -> DriftTest:
    """Trend of step times over the run, each relative to its cell; z = 0 where no cell was visited twice."""
    visits: dict[tuple[int, int], list[Sample]] = {}
    for sample in samples:
        if not sample.warmup:
            visits.setdefault((sample.cell, sample.visit), []).append(sample)
    by_cell: dict[int, list[tuple[float, float]]] = {}
    for (cell, _), rows in visits.items():
        middle = (rows[0].t_s + rows[-1].t_s) / 2
        by_cell.setdefault(cell, []).append((middle, math.log(np.median([row.T_ms for row in rows]))))
    shared = variance = spread_t = 0.0
    span = max((sample.t_s for sample in samples), default=0.0) - min((sample.t_s for sample in samples), default=0.0)
    for points in by_cell.values():
        if len(points) < 2:
            continue
        t, r = (column - column.mean() for column in np.array(points, dtype=np.float64).T)
        shared += float(t @ r)
        spread_t += float(t @ t)
        variance += float(t @ t) * float(r @ r) / (len(points) - 1)
    if variance == 0:
        return DriftTest(0.0, 0.0)
    return DriftTest(shared / math.sqrt(variance), math.expm1(shared / spread_t * span))


@dataclass(frozen=True)
class Symptom:
    """A sign of unstable timing, as part of a sentence, and what to do about it if it is the first one."""

    text: str
    remedy: str = "Close other programs, leave a core free (--threads), and measure longer (--budget)."


def instability(symptoms: Iterable[Symptom | None], load: LoadReading | None) -> LatfitWarning | None:
    """One warning about everything that disturbed the timing; None where nothing did."""
    found = [each for each in symptoms if each is not None]
    busy = load is not None and load.other_cpus > load.spare_cpus + OTHER_CPUS
    sentences = []
    if busy and load is not None:
        sentences.append(
            f"Other programs kept {load.other_cpus:.1f} CPUs busy on average, and {load.spare_cpus:.0f} were left to"
            " them."
        )
    if found:
        sentences.append(f"Timing is unstable: {'; '.join(each.text for each in found)}.")
    if not sentences:
        return None
    remedy = "Stop them and measure again, or leave them a core with --threads." if busy else found[0].remedy
    return LatfitWarning("other_load" if busy else "unstable_timing", " ".join(sentences), remedy)


def drift(result: ProfileResult) -> Symptom | None:
    """A trend of step times over the run that is significant and larger than the precision."""
    test = drift_test(result.samples)
    if abs(test.z) <= DRIFT_Z or abs(test.change) <= result.precision:
        return None
    size = f"{100 * abs(test.change):.1f} % {'slower' if test.change > 0 else 'faster'}"
    if test.change > 1:
        size = f"{1 + test.change:.1f} times as slow"
    return Symptom(
        f"steps became {size} from start to end of the run",
        "The CPU may have heated up, changed its clock, or been shared: let it cool, fix its frequency "
        "(cpupower frequency-set -g performance), and measure again.",
    )


def _scatter(result: ProfileResult) -> Symptom | None:
    spreads = [relative_spread(times) for times in result.times_ms if len(times) >= _FEWEST_SAMPLES]
    if not spreads or np.median(spreads) <= SPREAD:
        return None
    return Symptom(f"repeats of a typical cell scatter by {100 * np.median(spreads):.1f} %")


def _hiccups(result: ProfileResult) -> Symptom | None:
    measured = [times for times in result.times_ms if len(times)]
    slow = sum(int(np.sum(times > OUTLIER_FACTOR * np.median(times))) for times in measured)
    if slow <= max(2, HICCUP_SHARE * result.steps):
        return None
    return Symptom(f"{slow} of {result.steps} steps took more than {OUTLIER_FACTOR} times their cell's median")


def _settling(result: ProfileResult) -> Symptom | None:
    """Steps that still become faster after the warm-up: first against last sample of each visit, over all visits."""
    visits: dict[tuple[int, int], list[float]] = {}
    for sample in result.samples:
        if not sample.warmup:
            visits.setdefault((sample.cell, sample.visit), []).append(sample.T_ms)
    falls = np.array([math.log(times[0] / times[-1]) for times in visits.values() if len(times) > 1])
    if len(falls) < _FEWEST_SAMPLES:
        return None
    fall = float(np.median(falls))
    if fall <= max(result.precision, 3 * mad_sigma(falls - fall) * math.sqrt(math.pi / 2 / len(falls))):
        return None
    return Symptom(
        f"after the warm-up, steps of a visit still became {100 * math.expm1(fall):.1f} % faster",
        "Measure warm caches with a smaller --model, or say --cache cold where that is what you mean.",
    )


def _processes(result: ProfileResult) -> Symptom | None:
    between = result.between_processes
    if between is None or 1.96 * between.sd / math.sqrt(between.processes) <= result.precision:
        return None
    return Symptom(
        f"medians differ by {100 * between.sd:.1f} % between processes",
        "Take more processes (--processes 6), or pin them (--pin).",
    )


def _repeats(result: ProfileResult) -> LatfitWarning | None:
    missed = [
        index
        for index, (there, close) in enumerate(zip(result.measured, result.within_precision, strict=True))
        if there and not close
    ]
    if not missed:
        return None
    budget_s = result.elapsed_s + sum(_missing_s(result, index) for index in missed)
    remedy = f"Measure longer: about --budget {math.ceil(budget_s / 10) * 10}s would do on a machine this steady."
    if budget_s > LONGEST_S:
        remedy = "A day of measuring would not do: accept a wider --precision, or find out what disturbs the machine."
    return LatfitWarning(
        "too_few_repeats",
        f"In {len(missed)} of {sum(result.measured)} cells the median is not known within "
        f"±{100 * result.precision:.3g} %.",
        remedy,
    )


def _prediction(result: ProfileResult) -> LatfitWarning | None:
    """An adaptive run leaves cells unmeasured on purpose, but the measured ones must determine the fit."""
    if result.prediction_error is None or result.prediction_error < 1:
        return None
    return LatfitWarning(
        "prediction_wide",
        "The samples do not determine predictions on the whole grid yet.",
        f"Give more than {format_ms(result.budget_s * 1e3)} (--budget).",
    )


def _missing_s(result: ProfileResult, index: int) -> float:
    """Time to bring a cell within the precision, were its repeats to scatter like those of the other cells.

    A cell that a disturbance hit looks worse than it will once it has more repeats, so that at most three times the
    typical scatter is believed.
    """
    times = result.times_ms[index]
    typical = float(np.median([relative_spread(times) for times in result.times_ms if len(times)]))
    spread = max(typical, min(relative_spread(times), 3 * typical))
    wanted = max((_MEDIAN_WIDTH * spread / result.precision) ** 2, len(times) + _FEWEST_SAMPLES)
    overhead = result.elapsed_s / max(result.step_s, 1e-9) * len(result.samples) / max(1, result.steps)
    return (wanted - len(times)) * float(np.median(times)) / 1e3 * overhead


def _unmeasured(result: ProfileResult) -> LatfitWarning | None:
    limited = {limit.cell for limit in result.limits}
    missing = [
        cell for cell, there in zip(result.cells, result.measured, strict=True) if not there and cell not in limited
    ]
    if not missing:
        return None
    largest = max(missing, key=lambda cell: cell.S)
    return LatfitWarning(
        "not_measured",
        f"{len(missing)} of {len(result.cells)} cells were not measured, up to {largest}.",
        f"Give more than {format_ms(result.budget_s * 1e3)} (--budget), or ask for fewer cells (--grid).",
    )


def relative_spread(times: FloatArray) -> float:
    """Robust standard deviation of a cell's times over their median."""
    middle = float(np.median(times))
    return mad_sigma(times - middle) / middle
