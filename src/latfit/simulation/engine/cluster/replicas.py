"""Run several engines: replicas behind a router, or prefill on separate engines.

Replicas are equal and independent between arrivals (routes: `router`; changing numbers: `fleet`). In round-robin, users
of a closed loop stay on one replica. With separate prefill, one group of engines computes the prompt and the first
token, the KV cache travels (fixed time plus time per token), and another group decodes. A length rule may leave some
prompts to the decoding engines. Usage: docs/concepts/simulation.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from latfit.errors import WrongUsage
from latfit.simulation.engine.cluster.fleet import LOGGED, Autoscaler, Scaling, new_fleet, paid_ms
from latfit.simulation.engine.cluster.router import (
    FULL,
    LEAST_LOADED,
    PREDICTED,
    PREFIX,
    ROUND_ROBIN,
    SHORTEST_QUEUE,
    Router,
    serve_routed,
)
from latfit.simulation.engine.run import Counters, EngineRun, coming, finish, load_of, never_runs, run_of, serve
from latfit.simulation.engine.settings import EngineSettings, check_fits
from latfit.simulation.engine.state import (
    COUNTERS,
    ISSUED,
    PUSHED,
    SHARED,
    STATIC,
    STRIDE,
    STUCK,
    Limits,
    Load,
    SmallIntArray,
    State,
    engines_of,
    new_states,
)
from latfit.simulation.engine.step_cost import StepCosts
from latfit.stats import FloatArray, IntArray
from latfit.workload import Requests

ROUTES = {
    "round-robin": ROUND_ROBIN,
    "least-loaded": LEAST_LOADED,
    "shortest-queue": SHORTEST_QUEUE,
    "prefix": PREFIX,
    "predicted-latency": PREDICTED,
}


@dataclass(frozen=True)
class Routing:
    """Replicas behind a route.

    Attributes
    ----------
    prefix_share
        Share of a prompt cached on a replica that served the user before.
    scaling
        Schedule or rule that changes the number of replicas; `replicas` is the number at the start.
    start_up_ms
        Time from requesting a replica until it serves.
    """

    replicas: int = 1
    route: str = "round-robin"
    prefix_share: float = 0.5
    slack: int = 8
    scaling: Scaling | None = None
    start_up_ms: float = 0.0

    def __post_init__(self) -> None:
        if self.route not in ROUTES:
            raise WrongUsage(f"{self.route!r} is not a route", where="--set route", remedy=f"Take {', '.join(ROUTES)}.")
        if self.replicas < 1:
            raise WrongUsage(f"{self.replicas} replicas", where="--replicas", remedy="Give 1 or more.")
        if not 0 <= self.prefix_share < 1:
            raise WrongUsage(
                f"{self.prefix_share:g} of a prompt", where="--prefix-share", remedy="Give 0 or more, below 1."
            )
        rule = self.scaling
        if isinstance(rule, Autoscaler) and not rule.least <= self.replicas <= rule.most:
            raise WrongUsage(
                f"{self.replicas} replicas at the start, {rule.least} to {rule.most} allowed",
                where="--replicas",
                remedy="Start with a number that --autoscale allows.",
            )


def serve_replicas(
    requests: Requests,
    costs: StepCosts,
    settings: EngineSettings,
    routing: Routing,
    seed: int = 0,
    think_ms: FloatArray | None = None,
) -> EngineRun:
    """Run equal engines behind a router until all requests are done; `think_ms` and errors as in `serve`."""
    if routing.replicas == 1 and routing.route != "prefix" and routing.scaling is None:
        return serve(requests, costs, settings, seed, think_ms)
    check_fits(requests, settings)
    if routing.scaling is not None:
        if think_ms is not None:
            raise WrongUsage(
                "replicas come and go with requests that come by themselves, not with users who wait",
                where="--users",
                remedy="Give --rate or --arrivals.",
            )
        return _serve_scaled(requests, costs, settings, routing, seed)
    load = load_of(requests, settings, seed, think_ms)
    return _served(requests, load, costs, settings.limits(seed), routing)


def _served(
    requests: Requests, load: Load, costs: StepCosts, limits: Limits, routing: Routing, before: int = 0
) -> EngineRun:
    """Run a constant number of engines; `before` engines have used the first random streams."""
    first = coming(load)
    in_turn = routing.route == "round-robin" or (routing.replicas == 1 and routing.route != "prefix")
    _check_routed(limits, in_turn=in_turn)
    states = _idle(limits, load, routing.replicas, first, before)
    engines = engines_of(states)
    if in_turn:
        replica = _in_turn(limits, load, costs, engines, first)
    else:
        router = _router(routing, load, routing.replicas)
        if serve_routed(limits, load, costs, states, router) == STUCK:
            raise never_runs()
        replica = router.replica
    return run_of(requests, limits, engines, replica, load)


def _check_routed(limits: Limits, *, in_turn: bool) -> None:
    if limits.batching == STATIC and not in_turn:
        raise WrongUsage("static batches are routed in turn only", where="--set route", remedy="Take round-robin.")


def _idle(limits: Limits, load: Load, engines: int, first: SmallIntArray, before: int = 0) -> State:
    """Make engines with a shared source of the requests whose arrival is known."""
    source, counts = np.zeros(len(load.arrival), dtype=np.int32), np.zeros(COUNTERS, dtype=np.int64)
    source[: len(first)] = first
    counts[[PUSHED, ISSUED, STRIDE, SHARED]] = len(first), load.users, 1, 1
    return new_states(limits, load, range(before, before + engines), source, counts)


def _serve_scaled(
    requests: Requests, costs: StepCosts, settings: EngineSettings, routing: Routing, seed: int
) -> EngineRun:
    """Run a changing number of replicas; there are more places than replicas, because some still drain."""
    assert routing.scaling is not None
    limits, places, answer = settings.limits(seed), routing.scaling.most, FULL
    _check_routed(limits, in_turn=False)
    while answer == FULL:
        load = load_of(requests, settings, seed)
        states, router = _idle(limits, load, places, coming(load)), _router(routing, load, places)
        answer = serve_routed(limits, load, costs, states, router)
        places *= 2
    if answer == STUCK:
        raise never_runs()
    run = run_of(requests, limits, engines_of(states), router.replica, load)
    fleet = router.fleet
    seen = fleet.i[LOGGED]
    return replace(
        run,
        replica_ms=paid_ms(fleet, states, float(run.last_ms.max())),
        scaled=fleet.log[:, :seen].copy(),
    )


def _in_turn(limits: Limits, load: Load, costs: StepCosts, engines: Sequence[State], first: SmallIntArray) -> IntArray:
    """Serve request r on engine r modulo the number of engines, so that users stay on one engine.

    `first` are the requests whose arrival is known. Returns the engine (n,) of each request.
    """
    spread = min(len(engines), load.users) if load.users else len(engines)
    for k, state in enumerate(engines[:spread]):
        own = first[first % spread == k]
        state.inbox[: len(own)] = own
        state.i[[PUSHED, ISSUED, STRIDE]] = len(own), load.users + (k - load.users) % spread, spread
        if len(own):
            finish(limits, load, costs, state._replace(source=state.inbox, source_i=state.i))
    return np.arange(len(load.arrival)) % spread


def _router(routing: Routing, load: Load, places: int) -> Router:
    users = int(load.user.max()) + 1
    span = (float(load.arrival.min()), float(load.arrival.max()))
    return Router(
        route=ROUTES[routing.route],
        slack=routing.slack,
        share=routing.prefix_share,
        output=float(load.output.mean()),
        replica=np.zeros(len(load.arrival), dtype=np.int64),
        last=np.full(users, -1, dtype=np.int32),
        home=np.zeros((users, places), dtype=np.int8),
        fleet=new_fleet(routing.scaling, routing.start_up_ms, routing.replicas, places, span),
    )


ALL_PROMPTS = (0.0, math.inf)


@dataclass(frozen=True)
class Transfer:
    """Transfer of the KV cache from prefill to decode: a fixed time plus a time per prompt token.

    Only prompts whose length is within `prompts` (shortest, longest) are prefilled apart.
    """

    fixed_ms: float = 0.0
    ms_per_token: float = 0.0
    prompts: tuple[float, float] = ALL_PROMPTS

    def __post_init__(self) -> None:
        if not self.fixed_ms >= 0 or not self.ms_per_token >= 0:
            raise WrongUsage("a transfer below zero", where="--transfer", remedy="Give a time that is not negative.")

    def prefilled_apart(self, prompt_tokens: IntArray) -> NDArray[np.bool_]:
        """Mark the prompts (n,) that are prefilled apart."""
        shortest, longest = self.prompts
        return np.asarray((prompt_tokens >= shortest) & (prompt_tokens <= longest))


@dataclass(frozen=True, eq=False)
class Apart:
    """Result of separate prefill: runs of both groups (None if unused), and end-to-end request times (n,)."""

    prefill: EngineRun | None
    decode: EngineRun | None
    seen_ms: FloatArray
    start_ms: FloatArray
    first_ms: FloatArray
    last_ms: FloatArray
    begun_ms: FloatArray
    replica: IntArray

    def whole(self, requests: Requests) -> EngineRun:
        """Merge all engines into one run of the requests; token gaps are those of the decoding engines."""
        runs = [run for run in (self.prefill, self.decode) if run is not None]
        sizes = np.zeros(max(len(run.batch_sizes) for run in runs), dtype=np.int64)
        for run in runs:
            sizes[: len(run.batch_sizes)] += run.batch_sizes
        totals = {each.name: sum(getattr(run.counters, each.name) for run in runs) for each in fields(Counters)}
        run = EngineRun(
            requests=requests,
            seen_ms=self.seen_ms,
            start_ms=self.start_ms,
            first_ms=self.first_ms,
            last_ms=self.last_ms,
            counters=Counters(**totals),
            busy_ms=sum(run.busy_ms for run in runs),
            itl=runs[-1].itl,
            batch_sizes=sizes,
            timelines=tuple(line for run in runs for line in run.timelines),
            replica=self.replica,
            begun_ms=self.begun_ms,
        )
        return replace(run, replica_ms=len(run.timelines) * run.makespan_ms)


def serve_apart(
    requests: Requests,
    costs: tuple[StepCosts, StepCosts],
    settings: tuple[EngineSettings, EngineSettings],
    transfer: Transfer = Transfer(),
    seed: int = 0,
    routing: tuple[Routing, Routing] = (Routing(), Routing()),
) -> Apart:
    """Run the prefill engines, then the decode engines; costs, settings and routing are pairs in that order."""
    apart = transfer.prefilled_apart(requests.prompt_tokens)
    seen, start, first, last, begun = np.full((5, len(requests)), np.nan)
    arrived, replica = requests.arrival_ms.copy(), np.zeros(len(requests), dtype=np.int64)
    prefill = decode = None
    if apart.any():
        given = requests.select(np.flatnonzero(apart))
        alone = replace(given, output_tokens=np.ones(len(given), dtype=np.int64))
        prefill = serve_replicas(alone, costs[0], settings[0], routing[0], seed)
        seen[apart], start[apart], replica[apart] = prefill.seen_ms, prefill.start_ms, prefill.replica
        first[apart], last[apart], begun[apart] = prefill.first_ms, prefill.last_ms, prefill.start_ms
        arrived[apart] = prefill.last_ms + transfer.fixed_ms + transfer.ms_per_token * given.prompt_tokens
    rest = np.flatnonzero(~apart | (requests.output_tokens > 1))
    if len(rest):
        rows = rest[np.argsort(arrived[rest], kind="stable")]
        handed = replace(requests.select(rows), arrival_ms=np.ascontiguousarray(arrived[rows]))
        check_fits(handed, settings[1])
        load = _given(handed, settings[1], seed, apart[rows])
        decode = _served(handed, load, costs[1], settings[1].limits(seed), routing[1], routing[0].replicas)
        last[rows], begun[rows] = decode.last_ms, decode.start_ms
        own = ~apart[rows]
        seen[rows[own]], start[rows[own]], first[rows[own]] = (
            each[own] for each in (decode.seen_ms, decode.start_ms, decode.first_ms)
        )
        replica[rows[own]] = routing[0].replicas + decode.replica[own]
    return Apart(prefill, decode, seen, start, first, last, begun, replica)


def _given(requests: Requests, settings: EngineSettings, seed: int, apart: NDArray[np.bool_]) -> Load:
    """Make the load of the decode engines: requests in `apart` (n,) have their prompt and first token already."""
    load = load_of(requests, replace(settings, prefix_cache=False), seed)
    cached = np.where(apart, requests.prompt_tokens, load.cached).astype(np.int32)
    return load._replace(cached=cached, given=apart.astype(np.int32))
