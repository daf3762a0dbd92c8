"""Adapt a running router: learn batch times, choose thresholds for them, and monitor a latency promise.

`Learner(router, Promise(50.0))` follows every batch and request. When the times of a path no longer apply, a thread
chooses thresholds for the new ones, and the router adopts both between two decisions. See docs/how-to/route-live.md.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from latfit.errors import WrongUsage, first_line
from latfit.live.learned_times import MARGIN, Correction, LearnedTimes
from latfit.live.path import LivePath
from latfit.live.promise import Promise, PromiseMonitor
from latfit.live.router import Router
from latfit.live.waiting import Request
from latfit.policies import Limits, Policy, default_cutoff_ms, default_threshold, policy as policies
from latfit.simulation import Options, System, path_times, simulate, table_path
from latfit.units import format_ms, format_percent, format_rate, number
from latfit.workload import OpenLoad, Poisson

MAX_BURST, SWITCH_EVERY_MS = 6, 30_000.0  # switches in a row; time after which one more is allowed
COUNT_EVERY_MS, MAX_COUNTS = 250.0, 120  # arrivals are counted so often; the rate is that of the last 30 s

Thresholds = Callable[[Policy, float, System], Policy]
"""Return the policy to use, given the current one, arrivals per ms, and the paths with the learned times."""


@dataclass(frozen=True)
class BestForTail:
    """Choose thresholds of cutoff and three-stage by the least simulated percentile, and solve optimal anew.

    Parameters
    ----------
    share
        Percentile, 0 to 1.
    requests
        Length of each simulation.
    worth
        Relative gain below which the current thresholds stay.
    """

    share: float = 0.99
    requests: int = 10_000
    worth: float = 0.05

    def __call__(self, policy: Policy, rate: float, system: System) -> Policy:
        times, limits = path_times(system), Limits(policy.main_largest, policy.side_largest)
        if policy.name == "optimal":
            from latfit.queueing import measured_times, optimal_rule

            table = optimal_rule(rate, measured_times(times.main[: limits.main])).table
            return replace(policies.optimal(table, limits), order=policy.order)
        if policy.name not in ("cutoff", "three-stage"):
            return policy  # no thresholds that depend on times
        load, options = OpenLoad(Poisson(rate)), Options(self.requests, replications=1)

        def tail(candidate: Policy) -> float:
            return simulate(candidate, system, load, options).percentile_ms(self.share)

        def best(candidates: Sequence[Policy]) -> tuple[float, Policy]:
            tried = [(tail(each), each) for each in (replace(each, order=policy.order) for each in candidates)]
            return min(tried, key=lambda each: each[0])

        first, last = float(times.main[0]) / 2, 2 * float(times.main[limits.main - 1])
        cutoffs = [default_cutoff_ms(rate, times), *np.geomspace(first, last, 8).tolist()]
        if policy.name == "cutoff":
            found = best([policies.cutoff(each, limits) for each in cutoffs])
        else:
            usual, largest = default_threshold(times), min(limits.main, limits.side + 1)
            found = best([policies.three_stage(usual, each, limits) for each in cutoffs])
            cutoff = float(found[1].settings["t_cut_ms"])
            others = {1, largest, *np.geomspace(1, largest, 6).round().astype(int).tolist()} - {usual}
            rest = best([policies.three_stage(b, cutoff, limits) for b in sorted(others)])
            found = min(found, rest, key=lambda each: each[0])
        return found[1] if found[0] < (1 - self.worth) * tail(policy) else policy


@dataclass(frozen=True)
class Switch:
    """New times of a path that the router adopted: factors of the planned times, and `slower`, `faster` or `fell back`
    (the path failed before the new times had settled)."""

    at_ms: float
    path: str
    before: float
    after: float
    why: str


class Learner:
    """Learn batch times of a router's paths and adapt its thresholds.

    Parameters
    ----------
    promise
        Promise to monitor.
    thresholds
        How thresholds are chosen; `BestForTail` by default.
    rate_per_s
        Arrivals that thresholds are chosen for; those of the last 30 s by default.

    Attributes
    ----------
    switches, switched
        The last 20 switches; how many there were.
    problem
        Why thresholds could not be chosen the last time, or empty.

    Raises
    ------
    Exception
        What `thresholds` raises for the planned times.
    """

    def __init__(
        self,
        router: Router,
        promise: Promise | None = None,
        *,
        thresholds: Thresholds | None = None,
        rate_per_s: float | None = None,
    ) -> None:
        self.router = router
        self.monitor = None if promise is None else PromiseMonitor(promise)
        self._thresholds = thresholds or BestForTail(promise.share if promise else 0.99)
        self._rate = rate_per_s
        self.times = {path.name: LearnedTimes(path.times_ms[1:], path.executor.buckets) for path in router.paths}
        self.switches: deque[Switch] = deque(maxlen=20)
        self.switched, self.problem = 0, ""
        self._allowance, self._allowance_at, self._now = float(MAX_BURST), -math.inf, -math.inf
        self._counts: deque[tuple[float, int]] = deque(maxlen=MAX_COUNTS)
        self._task: asyncio.Task[None] | None = None
        self._thresholds(router.policy, self.rate_per_s / 1000, self._system({}))  # compiled, and known to work
        router.batch_listeners.append(self.add_batch)
        if promise is not None:
            router.listeners.append(self.add_request)

    @property
    def rate_per_s(self) -> float:
        """Return the arrival rate; half the main path's capacity before any arrival was counted."""
        if self._rate is not None:
            return self._rate
        if len(self._counts) > 1 and self._counts[-1][1] > self._counts[0][1]:
            (first_ms, first), (last_ms, last) = self._counts[0], self._counts[-1]
            return 1000 * (last - first) / (last_ms - first_ms)
        main = self._system({}).main
        return 500 * main.rate_limit(main.largest)

    def add_request(self, request: Request) -> None:
        """Count a request that ended for the promise."""
        assert self.monitor is not None
        self.monitor.add(self.monitor.promise.kept(request))

    def add_batch(self, path: LivePath, size: int, began_ms: float, ended_ms: float, well: bool) -> None:
        """Learn from a batch that ended, and switch if its path has changed."""
        times, self._now = self.times[path.name], ended_ms
        if not self._counts or ended_ms - self._counts[-1][0] >= COUNT_EVERY_MS:
            self._counts.append((ended_ms, self.router.submitted + self.router.refused))
        if not well:
            times.add_failure(began_ms, ended_ms)
            self._fall_back()
        elif times.add_batch(size, began_ms, ended_ms) and self._task is None and self._may_switch():
            found = times.propose()
            if found is not None:
                self._allowance -= 1
                self._start_switch(path.name, found, "")

    def _may_switch(self) -> bool:
        if self._allowance < MAX_BURST:
            earned = (self._now - self._allowance_at) / SWITCH_EVERY_MS
            self._allowance = min(self._allowance + earned, float(MAX_BURST))
        self._allowance_at = self._now
        return self._allowance >= 1

    def _fall_back(self) -> None:
        """Give up times that were learned shortly before their path went down."""
        for path in self.router.paths:
            times = self.times[path.name]
            if self._task is None and not times.is_settled and not path.up(self._now):
                self._start_switch(path.name, times.good, "fell back")

    def _start_switch(self, name: str, correction: Correction, why: str) -> None:
        self._task = asyncio.get_running_loop().create_task(self._switch(name, correction, why))

    async def _switch(self, name: str, correction: Correction, why: str) -> None:
        """Choose thresholds for the new times in a thread, then let the router adopt both."""
        policy = chosen = self.router.policy
        try:
            system = self._system({name: correction})
            chosen = await asyncio.to_thread(self._thresholds, policy, self.rate_per_s / 1000, system)
            self.problem = ""
        except Exception as error:  # noqa: BLE001 (the router keeps its thresholds)
            self.problem = first_line(error)
        finally:
            self._task = None
        times = self.times[name]
        if why or self.router.up()[name]:  # else the path went down meanwhile
            before, after = _mean_factor(times, times.in_use), _mean_factor(times, correction)
            why = why or ("slower" if after > before else "faster")
            self.switches.append(Switch(self._now, name, before, after, why))
            self.switched += 1
            times.adopt(correction)
            tables = [each.times_ms(each.in_use) for each in self.times.values()]
            try:
                self.router.adopt(tables, chosen)
            except WrongUsage as error:
                self.problem = str(error)
                self.router.adopt(tables, policy)
        self._fall_back()

    def _system(self, corrections: dict[str, Correction]) -> System:
        """Return the paths with the times in use, except for the corrections given."""
        paths = []
        for path in self.router.paths:
            times = self.times[path.name]
            table = times.times_ms(corrections.get(path.name, times.in_use))[: path.executor.largest]
            paths.append(table_path(path.name, table, servers=path.executor.servers))
        return System(*paths)

    def snapshot(self) -> "Learnt":
        """Return the current state."""
        last = self.switches[-1] if self.switches else None
        return Learnt(
            [_path_view(name, times) for name, times in self.times.items()],
            self.router.policy.name,
            dict(self.router.policy.settings),
            self.rate_per_s,
            None if self.monitor is None else _promise_view(self.monitor),
            last,
            math.nan if last is None else self._now - last.at_ms,
            self.switched,
            self.problem,
        )


@dataclass(frozen=True)
class PathView:
    """Factors of a path's planned times: in use, and measured over the last batches with a 99 % interval; NaN if there
    are too few batches."""

    name: str
    in_use: float
    measured: float
    low: float
    high: float
    batches: int
    dropped: int

    @property
    def holds(self) -> bool:
        """Return whether the times in use are within 10 % of the interval, or not known to be off."""
        margin = math.exp(MARGIN)
        return math.isnan(self.measured) or self.low / margin <= self.in_use <= self.high * margin

    @property
    def line(self) -> str:
        in_use, measured, low, high = (number(each, 3) for each in (self.in_use, self.measured, self.low, self.high))
        if math.isnan(self.measured):
            return f"{self.name}: {in_use} x the planned time; {number(self.batches)} batches so far"
        found = f"{self.name}: {measured} x the planned time ({low} to {high})"
        return f"{found}, {in_use} in use; {number(self.batches)} batches"


@dataclass(frozen=True)
class PromiseView:
    """A promise and its requests so far. evidence: on a logarithmic scale from 0; the alarm comes at 1."""

    within_ms: float
    share: float
    kept: int
    broken: int
    alarm: bool
    alarms: int
    evidence: float

    @property
    def line(self) -> str:
        total, share = self.kept + self.broken, format_percent(100 * self.share)
        if not total:
            return f"promise: {share} within {format_ms(self.within_ms)}; no request yet"
        met = f"{number(100 * self.kept / total, 4)} % of {number(total, 6)} within {format_ms(self.within_ms)}"
        state = "ALARM" if self.alarm else "no alarm"
        return f"promise: {met}, {share} promised; {state}, {number(self.alarms)} so far"


@dataclass(frozen=True)
class Learnt:
    """State of a learner at a moment."""

    paths: Sequence[PathView]
    policy: str
    settings: dict[str, Any]
    rate_per_s: float
    promise: PromiseView | None
    last: Switch | None
    ago_ms: float
    switched: int
    problem: str

    @property
    def _is_alarmed(self) -> bool:
        return self.promise is not None and self.promise.alarm

    @property
    def state(self) -> Literal["good", "doubt", "bad"]:
        if self._is_alarmed:
            return "bad"
        return "good" if all(path.holds for path in self.paths) and not self.problem else "doubt"

    @property
    def verdict(self) -> str:
        if self._is_alarmed:
            return "The promise is broken."
        off = [path.name for path in self.paths if not path.holds]
        if off:
            return f"The times of {' and '.join(off)} no longer hold."
        return "The times in use hold." if self.promise is None else "No alarm, and the times in use hold."

    @property
    def lines(self) -> list[str]:
        """Return what is shown below the verdict."""
        settings = [
            f"{key.removesuffix('_ms')} {format_ms(value) if key.endswith('_ms') else value}"
            for key, value in self.settings.items()
        ]
        found = [path.line for path in self.paths]
        found.append(f"{self.policy}: {', '.join(settings)}, for {format_rate(self.rate_per_s)}")
        if self.promise is not None:
            found.append(self.promise.line)
        if self.last is not None:
            change = f"{self.last.path} {self.last.why}, {number(self.last.before, 3)} to {number(self.last.after, 3)}"
            found.append(f"last of {number(self.switched)} switches: {change}, {format_ms(self.ago_ms)} ago")
        if self.problem:
            found.append(f"thresholds kept: {self.problem}")
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the state as a JSON document."""
        return {
            "state": self.state,
            "verdict": self.verdict,
            "paths": {path.name: {k: v for k, v in vars(path).items() if k != "name"} for path in self.paths},
            "policy": {"name": self.policy, **self.settings},
            "rate_per_s": self.rate_per_s,
            "promise": None if self.promise is None else vars(self.promise),
            "last_switch": None if self.last is None else {**vars(self.last), "ago_ms": self.ago_ms},
            "switches": self.switched,
            "problem": self.problem or None,
        }

    def summary(self) -> str:
        """Return the state as text."""
        return "\n".join([self.verdict, *self.lines])


def _mean_factor(times: LearnedTimes, correction: Correction) -> float:
    """Return the geometric mean of T / planned T over the sizes that the correction was learned from, or all."""
    low, high = (correction.low, correction.high) if correction.high > 1 else (1, len(times.planned_ms))
    return float(np.exp(correction.at(np.arange(low, high + 1.0)).mean()))


def _path_view(name: str, times: LearnedTimes) -> PathView:
    found = times.estimate()
    if found is None:
        nan = math.nan
        return PathView(name, _mean_factor(times, times.in_use), nan, nan, nan, times.batches, times.dropped)
    measured, width = math.exp(found.used + found.shift), math.exp(found.half_width)
    factors = math.exp(found.used), measured, measured / width, measured * width
    return PathView(name, *factors, times.batches, times.dropped)


def _promise_view(monitor: PromiseMonitor) -> PromiseView:
    promise = monitor.promise
    evidence = max(math.log(monitor.evidence), 0.0) / math.log(monitor.needed)
    counts = monitor.kept, monitor.broken, monitor.alarm, monitor.alarms
    return PromiseView(promise.limit_ms(0), promise.share, *counts, evidence)
