"""The simulator that promises are held to, against closed forms, published tables and a plain event simulation.

An estimate with 16 replications and a true standard error lies within 4.5 of them but once in 2,000 times (Student's
t).
"""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from benchmarks.promises_truth import (
    Effort,
    Law,
    Stalls,
    Steps,
    System,
    Value,
    constant,
    exponential,
    gamma_arrivals,
    linear,
    lognormal,
    pauses,
    poisson,
    serve,
    steps,
    truth,
    uniform,
)
from scipy.optimize import brentq

from tests.oracle.queueing_reference import MD1

SHORT = Effort(tolerance=math.inf, requests=60_000)
"""About a million requests beside the warm-up."""


def agrees(found: Value, exact: float, rounded: float = 0.0) -> bool:
    """rounded: relative error of the published number."""
    return abs(found.value - exact) <= 4.5 * found.error + rounded * exact


@pytest.mark.parametrize("rate", [0.3, 0.45])
def test_mm1(rate: float) -> None:
    found = truth(System(steps([2.0], exponential()), poisson(rate)), SHORT)
    rest = 0.5 - rate
    assert agrees(found.mean, 1 / rest)
    for q in (0.5, 0.9, 0.95, 0.99):
        assert agrees(found.quantile(q), -math.log(1 - q) / rest)
    assert agrees(found.share_within(7.3), 1 - math.exp(-7.3 * rest), 1e-5)
    assert found.mean_batch == 1


def test_md1_by_crommelin() -> None:
    exact = MD1(0.8, 1.0)
    found = truth(System(steps([1.0]), poisson(0.8)), SHORT)
    assert agrees(found.mean, exact.mean_ms)
    for q in (0.9, 0.99):
        at = brentq(lambda t, q=q: 1 - exact.wait_tail(t) - q, 1e-9, 15.0)
        assert agrees(found.quantile(q), 1 + at)
    # A fifth of the requests find the server idle and take exactly 1 ms.
    assert agrees(found.quantile(0.1), 1.0)


LAWS: list[tuple[Law, float, float]] = [
    (constant(0.7), 0.7, 0.49),
    (exponential(1.3), 1.3, 2 * 1.69),
    (lognormal(0.5), math.exp(0.125), math.exp(0.5)),
    (uniform(1.0, 3.0), 2.0, 13 / 3),
    (pauses(0.03, 0.006, 40, 60), 0.994 * math.exp(0.00045) + 0.3, 0.994 * math.exp(0.0018) + 0.006 * 7600 / 3),
]


@pytest.mark.parametrize(("law", "first", "second"), LAWS)
def test_means_by_pollaczek_khinchine(law: Law, first: float, second: float) -> None:
    assert law.moments == pytest.approx((first, second))
    rate = 0.5 / first
    found = truth(System(steps([1.0], law), poisson(rate)), SHORT)
    assert agrees(found.mean, first + rate * second / (2 * (1 - 0.5)))


@pytest.mark.parametrize("per_ms", [False, True])
def test_pauses_that_add_to_steps(per_ms: bool) -> None:
    """Compound Poisson pauses of 10 ms on steps of 2 ms: E[X] = 2 + a, E[X^2] = E[X]^2 + 10 a, a = 10 x 0.04."""
    stalls = Stalls(0.02 if per_ms else 0.04, per_ms, constant(10.0))
    main, mean = Steps((2.0,), stalls=stalls), 2.4
    assert main.moments(1) == pytest.approx((mean, mean**2 + 4.0))
    rate = 0.5 / mean
    found = truth(System(main, poisson(rate)), SHORT)
    assert agrees(found.mean, mean + rate * (mean**2 + 4.0) / (2 * (1 - 0.5)))


@pytest.mark.parametrize("shape", [0.3, 3.0])
def test_gamma_arrivals_by_gi_m_1(shape: float) -> None:
    """R ~ Exp(mu (1 - sigma)), sigma the root of sigma = A*(mu (1 - sigma)), A* the transform of the gaps."""
    rate, mu = 0.7, 1.0
    sigma = brentq(lambda s: (1 + mu * (1 - s) / (shape * rate)) ** -shape - s, 1e-9, 1 - 1e-6)
    found = truth(System(steps([1.0], exponential(1 / mu)), gamma_arrivals(rate, shape)), SHORT)
    assert agrees(found.mean, 1 / (mu * (1 - sigma)))
    assert agrees(found.quantile(0.99), math.log(100) / (mu * (1 - sigma)))


UNLIMITED = [  # rate, mean, p50, p99, mean batch; T = 4 + .1 b
    (0.1, 4.90124, 4.10000, 8.14107, 1.07390),
    (0.5, 6.29874, 6.30152, 8.63003, 2.23294),
    (2, 7.61457, 7.59999, 10.5834, 10.0001),
    (5, 12.1667, 12.1000, 17.6356, 40.0000),
    (9, 60.7632, 60.1111, 91.7083, 360.000),
]


@pytest.mark.parametrize(("rate", "mean", "p50", "p99", "batch"), UNLIMITED)
def test_greedy_batches(rate: float, mean: float, p50: float, p99: float, batch: float) -> None:
    """Published values."""
    found = truth(System(steps(linear(4, 0.1, 2000)), poisson(rate), 2000), SHORT)
    assert agrees(found.mean, mean, 1e-5)
    assert found.mean_batch == pytest.approx(batch, rel=2e-3)
    assert agrees(found.quantile(0.5), p50, 1e-5)
    assert agrees(found.quantile(0.99), p99, 1e-5)


def one_by_one(T: Sequence[float], cap: int, times: Sequence[float]) -> tuple[list[float], int]:
    """Responses and batches of a greedy server without noise, batch after batch."""
    response, batches, free, i = [], 0, 0.0, 0
    while i < len(times):
        start = max(free, times[i])
        b = min(sum(t <= start for t in times[i:]), cap)
        free = start + T[b - 1]
        response += [free - t for t in times[i : i + b]]
        batches, i = batches + 1, i + b
    return response, batches


@pytest.mark.parametrize("whole", [False, True], ids=["any moment", "whole ms: ties"])
@pytest.mark.parametrize("cap", [1, 4])
def test_a_recording_request_by_request(whole: bool, cap: int) -> None:
    times = np.cumsum(np.random.default_rng(5).gamma(0.5, 3.0, 600))
    times = np.round(times) if whole else times
    response, batches = one_by_one([2.0, 3.0, 5.0, 6.0], cap, times.tolist())
    system = System(steps([2.0, 3.0, 5.0, 6.0]), poisson(0.1), cap)
    found, served = serve(system, times, 0, np.random.default_rng(1))
    assert served == batches
    np.testing.assert_allclose(found, response)


def test_standard_errors_are_what_they_say() -> None:
    """40 estimates each of M/M/1 at load .8: their distances from the truth over their errors, squared, average 1.15
    for Student's t with 15 degrees of freedom; the average of 40 scatters by .3."""
    system = System(steps([1.0], exponential()), poisson(0.8))
    short = Effort(tolerance=math.inf, requests=60_000, warm=3_000)
    found = [truth(system, short, seed=100 + i) for i in range(40)]
    for values, exact in (
        ([each.mean for each in found], 5.0),
        ([each.quantile(0.99) for each in found], 5 * math.log(100)),
    ):
        squared = [((value.value - exact) / value.error) ** 2 for value in values]
        assert 0.6 < np.mean(squared) < 2.0
