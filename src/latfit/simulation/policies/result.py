"""The result of a policy under a load: an entry of `simulate policies --json`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from msgspec import UNSET, UnsetType, field, structs

from latfit.histogram import pooled
from latfit.policies import Policy
from latfit.records import Number, Record
from latfit.simulation.policies import estimate as estimates
from latfit.simulation.policies.estimate import BatchErrors, Estimate, Length, Summary
from latfit.simulation.policies.replication import Replication
from latfit.simulation.policies.service import System
from latfit.simulation.summary import PERCENTILES, STATISTICS, Interval, Times, size_percentiles, times_of
from latfit.units import format_rate

MS_PER_S = 1000.0
LEFT_OVER = 0.01  # share of requests never served that is worth a note; the last few may wait for others


class ClassTimes(Record, frozen=True):
    name: str = field(name="class")
    latency: dict[str, Number] = field(name="latency_ms")


class Difference(Record, frozen=True):
    """p99 less that of another policy on the same random numbers, ms, with its interval."""

    policy: str
    p99_ms: Number
    ci: tuple[Number, Number]


class InSystem(Record, frozen=True):
    mean: Number
    most_waiting: int


class SimResult(Record, frozen=True):
    """A policy at a load. Times in ms; NaN where a number is unknown, such as the rate of a closed loop."""

    policy: str
    settings: dict[str, Any]
    rate_per_s: Number
    requests: int
    latency: Times = field(name="latency_ms")
    throughput_per_s: Number
    utilisation: dict[str, Number]  # by path name: share of time that its servers were busy
    share: dict[str, Number]  # by path name: share of the requests that it served
    slo_attainment: float | None  # share of requests that met their deadline; None without deadlines
    batch_size: dict[str, Number]
    in_system: InSystem
    unserved: int
    replications: int
    warmup_requests: int
    seed: int
    stable: bool  # false if the load is above capacity, or response times still grow at the end of the runs
    batches: dict[str, int]  # by statistic: batches of its interval
    trusted: dict[str, bool]  # by statistic: whether the runs were long enough for its interval
    capacity_per_s: float | None = None
    by_class: Sequence[ClassTimes] = ()
    notes: Sequence[str] = ()
    nominal: Sequence[str] = ()  # paths with nominal times, not measured
    vs_baseline: Difference | UnsetType = UNSET  # difference to the first policy of a sweep at this rate
    p99_error: BatchErrors | None = None
    summaries: Any = ()  # the replications

    not_in_json: ClassVar[Sequence[str]] = ("p99_error", "summaries")

    def __repr__(self) -> str:
        state = "" if self.stable else ", unstable"
        shown = ", ".join(f"{name} {each.value:.4g}" for name, each in self.latency.items())
        return f"SimResult({self.policy}, {self.rate_per_s:.4g} req/s, ms: {shown}{state})"

    def percentile_ms(self, share: float) -> float:
        return pooled([batch for each in self.summaries for batch in each.batches]).value(share)

    def document(self) -> dict[str, Any]:
        """Return the JSON that a sweep's file keeps: what later comparisons need, too."""
        return {**self.to_json(), "p99_error": self.p99_error and self.p99_error.to_json()}

    def row(self) -> dict[str, Any]:
        """Return a flat row: times in ms, rates per second, columns of paths called NAME_PATH."""
        row = {name: getattr(self, name) for name in ("policy", "rate_per_s", "requests", "throughput_per_s")}
        for name, each in self.latency.items():
            row |= {f"{name}_ms": each.value, f"{name}_low_ms": each.low, f"{name}_high_ms": each.high}
        for name in ("utilisation", "share", "batch_size"):
            row |= {f"{name}_{key}": value for key, value in getattr(self, name).items()}
        alike = ("slo_attainment", "stable", "capacity_per_s", "unserved", "replications", "seed")
        row |= {name: getattr(self, name) for name in alike}
        shown = {name: f"{x:.6g}" if isinstance(x, float) else x for name, x in self.settings.items()}
        return {**row, "settings": ", ".join(f"{name}={value}" for name, value in shown.items())}


def p99_difference(base: SimResult, other: SimResult) -> Interval | None:
    """Return p99 of another run less that of a base, ms; None if either is unstable."""
    a, b = base.p99_error, other.p99_error
    if not base.stable or not other.stable or a is None or b is None:
        return None
    # Batches of equal lengths hold the same requests, whose common noise cancels; else the errors are independent.
    half = math.hypot(a.half_width()[0], b.half_width()[0])
    if a.length == b.length:
        fewest, errors = min((a, b), key=lambda each: each.requests), (np.array(b.errors) - a.errors).tolist()
        half, _ = structs.replace(fewest, errors=errors, reach=max(a.reach, b.reach)).half_width()
    value = other.latency.p99 - base.latency.p99
    return Interval(value, value - half, value + half)


def make_result(
    policy: Policy,
    system: System,
    summaries: Sequence[Summary],
    rate: float,
    *,
    classes: Sequence[str] = (),
    seed: int = 0,
    free: bool = False,
) -> SimResult:
    """Return the result of one or more replications.

    rate: arrivals per ms, NaN for a closed loop. free: whether the number of requests was left to the load.
    """

    def total(name: str) -> Any:
        return sum(getattr(each, name) for each in summaries)

    paths = list(enumerate(path.name for path in system.paths))
    capacity = math.nan if math.isnan(rate) else system.capacity(policy)
    above, growing = rate >= capacity, not math.isnan(rate) and estimates.grows(summaries)
    found = {name: estimates.estimate(summaries, PERCENTILES.get(name)) for name in STATISTICS}
    latency = {name: interval for name, (interval, _) in found.items()}
    counted, served, unserved = total("counted"), total("served"), total("unserved")
    sizes, busy, throughput, in_system, most_waiting = zip(*(each.totals for each in summaries), strict=True)
    notes = []
    if above:
        notes.append(
            f"{policy.name} at {format_rate(rate * MS_PER_S)} is above its capacity of"
            f" {format_rate(capacity * MS_PER_S, down=True)}. Unstable (ρ ≥ 1): latencies reflect the simulated"
            " horizon only."
        )
    elif growing:
        notes.append(
            "Response times still grow at the end of the runs: the load is above the policy's capacity, or the runs are"
            " too short. Simulate more --requests."
        )
    if unserved > LEFT_OVER * total("requests"):
        still = f"{unserved:,} requests were still queued when arrivals ended"
        notes.append(f"{still}: {policy.name} waits to fill a batch.")
    if not above and not growing:
        notes += _too_short(summaries, latency, free=free)
    return SimResult(
        policy=policy.name,
        settings=dict(policy.settings),
        rate_per_s=rate * MS_PER_S,
        requests=total("requests"),
        latency=times_of(latency),
        throughput_per_s=float(np.mean(throughput)) * MS_PER_S,
        utilisation={name: float(np.mean(busy, axis=0)[i]) for i, name in paths},
        share={name: float(served[i] / max(1, served.sum())) for i, name in paths},
        slo_attainment=total("met") / counted if counted and summaries[0].met is not None else None,
        batch_size=size_percentiles(np.sum(sizes, axis=(0, 1))),
        in_system=InSystem(float(np.mean(in_system)), max(most_waiting)),
        unserved=unserved,
        replications=len(summaries),
        warmup_requests=sum(each.length.warm for each in summaries),
        seed=seed,
        stable=not above and not growing,
        batches={name: each.batches for name, each in latency.items()},
        trusted={name: each.trusted for name, each in latency.items()},
        capacity_per_s=capacity * MS_PER_S if math.isfinite(capacity) else None,
        by_class=[
            ClassTimes(name, dict(zip(STATISTICS, estimates.describe(parts).tolist(), strict=True)))
            for name, parts in zip(classes, zip(*(s.by_class for s in summaries), strict=True), strict=False)
        ],
        notes=notes,
        nominal=[path.name for path in system.paths if path.nominal],
        p99_error=found["p99"][1],
        summaries=tuple(summaries),
    )


def measured_result(policy: Policy, system: System, served: Replication) -> SimResult:
    n, warm = len(served.arrive_ms), served.load.warm
    span = float(served.arrive_ms[-1] - served.arrive_ms[warm]) if n > warm + 1 else math.nan
    rate = (n - warm - 1) / span if span > 0 else math.nan
    return make_result(policy, system, [estimates.summarise(served, Length(n, warm, 1))], rate)


def _too_short(summaries: Sequence[Summary], latency: Mapping[str, Estimate], *, free: bool) -> list[str]:
    counted, kind = sum(each.counted for each in summaries), summaries[0].load
    lacking = [name for name, each in latency.items() if not each.trusted or math.isnan(each.high)]
    if not lacking:
        return []
    needed = max(latency[name].needed for name in lacking)
    if kind == estimates.RECORDED:
        why = f", {counted:,} recorded requests of {needed:,} needed."
    elif kind == estimates.VARYING and len(summaries) < estimates.LEAST_BATCHES:
        why = f"; a varying load needs {estimates.LEAST_BATCHES} --replications."
    elif needed <= counted:
        why = "; each run is too short for this load. Use fewer, longer --replications."
    else:
        why = f", {counted:,} requests of {needed:,} needed at this load."
        why += "" if free else " Leave out --requests for as many."
    return [f"{', '.join(lacking)}: interval missing or too narrow{why}"]
