"""Bounds for text generation: what static batches waste, and what the memory and the arithmetic allow.

A static batch lasts as long as its longest member, so the useful share is mean/max of its lengths; continuous batching
gains at most the inverse. For i.i.d. exponential lengths the ratio of expectations is 1/H_n. A decode step reads all
weights and the cached keys and values of its batch, and computes F flops a token: T >= max(F S/C, bytes/bandwidth).
"""

from collections.abc import Sequence

from latfit.errors import WrongUsage
from latfit.queueing.law import positive


def static_batch_share(lengths: Sequence[float]) -> float:
    """Useful share of a static batch with these output lengths."""
    if not len(lengths) or min(lengths) <= 0:
        raise WrongUsage("lengths must be above zero", where="lengths", remedy="Give at least one.")
    return sum(lengths) / len(lengths) / max(lengths)


def exponential_batch_share(n: int) -> float:
    """E[mean]/E[max] of n exponential lengths, 1/H_n."""
    if n < 1:
        raise WrongUsage(f"{n} lengths", where="n", remedy="Give 1 or more.")
    return 1 / sum(1 / i for i in range(1, n + 1))


def decode_floor_ms(
    tokens: float, flops_a_token: float, flops_per_ms: float, moved_bytes: float, bytes_per_ms: float
) -> float:
    """Least time in ms of a step on `tokens` tokens that reads `moved_bytes` (weights and cache)."""
    compute = positive(tokens, "tokens", "") * flops_a_token / positive(flops_per_ms, "peak arithmetic")
    return max(compute, moved_bytes / positive(bytes_per_ms, "bandwidth"))
