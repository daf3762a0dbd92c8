"""Queue of waiting requests: preempted ones first, the last one preempted in front, then by the scheduling policy.

Policies: first come first served, a key (shortest job, priority with ageing), fair by user, earliest deadline, or two
keys (the first below `switch_at` waiting requests, the second from there on). With deadlines, late requests come
first, by class. Details: docs/theory/simulation.md, "Scheduling of waiting requests".
"""

from latfit.compiled import inner, rare
from latfit.simulation.engine.state import (
    DEADLINE,
    FAIR,
    FCFS,
    HEAD,
    HEAP,
    HEAP_2,
    KEYED,
    NOW,
    PUSHED,
    SEEN,
    STACK,
    SWITCH,
    WAITING,
    Limits,
    Load,
    State,
)
from latfit.simulation.heap import pop as heap_pop, push
from latfit.stats import FloatArray, IntArray


@inner
def absorb(o: Limits, load: Load, s: State, now: float) -> int:
    """Queue the requests that have arrived by `now`; return their number."""
    before = s.i[SEEN]
    while s.i[SEEN] < s.i[PUSHED] and load.arrival[s.inbox[s.i[SEEN]]] <= now:
        r = s.inbox[s.i[SEEN]]
        s.i[SEEN] += 1
        s.seen[r] = now
        if o.order == KEYED or o.order == SWITCH or o.order == DEADLINE:
            push(s.heap, s.i[HEAP], load.key, r)
            s.i[HEAP] += 1
        if o.order == SWITCH:
            push(s.heap_2, s.i[HEAP_2], load.key_2, r)
            s.i[HEAP_2] += 1
        elif o.order == FAIR:
            _queue(load, s, r)
    s.i[WAITING] += s.i[SEEN] - before
    return int(s.i[SEEN] - before)


@inner
def peek(o: Limits, load: Load, s: State) -> int:
    """Return the next request, or -1."""
    if s.i[WAITING] == 0:
        return -1
    if s.i[STACK] > 0:
        return int(s.stack[s.i[STACK] - 1])
    if o.order == FCFS:
        return int(s.inbox[s.i[HEAD]])
    if o.order == KEYED:
        return int(s.heap[0])
    if o.order == FAIR:
        return int(s.user_head[_least_served(s)])
    if o.order == DEADLINE:
        while s.i[HEAP] > 0 and load.key[s.heap[0]] <= s.f[NOW]:
            push(s.heap_2, s.i[HEAP_2], load.key_2, heap_pop(s.heap, s.i[HEAP], load.key))
            s.i[HEAP] -= 1
            s.i[HEAP_2] += 1
        return int(s.heap_2[0] if s.i[HEAP_2] > 0 else s.heap[0])
    if s.i[WAITING] < o.switch_at:
        _drop_taken(s, s.heap, HEAP, load.key)
        return int(s.heap[0])
    _drop_taken(s, s.heap_2, HEAP_2, load.key_2)
    return int(s.heap_2[0])


@inner
def pop(o: Limits, load: Load, s: State, r: int) -> None:
    """Remove the request that `peek` returned."""
    s.i[WAITING] -= 1
    if s.i[STACK] > 0:
        s.i[STACK] -= 1
    elif o.order == FCFS:
        s.i[HEAD] += 1
    elif o.order == DEADLINE and s.i[HEAP_2] > 0:
        heap_pop(s.heap_2, s.i[HEAP_2], load.key_2)
        s.i[HEAP_2] -= 1
    elif o.order == KEYED or o.order == DEADLINE:
        heap_pop(s.heap, s.i[HEAP], load.key)
        s.i[HEAP] -= 1
    elif o.order == FAIR:
        user = load.user[r]
        s.user_head[user] = s.after[r]
    else:
        s.taken[r] = 1


@inner
def push_front(s: State, r: int) -> None:
    """Put a preempted request in front of all that wait."""
    s.stack[s.i[STACK]] = r
    s.i[STACK] += 1
    s.i[WAITING] += 1


@rare
def _queue(load: Load, s: State, r: int) -> None:
    user = load.user[r]
    s.after[r] = -1
    if s.user_head[user] < 0:
        least = _least_served(s)
        if least >= 0:
            s.served[user] = max(s.served[user], s.served[least])
        s.user_head[user] = r
    else:
        s.after[s.user_tail[user]] = r
    s.user_tail[user] = r


@inner
def _least_served(s: State) -> int:
    """Return the waiting user with the least service (ties: the lowest number), or -1."""
    best = -1
    for user in range(len(s.served)):
        if s.user_head[user] >= 0 and (best < 0 or s.served[user] < s.served[best]):
            best = user
    return best


@rare
def _drop_taken(s: State, heap: IntArray, size: int, key: FloatArray) -> None:
    while s.taken[heap[0]] == 1:
        heap_pop(heap, s.i[size], key)
        s.i[size] -= 1
