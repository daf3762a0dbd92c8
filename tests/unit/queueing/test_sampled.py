"""Queues that are run: against closed forms, the exact laws where services do not scatter, and an own simulation."""

import math

import numpy as np
import pytest
from scipy import optimize

from latfit.errors import SlaOutOfReach
from latfit.model.noise.step_noise import StepNoise, joined_noise, noise_of
from latfit.queueing.batch import batch_queue
from latfit.queueing.responses import Arrivals, Effort, batch_response, mm1, single_response
from latfit.queueing.sampled import sampled_cutoff, sampled_queue
from latfit.queueing.service import ServiceTimes, exponential_noise, linear_times, measured_times
from tests.unit.queueing.textbook import MD1

LONG = Effort(shortest=200_000, longest=400_000)
LEVEL = 0.9999
"""A true value lies outside an interval of this level once in ten thousand."""


def pauses(n: int = 400_000, share: float = 0.006, seed: int = 0) -> StepNoise:
    """Steps that scatter by 3 %, but for a share that takes 40 to 60 times as long."""
    rng = np.random.default_rng(seed)
    ratios = np.exp(rng.normal(0, 0.03, n))
    stalled = rng.random(n) < share
    ratios[stalled] = rng.uniform(40, 60, int(stalled.sum()))
    return noise_of(ratios, np.ones(n))


def alone(scatter: StepNoise | None) -> ServiceTimes:
    return measured_times(np.ones(1), scatter)


@pytest.mark.parametrize("load", [0.3, 0.8, 0.95])
def test_one_at_a_time_without_scatter_is_md1(load: float) -> None:
    law = sampled_queue(load, alone(None), effort=LONG)
    exact = MD1(load, 1.0)
    low, high = law.percentile_interval(0.99, LEVEL)
    assert low <= exact.percentile(0.99) <= high
    assert law.tail(2.5) == pytest.approx(exact.tail(2.5), abs=5 * law.tail_error(2.5))


@pytest.mark.parametrize("load", [0.5, 0.9, 0.95])
def test_one_at_a_time_with_an_exponential_service_is_mm1(load: float) -> None:
    law = sampled_queue(load, alone(exponential_noise()), effort=LONG)
    low, high = law.percentile_interval(0.99, LEVEL)
    assert low <= mm1(load, 1.0).percentile(0.99) <= high


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_the_mean_with_pauses_is_pollaczek_and_khinchines(load: float) -> None:
    scatter = pauses()
    scatter = noise_of(scatter.values / scatter.mean, scatter.weights)
    law = sampled_queue(load, alone(scatter), effort=Effort(shortest=1_000_000, longest=1_000_000))
    wait = load * float(scatter.weights @ scatter.values**2) / (2 * (1 - load))
    by_run = np.array([run.sums.sum() / run.sizes.sum() for run in law.runs])
    assert law.mean_ms == pytest.approx(1 + wait, abs=4.5 * by_run.std(ddof=1) / math.sqrt(len(by_run)))


@pytest.mark.parametrize(("rate", "largest", "threshold"), [(2.0, 16, 1), (4.0, 32, 1), (1.0, 16, 6)])
def test_batches_without_scatter_have_the_exact_law(rate: float, largest: int, threshold: int) -> None:
    times = linear_times(4, 0.1, largest)
    law, exact = sampled_queue(rate, times, threshold, effort=LONG), batch_queue(rate, times, threshold)
    for q in (0.5, 0.99):
        low, high = law.percentile_interval(q, LEVEL)
        assert low * (1 - 1e-3) <= exact.percentile(q) <= high * (1 + 1e-3)


@pytest.mark.parametrize(
    ("rate", "mu", "cutoff", "p99"),
    [(0.2, 0.5, 2, 12.9053), (0.4, 0.5, 5, 15.9662), (1.0, 0.5, 7, 16.3435), (2.0, 2.0, 3, 11.3286)],
)
def test_a_cutoff_has_the_published_percentiles(rate: float, mu: float, cutoff: float, p99: float) -> None:
    """T = 8 + 0.05 b up to 256, an exponential CPU: by matrices, confirmed by simulations of millions of requests."""
    law = sampled_cutoff(rate, cutoff, linear_times(8, 0.05, 256), measured_times(np.array([1 / mu])), effort=LONG)
    low, high = law.percentile_interval(0.99, LEVEL)
    assert low <= p99 <= high


def test_a_cutoff_with_a_measured_cpu_is_that_of_an_own_run() -> None:
    """GPU T = 8 + 0.05 b with pauses, CPU 2 ms and ten times as long once in ten: request by request in Python."""
    slow = noise_of(np.array([1.0, 10.0]) / 1.9, np.array([9.0, 1.0]))
    stalls = noise_of(np.array([0.9, 4.0]) / (0.95 * 0.9 + 0.05 * 4.0), np.array([95.0, 5.0]))
    gpu, cpu = measured_times(8 + 0.05 * np.arange(1.0, 65), stalls), measured_times(np.array([2.0]), slow)
    law = sampled_cutoff(0.3, 4.0, gpu, cpu, effort=LONG)
    shares = []
    for seed in range(8):
        rng = np.random.default_rng([9, seed])
        arrive = np.cumsum(rng.exponential(1 / 0.3, 40_000))
        response, gpu_free, cpu_free, i = np.empty(len(arrive)), 0.0, 0.0, 0
        while i < len(arrive):
            if gpu_free > arrive[i] + 4.0:
                took = 2.0 * rng.choice([1.0, 10.0], p=[0.9, 0.1]) / 1.9
                cpu_free = max(cpu_free, arrive[i] + 4.0) + took
                response[i] = cpu_free - arrive[i]
                i += 1
                continue
            begins, last = max(gpu_free, arrive[i]), i
            while last < len(arrive) and last - i < 64 and arrive[last] <= begins:
                last += 1
            stall = rng.choice([0.9, 4.0], p=[0.95, 0.05]) / (0.95 * 0.9 + 0.05 * 4.0)
            gpu_free = begins + (8 + 0.05 * (last - i)) * stall
            response[i:last] = gpu_free - arrive[i:last]
            i = last
        shares.append(float(np.mean(response[2000:] > law.percentile(0.99))))
    error = np.std(shares, ddof=1) / math.sqrt(len(shares)) + law.tail_error(law.percentile(0.99))
    assert np.mean(shares) == pytest.approx(0.01, abs=4.5 * float(error))


@pytest.mark.parametrize(("largest", "p99"), [(4, 213.0)])
def test_pauses_decide_the_percentile(largest: int, p99: float) -> None:
    """T = 1.5 + 0.5 b, 400/s: known from an independent simulation within 6 %; without the pauses it is 5.6 ms."""
    scatter = pauses()
    times = measured_times(1.5 + 0.5 * np.arange(1.0, largest + 1), scatter)
    law = sampled_queue(0.4, times, effort=LONG)
    assert law.percentile(0.99) == pytest.approx(p99, rel=0.1)


@pytest.mark.parametrize("paused", [False, True])
def test_batches_scatter_as_their_size_does(paused: bool) -> None:
    """T = 2 + 0.25 b, .5 per ms, up to 16: one to three 0.5 or 1.5 of it, more of them take nine times as long once in
    a hundred, or one to three do and more never scatter. Request by request, with other numbers."""
    stalls, even = noise_of(np.array([1.0, 9.0]) / 1.08, np.array([99.0, 1.0])), np.array([0.5, 1.5])
    steady = noise_of(even, np.ones(2))
    laws = [steady, stalls] if paused else [stalls, steady]
    scatter = joined_noise(laws, np.array([1.0, 4.0]), np.array([3.0, 16.0]))
    law = sampled_queue(0.5, measured_times(2 + 0.25 * np.arange(1.0, 17), scatter), effort=LONG)
    late = []
    for seed in range(12):
        rng = np.random.default_rng([12, seed])
        arrive, free, i = np.cumsum(rng.exponential(2.0, 40_000)), 0.0, 0
        response = np.empty(len(arrive))
        while i < len(arrive):
            start = max(free, arrive[i])
            last = min(int(np.searchsorted(arrive, start, side="right")), i + 16)
            if (last - i > 3) == paused:
                factor = (9.0 if rng.random() < 0.01 else 1.0) / 1.08
            else:
                factor = float(rng.choice(even))
            free = start + (2 + 0.25 * (last - i)) * factor
            response[i:last] = free - arrive[i:last]
            i = last
        late.append(float(np.mean(response[2000:] > law.percentile(0.99))))
    error = np.std(late, ddof=1) / math.sqrt(len(late)) + law.tail_error(law.percentile(0.99))
    assert np.mean(late) == pytest.approx(0.01, abs=4.5 * float(error))


def test_arrivals_in_bursts_wait_as_a_gamma_stream_does() -> None:
    """GI/M/1: the wait is exponential with rate mu (1 - sigma), sigma = E e^(-mu (1 - sigma) A)."""
    shape, load = 0.4, 0.7
    gaps = np.random.default_rng(3).gamma(shape, 1 / shape, 200_000)
    arrivals = Arrivals(gaps / gaps.mean(), label="bursts")
    law = single_response(load, alone(None), arrivals, Effort(shortest=200_000, longest=400_000))
    scale = 1 / (shape * load)
    sigma = optimize.brentq(lambda s: (1 + (1 - s) * scale) ** -shape - s, 1e-9, 1 - 1e-9)
    low, high = law.percentile_interval(0.99, LEVEL)  # type: ignore[attr-defined]
    # The sample of gaps is itself one of many: 200,000 of them leave 1.5 % open here.
    assert low * 0.98 <= math.log(100) / (1 - sigma) <= high * 1.02


def test_the_closed_form_is_taken_where_it_holds() -> None:
    times = linear_times(4, 0.1, 16)
    assert batch_response(1.0, times).exact
    assert not batch_response(1.0, measured_times(4 + 0.1 * np.arange(1.0, 17), pauses())).exact
    assert not batch_response(1.0, times, arrivals=Arrivals(np.ones(1000))).exact


def test_too_much_load_is_refused() -> None:
    with pytest.raises(SlaOutOfReach, match="unstable"):
        sampled_queue(1.01, alone(None))
    with pytest.raises(SlaOutOfReach, match="CPU"):
        sampled_cutoff(3.0, 0.1, linear_times(8, 0.05, 64), measured_times(np.array([2.0])))


def test_a_load_at_its_limit_says_that_it_has_not_settled() -> None:
    assert sampled_queue(0.5, alone(None)).settled
    assert not sampled_queue(0.995, alone(exponential_noise())).settled
