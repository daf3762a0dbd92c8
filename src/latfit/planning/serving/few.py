"""Warn if a plan for recorded requests depends on few of them: docs/theory/planning.md, "Recorded requests"."""

import math

import numpy as np

from latfit.messages import Message, message
from latfit.planning.serving.evaluate import Evaluator, Measured
from latfit.planning.serving.result import Reached
from latfit.stats import FloatArray
from latfit.units import format_ms, format_percent
from latfit.workload import RecordedLoad

LEVEL = 0.95
BLOCKS = 20  # of requests in the order of arrival: long enough to hold the busy periods, enough for a variance


def warn_of_few_requests(evaluator: Evaluator, best: Measured) -> list[Message]:
    if not isinstance(evaluator.load, RecordedLoad):
        return []
    texts = [_describe_uncertainty(evaluator, best, each) for each in best.reached]
    return [message("few_requests", what=text, count=len(evaluator.load.requests)) for text in texts if text]


def _describe_uncertainty(evaluator: Evaluator, best: Measured, reached: Reached) -> str:
    if reached.unit == "pct":
        n = len(best.first.requests)
        low, high = (100 * end for end in share_interval(reached.value / 100, n))
        ends = f"{format_percent(low)} to {format_percent(high)}"
    else:
        target = next(one for one in evaluator.targets.targets if one.name == reached.name)
        times = target.times(best.first, 0.0)
        n, (low, high) = len(times), percentile_interval(times, target.percentile / 100)
        high = min(high, float(times.max()))
        ends = f"{format_ms(low)} to {format_ms(high)}"
    if high <= reached.limit:
        return ""
    return f"{reached.name} of {n:,} requests could be {ends} of others like these"


def percentile_interval(times: FloatArray, share: float) -> tuple[float, float]:
    """Return the 95 % interval of a percentile of times (n,) in order of arrival; an open end is infinite.

    Binomial ranks, apart by as much more as block means of the exceedances vary more than independent ones.
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
    """Return Clopper and Pearson's 95 % interval of a share of n."""
    from scipy.special import betaincinv

    k, tail = round(share * n, 9), (1 - LEVEL) / 2
    low = 0.0 if k == 0 else float(betaincinv(k, n - k + 1, tail))
    return low, 1.0 if k == n else float(betaincinv(k + 1, n - k, 1 - tail))
