"""A router that learns, on virtual time: paths that change in mid-run, and what becomes of the tail."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from latfit.live import BestForTail, Learner, LearnerMetrics, Promise, Request, Router, RouterOptions
from latfit.policies import POLICIES, Limits, Policy, named_policy, policy as policies
from latfit.queueing import ServiceTimes, optimal_rule
from latfit.simulation import Options, System, linear_path, path_times, simulate, table_path
from latfit.stats import FloatArray
from latfit.workload import OpenLoad, Poisson
from tests.unit.live.virtual import ExactExecutor, clock_s, on_virtual_time

GPU, CPU = linear_path("gpu", 6.0, 0.25, 32), linear_path("cpu", 0.9, 1.7, 8)
PLANNED = System(GPU, CPU)
TIMES = [path.typical_ms[1:] for path in PLANNED.paths]
CHANGES_S = 3.0
SETTLED_S = 5.5

Factor = Callable[[float], float]
"""Times over the planned ones, at a moment in s."""


class ChangingExecutor(ExactExecutor):
    """Takes factor(now) T(b), with a lognormal scatter of 5 %. ended: moments, s."""

    def __init__(self, name: str, times_ms: FloatArray, factor: Factor, rng: np.random.Generator) -> None:
        super().__init__(name, times_ms)
        self.factor, self.rng = factor, rng
        self.ended: list[float] = []

    async def execute(self, inputs: list[Any]) -> Sequence[Any]:
        scatter = float(np.exp(0.05 * self.rng.standard_normal()))
        await asyncio.sleep(float(self.times_ms[len(inputs) - 1]) * self.factor(clock_s()) * scatter / 1000)
        self.ended.append(clock_s())
        return inputs


@dataclass
class Told:
    """What became of a run: moments of arrival (s) and responses (ms) of its requests."""

    router: Router
    learner: Learner | None
    executors: list[ChangingExecutor]
    arrived_s: FloatArray
    response_ms: FloatArray

    def p99(self, from_s: float) -> float:
        return float(np.quantile(self.response_ms[self.arrived_s >= from_s], 0.99))


def steady(factor: float) -> Factor:
    return lambda _: factor


def change(factor: float) -> Factor:
    return lambda now: factor if now >= CHANGES_S else 1.0


def told(
    policy: Policy,
    per_ms: float,
    lasts_s: float,
    factors: tuple[Factor, Factor],
    *,
    learner: Callable[[Router], Learner] | None = Learner,
) -> Told:
    async def story() -> Told:
        rng = np.random.default_rng(5)
        executors = [
            ChangingExecutor(path.name, times, factor, rng)
            for path, times, factor in zip(PLANNED.paths, TIMES, factors, strict=True)
        ]
        router = Router(executors, TIMES, policy, RouterOptions(most_waiting=10**6), clock_s)
        learning = learner(router) if learner is not None else None
        ended: list[Request] = []
        router.listeners.append(ended.append)
        loop = asyncio.get_running_loop()
        moments = np.cumsum(rng.exponential(1 / per_ms, int(per_ms * lasts_s * 1000))) / 1000
        async with router:
            sent = []
            for moment in moments:
                await asyncio.sleep(max(0.0, moment - loop.time()))
                sent.append(loop.create_task(router.submit(None)))
            await asyncio.gather(*sent, return_exceptions=True)
        arrived = np.array([each.arrived_ms / 1000 for each in ended])
        response = np.array([each.ended_ms - each.arrived_ms for each in ended])
        return Told(router, learning, executors, arrived, response)

    return on_virtual_time(story())


def scaled(gpu: float, cpu: float) -> System:
    return System(
        *(table_path(path.name, path.typical_ms[1:] * f) for path, f in zip(PLANNED.paths, (gpu, cpu), strict=True))
    )


@cache
def least_p99(gpu: float, cpu: float, per_ms: float) -> float:
    """Of three-stage on paths of this speed: over thresholds, by brute force."""
    system, options = scaled(gpu, cpu), Options(8_000, replications=1)
    return min(
        float(simulate(each, system, OpenLoad(Poisson(per_ms)), options).latency["p99"].value)
        for each in (
            policies.three_stage(b, cutoff, Limits(32, 8))
            for b in (1, 4, 9)
            for cutoff in np.geomspace(2, 60, 6).tolist()
        )
    )


def planned(name: str, load: float) -> tuple[Policy, float]:
    rate = load * GPU.rate_limit(32)
    return named_policy(name, rate, path_times(PLANNED)), rate


@pytest.mark.parametrize(("gpu", "cpu", "load"), [(2.0, 1.0, 0.4), (1.0, 2.0, 0.6), (2.0, 2.0, 0.3), (0.5, 1.0, 0.6)])
def test_a_path_that_changes_in_mid_run(gpu: float, cpu: float, load: float) -> None:
    """Noticed within 200 of its batches; p99 is then within 20 % of the least for the new speed."""
    policy, rate = planned("three-stage", load)
    found = told(policy, rate, 10.0, (change(gpu), change(cpu)))
    assert found.learner is not None
    first = {each.path: each for each in reversed(found.learner.switches)}
    for executor, factor in zip(found.executors, (gpu, cpu), strict=True):
        if factor == 1:
            assert executor.name not in first
            continue
        switch = first[executor.name]
        assert switch.after == pytest.approx(factor, rel=0.1)
        between = sum(CHANGES_S <= moment <= switch.at_ms / 1000 for moment in executor.ended)
        assert 0 < between <= 200
    assert found.learner.switched <= 4
    assert found.p99(SETTLED_S) <= 1.2 * least_p99(gpu, cpu, rate)


def test_paths_that_do_not_change_are_left_alone() -> None:
    policy, rate = planned("cutoff", 0.5)
    found = told(policy, rate, 10.0, (steady(1.0), steady(1.0)))
    assert found.learner is not None
    assert not found.learner.switched
    assert found.router.policy is policy


def kept(policy: Policy, rate: float, system: System) -> Policy:
    return policy


@pytest.mark.parametrize("name", POLICIES)
def test_thresholds_for_slower_paths(name: str) -> None:
    """Policies without thresholds stay as they are; the optimal table is that of the new times; the others' simulated
    tail is no worse than with the old thresholds."""
    rate = 0.4 * GPU.rate_limit(32)
    solve = lambda asked, T: optimal_rule(asked, ServiceTimes(T)).table  # noqa: E731
    policy = named_policy(name, rate, path_times(PLANNED), solve=solve)
    system = scaled(2.0, 1.0)
    made = BestForTail(0.95, 8000)(policy, rate, system)
    if name == "optimal":
        table = optimal_rule(rate, ServiceTimes(system.main.typical_ms[1:])).table
        assert made.settings["threshold"] == table.threshold
    elif name in ("cutoff", "three-stage"):
        options = Options(8000, replications=1)
        tails = [
            simulate(each, system, OpenLoad(Poisson(rate)), options).percentile_ms(0.95) for each in (made, policy)
        ]
        assert tails[0] <= tails[1]
    else:
        assert made is policy


def test_metrics_of_a_learner() -> None:
    policy, rate = planned("three-stage", 0.4)
    limit = 30.0
    late: list[bool] = []
    texts: list[str] = []

    def learner(router: Router) -> Learner:
        made = Learner(router, Promise(limit, block=100))
        router.listeners.append(lambda request: late.append(request.ended_ms - request.arrived_ms > limit))
        registry = CollectorRegistry()
        registry.register(LearnerMetrics(made))
        asyncio.get_running_loop().call_at(7.5, lambda: texts.append(generate_latest(registry).decode()))
        return made

    found = told(policy, rate, 8.0, (change(3.0), steady(1.0)), learner=learner)
    assert found.learner is not None
    monitor = found.learner.monitor
    assert monitor is not None
    assert (monitor.broken, monitor.kept) == (sum(late), len(late) - sum(late))
    samples = {
        (sample.name, sample.labels.get("path", sample.labels.get("setting", ""))): sample.value
        for family in text_string_to_metric_families(texts[0])
        for sample in family.samples
    }
    assert samples["latfit_path_time_factor_in_use", "gpu"] == pytest.approx(3.0, rel=0.1)
    assert samples["latfit_path_time_factor_low", "gpu"] <= 3.0 <= samples["latfit_path_time_factor_high", "gpu"]
    assert samples["latfit_policy_setting", "B1"] == found.router.policy.settings["B1"]
    assert samples["latfit_promises_broken_total", ""] > 0
    assert samples["latfit_promise_alarm", ""] == 1
