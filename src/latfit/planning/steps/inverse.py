"""Which batches meet a latency limit: the inverse of T(B, S).

For the convex models {S : T(B,S) <= limit} and {B : T(B,S) <= limit} are intervals of integers (possibly empty),
because T restricted to a line is convex (see `saturation`). Neither T nor |T - limit| is monotone, so both ends are
searched:

1. the minimiser m on [low, high] is where the forward difference T(x+1) - T(x), non-decreasing by convexity, turns
   non-negative: a bisection over integers;
2. if T(m) > limit nothing is feasible; else T falls on [low, m] and rises on [m, high], and each end is a bisection.

All steps work on integers, so there is no rounding to mend. A search range without an end is grown by doubling until T
exceeds the limit. Every request brings a token, so 1 <= B <= S.
"""

from collections.abc import Callable
from dataclasses import dataclass

IntegerLatency = Callable[[int], float]

UNBOUNDED = 1 << 40
"""Where the search for an upper end gives up and calls the range unbounded."""


@dataclass(frozen=True)
class Range:
    """All integers from `low` to `high`, both included; `high` is None where the limit is never reached."""

    low: int
    high: int | None


def feasible_range(latency_ms: IntegerLatency, limit_ms: float, low: int, high: int | None = None) -> Range | None:
    """Integers x in [low, high] with latency_ms(x) <= limit_ms for a convex latency; None where there are none.

    high=None searches upwards without an end. Source: convexity, see the module's derivation.
    """
    top = high if high is not None else _grow(latency_ms, limit_ms, low)
    best = _first(lambda x: x >= top or latency_ms(x + 1) >= latency_ms(x), low, top)
    if latency_ms(best) > limit_ms:
        return None
    first = _first(lambda x: latency_ms(x) <= limit_ms, low, best)
    if latency_ms(top) <= limit_ms:
        return Range(first, high)
    return Range(first, _first(lambda x: latency_ms(x) > limit_ms, best, top) - 1)


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Smallest integer in [low, high] from which on `holds` is true, given that it is true at `high`."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _grow(latency_ms: IntegerLatency, limit_ms: float, low: int) -> int:
    """An integer beyond the minimiser where T exceeds the limit, or UNBOUNDED where there is none below it."""
    top = max(2 * low, low + 1)
    while top < UNBOUNDED and (latency_ms(top) <= limit_ms or latency_ms(top + 1) < latency_ms(top)):
        top *= 2
    return top
