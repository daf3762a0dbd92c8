"""The KV cache's free blocks as a queue of segments, oldest first, without a name for any single block.

A freed request puts its blocks at the young end, its last ones in front: they are taken first. What matters of a free
block is only whose it was, so a segment (owner, count) stands for a row of them. While a preempted request waits, the
blocks of its segment that are still there hold the front of its sequence, and it takes them back when it resumes.
Segments without an owner that lie next to each other are one.
"""

from latfit.sim.engine.state import FREE, FULLEST, NEWEST, OLDEST, State, njit, rare


@njit
def blocks_for(tokens: int, block_size: int) -> int:
    return (tokens + block_size - 1) // block_size


@njit
def take(s: State, count: int) -> None:
    """Take the oldest free blocks; there must be as many."""
    s.i[FREE] -= count
    at = s.i[OLDEST]
    while count > 0:
        there = s.seg_count[at]
        if there > count:
            s.seg_count[at] = there - count
            break
        count -= there
        s.seg_count[at] = 0
        if s.seg_owner[at] >= 0:
            s.segment[s.seg_owner[at]] = -1
            s.seg_owner[at] = -1
        if at + 1 == s.i[NEWEST]:
            break
        at += 1
    s.i[OLDEST] = at


@njit
def put_back(s: State, owner: int, count: int) -> None:
    """Free blocks, as the segment of `owner`, or of nobody (-1)."""
    s.i[FREE] += count
    if count == 0:
        return
    young = s.i[NEWEST] - 1
    if owner < 0 and s.seg_owner[young] < 0:
        s.seg_count[young] += count
        return
    if s.i[NEWEST] == len(s.seg_count):
        _compact(s)
    at = s.i[NEWEST]
    s.seg_owner[at], s.seg_count[at] = owner, count
    if owner >= 0:
        s.segment[owner] = at
    s.i[NEWEST] = at + 1


@njit
def surviving(s: State, r: int) -> int:
    """Full blocks at the front of a preempted request's sequence that nobody has taken yet."""
    return min(s.seg_count[s.segment[r]], s.kept[r]) if s.segment[r] >= 0 else 0


@njit
def reclaim(s: State, r: int, hits: int) -> None:
    """Take `hits` surviving blocks back; what is left of the segment belongs to nobody."""
    at = s.segment[r]
    if at < 0:
        return
    s.seg_count[at] -= hits
    s.seg_owner[at] = -1
    s.segment[r] = -1
    s.i[FREE] -= hits


@rare
def _compact(s: State) -> None:
    """Move the segments to the front of their arrays; empty ones go, neighbours without an owner merge."""
    to = 0
    s_old = s.i[OLDEST]
    for at in range(s_old, s.i[NEWEST]):
        owner, count = s.seg_owner[at], s.seg_count[at]
        if count == 0 and owner < 0:
            continue
        if owner < 0 and to > 0 and s.seg_owner[to - 1] < 0:
            s.seg_count[to - 1] += count
            continue
        s.seg_owner[to], s.seg_count[to] = owner, count
        if owner >= 0:
            s.segment[owner] = to
        to += 1
    if to == 0:
        s.seg_owner[0], s.seg_count[0] = -1, 0
        to = 1
    s.i[OLDEST], s.i[NEWEST] = 0, to
    s.i[FULLEST] = max(s.i[FULLEST], to)
