"""Several engines: replicas behind a router, and prefill apart from decoding.

Replicas are equal and independent between arrivals. At each arrival every replica is brought up to that moment, and the
router chooses. round-robin: in turn. least-loaded: the one with the fewest requests in it, the first of equals. prefix:
the one that a request's user last went to, whose cache holds the start of the prompt, unless that one has `slack`
requests more than the least loaded (then that one, which has the prefix from then on).

Apart: one engine prefills and gives the first token; the keys and values travel at `transfer_ms_per_token`; another
engine decodes the rest. The decoding engine knows the request from the moment its cache has arrived. This is also how a
CPU prefills for a GPU: only the step costs of the first engine differ.
"""

from dataclasses import dataclass, fields, replace

import numpy as np

from latfit.errors import WrongUsage
from latfit.simulation.engine.loop import advance
from latfit.simulation.engine.run import Counters, EngineRun, finish, load_of, run_of, serve
from latfit.simulation.engine.settings import EngineSettings, check_fits
from latfit.simulation.engine.state import COUNT, PUSHED, SEEN, WAITING, Limits, Load, State, new_state
from latfit.simulation.engine.step_cost import StepCosts
from latfit.stats import FloatArray
from latfit.workload import Requests

ROUTES = ("round-robin", "least-loaded", "prefix")


@dataclass(frozen=True)
class Routing:
    """replicas behind a route; prefix_share: of a prompt that a replica holds which served the user before."""

    replicas: int = 1
    route: str = "round-robin"
    prefix_share: float = 0.5
    slack: int = 8

    def __post_init__(self) -> None:
        if self.route not in ROUTES:
            raise WrongUsage(f"{self.route!r} is not a route", where="--route", remedy=f"One of {', '.join(ROUTES)}.")
        if self.replicas < 1 or not 0 <= self.prefix_share < 1:
            raise WrongUsage(
                f"{self.replicas} replicas, {self.prefix_share:g} of a prompt shared",
                where="--replicas",
                remedy="Give one replica or more, and a share below 1.",
            )


def serve_replicas(
    requests: Requests, costs: StepCosts, settings: EngineSettings, routing: Routing, seed: int = 0
) -> EngineRun:
    """Run equal engines behind a router until every request is done; raises as `serve` does."""
    if routing.replicas == 1 and routing.route != "prefix":
        return serve(requests, costs, settings, seed)
    if settings.batching == "static" and routing.route != "round-robin":
        raise WrongUsage("static batches are routed in turn only", where="--route", remedy="Take round-robin.")
    check_fits(requests, settings)
    limits, load = settings.limits(seed), load_of(requests, settings, seed)
    states = [new_state(limits, load, engine=i) for i in range(routing.replicas)]
    replica = np.zeros(len(requests), dtype=np.int64)
    router = _Router(routing, int(requests.user_id.max(initial=0)) + 1)
    for r, moment in enumerate(requests.arrival_ms.tolist()):
        if routing.route != "round-robin":
            for state in states:
                _bring_up(limits, load, costs, state, moment)
        chosen, held = router.choose(r, int(requests.user_id[r]), states)
        if held:
            share = int(routing.prefix_share * requests.prompt_tokens[r]) // settings.block_size
            load.cached[r] = max(int(load.cached[r]), share * settings.block_size)
        replica[r] = chosen
        _push(states[chosen], r)
    for state in states:
        if state.i[PUSHED]:
            finish(limits, load, costs, state)
    return run_of(requests, limits, states, replica)


class _Router:
    """Who goes where, and what is known of it."""

    def __init__(self, routing: Routing, users: int) -> None:
        self.routing = routing
        self.home: list[set[int]] = [set() for _ in range(users)]
        self.last = [-1] * users

    def choose(self, r: int, user: int, states: list[State]) -> tuple[int, bool]:
        """(replica, whether it holds the start of the prompt)."""
        if self.routing.route == "round-robin":
            return r % len(states), False
        loads = [_in_system(state) for state in states]
        least = int(np.argmin(loads))
        if self.routing.route == "least-loaded":
            return least, False
        before = self.last[user]
        chosen = before if before >= 0 and loads[before] <= loads[least] + self.routing.slack else least
        held = chosen in self.home[user]
        self.last[user] = chosen
        self.home[user].add(chosen)
        return chosen, held


def _in_system(state: State) -> int:
    """Requests that wait or run, those that are pushed but not seen yet included."""
    return int(state.i[WAITING] + state.i[COUNT] + state.i[PUSHED] - state.i[SEEN])


def _bring_up(limits: Limits, load: Load, costs: StepCosts, state: State, moment: float) -> None:
    if state.i[PUSHED]:
        advance(limits, load, costs, state, moment)


def _push(state: State, r: int) -> None:
    state.inbox[state.i[PUSHED]] = r
    state.i[PUSHED] += 1


@dataclass(frozen=True)
class Transfer:
    """Keys and values on their way from the engine that prefilled: fixed, and by token of the prompt."""

    fixed_ms: float = 0.0
    ms_per_token: float = 0.0

    def __post_init__(self) -> None:
        if not self.fixed_ms >= 0 or not self.ms_per_token >= 0:
            raise WrongUsage("a transfer below zero", where="--transfer", remedy="Give a time that is not negative.")


@dataclass(frozen=True, eq=False)
class Apart:
    """What came of prefill and decoding apart: both engines' runs, and the requests from end to end."""

    prefill: EngineRun
    decode: EngineRun | None
    first_ms: FloatArray
    last_ms: FloatArray

    def whole(self, requests: Requests) -> EngineRun:
        """Both engines as one run of the requests; gaps between tokens are those of the engine that decodes."""
        runs = [self.prefill] if self.decode is None else [self.prefill, self.decode]
        sizes = np.zeros(max(len(run.batch_sizes) for run in runs), dtype=np.int64)
        for run in runs:
            sizes[: len(run.batch_sizes)] += run.batch_sizes
        totals = {each.name: sum(getattr(run.counters, each.name) for run in runs) for each in fields(Counters)}
        return EngineRun(
            requests=requests,
            start_ms=self.prefill.start_ms,
            first_ms=self.first_ms,
            last_ms=self.last_ms,
            counters=Counters(**totals),
            busy_ms=sum(run.busy_ms for run in runs),
            itl=runs[-1].itl,
            batch_sizes=sizes,
            timelines=tuple(line for run in runs for line in run.timelines),
            replica=np.zeros(len(requests), dtype=np.int64),
        )


def serve_apart(
    requests: Requests,
    costs: tuple[StepCosts, StepCosts],
    settings: tuple[EngineSettings, EngineSettings],
    transfer: Transfer = Transfer(),
    seed: int = 0,
) -> Apart:
    """Run the engine that prefills, then the one that decodes; costs and settings: (of prefill, of decode)."""
    alone = replace(requests, output_tokens=np.ones(len(requests), dtype=np.int64))
    prefill = serve(alone, costs[0], settings[0], seed)
    rest = np.flatnonzero(requests.output_tokens > 1)
    if not len(rest):
        return Apart(prefill, None, prefill.first_ms, prefill.last_ms)
    arrived = prefill.last_ms[rest] + transfer.fixed_ms + transfer.ms_per_token * requests.prompt_tokens[rest]
    order = np.argsort(arrived, kind="stable")
    rows = rest[order]
    handed = replace(requests.select(rows), arrival_ms=np.ascontiguousarray(arrived[order]))
    check_fits(handed, settings[1])
    limits, load = settings[1].limits(seed), _given(handed, settings[1], seed)
    state = new_state(limits, load, np.arange(len(rows), dtype=np.int32), engine=1)
    finish(limits, load, costs[1], state)
    decode = run_of(handed, limits, [state], np.zeros(len(rows), dtype=np.int64))
    last = prefill.last_ms.copy()
    last[rows] = decode.last_ms
    return Apart(prefill, decode, prefill.first_ms, last)


def _given(requests: Requests, settings: EngineSettings, seed: int) -> Load:
    """Requests whose prompt is computed and whose first token is there."""
    load = load_of(requests, settings, seed)
    return load._replace(cached=requests.prompt_tokens.astype(np.int32), given=np.ones(len(requests), dtype=np.int32))
