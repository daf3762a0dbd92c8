"""Drive arrivals against executors on this machine, and compare the run with its simulation.

Open loop: a response counts from the planned arrival (no coordinated omission). Executors are probed before and after
each run, as hosts change their speed.
"""

import asyncio
import math
import selectors
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from latfit.fitting import FitOptions, fit_trace
from latfit.live.executor import Executor, ExecutorFailed
from latfit.live.pauses import short_pauses
from latfit.live.router import Router, RouterOptions
from latfit.live.waiting import Request
from latfit.model import FitResult
from latfit.policies import Policy
from latfit.profiling import LoadWatch
from latfit.simulation import SimResult, System, measured_result, measured_run
from latfit.stats import FloatArray
from latfit.trace import Trace
from latfit.units import format_ms, format_percent

Result = TypeVar("Result")
Batches = Sequence[tuple[FloatArray, FloatArray]]
"""B and T_ms (n,) of the batches of each path, in the order in which they began."""

MIN_ROUNDS = 5  # over all batch sizes, in a probe
MIN_USE = 0.2  # smallest share of the time that a probe keeps a path busy
MAX_OTHERS = 0.05  # largest share of the cores that others may use in a run that counts
TOLERANCE = 0.1  # relative error up to which a prediction counts as right
RANGE = (0.025, 0.975)
STATISTICS = ("mean", "p50", "p99")


def precisely(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine with timers exact to 0.1 ms; epoll, the default, rounds up to whole ms."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        return runner.run(coroutine)


def choose_sizes(T_ms: FloatArray, within_ms: float) -> list[int]:
    """Return the batch sizes to measure: all if time allows, else in steps of a quarter."""
    largest = len(T_ms)
    if MIN_ROUNDS * float(T_ms.sum()) <= within_ms:
        return list(range(1, largest + 1))
    sizes = [1]
    while sizes[-1] < largest:
        sizes.append(min(max(sizes[-1] + 1, round(sizes[-1] * 1.25)), largest))
    return sizes


async def probe(
    executors: Sequence[Executor],
    times: Sequence[FloatArray],
    duration_s: float,
    rng: np.random.Generator,
    use: FloatArray | None = None,
) -> tuple[Batches, float]:
    """Measure batches of random sizes on all executors at once, and the share of the cores that others used.

    times: about T(1), T(2), ... of each executor, ms.  use: share of the time (executors,) that each is busy, at least
    MIN_USE; None for all of it. Raises ExecutorFailed if fewer than two batches of an executor came back.
    """
    shares = np.clip(np.ones(len(executors)) if use is None else use, MIN_USE, 1.0).tolist()
    watch = LoadWatch()
    with short_pauses(none=True):
        each = zip(executors, times, shares, strict=True)
        measured = await asyncio.gather(*(_probe_executor(*one, 1000 * duration_s, rng) for one in each))
    for executor, (B, _) in zip(executors, measured, strict=True):
        if len(B) < 2:
            raise _nothing_served(f"{len(B)} of its batches", executor.name)
    return measured, _others_share(watch)


async def _probe_executor(
    executor: Executor, T_ms: FloatArray, share: float, lasts_ms: float, rng: np.random.Generator
) -> tuple[FloatArray, FloatArray]:
    sizes = choose_sizes(T_ms, lasts_ms * share)
    until = time.perf_counter() + max(lasts_ms, MIN_ROUNDS * float(T_ms[np.array(sizes) - 1].sum()) / share) / 1000
    rows: list[tuple[float, float]] = []

    async def run_batches() -> None:
        left: list[int] = []
        while (began := time.perf_counter()) < until:
            left = left or rng.permutation(sizes).tolist()
            size = left.pop()
            try:
                await executor.execute([None] * size)
            except ExecutorFailed:
                await asyncio.sleep(float(T_ms[size - 1]) / 1000)
                continue
            took_s = time.perf_counter() - began
            rows.append((size, took_s * 1000))
            if share < 1:
                await asyncio.sleep(rng.exponential(float(T_ms[size - 1]) / 1000 * (1 / share - 1)))

    await asyncio.gather(*(run_batches() for _ in range(executor.servers)))
    B, T = np.array(rows).reshape(-1, 2).T
    return B, T


def _others_share(watch: LoadWatch) -> float:
    load = watch()
    return 0.0 if load is None else load.share


def _nothing_served(what: str, where: str) -> ExecutorFailed:
    return ExecutorFailed(f"{what} came back", where=where, remedy="See why they fail: await executor.execute([None]).")


async def measure_executors(executors: Sequence[Executor], duration_s: float, seed: int = 0) -> list[FitResult]:
    async def estimate(executor: Executor) -> FloatArray:
        sizes = choose_sizes(np.ones(executor.largest), 0.0)
        for _ in range(2):
            took: list[float] = []
            for size in sizes:
                began = time.perf_counter()
                await executor.execute([None] * size)
                took.append((time.perf_counter() - began) * 1000)
        return np.interp(np.arange(1, executor.largest + 1), sizes, took)

    times = await asyncio.gather(*map(estimate, executors))
    batches, _ = await probe(executors, times, duration_s, np.random.default_rng(seed))
    traces = [
        Trace({"B": B, "S": B, "T_ms": T}, {"device": executor.name})
        for executor, (B, T) in zip(executors, batches, strict=True)
    ]
    return [await asyncio.to_thread(fit_trace, trace, FitOptions("auto")) for trace in traces]


@dataclass(frozen=True, eq=False)
class Driven:
    result: SimResult
    late_ms: float  # 99th percentile of how late requests were sent
    failed: int  # requests that ended with an error
    batches: Batches


@dataclass(frozen=True, eq=False)
class Compared:
    policy: str
    load: float  # share of the main path's capacity
    rate_per_s: float
    requests: int
    measured: Mapping[str, Any]
    predicted: Mapping[str, Any]  # `range_ms`: by statistic, where 95 % of the runs of these arrivals should lie
    others_share: float
    late_p99_ms: float
    failed: int
    speed: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # T over the fitted T before and after
    slower: Mapping[str, float] = field(default_factory=dict)  # mean time of the run's batches over the predicted one
    at_own_speed_ms: Mapping[str, float] = field(default_factory=dict)  # prediction at the speed of the run's batches
    lowest_p99_ms: float = -math.inf  # lower end of the interval of the measured p99
    promised_p99_ms: float | None = None  # that a plan promises at the slower speed; None if it promises none

    @property
    def agrees(self) -> bool | None:
        """Return whether each statistic is within TOLERANCE or in its range; None if others disturbed the run."""
        if self.others_share > MAX_OTHERS:
            return None
        return not self.failed and self.promise_kept is not False and all(map(self._is_predicted, STATISTICS))

    @property
    def promise_kept(self) -> bool | None:
        """Return whether the measured p99 may lie within the plan's promise; None if there is none."""
        return None if self.promised_p99_ms is None else not self.lowest_p99_ms > self.promised_p99_ms

    def _is_predicted(self, statistic: str) -> bool:
        measured, predicted = self.measured["latency_ms"][statistic], self.predicted["latency_ms"][statistic]
        low, high = self.predicted["range_ms"][statistic]
        return bool(abs(predicted - measured) <= TOLERANCE * measured or low <= measured <= high)

    @property
    def notes(self) -> list[str]:
        where, notes = f"{self.policy} at {format_percent(100 * self.load)}", []
        if self.promised_p99_ms is not None:
            p99, kept = format_ms(self.measured["latency_ms"]["p99"]), "kept" if self.promise_kept else "broken"
            promised = format_ms(self.promised_p99_ms)
            notes.append(f"{where}: a plan promises a p99 of {promised} at most; {kept} ({p99}).")
        if self.failed:
            notes.append(f"{where}: {self.failed:,} requests failed.")
        if self.agrees is False and self.slower:
            took = [f"{ratio:.2f} times as long on {path}" for path, ratio in self.slower.items()]
            own = [f"{name} {format_ms(ms)}" for name, ms in self.at_own_speed_ms.items() if name in ("mean", "p99")]
            at_own = f" At that speed the prediction is {' and '.join(own)}." if own else ""
            notes.append(f"{where}: its batches took {' and '.join(took)} as predicted.{at_own}")
        return notes

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"promise_kept": self.promise_kept, "agrees": self.agrees}


def predicted_ranges(drawn: Sequence[SimResult]) -> dict[str, tuple[float, float]]:
    """Return where each statistic of a run lies in RANGE of the simulated runs."""
    low, high = np.quantile([each.whole for result in drawn for each in result.summaries], RANGE, axis=0)
    names = [name for name, _ in drawn[0].latency.items()]
    return {name: (float(low[k]), float(high[k])) for k, name in enumerate(names) if name in STATISTICS}


def numbers_of(result: SimResult) -> dict[str, Any]:
    return {
        "latency_ms": {name: float(result.latency[name].value) for name in STATISTICS},
        "throughput_per_s": result.throughput_per_s,
        "share": dict(result.share),
        "utilisation": dict(result.utilisation),
        "batch_size": dict(result.batch_size),
    }


def speed_levels(batches: Batches, system: System) -> FloatArray:
    """Return the median of T over a system's typical T, in either half of a probe, (2, paths)."""
    pairs = list(zip(system.paths, batches, strict=True))
    ratios = [np.array_split(T / path.typical_ms[B.astype(int)], 2) for path, (B, T) in pairs]
    return np.array([[np.median(halves[k]) for halves in ratios] for k in (0, 1)])


def draw_speeds(levels: FloatArray, count: int, rng: np.random.Generator) -> FloatArray:
    """Draw speeds (count, paths) between probes of these levels (k, paths), by Student's t."""
    from scipy.special import stdtrit

    k, paths = levels.shape
    logs = np.log(levels)
    steps = stdtrit(k - 1, (np.arange(count) + 0.5) / count)
    scores = np.stack([rng.permutation(steps) for _ in range(paths)], axis=1)
    speeds: FloatArray = np.exp(logs.mean(axis=0) + scores * logs.std(axis=0, ddof=1) * math.sqrt(1 + 1 / k))
    return speeds


def slowdown(batches: Batches, system: System) -> dict[str, float]:
    pairs = zip(system.paths, batches, strict=True)
    return {path.name: float(T.sum() / np.sum(path.mean_ms[B.astype(int)])) for path, (B, T) in pairs if len(B)}


def at_speed(system: System, factors: FloatArray) -> System:
    pairs = zip(system.paths, factors.tolist(), strict=True)
    return System(*(replace(path, times_ms=path.times_ms * factor) for path, factor in pairs))


async def drive(
    executors: Sequence[Executor], system: System, policy: Policy, arrive_ms: FloatArray, warm: int = 0
) -> tuple[Driven, float]:
    """Send requests at moments (n,), in ms; return also the share of the cores that others used.

    warm: the first request that counts.
    """
    times = [path.typical_ms[1:] for path in system.paths]
    router = Router(executors, times, policy, RouterOptions(most_waiting=len(arrive_ms) + 1))
    ended: list[Request] = []
    router.listeners.append(ended.append)
    await router.start()
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[Any]] = []
    late_s: list[float] = []

    def submit(moment_s: float) -> None:
        late_s.append(time.monotonic() - moment_s)
        tasks.append(loop.create_task(router.submit(None, arrived_s=moment_s)))

    with short_pauses(none=True):  # a run keeps all its requests in memory, unlike a server
        watch, start_ms = LoadWatch(), time.monotonic() * 1000 + 50.0
        for moment_s in ((start_ms + arrive_ms) / 1000).tolist():
            loop.call_at(moment_s, submit, moment_s)
        while len(tasks) < len(arrive_ms):
            await asyncio.sleep(0.05)
        await asyncio.gather(*tasks, return_exceptions=True)
        await router.drain()
    others = _others_share(watch)
    served = sorted((request for request in ended if request.path), key=lambda request: request.arrived_ms)
    if len(served) <= warm + 1:
        where = ", ".join(executor.name for executor in executors)
        raise _nothing_served(f"{len(served)} of {len(arrive_ms):,} requests", where)
    names = [path.name for path in system.paths]
    columns = {
        "arrive_ms": np.array([request.arrived_ms for request in served]) - start_ms,
        "response_ms": np.array([request.ended_ms - request.arrived_ms for request in served]),
        "path": np.array([names.index(request.path) for request in served]),
        "batch": np.array([request.batch for request in served]),
        "started_ms": np.array([request.started_ms for request in served]) - start_ms,
    }
    result = measured_result(policy, system, measured_run(columns, system, warm))
    batches = [_batches(served[warm:], name) for name in names]
    return Driven(result, 1000 * float(np.quantile(late_s, 0.99)), router.failed, batches), others


def _batches(served: Sequence[Request], path: str) -> tuple[FloatArray, FloatArray]:
    rows = sorted({(r.started_ms, r.batch, r.ended_ms) for r in served if r.path == path and r.served})
    return np.array([b for _, b, _ in rows], np.float64), np.array([end - start for start, _, end in rows])
