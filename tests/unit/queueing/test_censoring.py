"""Chains by censoring: against linear algebra where that has its digits, by hand where it has not."""

import numpy as np
import pytest

from latfit.queueing.censoring import NeverLeft, stationary, visits

SIZES = (1, 2, 15, 16, 17, 33, 80)


@pytest.mark.parametrize("n", SIZES)
def test_stationary_law(n: int) -> None:
    P = np.random.default_rng(n).random((n, n)) ** 6
    P /= P.sum(axis=1, keepdims=True)
    A = np.vstack([P.T - np.eye(n), np.ones(n)])
    expected = np.linalg.lstsq(A, np.append(np.zeros(n), 1.0), rcond=None)[0]
    assert stationary(P) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("n", SIZES)
def test_visits(n: int) -> None:
    Q = np.random.default_rng(n).random((n, n))
    Q *= 0.95 / Q.sum(axis=1, keepdims=True)
    expected = np.linalg.inv(np.eye(n) - Q)
    np.testing.assert_allclose(visits(Q, 1 - Q.sum(axis=1)), expected, rtol=1e-11)


def test_birth_and_death_to_every_digit() -> None:
    """Up with 0.5, down with 0.5/c: pi_k ~ c^k, over 120 powers of ten."""
    n, c = 61, 1e-2
    up = np.full(n - 1, 0.5 * c)
    P = np.diag(up, 1) + np.diag(np.full(n - 1, 0.5), -1)
    expected = c ** np.arange(float(n))
    assert stationary(P) == pytest.approx(expected / expected.sum(), rel=1e-12)


@pytest.mark.parametrize("each", [2, 20])
def test_two_parts(each: int) -> None:
    """Two parts of equal shares, joined by 1e-60 one way and 2e-60 the other: they weigh 2 to 1."""
    inside = np.full((each, each), 1 / each)
    P = np.block([[inside, np.zeros((each, each))], [np.zeros((each, each)), inside]])
    P[each - 1, each], P[each, each - 1] = 1e-60, 2e-60
    assert stationary(P) * each == pytest.approx([2 / 3] * each + [1 / 3] * each, rel=1e-12)
    P[each, each - 1] = 0  # never back
    assert stationary(P) * each == pytest.approx([0] * each + [1] * each, abs=1e-12)
    P[each - 1, each] = 0  # two chains: that of the lower states
    assert stationary(P) * each == pytest.approx([1] * each + [0] * each, abs=1e-12)


def test_rare_leaving() -> None:
    """Two states that swap, left by 1e-30 of the steps of the first: 1e30 visits to each."""
    Q = np.array([[0.0, 1.0], [1.0, 0.0]])
    assert visits(Q, np.array([1e-30, 0.0])) == pytest.approx(np.full((2, 2), 1e30), rel=1e-12)
    with pytest.raises(NeverLeft):
        visits(Q, np.zeros(2))
