"""Roots against closed forms and SciPy, with fewer or as many evaluations where the function is nearly straight."""

import math
from collections.abc import Callable

import pytest
from scipy.optimize import brentq

from latfit.queueing.roots import root

CASES: list[tuple[Callable[[float], float], float, float, float]] = [
    (lambda x: x * x - 2, 0.0, 2.0, math.sqrt(2)),
    (lambda x: 2 - x * x, 0.0, 2.0, math.sqrt(2)),
    (lambda x: math.exp(-x) - 1e-9, 0.0, 100.0, 9 * math.log(10)),
    (lambda x: math.atan(x - 3), -1e3, 1e4, 3.0),
    (lambda x: (x - 1) ** 9, 0.0, 3.0, 1.0),
    (lambda x: math.log(x) + 40, 1e-30, 1.0, math.exp(-40)),
    (lambda x: 1.0 if x >= 0.7 else -1.0, 0.0, 1.0, 0.7),
]


@pytest.mark.parametrize(("f", "low", "high", "exact"), CASES)
def test_known_roots(f: Callable[[float], float], low: float, high: float, exact: float) -> None:
    wide = 1e-2 if low == 0 and high == 3 else 0.0  # the root of order nine is as wide as its rounding
    xtol = 1e-12 * min(1.0, exact)
    assert root(f, low, high, xtol=xtol) == pytest.approx(exact, rel=4e-12, abs=wide + 2 * xtol)


@pytest.mark.parametrize(("f", "low", "high", "exact"), CASES[:4])
def test_as_few_evaluations_as_scipy(f: Callable[[float], float], low: float, high: float, exact: float) -> None:
    calls = []
    root(lambda x: calls.append(x) or f(x), low, high, xtol=1e-12)  # type: ignore[func-returns-value]
    peer = brentq(f, low, high, xtol=1e-12, full_output=True)[1]
    assert len(calls) <= 1.5 * peer.function_calls + 2


def test_ends_that_are_roots_and_ends_of_one_sign() -> None:
    assert root(lambda x: x, 0.0, 1.0, xtol=1e-9) == 0.0
    assert root(lambda x: x - 1, 0.0, 1.0, xtol=1e-9) == 1.0
    with pytest.raises(ValueError, match="one sign"):
        root(lambda x: x * x + 1, -1.0, 1.0, xtol=1e-9)
