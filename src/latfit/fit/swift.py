"""The saturation form compiled: latency of many cells, and the normal equations of its logarithm, without arrays of
slopes in between.

Cells come sorted by B, so that g_B is computed once for all cells of one B; g_S once for each number of tokens that
occurs. Slopes are those of `model.saturation`, gathered in blocks that stay in the first-level cache, where products
of columns are sums over adjacent numbers.
"""

import numpy as np
from numba import njit

BLOCK = 128
PARAMETERS = 8


@njit(nogil=True, cache=True, error_model="numpy")
def latencies(theta, B, S, at, nodes):  # type: ignore[no-untyped-def]
    """T in ms (m,) of cells sorted by B; S = nodes[at]."""
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


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
def normal_equations(theta, B, S, at, nodes, free, divisor, pull, stiffness):  # type: ignore[no-untyped-def]
    """J'G (p,) and J'KJ (p, p) with J = dT/dtheta / divisor of the free parameters (p,); G, K by cell (m,)."""
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


@njit(nogil=True, cache=True)
def box_step(gradient, H, low, high):  # type: ignore[no-untyped-def]
    """The d in [low, high] (p,) that an active set gives for g'd + d'Hd/2; see `newton`."""
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
