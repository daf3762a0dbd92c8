"""Loads that the simulators serve: drawn from distributions, recorded, or a closed loop that reacts to the service."""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from numpy.random import PCG64, Generator, SeedSequence
from numpy.typing import NDArray

from latfit.errors import WrongUsage
from latfit.stats import FloatArray
from latfit.units import parse_duration_ms
from latfit.workload.arrivals import ArrivalProcess
from latfit.workload.requests import Constant, LengthDistribution, Requests, make_requests

ARRIVALS, LENGTHS, CLASSES, THINKING, SERVICE = range(5)
"""Uses of a stream. SERVICE is followed by the number of the execution path."""
LIMITS = {"ttft": "ttft_slo_ms", "tpot": "tpot_slo_ms", "sla": "deadline_ms"}
"""Limits of a request class, by the names of the options that set them for all requests."""


@dataclass(frozen=True)
class Streams:
    """Random streams of one replication: PCG64 with seeds spawned from (seed; replication, use)."""

    seed: int
    replication: int = 0

    def generator(self, *use: int) -> Generator:
        return Generator(PCG64(SeedSequence(self.seed, spawn_key=(self.replication, *use))))


@dataclass(frozen=True)
class RequestClass:
    """A share of the requests with its own SLOs in ms; classes are listed by urgency, the most urgent first."""

    share: float = 1.0
    deadline_ms: float = math.inf
    name: str = ""
    ttft_slo_ms: float = math.inf
    tpot_slo_ms: float = math.inf

    def __post_init__(self) -> None:
        if not all(each > 0 for each in (self.share, self.deadline_ms, self.ttft_slo_ms, self.tpot_slo_ms)):
            raise WrongUsage("a class's share and limits must be above zero", where="--class", remedy="Correct them.")


def parse_class(text: str) -> RequestClass:
    """Parse `NAME:SHARE`, `NAME:SHARE:DEADLINE`, or `NAME:SHARE:ttft=300ms,tpot=50ms,sla=2s`. Raises WrongUsage."""
    name, _, rest = text.partition(":")
    share, limited, given = rest.partition(":")
    remedy = "Write chat:0.3:50ms, or chat:0.3:ttft=300ms,tpot=50ms."
    limits: dict[str, float] = {}
    try:
        for each in given.split(",") if limited else ():
            option, named, value = each.rpartition("=")
            limit = LIMITS[option.strip() if named else "sla"]
            if limit in limits:
                raise WrongUsage(f"{text!r} gives one limit twice", where="--class", remedy=remedy)
            limits[limit] = parse_duration_ms(value, option="--class")
        return RequestClass(float(share), name=name, **limits)
    except (ValueError, KeyError):
        raise WrongUsage(f"{text!r} is not a class", where="--class", remedy=remedy) from None


@dataclass(frozen=True)
class OpenLoad:
    """Arrivals and lengths drawn from distributions; classes and users at random."""

    notes: ClassVar[tuple[str, ...]] = ()
    arrivals: ArrivalProcess
    lengths: LengthDistribution = field(default_factory=Constant)
    classes: tuple[RequestClass, ...] = (RequestClass(),)
    users: int = 1

    @property
    def rate(self) -> float:
        return self.arrivals.rate

    def at_rate(self, rate: float) -> "OpenLoad":
        return replace(self, arrivals=self.arrivals.at_rate(rate))

    def sample(self, count: int, streams: Streams) -> Requests:
        """Return `count` requests, or fewer if the arrivals end."""
        return _drawn(self, self.arrivals.times_ms(count, streams.generator(ARRIVALS)), streams)


@dataclass(frozen=True)
class RecordedLoad:
    """Recorded requests, the same in every replication; notes: how they were read."""

    requests: Requests
    notes: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        return self.requests.rate

    def at_rate(self, rate: float) -> "RecordedLoad":
        return replace(self, requests=self.requests.at_rate(rate))

    def sample(self, count: int, streams: Streams) -> Requests:
        return self.requests if count >= len(self.requests) else self.requests.select(slice(0, count))


@dataclass(frozen=True)
class ClosedLoad:
    """`users` who send one request at a time and think for a mean of `think_ms` in between, also before the first."""

    notes: ClassVar[tuple[str, ...]] = ()
    users: int
    think_ms: float
    exponential: bool = True
    lengths: LengthDistribution = field(default_factory=Constant)
    classes: tuple[RequestClass, ...] = (RequestClass(),)

    def __post_init__(self) -> None:
        if self.users < 1 or not math.isfinite(self.think_ms) or self.think_ms < 0:
            remedy = "Give one user or more, and 0ms or more to think."
            found = "a closed loop needs a user and a think time that is not negative"
            raise WrongUsage(found, where="--users, --think", remedy=remedy)

    @property
    def rate(self) -> float:
        """Not a number: users send when they are answered."""
        return math.nan

    def sample(self, count: int, streams: Streams) -> Requests:
        return replace(_drawn(self, np.zeros(count), streams), user_id=np.arange(count, dtype=np.int32) % self.users)

    def thinking(self, count: int, streams: Streams) -> FloatArray:
        drawn = streams.generator(THINKING).standard_exponential(count) if self.exponential else np.ones(count)
        return np.asarray(self.think_ms * drawn)


Load = OpenLoad | RecordedLoad | ClosedLoad


def _drawn(load: OpenLoad | ClosedLoad, arrival_ms: FloatArray, streams: Streams) -> Requests:
    """Return requests with these arrivals (n,), and lengths, classes and users drawn."""
    n = len(arrival_ms)
    prompt, output = load.lengths.lengths(n, streams.generator(LENGTHS))
    rng = streams.generator(CLASSES)
    class_id = draw_classes(load.classes, n, rng) if len(load.classes) > 1 else np.zeros(n, np.int32)
    user_id = rng.integers(0, load.users, n, dtype=np.int32) if load.users > 1 else np.zeros(n, np.int32)
    deadlines, ttft, tpot = (
        np.array([getattr(each, name) for each in load.classes])[class_id]
        for name in ("deadline_ms", "ttft_slo_ms", "tpot_slo_ms")
    )
    found = make_requests(arrival_ms, prompt, output, class_id=class_id, user_id=user_id, deadline_ms=deadlines)
    return replace(found, ttft_slo_ms=ttft, tpot_slo_ms=tpot)


def draw_classes(classes: tuple[RequestClass, ...], count: int, rng: Generator) -> NDArray[np.int32]:
    """Return the class of each request (count,), drawn by the classes' shares."""
    edges = np.cumsum([each.share for each in classes])
    drawn = np.searchsorted(edges / edges[-1], rng.random(count), side="right")
    return np.minimum(drawn, len(classes) - 1).astype(np.int32)
