"""Arrivals driven against executors on this machine, and what came of them beside what was predicted.

Open loop: requests are sent at moments that are fixed beforehand, and a response counts from that moment, whether the
sender was late or not; so a stall delays everybody behind it, as it does in production (no coordinated omission).

The executors are measured first, by batches of all sizes in random order on both paths at once, through the same calls
as under load; a model is fitted to each, and the simulator runs the fits on the very arrivals that are sent. What is
left to differ is what the prediction claims: service times and their scatter, the policy, and the router's own cost.

A neighbour who takes the processor makes a run worthless. What others used of the cores, stolen time included, is read
from the system's counters over the run, less what this process and its executors used.
"""

import asyncio
import os
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from latfit.fitting import FitOptions, fit_trace
from latfit.live.executor import Executor, ExecutorFailed
from latfit.live.router import Router, RouterOptions
from latfit.live.waiting import Request
from latfit.model import FitResult
from latfit.policies import Policy
from latfit.simulation import SimResult, System, measured_result, measured_run
from latfit.stats import FloatArray
from latfit.trace import Trace

Result = TypeVar("Result")
ROUNDS = 5
"""Of all sizes, at the least."""

DISTURBED = 0.05
"""Share of the cores that others may use in a run that counts."""


def precisely(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run it on an event loop whose timers are true to some 0.1 ms; epoll, the usual one, rounds up to whole ms."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        return runner.run(coroutine)


def sizes_of(largest: int) -> list[int]:
    """Batches that are measured: the small ones all, larger ones by steps of about a quarter."""
    found = {1, largest}
    size = 1.0
    while size < largest:
        size = max(size + 1, size * 1.25)
        found.add(min(round(size), largest))
    return sorted(found)


async def measure_executors(executors: Sequence[Executor], duration_s: float, seed: int = 0) -> list[FitResult]:
    """A fit of each executor, from batches of every size in random order, on all executors at the same time. The first
    round only warms them up."""
    ends = time.monotonic() + duration_s

    async def one(executor: Executor, rng: np.random.Generator) -> Trace:
        rows: list[tuple[int, float]] = []
        sizes = sizes_of(executor.largest)
        while time.monotonic() < ends or len(rows) < ROUNDS * len(sizes):
            for size in rng.permutation(sizes):
                began = time.perf_counter()
                await executor.execute([None] * int(size))
                rows.append((int(size), (time.perf_counter() - began) * 1000))
        B, T = (np.array(column, dtype=np.float64) for column in zip(*rows[len(sizes) :], strict=True))
        return Trace({"B": B, "S": B, "T_ms": T}, {"device": executor.name})

    streams = np.random.default_rng(seed).spawn(len(executors))
    steps = await asyncio.gather(*(one(each, rng) for each, rng in zip(executors, streams, strict=True)))
    return [await asyncio.to_thread(fit_trace, each, FitOptions("auto")) for each in steps]


@dataclass(frozen=True, eq=False)
class Driven:
    """What a run measured. others: share of the cores that others used.  late_ms: how late requests were sent, 99 of
    100 by no more.  failed: requests that ended with an error."""

    result: SimResult
    others: float
    late_ms: float
    failed: int

    @property
    def disturbed(self) -> bool:
        return self.others > DISTURBED


NEAR = 0.1
"""Share of what was measured by which a prediction may be off and still be right."""

RANGE = (0.025, 0.975)
STATISTICS = ("mean", "p50", "p99")


@dataclass(frozen=True, eq=False)
class Compared:
    """A policy at a load: what was measured beside what was predicted. load: share of what the main path carries.
    measured, predicted: the same numbers of both, ms by statistic under `latency_ms`, shares by path.  range_ms: by
    statistic, where 95 of 100 runs of these very arrivals are predicted to lie."""

    policy: str
    load: float
    rate_per_s: float
    requests: int
    measured: Mapping[str, Any]
    predicted: Mapping[str, Any]
    range_ms: Mapping[str, tuple[float, float]]
    others: float
    late_ms: float
    failed: int

    @property
    def agrees(self) -> bool | None:
        """Whether each statistic is within NEAR of the prediction or inside its range; None where others took so much
        of the processor that the run says nothing."""
        if self.others > DISTURBED:
            return None
        return not self.failed and all(self.holds(name) for name in STATISTICS)

    def holds(self, name: str) -> bool:
        found, said = self.measured["latency_ms"][name], self.predicted["latency_ms"][name]
        low, high = self.range_ms[name]
        return bool(abs(said - found) <= NEAR * found or low <= found <= high)

    def to_json(self) -> dict[str, Any]:
        keys = ("policy", "load", "rate_per_s", "requests", "measured", "predicted")
        told = {key: getattr(self, key) for key in keys}
        told["predicted"] = {
            **told["predicted"],
            "range_ms": {name: list(each) for name, each in self.range_ms.items()},
        }
        more = {"others_share": self.others, "late_p99_ms": self.late_ms, "failed": self.failed}
        return {**told, **more, "agrees": self.agrees}


def compared(driven: Driven, predicted: SimResult, load: float) -> Compared:
    """predicted: of replications of the same arrivals."""
    (run,) = driven.result.summaries
    names = list(run.names)
    drawn = np.stack([each.whole for each in predicted.summaries])
    ends = np.quantile(drawn, RANGE, axis=0)
    whole = {name: float(predicted.latency[name].value) for name in names}
    return Compared(
        driven.result.policy,
        load,
        driven.result.rate_per_s,
        driven.result.requests,
        _numbers(driven.result, dict(zip(names, run.whole.tolist(), strict=True))),
        _numbers(predicted, whole),
        {name: (float(ends[0, k]), float(ends[1, k])) for k, name in enumerate(names) if name in STATISTICS},
        driven.others,
        driven.late_ms,
        driven.failed,
    )


def _numbers(result: SimResult, latency: Mapping[str, float]) -> dict[str, Any]:
    return {
        "latency_ms": {name: latency[name] for name in STATISTICS},
        "throughput_per_s": result.throughput_per_s,
        "share": dict(result.share),
        "utilisation": dict(result.utilisation),
        "batch_size": dict(result.batch_size),
    }


async def drive(
    executors: Sequence[Executor], system: System, policy: Policy, arrive_ms: FloatArray, warm: int = 0
) -> Driven:
    """Send requests at the given moments (n,) ms from now, and wait until all have ended. warm: the first that
    counts."""
    ended: list[Request] = []
    times = [path.typical_ms[1:] for path in system.paths]
    router = Router(executors, times, policy, RouterOptions(most_waiting=len(arrive_ms) + 1))
    router.listeners.append(ended.append)
    await router.start()
    busy, began = _busy_of_others(executors), time.monotonic()
    start_ms = time.monotonic() * 1000 + 50.0
    late = await _send(router, start_ms + arrive_ms)
    await router.drain()
    others = (_busy_of_others(executors) - busy) / ((time.monotonic() - began) * (os.cpu_count() or 1))
    served = sorted((each for each in ended if each.path), key=lambda each: each.arrived_ms)
    if len(served) <= warm + 1:
        raise ExecutorFailed(
            f"{len(served)} of {len(arrive_ms):,} requests came to an executor",
            where=", ".join(each.name for each in executors),
            remedy="See why they fail: await executor.execute([None]).",
        )
    names = [path.name for path in system.paths]
    columns = {
        "arrive_ms": np.array([each.arrived_ms for each in served]) - start_ms,
        "response_ms": np.array([each.ended_ms - each.arrived_ms for each in served]),
        "path": np.array([names.index(each.path) for each in served]),
        "batch": np.array([each.batch for each in served]),
        "started_ms": np.array([each.started_ms for each in served]) - start_ms,
    }
    result = measured_result(policy, system, measured_run(columns, system, warm))
    return Driven(result, max(others, 0.0), float(np.quantile(late, 0.99)), router.failed)


async def _send(router: Router, moments_ms: FloatArray) -> FloatArray:
    """Submit at each moment of the router's clock, from a thread that does nothing else; how late each was, ms."""
    loop, sent = asyncio.get_running_loop(), asyncio.Event()
    tasks: list[asyncio.Task[Any]] = []
    late: list[float] = []

    def submit(moment_s: float) -> None:
        late.append(time.monotonic() - moment_s)
        tasks.append(loop.create_task(router.submit(None, arrived_s=moment_s)))

    def keep_time() -> None:
        for moment in moments_ms / 1000:
            ahead = moment - time.monotonic()
            if ahead > 0:
                time.sleep(ahead)
            loop.call_soon_threadsafe(submit, float(moment))
        loop.call_soon_threadsafe(sent.set)

    threading.Thread(target=keep_time, name="latfit-arrivals", daemon=True).start()
    await sent.wait()
    await asyncio.gather(*tasks, return_exceptions=True)
    return np.array(late) * 1000


def _busy_of_others(executors: Sequence[Executor]) -> float:
    """Seconds that the cores were busy so far, or stolen, for others than this process and its executors'; 0 where the
    system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        counters = [float(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        user, nice, system, _, _, irq, softirq, stolen = counters
        pids = [os.getpid(), *(pid for each in executors for pid in getattr(each, "pids", ()))]
        own = sum(_used_by(pid) for pid in pids)
        return (user + nice + system + irq + softirq + stolen - own) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _used_by(pid: int) -> float:
    """Clock ticks of a process, in user mode and in the system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return float(fields[11]) + float(fields[12])


Repeat = Callable[[], Coroutine[Any, Any, Driven]]


async def undisturbed(run: Repeat, tries: int = 3) -> Driven:
    """The first of a few runs that no neighbour disturbed, or the least disturbed."""
    runs: list[Driven] = []
    for _ in range(tries):
        runs.append(await run())
        if not runs[-1].disturbed:
            break
    return min(runs, key=lambda each: each.others)
