"""What a router learns while it serves: how long batches take now, with which thresholds, and whether promises hold.

`Learner(router, Promise(50.0))` listens to every batch and every request. Where the times of a path no longer hold
(`LearntTimes`), thresholds are made for the new ones in a thread, and the router adopts times and policy together,
between two decisions. It never flaps: times change only where they left the margin about those in use and are outside
their own interval, and at most AT_ONCE times, then once in APART_MS. Where a path fails before new times have held for
long, those before them are taken up again.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from latfit.errors import WrongUsage, first_line
from latfit.live.learning.bets import MARGIN
from latfit.live.learning.learnt import Correction, LearntTimes
from latfit.live.learning.monitor import Promise, PromiseMonitor
from latfit.live.path import LivePath
from latfit.live.router import Router
from latfit.live.waiting import Request
from latfit.policies import Limits, Policy, default_cutoff_ms, default_threshold, policy as policies
from latfit.simulation import Options, System, path_times, simulate, table_path
from latfit.units import format_ms, format_percent, format_rate, number
from latfit.workload import OpenLoad, Poisson

AT_ONCE, APART_MS = 6, 30_000.0
RATE_EVERY_MS, RATE_OVER = 250.0, 120
"""Arrivals are counted so often, and their rate is that of so many counts: 30 s."""

Thresholds = Callable[[Policy, float, System], Policy]
"""The policy to go by, from the one in use, arrivals per ms, and the paths with the times that were learnt."""


@dataclass(frozen=True)
class BestForTail:
    """Thresholds of cutoff and three-stage whose simulated percentile is least at the rate; the table of optimal,
    solved anew. The other policies have no thresholds that times decide, or read the times themselves.

    share: the percentile.  requests: of each simulation.  worth: what those in use are kept for."""

    share: float = 0.99
    requests: int = 10_000
    worth: float = 0.05

    def __call__(self, policy: Policy, rate: float, system: System) -> Policy:
        if policy.name == "optimal":
            from latfit.queueing import measured_times, optimal_rule

            times = path_times(system).main[: policy.main_largest]
            found = policies.optimal(optimal_rule(rate, measured_times(times)).table, _limits(policy))
            return replace(found, order=policy.order)
        if policy.name not in ("cutoff", "three-stage"):
            return policy
        load, statistic = OpenLoad(Poisson(rate)), f"p{100 * self.share:g}"
        options = Options(self.requests, replications=1, statistic=statistic, percentiles=(self.share,))

        def tail(candidate: Policy) -> float:
            return float(simulate(candidate, system, load, options).latency[statistic].value)

        best, in_use = _least(policy, rate, system, tail), tail(policy)
        return best[1] if best[0] < (1 - self.worth) * in_use else policy


def _least(policy: Policy, rate: float, system: System, tail: Callable[[Policy], float]) -> tuple[float, Policy]:
    """The least tail and its policy: over T_cut at the usual B1, then over B1 at the best T_cut."""
    times, limits = path_times(system), _limits(policy)
    longest = 2 * float(times.main[limits.main - 1])
    cutoffs = [default_cutoff_ms(rate, times), *np.geomspace(float(times.main[0]) / 2, longest, 8).tolist()]

    def made(cutoff_ms: float, threshold: int) -> Policy:
        if policy.name == "cutoff":
            return replace(policies.cutoff(cutoff_ms, limits), order=policy.order)
        return replace(policies.three_stage(threshold, cutoff_ms, limits), order=policy.order)

    usual = default_threshold(times)
    tried = [(tail(each), each) for each in (made(cutoff, usual) for cutoff in cutoffs)]
    best = min(tried, key=lambda each: each[0])
    if policy.name == "three-stage":
        largest = min(limits.main, limits.side + 1)
        others = sorted({1, largest, *np.geomspace(1, largest, 6).round().astype(int).tolist()} - {usual})
        cutoff = float(best[1].settings["t_cut_ms"])
        best = min(
            [best, *((tail(each), each) for each in (made(cutoff, b) for b in others))], key=lambda each: each[0]
        )
    return best


def _limits(policy: Policy) -> Limits:
    return Limits(policy.main_largest, policy.side_largest)


@dataclass(frozen=True)
class Switch:
    """New times of a path that the router adopted. before, after: times over the planned ones.  why: `slower`,
    `faster`, or `fell back` where the path failed."""

    at_ms: float
    path: str
    before: float
    after: float
    why: str


class Learner:
    """promise: to be watched; none is where not given.  thresholds: how they are made, `BestForTail` unless given.
    rate_per_s: arrivals that they are made for, those of the last 30 s unless given.

    switches: the last ones.  switched: how many there were.  problem: why thresholds could not be made, the last time.
    Raises, when it is made, what `thresholds` raises.
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
        self.learnt = {path.name: LearntTimes(path.times_ms[1:], tuple(path.executor.buckets)) for path in router.paths}
        self.switches: deque[Switch] = deque(maxlen=20)
        self.switched, self.problem = 0, ""
        self._spare, self._filled_ms, self._now = float(AT_ONCE), -math.inf, -math.inf
        self._counts: deque[tuple[float, int]] = deque(maxlen=RATE_OVER)
        self._task: asyncio.Task[None] | None = None
        self._thresholds(router.policy, self.rate_per_s / 1000, self._system({}))  # compiled, and known to work
        router.batch_listeners.append(self._batch_ended)
        if promise is not None:
            router.listeners.append(self._request_ended)

    @property
    def rate_per_s(self) -> float:
        """Arrivals; half of what the main path carries before any were counted."""
        if self._rate is not None:
            return self._rate
        if len(self._counts) > 1 and self._counts[-1][1] > self._counts[0][1]:
            (first_ms, first), (last_ms, last) = self._counts[0], self._counts[-1]
            return 1000 * (last - first) / (last_ms - first_ms)
        main = self._system({}).main
        return 500 * main.rate_limit(main.largest)

    def _request_ended(self, request: Request) -> None:
        assert self.monitor is not None
        self.monitor.add(self.monitor.promise.kept(request))

    def _batch_ended(self, path: LivePath, size: int, began_ms: float, ended_ms: float, well: bool) -> None:
        learnt, self._now = self.learnt[path.name], ended_ms
        if not self._counts or ended_ms - self._counts[-1][0] >= RATE_EVERY_MS:
            self._counts.append((ended_ms, self.router.submitted + self.router.refused))
        if well:
            if learnt.ended(size, began_ms, ended_ms) and self._task is None and self._may(ended_ms):
                found = learnt.proposal()
                if found is not None:
                    self._spare -= 1
                    self._begin(path.name, found, "")
            return
        learnt.failed(began_ms, ended_ms)
        self._fall_back()

    def _may(self, now: float) -> bool:
        if self._spare < AT_ONCE:
            self._spare = min(self._spare + (now - self._filled_ms) / APART_MS, float(AT_ONCE))
        self._filled_ms = now
        return self._spare >= 1

    def _fall_back(self) -> None:
        """Times learnt from a path that is down now, and that did not hold for long, were those of its failing."""
        for path in self.router.paths:
            learnt = self.learnt[path.name]
            if self._task is None and not learnt.settled and not path.up(self._now):
                self._begin(path.name, learnt.good, "fell back")

    def _begin(self, name: str, correction: Correction, why: str) -> None:
        self._task = asyncio.get_running_loop().create_task(self._switch(name, correction, why))

    async def _switch(self, name: str, correction: Correction, why: str) -> None:
        """Thresholds for new times are made in a thread; then the router adopts both."""
        used, made = self.router.policy, self.router.policy
        try:
            system = self._system({name: correction})
            made = await asyncio.to_thread(self._thresholds, used, self.rate_per_s / 1000, system)
            self.problem = ""
        except Exception as error:  # noqa: BLE001 (the router goes on, by the thresholds it has)
            self.problem = first_line(error)
        finally:
            self._task = None
        learnt = self.learnt[name]
        if why or self.router.up()[name]:  # else it went down meanwhile
            before, after = (_factor(learnt, each) for each in (learnt.in_use, correction))
            why = why or ("slower" if after > before else "faster")
            self.switches.append(Switch(self._now, name, before, after, why))
            self.switched += 1
            learnt.adopt(correction)
            times = [each.times_ms(each.in_use) for each in self.learnt.values()]
            try:
                self.router.adopt(times, made)
            except WrongUsage as error:
                self.problem = str(error)
                self.router.adopt(times, used)
        self._fall_back()

    def _system(self, corrections: dict[str, Correction]) -> System:
        """The paths by times in use, but for those given."""
        paths = []
        for path in self.router.paths:
            learnt = self.learnt[path.name]
            times = learnt.times_ms(corrections.get(path.name, learnt.in_use))[: path.executor.largest]
            paths.append(table_path(path.name, times, servers=path.executor.servers))
        return System(paths[0], paths[1] if len(paths) > 1 else None)

    def snapshot(self) -> "Learnt":
        """What it thinks now."""
        paths = [_view(name, learnt) for name, learnt in self.learnt.items()]
        last = self.switches[-1] if self.switches else None
        now = self._now if last is not None else math.nan
        used = self.router.policy
        ago = now - last.at_ms if last is not None else math.nan
        seen = None if self.monitor is None else _promised(self.monitor)
        return Learnt(
            paths, used.name, dict(used.settings), self.rate_per_s, seen, last, ago, self.switched, self.problem
        )


@dataclass(frozen=True)
class PathView:
    """Times of a path over the planned ones: in use, and measured over the last batches with a 99 % interval; NaN
    before there are enough."""

    name: str
    in_use: float
    measured: float
    low: float
    high: float
    batches: int
    dropped: int

    @property
    def holds(self) -> bool:
        """Whether times in use are not known to be off."""
        near = math.exp(MARGIN)
        return math.isnan(self.measured) or (self.low <= self.in_use * near and self.high * near >= self.in_use)

    @property
    def line(self) -> str:
        if math.isnan(self.measured):
            return f"{self.name}: {number(self.in_use, 3)} x the planned time; {number(self.batches)} batches so far"
        low, high = number(self.low, 3), number(self.high, 3)
        told = f"{self.name}: {number(self.measured, 3)} x the planned time ({low} to {high})"
        return f"{told}, {number(self.in_use, 3)} in use; {number(self.batches)} batches"


@dataclass(frozen=True)
class PromiseView:
    """share: that is promised.  evidence: at 1 the alarm comes, on a scale of logarithms from 0."""

    within_ms: float
    share: float
    kept: int
    broken: int
    alarm: bool
    alarms: int
    evidence: float

    @property
    def line(self) -> str:
        total = self.kept + self.broken
        if not total:
            return f"promise: {format_percent(100 * self.share)} within {format_ms(self.within_ms)}; no request yet"
        found = f"{number(100 * self.kept / total, 4)} % of {number(total, 6)}"
        told = f"promise: {found} within {format_ms(self.within_ms)}, {format_percent(100 * self.share)} promised"
        return f"{told}; {'ALARM' if self.alarm else 'no alarm'}, {number(self.alarms)} so far"


@dataclass(frozen=True)
class Learnt:
    """What a learner thinks at a moment."""

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
    def state(self) -> Literal["good", "doubt", "bad"]:
        if self.promise is not None and self.promise.alarm:
            return "bad"
        return "good" if all(path.holds for path in self.paths) and not self.problem else "doubt"

    @property
    def verdict(self) -> str:
        if self.promise is not None and self.promise.alarm:
            return "The promise is broken."
        off = [path.name for path in self.paths if not path.holds]
        if off:
            return f"The times of {' and '.join(off)} no longer hold."
        return "The times in use hold." if self.promise is None else "No alarm, and the times in use hold."

    @property
    def lines(self) -> list[str]:
        """What is shown below the verdict."""
        shown = [
            f"{key.removesuffix('_ms')} {format_ms(value) if key.endswith('_ms') else value}"
            for key, value in self.settings.items()
        ]
        found = [path.line for path in self.paths]
        found.append(f"{self.policy}: {', '.join(shown)}, for {format_rate(self.rate_per_s)}")
        if self.promise is not None:
            found.append(self.promise.line)
        if self.last is not None:
            change = f"{self.last.path} {self.last.why}, {number(self.last.before, 3)} to {number(self.last.after, 3)}"
            found.append(f"last of {number(self.switched)} switches: {change}, {format_ms(self.ago_ms)} ago")
        if self.problem:
            found.append(f"thresholds kept: {self.problem}")
        return found

    def to_json(self) -> dict[str, Any]:
        promise = None if self.promise is None else vars(self.promise)
        return {
            "state": self.state,
            "verdict": self.verdict,
            "paths": {path.name: {k: v for k, v in vars(path).items() if k != "name"} for path in self.paths},
            "policy": {"name": self.policy, **self.settings},
            "rate_per_s": self.rate_per_s,
            "promise": promise,
            "last_switch": None if self.last is None else {**vars(self.last), "ago_ms": self.ago_ms},
            "switches": self.switched,
            "problem": self.problem or None,
        }

    def summary(self) -> str:
        return "\n".join([self.verdict, *self.lines])


def _factor(learnt: LearntTimes, correction: Correction) -> float:
    """The mean, in logs, over the sizes it was learnt from or all."""
    ratios = learnt.times_ms(correction) / learnt.planned_ms
    low, high = (correction.low, correction.high) if correction.high > 1 else (1, len(ratios))
    return float(np.exp(np.log(ratios[low - 1 : high]).mean()))


def _view(name: str, learnt: LearntTimes) -> PathView:
    found, counts = learnt.estimate(), (learnt.batches, learnt.dropped)
    if found is None:
        return PathView(name, _factor(learnt, learnt.in_use), math.nan, math.nan, math.nan, *counts)
    measured, width = math.exp(found.used + found.shift), math.exp(found.half_width)
    return PathView(name, math.exp(found.used), measured, measured / width, measured * width, *counts)


def _promised(monitor: PromiseMonitor) -> PromiseView:
    promise = monitor.promise
    evidence = max(math.log(monitor.evidence), 0.0) / math.log(monitor.needed)
    counts = monitor.kept, monitor.broken
    return PromiseView(promise.limit_ms(0), promise.share, *counts, monitor.alarm, monitor.alarms, evidence)
