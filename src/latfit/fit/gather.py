"""Compiled sorting of many rows into cells: columns of whole numbers become one key, and keys are counted.

With column c_j in [low_j, low_j + span_j) the mixed-radix number key = (..(c_1 - low_1) span_2 + (c_2 - low_2)) ..)
orders rows as their columns do. Few keys: one counting sort carries T to its cell. Many: a radix sort, digit by digit.
"""

import numpy as np
from numba import njit

LARGEST_KEY = float(1 << 62)
DIGIT = 13
SHORT = 24
"""Cells up to this many rows are sorted by insertion."""


@njit(nogil=True, cache=True)
def whole_span(column):  # type: ignore[no-untyped-def]
    """(low, number of whole values up to the highest); zero values where one is not whole."""
    low = high = column[0]
    for value in column:
        if value != np.floor(value):
            return 0.0, 0.0
        low = min(low, value)
        high = max(high, value)
    return low, high - low + 1.0


@njit(nogil=True, cache=True)
def add_digit(key, column, low, span):  # type: ignore[no-untyped-def]
    """key = key * span + (column - low), in place."""
    for i in range(len(key)):
        key[i] = key[i] * span + np.int64(column[i] - low)


@njit(nogil=True, cache=True)
def counted(key, T, span):  # type: ignore[no-untyped-def]
    """(T by key (n,), first row of each cell in it (m,), key of each cell (m,))."""
    n = len(key)
    place = np.zeros(span + 1, dtype=np.int32)
    for i in range(n):
        place[key[i] + 1] += 1
    m = 0
    for k in range(span):
        m += place[k + 1] > 0
        place[k + 1] += place[k]
    starts, keys = np.empty(m, dtype=np.int64), np.empty(m, dtype=np.int64)
    cell = 0
    for k in range(span):
        if place[k + 1] > place[k]:
            starts[cell], keys[cell] = place[k], k
            cell += 1
    by_key = np.empty(n)
    for i in range(n):
        k = key[i]
        by_key[place[k]] = T[i]
        place[k] += 1
    return by_key, starts, keys


@njit(nogil=True, cache=True)
def radix_order(key, largest):  # type: ignore[no-untyped-def]
    """Rows (n,) in the order of their keys, equal keys as they came."""
    n, mask = len(key), (1 << DIGIT) - 1
    order, other = np.arange(n), np.empty(n, dtype=np.int64)
    shift = 0
    while largest >> shift > 0:
        place = np.zeros(mask + 2, dtype=np.int64)
        for i in range(n):
            place[((key[i] >> shift) & mask) + 1] += 1
        for digit in range(mask + 1):
            place[digit + 1] += place[digit]
        for i in range(n):
            row = order[i]
            digit = (key[row] >> shift) & mask
            other[place[digit]] = row
            place[digit] += 1
        order, other = other, order
        shift += DIGIT
    return order


@njit(nogil=True, cache=True)
def key_starts(key, order):  # type: ignore[no-untyped-def]
    """First row of each run of equal keys (m,) among the ordered rows."""
    m = 0
    for i in range(len(order)):
        m += i == 0 or key[order[i]] != key[order[i - 1]]
    starts = np.empty(m, dtype=np.int64)
    m = 0
    for i in range(len(order)):
        if i == 0 or key[order[i]] != key[order[i - 1]]:
            starts[m] = i
            m += 1
    return starts


@njit(nogil=True, cache=True)
def sort_by_value(values, other, place):  # type: ignore[no-untyped-def]
    """Sort values (n,) in place: into n buckets of equal width, crowded ones sorted, then by insertion. other (n,) and
    place (n + 1,) are room to work in."""
    n = len(values)
    low = high = values[0]
    for value in values:
        low = min(low, value)
        high = max(high, value)
    scale = (n - 0.5) / (high - low) if high > low else 0.0
    if not 0.0 < scale < np.inf:
        values.sort()
        return
    place[:] = 0
    for i in range(n):
        other[i] = values[i]
        place[int((values[i] - low) * scale) + 1] += 1
    for bucket in range(n):
        place[bucket + 1] += place[bucket]
    for i in range(n):
        bucket = int((other[i] - low) * scale)
        values[place[bucket]] = other[i]
        place[bucket] += 1
    first = 0
    for bucket in range(n):
        if place[bucket] - first > SHORT:
            values[first : place[bucket]] = np.sort(values[first : place[bucket]])
        first = place[bucket]
    insertion(values)


@njit(nogil=True, cache=True)
def insertion(values):  # type: ignore[no-untyped-def]
    """Sort values (n,) in place, quickly where each is near its place."""
    for i in range(1, len(values)):
        value, at = values[i], i
        while at > 0 and values[at - 1] > value:
            values[at] = values[at - 1]
            at -= 1
        values[at] = value


@njit(nogil=True, cache=True)
def different(by_cell, starts):  # type: ignore[no-untyped-def]
    """Sort T (n,) within its cells, in place, and count equal ones: (T (k,), count (k,), first in each cell (m,))."""
    n, m, k, largest = len(by_cell), len(starts), 0, 0
    for cell in range(m):
        largest = max(largest, (starts[cell + 1] if cell + 1 < m else n) - starts[cell])
    other, place = np.empty(largest), np.empty(largest + 1, dtype=np.int32)
    for cell in range(m):
        first, end = starts[cell], starts[cell + 1] if cell + 1 < m else n
        if end - first > SHORT:
            sort_by_value(by_cell[first:end], other[: end - first], place[: end - first + 1])
        else:
            insertion(by_cell[first:end])
        k += 1
        for i in range(first + 1, end):
            k += by_cell[i] != by_cell[i - 1]
    T, count, firsts = np.empty(k), np.empty(k), np.empty(m, dtype=np.int64)
    k = -1
    for cell in range(m):
        first, end = starts[cell], starts[cell + 1] if cell + 1 < m else n
        firsts[cell] = k + 1
        for i in range(first, end):
            if i == first or by_cell[i] != by_cell[i - 1]:
                k += 1
                T[k], count[k] = by_cell[i], 0.0
            count[k] += 1.0
    return T, count, firsts
