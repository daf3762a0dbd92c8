"""Compiled loops for large problems: merging rows into cells, sums by cell, the saturation model, a quantile.

The loops run in one thread without the interpreter lock, are cached on disk, and are imported only for many rows. They
repeat three formulas: the losses of `loss`, the saturation model, and `levenberg_marquardt.damped_step`. Rows are
merged by mixed-radix keys, with a counting or radix sort. Latency and slopes rely on cells sorted by B.
"""

from collections.abc import Mapping

import numpy as np

from latfit.compiled import cached

LARGEST_KEY = float(1 << 62)
DIGIT = 13
SHORT = 24
"""Cells of up to this many rows use insertion sort."""


@cached(nogil=True)
def whole_span(column):  # type: ignore[no-untyped-def]
    """Return (lowest value, number of whole values up to the highest); (0, 0) if a value is not whole."""
    low = high = column[0]
    for value in column:
        if value != np.floor(value):
            return 0.0, 0.0
        low = min(low, value)
        high = max(high, value)
    return low, high - low + 1.0


@cached(nogil=True)
def add_digit(key, column, low, span):  # type: ignore[no-untyped-def]
    """Set key = key * span + (column - low), in place."""
    for i in range(len(key)):
        key[i] = key[i] * span + np.int64(column[i] - low)


@cached(nogil=True)
def counted(key, T, span):  # type: ignore[no-untyped-def]
    """Counting sort: return (T by key (n,), first row of each cell (m,), key of each cell (m,))."""
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


@cached(nogil=True)
def radix_order(key, largest):  # type: ignore[no-untyped-def]
    """Return the stable order of rows (n,) by key."""
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


@cached(nogil=True)
def key_starts(key, order):  # type: ignore[no-untyped-def]
    """Return the first row of each run of equal keys (m,) among the ordered rows."""
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


@cached(nogil=True)
def sort_by_value(values, other, place):  # type: ignore[no-untyped-def]
    """Bucket sort of values (n,), in place. other (n,) and place (n + 1,) are work arrays."""
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


@cached(nogil=True)
def insertion(values):  # type: ignore[no-untyped-def]
    """Insertion sort of values (n,), in place; fast for nearly sorted values."""
    for i in range(1, len(values)):
        value, at = values[i], i
        while at > 0 and values[at - 1] > value:
            values[at] = values[at - 1]
            at -= 1
        values[at] = value


@cached(nogil=True)
def different(by_cell, starts):  # type: ignore[no-untyped-def]
    """Sort T (n,) within cells, in place; return distinct (T (k,), counts (k,), first of each cell (m,))."""
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


BLOCK = 128
PARAMETERS = 8


@cached(nogil=True, error_model="numpy")
def latencies(theta, axes):  # type: ignore[no-untyped-def]
    """Return T in ms (m,) of cells sorted by B. axes: B, S (m,), and at, nodes with S = nodes[at]."""
    B, S, at, nodes = axes
    tau_0, w_0, w_1, p_max, k_b, k_s, tau_b, tau_s = theta
    g_s = -1.0 / np.expm1(-k_s * nodes)
    T = np.empty(len(B))
    last, g_b = -1.0, 0.0
    for c in range(len(B)):
        if B[c] != last:
            last = B[c]
            g_b = -1.0 / np.expm1(-k_b * last) / p_max
        T[c] = tau_0 + (w_0 + w_1 * S[c]) * g_b * g_s[at[c]] + tau_b * last + tau_s * S[c]
    return T


@cached(nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
def normal_equations(theta, axes, free, divisor, pull, stiffness):  # type: ignore[no-untyped-def]
    """Return J'G (p,) and J'KJ (p, p) with J = dT/dtheta / divisor for the free parameters.

    pull, stiffness: G and K of each cell (m,). axes: as in `latencies`. Blocks of slopes stay in the first-level cache.
    """
    B, S, at, nodes = axes
    _, w_0, w_1, p_max, k_b, k_s, _, _ = theta
    g_s = -1.0 / np.expm1(-k_s * nodes)
    h_s = nodes * np.exp(-k_s * nodes) * g_s * g_s
    m, p = len(B), len(free)
    J, heavy = np.empty((PARAMETERS, BLOCK)), np.empty(BLOCK)
    gradient, curvature = np.zeros(p), np.zeros((p, p))
    last, g_b, h_b = -1.0, 0.0, 0.0
    for first in range(0, m, BLOCK):
        n = min(BLOCK, m - first)
        for i in range(n):
            c = first + i
            if B[c] != last:
                last = B[c]
                g_b = -1.0 / np.expm1(-k_b * last)
                h_b = last * np.exp(-k_b * last) * g_b * g_b
            tokens, k, over = S[c], at[c], 1.0 / divisor[c]
            work = (w_0 + w_1 * tokens) / p_max * over
            g = g_b * g_s[k] * over / p_max
            J[0, i] = over
            J[1, i] = g
            J[2, i] = tokens * g
            J[3, i] = -work * g_b * g_s[k] / p_max
            J[4, i] = -work * g_s[k] * h_b
            J[5, i] = -work * g_b * h_s[k]
            J[6, i] = last * over
            J[7, i] = tokens * over
        for a in range(p):
            row = J[free[a]]
            slope = 0.0
            for i in range(n):
                slope += row[i] * pull[first + i]
                heavy[i] = row[i] * stiffness[first + i]
            gradient[a] += slope
            for b in range(a, p):
                other, total = J[free[b]], 0.0
                for i in range(n):
                    total += heavy[i] * other[i]
                curvature[a, b] += total
    for a in range(p):
        for b in range(a):
            curvature[a, b] = curvature[b, a]
    return gradient, curvature


@cached(nogil=True)
def box_step(gradient, H, low, high):  # type: ignore[no-untyped-def]
    """Return argmin g'd + d'Hd/2 in [low, high] (p,) by an active set; see `levenberg_marquardt`."""
    p = len(gradient)
    d, free = np.zeros(p), np.ones(p, dtype=np.bool_)
    for i in range(p):
        if (low[i] >= 0.0 and gradient[i] > 0.0) or (high[i] <= 0.0 and gradient[i] < 0.0):
            free[i] = False
    L, x = np.empty((p, p)), np.empty(p)
    for _ in range(p):
        index = np.flatnonzero(free)
        q = len(index)
        if q == 0:
            break
        for a in range(q):
            i = index[a]
            x[a] = -gradient[i]
            for j in range(p):
                if not free[j]:
                    x[a] -= H[i, j] * d[j]
            for b in range(a + 1):
                total = H[i, index[b]]
                for k in range(b):
                    total -= L[a, k] * L[b, k]
                if a == b:
                    L[a, a] = np.sqrt(max(total, 1e-16 * H[i, i]))
                else:
                    L[a, b] = total / L[b, b]
        for a in range(q):
            for b in range(a):
                x[a] -= L[a, b] * x[b]
            x[a] /= L[a, a]
        for a in range(q - 1, -1, -1):
            for b in range(a + 1, q):
                x[a] -= L[b, a] * x[b]
            x[a] /= L[a, a]
        crossed = False
        for a in range(q):
            i = index[a]
            d[i] = min(max(x[a], low[i]), high[i])
            if d[i] != x[a]:
                free[i] = False
                crossed = True
        if not crossed:
            break
    return d


LOSSES: Mapping[str, int] = {"linear": 0, "huber": 1, "soft_l1": 2, "tukey": 3}

BINS = 4096
FEW = 4096


@cached(nogil=True)
def cell_sums(starts, y, weights, u, s, loss):  # type: ignore[no-untyped-def]
    """Return (cost, G (m,), K (m,)) of `objective` for rows sorted by cell."""
    m, n = len(starts), len(y)
    pull, stiffness = np.empty(m), np.empty(m)
    total = 0.0
    inverse = 1.0 / s
    for cell in range(m):
        end = starts[cell + 1] if cell + 1 < m else n
        g = k = c = 0.0
        for i in range(starts[cell], end):
            r = u[cell] - y[i]
            x = abs(r) * inverse
            w = weights[i]
            if loss == 0 or (loss == 1 and x <= 1.0):
                c += w * x * x
                g += w * r
                k += w
            elif loss == 1:
                c += w * (2.0 * x - 1.0)
                g += w * (s if r > 0 else -s)
                k += 0.02 * w / x
            elif loss == 2:
                root = np.sqrt(1.0 + x * x)
                c += w * 2.0 * (root - 1.0)
                g += w * r / root
                k += w * max(1.0 / (root * root * root), 0.02 / root)
            else:
                v = max(1.0 - x * x, 0.0)
                c += w * (1.0 - v * v * v) / 3.0
                g += w * r * v * v
                k += w * max(v * v - 4.0 * x * x * v, 0.02 * v * v)
        pull[cell] = g
        stiffness[cell] = k
        total += c
    return 0.5 * s * s * total, pull, stiffness


@cached(nogil=True)
def weighted_quantile(values, weights, q):  # type: ignore[no-untyped-def]
    """Return `stats.weighted_quantile` without a full sort: bins are refined until few values are left to sort."""
    n = len(values)
    low, high, total = values[0], values[0], 0.0
    for i in range(n):
        low = min(low, values[i])
        high = max(high, values[i])
        total += weights[i]
    wanted, below = q * total * (1.0 - 1e-12), 0.0
    while True:
        mass, held = np.zeros(BINS), np.zeros(BINS, dtype=np.int64)
        width = (high - low) / BINS
        if not width > 0.0:
            return low
        for i in range(n):
            if low <= values[i] <= high:
                at = min(int((values[i] - low) / width), BINS - 1)
                mass[at] += weights[i]
                held[at] += 1
        at = 0
        while at < BINS - 1 and below + mass[at] < wanted:
            below += mass[at]
            at += 1
        if held[at] <= FEW:
            break
        low, high = extremes(values, low, high, width, at)
    inside, heavy, k = np.empty(held[at]), np.empty(held[at]), 0
    for i in range(n):
        if low <= values[i] <= high and min(int((values[i] - low) / width), BINS - 1) == at:
            inside[k], heavy[k] = values[i], weights[i]
            k += 1
    order = np.argsort(inside)
    for i in order:
        below += heavy[i]
        if below >= wanted:
            return inside[i]
    return inside[order[-1]]


@cached(nogil=True)
def extremes(values, low, high, width, bin_):  # type: ignore[no-untyped-def]
    """Return (lowest, highest) value in one of the bins of [low, high]."""
    least, most = high, low
    for value in values:
        if low <= value <= high and min(int((value - low) / width), BINS - 1) == bin_:
            least = min(least, value)
            most = max(most, value)
    return least, most
