"""How long the runs of a simulation must be, and how much of their start is left out.

What decides is how far apart requests still depend on each other: the reach of `latfit.sim.estimate`, in requests. It
is measured on a pilot, a run made anew and longer until it has PILOT_REACHES reaches. It rises with the load, for M/M/1
about as (1 + rho)/(1 - rho)^2; any service law, batching or burstiness of arrivals shows in it. Runs then have REACHES
reaches in all, MANY requests at the least, and leave out WARM reaches each, in which a start from empty fades to
exp(-WARM/2) of what it was. Runs that turn out too short are made anew, longer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from latfit.sim.estimate import Summary, grows, interval, reach
from latfit.sim.sketch import PIECES
from latfit.sim.spread import APART, EXCEEDANCES, SPREAD

MANY = 500_000
REACHES = 128 * APART
PILOT, PILOT_REACHES = 50_000, 1500
WARM = 20
WARM_SHARE = 0.02
"""Of a run, at the least; half of it at the most."""

LONGEST = 2_000_000
"""Requests that count in a replication, so that a few at a time fit into memory; else there are more replications."""

MOST = 100_000_000
"""Requests in all, unless they are asked for: some seconds."""

BATCHES = 1024
"""Batches that are kept of all replications, at the least."""

STEP = 8
"""Times as long as before that runs become at the most, where they were too short."""

SURELY_GROWING = 4_000_000
"""Requests in all from which a queue that still grows is taken to have no end."""


@dataclass(frozen=True)
class Length:
    """requests of each of so many replications; warm of them are left out."""

    requests: int
    warm: int
    replications: int

    @property
    def in_all(self) -> int:
        return self.requests * self.replications

    @property
    def batch(self) -> int:
        """Requests in a batch: a power of two, so that runs of any two lengths can be compared."""
        return int(max(PIECES, 2 ** math.floor(math.log2(max(1.0, self.in_all / BATCHES)))))


def length_of(requests: int, replications: int, warmup: float | None, far: float = 0.0) -> Length:
    """Runs of so many requests. warmup: share that is left out; None for as much as the reach `far` asks."""
    forgotten = min(max(WARM_SHARE * requests, WARM * far), requests / 2)
    return Length(requests, int(forgotten if warmup is None else warmup * requests), replications)


def wanted(percentiles: Sequence[float], far: float) -> int:
    """Requests in all that are wanted for percentiles where correlation reaches `far`, as far as the budget goes."""
    beyond = max(1.1 * SPREAD[0] * EXCEEDANCES / min(share, 1 - share) for share in percentiles or (0.5,))
    return math.ceil(min(MOST, max(MANY, beyond, REACHES * far)))


def divided(in_all: int, replications: int, warmup: float | None, far: float) -> Length:
    """Runs with so many requests in all that count."""
    replications = max(replications, math.ceil(in_all / LONGEST))
    each = math.ceil(in_all / replications)
    if warmup is not None:
        return length_of(math.ceil(each / (1 - warmup)), replications, warmup)
    return length_of(each + math.ceil(WARM * far), replications, None, far)


def measured_reach(pilot: Callable[[Length], Summary], most: int) -> float:
    """The reach in requests, from runs of `pilot` with up to `most` requests; 0 where the queue seems to grow."""
    requests = min(PILOT, most)
    while True:
        found = [pilot(Length(requests, 0, 1))]
        far = reach(found)
        if requests >= PILOT_REACHES * far:
            return far
        if requests > PILOT and grows(found):
            return 0.0
        if requests >= most:
            return far
        requests = min(most, max(2 * requests, min(STEP * requests, math.ceil(PILOT_REACHES * far))))


def longer(summaries: Sequence[Summary], length: Length, warmup: float | None) -> Length | None:
    """The length with which too short runs are to be made anew; None where they are long enough, or it is no use."""
    if length.in_all >= MOST:
        return None
    if grows(summaries):
        if length.in_all >= SURELY_GROWING:
            return None
        return divided(STEP * length.in_all, length.replications, warmup, 0.0)
    if all(interval(summaries, name).trusted for name in summaries[0].names):
        return None
    far = reach(summaries)
    in_all = min(MOST, STEP * length.in_all, max(2 * length.in_all, wanted(summaries[0].percentiles, far)))
    return divided(in_all, length.replications, warmup, far)
