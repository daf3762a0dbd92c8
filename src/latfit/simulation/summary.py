"""Summaries of simulations: statistics over requests with their intervals, rates, shares."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import field

from latfit.records import Number, Record
from latfit.stats import IntArray

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
STATISTICS = ("mean", *PERCENTILES)
LEVEL = 0.95  # of the intervals


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval; NaN ends if the runs show none."""

    value: float
    low: float
    high: float

    @property
    def relative_half_width(self) -> float:
        return (self.high - self.low) / (2 * self.value) if self.value > 0 else math.inf


class ClassOutcome(Record, frozen=True):
    name: str = field(name="class")
    requests: int
    ttft: dict[str, Number] = field(name="ttft_ms")
    tpot: dict[str, Number] = field(name="tpot_ms")
    latency: dict[str, Number] = field(name="latency_ms")
    slo_attainment: Number


class Confidence(Record, frozen=True):
    mean: tuple[Number, Number] | None
    p50: tuple[Number, Number] | None
    p90: tuple[Number, Number] | None
    p99: tuple[Number, Number] | None
    level: float = LEVEL


class Times(Record, frozen=True):
    """Times in ms over the requests of all replications; `times["p99"]` is the value with its interval."""

    mean: Number
    p50: Number
    p90: Number
    p99: Number
    ci: Confidence

    def __getitem__(self, statistic: str) -> Interval:
        low, high = getattr(self.ci, statistic) or (math.nan, math.nan)
        return Interval(getattr(self, statistic), low, high)

    def items(self) -> Iterator[tuple[str, Interval]]:
        return ((name, self[name]) for name in STATISTICS)


def times_of(found: Mapping[str, Interval], *, only_known: bool = False) -> Times:
    """Return statistics by name as a record; only_known: an interval without ends is None."""
    spans: dict[str, Any] = {
        name: None if only_known and math.isnan(each.low) else (each.low, each.high) for name, each in found.items()
    }
    return Times(**{name: each.value for name, each in found.items()}, ci=Confidence(**spans))


def size_percentiles(counts: IntArray) -> dict[str, float]:
    """Return percentiles of batch sizes, of which counts[b] have b requests; NaN without any."""
    reached = np.cumsum(counts)
    return {
        name: float(np.searchsorted(reached, math.ceil(p * reached[-1] - 1e-9))) if reached[-1] else math.nan
        for name, p in PERCENTILES.items()
    }


class EngineSummary(Record, frozen=True):
    """Replications of one engine at one load. Times in ms, rates per s; NaN where no limit was given."""

    requests: int
    replications: int
    latency: Times = field(name="latency_ms")
    ttft: Times = field(name="ttft_ms")
    tpot: Times = field(name="tpot_ms")
    itl: dict[str, Number] = field(name="itl_ms")
    throughput_per_s: Number
    output_tokens_per_s: Number
    goodput_per_s: Number
    slo_attainment: Number
    fairness: Number
    useful_share: Number
    kv_usage: Number
    queue: Number
    replica_hours: Number
    prefix_hit_rate: Number  # share of prompt tokens that were cached when their requests started
    busy: dict[str, Number] = field(name="utilisation")
    batch_size: dict[str, Number]
    by_class: list[ClassOutcome]
    steps: int
    preemptions: int
    reused_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    stable: bool  # false if waits still grow at the end of the runs

    @property
    def utilisation(self) -> float:
        """Share of the time in steps."""
        return self.busy["engine"]
