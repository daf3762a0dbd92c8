"""The proved bound of a cut-off, held by the router itself where the bound's conditions hold: Poisson arrivals, a main
path that takes T(b), a side path that serves one at a time for exponential times. Time is virtual, so a run is long and
exact; the router's measured tail must not surely lie above the bound. Where the CPU keeps up, it agrees with the exact
distribution of an overflow that stays there; where it falls behind, it lies below."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from latfit.live import Request, Router, RouterOptions
from latfit.policies import Limits, policy
from latfit.queueing import cutoff_queue, exact_distribution, linear_times
from latfit.stats import FloatArray
from tests.unit.live.virtual import ExactExecutor, clock_s, on_virtual_time

REQUESTS, WARM, PARTS = 8_000, 500, 20


class ExponentialExecutor(ExactExecutor):
    def __init__(self, name: str, mean_ms: float, rng: np.random.Generator) -> None:
        super().__init__(name, [mean_ms])
        self._rng = rng

    async def execute(self, inputs: list[Any]) -> Sequence[Any]:
        await asyncio.sleep(self._rng.exponential(self.times_ms[0]) / 1000)
        return inputs


def served(rate: float, cutoff_ms: float, cpu_mean_ms: float, seed: int) -> tuple[FloatArray, FloatArray]:
    """Responses in ms, and which went to the CPU, in order of arrival; GPU T(b) = 12 + 0.05 b ms."""
    rng = np.random.default_rng(seed)
    arrive_s = np.cumsum(rng.exponential(1 / rate, REQUESTS)) / 1000
    gpu_ms: FloatArray = 12 + 0.05 * np.arange(1.0, 257.0)
    ended: list[Request] = []

    async def run() -> None:
        gpu, cpu = ExactExecutor("gpu", gpu_ms), ExponentialExecutor("cpu", cpu_mean_ms, rng)
        rule = policy.cutoff(cutoff_ms, Limits(256, 1))
        options = RouterOptions(most_waiting=REQUESTS, timeout_ms=1e9)
        router = Router([gpu, cpu], [gpu_ms, [cpu_mean_ms]], rule, options, clock_s)
        router.listeners.append(ended.append)
        await router.start()
        tasks = []
        for moment in arrive_s.tolist():
            await asyncio.sleep(moment - clock_s())
            tasks.append(asyncio.create_task(router.submit(None)))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        await router.close()

    on_virtual_time(run())
    ended.sort(key=lambda each: each.arrived_ms)
    return (
        np.array([each.ended_ms - each.arrived_ms for each in ended]),
        np.array([each.path == "cpu" for each in ended]),
    )


# Loads of the CPU: 0.05, 0.33, and 0.88, where overflow in bursts would wait long and stays on the GPU.
@pytest.mark.parametrize(("rate", "cutoff_ms", "cpu_rate"), [(0.1, 8.0, 0.5), (0.4, 7.0, 0.5), (0.4, 7.0, 0.19)])
def test_a_proved_bound_is_kept_by_the_router(rate: float, cutoff_ms: float, cpu_rate: float) -> None:
    queue = cutoff_queue(rate, cutoff_ms, linear_times(12, 0.05, max_batch=256), cpu_rate)
    law = exact_distribution(queue)
    response, by_cpu = served(rate, cutoff_ms, 1 / cpu_rate, seed=5)
    parts = np.array_split(response[WARM:], PARTS)
    for q in (0.9, 0.99):
        exact, bound = law.percentile(q), queue.proved_percentile(q)
        assert exact <= bound
        above = np.array([np.mean(each > bound) for each in parts])
        error = float(np.std(above, ddof=1)) / math.sqrt(PARTS)
        assert np.mean(above) - 4 * error <= 1 - q
        above = np.array([np.mean(each > exact) for each in parts])
        error = float(np.std(above, ddof=1)) / math.sqrt(PARTS)
        off = float(np.mean(above)) - (1 - q)
        assert off <= 4 * error + 1e-3
        assert off >= -4 * error - 1e-3 or law.utilisation > 0.5
    shares = np.array([np.mean(each) for each in np.array_split(by_cpu[WARM:], PARTS)])
    off, error = float(np.mean(shares)) - law.overflow_share, float(np.std(shares, ddof=1)) / math.sqrt(PARTS)
    assert off <= 4 * error
    assert off >= -4 * error or law.utilisation > 0.5
