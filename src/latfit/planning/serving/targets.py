"""What requests are promised: a limit for a share of them, on the time to the first token (TTFT), the time per further
token (TPOT) or the latency of the whole answer; or one share that meets all limits together (goodput).

A percentile p is within its limit x where at least p percent of the requests are, so both kinds are shares of requests;
they differ in whether a request has to meet one limit or all of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from latfit.errors import WrongUsage
from latfit.planning.serving.result import Reached, reached
from latfit.simulation import EngineRun, Interval, Promise, bound_of, counted_in, interval_of, meets
from latfit.stats import FloatArray
from latfit.units import parse_duration_ms

METRICS = {"ttft": "TTFT", "tpot": "TPOT", "latency": "latency"}
"""What is promised, and what it is called."""

USUAL_PERCENT = 99.0
"""Percent of requests, where nothing else is said."""


@dataclass(frozen=True)
class RequestTarget:
    """`percentile` percent of requests have a `metric` of at most limit_ms. group: the class of requests that it is
    promised to, its number; None for all."""

    metric: str
    limit_ms: float
    percentile: float = USUAL_PERCENT
    group: int | None = None
    group_name: str = ""

    @property
    def name(self) -> str:
        """As people write it: p99 TTFT."""
        of_class = f" of {self.group_name}" if self.group is not None else ""
        return f"p{self.percentile:g} {METRICS[self.metric]}{of_class}"

    def times(self, run: EngineRun, warmup: float) -> FloatArray:
        """The times of one run that count, ms."""
        counted = counted_in(run, warmup)
        found = np.asarray(getattr(run, f"{self.metric}_ms"))[counted]
        if self.group is not None:
            found = found[run.requests.class_id[counted] == self.group]
        return np.asarray(found[np.isfinite(found)])

    def reached(self, runs: Sequence[EngineRun], warmup: float, slower: float = 1.0) -> "Reached":
        """What runs make of it, were everything slower by a factor."""
        times, share = [self.times(run, warmup) for run in runs], self.percentile / 100
        found = interval_of(times, share)
        longer = Interval(found.value * slower, found.low * slower, found.high * slower)
        bound = bound_of(times, share) * slower if math.isnan(longer.high) else math.nan
        of_all = self.percentile if self.group is None else None
        return reached(self.name, self.metric, longer, self.limit_ms, bound=bound, percentile=of_all)


@dataclass(frozen=True)
class Goodput:
    """`percent` percent of requests meet all limits."""

    percent: float
    promise: Promise

    name = "goodput"

    def reached(self, runs: Sequence[EngineRun], warmup: float, slower: float = 1.0) -> "Reached":
        """What runs make of it: the share of requests that miss a limit, in percent."""
        promise = Promise(*(each / slower for each in vars(self.promise).values()))
        missed = [
            100.0 * (1.0 - meets(_sooner(run, slower), promise)[counted_in(run, warmup)].astype(float)) for run in runs
        ]
        found = interval_of(missed)
        low = max(found.low, 0.0) if math.isfinite(found.low) else found.low
        missed_share = Interval(found.value, low, found.high)
        return reached("requests that miss a limit", self.name, missed_share, 100 - self.percent, unit="pct")


def _sooner(run: EngineRun, slower: float) -> EngineRun:
    """The run with the limits of its requests as they are on a clock that runs slower."""
    own = run.requests
    limits = {name: getattr(own, name) / slower for name in ("ttft_slo_ms", "tpot_slo_ms", "deadline_ms")}
    return run if slower == 1.0 else replace(run, requests=replace(own, **limits))


@dataclass(frozen=True)
class Targets:
    """All that is promised: percentiles, or goodput in their place. own: what recorded requests say of themselves,
    beside the percentiles."""

    targets: tuple[RequestTarget, ...]
    goodput: Goodput | None = None
    own: Goodput | None = None

    def reached(self, runs: Sequence[EngineRun], warmup: float, slower: float = 1.0) -> tuple[Reached, ...]:
        """The figures of runs beside their limits."""
        asked: list[RequestTarget | Goodput] = [*self.targets] if self.goodput is None else [self.goodput]
        asked += [self.own] if self.own is not None and self.goodput is None else []
        found = tuple(each.reached(runs, warmup, slower) for each in asked)
        # Requests of one token have no time per further token, and so keep any limit of it.
        told = tuple(each for each in found if not math.isnan(each.value))
        if found and not told:
            raise WrongUsage(
                "no request has what is promised: there is no second token",
                where="--tpot",
                remedy="Give --ttft or --e2e.",
            )
        return told

    @property
    def promise(self) -> Promise:
        """The limits alone, as the simulator counts what meets them."""
        limits = {each.metric: each.limit_ms for each in self.targets if each.group is None}
        return Promise(*(limits.get(name, math.inf) for name in METRICS))


def parse_target(text: str, metric: str, option: str) -> RequestTarget:
    """`500ms`, or `p95:500ms`. Raises WrongUsage."""
    share, colon, limit = text.rpartition(":")
    percentile = USUAL_PERCENT
    if colon:
        digits = share.strip().lower().removeprefix("p").removesuffix("%").strip()
        try:
            percentile = float(digits)
        except ValueError:
            percentile = math.nan
        if not 0 < percentile < 100:
            raise WrongUsage(
                f"{share!r} is not a percentile", where=option, remedy="Write p95:500ms, or 500ms for the 99th."
            )
    return RequestTarget(metric, parse_duration_ms(limit, option=option), percentile)
