"""Warn where a plan for recorded requests depends on few of them.

A percentile gets a distribution-free binomial interval, a share Clopper and Pearson's, both as if other requests of the
same kind had been recorded. A warning also names larger replica counts that miss a target. Derivation:
docs/theory/planning.md, "Recorded requests".
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

MORE = 3
"""Replicas beyond the plan that should meet the targets, too."""


def few_requests(evaluator: Evaluator, best: Measured, *, given: bool) -> list[Message]:
    """Return warnings on a setup that meets the targets. given: whether its replica count was requested."""
    if not isinstance(evaluator.load, RecordedLoad):
        return []
    found = [_warning(text, evaluator) for each in best.reached if (text := _open(evaluator, best, each))]
    counts = [] if given else [best.setup.replicas + more for more in range(1, MORE + 1)]
    missed = [count for count in counts if not evaluator.measure(replace(best.setup, replicas=count)).met]
    if missed:
        several = " and ".join(f"{count:,}" for count in missed)
        text = f"{best.setup.replicas:,} replicas keep the targets, but {several} miss one: it is chance who meets whom"
        found.append(_warning(text, evaluator))
    return found


def _warning(text: str, evaluator: Evaluator) -> Message:
    assert isinstance(evaluator.load, RecordedLoad)
    return message("few_requests", what=text, count=len(evaluator.load.requests))


def _open(evaluator: Evaluator, best: Measured, each: Reached) -> str:
    """Describe the sampling uncertainty of a figure; empty if its interval stays within the limit."""
    run = best.first
    if each.unit == "pct":
        n = len(run.requests)
        low, high = share_interval(each.value / 100, n)
        if 100 * high <= each.limit:
            return ""
        ends = f"{number(100 * low, 2)} to {format_percent(100 * high)}"
        return f"{format_percent(each.value)} of {n:,} {each.name}; of others like these it could be {ends}"
    target = next(one for one in evaluator.targets.targets if one.name == each.name)
    times = target.times(run, 0.0)
    low, high = percentile_interval(times, target.percentile / 100)
    high = min(high, float(times.max()))
    if high <= each.limit:
        return ""
    decided = max(round(len(times) * (1 - target.percentile / 100)), 1)
    slowest = f"the {decided:,} slowest" if decided > 1 else "the slowest"
    ends = f"{format_ms(low)} to {format_ms(high)}"
    return f"{each.name} rests on {slowest} of {len(times):,} requests; of others like these it could be {ends}"


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
