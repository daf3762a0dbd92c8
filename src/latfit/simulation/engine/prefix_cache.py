"""Prefix cache of an engine, for loads that record the contents of prompt blocks.

A unit is the smallest whole number of recorded blocks and of KV blocks; its name includes all contents before it. Freed
units stay cached until a block of theirs is taken, least recently used first, as in vLLM.
"""

from latfit.compiled import inner, rare
from latfit.simulation.engine import state as st
from latfit.simulation.engine.state import Limits, Load, State, disown, put_back


@inner
def _is_there(o: Limits, load: Load, s: State, c: int) -> bool:
    """Return whether a unit is in use, or free and complete."""
    at = s.unit_at[c]
    return bool(s.unit_uses[c] > 0 or (at >= 0 and s.seg_count[at] == load.unit // o.block_size))


@rare
def units_there(o: Limits, load: Load, s: State, r: int) -> int:
    """Return the cached units at the front of a request; 0 if contents are unknown."""
    if len(load.known) == 0 or (o.swap == 1 and s.preempted[r] > 0):
        return 0
    first = load.unit_start[r]
    most = min(load.unit_start[r + 1] - first, (load.prompt[r] + s.gen_of[r] - 1) // load.unit)
    for k in range(most):
        if not _is_there(o, load, s, load.unit_id[first + k]):
            return k
    return int(most)


@rare
def blocks_shared(o: Limits, load: Load, s: State, r: int) -> int:
    """Return the blocks of cached units that other requests hold."""
    if len(load.known) == 0:
        return 0
    found, first = 0, load.unit_start[r]
    for k in range(first, first + units_there(o, load, s, r)):
        found += s.unit_uses[load.unit_id[k]] > 0
    return int(found * (load.unit // o.block_size))


@rare
def hold_units(o: Limits, load: Load, s: State, r: int, units: int) -> None:
    first, blocks = load.unit_start[r], load.unit // o.block_size
    for k in range(first, first + units):
        c = load.unit_id[k]
        at = s.unit_at[c]
        if at >= 0:
            disown(s, at)
            s.seg_count[at] = 0
            s.i[st.FREE] -= blocks
        s.unit_uses[c] += 1
        s.held[k] = 1


@rare
def name_planned(o: Limits, load: Load, s: State) -> None:
    for i in range(s.i[st.COUNT]):
        if s.chunk[i] > 0 and s.comp[i] < load.prompt[s.rid[i]]:
            name_units(o, load, s, s.rid[i], s.comp[i], s.comp[i] + s.chunk[i])


@rare
def name_units(o: Limits, load: Load, s: State, r: int, computed: int, then: int) -> None:
    first = load.unit_start[r]
    for k in range(computed // load.unit, min(then // load.unit, load.unit_start[r + 1] - first)):
        c = load.unit_id[first + k]
        if not _is_there(o, load, s, c):
            if s.unit_at[c] >= 0:
                disown(s, s.unit_at[c])
            s.unit_uses[c] = 1
            s.held[first + k] = 1


@inner
def give_back(o: Limits, load: Load, s: State, r: int, blocks: int) -> None:
    if len(load.known) == 0:
        put_back(s, -1, blocks)
    else:
        give_back_units(o, load, s, r, blocks, -1)


@rare
def give_back_units(o: Limits, load: Load, s: State, r: int, blocks: int, owner: int) -> None:
    """Free the blocks behind a request's units as a segment of `owner`, then its units, the last one first."""
    of_unit, first, last = load.unit // o.block_size, load.unit_start[r], load.unit_start[r + 1]
    for k in range(first, last):
        blocks -= of_unit * s.held[k]
    put_back(s, owner, blocks)
    for k in range(last - 1, first - 1, -1):
        if s.held[k] == 1:
            c = load.unit_id[k]
            s.held[k] = 0
            s.unit_uses[c] -= 1
            if s.unit_uses[c] == 0:
                put_back(s, -2 - c, of_unit)


@rare
def behind_units(o: Limits, load: Load, s: State, r: int, computed: int) -> int:
    """Return the full blocks behind a request's units; 0 if it does not hold all of these units."""
    first, last = load.unit_start[r], load.unit_start[r + 1]
    for k in range(first, last):
        if s.held[k] == 0:
            return 0
    return int(max(computed // o.block_size - (last - first) * (load.unit // o.block_size), 0))


def forget(states: State, k: int) -> None:
    """Drop all names of free blocks of engine k, as a starting engine does."""
    owners = states.seg_owner[k, states.i[k, st.OLDEST] : states.i[k, st.NEWEST]]
    states.unit_at[k, -2 - owners[owners < -1]] = -1
    owners[owners < -1] = -1
