"""Means and percentiles of simulated response times, with intervals that allow for correlation.

Response times of neighbours are alike, so one run of n requests knows less than n independent ones. A run is cut into
k batches of consecutive requests; over all replications there are m = k R of them, nearly independent if they are long.
The estimate is that of whole runs, averaged over replications; its standard error comes from the spread of the batches'
own estimates about it (batch means; for percentiles sectioning, Nakayama 2014), with Student's t on m - 1 degrees.
With BATCHES replications or more each is one batch: independent replications.

Two policies on the same random numbers are compared by the differences of corresponding batches, in which the noise
of the load cancels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from latfit.errors import WrongUsage
from latfit.sim.replication import Replication
from latfit.stats import FloatArray

PERCENTILES = (0.5, 0.9, 0.99)
BATCHES = 30
"""Batches over all replications, at least."""

SMALLEST = 200
"""Requests in a batch, at least, so that its own 99th percentile means something."""

GROWTH = 1.5


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval; NaN ends where there is none to give."""

    value: float
    low: float
    high: float

    @property
    def relative_half_width(self) -> float:
        return (self.high - self.low) / (2 * self.value) if self.value > 0 else math.inf


@dataclass(frozen=True, eq=False)
class Summary:
    """What is kept of a replication: whole (s,), the statistics called `names`; batches (k, s); by_class (classes, s).

    counted: requests in it.  met: how many ended by their deadline, where one was promised.  sizes (2, largest + 1),
    busy (2,), served (2,) by path.
    """

    names: tuple[str, ...]
    whole: FloatArray
    batches: FloatArray
    by_class: FloatArray
    counted: int
    met: int
    promised: bool
    sizes: Any
    busy: FloatArray
    served: Any
    unserved: int
    throughput: float
    mean_in_system: float
    most_waiting: int
    requests: int


def batches_wanted(replications: int) -> int:
    """Batches of each of so many replications."""
    return max(1, math.ceil(BATCHES / replications))


def summarise(
    run: Replication, batches: int, sla_ms: float = math.inf, percentiles: Sequence[float] = PERCENTILES
) -> Summary:
    """The numbers of a run; the warm-up is left out, and so is who was never served."""
    warm = run.drawn.warm
    response, path = run.response_ms[warm:], run.path[warm:]
    answered = path >= 0
    waits_on = not bool(answered.all())
    times = response[answered] if waits_on else response
    k = max(1, min(batches, len(times) // SMALLEST))
    met, promised = _met(run, times, np.flatnonzero(answered) if waits_on else None, sla_ms)
    ids = run.drawn.load.class_id
    by_class = np.empty((0, 1 + len(percentiles)))
    if len(ids):
        own = ids[warm : warm + len(response)][answered]
        by_class = np.array([describe(times[own == c], percentiles) for c in range(run.drawn.classes)])
    parts = np.array([describe(part, percentiles) for part in np.array_split(times, k)]) if k > 1 else None
    whole = describe(times, percentiles)
    return Summary(
        names=statistics(percentiles),
        whole=whole,
        batches=whole[None] if parts is None else parts,
        by_class=by_class,
        counted=len(times),
        met=met,
        promised=promised,
        sizes=run.sizes,
        busy=run.busy,
        served=np.array([np.count_nonzero(path == p) for p in range(2)]),
        unserved=run.unserved,
        throughput=run.throughput,
        mean_in_system=run.mean_in_system,
        most_waiting=run.most_waiting,
        requests=len(run.arrive_ms),
    )


def statistics(percentiles: Sequence[float]) -> tuple[str, ...]:
    """Names of the mean and of percentiles: `mean`, `p50`, `p99.9`."""
    return ("mean", *(f"p{100 * p:g}" for p in percentiles))


def describe(times: FloatArray, percentiles: Sequence[float] = PERCENTILES) -> FloatArray:
    """Mean and percentiles (1 + p,) of response times (n,): the smallest time that a share p does not exceed."""
    n = len(times)
    if n == 0:
        return np.full(1 + len(percentiles), math.nan)
    ranks = [min(n - 1, max(0, math.ceil(p * n - 1e-9) - 1)) for p in percentiles]
    ordered = np.partition(times, ranks)
    return np.array([times.mean(), *ordered[ranks]])


def interval(summaries: Sequence[Summary], statistic: str, level: float = 0.95) -> Interval:
    """The interval of `mean`, `p50`, `p90` or `p99` over replications."""
    column = _column(summaries[0].names, statistic)
    value = float(np.mean([each.whole[column] for each in summaries]))
    parts = np.concatenate([each.batches[:, column] for each in summaries])
    half = _half_width(parts, value, level)
    return Interval(value, value - half, value + half)


def difference(first: Sequence[Summary], other: Sequence[Summary], statistic: str, level: float = 0.95) -> Interval:
    """other - first in ms, from runs of two policies on the same random numbers. Raises WrongUsage if they are not."""
    if [len(each.batches) for each in first] != [len(each.batches) for each in other]:
        raise WrongUsage(
            "the runs have not the same replications", where="difference", remedy="Run both with the same options."
        )
    column = _column(first[0].names, statistic)
    value = float(np.mean([b.whole[column] - a.whole[column] for a, b in zip(first, other, strict=True)]))
    ours, theirs = (np.concatenate([each.batches[:, column] for each in runs]) for runs in (other, first))
    return paired(value, ours - theirs, level)


def paired(value: float, parts: FloatArray, level: float = 0.95) -> Interval:
    """A difference with its interval, from the differences of corresponding batches (m,)."""
    half = _half_width(parts, value, level)
    return Interval(value, value - half, value + half)


def grows(summaries: Sequence[Summary]) -> bool:
    """Whether mean response times rise through the runs, as they do above capacity: the last third is well above the
    first in most runs, and by more than the batches scatter."""
    rises = []
    for each in summaries:
        means = each.batches[:, 0]
        third = len(means) // 3
        if third < 1:
            return False
        early, late = means[:third], means[-third:]
        scatter = math.hypot(early.std(ddof=1), late.std(ddof=1)) / math.sqrt(third) if third > 1 else 0.0
        rises.append(bool(late.mean() > GROWTH * early.mean() and late.mean() - early.mean() > 3 * scatter))
    return sum(rises) > len(rises) / 2


def _column(names: Sequence[str], statistic: str) -> int:
    if statistic not in names:
        raise WrongUsage(f"{statistic!r} is not known", where="statistic", remedy=f"Take one of {', '.join(names)}.")
    return names.index(statistic)


def _half_width(parts: FloatArray, value: float, level: float) -> float:
    from scipy.special import stdtrit

    m = len(parts)
    if m < 2 or not np.all(np.isfinite(parts)):
        return math.nan
    error = math.sqrt(float(np.sum((parts - value) ** 2)) / (m - 1) / m)
    return float(stdtrit(m - 1, 0.5 + level / 2)) * error


def _met(run: Replication, times: FloatArray, rows: Any, sla_ms: float) -> tuple[int, bool]:
    """How many of the served ended by their deadline, and whether there was any promise."""
    deadlines, ids, warm = run.drawn.deadline_ms, run.drawn.load.class_id, run.drawn.warm
    if not np.isfinite(deadlines).any():
        return int(np.count_nonzero(times <= sla_ms)), math.isfinite(sla_ms)
    if run.drawn.by_request:
        own = deadlines[warm : len(run.response_ms)]
    elif len(ids):
        own = deadlines[ids[warm : len(run.response_ms)]]
    else:
        return int(np.count_nonzero(times <= deadlines[0])), True
    own = own if rows is None else own[rows]
    return int(np.count_nonzero(times <= np.minimum(own, sla_ms))), True
