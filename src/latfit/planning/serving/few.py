"""Warn if a plan for recorded requests depends on few of them: docs/theory/planning.md, "Recorded requests".

A percentile gets a distribution-free binomial interval, a share that of Clopper and Pearson. A warning also names
larger replica counts that miss a target.
"""

import math
from dataclasses import replace

import numpy as np

from latfit.messages import Message, message
from latfit.planning.serving.evaluate import Evaluator, Measured
from latfit.planning.serving.result import Reached
from latfit.stats import FloatArray
from latfit.units import format_ms, format_percent, number
from latfit.workload import RecordedLoad

LEVEL = 0.95
BLOCKS = 20  # of requests in the order of arrival: long enough to hold the busy periods, enough for a variance
MORE = 3  # replicas beyond the plan that should meet the targets, too


def few_requests(evaluator: Evaluator, best: Measured, *, given: bool) -> list[Message]:
    """Return warnings on a setup that meets the targets. given: whether its replica count was requested."""
    if not isinstance(evaluator.load, RecordedLoad):
        return []
    found = [text for each in best.reached if (text := _uncertainty(evaluator, best, each))]
    count = best.setup.replicas
    counts = [] if given else range(count + 1, count + MORE + 1)
    missed = [f"{each:,}" for each in counts if not evaluator.measure(replace(best.setup, replicas=each)).met]
    if missed:
        several = " and ".join(missed)
        found.append(f"{count:,} replicas keep the targets, but {several} miss one: it is chance who meets whom")
    return [message("few_requests", what=text, count=len(evaluator.load.requests)) for text in found]


def _uncertainty(evaluator: Evaluator, best: Measured, each: Reached) -> str:
    """Describe the sampling uncertainty of a figure; empty if its interval stays within the limit."""
    run = best.first
    if each.unit == "pct":
        n = len(run.requests)
        low, high = (100 * end for end in share_interval(each.value / 100, n))
        rests, ends = (
            f"{format_percent(each.value)} of {n:,} {each.name}",
            f"{number(low, 2)} to {format_percent(high)}",
        )
    else:
        target = next(one for one in evaluator.targets.targets if one.name == each.name)
        times = target.times(run, 0.0)
        low, high = percentile_interval(times, target.percentile / 100)
        high = min(high, float(times.max()))
        decided = max(round(len(times) * (1 - target.percentile / 100)), 1)
        slowest = f"the {decided:,} slowest" if decided > 1 else "the slowest"
        rests, ends = (
            f"{each.name} rests on {slowest} of {len(times):,} requests",
            f"{format_ms(low)} to {format_ms(high)}",
        )
    return f"{rests}; of others like these it could be {ends}" if high > each.limit else ""


def percentile_interval(times: FloatArray, share: float) -> tuple[float, float]:
    """Return the 95 % interval of a percentile of times (n,) in the order of arrival; an open upper end is infinite.

    Binomial ranks. Requests that wait in one queue are correlated: the ranks are apart by as much more as block means
    of the exceedances vary more than those of independent requests.
    """
    from scipy.special import bdtr

    n, ordered = len(times), np.sort(times)
    below = bdtr(np.arange(n + 1), n, share)
    low, high = (int(np.searchsorted(below, tail)) for tail in ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    beyond = times > ordered[max(math.ceil(share * n) - 1, 0)]
    blocks = [block.mean() for block in np.array_split(beyond, min(BLOCKS, n))]
    inflation = np.var(blocks, ddof=1) * n / len(blocks) / (share * (1 - share)) if n > 1 else 1.0
    wider = math.sqrt(max(inflation, 1.0))
    low, high = (round(share * n + wider * (rank - share * n)) for rank in (low, high))
    return float(ordered[max(low - 1, 0)]), float(ordered[high]) if high < n else math.inf


def share_interval(share: float, n: int) -> tuple[float, float]:
    """Return Clopper and Pearson's 95 % interval of a share observed in n; share * n need not be whole."""
    from scipy.special import betaincinv

    k, tail = round(share * n, 9), (1 - LEVEL) / 2
    low = 0.0 if k == 0 else float(betaincinv(k, n - k + 1, tail))
    return low, 1.0 if k == n else float(betaincinv(k + 1, n - k, 1 - tail))
