"""What the compiled core reads and writes: plain tuples of arrays, and the numbers its counters go by."""

from typing import Any, NamedTuple

HEAD, TAIL, QUEUED, KNOWN, SIDE_FIRST, SIDE_LAST, SIDE_QUEUED, RETURNING, ISSUED, BATCHES, PHASE, MOST, COUNTERS = (
    range(13)
)
CLOCK, LAST, AREA, CLOCKS = range(4)

DETERMINISTIC, EXPONENTIAL, EMPIRICAL = range(3)
"""Laws of the service time given its typical value."""

WARMING, MEASURING, DRAINING = range(3)
NOBODY = -1


class Load(NamedTuple):
    """arrive (n,) ms; tokens (n,) or empty where all are alike; class_id (n,) or empty for one class; deadlines
    (classes,) ms; think (n,) ms, empty for an open load; users of a closed one; warm: the first that counts."""

    arrive: Any
    tokens: Any
    class_id: Any
    deadlines: Any
    think: Any
    users: int
    warm: int


class Machine(NamedTuple):
    """times (2, Bmax + 1, grid) ms by path, batch and tokens in it; grid of tokens; typical (2, Bmax + 1) ms, for the
    policy; servers (2,); kind (2,) of the service law; of an empirical one the ratios (2, k) to the typical time and
    the share (2, k) of services up to each; those of batches of b are first[., b]..last[., b] (2, Bmax + 1), rising."""

    times: Any
    grid: Any
    typical: Any
    servers: Any
    kind: Any
    ratios: Any
    reached: Any
    first: Any
    last: Any


class Rule(NamedTuple):
    """A policy: code, parameters, and the ms of waiting that make up for a class."""

    code: int
    parameters: Any
    ageing: float


class Scratch(NamedTuple):
    """What the core works on: free (2, servers): when each server is free; members (Bmax + 1,); seen (VIEW,); following
    (n,): who is behind a request, empty where nobody needs it; lists (2, classes): first and last; returns (users,)."""

    free: Any
    members: Any
    seen: Any
    following: Any
    lists: Any
    returns: Any


class Out(NamedTuple):
    """response (n,) ms, NaN until served; path (n,), -1 until served; sizes (2, Bmax + 1): batches by size; busy (3,
    2): ms of service begun, in all, up to the first and up to the last arrival that count; batch (n,), start (n,) and
    moved (n,): number and start of the batch and when the request was sent to the side path, empty where not wanted;
    counters and clocks at the end."""

    response: Any
    path: Any
    sizes: Any
    busy: Any
    batch: Any
    start: Any
    moved: Any
    counters: Any
    clocks: Any
