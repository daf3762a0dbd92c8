"""Drive arrivals against executors on this machine, and compare the run with its simulation.

Open loop: a response counts from the planned arrival, whether the sender was late or not, so a stall delays everybody
behind it (no coordinated omission). Executors are probed before and after each run, as machines change their speed;
the prediction is the mean over both speeds, and its range covers the speeds that a run between them may have. A run
that others on the machine disturbed does not count. Method and results: docs/how-to/route-live.md.
"""

import asyncio
import math
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from latfit.fitting import FitOptions, fit_trace
from latfit.live.executor import Executor, ExecutorFailed
from latfit.live.pauses import short_pauses
from latfit.live.router import Router, RouterOptions
from latfit.live.waiting import Request
from latfit.model import FitResult
from latfit.policies import SERVE_MAIN, SERVE_SIDE, WAIT, Limits, Policy, policy as policies
from latfit.profiling import LoadWatch, usable_cpus
from latfit.simulation import SimResult, System, measured_result, measured_run
from latfit.stats import FloatArray
from latfit.trace import Trace
from latfit.units import format_ms, format_percent

Result = TypeVar("Result")
MIN_ROUNDS = 5  # of all batch sizes, in a probe
MIN_USE = 0.2  # share of the time that a probe keeps a path busy, at least
MAX_OTHERS = 0.05  # share of the cores that others may use in a run that counts
TOLERANCE = 0.1  # relative error of a prediction that still counts as right
RANGE = (0.025, 0.975)
STATISTICS = ("mean", "p50", "p99")


def precisely(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on an event loop whose timers are exact to 0.1 ms; epoll, the default, rounds up to whole ms."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        return runner.run(coroutine)


def by_quarters(largest: int) -> list[int]:
    """Return batch sizes: all small ones, larger ones in steps of about a quarter."""
    found = {1, largest}
    size = 1.0
    while size < largest:
        size = max(size + 1, size * 1.25)
        found.add(min(round(size), largest))
    return sorted(found)


def sizes_within(T_ms: FloatArray, within_ms: float) -> list[int]:
    """Return the batch sizes to measure within a time, given about T(b): all of them if it lasts, else by quarters.

    Kernels run some sizes faster than their neighbours.
    """
    every = list(range(1, len(T_ms) + 1))
    return every if MIN_ROUNDS * float(T_ms.sum()) <= within_ms else by_quarters(len(T_ms))


class _Prober(Router):
    """Run batches of random sizes, every size as often, on idle paths, each busy for its share of the time."""

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
    """B and T_ms (n,) of the batches of each executor, and the share of the cores that others used."""

    batches: Sequence[tuple[FloatArray, FloatArray]]
    others: float


async def probe(
    executors: Sequence[Executor],
    times: Sequence[FloatArray],
    duration_s: float,
    rng: np.random.Generator,
    use: FloatArray | None = None,
) -> Probed:
    """Measure batches of many sizes under load.

    Parameters
    ----------
    times
        About T(1), T(2), ... of each executor, ms.
    use
        Share of the time (executors,) that each is busy, at least MIN_USE; all of it by default.

    Raises
    ------
    ExecutorFailed
        If fewer than two batches of an executor came back.
    """
    use = np.clip(np.ones(len(executors)) if use is None else use, MIN_USE, 1.0)
    sizes = [sizes_within(T, 1000 * duration_s * u) for T, u in zip(times, use, strict=True)]
    round_ms = np.array([T[np.array(each) - 1].sum() for each, T in zip(sizes, times, strict=True)])
    carried = float(np.sum([sum(each) for each in sizes] * use / round_ms))
    count = math.ceil(carried * max(duration_s * 1000, MIN_ROUNDS * round_ms.max()))
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
    """Fit each executor. Two rounds of all sizes, the first to warm up, determine how many requests to send."""

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
    """A measured run.

    Attributes
    ----------
    others
        Share of the cores that others used.
    late_ms
        99th percentile of how late requests were sent.
    failed
        Requests that ended with an error.
    batches
        B and T_ms (n,) of each path.
    speeds
        T over the fitted T (paths,), in the probe before and the one after the run.
    levels
        The same by halves of the probes, shape (4, paths).
    """

    result: SimResult
    others: float
    late_ms: float
    failed: int
    batches: Sequence[tuple[FloatArray, FloatArray]]
    speeds: Sequence[FloatArray] = ()
    levels: FloatArray | None = None

    @property
    def disturbed(self) -> bool:
        return self.others > MAX_OTHERS


@dataclass(frozen=True, eq=False)
class Compared:
    """A run of a policy at a load, measured and predicted.

    Attributes
    ----------
    load
        Share of the main path's capacity.
    measured, predicted
        The same numbers of both: ms by statistic under `latency_ms`, shares by path.
    range_ms
        By statistic, where 95 % of the runs of these arrivals are predicted to lie.
    speed
        By path, T over the fitted T before and after the run.
    slower
        By path, mean time of the run's batches over the predicted one.
    at_own_speed_ms
        By statistic, the prediction at the speed of the run's own batches.
    lowest_p99_ms
        Lower end of the interval of the measured p99.
    bound_ms
        p99 that a plan promises at the slower speed; None if it promises none.
    """

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
        """Return whether each statistic is within TOLERANCE or in its range; None if others disturbed the run."""
        if self.others > MAX_OTHERS:
            return None
        return not self.failed and self.kept is not False and all(self.holds(name) for name in STATISTICS)

    @property
    def kept(self) -> bool | None:
        """Return whether the measured p99 may lie within the plan's promise; None if there is none."""
        return None if self.bound_ms is None else not self.lowest_p99_ms > self.bound_ms

    def holds(self, name: str) -> bool:
        found, said = self.measured["latency_ms"][name], self.predicted["latency_ms"][name]
        low, high = self.range_ms[name]
        return bool(abs(said - found) <= TOLERANCE * found or low <= found <= high)

    @property
    def notes(self) -> list[str]:
        """Return what became of the plan's promise and, if the run differs, what its batches took."""
        where, found = f"{self.policy} at {format_percent(100 * self.load)}", []
        if self.bound_ms is not None:
            p99 = format_ms(self.measured["latency_ms"]["p99"])
            kept = "kept" if self.kept else "broken"
            found.append(f"{where}: a plan promises a p99 of {format_ms(self.bound_ms)} at most; {kept} ({p99}).")
        if self.failed:
            found.append(f"{where}: {self.failed:,} requests failed.")
        if self.agrees is False and self.slower:
            took = [f"{ratio:.2f} times as long on {path}" for path, ratio in self.slower.items()]
            own = [f"{name} {format_ms(ms)}" for name, ms in self.at_own_speed_ms.items() if name in ("mean", "p99")]
            at_own = f" At that speed the prediction is {' and '.join(own)}." if own else ""
            found.append(f"{where}: its batches took {' and '.join(took)} as predicted.{at_own}")
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the run as a JSON document."""
        ranges = {name: list(each) for name, each in self.range_ms.items()}
        return {
            "policy": self.policy,
            "load": self.load,
            "rate_per_s": self.rate_per_s,
            "requests": self.requests,
            "measured": self.measured,
            "predicted": {**self.predicted, "range_ms": ranges},
            "promised_p99_ms": self.bound_ms,
            "promise_kept": self.kept,
            "speed": {path: list(each) for path, each in self.speed.items()},
            "slower": dict(self.slower),
            "at_own_speed_ms": dict(self.at_own_speed_ms),
            "others_share": self.others,
            "late_p99_ms": self.late_ms,
            "failed": self.failed,
            "agrees": self.agrees,
        }


def compared(
    driven: Driven, predicted: Sequence[SimResult], load: float, system: System, drawn_from: Sequence[SimResult] = ()
) -> Compared:
    """Compare a run with simulations of its arrivals.

    Parameters
    ----------
    predicted
        Of the system at the speed of each probe, with as many replications in each.
    drawn_from
        Of the system at each speed that the run may have; `predicted` by default.
    """
    measured = {name: each.value for name, each in driven.result.latency.items()}
    drawn = np.stack([each.whole for said in drawn_from or predicted for each in said.summaries])
    low, high = np.quantile(drawn, RANGE, axis=0)
    return Compared(
        driven.result.policy,
        load,
        driven.result.rate_per_s,
        driven.result.requests,
        _numbers(driven.result, measured),
        _mean([_numbers(said, {name: float(each.value) for name, each in said.latency.items()}) for said in predicted]),
        {name: (float(low[k]), float(high[k])) for k, name in enumerate(measured) if name in STATISTICS},
        driven.others,
        driven.late_ms,
        driven.failed,
        {path.name: tuple(each) for path, each in zip(system.paths, np.transpose(driven.speeds).tolist(), strict=True)},
        slower(driven.batches, at_speed(system, np.mean(driven.speeds, axis=0))),
        lowest_p99_ms=float(driven.result.latency["p99"].low),
    )


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean of numbers, or of each entry of nested mappings."""
    if isinstance(values[0], Mapping):
        return {key: _mean([each[key] for each in values]) for key in values[0]}
    return sum(values) / len(values)


def speeds(batches: Sequence[tuple[FloatArray, FloatArray]], system: System) -> FloatArray:
    """Return the median ratio (paths,) of the times of batches to a system's typical ones."""
    pairs = zip(system.paths, batches, strict=True)
    return np.array([np.median(T / path.typical_ms[B.astype(int)]) for path, (B, T) in pairs])


def levels(batches: Sequence[tuple[FloatArray, FloatArray]], system: System) -> FloatArray:
    """Return the speeds (2, paths) in either half of a probe, by the order in which batches began."""
    halves = [[(B[: len(B) // 2], T[: len(B) // 2]), (B[len(B) // 2 :], T[len(B) // 2 :])] for B, T in batches]
    return np.array([speeds([each[k] for each in halves], system) for k in (0, 1)])


def drift(probed: Sequence[FloatArray]) -> tuple[FloatArray, int]:
    """Return the standard deviation (paths,) of ln speed between halves of a run's probes, and its degrees of freedom.

    Parameters
    ----------
    probed
        Speeds (k, paths) of each run; a run may have the first paths only.
    """
    paths = max(each.shape[1] for each in probed)
    found, least = np.zeros(paths), 0
    for path in range(paths):
        columns = [np.log(each[:, path]) for each in probed if each.shape[1] > path]
        freedom = sum(len(each) - 1 for each in columns)
        found[path] = math.sqrt(sum(float(np.sum((each - each.mean()) ** 2)) for each in columns) / freedom)
        least = min(least or freedom, freedom)
    return found, least


def drawn_speeds(probed: FloatArray, sd: FloatArray, freedom: int, count: int, rng: np.random.Generator) -> FloatArray:
    """Return speeds (count, paths) that a run between probes of these (k, paths) may have.

    Quantiles of Student's predictive distribution of a further half, in random order for each path.
    """
    from scipy.special import stdtrit

    k, paths = probed.shape
    steps = stdtrit(freedom, (np.arange(count) + 0.5) / count)
    scores = np.stack([rng.permutation(steps) for _ in range(paths)], axis=1)
    found: FloatArray = np.exp(np.log(probed).mean(axis=0) + scores * sd[:paths] * math.sqrt(1 + 1 / k))
    return found


def slower(batches: Sequence[tuple[FloatArray, FloatArray]], system: System) -> dict[str, float]:
    """Return by path the time of all batches over the mean that a system takes for them; paths without one left out."""
    found = {}
    for path, (B, T) in zip(system.paths, batches, strict=True):
        if len(B):
            expected = path.mean_ms[B.astype(int)]
            found[path.name] = float(T.sum() / np.sum(expected))
    return found


def at_speed(system: System, factors: FloatArray) -> System:
    """Return the system with each path slower by a factor."""
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
    """Send requests at the given moments (n,), ms from now, and wait until all have ended.

    Parameters
    ----------
    warm
        Index of the first request that counts.

    Raises
    ------
    ExecutorFailed
        If hardly any request came to an executor.
    """
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
    """Return B and T_ms (n,) of a path's batches that came back."""
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
    """Send requests at these moments; ends_early: serve those that still wait at the end greedily."""
    ended: list[Request] = []
    router.listeners.append(ended.append)
    await router.start()
    with short_pauses(none=True):  # all requests of a run are kept, which no server does
        watch = LoadWatch(0)
        start_ms = time.monotonic() * 1000 + 50.0
        tasks, late_ms = await _send(router, start_ms + arrive_ms)
        if not ends_early:
            await asyncio.gather(*tasks, return_exceptions=True)
        await router.drain()
        await asyncio.gather(*tasks, return_exceptions=True)
    load = watch()
    others = 0.0 if load is None else load.other_cpus / len(usable_cpus())
    return _Ran(ended, start_ms, late_ms, others)


async def _send(router: Router, moments_ms: FloatArray) -> tuple[list[asyncio.Task[Any]], FloatArray]:
    """Submit at each moment of the router's clock, timed by a thread; return the tasks, and how late each was, ms."""
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


Repeat = Callable[[], Coroutine[Any, Any, Driven]]


async def undisturbed(run: Repeat, tries: int = 3) -> Driven:
    """Repeat a run until no neighbour disturbs it; return that one, or the least disturbed."""
    runs: list[Driven] = []
    for _ in range(tries):
        runs.append(await run())
        if not runs[-1].disturbed:
            break
    return min(runs, key=lambda each: each.others)
