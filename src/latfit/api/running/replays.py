"""`replay`: a policy driven live on this machine, and its prediction beside it."""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from latfit.api.answer import Answer, State
from latfit.api.quantities import duration, percent, rates, several
from latfit.api.request import verb
from latfit.api.requests import ReplayRequest
from latfit.api.simulations import solve_optimal
from latfit.errors import HardwareMissing, WrongUsage
from latfit.hardware import ExecutionPath, HardwareProfile
from latfit.live import (
    STATISTICS,
    Compared,
    DecodeSteps,
    Driven,
    Executor,
    ProcessExecutor,
    at_speed,
    compared,
    drawn_speeds,
    drift,
    drive,
    levels,
    measure_executors,
    precisely,
    probe,
    speeds,
    undisturbed,
)
from latfit.planning import promised_by_batches
from latfit.policies import POLICIES, PathTimes, Policy, named_policy
from latfit.profiling import model_shape
from latfit.simulation import (
    Options,
    Serving,
    SimResult,
    System,
    measured_path,
    path_times,
    simulate as simulate_policy,
)
from latfit.stats import FloatArray
from latfit.units import format_percent
from latfit.workload import RecordedLoad, make_requests

if TYPE_CHECKING:
    from pandas import DataFrame

    from latfit.reporting import Table

REPLICATIONS = 40
"""Simulated runs of the same arrivals at the speeds of the probes."""

SPEEDS, AT_EACH = 40, 2
"""Speeds that a run may have, and simulated runs at each: their statistics give the range in which it may lie."""

LEAST_PROBE_S = 2.0
GREEDY = "gpu-only"
WARM = 0.1
"""Share of a run's requests that is left out while it fills up."""

FEWEST = 200
LOADS = ("50%", "70%")
SIDE_LARGEST = 4


@dataclass(frozen=True, repr=False, eq=False)
class Replay(Answer):
    """Policies as they ran, beside their predictions. system: the paths with the fits that predicted."""

    runs: Sequence[Compared]
    system: System

    @property
    def agrees(self) -> bool | None:
        """Whether every run is as predicted; None where none contradicts but a run was disturbed."""
        found = [run.agrees for run in self.runs]
        return False if False in found else None if None in found else True

    @property
    def state(self) -> State:
        return "good" if self.agrees else "bad" if self.agrees is False else "doubt"

    @property
    def verdict(self) -> str:
        told = [run for run in self.runs if run.agrees is not None]
        right = sum(run.agrees is True for run in told)
        disturbed = len(self.runs) - len(told)
        if not told:
            most = format_percent(100 * max(run.others for run in self.runs))
            return f"Cannot tell: others used up to {most} of the cores. Repeat it while they rest."
        more = f" {disturbed} more were disturbed by others." if disturbed else ""
        return f"{right} of {len(told)} runs went as predicted.{more}"

    @property
    def frame(self) -> "DataFrame":
        """A DataFrame, one row a run: times in ms, shares from 0 to 1."""
        import pandas as pd

        rows = []
        for run in self.runs:
            row: dict[str, Any] = {"policy": run.policy, "load": run.load, "rate_per_s": run.rate_per_s}
            for name, (low, high) in run.range_ms.items():
                row |= {
                    f"measured_{name}_ms": run.measured["latency_ms"][name],
                    f"predicted_{name}_ms": run.predicted["latency_ms"][name],
                    f"low_{name}_ms": low,
                    f"high_{name}_ms": high,
                }
            row |= {f"share_{path}": share for path, share in run.measured["share"].items()}
            rows.append({**row, "others_share": run.others, "agrees": run.agrees})
        return pd.DataFrame(rows)

    @property
    def lines(self) -> list[str]:
        return self.notes

    @property
    def notes(self) -> list[str]:
        """Promises of the plan, and why runs differ."""
        return [note for run in self.runs for note in run.notes]

    def tables(self, *, brief: bool = False) -> "list[Table]":
        """The runs as tables of text; brief: means and p99 alone."""
        from latfit.reporting import replay_details, replay_table

        return [replay_table(self.runs)] if brief else [replay_table(self.runs), replay_details(self.runs)]

    def to_json(self) -> dict[str, Any]:
        """The document of `latfit replay --json`."""
        return {"agrees": self.agrees, "verdict": self.verdict, "runs": [run.to_json() for run in self.runs]}


@verb(ReplayRequest)
def replay(request: ReplayRequest) -> Replay:
    """Send Poisson arrivals to executors on this machine under each policy, and compare with the simulation of them.

    executors: such as a ThreadExecutor over your own engine. Without them decode steps of `model` run in two
    processes, a core each: a stand-in for a GPU, to which every batch of up to `max_batch` takes `launch` to get, and
    a CPU path for batches of up to 4. Raises WrongUsage, BadInput; HardwareMissing where there are no two cores.
    """
    names, load, progress = _parts(request.policy), request.load, request.progress
    for name in names:
        if name not in POLICIES:
            raise WrongUsage(f"policy {name!r} is not known", where="--policy", remedy=f"One of {', '.join(POLICIES)}.")
    lasts_s = duration(request.duration_each, "--duration") / 1000
    per_ms = rates(_parts(request.rate) or None)
    shares = [percent(each, "--load") / 100 for each in (LOADS if load is None else _parts(load))]
    if any(not 0 < share < 1 for share in shares):
        raise WrongUsage("a load must be above 0 % and below 100 %", where="--load", remedy="Give such as 70%.")
    late_ms = duration(request.launch, "--launch", zero=True)
    if not names or not (per_ms or shares):
        raise WrongUsage("no policy or no load", where="--policy, --load", remedy="Give one of each at least.")
    executors = request.executors
    paths = stand_ins(request.model, late_ms, request.max_batch) if executors is None else list(executors)
    if len(paths) < 1 + any(POLICIES[name].needs_side for name in names):
        raise WrongUsage(
            f"{len(paths)} executors for {', '.join(names)}",
            where="executors",
            remedy="Give the main path, and the side path for a policy that needs one.",
        )

    async def run() -> Replay:
        try:
            return await _replayed(paths, names, per_ms or shares, (bool(per_ms), lasts_s, request.seed), progress)
        finally:
            await asyncio.gather(*(each.close() for each in paths))

    return precisely(run())


def _parts(given: Any) -> list[Any]:
    """Values of a sequence, or of a text with commas between them."""
    return [part for each in several(given) for part in (each.split(",") if isinstance(each, str) else [each])]


def stand_ins(model: str, launch_ms: float, max_batch: int) -> list[Executor]:
    """Decode steps in two processes, a core each: `gpu`, where every batch is launched late, and `cpu`."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if len(cores) < 2:
        raise HardwareMissing(
            "two paths need a core each, and there is one", remedy="Run it on a machine with two cores or more."
        )
    if not 1 <= max_batch <= 1024:
        raise WrongUsage(f"batches of up to {max_batch}", where="--set max_batch", remedy="Give 1 to 1024.")
    model_shape(model)  # refused here rather than in a process
    main = DecodeSteps(model, largest=max_batch, launch_ms=launch_ms)
    side = DecodeSteps(model, largest=SIDE_LARGEST)
    return [
        ProcessExecutor("gpu", main, max_batch, cores=[cores[-1:]]),
        ProcessExecutor("cpu", side, SIDE_LARGEST, cores=[cores[:1]]),
    ]


async def _replayed(
    executors: Sequence[Executor],
    names: Sequence[str],
    offered: Sequence[float],
    how: tuple[bool, float, int],
    progress: Callable[[float, int], None] | None,
) -> Replay:
    """offered: rates per ms, or shares of what the main path carries; how: (which of them, seconds of a run, seed)."""
    as_rates, lasts_s, seed = how
    await asyncio.gather(*(each.start() for each in executors))
    fits = await measure_executors(executors, max(lasts_s / 2, LEAST_PROBE_S), seed)
    found = [ExecutionPath(each.name, fit) for each, fit in zip(executors, fits, strict=True)]
    system = System(*(measured_path(path, Serving()) for path in found))
    carried = system.main.rate_limit(system.main.largest)
    paths = _Paths(found[0], system)
    ran: list[_Run] = []
    for number, (name, each) in enumerate((name, each) for each in offered for name in names):
        rate = each if as_rates else each * carried
        ran.append(await _driven(executors, paths, name, rate, (lasts_s, seed + number // len(names))))
        if progress:
            progress(number + 1, len(names) * len(offered))
    apart = drift([run.driven.levels for run in ran if run.driven.levels is not None])
    return Replay([await _predicted(paths, run, apart, run.rate / carried) for run in ran], system)


@dataclass(frozen=True, eq=False)
class _Paths:
    """The main path as it was fitted, and all of them."""

    main: ExecutionPath
    system: System


@dataclass(frozen=True, eq=False)
class _Run:
    """A policy as it ran: the paths that it had, at a rate per ms, with arrivals (n,) ms of a seed."""

    policy: Policy
    system: System
    rate: float
    arrive: FloatArray
    seed: int
    driven: Driven


async def _driven(executors: Sequence[Executor], paths: _Paths, name: str, rate: float, how: tuple[float, int]) -> _Run:
    """how: (seconds, seed): policies at one load share their arrivals."""
    system = paths.system
    lasts_s, seed = how
    own = system if POLICIES[name].needs_side else System(system.main)
    times: PathTimes = path_times(own)
    policy = named_policy(name, rate, times, solve=solve_optimal)
    count = max(round(rate * lasts_s * 1000), FEWEST)
    arrive = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))
    driven_on = executors[: len(own.paths)]
    rough = [path.typical_ms[1:] for path in own.paths]
    expected = simulate_policy(policy, own, RecordedLoad(make_requests(arrive)), Options(replications=1, warmup=WARM))
    use = np.array([expected.utilisation[path.name] for path in own.paths])
    probing_s, rng = max(lasts_s / 8, LEAST_PROBE_S), np.random.default_rng([seed, 1])

    async def between_probes() -> Driven:
        before = await probe(driven_on, rough, probing_s, rng, use)
        driven = await drive(driven_on, own, policy, arrive, int(WARM * count))
        after = await probe(driven_on, rough, probing_s, rng, use)
        found = [speeds(each.batches, own) for each in (before, after)]
        halves = np.concatenate([levels(each.batches, own) for each in (before, after)])
        others = max(driven.others, before.others, after.others)
        return replace(driven, speeds=found, levels=halves, others=others)

    return _Run(policy, own, rate, arrive, seed, await undisturbed(between_probes))


async def _predicted(paths: _Paths, run: _Run, apart: tuple[FloatArray, int], share: float) -> Compared:
    """apart: how far speeds of probes lie apart, and how well that is known.  share: of what the main path carries."""
    driven, own = run.driven, run.system
    load = RecordedLoad(make_requests(run.arrive))
    usual = Options(replications=REPLICATIONS // 2, warmup=WARM, seed=run.seed)

    def simulated(system: System, options: Options = usual) -> SimResult:
        return simulate_policy(run.policy, system, load, options)

    predicted = [await asyncio.to_thread(simulated, at_speed(own, each)) for each in driven.speeds]
    assert driven.levels is not None
    drawn = drawn_speeds(driven.levels, *apart, SPEEDS, np.random.default_rng([run.seed, 3]))
    may_be = [
        await asyncio.to_thread(simulated, at_speed(own, speed), replace(usual, replications=AT_EACH, seed=k))
        for k, speed in enumerate(drawn, start=run.seed)
    ]
    found = compared(driven, predicted, share, own, may_be)
    took = [found.slower.get(path.name, 1.0) for path in own.paths]
    at_own = await asyncio.to_thread(simulated, at_speed(own, np.mean(driven.speeds, axis=0) * took))
    found = replace(found, at_own_speed_ms={name: float(at_own.latency[name].value) for name in STATISTICS})
    if run.policy.name != GREEDY:
        return found
    slowest = float(np.max(driven.speeds))
    profile = HardwareProfile({paths.main.name: paths.main})
    promise = await asyncio.to_thread(promised_by_batches, profile, run.rate, 0.99, slowest)
    if promise is None or promise.interval is None or promise.doubts:
        return found
    return replace(found, bound_ms=promise.interval[1])
