"""Ranges of a quantity within which a condition holds."""

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


def bisect(meets: Test, inside: float, outside: float, precision: float) -> float:
    while abs(outside - inside) > precision * abs(inside):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if meets(middle) else (inside, middle)
    return inside
