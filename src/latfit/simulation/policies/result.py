"""Results of policy simulations: the record of a policy at a load, with confidence intervals, and a run's event log.

`SimResult.to_json` is an entry of `simulate --json`. The event log, on demand, lists arrivals, moves to the side
path, starts and ends of batches in order of time.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field as field_of
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import field

from latfit.errors import WrongUsage
from latfit.files import write_text
from latfit.policies import Policy
from latfit.records import Number, Record
from latfit.simulation.policies.estimate import (
    LEAST_BATCHES,
    PERCENTILES,
    RECORDED,
    STEADY,
    VARYING,
    BatchErrors,
    Length,
    Summary,
    describe,
    grows,
    interval,
    summarise,
)
from latfit.simulation.policies.replication import Replication, draw, run
from latfit.simulation.policies.service import System
from latfit.simulation.summary import Interval
from latfit.units import format_rate
from latfit.workload import Load, Streams

MOST_EVENTS = 5_000_000
ENDS, ARRIVES, STARTS = range(3)
WORDS = ("ends", "arrives", "starts")
"""Order of simultaneous events: services end, requests arrive, then the policy acts."""


@dataclass(frozen=True)
class Event:
    """at_ms: when.  what: arrives, starts or ends.  requests: which ones, in order of their taking.  path: its name,
    empty for an arrival.  batch: its number, -1 for none."""

    at_ms: float
    what: str
    requests: tuple[int, ...]
    path: str = ""
    batch: int = -1


def event_log(policy: Policy, system: System, load: Load, requests: int, seed: int = 0) -> list[Event]:
    """Events of a run of so many requests, the load and the service as in replication 0 of `simulate`."""
    if requests * 4 > MOST_EVENTS:
        raise WrongUsage(
            f"an event log of {requests:,} requests", where="--log", remedy=f"Log at most {MOST_EVENTS // 4:,}."
        )
    streams = Streams(seed)
    served = run(policy, system, draw(load, requests, 0.0, system, streams), streams, log=True)
    return events_of(served, system)


def events_of(served: Replication, system: System) -> list[Event]:
    """The log of a run that was made with `log=True`."""
    names = [path.name for path in system.paths]
    found = [(float(t), ARRIVES, i, Event(float(t), WORDS[ARRIVES], (i,))) for i, t in enumerate(served.arrive_ms)]
    members: dict[int, list[int]] = {}
    for i in np.flatnonzero(served.path >= 0).tolist():
        members.setdefault(int(served.out.batch[i]), []).append(i)
    for batch, taken in members.items():
        path = names[int(served.path[taken[0]])]
        begun = float(served.out.start[taken[0]])
        ended = float(served.arrive_ms[taken[0]] + served.response_ms[taken[0]])
        found.append((begun, STARTS, batch, Event(begun, WORDS[STARTS], tuple(taken), path, batch)))
        found.append((ended, ENDS, batch, Event(ended, WORDS[ENDS], tuple(taken), path, batch)))
    found.sort(key=lambda row: row[:3])
    return [row[3] for row in found]


def write_events(target: Path, events: Sequence[Event]) -> None:
    """A log as CSV, an event a row; requests between spaces."""
    stream = io.StringIO()
    rows = csv.writer(stream, lineterminator="\n")
    rows.writerow(("at_ms", "what", "path", "batch", "requests"))
    for each in events:
        batch = "" if each.batch < 0 else each.batch
        rows.writerow((f"{each.at_ms:.6f}", each.what, each.path, batch, " ".join(map(str, each.requests))))
    write_text(target, stream.getvalue())


MS_PER_S = 1000.0

LEFT_OVER = 0.01
"""A share of requests never served that is worth a note; the last few may wait for others that do not come."""


class ClassTimes(Record, frozen=True):
    """Response times in ms of one class of requests, by `mean`, `p50`, `p90`, `p99`."""

    name: str = field(name="class")
    latency: dict[str, Number] = field(name="latency_ms")


@dataclass(frozen=True)
class Difference:
    """p99 less that of another policy on the same random numbers, ms; policy: which other one."""

    policy: str
    p99: Interval

    def to_json(self) -> dict[str, Any]:
        return {"policy": self.policy, "p99_ms": self.p99.value, "ci": [self.p99.low, self.p99.high]}


@dataclass(frozen=True, eq=False, repr=False)
class SimResult:
    """A policy at a load. Times in ms; NaN where a number is not known, as the rate of a closed loop.

    latency: by `mean`, `p50`, `p90`, `p99`.  utilisation, share: by path name, the share of time its servers were busy
    and of requests it served.  slo_attainment: share that ended by its deadline, None where nothing was promised.
    warmup_requests: discarded as warm-up.  nominal: paths with nominal times, not measured.  stable: False where the
    load is above capacity, or response times still grow at the end of the runs.  against: the difference to the
    baseline, the first policy of a sweep at this rate.  p99_error: what batches add to the error of p99.  summaries: of
    the replications; of a sweep they are not kept.
    """

    policy: str
    settings: Mapping[str, Any]
    rate_per_s: float
    requests: int
    latency: Mapping[str, Interval]
    level: float
    throughput_per_s: float
    utilisation: Mapping[str, float]
    share: Mapping[str, float]
    slo_attainment: float | None
    batch_size: Mapping[str, float]
    mean_in_system: float
    most_waiting: int
    unserved: int
    replications: int
    warmup_requests: int
    seed: int
    stable: bool
    capacity_per_s: float | None = None
    by_class: Sequence[ClassTimes] = ()
    notes: Sequence[str] = ()
    nominal: Sequence[str] = ()
    against: Difference | None = None
    p99_error: BatchErrors | None = field_of(default=None, repr=False)
    summaries: Sequence[Summary] = field_of(default=(), repr=False)

    def __repr__(self) -> str:
        state = "" if self.stable else ", unstable"
        shown = ", ".join(f"{name} {each.value:.4g}" for name, each in self.latency.items())
        return f"SimResult({self.policy}, {self.rate_per_s:.4g} req/s, ms: {shown}{state})"

    def to_json(self) -> dict[str, Any]:
        """Return an entry of `simulate policies --json`."""
        latency = {name: each.value for name, each in self.latency.items()}
        spans = {name: [each.low, each.high] for name, each in self.latency.items()}
        return {
            **{name: getattr(self, name) for name in (*PLAIN, *NUMBERS)},
            "latency_ms": {**latency, "ci": {**spans, "level": self.level}},
            "by_class": [each.to_json() for each in self.by_class],
            "in_system": {"mean": self.mean_in_system, "most_waiting": self.most_waiting},
            "batches": {name: each.batches for name, each in self.latency.items()},
            "trusted": {name: each.trusted for name, each in self.latency.items()},
            **({"vs_baseline": self.against.to_json()} if self.against is not None else {}),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "SimResult":
        """Return the record that `to_json` wrote, without replications, errors and the difference."""
        latency, counts, trusted = document["latency_ms"], document["batches"], document["trusted"]
        found = {}
        for name in counts:
            low, high = map(_number, latency["ci"][name])
            found[name] = Interval(_number(latency[name]), low, high, counts[name], trusted[name])
        return cls(
            **{name: document[name] for name in PLAIN},
            **{name: _number(document[name]) for name in NUMBERS},
            latency=found,
            level=latency["ci"]["level"],
            mean_in_system=_number(document["in_system"]["mean"]),
            most_waiting=document["in_system"]["most_waiting"],
            by_class=[ClassTimes.from_json(each) for each in document["by_class"]],
        )


PLAIN = (
    "policy", "settings", "requests", "slo_attainment", "unserved", "replications", "warmup_requests", "seed", "stable",
    "capacity_per_s", "nominal", "notes",
)  # fmt: skip
NUMBERS = ("rate_per_s", "throughput_per_s", "utilisation", "share", "batch_size")
"""Fields of a SimResult that are their own JSON, and those in which JSON's null stands for NaN."""


def _number(value: Any) -> Any:
    """Return a number, or numbers by name, with NaN for null."""
    if isinstance(value, Mapping):
        return {name: _number(each) for name, each in value.items()}
    return math.nan if value is None else value


@dataclass(frozen=True)
class Asked:
    """What was run: the rate per ms (NaN for a closed loop), names of the classes, level of the intervals, seed.

    kind: of the load; in a steady one growing response times mean a growing queue.  free: whether the number of
    requests was left to the load.
    """

    rate: float
    classes: Sequence[str]
    level: float
    seed: int
    kind: str = STEADY
    free: bool = False


def make_result(policy: Policy, system: System, summaries: Sequence[Summary], asked: Asked) -> SimResult:
    """The result of one or more replications."""
    names = [path.name for path in system.paths]
    counted = sum(each.counted for each in summaries)
    capacity = None if math.isnan(asked.rate) else system.capacity(policy)
    above = capacity is not None and asked.rate >= capacity
    growing = capacity is not None and asked.kind == STEADY and grows(summaries)
    latency = {name: interval(summaries, name, asked.level) for name in summaries[0].names}
    served = sum(each.served for each in summaries)
    met = sum(each.met for each in summaries) / counted if counted and summaries[0].promised else None
    return SimResult(
        policy=policy.name,
        settings=policy.settings,
        rate_per_s=asked.rate * MS_PER_S,
        requests=sum(each.requests for each in summaries),
        latency=latency,
        level=asked.level,
        throughput_per_s=_mean([each.throughput for each in summaries]) * MS_PER_S,
        utilisation={name: _mean([each.busy[i] for each in summaries]) for i, name in enumerate(names)},
        share={name: float(served[i] / max(1, served.sum())) for i, name in enumerate(names)},
        slo_attainment=met,
        batch_size=_batch_sizes(np.asarray(sum(each.sizes for each in summaries))),
        mean_in_system=_mean([each.mean_in_system for each in summaries]),
        most_waiting=max(each.most_waiting for each in summaries),
        unserved=sum(each.unserved for each in summaries),
        replications=len(summaries),
        warmup_requests=sum(each.length.warm for each in summaries),
        seed=asked.seed,
        stable=not above and not growing,
        capacity_per_s=capacity * MS_PER_S if capacity is not None and math.isfinite(capacity) else None,
        by_class=_by_class(summaries, asked.classes),
        notes=_notes(policy, summaries, latency, asked, (capacity, growing and not above)),
        nominal=[path.name for path in system.paths if path.nominal],
        summaries=tuple(summaries),
    )


def measured_result(policy: Policy, system: System, served: Replication, level: float = 0.95) -> SimResult:
    """The result of requests that a real system served, by the same statistics as of simulated ones."""
    n, warm = len(served.arrive_ms), served.drawn.warm
    span = float(served.arrive_ms[-1] - served.arrive_ms[warm]) if n > warm + 1 else math.nan
    rate = (n - warm - 1) / span if span > 0 else math.nan
    whole = summarise(served, Length(n, warm, 1))
    return make_result(policy, system, [whole], Asked(rate, (), level, 0))


def _batch_sizes(sizes: Any) -> dict[str, float]:
    """Percentiles over batches of both paths; NaN where none began."""
    counts = np.cumsum(sizes.sum(axis=0))
    if not counts[-1]:
        return dict.fromkeys(("p50", "p90", "p99"), math.nan)
    found = [int(np.searchsorted(counts, math.ceil(p * counts[-1] - 1e-9))) for p in PERCENTILES]
    return dict(zip(("p50", "p90", "p99"), map(float, found), strict=True))


def _by_class(summaries: Sequence[Summary], names: Sequence[str]) -> list[ClassTimes]:
    if not len(summaries[0].by_class):
        return []
    rows = [
        describe(sketches, summaries[0].percentiles) for sketches in zip(*(s.by_class for s in summaries), strict=True)
    ]
    return [
        ClassTimes(name, dict(zip(summaries[0].names, row.tolist(), strict=True)))
        for name, row in zip(names, rows, strict=True)
    ]


def _notes(
    policy: Policy,
    summaries: Sequence[Summary],
    latency: Mapping[str, Interval],
    asked: Asked,
    state: tuple[float | None, bool],
) -> list[str]:
    """state: capacity and whether the queue grows below it."""
    found = []
    capacity, growing = state
    above = capacity is not None and asked.rate >= capacity
    if capacity is not None and above:
        found.append(
            f"{policy.name} at {format_rate(asked.rate * MS_PER_S)} is above its capacity of"
            f" {format_rate(capacity * MS_PER_S, down=True)}. Unstable (ρ ≥ 1): latencies reflect the simulated"
            " horizon only."
        )
    elif growing:
        found.append(
            "Response times still grow at the end of the runs: the load is above the policy's capacity, or the runs are"
            " too short. Simulate more --requests."
        )
    unserved, requests = (sum(column) for column in zip(*((s.unserved, s.requests) for s in summaries), strict=True))
    if unserved > LEFT_OVER * requests:
        found.append(
            f"{unserved:,} requests were still queued when arrivals ended: {policy.name} waits to fill a batch."
        )
    if not above and not growing:
        found += _too_short(summaries, latency, asked)
    return found


def _too_short(summaries: Sequence[Summary], latency: Mapping[str, Interval], asked: Asked) -> list[str]:
    """Which percentiles have no interval, which intervals are not to be trusted, and what it takes."""
    counted = sum(each.counted for each in summaries)
    without = [name for name, each in latency.items() if math.isnan(each.high)]
    doubtful = [name for name, each in latency.items() if not each.trusted and name not in without]
    found = []
    for names, what in ((without, "no confidence interval"), (doubtful, "interval too narrow")):
        if not names:
            continue
        needed = max(latency[name].needed for name in names)
        has = f"{', '.join(names)}: {what}"
        if asked.kind == RECORDED:
            found.append(f"{has}, {counted:,} recorded requests of {needed:,} needed.")
        elif asked.kind == VARYING and len(summaries) < LEAST_BATCHES:
            found.append(f"{has}; a varying load needs {LEAST_BATCHES} --replications.")
        elif needed <= counted:
            found.append(f"{has}; warm-up takes too much of each run. Use fewer, longer --replications.")
        elif asked.free:
            found.append(f"{has}, {counted:,} requests of {needed:,} needed at this load.")
        else:
            found.append(
                f"{has}, {counted:,} requests of {needed:,} needed at this load. Leave out --requests for as many."
            )
    return found


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
