"""A load: the requests that the simulators serve, known beforehand or reacting to the service.

- OpenLoad: arrivals drawn from an arrival process, whatever the service does.
- RecordedLoad: requests as they were logged; every replication is the same load.
- ClosedLoad: each of `users` sends a request, waits for its end, thinks, and sends the next. Its arrivals depend on the
  service, so it is a specification that a simulator drives: nothing can be drawn beforehand but the thinking.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np

from latfit.errors import WrongUsage
from latfit.workload.arrivals import ArrivalProcess
from latfit.workload.lengths import Constant, LengthDistribution
from latfit.workload.random_streams import ARRIVALS, CLASSES, LENGTHS, Streams
from latfit.workload.requests import Requests, make_requests


@dataclass(frozen=True)
class RequestClass:
    """A share of the requests that is served under its own promise; classes are listed the most urgent first."""

    share: float = 1.0
    deadline_ms: float = math.inf
    name: str = ""

    def __post_init__(self) -> None:
        if not self.share > 0 or not self.deadline_ms > 0:
            raise WrongUsage("a class's share and deadline must be above zero", where="class", remedy="Correct them.")


@dataclass(frozen=True)
class OpenLoad:
    """Arrivals and lengths drawn from distributions; classes and users at random."""

    arrivals: ArrivalProcess
    lengths: LengthDistribution = field(default_factory=Constant)
    classes: tuple[RequestClass, ...] = (RequestClass(),)
    users: int = 1

    @property
    def rate(self) -> float:
        """Mean arrivals per ms."""
        return self.arrivals.rate

    def at_rate(self, rate: float) -> "OpenLoad":
        return replace(self, arrivals=self.arrivals.at_rate(rate))

    def sample(self, count: int, streams: Streams) -> Requests:
        """`count` requests, or fewer where the load ends."""
        arrival_ms = self.arrivals.times_ms(count, streams.generator(ARRIVALS))
        n = len(arrival_ms)
        prompt, output = self.lengths.lengths(n, streams.generator(LENGTHS))
        rng = streams.generator(CLASSES)
        class_id = draw_classes(self.classes, n, rng) if len(self.classes) > 1 else np.zeros(n, np.int32)
        user_id = rng.integers(0, self.users, n, dtype=np.int32) if self.users > 1 else np.zeros(n, np.int32)
        deadlines = np.array([each.deadline_ms for each in self.classes])[class_id]
        return make_requests(arrival_ms, prompt, output, class_id=class_id, user_id=user_id, deadline_ms=deadlines)


@dataclass(frozen=True)
class RecordedLoad:
    """Logged requests. notes: what should be known of how they were read."""

    requests: Requests
    notes: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        return self.requests.rate

    def at_rate(self, rate: float) -> "RecordedLoad":
        return replace(self, requests=self.requests.at_rate(rate))

    def sample(self, count: int, streams: Streams) -> Requests:
        """The first `count` requests, the same in every replication."""
        return self.requests if count >= len(self.requests) else self.requests.select(slice(0, count))


@dataclass(frozen=True)
class ClosedLoad:
    """`users` who send one request at a time and think in between.

    think_ms: mean time from the end of a request to the next one; exponential, or constant. All users start thinking at
    time 0.
    """

    users: int
    think_ms: float
    exponential: bool = True
    lengths: LengthDistribution = field(default_factory=Constant)
    classes: tuple[RequestClass, ...] = (RequestClass(),)

    def __post_init__(self) -> None:
        if self.users < 1 or not math.isfinite(self.think_ms) or self.think_ms < 0:
            raise WrongUsage(
                "a closed loop needs a user and a think time that is not negative", where="load", remedy="Give both."
            )


Load = OpenLoad | RecordedLoad | ClosedLoad


def draw_classes(
    classes: tuple[RequestClass, ...], count: int, rng: np.random.Generator
) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    """Class of each request (count,), by the classes' shares."""
    edges = np.cumsum([each.share for each in classes])
    drawn = np.searchsorted(edges / edges[-1], rng.random(count), side="right")
    return np.minimum(drawn, len(classes) - 1).astype(np.int32)
