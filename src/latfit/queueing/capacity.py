"""Ranges of a quantity within which a condition holds."""

import math
from collections.abc import Callable

from latfit.stats import FloatArray

Test = Callable[[float], bool]


def feasible_ranges(
    grid: FloatArray, meets: Test, meets_finely: Test | None = None, *, precision: float = 1e-3
) -> list[tuple[float, float]]:
    """Return the ranges of x within `grid` (n,), increasing, where a condition holds.

    meets_finely: a more exact test for the ends. precision: of an end, relative.
    """
    finely = meets_finely or meets
    found = [meets(float(x)) for x in grid]
    starts = [i for i, ok in enumerate(found) if ok and not (i and found[i - 1])]
    ranges = []
    for first in starts:
        last = next((i for i in range(first, len(grid)) if not found[i]), len(grid)) - 1
        low = float(grid[0]) if first == 0 else bisect(finely, float(grid[first]), float(grid[first - 1]), precision)
        high = float(grid[-1])
        if last < len(grid) - 1:
            high = bisect(finely, float(grid[last]), float(grid[last + 1]), precision)
        if low <= high:
            ranges.append((low, high))
    return ranges


def bracket(
    meets: Test, start: float, *, growth: float, precision: float, least: float, most: float
) -> tuple[float, float]:
    """Return an x that meets a condition, and a larger one within a ratio of `precision` that does not.

    The search begins with a factor of `growth`, larger each time. If it leaves the range from `least` to `most`, it
    returns the end that it left by.
    """
    low, high, at = 0.0, math.inf, start
    while math.isinf(high) or low == 0.0:
        if not least < at < most:
            return max(low, least), at
        if meets(at):
            low, at = at, at * growth
        else:
            high, at = at, at / growth
        growth = growth**1.5
    while high / low > precision:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low, high


def bisect(meets: Test, inside: float, outside: float, precision: float) -> float:
    while abs(outside - inside) > precision * abs(inside):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if meets(middle) else (inside, middle)
    return inside
