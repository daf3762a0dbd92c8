"""Static batching: a batch starts together, is padded to its longest prompt, and ends with its longest output.

Every row of a batch computes as many prompt tokens as the longest one, and takes part in every step of decoding until
the last one is done: of n (max prompt + max output - 1) computed tokens, sum (prompt + output - 1) are of use. A batch
starts when the one before it has ended and `start_at` requests wait, or no more come; it takes as many as fit, first
come first served, with blocks for the longest prompt and output in every row.
"""

from latfit.sim.engine.blocks import blocks_for
from latfit.sim.engine.cost import StepCosts, Work, drawn_ms
from latfit.sim.engine.state import (
    BUSY_UNTIL,
    COMPUTED,
    COUNT,
    FINISHED,
    FREE,
    LAST_END,
    NOW,
    PREFILL_STEPS,
    PREFILL_TOKENS,
    PUSHED,
    TOKENS,
    WAITING,
    Limits,
    Load,
    State,
    entry,
    njit,
)
from latfit.sim.engine.tally import count_gaps, note_step


@entry
def advance_static(o: Limits, load: Load, costs: StepCosts, s: State) -> int:
    """Serve all requests of the inbox in batches; 0 as `advance` answers when all is done."""
    head, n = 0, s.i[PUSHED]
    while head < n:
        start_at = min(head + o.start_at, n) - 1
        now = max(s.f[NOW], load.arrival[s.inbox[start_at]])
        arrived = head
        while arrived < n and load.arrival[s.inbox[arrived]] <= now:
            arrived += 1
        size, prompt, output = _fitting(o, load, s, head, arrived)
        s.f[NOW] = now
        s.i[COUNT], s.i[WAITING] = size, arrived - head - size
        s.i[FREE] = o.blocks - size * blocks_for(prompt + output - 1, o.block_size)
        _make_batch(o, load, costs, s, (head, size, prompt, output))
        head += size
        s.f[NOW] = s.f[LAST_END]
    s.i[COUNT], s.i[WAITING], s.i[FREE] = 0, 0, o.blocks
    return 0


@njit
def _fitting(o: Limits, load: Load, s: State, head: int, arrived: int) -> tuple[int, int, int]:
    """How many of the waiting ones from `head` on fit into one batch; its longest prompt and output."""
    size, prompt, output = 0, 0, 0
    while head + size < arrived and size < o.max_num_seqs:
        r = s.inbox[head + size]
        longer, further = max(prompt, load.prompt[r]), max(output, load.output[r])
        if size > 0 and (size + 1) * blocks_for(longer + further - 1, o.block_size) > o.blocks:
            break
        size, prompt, output = size + 1, longer, further
    return size, prompt, output


@njit
def _make_batch(o: Limits, load: Load, costs: StepCosts, s: State, batch: tuple[int, int, int, int]) -> None:
    """batch: its first place in the inbox, its size, its longest prompt and output."""
    head, size, prompt, output = batch
    B, p = float(size), float(prompt)
    left = size
    for step in range(output):
        begin = s.f[NOW] if step == 0 else s.f[LAST_END]
        if step == 0 and prompt > 1:
            work = Work(B, B * p, B, B * p, 0.0, 0.0, B * p * 0.5 * p, p)
            s.i[PREFILL_STEPS] += 1
            s.i[PREFILL_TOKENS] += size * prompt
        else:
            work = Work(B, B, 0.0, 0.0, 0.0, B * (p + float(step) - 1.0), 0.0, 0.0)
        duration = drawn_ms(costs, s, work)
        end = begin + duration
        made = left
        for k in range(head, head + size):
            r = s.inbox[k]
            if step == 0:
                s.start[r], s.first[r] = begin, end
            if load.output[r] == step + 1:
                s.last[r] = end
                s.i[FINISHED] += 1
                left -= 1
        if step > 0:
            count_gaps(s, duration, made)
        note_step(s, begin, duration, B, float(made), o.blocks)
        s.i[TOKENS] += made
        s.i[COMPUTED] += int(work.S)
        s.f[LAST_END] = end
        s.f[BUSY_UNTIL] = end
