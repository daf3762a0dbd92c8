"""Contents of prompts that an engine finds in its KV cache, where recorded requests name the contents of their blocks.

A unit is as many tokens as recorded blocks and KV blocks come out even on. The name of a unit stands for all that comes
before it, too, so that a prompt is found as far as its units are, one after the other from the first (vLLM's prefix
caching: blocks by the hash of their tokens and of all before them). At least the last token is computed. A unit is
there from the step on that computes it; requests that have the same hold it together, and it takes its blocks once.
Where two compute the same at a time, the second keeps its own blocks and they are named by nobody.

When the last request that holds a unit is gone its blocks are free but stay named: they wait among all other free
blocks to be taken, the oldest first, the end of a request before its front. That is vLLM's rule (least recently used),
in units instead of blocks: a unit of which one block is taken is none any more. Only whole units of prompts have names;
generated tokens have none, as no record says what they were.
"""

from latfit.compiled import inner, rare
from latfit.simulation.engine.state import COUNT, FREE, NEWEST, OLDEST, Limits, Load, State, disown, put_back


@inner
def _is_there(o: Limits, load: Load, s: State, c: int) -> bool:
    """Whether a unit is held, or free and whole."""
    at = s.unit_at[c]
    return bool(s.unit_uses[c] > 0 or (at >= 0 and s.seg_count[at] == load.unit // o.block_size))


@inner
def units_there(o: Limits, load: Load, s: State, r: int) -> int:
    """Units at the front of a request that need not be computed: none where contents are not known."""
    if len(load.known) == 0 or (o.swap == 1 and s.preempted[r] > 0):
        return 0
    return int(_found(o, load, s, r, load.prompt[r] + s.gen_of[r]))


@rare
def _found(o: Limits, load: Load, s: State, r: int, known: int) -> int:
    first = load.unit_start[r]
    most = min(load.unit_start[r + 1] - first, (known - 1) // load.unit)
    for k in range(most):
        if not _is_there(o, load, s, load.unit_id[first + k]):
            return k
    return int(most)


@inner
def blocks_shared(o: Limits, load: Load, s: State, r: int) -> int:
    """Blocks of units that are found and held by others, for which none has to be free."""
    if len(load.known) == 0:
        return 0
    return int(_in_use(load, s, r, units_there(o, load, s, r)) * (load.unit // o.block_size))


@rare
def _in_use(load: Load, s: State, r: int, units: int) -> int:
    found, first = 0, load.unit_start[r]
    for k in range(first, first + units):
        found += s.unit_uses[load.unit_id[k]] > 0
    return found


@rare
def hold_units(o: Limits, load: Load, s: State, r: int, units: int) -> None:
    """A request that starts holds the units that are found."""
    first, blocks = load.unit_start[r], load.unit // o.block_size
    for k in range(first, first + units):
        c = load.unit_id[k]
        at = s.unit_at[c]
        if at >= 0:
            disown(s, at)
            s.seg_count[at] = 0
            s.i[FREE] -= blocks
        s.unit_uses[c] += 1
        s.held[k] = 1


@rare
def name_planned(o: Limits, load: Load, s: State) -> None:
    """The units that the running requests complete in the step that is planned."""
    for i in range(s.i[COUNT]):
        if s.chunk[i] > 0 and s.comp[i] < load.prompt[s.rid[i]]:
            name_units(o, load, s, s.rid[i], s.comp[i], s.comp[i] + s.chunk[i])


@rare
def name_units(o: Limits, load: Load, s: State, r: int, computed: int, then: int) -> None:
    """The units that a request's step completes, which had `computed` tokens and has `then`, are there from now on."""
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
    """Free all the blocks that a request holds."""
    if len(load.known) == 0:
        put_back(s, -1, blocks)
    else:
        give_back_units(o, load, s, r, blocks, -1)


@rare
def give_back_units(o: Limits, load: Load, s: State, r: int, blocks: int, owner: int) -> None:
    """Free the blocks of a request: those behind its units as the segment of `owner`, then its units, the last one
    first."""
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
    """Full blocks that a request holds behind its units; 0 where it does not hold all of these."""
    first, last = load.unit_start[r], load.unit_start[r + 1]
    for k in range(first, last):
        if s.held[k] == 0:
            return 0
    return int(max(computed // o.block_size - (last - first) * (load.unit // o.block_size), 0))


@rare
def forget(s: State) -> None:
    """Nothing of what the free blocks hold is known any more: the engine starts."""
    for at in range(s.i[OLDEST], s.i[NEWEST]):
        if s.seg_owner[at] < -1:
            disown(s, at)
