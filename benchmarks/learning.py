"""A path that changes its speed in mid-run, with real executors: when the router notices, and what becomes of the tail,
beside the same arrivals without learning and beside the least p99 that any thresholds reach in the simulator.

`python -m benchmarks.learning [--smoke]`. Two processes that a flag makes so many times as slow: they wait for T(b), so
that what others do on the machine disturbs little. A run in which the event loop stood still is repeated. Also: what
learning costs a batch and a request. Aims: noticed within 200 batches; p99 within 20 % of the least; 5 µs a batch.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from latfit.live import (
    Learner,
    ProcessExecutor,
    Promise,
    Request,
    Router,
    RouterOptions,
    ThreadExecutor,
    precisely,
)
from latfit.live.executor import Run
from latfit.policies import Limits, named_policy, policy as policies
from latfit.simulation import Options, System, path_times, simulate, table_path
from latfit.stats import FloatArray
from latfit.workload import OpenLoad, Poisson

WORLDS = (
    ("main path 2x slower", (2.0, 1.0), 0.4),
    ("CPU path 2x slower", (1.0, 2.0), 0.6),
    ("both 2x slower", (2.0, 2.0), 0.3),
    ("main path 2x faster", (0.5, 1.0), 0.6),
)
CHANGES, SETTLED = 0.3, 0.5
"""Shares of a run after which the speed changes, and from which on the tail is measured."""

TRIES, STALLED_MS = 4, 30.0


@dataclass(frozen=True)
class Waits:
    """Batches take tau + alpha b, ms."""

    tau_ms: float
    alpha_ms: float
    largest: int

    def __call__(self) -> Run:
        def run(inputs: list[Any]) -> Sequence[Any]:
            time.sleep((self.tau_ms + self.alpha_ms * len(inputs)) / 1000)
            return inputs

        return run


WAITING = (Waits(12.0, 0.5, 32), Waits(2.0, 3.4, 8))


@dataclass(frozen=True)
class Slowed:
    """Batches take `factor` times as long while the flag is there; below 1 they do so while it is not, and it makes
    them faster."""

    make: Waits
    flag: str
    factor: float

    def __call__(self) -> Run:
        run, flag = self.make(), Path(self.flag)

        def slowed(inputs: list[Any]) -> Sequence[Any]:
            began = time.perf_counter()
            outputs = run(inputs)
            if self.factor != 1 and flag.exists() == (self.factor > 1):
                time.sleep((max(self.factor, 1 / self.factor) - 1) * (time.perf_counter() - began))
            return outputs

        return slowed


async def typical_ms(executor: ProcessExecutor, rounds: int) -> FloatArray:
    """Medians of batches of some sizes, linear between them."""
    sizes = sorted({1, 2, 4, executor.largest // 2, executor.largest})
    took = np.empty((rounds, len(sizes)))
    for k in range(rounds):
        for i, size in enumerate(sizes):
            began = time.perf_counter()
            await executor.execute([None] * size)
            took[k, i] = (time.perf_counter() - began) * 1000
    return np.interp(np.arange(1, executor.largest + 1), sizes, np.median(took[1:], axis=0))


@dataclass
class Ran:
    """arrived_s, response_ms: of each request, from the first moment on.  switches: path, times over the planned ones,
    and after how many of its batches since the change.  stalled_ms: the longest that the event loop stood still."""

    arrived_s: FloatArray
    response_ms: FloatArray
    switches: list[tuple[str, float, int]]
    stalled_ms: float

    def p99(self, from_s: float, until_s: float) -> float:
        return float(np.quantile(self.response_ms[(self.arrived_s >= from_s) & (self.arrived_s < until_s)], 0.99))


async def stalls(found: list[float]) -> None:
    """How much later than asked a short sleep ends, ms, again and again."""
    while True:
        began = time.monotonic()
        await asyncio.sleep(0.002)
        found.append((time.monotonic() - began) * 1e3 - 2)


async def ran(router: Router, arrive_s: FloatArray, flag: Path, *, learns: bool) -> Ran:
    """Requests sent at these moments; the flag is set on the way."""
    flag.unlink(missing_ok=True)
    ended: list[Request] = []
    batches: list[tuple[str, float]] = []
    router.listeners.append(ended.append)
    router.batch_listeners.append(lambda path, size, began, end, well: batches.append((path.name, end)))
    learner = Learner(router) if learns else None
    await router.start()
    loop, start = asyncio.get_running_loop(), time.monotonic() + 0.1
    changes = start + CHANGES * float(arrive_s[-1])
    loop.call_later(changes - time.monotonic(), flag.touch)
    sent, late = [], [0.0]
    beat = loop.create_task(stalls(late))
    for moment in (start + arrive_s).tolist():
        while (ahead := moment - time.monotonic()) > 0:
            await asyncio.sleep(ahead)
        sent.append(loop.create_task(router.submit(None, arrived_s=moment)))
    await asyncio.gather(*sent, return_exceptions=True)
    beat.cancel()
    await router.drain(60.0)
    switches = [
        (each.path, each.after, sum(name == each.path and changes * 1e3 <= end <= each.at_ms for name, end in batches))
        for each in (learner.switches if learner else ())
    ]
    arrived = np.array([each.arrived_ms for each in ended]) / 1e3 - start
    return Ran(arrived, np.array([each.ended_ms - each.arrived_ms for each in ended]), switches, max(late))


def least_p99(system: System, rate: float) -> float:
    """Of three-stage over thresholds, by brute force."""
    assert system.side is not None
    limits = Limits(system.main.largest, system.side.largest)
    longest = 2 * float(system.main.typical_ms[-1])
    candidates = [
        policies.three_stage(b, cutoff, limits)
        for b in range(1, limits.side + 2)
        for cutoff in np.geomspace(2.0, longest, 10).tolist()
    ]
    load, options = OpenLoad(Poisson(rate)), Options(20_000, replications=1)
    return min(float(simulate(each, system, load, options).latency["p99"].value) for each in candidates)


async def world(name: str, factors: tuple[float, float], load: float, lasts_s: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        flag = Path(folder) / "slow"
        executors = [
            ProcessExecutor(path, Slowed(make, str(flag), factor), make.largest)
            for path, make, factor in zip(("gpu", "cpu"), WAITING, factors, strict=True)
        ]
        await asyncio.gather(*(each.start() for each in executors))
        times = await asyncio.gather(*(typical_ms(each, 15) for each in executors))
        before = System(*(table_path(each.name, T) for each, T in zip(executors, times, strict=True)))
        slow = [table_path(each.name, T * f) for each, T, f in zip(executors, times, factors, strict=True)]
        rate = load * before.main.rate_limit(before.main.largest)
        policy = named_policy("three-stage", rate, path_times(before))
        arrive_s = np.cumsum(np.random.default_rng(1).exponential(1 / rate, int(rate * 1e3 * lasts_s))) / 1e3
        least = [least_p99(system, rate) for system in (before, System(*slow))]
        end = float(arrive_s[-1])
        print(f"{name}, {load:.0%}, {1e3 * rate:.0f}/s: least p99 by simulation {least[0]:.1f}, then {least[1]:.1f} ms")
        for learns in (False, True):
            runs: list[Ran] = []
            while len(runs) < TRIES and (not runs or runs[-1].stalled_ms > STALLED_MS):
                router = Router(executors, times, policy, RouterOptions(most_waiting=10**6))
                runs.append(await ran(router, arrive_s, flag, learns=learns))
            found = min(runs, key=lambda each: each.stalled_ms)
            p99 = [found.p99(0.1 * end, CHANGES * end), found.p99(SETTLED * end, end)]
            told = ", ".join(f"{path} {f:.2f} after {n} batches" for path, f, n in found.switches if n) or "none"
            stall = f"longest stall {found.stalled_ms:.0f} ms, run {len(runs)}"
            print(f"  {'learning' if learns else 'without '}: p99 {p99[0]:.1f}, then {p99[1]:.1f} ms; {told}; {stall}")
        await asyncio.gather(*(each.close() for each in executors))


def cost_us(count: int) -> tuple[float, float]:
    """Of a batch and of a request, on the event loop."""
    times = np.linspace(4.0, 8.0, 32)
    router = Router([ThreadExecutor("gpu", list, 32)], [times], policies.gpu_only(Limits(32)))
    learner = Learner(router, Promise(50.0))
    scatter = np.random.default_rng(0).lognormal(0, 0.1, count).tolist()
    path, now = router.main, 0.0
    began = time.perf_counter()
    for i, each in enumerate(scatter):
        took = float(times[i % 32]) * each
        learner.add_batch(path, 1 + i % 32, now, now + took, True)
        now += took
    batch = (time.perf_counter() - began) / count * 1e6
    request = Request(None, 0, 0.0, None)  # type: ignore[arg-type]
    request.served, request.ended_ms = True, 10.0
    began = time.perf_counter()
    for _ in range(count):
        learner.add_request(request)
    return batch, (time.perf_counter() - began) / count * 1e6


def main(smoke: bool = False) -> None:
    batch, request = cost_us(2000 if smoke else 100_000)
    print(f"learning: a batch {batch:.1f} µs (aim 5), a request {request:.2f} µs")
    for name, factors, load in WORLDS[:1] if smoke else WORLDS:
        precisely(world(name, factors, load, 4.0 if smoke else 15.0))


if __name__ == "__main__":
    main("--smoke" in sys.argv[1:])
