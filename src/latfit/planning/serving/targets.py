"""Targets of requests: percentiles of TTFT, TPOT and latency, or goodput."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from latfit.errors import WrongUsage
from latfit.planning.serving.result import Reached
from latfit.simulation import EngineRun, Interval, Promise, bound_of, counted_in, interval_of, meets
from latfit.stats import FloatArray
from latfit.units import parse_duration_ms

METRICS = {"ttft": "TTFT", "tpot": "TPOT", "latency": "latency"}
USUAL_PERCENT = 99.0


@dataclass(frozen=True)
class RequestTarget:
    """`percentile` percent of requests have a `metric` of at most limit_ms. group: of one class; None for all."""

    metric: str
    limit_ms: float
    percentile: float = USUAL_PERCENT
    group: int | None = None
    group_name: str = ""

    @property
    def name(self) -> str:
        of_class = f" of {self.group_name}" if self.group is not None else ""
        return f"p{self.percentile:g} {METRICS[self.metric]}{of_class}"

    def times(self, run: EngineRun, warmup: float) -> FloatArray:
        counted = counted_in(run, warmup)
        found = np.asarray(getattr(run, f"{self.metric}_ms"))[counted]
        if self.group is not None:
            found = found[run.requests.class_id[counted] == self.group]
        return np.asarray(found[np.isfinite(found)])

    def reached(self, runs: Sequence[EngineRun], warmup: float) -> Reached:
        times, share = [self.times(run, warmup) for run in runs], self.percentile / 100
        interval = interval_of(times, share)
        return Reached(
            name=self.name,
            metric=self.metric,
            percentile=self.percentile if self.group is None else None,
            value_ms=interval.value,
            limit_ms=self.limit_ms,
            **_compare(interval, self.limit_ms, bound_of(times, share) if math.isnan(interval.high) else math.nan),
        )


@dataclass(frozen=True)
class Goodput:
    """`percent` percent of requests meet all limits."""

    percent: float
    promise: Promise

    def reached(self, runs: Sequence[EngineRun], warmup: float) -> Reached:
        limit = 100 - self.percent
        met = [meets(run, self.promise)[counted_in(run, warmup)] for run in runs]
        interval = interval_of([100.0 * (1.0 - each.astype(float)) for each in met])
        interval = replace(interval, low=max(interval.low, 0.0))  # NaN stays
        return Reached(
            name="requests that miss a limit",
            metric="goodput",
            value_pct=interval.value,
            limit_pct=limit,
            **_compare(interval, limit),
        )


def _compare(interval: Interval, limit: float, bound: float = math.nan) -> dict[str, Any]:
    met, highest = interval.value <= limit, bound if math.isnan(interval.high) else interval.high
    return {
        "interval": None if math.isnan(interval.low) else (interval.low, interval.high),
        "met": met,
        "certain": highest <= limit if met else interval.low > limit,
    }


@dataclass(frozen=True)
class Targets:
    """Percentiles, or goodput in their place. own: by the limits that recorded requests have."""

    targets: tuple[RequestTarget, ...]
    goodput: Goodput | None = None
    own: Goodput | None = None

    def reached(self, runs: Sequence[EngineRun], warmup: float) -> tuple[Reached, ...]:
        """Compare runs with all limits. Raises WrongUsage if no request has such a time."""
        wanted: list[RequestTarget | Goodput] = [*self.targets] if self.goodput is None else [self.goodput]
        wanted += [self.own] if self.own is not None and self.goodput is None else []
        found = tuple(each.reached(runs, warmup) for each in wanted)
        # Requests of one token have no TPOT, and so meet any limit of it.
        defined = tuple(each for each in found if not math.isnan(each.value))
        if found and not defined:
            reason = "no request has what is promised: there is no second token"
            raise WrongUsage(reason, where="--tpot", remedy="Give --ttft or --e2e.")
        return defined

    @property
    def promise(self) -> Promise:
        limits = {each.metric: each.limit_ms for each in self.targets if each.group is None}
        return Promise(*(limits.get(name, math.inf) for name in METRICS))


def parse_target(text: str, metric: str, option: str) -> RequestTarget:
    """Parse `500ms`, or `p95:500ms`. Raises WrongUsage."""
    share, colon, limit = text.rpartition(":")
    try:
        percentile = float(share.strip().lower().removeprefix("p").removesuffix("%")) if colon else USUAL_PERCENT
    except ValueError:
        percentile = math.nan
    if not 0 < percentile < 100:
        remedy = "Write p95:500ms, or 500ms for the 99th."
        raise WrongUsage(f"{share!r} is not a percentile", where=option, remedy=remedy)
    return RequestTarget(metric, parse_duration_ms(limit, option=option), percentile)
