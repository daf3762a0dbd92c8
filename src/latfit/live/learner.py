"""Adapt a running router: learn batch times, choose thresholds for them, and monitor a latency promise.

`Learner(router, Promise(50.0))` follows every batch and request. A thread chooses thresholds for changed times. See
docs/how-to/route-live.md.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from latfit.errors import WrongUsage, first_line
from latfit.live.learned_times import LearnedTimes
from latfit.live.path import LivePath
from latfit.live.promise import Promise, PromiseMonitor
from latfit.live.router import Router
from latfit.live.waiting import Request
from latfit.policies import Limits, Policy, default_cutoff_ms, default_threshold, policy as policies
from latfit.simulation import Options, System, path_times, simulate, table_path
from latfit.workload import OpenLoad, Poisson

MAX_SWITCHES, SWITCHES_WITHIN_MS = 6, 180_000.0
COUNT_EVERY_MS, MAX_COUNTS = 250.0, 120  # arrivals are counted so often; the rate is that of the last 30 s

Thresholds = Callable[[Policy, float, System], Policy]
"""Return the policy to use, given the current one, arrivals per ms, and the paths with the learned times."""


@dataclass(frozen=True)
class BestForTail:
    """Choose thresholds of cutoff and three-stage by the least simulated percentile, and solve optimal anew."""

    share: float = 0.99  # percentile
    requests: int = 10_000  # in each simulation
    worth: float = 0.05  # relative gain below which the current thresholds stay

    def __call__(self, policy: Policy, rate: float, system: System) -> Policy:
        times, limits = path_times(system), Limits(policy.main_largest, policy.side_largest)
        if policy.name == "optimal":
            from latfit.queueing import solve_optimal

            table = solve_optimal(rate, times.main[: limits.main])
            return replace(policies.optimal(table, limits), ageing_ms=policy.ageing_ms)
        first, last = float(times.main[0]) / 8, 4 * float(times.main[limits.main - 1])
        cutoffs = [default_cutoff_ms(rate, times), *np.geomspace(first, last, 10).tolist()]
        if policy.name == "cutoff":
            candidates = [policies.cutoff(cutoff, limits) for cutoff in cutoffs]
        elif policy.name == "three-stage":
            thresholds = {1, default_threshold(times), min(limits.main, limits.side + 1)}
            candidates = [policies.three_stage(b, cutoff, limits) for b in sorted(thresholds) for cutoff in cutoffs]
        else:
            return policy  # no thresholds that depend on times
        load, options = OpenLoad(Poisson(rate)), Options(self.requests, replications=1)

        def tail(candidate: Policy) -> float:
            return simulate(candidate, system, load, options).percentile_ms(self.share)

        tails = [tail(replace(candidate, ageing_ms=policy.ageing_ms)) for candidate in candidates]
        best = int(np.argmin(tails))
        is_better = tails[best] < (1 - self.worth) * tail(policy)
        return replace(candidates[best], ageing_ms=policy.ageing_ms) if is_better else policy


@dataclass(frozen=True)
class Switch:
    """Factors on the planned times that the router adopted."""

    at_ms: float
    path: str
    before: float
    after: float


class Learner:
    """Learn batch times of a router's paths and adapt its thresholds.

    thresholds: `BestForTail` by default; what it raises for the planned times is raised.
    """

    def __init__(
        self,
        router: Router,
        promise: Promise | None = None,
        *,
        thresholds: Thresholds | None = None,
    ) -> None:
        self.router = router
        self.monitor = None if promise is None else PromiseMonitor(promise)
        self._thresholds = thresholds or BestForTail(promise.share if promise else 0.99)
        self.times = {path.name: LearnedTimes(path.times_ms[1:]) for path in router.paths}
        self.switches: deque[Switch] = deque(maxlen=20)
        self.switched, self.problem = 0, ""  # how many switches; why thresholds could not be chosen the last time
        self._counts: deque[tuple[float, int]] = deque(maxlen=MAX_COUNTS)
        self._task: asyncio.Task[None] | None = None
        self._thresholds(router.policy, self.rate_per_s / 1000, self._system({}))  # compiled, and known to work
        router.batch_listeners.append(self.add_batch)
        if promise is not None:
            router.listeners.append(self.add_request)

    @property
    def rate_per_s(self) -> float:
        """Return the arrival rate of the last 30 s; half the main path's capacity at first."""
        if len(self._counts) > 1 and self._counts[-1][1] > self._counts[0][1]:
            (first_ms, first), (last_ms, last) = self._counts[0], self._counts[-1]
            return 1000 * (last - first) / (last_ms - first_ms)
        main = self._system({}).main
        return 500 * main.rate_limit(main.largest)

    def add_request(self, request: Request) -> None:
        assert self.monitor is not None
        self.monitor.add(self.monitor.promise.kept(request))

    def add_batch(self, path: LivePath, size: int, began_ms: float, ended_ms: float, well: bool) -> None:
        times = self.times[path.name]
        if not self._counts or ended_ms - self._counts[-1][0] >= COUNT_EVERY_MS:
            self._counts.append((ended_ms, self.router.submitted + self.router.refused))
        if not well:
            times.forget_evidence()
        elif times.add_batch(size, ended_ms - began_ms) and self._task is None:
            recent = sum(ended_ms - switch.at_ms < SWITCHES_WITHIN_MS for switch in self.switches)
            if recent < MAX_SWITCHES and (ln_factor := times.propose()) is not None:
                self._task = asyncio.get_running_loop().create_task(self._switch(path.name, ln_factor, ended_ms))

    async def _switch(self, name: str, ln_factor: float, at_ms: float) -> None:
        policy = chosen = self.router.policy
        try:
            system = self._system({name: ln_factor})
            chosen = await asyncio.to_thread(self._thresholds, policy, self.rate_per_s / 1000, system)
            self.problem = ""
        except Exception as error:  # noqa: BLE001 (the router keeps its thresholds)
            self.problem = first_line(error)
        finally:
            self._task = None
        times = self.times[name]
        if not self.router.up()[name]:  # it went down meanwhile
            return
        self.switches.append(Switch(at_ms, name, math.exp(times.ln_factor), math.exp(ln_factor)))
        self.switched += 1
        times.adopt(ln_factor)
        tables = [each.times_ms(each.ln_factor) for each in self.times.values()]
        try:
            self.router.adopt(tables, chosen)
        except WrongUsage as error:
            self.problem = str(error)
            self.router.adopt(tables, policy)

    def _system(self, ln_factors: dict[str, float]) -> System:
        paths = []
        for path in self.router.paths:
            times = self.times[path.name]
            table = times.times_ms(ln_factors.get(path.name, times.ln_factor))[: path.executor.largest]
            paths.append(table_path(path.name, table, servers=path.executor.servers))
        return System(*paths)
