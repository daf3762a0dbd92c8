"""`replay`: a policy driven live on this machine, and its prediction beside it."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from latfit import live, reporting
from latfit.api.answer import Answer, State
from latfit.api.quantities import duration, percent, rates, several
from latfit.api.request import verb
from latfit.api.requests import ReplayRequest
from latfit.api.simulations import solve_optimal
from latfit.errors import HardwareMissing, WrongUsage
from latfit.hardware import ExecutionPath, HardwareProfile
from latfit.planning import promised_by_batches
from latfit.policies import POLICIES, named_policy
from latfit.profiling import model_shape
from latfit.simulation import Options, Serving, SimResult, System, measured_path, path_times, simulate
from latfit.stats import FloatArray
from latfit.units import format_percent
from latfit.workload import RecordedLoad, make_requests

if TYPE_CHECKING:
    from pandas import DataFrame

REPLICATIONS = 40  # simulated runs of the same arrivals at the speed of the probes
SPEEDS, RUNS_PER_SPEED = 40, 2  # simulated speeds that a run may have; their runs give its range
MIN_PROBE_S = 2.0
WARM = 0.1  # share of a run's requests that is left out while it fills up
MIN_REQUESTS = 200
TRIES = 3  # of a run, until others do not disturb it
LOADS = ("50%", "70%")
SIDE_LARGEST = 4


@dataclass(frozen=True, repr=False, eq=False)
class Replay(Answer):
    """Policies as they ran, with their predictions. system: paths with the fits that predicted."""

    runs: Sequence[live.Compared]
    system: System

    @property
    def agrees(self) -> bool | None:
        """Whether every run is as predicted; None where none contradicts but a run was disturbed."""
        outcomes = [run.agrees for run in self.runs]
        return False if False in outcomes else None if None in outcomes else True

    @property
    def state(self) -> State:
        return "good" if self.agrees else "bad" if self.agrees is False else "doubt"

    @property
    def verdict(self) -> str:
        counted = [run for run in self.runs if run.agrees is not None]
        disturbed = len(self.runs) - len(counted)
        if not counted:
            most = format_percent(100 * max(run.others_share for run in self.runs))
            return f"Cannot tell: others used up to {most} of the cores. Repeat it while they rest."
        more = f" {disturbed} more were disturbed by others." if disturbed else ""
        return f"{sum(run.agrees is True for run in counted)} of {len(counted)} runs went as predicted.{more}"

    @property
    def frame(self) -> "DataFrame":
        """A DataFrame, one row a run, with the keys of `to_json` as columns: times in ms, shares from 0 to 1."""
        import pandas as pd

        return pd.json_normalize([run.to_json() for run in self.runs], sep="_")

    @property
    def lines(self) -> list[str]:
        return [note for run in self.runs for note in run.notes]

    def tables(self, *, brief: bool = False) -> "list[reporting.Table]":
        return [reporting.replay_table(self.runs, brief=brief)]

    def to_json(self) -> dict[str, Any]:
        return {"agrees": self.agrees, "verdict": self.verdict, "runs": [run.to_json() for run in self.runs]}


@verb(ReplayRequest)
def replay(request: ReplayRequest) -> Replay:
    """Send Poisson arrivals to executors on this machine under each policy, and compare with the simulation of them.

    executors: such as a ThreadExecutor over your own engine. Without them decode steps of `model` run in two
    processes, a core each: a stand-in for a GPU, which every batch reaches after `launch`, and a CPU path. Raises
    WrongUsage, BadInput; HardwareMissing where there are no two cores.
    """
    names = _parts(request.policy)
    for name in names:
        if name not in POLICIES:
            raise WrongUsage(f"policy {name!r} is not known", where="--policy", remedy=f"One of {', '.join(POLICIES)}.")
    per_ms = rates(_parts(request.rate) or None)
    loads = LOADS if request.load is None else _parts(request.load)
    shares = [] if per_ms else [percent(each, "--load") / 100 for each in loads]
    if any(not 0 < share < 1 for share in shares):
        raise WrongUsage("a load must be above 0 % and below 100 %", where="--load", remedy="Give such as 70%.")
    launch_ms = duration(request.launch, "--launch", zero=True)
    lasts_s = duration(request.duration_each, "--duration") / 1000
    if not names or not (per_ms or shares):
        raise WrongUsage("no policy or no load", where="--policy, --load", remedy="Give one of each at least.")
    executors = request.executors
    executors = stand_ins(request.model, launch_ms, request.max_batch) if executors is None else list(executors)
    if len(executors) < 1 + any(POLICIES[name].needs_side for name in names):
        remedy = "Give the main path, and the side path for a policy that needs one."
        raise WrongUsage(f"{len(executors)} executors for {', '.join(names)}", where="executors", remedy=remedy)

    async def run() -> Replay:
        try:
            await asyncio.gather(*(each.start() for each in executors))
            fits = await live.measure_executors(executors, max(lasts_s / 2, MIN_PROBE_S), request.seed)
            paths = [ExecutionPath(each.name, fit) for each, fit in zip(executors, fits, strict=True)]
            bench = _Bench(executors, paths[0], System(*(measured_path(path, Serving()) for path in paths)), lasts_s)
            offered = [(share * bench.capacity, k) for k, share in enumerate(shares)]
            offered += [(rate, k) for k, rate in enumerate(per_ms)]
            runs: list[live.Compared] = []
            for rate, k in offered:
                for name in names:
                    runs.append(await bench.run(name, rate, request.seed + k))  # policies share their arrivals
                    if request.progress:
                        request.progress(len(runs), len(names) * len(offered))
            return Replay(runs, bench.system)
        finally:
            await asyncio.gather(*(each.close() for each in executors))

    return live.precisely(run())


def _parts(given: Any) -> list[Any]:
    """Return the values of a sequence, or of a text with commas between them."""
    return [part for each in several(given) for part in (each.split(",") if isinstance(each, str) else [each])]


def stand_ins(model: str, launch_ms: float, max_batch: int) -> list[live.Executor]:
    """Return executors of decode steps in two processes, a core each: `gpu`, launched late, and `cpu`."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if len(cores) < 2:
        raise HardwareMissing("two paths need a core each, and there is one", remedy="Use a machine with two cores.")
    if not 1 <= max_batch <= 1024:
        raise WrongUsage(f"batches of up to {max_batch}", where="--set max_batch", remedy="Give 1 to 1024.")
    model_shape(model)  # refused here rather than in a process
    main = live.DecodeSteps(model, largest=max_batch, launch_ms=launch_ms)
    side = live.DecodeSteps(model, largest=SIDE_LARGEST)
    return [
        live.ProcessExecutor("gpu", main, max_batch, cores=[cores[-1:]]),
        live.ProcessExecutor("cpu", side, SIDE_LARGEST, cores=[cores[:1]]),
    ]


@dataclass(frozen=True, eq=False)
class _Bench:
    """Executors, their fitted paths, and the length of a run."""

    executors: Sequence[live.Executor]
    main: ExecutionPath
    system: System
    lasts_s: float

    @property
    def capacity(self) -> float:
        """Highest rate of the main path, per ms."""
        return self.system.main.rate_limit(self.system.main.largest)

    async def run(self, name: str, rate: float, seed: int) -> live.Compared:
        """Run a policy at a rate per ms, predict it, and compare."""
        system = self.system if POLICIES[name].needs_side else System(self.system.main)
        policy = named_policy(name, rate, path_times(system), solve=solve_optimal)
        count = max(round(rate * self.lasts_s * 1000), MIN_REQUESTS)
        arrive = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))
        load = RecordedLoad(make_requests(arrive))

        def predict(speed: FloatArray, replications: int, seed: int = seed) -> SimResult:
            options = Options(replications=replications, warmup=WARM, seed=seed)
            return simulate(policy, live.at_speed(system, speed), load, options)

        executors = self.executors[: len(system.paths)]
        typical = [path.typical_ms[1:] for path in system.paths]
        expected = predict(np.ones(len(typical)), 1)
        use = np.array([expected.utilisation[path.name] for path in system.paths])
        probe_s, rng = max(self.lasts_s / 8, MIN_PROBE_S), np.random.default_rng([seed, 1])

        tries: list[tuple[live.Driven, FloatArray]] = []
        while not tries or (tries[-1][0].others > live.MAX_OTHERS and len(tries) < TRIES):
            before, others_before = await live.probe(executors, typical, probe_s, rng, use)
            driven = await live.drive(executors, system, policy, arrive, int(WARM * count))
            after, others_after = await live.probe(executors, typical, probe_s, rng, use)
            levels = np.concatenate([live.speed_levels(batches, system) for batches in (before, after)])
            tries.append((replace(driven, others=max(driven.others, others_before, others_after)), levels))
        driven, levels = min(tries, key=lambda each: each[0].others)
        speed = levels.mean(axis=0)
        predicted = await asyncio.to_thread(predict, speed, REPLICATIONS)
        speeds = live.draw_speeds(levels, SPEEDS, np.random.default_rng([seed, 3]))
        drawn = [await asyncio.to_thread(predict, each, RUNS_PER_SPEED, seed + k) for k, each in enumerate(speeds)]
        run = live.compare_run(driven, levels, predicted, rate / self.capacity, system, drawn)
        slower = np.array([run.slower.get(path.name, 1.0) for path in system.paths])
        at_own = await asyncio.to_thread(predict, speed * slower, REPLICATIONS // 2)
        run = replace(run, at_own_speed_ms={name: float(at_own.latency[name].value) for name in live.STATISTICS})
        if name != "gpu-only":
            return run
        profile = HardwareProfile({self.main.name: self.main})
        slowest = float(np.max(levels))
        promise = await asyncio.to_thread(promised_by_batches, profile, rate, 0.99, slowest)
        if promise is None or promise.interval is None or promise.doubts:
            return run
        return replace(run, promised_p99_ms=promise.interval[1])
