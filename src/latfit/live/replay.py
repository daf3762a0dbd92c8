"""Arrivals driven against executors on this machine, and what came of them beside what was predicted.

Open loop: requests are sent at moments that are fixed beforehand, and a response counts from that moment, whether the
sender was late or not; so a stall delays everybody behind it, as it does in production (no coordinated omission).

The executors are measured first, by a router under such arrivals that serves batches of sizes drawn at random on
whichever path is idle: what it costs to receive, route and answer requests on the same cores is then in the times. A
model is fitted to each path, and the simulator runs the fits on the very arrivals that are sent. Machines change their
speed within minutes by more than a run is uncertain, so the paths are probed again just before and just after each run;
what is expected of a run goes by the mean of both. A probe keeps each path as busy as the simulated run does: paths
that share a core or a memory slow each other, and a processor that rested begins slowly. A run may have a speed that
neither probe had: how far speeds lie apart is told by the halves of all probes of a replay, and the range in which a
run may lie holds that of a further speed beside those (Student's predictive distribution), as well as the scatter of
batches. What is left to differ is what the prediction claims: how the times depend on the batch, their scatter, and the
policy.

A neighbour who takes the processor makes a run worthless. What others used of the cores, stolen time included, is read
from the system's counters over the run, less what this process and its executors used.
"""

import asyncio
import math
import os
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from latfit.fitting import FitOptions, fit_trace
from latfit.live.executor import Executor, ExecutorFailed
from latfit.live.pauses import short_pauses
from latfit.live.router import Router, RouterOptions
from latfit.live.waiting import Request
from latfit.model import FitResult
from latfit.policies import SERVE_MAIN, SERVE_SIDE, WAIT, Limits, Policy, policy as policies
from latfit.simulation import SimResult, System, measured_result, measured_run
from latfit.stats import FloatArray
from latfit.trace import Trace
from latfit.units import format_ms, format_percent

Result = TypeVar("Result")
ROUNDS = 5
"""Of all sizes, at the least."""

LEAST_USE = 0.2
"""Share of the time that a probe keeps a path busy at the least: it needs batches to go by."""

DISTURBED = 0.05
"""Share of the cores that others may use in a run that counts."""


def precisely(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run it on an event loop whose timers are true to some 0.1 ms; epoll, the usual one, rounds up to whole ms."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        return runner.run(coroutine)


def by_quarters(largest: int) -> list[int]:
    """Sizes of batches: the small ones all, larger ones by steps of about a quarter."""
    found = {1, largest}
    size = 1.0
    while size < largest:
        size = max(size + 1, size * 1.25)
        found.add(min(round(size), largest))
    return sorted(found)


def sizes_within(T_ms: FloatArray, within_ms: float) -> list[int]:
    """Batches that are measured of a path that takes about T(1), T(2), ... ms: every size where ROUNDS of all take no
    longer than `within_ms`, as kernels like some sizes better than their neighbours; else by quarters."""
    every = list(range(1, len(T_ms) + 1))
    return every if ROUNDS * float(T_ms.sum()) <= within_ms else by_quarters(len(T_ms))


class _Prober(Router):
    """Serves batches of sizes drawn at random, every size as often, on whichever path is idle and has rested long
    enough to be busy for its share of the time."""

    def __init__(
        self,
        executors: Sequence[Executor],
        times: Sequence[FloatArray],
        sizes: Sequence[Sequence[int]],
        use: FloatArray,
        rng: np.random.Generator,
    ) -> None:
        greedy = policies.gpu_only(Limits(executors[0].largest))
        super().__init__(executors, times, greedy, RouterOptions(most_waiting=1 << 60))
        self._rng = rng
        self._took, self._sizes, self._share = times, sizes, use
        self._next: list[list[int]] = [[] for _ in executors]
        self._rested_ms = [-math.inf for _ in executors]

    def _ask_policy(self, now: float) -> tuple[int, int, float, int]:
        moments = [math.inf]
        for i, action in enumerate((SERVE_MAIN, SERVE_SIDE)[: len(self.paths)]):
            path, left = self.paths[i], self._next[i]
            if not (path.up(now) and path.idle):
                continue
            if self._rested_ms[i] > now:
                moments.append(self._rested_ms[i])
                continue
            if not left:
                left.extend(self._rng.permutation(self._sizes[i]).tolist())
            if self.waiting >= left[-1]:
                size = left.pop()
                took = float(self._took[i][size - 1])
                self._rested_ms[i] = now + took + self._rng.exponential(took * (1 / self._share[i] - 1))
                return action, size, 0.0, 0
        return WAIT, 0, min(moments), self.waiting + 1


@dataclass(frozen=True, eq=False)
class Probed:
    """B and T_ms (n,) of the batches that each executor ran while it was probed. others: share of the cores that
    others used."""

    batches: Sequence[tuple[FloatArray, FloatArray]]
    others: float


async def probe(
    executors: Sequence[Executor],
    times: Sequence[FloatArray],
    duration_s: float,
    rng: np.random.Generator,
    use: FloatArray | None = None,
) -> Probed:
    """Batches of many sizes, under as many requests as they take. times: T(1), T(2), ... ms of each executor, about.
    use: share of the time (executors,) that each is busy, LEAST_USE at the least; all of it unless given."""
    use = np.clip(np.ones(len(executors)) if use is None else use, LEAST_USE, 1.0)
    sizes = [sizes_within(T, 1000 * duration_s * u) for T, u in zip(times, use, strict=True)]
    round_ms = np.array([T[np.array(each) - 1].sum() for each, T in zip(sizes, times, strict=True)])
    carried = float(np.sum([sum(each) for each in sizes] * use / round_ms))
    count = math.ceil(carried * max(duration_s * 1000, ROUNDS * round_ms.max()))
    arrive = np.cumsum(rng.exponential(1 / carried, count))
    ran = await _ran(_Prober(executors, times, sizes, use, rng), arrive, ends_early=True)
    drawn = [each for each in ran.ended if each.started_ms <= ran.start_ms + arrive[-1]]  # not those of the end
    found = []
    for each in executors:
        B, T = _batches(drawn, each.name)
        if len(B) < 2:
            raise ExecutorFailed(
                f"{len(B)} of its batches came back",
                where=each.name,
                remedy="See why they fail: await executor.execute([None]).",
            )
        found.append((B, T))
    return Probed(found, ran.others)


async def measure_executors(executors: Sequence[Executor], duration_s: float, seed: int = 0) -> list[FitResult]:
    """A fit of each executor. Two rounds of all sizes, the first of which warms up, tell how many requests to send."""

    async def rough(executor: Executor) -> FloatArray:
        sizes = by_quarters(executor.largest)
        for _ in range(2):
            took: list[float] = []
            for size in sizes:
                began = time.perf_counter()
                await executor.execute([None] * size)
                took.append((time.perf_counter() - began) * 1000)
        return np.interp(np.arange(1, executor.largest + 1), sizes, took)

    times = await asyncio.gather(*map(rough, executors))
    found = await probe(executors, times, duration_s, np.random.default_rng(seed))
    traces = [
        Trace({"B": B, "S": B, "T_ms": T}, {"device": each.name})
        for each, (B, T) in zip(executors, found.batches, strict=True)
    ]
    return [await asyncio.to_thread(fit_trace, each, FitOptions("auto")) for each in traces]


@dataclass(frozen=True, eq=False)
class Driven:
    """What a run measured. others: share of the cores that others used.  late_ms: how late requests were sent, 99 of
    100 by no more.  failed: requests that ended with an error.  batches: B and T_ms (n,) of each
    path.  speeds: (paths,) by probe, before and after, times over those of the fit.  levels: (4, paths) the same by
    halves of the probes."""

    result: SimResult
    others: float
    late_ms: float
    failed: int
    batches: Sequence[tuple[FloatArray, FloatArray]]
    speeds: Sequence[FloatArray] = ()
    levels: FloatArray | None = None

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
    statistic, where 95 of 100 runs of these very arrivals are predicted to lie.  speed: by path, times that it was
    predicted with over those of the fit, by a probe just before the run and by one just after it.  slower: by
    path, mean time of the run's batches over the predicted one of such batches.
    at_own_speed_ms: by statistic, what is predicted at the speed that the run's own batches had.
    lowest_p99_ms: the lower end of what was measured.  bound_ms: the p99 that a plan promises to keep at the slower of
    both speeds, None where it promises none."""

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
    speed: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    slower: Mapping[str, float] = field(default_factory=dict)
    at_own_speed_ms: Mapping[str, float] = field(default_factory=dict)
    lowest_p99_ms: float = -math.inf
    bound_ms: float | None = None

    @property
    def agrees(self) -> bool | None:
        """Whether each statistic is within NEAR of the prediction or inside its range; None where others took so much
        of the processor that the run says nothing."""
        if self.others > DISTURBED:
            return None
        return not self.failed and self.kept is not False and all(self.holds(name) for name in STATISTICS)

    @property
    def kept(self) -> bool | None:
        """Whether the plan's promise was: what was measured may be within it. None where there is no promise."""
        return None if self.bound_ms is None else not self.lowest_p99_ms > self.bound_ms

    def holds(self, name: str) -> bool:
        found, said = self.measured["latency_ms"][name], self.predicted["latency_ms"][name]
        low, high = self.range_ms[name]
        return bool(abs(said - found) <= NEAR * found or low <= found <= high)

    @property
    def notes(self) -> list[str]:
        """The plan's promise beside it; where a run is not as predicted, what its batches took."""
        where, found = f"{self.policy} at {format_percent(100 * self.load)}", []
        if self.bound_ms is not None:
            p99 = format_ms(self.measured["latency_ms"]["p99"])
            kept = "kept" if self.kept else "broken"
            found.append(f"{where}: a plan promises a p99 of {format_ms(self.bound_ms)} at most; {kept} ({p99}).")
        if self.failed:
            found.append(f"{where}: {self.failed:,} requests failed.")
        if self.agrees is False and self.slower:
            took = [f"{ratio:.2f} times as long on {path}" for path, ratio in self.slower.items()]
            found.append(f"{where}: its batches took {' and '.join(took)} as predicted.{self._by_own_speed}")
        return found

    @property
    def _by_own_speed(self) -> str:
        if not self.at_own_speed_ms:
            return ""
        told = [f"{name} {format_ms(self.at_own_speed_ms[name])}" for name in ("mean", "p99")]
        return f" At that speed the prediction is {' and '.join(told)}."

    def to_json(self) -> dict[str, Any]:
        keys = ("policy", "load", "rate_per_s", "requests", "measured", "predicted")
        told = {key: getattr(self, key) for key in keys}
        told["predicted"] = {
            **told["predicted"],
            "range_ms": {name: list(each) for name, each in self.range_ms.items()},
        }
        more = {"others_share": self.others, "late_p99_ms": self.late_ms, "failed": self.failed}
        speeds = {path: list(each) for path, each in self.speed.items()}
        told |= {
            "promised_p99_ms": self.bound_ms,
            "promise_kept": self.kept,
            "speed": speeds,
            "slower": dict(self.slower),
            "at_own_speed_ms": dict(self.at_own_speed_ms),
        }
        return {**told, **more, "agrees": self.agrees}


def compared(
    driven: Driven, predicted: Sequence[SimResult], load: float, system: System, drawn_from: Sequence[SimResult] = ()
) -> Compared:
    """predicted: of replications of the same arrivals, as many in each, of the system at the speed of each probe.
    drawn_from: the same at each speed that a run may have; predicted unless given."""
    (run,) = driven.result.summaries
    names = list(run.names)
    drawn = np.stack([each.whole for said in drawn_from or predicted for each in said.summaries])
    ends = np.quantile(drawn, RANGE, axis=0)
    told = [
        _numbers(said, {name: float(said.latency[name].value) for name in names if name in said.latency})
        for said in predicted
    ]
    return Compared(
        driven.result.policy,
        load,
        driven.result.rate_per_s,
        driven.result.requests,
        _numbers(driven.result, dict(zip(names, run.whole.tolist(), strict=True))),
        _mean(told),
        {name: (float(ends[0, k]), float(ends[1, k])) for k, name in enumerate(names) if name in STATISTICS},
        driven.others,
        driven.late_ms,
        driven.failed,
        {path.name: tuple(each) for path, each in zip(system.paths, np.transpose(driven.speeds).tolist(), strict=True)},
        slower(driven.batches, at_speed(system, np.mean(driven.speeds, axis=0))),
        lowest_p99_ms=float(driven.result.latency["p99"].low),
    )


def _mean(told: Sequence[Any]) -> Any:
    """Of the same numbers several times."""
    if isinstance(told[0], Mapping):
        return {key: _mean([each[key] for each in told]) for key in told[0]}
    return sum(told) / len(told)


def speeds(batches: Sequence[tuple[FloatArray, FloatArray]], system: System) -> FloatArray:
    """Median (paths,) of the times of batches over a system's typical ones."""
    pairs = zip(system.paths, batches, strict=True)
    return np.array([np.median(T / path.typical_ms[B.astype(int)]) for path, (B, T) in pairs])


def levels(batches: Sequence[tuple[FloatArray, FloatArray]], system: System) -> FloatArray:
    """Speeds (2, paths) in either half of a probe, by the order in which batches began."""
    halves = [[(B[: len(B) // 2], T[: len(B) // 2]), (B[len(B) // 2 :], T[len(B) // 2 :])] for B, T in batches]
    return np.array([speeds([each[k] for each in halves], system) for k in (0, 1)])


def drift(probed: Sequence[FloatArray]) -> tuple[FloatArray, int]:
    """Standard deviation (paths,) of ln speed between halves of a run's probes, over several runs, each (k, paths) on
    its first paths; and the degrees of freedom of the path with the fewest, those of no run left out."""
    paths = max(each.shape[1] for each in probed)
    found, least = np.zeros(paths), 0
    for path in range(paths):
        columns = [np.log(each[:, path]) for each in probed if each.shape[1] > path]
        freedom = sum(len(each) - 1 for each in columns)
        found[path] = math.sqrt(sum(float(np.sum((each - each.mean()) ** 2)) for each in columns) / freedom)
        least = min(least or freedom, freedom)
    return found, least


def drawn_speeds(probed: FloatArray, sd: FloatArray, freedom: int, count: int, rng: np.random.Generator) -> FloatArray:
    """Speeds (count, paths) that the run between probes of these (k, paths) may have: those of a further half, drawn
    evenly from Student's predictive distribution, for each path in an order of its own."""
    from scipy.special import stdtrit

    k, paths = probed.shape
    steps = stdtrit(freedom, (np.arange(count) + 0.5) / count)
    scores = np.stack([rng.permutation(steps) for _ in range(paths)], axis=1)
    found: FloatArray = np.exp(np.log(probed).mean(axis=0) + scores * sd[:paths] * math.sqrt(1 + 1 / k))
    return found


def slower(batches: Sequence[tuple[FloatArray, FloatArray]], system: System) -> dict[str, float]:
    """By path, time of all batches over that which a system takes for them in the mean; paths without one left out."""
    found = {}
    for path, (B, T) in zip(system.paths, batches, strict=True):
        if len(B):
            expected = path.mean_ms[B.astype(int)]
            found[path.name] = float(T.sum() / np.sum(expected))
    return found


def at_speed(system: System, factors: FloatArray) -> System:
    """The same paths, each so many times as slow."""
    return System(
        *(replace(path, times_ms=path.times_ms * f) for path, f in zip(system.paths, factors.tolist(), strict=True))
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
    times = [path.typical_ms[1:] for path in system.paths]
    router = Router(executors, times, policy, RouterOptions(most_waiting=len(arrive_ms) + 1))
    ran = await _ran(router, arrive_ms)
    served = sorted((each for each in ran.ended if each.path), key=lambda each: each.arrived_ms)
    if len(served) <= warm + 1:
        raise ExecutorFailed(
            f"{len(served)} of {len(arrive_ms):,} requests came to an executor",
            where=", ".join(each.name for each in executors),
            remedy="See why they fail: await executor.execute([None]).",
        )
    names = [path.name for path in system.paths]
    columns = {
        "arrive_ms": np.array([each.arrived_ms for each in served]) - ran.start_ms,
        "response_ms": np.array([each.ended_ms - each.arrived_ms for each in served]),
        "path": np.array([names.index(each.path) for each in served]),
        "batch": np.array([each.batch for each in served]),
        "started_ms": np.array([each.started_ms for each in served]) - ran.start_ms,
    }
    result = measured_result(policy, system, measured_run(columns, system, warm))
    batches = [_batches(served[warm:], name) for name in names]
    return Driven(result, ran.others, float(np.quantile(ran.late_ms, 0.99)), router.failed, batches)


def _batches(served: Sequence[Request], path: str) -> tuple[FloatArray, FloatArray]:
    """B and T_ms (n,) of a path's batches that came back."""
    rows = sorted({(r.started_ms, r.batch, r.ended_ms) for r in served if r.path == path and r.served})
    return np.array([b for _, b, _ in rows], np.float64), np.array([end - start for start, _, end in rows])


@dataclass(frozen=True, eq=False)
class _Ran:
    """Requests in the order they ended; the moment from which theirs count."""

    ended: Sequence[Request]
    start_ms: float
    late_ms: FloatArray
    others: float


async def _ran(router: Router, arrive_ms: FloatArray, *, ends_early: bool = False) -> _Ran:
    """Send requests at these moments. ends_early: those that still wait at the end are served greedily."""
    ended: list[Request] = []
    router.listeners.append(ended.append)
    await router.start()
    executors = [path.executor for path in router.paths]
    with short_pauses(none=True):  # all requests of a run are kept, which no server does
        busy, began = _busy_of_others(executors), time.monotonic()
        start_ms = time.monotonic() * 1000 + 50.0
        tasks, late_ms = await _send(router, start_ms + arrive_ms)
        if not ends_early:
            await asyncio.gather(*tasks, return_exceptions=True)
        await router.drain()
        await asyncio.gather(*tasks, return_exceptions=True)
    others = (_busy_of_others(executors) - busy) / ((time.monotonic() - began) * (os.cpu_count() or 1))
    return _Ran(ended, start_ms, late_ms, max(others, 0.0))


async def _send(router: Router, moments_ms: FloatArray) -> tuple[list[asyncio.Task[Any]], FloatArray]:
    """Submit at each moment of the router's clock, from a thread that does nothing else; what was submitted, and
    how late each was, ms."""
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
    return tasks, np.array(late) * 1000


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
