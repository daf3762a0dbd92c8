"""Run several engines: replicas behind a router, or prefill on separate engines."""

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.errors import WrongUsage, refuse
from latfit.simulation.engine import router as core, state as st
from latfit.simulation.engine.prefix_cache import forget
from latfit.simulation.engine.run import Counters, EngineRun, load_of, never_runs, run_of, serve_in_turn
from latfit.simulation.engine.settings import EngineSettings, check_fits
from latfit.simulation.engine.state import Limits, Load, State, engines_of, new_states
from latfit.simulation.engine.step_cost import StepCosts
from latfit.stats import FloatArray
from latfit.units import parse_duration_ms
from latfit.workload import Requests

ROUTES = {
    "round-robin": core.ROUND_ROBIN,
    "least-loaded": core.LEAST_LOADED,
    "shortest-queue": core.SHORTEST_QUEUE,
    "prefix": core.PREFIX,
    "predicted-latency": core.PREDICTED,
}
METRICS = ("requests", "waiting", "kv")
TOLERANCE = 0.1  # relative deviation of the autoscaler's metric from its target without scaling


@dataclass(frozen=True)
class Schedule:
    """Scheduled replicas: `replicas[i]` from moments_ms[i] on, counted from the first arrival."""

    moments_ms: tuple[float, ...]
    replicas: tuple[int, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip((-1.0, *self.moments_ms), self.moments_ms, strict=False))
        wrong = self.moments_ms[:1] != (0.0,) or not rising or len(self.moments_ms) != len(self.replicas)
        remedy = "Give t_s from 0 on, in rising order, and replicas at each."
        refuse(wrong, "the moments do not rise from 0 on", "--set replicas_at", remedy)
        refuse(min(self.replicas) < 1, "a time without any replica", "--set replicas_at", "Give 1 or more.")

    @property
    def most(self) -> int:
        return max(self.replicas)

    def to_json(self) -> dict[str, Any]:
        return {"replicas_at": self.steps_s}

    @property
    def steps_s(self) -> list[tuple[float, int]]:
        """Steps of the schedule as (start in s, replicas)."""
        return [(at / 1e3, count) for at, count in zip(self.moments_ms, self.replicas, strict=True)]


@dataclass(frozen=True)
class Autoscaler:
    """Keep a metric at `target` per replica, with `least` to `most` replicas."""

    metric: str
    target: float
    most: int
    least: int = 1
    every_ms: float = 15_000.0
    cool_down_ms: float = 300_000.0

    def __post_init__(self) -> None:
        metric, least, most, where = self.metric, self.least, self.most, "--autoscale"
        wrong = metric not in METRICS or not 0 < self.target < math.inf or (metric == "kv" and self.target > 1)
        refuse(wrong, f"no target of {', '.join(METRICS)}", where, f"Write {EXAMPLES}.")
        refuse(not 1 <= least <= most, f"{least} to {most} replicas", where, "Write 1..8, the least first.")
        wrong = not self.every_ms > 0 or not self.cool_down_ms >= 0
        refuse(wrong, "an interval of zero or a time below", where, "Write requests:20:1..8:15s:5min.")

    def to_json(self) -> dict[str, Any]:
        """Return the rule as `parse_autoscaler` reads it."""
        times = f"{self.every_ms / 1e3:g}s:{self.cool_down_ms / 1e3:g}s"
        return {"autoscale": f"{self.metric}:{self.target:g}:{self.least}..{self.most}:{times}"}


Scaling = Schedule | Autoscaler

RULE = re.compile(r"(\w+):(\d+(?:\.\d*)?)(%?):(\d+)\.\.(\d+)(?::([^:]+))?(?::([^:]+))?")
EXAMPLES = "requests:20:1..8, waiting:2:1..8 or kv:70%:1..8"


def parse_autoscaler(text: str) -> Autoscaler:
    """Parse `requests:20:1..8`, or `kv:70%:1..8:15s:5min` with interval and scale-down window. Raises WrongUsage."""
    found = RULE.fullmatch(text.strip())
    if found is None or (found[3] and found[1] != "kv"):
        raise WrongUsage(f"{text!r} is no rule", where="--autoscale", remedy=f"Write {EXAMPLES}.")
    metric, target, percent, least, most, every, cool = found.groups()
    times = {"every_ms": every, "cool_down_ms": cool}
    given = {name: parse_duration_ms(value, option="--autoscale") for name, value in times.items() if value is not None}
    return Autoscaler(metric, float(target) / (100 if percent else 1), int(most), int(least), **given)


@dataclass(frozen=True)
class Routing:
    """Replicas behind a route."""

    replicas: int = 1
    route: str = "round-robin"
    prefix_share: float = 0.5  # share of a prompt cached on a replica that served the user before
    slack: int = 8
    # Schedule or rule that changes the number of replicas; `replicas` is the number at the start
    scaling: Scaling | None = None
    start_up_ms: float = 0.0  # time from requesting a replica until it serves

    def __post_init__(self) -> None:
        routes = ", ".join(ROUTES)
        refuse(self.route not in ROUTES, f"{self.route!r} is not a route", "--set route", f"Take {routes}.")
        refuse(self.replicas < 1, f"{self.replicas} replicas", "--replicas", "Give 1 or more.")
        share = f"{self.prefix_share:g} of a prompt"
        refuse(not 0 <= self.prefix_share < 1, share, "--set prefix_share", "Give 0 or more, below 1.")
        rule = self.scaling
        if isinstance(rule, Autoscaler):
            found = f"{self.replicas} replicas at the start, {rule.least} to {rule.most} allowed"
            outside = not rule.least <= self.replicas <= rule.most
            refuse(outside, found, "--replicas", "Start with a number that --autoscale allows.")


def serve_replicas(
    requests: Requests,
    costs: StepCosts,
    settings: EngineSettings,
    routing: Routing,
    seed: int = 0,
    think_ms: FloatArray | None = None,
) -> EngineRun:
    """Run equal engines behind a router until all requests are done; `think_ms` and errors as in `serve`."""
    check_fits(requests, settings)
    closed = routing.scaling is not None and think_ms is not None
    found = "replicas come and go with requests that come by themselves, not with users who wait"
    refuse(closed, found, "--users", "Give --rate or --arrivals.")
    load = load_of(requests, settings, seed, think_ms)
    return _served(requests, load, costs, settings.limits(seed), routing)


def _served(
    requests: Requests, load: Load, costs: StepCosts, limits: Limits, routing: Routing, before: int = 0
) -> EngineRun:
    scaling, alone = routing.scaling, routing.replicas == 1 and routing.route != "prefix"
    if scaling is None and (routing.route == "round-robin" or alone):
        return serve_in_turn(requests, load, costs, limits, range(before, before + routing.replicas))
    places, crowded = routing.replicas if scaling is None else scaling.most, True
    while crowded:  # more places than replicas are needed while some still drain
        whole = load._replace(cached=load.cached.copy())  # the router changes it
        states, router, fleet = _routed(limits, whole, costs, routing, places, before)
        places, crowded = 2 * places, fleet.needs_more_places
    run = run_of(requests, limits, engines_of(states), router.replica, load)
    if scaling is None:
        return run
    return replace(run, paid_ms=fleet.paid_until(float(run.last_ms.max())), scaled=np.array(fleet.log).T)


def _routed(
    limits: Limits, load: Load, costs: StepCosts, routing: Routing, places: int, before: int
) -> tuple[State, core.Router, "Fleet"]:
    """Run engines behind a router until all is served, or the router finds no place for a replica."""
    static = limits.batching == st.STATIC
    refuse(static, "static batches are routed in turn only", "--set route", "Take round-robin.")
    users, states = int(load.user.max()) + 1, new_states(limits, load, range(before, before + places))
    router = core.Router(
        route=ROUTES[routing.route],
        slack=routing.slack,
        share=routing.prefix_share,
        output=float(load.output.mean()),
        replica=np.zeros(len(load.arrival), dtype=np.int64),
        last=np.full(users, -1, dtype=np.int32),
        home=np.zeros((users, places), dtype=np.int8),
        up=np.zeros(places, dtype=np.int8),
        turn=np.array([places - 1]),
    )
    fleet = Fleet(routing, limits, states, router.up, float(load.arrival.min()))
    answer = core.CHANGES
    while answer == core.CHANGES and not fleet.needs_more_places:
        change_ms = fleet.next_change()
        answer = core.serve_routed(limits, load, costs, states, router, change_ms)
        if answer == core.CHANGES:
            fleet.change(change_ms)
    if answer == st.STUCK:
        raise never_runs()
    return states, router, fleet


@dataclass
class Replica:
    number: int  # in the order of their start
    since_ms: float
    ready_ms: float
    ended_ms: float = math.inf  # when the router stopped to send it requests


@dataclass
class Fleet:
    """Replicas that come and go by a schedule or a rule, each in a place of the router."""

    routing: Routing
    limits: Limits
    states: State
    up: NDArray[np.int8]  # 1 where a place takes requests
    start_ms: float
    decisions: int = 0  # moments of the schedule, or evaluations of the rule, so far
    paid_ms: float = 0.0  # of replicas that are gone
    needs_more_places: bool = False  # whether there was no place for a replica

    def __post_init__(self) -> None:
        self.requested = self.started = self.routing.replicas
        self.replicas = {place: Replica(place, self.start_ms, self.start_ms) for place in range(self.requested)}
        self.up[: self.requested] = 1
        self.recent = list[int]()  # recommendations
        self.log = [(0.0, self.requested, self.requested)]  # (time, replicas serving, replicas requested)

    def next_change(self) -> float:
        return min([self._decision_ms(), *(self.replicas[place].ready_ms for place in self._starting())])

    def change(self, now: float) -> None:
        """Apply the changes at `now`; all engines have advanced to it."""
        requested, scaling = self.requested, self.routing.scaling
        if self._decision_ms() <= now:
            self.decisions += 1
            requested = scaling.replicas[self.decisions] if isinstance(scaling, Schedule) else self._recommended()
        while self.requested > requested:
            self._remove(now)
        while self.requested < requested and not self.needs_more_places:
            self._start(now)
        for place in self._starting():
            self.up[place] = self.replicas[place].ready_ms <= now
        found = int(self.up.sum()), self.requested
        if self.log[-1][1:] != found:
            if self.log[-1][0] >= now:
                self.log.pop()
            self.log.append((now, *found))

    def paid_until(self, end_ms: float) -> float:
        """Return the paid time of all replicas until the end of a run."""
        return self.paid_ms + sum(self._drained(place, end_ms) - each.since_ms for place, each in self.replicas.items())

    def _decision_ms(self) -> float:
        scaling = self.routing.scaling
        if isinstance(scaling, Schedule):
            return next(iter(scaling.moments_ms[self.decisions + 1 :]), math.inf)
        return math.inf if scaling is None else (self.decisions + 1) * scaling.every_ms

    def _starting(self) -> list[int]:
        return [place for place, each in self.replicas.items() if not self.up[place] and each.ended_ms == math.inf]

    def _drained(self, place: int, end_ms: float) -> float:
        ended_ms = self.replicas[place].ended_ms
        return end_ms if ended_ms == math.inf else max(ended_ms, float(self.states.f[place, st.BUSY_UNTIL]))

    def _in_system(self, place: int) -> tuple[int, int]:
        """Return the requests of a place that wait and that run."""
        i = self.states.i[place]
        return int(i[st.WAITING] + i[st.PUSHED] - i[st.SEEN]), int(i[st.COUNT])

    def _recommended(self) -> int:
        rule, total = self.routing.scaling, 0.0
        assert isinstance(rule, Autoscaler)
        for place in np.flatnonzero(self.up).tolist():
            waiting, running = self._in_system(place)
            if rule.metric == "kv":
                total += 1 - int(self.states.i[place, st.FREE]) / self.limits.blocks
            else:
                total += waiting + (running if rule.metric == "requests" else 0)
        found = math.ceil(total / rule.target - 1e-9)
        if abs(total / (rule.target * self.requested) - 1.0) <= TOLERANCE:
            found = self.requested
        self.recent.append(min(max(found, rule.least), rule.most))
        highest = max(self.recent[-1 - math.floor(rule.cool_down_ms / rule.every_ms) :])
        return max(self.recent[-1], min(highest, self.requested))

    def _remove(self, now: float) -> None:
        """Remove one replica: one that still starts, else the youngest."""
        starting = self._starting()
        place = max(starting or np.flatnonzero(self.up).tolist(), key=lambda each: self.replicas[each].number)
        self.requested -= 1
        if starting:
            self.paid_ms += now - self.replicas.pop(place).since_ms
        else:
            self.up[place], self.replicas[place].ended_ms = 0, now

    def _start(self, now: float) -> None:
        for place in range(len(self.up)):
            if place in self.replicas:
                drained_ms = self._drained(place, math.inf)
                if drained_ms <= now and not any(self._in_system(place)):
                    self.paid_ms += drained_ms - self.replicas.pop(place).since_ms
            if place not in self.replicas:
                forget(self.states, place)
                self.replicas[place] = Replica(self.started, now, now + self.routing.start_up_ms)
                self.started += 1
                self.requested += 1
                return
        self.needs_more_places = True


@dataclass(frozen=True)
class Transfer:
    """Transfer of the KV cache from prefill to decode."""

    fixed_ms: float = 0.0
    ms_per_token: float = 0.0

    def __post_init__(self) -> None:
        wrong = not self.fixed_ms >= 0 or not self.ms_per_token >= 0
        refuse(wrong, "a transfer below zero", "--transfer", "Give a time that is not negative.")


def serve_apart(
    requests: Requests,
    costs: tuple[StepCosts, StepCosts],
    settings: tuple[EngineSettings, EngineSettings],
    transfer: Transfer = Transfer(),
    seed: int = 0,
    routing: tuple[Routing, Routing] = (Routing(), Routing()),
) -> EngineRun:
    """Run the prefill engines, then the decode engines; costs, settings and routing are pairs."""
    alone = replace(requests, output_tokens=np.ones(len(requests), dtype=np.int64))
    prefill = serve_replicas(alone, costs[0], settings[0], routing[0], seed)
    last, begun, runs = prefill.last_ms.copy(), prefill.start_ms.copy(), [prefill]
    arrived = prefill.last_ms + transfer.fixed_ms + transfer.ms_per_token * requests.prompt_tokens
    order = np.argsort(arrived, kind="stable")
    rows = order[requests.output_tokens[order] > 1]
    if len(rows):
        handed = replace(requests.select(rows), arrival_ms=arrived[rows])
        check_fits(handed, settings[1])
        # Requests come with their prompt cached and their first token.
        prompt = handed.prompt_tokens.astype(np.int32)
        load = load_of(handed, replace(settings[1], prefix_cache=False), seed)
        load = load._replace(cached=prompt, given=np.ones_like(prompt))
        decode = _served(handed, load, costs[1], settings[1].limits(seed), routing[1], routing[0].replicas)
        last[rows], begun[rows] = decode.last_ms, decode.start_ms
        runs.append(decode)
    sizes = np.zeros(max(len(run.batch_sizes) for run in runs), dtype=np.int64)
    for run in runs:
        sizes[: len(run.batch_sizes)] += run.batch_sizes
    return replace(
        prefill,
        requests=requests,
        last_ms=last,
        counters=Counters(*np.sum([run.counters for run in runs], axis=0).tolist()),
        busy_ms=sum(run.busy_ms for run in runs),
        itl=runs[-1].itl,
        batch_sizes=sizes,
        timelines=tuple(line for run in runs for line in run.timelines),
        begun_ms=begun,
    )
