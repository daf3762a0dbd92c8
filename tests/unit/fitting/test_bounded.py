"""Steps in a box against SciPy's bounded least squares, also where the Hessian leaves directions open."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.optimize import lsq_linear

from latfit.fitting.solver.levenberg_marquardt import bounded_step
from latfit.stats import FloatArray


def problem(seed: int, rank_short: int) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """(A, b, low, high) of |A x - b|^2 in a box that holds zero, some of its ends on it, some without end; columns of A
    differ in scale by up to 1e6, and its rank is short by some."""
    rng = np.random.default_rng(seed)
    p = int(rng.integers(2 + rank_short, 12))
    A = rng.standard_normal((30, p - rank_short)) @ rng.standard_normal((p - rank_short, p))
    A *= 10.0 ** rng.uniform(-3, 3, p)
    size = 1 / np.linalg.norm(A, axis=0)
    low, high = (side * size * 10.0 ** rng.uniform(-2, 2, p) for side in (-1.0, 1.0))
    low[rng.random(p) < 0.4] = 0.0
    high[rng.random(p) < 0.2] = 0.0
    high[(low == 0) & (high == 0)] = np.inf
    high[rng.random(p) < 0.2] = np.inf
    return A, 3 * rng.standard_normal(30), low, high


def raised(A: FloatArray, b: FloatArray, x: FloatArray) -> float:
    """The quadratic model at x, zero at zero."""
    return 0.5 * float(np.sum((A @ x - b) ** 2) - np.sum(b**2))


@pytest.mark.parametrize("rank_short", [0, 1, 3])
def test_no_step_ends_above_those_of_bounded_least_squares(rank_short: int) -> None:
    for seed in range(150):
        A, b, low, high = problem(seed, rank_short)
        d = bounded_step(A.T @ A, A.T @ b, low, high)
        assert np.all((d >= low) & (d <= high))
        unit = 1 / np.linalg.norm(A, axis=0)
        peer = lsq_linear(A * unit, b, (low / unit, high / unit), method="trf", tol=1e-12)
        reached, best = raised(A, b, d), raised(A, b, np.clip(peer.x * unit, low, high))
        assert reached <= 0
        assert reached <= best + 1e-7 * abs(best), seed


def test_the_step_is_the_one_of_bounded_least_squares_where_there_is_only_one() -> None:
    for seed in range(100):
        A, b, low, high = problem(seed, 0)
        unit = 1 / np.linalg.norm(A, axis=0)
        peer = lsq_linear(A * unit, b, (low / unit, high / unit), method="bvls", tol=1e-14)
        d = bounded_step(A.T @ A, A.T @ b, low, high)
        assert d / unit == pytest.approx(peer.x, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("apart", [1e-4, 1e-5, 1e-7])
def test_columns_that_almost_depend_on_each_other_never_raise_the_model(apart: float) -> None:
    """Curvatures down to rounding, as of tau_B and tau_S in decoding; bounded least squares can end above zero here."""
    for seed in range(200):
        rng = np.random.default_rng(seed)
        p = int(rng.integers(3, 10))
        k = int(rng.integers(1, p - 1))
        A = rng.standard_normal((40, p))
        A[:, -k:] = A[:, : p - k] @ rng.standard_normal((p - k, k)) + apart * rng.standard_normal((40, k))
        A *= 10.0 ** rng.uniform(-3, 3, p)
        size = np.linalg.norm(A, axis=0)
        low, high = (side / size * 10.0 ** rng.uniform(-2, 4, p) for side in (-1.0, 1.0))
        low[rng.random(p) < 0.4] = 0.0
        b = rng.standard_normal(40)
        H, g = A.T @ A, A.T @ b + 1e-6 * rng.standard_normal(p) * size * float(np.linalg.norm(b))
        d = bounded_step(H, g, low, high)
        assert 0.5 * d @ H @ d - g @ d <= 0, seed


@given(st.integers(0, 10**9), st.integers(0, 4), st.floats(1e-16, 1e-6))
def test_a_gradient_that_the_hessian_does_not_know_never_raises_the_model(seed: int, short: int, off: float) -> None:
    """Rounding gives a flat direction a slope, and a tiny curvature that may be below zero."""
    A, b, low, high = problem(seed, short)
    rng = np.random.default_rng(seed)
    H, g = A.T @ A, A.T @ b
    noise = off * rng.standard_normal(len(g)) * np.linalg.norm(A, axis=0)
    d = bounded_step(H, g + noise * float(np.linalg.norm(b)), low, high)
    assert np.all((d >= low) & (d <= high))
    assert raised(A, b, d) <= off * 1e3 * float(b @ b)
