"""Stationary distributions and visits of Markov chains by censoring: additions, products and quotients of probabilities
alone.

Grassmann, Taksar and Heyman (1985): states are taken out one after the other, the chain being watched on the rest.
Nothing is ever subtracted (what leaves a state is the sum of where it goes), so every entry keeps its digits, however
seldom the chain goes between parts of it. Here halves are taken out at once. Of transitions [[A, B], [C, D]] without D,
Z = (I - D)^-1 has the visits to D, and A + B Z C is left; D itself is halved in the same way, down to a few states.
"""

import numpy as np

from latfit.stats import FloatArray

FEW = 16
OFTEN = 0.1
"""Chance of leaving from which on plain elimination keeps all digits."""

NEVER = 1e-180
"""What has a smaller chance does not happen."""


class NeverLeft(Exception):
    """A set of states is not left."""


def stationary(P: FloatArray) -> FloatArray:
    """pi (n,) with pi P = pi and sum 1, of a stochastic matrix (n, n); its diagonal is not read.

    Where a part of the chain is never left it has all of pi; of two such parts the one of the lower states.
    """
    pi = _law(P)
    return np.asarray(pi / pi.sum())


def visits(Q: FloatArray, leaves: FloatArray) -> FloatArray:
    """(I - Q)^-1 (n, n), for Q not below 0 with rows that sum to 1 - `leaves` (n,); Q's diagonal is not read. Raises
    NeverLeft."""
    n = len(Q)
    if n and leaves.min() > OFTEN:
        # Its transpose is eliminated down its diagonal, which stays far from 0: nothing is lost there either.
        apart = -Q.T
        np.fill_diagonal(apart, 0)
        np.fill_diagonal(apart, leaves - apart.sum(axis=0))
        return np.asarray(np.linalg.inv(apart).T)
    if n <= FEW:
        return _visits_of_few(Q, leaves)
    half = n // 2
    A, B, C, D = Q[:half, :half], Q[:half, half:], Q[half:, :half], Q[half:, half:]
    low = visits(D, leaves[half:] + C.sum(axis=1))
    over = B @ low
    high = visits(A + over @ C, leaves[:half] + over @ leaves[half:])
    back = low @ C @ high
    return np.block([[high, high @ over], [back, low + back @ over]])


def _law(P: FloatArray) -> FloatArray:
    """pi up to a factor, of a size that keeps its products within range."""
    n = len(P)
    if n <= FEW:
        return _law_of_few(P)
    half = n // 2
    A, B, C, D = P[:half, :half], P[:half, half:], P[half:, :half], P[half:, half:]
    try:
        over = B @ visits(D, C.sum(axis=1))
    except NeverLeft:
        return _law_of_few(P)
    pi = _law(A + over @ C)
    return np.concatenate([pi / pi.max(), pi / pi.max() @ over])


def _law_of_few(P: FloatArray) -> FloatArray:
    A, first = P.astype(np.float64), 0
    for k in range(len(A) - 1, 0, -1):
        leaves = float(A[k, :k].sum())
        if leaves < NEVER and A[:k, k].any():
            first = k
            break
        A[:k, k] /= max(leaves, NEVER)
        A[:k, :k] += np.outer(A[:k, k], A[k, :k])
    pi = np.zeros(len(A))
    pi[first] = 1
    for k in range(first + 1, len(A)):
        pi[k] = pi[first:k] @ A[first:k, k]
        pi /= max(pi[k], 1.0)
    return pi


def _visits_of_few(Q: FloatArray, leaves: FloatArray) -> FloatArray:
    n, Q, leaves = len(Q), Q.copy(), leaves.copy()
    pivot = np.empty(n)
    for k in range(n - 1, -1, -1):
        pivot[k] = leaves[k] + Q[k, :k].sum()
        if pivot[k] < NEVER:
            raise NeverLeft
        Q[:k, k] /= pivot[k]
        Q[:k, :k] += Q[:k, k, None] * Q[k, :k]
        leaves[:k] += Q[:k, k] * leaves[k]
    up = np.eye(n)
    for k in range(1, n):
        up[:k, k] = up[:k, :k] @ Q[:k, k]
    Z = up / pivot[:, None]
    for k in range(1, n):
        Z[k] += Q[k, :k] / pivot[k] @ Z[:k]
    return np.asarray(Z)
