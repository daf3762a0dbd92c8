"""Run policies at several loads on executors of this machine, and compare each run with its simulation."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from latfit.errors import HardwareMissing, refuse
from latfit.hardware import ExecutionPath, HardwareProfile
from latfit.live.executor import Executor, ProcessExecutor
from latfit.live.replay import (
    MAX_OTHERS,
    STATISTICS,
    Compared,
    Driven,
    at_speed,
    draw_speeds,
    drive,
    measure_executors,
    numbers_of,
    predicted_ranges,
    probe,
    slowdown,
    speed_levels,
)
from latfit.live.steps import DecodeSteps
from latfit.planning import promised_by_batches
from latfit.policies import POLICIES, named_policy
from latfit.profiling import model_shape, usable_cpus
from latfit.queueing import solve_optimal
from latfit.simulation import Options, Serving, SimResult, System, measured_path, path_times, simulate
from latfit.stats import FloatArray
from latfit.workload import RecordedLoad, make_requests

REPLICATIONS = 40  # simulated runs of the same arrivals at the speed of the probes
SPEEDS, RUNS_PER_SPEED = 40, 2  # simulated speeds that a run may have; their runs give its range
MIN_PROBE_S = 2.0
WARM = 0.1  # share of a run's requests that is left out while it fills up
MIN_REQUESTS = 200
TRIES = 3  # of a run, until others do not disturb it
SIDE_LARGEST = 4


def stand_ins(model: str, launch_ms: float, max_batch: int) -> list[Executor]:
    """Return executors of decode steps in two processes, a core each."""
    cores = usable_cpus()
    if len(cores) < 2:
        raise HardwareMissing("two paths need two cores, and there is one", remedy="Use a machine with two cores.")
    refuse(not 1 <= max_batch <= 1024, f"batches of up to {max_batch}", "--set max_batch", "Give 1 to 1024.")
    model_shape(model)  # refused here rather than in a process
    main = DecodeSteps(model, largest=max_batch, launch_ms=launch_ms)
    side = DecodeSteps(model, largest=SIDE_LARGEST)
    return [
        ProcessExecutor("gpu", main, max_batch, cores=[cores[-1:]]),
        ProcessExecutor("cpu", side, SIDE_LARGEST, cores=[cores[:1]]),
    ]


@dataclass(frozen=True, eq=False)
class Bench:
    executors: Sequence[Executor]
    main: ExecutionPath
    system: System
    lasts_s: float

    @property
    def capacity(self) -> float:
        return self.system.main.rate_limit(self.system.main.largest)

    async def run(self, name: str, rate: float, seed: int) -> Compared:
        system = self.system if POLICIES[name].needs_side else System(self.system.main)
        policy = named_policy(name, rate, path_times(system), solve=solve_optimal)
        count = max(round(rate * self.lasts_s * 1000), MIN_REQUESTS)
        arrive = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))
        load = RecordedLoad(make_requests(arrive))

        def predict(speed: FloatArray, replications: int, seed: int = seed) -> SimResult:
            options = Options(replications=replications, warmup=WARM, seed=seed)
            return simulate(policy, at_speed(system, speed), load, options)

        executors = self.executors[: len(system.paths)]
        typical = [path.typical_ms[1:] for path in system.paths]
        expected = predict(np.ones(len(typical)), 1)
        use = np.array([expected.utilisation[path.name] for path in system.paths])
        probe_s, rng = max(self.lasts_s / 8, MIN_PROBE_S), np.random.default_rng([seed, 1])

        tries: list[tuple[float, Driven, FloatArray]] = []
        while not tries or (tries[-1][0] > MAX_OTHERS and len(tries) < TRIES):
            before, others_before = await probe(executors, typical, probe_s, rng, use)
            driven, others = await drive(executors, system, policy, arrive, int(WARM * count))
            after, others_after = await probe(executors, typical, probe_s, rng, use)
            levels = np.concatenate([speed_levels(batches, system) for batches in (before, after)])
            tries.append((max(others, others_before, others_after), driven, levels))
        others, driven, levels = min(tries, key=lambda each: each[0])
        speed = levels.mean(axis=0)
        predicted = await asyncio.to_thread(predict, speed, REPLICATIONS)
        speeds = draw_speeds(levels, SPEEDS, np.random.default_rng([seed, 3]))
        drawn = [await asyncio.to_thread(predict, each, RUNS_PER_SPEED, seed + k) for k, each in enumerate(speeds)]
        slower = slowdown(driven.batches, at_speed(system, speed))
        own = speed * np.array([slower.get(path.name, 1.0) for path in system.paths])
        at_own = await asyncio.to_thread(predict, own, REPLICATIONS // 2)
        promise = None
        if name == "gpu-only":
            profile = HardwareProfile({self.main.name: self.main})
            promise = await asyncio.to_thread(promised_by_batches, profile, rate, 0.99, float(np.max(levels)))
        result = driven.result
        before_and_after = zip(system.paths, levels.reshape(2, 2, -1).mean(axis=1).T.tolist(), strict=True)
        return Compared(
            result.policy,
            rate / self.capacity,
            result.rate_per_s,
            result.requests,
            numbers_of(result),
            numbers_of(predicted) | {"range_ms": predicted_ranges(drawn)},
            others,
            driven.late_ms,
            driven.failed,
            {path.name: (first, last) for path, (first, last) in before_and_after},
            slower,
            {name: float(at_own.latency[name].value) for name in STATISTICS},
            float(result.latency["p99"].low),
            None if promise is None or promise.interval is None or promise.doubts else promise.interval[1],
        )


async def run_policies(
    executors: Sequence[Executor],
    names: Sequence[str],
    *,
    shares: Sequence[float],
    rates_per_ms: Sequence[float],
    lasts_s: float,
    seed: int,
    progress: Callable[[float, int], None] | None,
) -> tuple[list[Compared], System]:
    """Run each policy at loads that are shares of the main path's capacity, or rates."""
    try:
        await asyncio.gather(*(each.start() for each in executors))
        fits = await measure_executors(executors, max(lasts_s / 2, MIN_PROBE_S), seed)
        paths = [ExecutionPath(each.name, fit) for each, fit in zip(executors, fits, strict=True)]
        system = System(*(measured_path(path, Serving()) for path in paths))
        bench = Bench(executors, paths[0], system, lasts_s)
        rates = [share * bench.capacity for share in shares] or rates_per_ms
        runs: list[Compared] = []
        for k, rate in enumerate(rates):
            for name in names:
                runs.append(await bench.run(name, rate, seed + k))
                if progress is not None:
                    progress(len(runs), len(names) * len(rates))
        return runs, system
    finally:
        await asyncio.gather(*(each.close() for each in executors))
