"""Draw the time of one step from its noise: the one function that every simulator calls.

F is the smallest point whose cumulated share exceeds a uniform number; a guide (Chen & Asau 1974) narrows the search.
Pauses come as a Poisson process.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from latfit.compiled import first_beyond, inner, mixed
from latfit.model.step_noise import Pauses, StepNoise, noise_of
from latfit.stats import FloatArray

GUIDES = 4096  # equal parts of 0..1; a power of two, so that a part is found without rounding
BITS = 9007199254740992.0  # 2^53, the numbers that a uniform float takes
NO_NOISE = noise_of(np.ones(1), np.ones(1))
NO_PAUSES = Pauses(np.empty(0), np.empty(0), np.empty(0), 0.0, 0.0, 0.0)
MAX_PAUSES = 1000  # of one step; bounds the loop if a step is far longer than any measured one


class NoiseTable(NamedTuple):
    """Arrays of several `StepNoise`, in the order of the kinds of steps (phases, paths)."""

    values: Any  # F of all groups in a row
    reached: Any  # share of the group up to each value
    guide: Any  # places in the values (groups, GUIDES + 1)
    group: Any  # group of a batch (kinds, batches), the last for all larger ones
    kind: Any  # (groups,)
    hazard: Any  # pauses per step and per ms (kinds, 2)
    pause: Any  # length in ms and as a share of T (m, 2)
    pause_reached: Any  # cumulated share (m,)
    pauses: Any  # first pause of each kind (kinds + 1,)


def noise_table(kinds: Sequence[StepNoise | None], largest: int) -> NoiseTable:
    noises = [noise or NO_NOISE for noise in kinds]
    pauses = [noise.pauses or NO_PAUSES for noise in noises]
    parts = [group for noise in noises for group in noise.groups]
    counts = [len(noise.groups) for noise in noises]
    first = np.cumsum([0, *counts[:-1]])
    batches = np.maximum(np.arange(largest + 1.0), 1.0)
    starts = np.cumsum([0, *(len(part.values) for part in parts)]).tolist()
    reached = [np.minimum(np.cumsum(part.weights), 1.0) for part in parts]
    return NoiseTable(
        np.concatenate([part.values for part in parts]),
        np.concatenate(reached),
        np.array([_guide(each, start) for each, start in zip(reached, starts[:-1], strict=True)]),
        np.stack([start + noise.group_of(batches) for start, noise in zip(first, noises, strict=True)]),
        np.repeat(np.arange(len(noises)), counts),
        np.array([(each.per_step, each.per_ms) for each in pauses]),
        np.concatenate([np.stack([each.ms, each.ratio], axis=1) for each in pauses]),
        np.concatenate([np.cumsum(each.weights) for each in pauses]),
        np.cumsum([0, *(len(each.ms) for each in pauses)]),
    )


def _guide(reached: FloatArray, start: int) -> FloatArray:
    """Return the place, from `start` on, of the first of the shares (n,) above k/GUIDES for k = 0..GUIDES."""
    within = np.cumsum(np.bincount(np.ceil(reached * GUIDES).astype(np.int64), minlength=GUIDES + 1))
    return (start + np.minimum(within, len(reached) - 1)).astype(np.int32)


@inner
def drawn_step_ms(noise, group, T, u):  # type: ignore[no-untyped-def]
    """Return the time in ms of a step of typical time T, by one uniform number u in [0, 1)."""
    kind = noise.kind[group]
    first, last = noise.pauses[kind], noise.pauses[kind + 1] - 1
    paused = 0.0
    if last >= first:
        hazard = max(noise.hazard[kind, 0], noise.hazard[kind, 1] * T)
        chance = np.exp(-hazard)
        if u < chance:
            u = u / chance
        else:
            # Invert the Poisson count; what is left of u within its last term is uniform again.
            count, below = 0, 0.0
            while u >= below + chance and count < MAX_PAUSES:
                below += chance
                count += 1
                chance *= hazard / count
            u = min(max((u - below) / chance, 0.0), 1.0 - 1e-16) if chance > 0.0 else 0.0
            for _ in range(count):
                at = first_beyond(noise.pause_reached, first, last, u)
                paused += max(noise.pause[at, 0], noise.pause[at, 1] * T)
                u = (mixed(np.uint64(u * BITS) + np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(11)) / BITS
    part = int(u * GUIDES)
    at = first_beyond(noise.reached, noise.guide[group, part], noise.guide[group, part + 1], u)
    return T * noise.values[at] + paused
