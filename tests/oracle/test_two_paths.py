"""A second path never makes things worse: the policies on bursts and random loads against a plain simulation.

The plain simulation shares no code with the package. It serves one request at a time on each server, and finds when the
main path would end a request by playing the queue in front of it through.
"""

import heapq
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st

from latfit.policies import POLICIES, Policy, Settings, named_policy
from latfit.queueing import ServiceTimes, optimal_rule
from latfit.simulation.policies.event_loop import Load
from latfit.simulation.policies.replication import draw, run
from latfit.simulation.policies.run import Options, simulate
from latfit.simulation.policies.service import System, linear_path, path_times, table_path
from latfit.stats import FloatArray
from latfit.workload import RecordedLoad, make_requests
from latfit.workload.arrivals import Modulated, Poisson
from latfit.workload.load import OpenLoad, Streams
from tests.unit.live.test_as_simulated import served_live

GPU_MS, CPU_MS = 1500.0, 6000.0
TWO_ENGINES = System(table_path("gpu", [GPU_MS], servers=11), table_path("cpu", [CPU_MS], servers=2))
BURST = np.arange(48.0)
"""Arrivals in ms."""

TWO_PATHS = [name for name, policy in POLICIES.items() if policy.needs_side]


def of_burst(system: System, arrive: Sequence[float] | FloatArray) -> Load:
    return draw(RecordedLoad(make_requests(np.asarray(arrive))), len(arrive), 0.0, system, Streams(1))


def policy_of(
    name: str, system: System, rate: float = 1e-4, *, B1: int | None = 1, t_cut_ms: float | None = None
) -> Policy:
    chosen, times = Settings(B1=B1, t_cut_ms=t_cut_ms), path_times(system)
    return named_policy(name, rate, times, chosen, lambda at, T: optimal_rule(at, ServiceTimes(T)).table)


def plain(arrive: Sequence[float], times: tuple[float, float], servers: tuple[int, int], age: float) -> list[float]:
    """Responses. The main path serves in order. The first request that an idle side server ends no later goes there,
    once the oldest has waited for `age`."""
    main, side, waiting, response = [0.0] * servers[0], [0.0] * servers[1], [], [math.nan] * len(arrive)
    moments = list(arrive)
    heapq.heapify(moments)
    coming = sorted(range(len(arrive)), key=lambda i: arrive[i])
    while moments:
        now = heapq.heappop(moments)
        while coming and arrive[coming[0]] <= now:
            waiting.append(coming.pop(0))
            heapq.heappush(moments, arrive[waiting[-1]] + age)
        while waiting and min(main) <= now:
            k, i = main.index(min(main)), waiting.pop(0)
            main[k] = now + times[0]
            response[i] = main[k] - arrive[i]
            heapq.heappush(moments, main[k])
        while waiting and side and min(side) <= now and now >= arrive[waiting[0]] + age:
            free, found = sorted(main), None
            for i in waiting:
                heapq.heapify(free)
                ends = max(now, heapq.heappop(free)) + times[0]
                heapq.heappush(free, ends)
                if ends >= now + times[1] - 1e-7 * times[1]:
                    found = i
                    break
            if found is None:
                break
            k = side.index(min(side))
            side[k] = now + times[1]
            response[found] = side[k] - arrive[found]
            waiting.remove(found)
            heapq.heappush(moments, side[k])
    return response


ALONE = np.array(plain(BURST.tolist(), (GPU_MS, CPU_MS), (11, 0), 0.0))


def test_the_plain_simulation_of_the_burst() -> None:
    """Five rounds of eleven: 48 requests end after 1.5 (11 of them), 3, 4.5, 6 and 7.5 s (the last 4)."""
    rounds = np.repeat([1500.0, 3000.0, 4500.0, 6000.0, 7500.0], [11, 11, 11, 11, 4])
    assert np.sort(ALONE) == pytest.approx(rounds, abs=50.0)


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_is_worse_than_the_gpu_alone_in_a_burst(name: str) -> None:
    """48 requests at once, simulated and by the router; all would wait for minutes in the queue of the CPU."""
    system = TWO_ENGINES if name in TWO_PATHS else System(TWO_ENGINES.main)
    policy, drawn = policy_of(name, system), of_burst(system, BURST)
    simulated = run(policy, system, drawn, Streams(1)).response_ms
    live, _ = served_live(policy, system, drawn)
    assert np.array(live) == pytest.approx(simulated, abs=1e-3)
    assert np.all(simulated <= ALONE + 1e-6)


@pytest.mark.parametrize(("name", "age"), [("three-stage", 0.0), ("split", 0.0), ("cutoff", 500.0)])
def test_a_burst_request_by_request(name: str, age: float) -> None:
    expected = plain(BURST.tolist(), (GPU_MS, CPU_MS), (11, 2), age)
    found = run(
        policy_of(name, TWO_ENGINES, t_cut_ms=age or None), TWO_ENGINES, of_burst(TWO_ENGINES, BURST), Streams(1)
    )
    assert np.sort(found.response_ms) == pytest.approx(np.sort(expected), abs=1e-6)
    assert found.path.sum() == 2


@given(st.integers(0, 2**32 - 1))
def test_every_request_ends_no_later_than_on_the_main_path_alone(seed: int) -> None:
    """Constant times, one request a server, any arrivals, bursts and overload included."""
    rng = np.random.default_rng(seed)
    servers = int(rng.integers(1, 6)), int(rng.integers(1, 4))
    times = float(rng.uniform(5, 20)), float(rng.uniform(21, 90))
    arrive = np.cumsum(rng.gamma(0.2, 5 * times[0] / servers[0], 200)) + 1.0
    alone = plain(arrive.tolist(), times, (servers[0], 0), 0.0)
    system = System(
        table_path("gpu", [times[0]], servers=servers[0]), table_path("cpu", [times[1]], servers=servers[1])
    )
    for name, age in (("three-stage", 0.0), ("split", 0.0), ("cutoff", times[0])):
        found = run(policy_of(name, system), system, of_burst(system, arrive), Streams(1)).response_ms
        assert np.all(found <= np.array(alone) + 1e-6)
        assert found == pytest.approx(plain(arrive.tolist(), times, servers, age), abs=1e-6)


BATCHES = System(linear_path("gpu", 6, 0.25, 32), linear_path("cpu", 0.9, 1.7, 8))


@pytest.mark.parametrize("bursts", [False, True], ids=["Poisson", "bursts"])
@pytest.mark.parametrize("load", [0.1, 0.5, 0.85, 0.97])
def test_batches_under_load(load: float, bursts: bool) -> None:
    """Mean and p99 of each policy against those of the GPU alone on the same arrivals; bursts of 2.5 times the load."""
    rate = load * BATCHES.main.rate_limit(BATCHES.main.largest)
    law = Modulated([2.5 * rate, 0.625 * rate], [60.0, 240.0]) if bursts else Poisson(rate)
    options = Options(20_000, replications=4, seed=3)

    def latency(name: str) -> dict[str, float]:
        found = simulate(policy_of(name, BATCHES, rate, B1=None), BATCHES, OpenLoad(law), options).latency
        return {statistic: found[statistic].value for statistic in ("mean", "p99")}

    alone = latency("gpu-only")
    for name in TWO_PATHS:
        for statistic, value in latency(name).items():
            assert value <= 1.005 * alone[statistic], (name, statistic)
