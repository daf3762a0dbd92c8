"""The simulator that promises are held to, against closed forms, published tables and a plain event simulation.

An estimate with 16 replications and a true standard error lies within 4.5 of them but once in 2,000 times (Student's
t); a bin's width comes on top for quantiles.
"""

import heapq
import math
from collections.abc import Sequence

import numpy as np
import pytest
from benchmarks.promises_truth import (
    Effort,
    Law,
    Replication,
    System,
    Truth,
    Value,
    atoms,
    constant,
    exponential,
    gamma,
    gamma_arrivals,
    linear,
    lognormal,
    pauses,
    poisson,
    recorded,
    steps,
    truth,
)
from scipy.optimize import brentq

BIN = 2.0**-10
SHORT = Effort(tolerance=math.inf, requests=60_000)
"""About a million requests beside the warm-up."""


def agrees(found: Value, exact: float, rounded: float = 0.0) -> bool:
    """rounded: relative error of the published number."""
    return abs(found.value - exact) <= 4.5 * found.error + rounded * exact


def agrees_within_bin(found: Value, exact: float) -> bool:
    return agrees(found, exact, BIN)


# Closed forms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.3, 0.45])
def test_mm1(rate: float) -> None:
    found = truth(System(steps([2.0], exponential()), poisson(rate)), SHORT, sla_ms=10.0)
    rest = 0.5 - rate
    assert agrees(found.mean, 1 / rest)
    assert agrees(found.within, 1 - math.exp(-10 * rest))
    assert agrees(found.busy, 2 * rate)
    assert agrees(found.rate, rate)
    for q in (0.5, 0.9, 0.95, 0.99):
        assert agrees_within_bin(found.quantile(q), -math.log(1 - q) / rest)
    assert agrees(found.share_within(7.3), 1 - math.exp(-7.3 * rest), 1e-5)
    assert found.mean_batch.value == 1
    assert found.overflow == Value(0.0, 0.0)


def test_md1_by_crommelin() -> None:
    rate = 0.8

    def served_within(x: float) -> float:
        """P(wait <= x - 1), D = 1."""
        t = x - 1
        terms = (
            (rate * (k - t)) ** k / math.factorial(k) * math.exp(-rate * (k - t)) for k in range(math.floor(t) + 1)
        )
        return (1 - rate) * math.fsum(terms)

    found = truth(System(steps([1.0]), poisson(rate)), SHORT, sla_ms=6.5)
    assert agrees(found.mean, 1 + rate / (2 * (1 - rate)))
    assert agrees(found.within, served_within(6.5))
    for q in (0.9, 0.99):
        assert agrees_within_bin(found.quantile(q), brentq(lambda x, q=q: served_within(x) - q, 1.0, 15.0))
    # A fifth of the requests find the server idle and take exactly 1 ms.
    assert agrees_within_bin(found.quantile(0.1), 1.0)


LAWS: list[tuple[Law, float, float]] = [
    (constant(0.7), 0.7, 0.49),
    (exponential(1.3), 1.3, 2 * 1.69),
    (lognormal(0.5), math.exp(0.125), math.exp(0.5)),
    (lognormal(0.5, mean=2.0), 2.0, 4 * math.exp(0.25)),
    (gamma(0.5, mean=1.5), 1.5, 2.25 * 3),
    (pauses(0.03, 0.006, 40, 60), 0.994 * math.exp(0.00045) + 0.3, 0.994 * math.exp(0.0018) + 0.006 * 7600 / 3),
    (atoms([1.0, 2.0, 10.0], [5, 3, 2]), 3.1, 21.7),
    (atoms([1.0, 2.0, 6.0]), 3.0, 41 / 3),
]


@pytest.mark.parametrize(("law", "first", "second"), LAWS)
def test_means_by_pollaczek_khinchine(law: Law, first: float, second: float) -> None:
    assert law.moments == pytest.approx((first, second))
    rate = 0.5 / first
    found = truth(System(steps([1.0], law), poisson(rate)), SHORT)
    assert agrees(found.mean, first + rate * second / (2 * (1 - 0.5)))
    assert agrees(found.busy, 0.5)


@pytest.mark.parametrize("shape", [0.3, 0.7, 2.0, 3.0])
def test_gamma_arrivals_by_gi_m_1(shape: float) -> None:
    """R ~ Exp(mu (1 - sigma)), sigma the root of sigma = A*(mu (1 - sigma)), A* the transform of the gaps."""
    rate, mu = 0.7, 1.0
    sigma = brentq(lambda s: (1 + mu * (1 - s) / (shape * rate)) ** -shape - s, 1e-9, 1 - 1e-6)
    found = truth(System(steps([1.0], exponential(1 / mu)), gamma_arrivals(rate, shape)), SHORT)
    assert agrees(found.rate, rate)
    assert agrees(found.mean, 1 / (mu * (1 - sigma)))
    assert agrees_within_bin(found.quantile(0.99), math.log(100) / (mu * (1 - sigma)))


# Published tables ---------------------------------------------------------------------------------------------------

UNLIMITED = [  # rate, mean, p50, p99, mean batch; T = 4 + .1 b
    (0.1, 4.90124, 4.10000, 8.14107, 1.07390),
    (0.5, 6.29874, 6.30152, 8.63003, 2.23294),
    (2, 7.61457, 7.59999, 10.5834, 10.0001),
    (5, 12.1667, 12.1000, 17.6356, 40.0000),
    (9, 60.7632, 60.1111, 91.7083, 360.000),
]


@pytest.mark.parametrize(("rate", "mean", "p50", "p99", "batch"), UNLIMITED)
def test_greedy_batches(rate: float, mean: float, p50: float, p99: float, batch: float) -> None:
    found = truth(System(steps(linear(4, 0.1, 2000)), poisson(rate), 2000), SHORT)
    assert agrees(found.mean, mean, 1e-5)
    assert agrees(found.mean_batch, batch, 1e-5)
    assert agrees_within_bin(found.quantile(0.5), p50)
    assert agrees_within_bin(found.quantile(0.99), p99)


CUTOFFS = [  # rate, mu of the side server, t_cut, overflow, p99; main T = 8 + .05 b
    (0.2, 0.5, 2, 0.530772, 12.9053),
    (0.4, 0.5, 2, 0.659983, 20.8056),
    (0.4, 0.5, 5, 0.367878, 15.9662),
    (0.6, 0.5, 5, 0.382794, 19.3290),
    (1, 0.5, 5, 0.393643, 40.3401),
    (1, 0.5, 7, 0.161664, 16.3435),
    (0.5, 2, 2, 0.689265, 10.0120),
    (2, 2, 3, 0.638464, 11.3286),
]


@pytest.mark.parametrize(("rate", "mu", "cut", "overflow", "p99"), CUTOFFS)
def test_cut_off(rate: float, mu: float, cut: float, overflow: float, p99: float) -> None:
    side = steps([1 / mu], exponential())
    found = truth(System(steps(linear(8, 0.05, 256)), poisson(rate), 256, 1, side, cut), SHORT)
    assert agrees(found.overflow, overflow, 2e-6)
    assert agrees(found.side_busy, rate * overflow / mu, 2e-6)
    assert agrees_within_bin(found.quantile(0.99), p99)


# Request by request -------------------------------------------------------------------------------------------------

ARRIVES, ENDS, LEAVES = range(3)


def event_by_event(system: System, times: Sequence[float]) -> tuple[list[float], int, int]:
    """Responses, who overflowed and batches, by a plain event list; F = 1. Arrivals come first, then ends, then who
    leaves."""
    assert system.side is None or len(system.side.times_ms) == 1
    events = [(t, ARRIVES, i) for i, t in enumerate(times)]
    heapq.heapify(events)
    queue: list[int] = []
    main_busy, batches, side_free, left = False, 0, 0.0, set()
    response = [math.nan] * len(times)
    while events:
        now, kind, i = heapq.heappop(events)
        if kind == ARRIVES:
            queue.append(i)
            if system.side is not None:
                heapq.heappush(events, (now + system.t_cut_ms, LEAVES, i))
        elif kind == ENDS:
            main_busy = False
        elif i in queue:
            assert system.side is not None
            queue.remove(i)
            left.add(i)
            side_free = max(side_free, now) + system.side.times_ms[0]
            response[i] = side_free - times[i]
        if events and events[0][0] == now and events[0][1] <= ENDS:
            continue
        last = not any(kind == ARRIVES for _, kind, _ in events)
        if not main_busy and (len(queue) >= system.threshold or (queue and last)):
            taken, queue = queue[: system.cap], queue[system.cap :]
            ends = now + system.main.times_ms[len(taken) - 1]
            for j in taken:
                response[j] = ends - times[j]
            heapq.heappush(events, (ends, ENDS, -1))
            main_busy, batches = True, batches + 1
    return response, len(left), batches


def once(system: System, sla_ms: float = math.inf) -> Replication:
    run = Replication(system, (1,), sla_ms)
    run.advance(1)
    return run


@pytest.mark.parametrize("whole", [False, True], ids=["any moment", "whole ms: ties"])
@pytest.mark.parametrize(
    ("cap", "threshold", "cut"), [(1, 1, math.inf), (4, 1, math.inf), (4, 3, math.inf), (3, 3, math.inf), (4, 1, 5.0)]
)
def test_a_recording_event_by_event(whole: bool, cap: int, threshold: int, cut: float) -> None:
    times = np.cumsum(np.random.default_rng(5).gamma(0.5, 3.0, 600))
    times = (np.round(times) if whole else times) - (round(times[0]) if whole else times[0])
    side = None if cut == math.inf else steps([3.0])
    system = System(steps([2.0, 3.0, 5.0, 6.0]), recorded(times, repeat=False), cap, threshold, side, cut)
    response, left, batches = event_by_event(system, times.tolist())
    sla = float(np.median(response)) + 1e-9
    run = once(system, sla)
    assert run.counts.tolist() == [600, sum(each <= sla for each in response), left, batches]
    assert run.sums[0] == pytest.approx(math.fsum(response))
    if cut < math.inf:
        assert left > 20
    counted = Truth(run.histogram[None], run.sums[None], run.counts[None], 0, True)
    for q in (0.1, 0.5, 0.9, 0.99):
        exact = float(np.quantile(response, q, method="inverted_cdf"))
        assert counted._at(np.array([q]))[0] == pytest.approx(exact, rel=BIN)


@pytest.mark.parametrize(("cut", "left", "response"), [(2.0, 0, 3.0 + 5.0), (1.9, 1, 3.0 + 1.9 + 7.0)])
def test_who_is_exactly_t_cut_old_is_taken(cut: float, left: int, response: float) -> None:
    system = System(steps([3.0]), recorded([0.0, 1.0], repeat=False), 1, 1, steps([7.0]), cut)
    run = once(system)
    assert run.counts[2] == left
    assert run.sums[0] == pytest.approx(response)


# Estimates ----------------------------------------------------------------------------------------------------------


def test_standard_errors_are_what_they_say() -> None:
    """40 estimates each of M/M/1 at load .8: their distances from the truth over their errors, squared, average 1.15
    for Student's t with 15 degrees of freedom; the average of 40 scatters by .3."""
    system = System(steps([1.0], exponential()), poisson(0.8))
    short = Effort(tolerance=math.inf, requests=20_000, warm=3_000)
    found = [truth(system, short, seed=100 + i) for i in range(40)]
    for values, exact in (
        ([each.mean for each in found], 5.0),
        ([each.quantile(0.99) for each in found], 5 * math.log(100)),
    ):
        squared = [((value.value - exact) / value.error) ** 2 for value in values]
        assert 0.6 < np.mean(squared) < 2.0
