"""What of a plan for recorded requests rests on few of them.

A recording is served as it is, and the simulation's interval says how much of a figure is chance of the steps. How much
is chance of which requests came is another question. The 99th percentile of 400 requests is decided by the 4 slowest;
of n requests that are drawn anew the number above the true percentile p is binomial with n and 1 - p, so that between
the order statistics of its 2.5 % and 97.5 % ends the true percentile lies with 95 % (a distribution-free interval;
Conover, Practical Nonparametric Statistics, 3.2). Requests that wait for one another depend on each other, so the
interval is rather too narrow. In the same way a share of k requests of n has Clopper and Pearson's interval.

With few requests it is also chance who meets whom: one replica more deals them out anew, and may miss what fewer keep.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from latfit.messages import Message, message
from latfit.planning.serving.evaluate import Evaluator, Measured
from latfit.planning.serving.result import Reached
from latfit.planning.serving.targets import RequestTarget
from latfit.stats import FloatArray
from latfit.units import format_ms, format_percent, number
from latfit.workload import RecordedLoad

FEW_REQUESTS = "few_requests"
LEVEL = 0.95

MORE = 3
"""Replicas more than the planned ones, each of which should keep the targets, too."""


def few_requests(evaluator: Evaluator, best: Measured, *, given: bool) -> list[Message]:
    """What recorded requests leave open of a setup that keeps the targets. given: whether its replicas were."""
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
    return message(FEW_REQUESTS, what=text, count=len(evaluator.load.requests))


def _open(evaluator: Evaluator, best: Measured, each: Reached) -> str:
    """What is not certain of a figure, were other requests like these to come; empty where its limit is."""
    run = best.first
    if each.unit == "pct":
        n = len(run.requests)
        low, high = share_interval(each.value / 100, n)
        if 100 * high <= each.limit:
            return ""
        ends = f"{number(100 * low, 2)} to {format_percent(100 * high)}"
        return f"{format_percent(each.value)} of {n:,} {each.name}; of others like these it could be {ends}"
    target = _target(evaluator.targets.targets, each.name)
    times = np.sort(target.times(run, 0.0))
    low, high = percentile_interval(times, target.percentile / 100)
    if high <= each.limit:
        return ""
    decided = max(round(len(times) * (1 - target.percentile / 100)), 1)
    slowest = f"the {decided:,} slowest" if decided > 1 else "the slowest"
    ends = f"{format_ms(low)} to {format_ms(high)}"
    return f"{each.name} rests on {slowest} of {len(times):,} requests; of others like these it could be {ends}"


def _target(targets: Sequence[RequestTarget], name: str) -> RequestTarget:
    return next(each for each in targets if each.name == name)


def percentile_interval(times: FloatArray, share: float) -> tuple[float, float]:
    """The 95 % interval of the percentile that sorted times (n,) are a sample of; the largest where it has no end."""
    n = len(times)
    low, high = (_binomial_end(n, share, tail) for tail in ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return float(times[max(low - 1, 0)]), float(times[min(high, n - 1)])


def _binomial_end(n: int, share: float, tail: float) -> int:
    from scipy.special import bdtr

    counts = np.arange(n + 1)
    return int(np.searchsorted(bdtr(counts, n, share), tail))


def share_interval(share: float, n: int) -> tuple[float, float]:
    """Clopper and Pearson's 95 % interval of a share that was found of n."""
    from scipy.special import betaincinv

    k, tail = round(share * n), (1 - LEVEL) / 2
    low = 0.0 if k == 0 else float(betaincinv(k, n - k + 1, tail))
    return low, 1.0 if k == n else float(betaincinv(k + 1, n - k, 1 - tail))
