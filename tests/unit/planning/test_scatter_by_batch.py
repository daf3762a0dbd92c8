"""Steps that pause in large batches only, planted, measured, fitted and promised: an event loop of its own knows the
true percentile."""

from functools import cache

import numpy as np
import pytest

from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions
from latfit.hardware.path_latency import PathLatency
from latfit.hardware.profile import ExecutionPath, HardwareProfile
from latfit.model.fit_result import FitResult
from latfit.planning.load.strategies import Target, machine_of
from latfit.planning.load.uncertainty import PercentileEstimate, estimate_percentile
from latfit.planning.request import PlanRequest
from latfit.planning.result import Kind, Strategy
from latfit.trace.table import Trace

SIZES = np.array([1.0, 2, 4, 6, 8, 12, 16, 24, 32])
PAUSES_FROM, SHARE, LONG = 8, 0.05, 8.0


def factors(B: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Of batches (n,): noise of 3 %, and from eight requests on one in twenty that takes eight times as long."""
    calm = np.exp(0.03 * rng.standard_normal(len(B)))
    return np.where((B >= PAUSES_FROM) & (rng.random(len(B)) < SHARE), LONG, calm)


@cache
def measured(seed: int, steps: int = 4500) -> FitResult:
    rng = np.random.default_rng([seed, 1])
    B = rng.permutation(np.resize(SIZES, steps))
    return fit_trace(Trace({"B": B, "S": B, "T_ms": (4 + 0.5 * B) * factors(B, rng)}), FitOptions("linear"))


def promise_of(fit: FitResult, rate: float, cap: int) -> PercentileEstimate:
    profile = HardwareProfile({"gpu": ExecutionPath("gpu", fit)})
    machine = machine_of(profile, 1, PlanRequest(rate=rate, max_batch=cap))
    found = estimate_percentile(machine, Strategy(Kind.GREEDY, ("gpu",)), Target(1e3, 0.99, 1), rate)
    assert found is not None
    return found


def shares_above(x: float, rate: float, cap: int) -> np.ndarray:
    """Of the responses above x ms, in runs of their own: request by request, greedy batches up to `cap`."""
    shares = []
    for seed in range(8):
        rng = np.random.default_rng([seed, 2])
        arrive, free, i, n = np.cumsum(rng.exponential(1 / rate, 50_000)), 0.0, 0, 0
        F = {b: factors(np.full(4000, float(b)), rng) for b in range(1, cap + 1)}
        response = np.empty(len(arrive))
        while i < len(arrive):
            start = max(free, arrive[i])
            last = min(int(np.searchsorted(arrive, start, side="right")), i + cap)
            free = start + (4 + 0.5 * (last - i)) * float(F[last - i][int(rng.integers(4000))])
            response[i:last] = free - arrive[i:last]
            i, n = last, n + 1
        shares.append(float(np.mean(response[3000:] > x)))
    return np.array(shares)


# Batches of up to 4 never pause, those of up to 32 do where the load makes them large.
@pytest.mark.parametrize(("rate", "cap"), [(0.4, 4), (0.9, 32)])
def test_what_is_promised_holds_the_truth(rate: float, cap: int) -> None:
    found = promise_of(measured(3), rate, cap)
    assert not found.doubts
    assert found.interval is not None
    low, high = found.interval
    assert low is not None
    assert high is not None
    for end, sign in ((low, 1), (high, -1)):
        shares = shares_above(end, rate, cap)
        assert sign * (shares.mean() - 0.01) > -4 * shares.std(ddof=1) / np.sqrt(len(shares))


def test_pauses_count_for_the_batches_that_have_them() -> None:
    """With one law of all steps, p99 of batches up to 4 would hold pauses that they never have."""
    found = promise_of(measured(3), 0.4, 4)
    # Up to 4 take 6 ms at most, but for noise; an eightfold step takes 36 ms and more.
    assert found.percentile_ms < 20


def test_means_are_those_of_the_batches() -> None:
    latency = PathLatency(ExecutionPath("gpu", measured(4, 18_000)))
    B = np.array([1.0, 4.0, 8.0, 32.0])
    calm = np.exp(0.03**2 / 2)
    expected = (4 + 0.5 * B) * np.where(B >= PAUSES_FROM, (1 - SHARE) * calm + SHARE * LONG, calm)
    # 10,000 steps from eight on, 8,000 below: errors of sqrt(0.05/10,000) 7 = 1.6 % and of 0.03/sqrt(2,000).
    assert latency.mean_ms(B)[:2] == pytest.approx(expected[:2], rel=0.01)
    assert latency.mean_ms(B)[2:] == pytest.approx(expected[2:], rel=0.06)
