"""Run several engines: replicas behind a router, or prefill on separate engines.

Replicas are equal and independent between arrivals (routes: `router`; changing numbers: `fleet`). In round-robin, users
of a closed loop stay on one replica. With separate prefill, one group of engines computes the prompt and the first
token, the KV cache travels (fixed time plus time per token), and another group decodes. A length rule may leave some
prompts to the decoding engines. Usage: docs/concepts/simulation.md.
"""

import math
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from latfit.errors import refuse
from latfit.simulation.engine.cluster.fleet import CROWDED, LOGGED, Autoscaler, Scaling, new_fleet, paid_ms
from latfit.simulation.engine.cluster.router import (
    LEAST_LOADED,
    PREDICTED,
    PREFIX,
    ROUND_ROBIN,
    SHORTEST_QUEUE,
    Router,
    serve_routed,
)
from latfit.simulation.engine.run import Counters, EngineRun, idle_engines, load_of, never_runs, run_of, serve_in_turn
from latfit.simulation.engine.settings import EngineSettings, check_fits
from latfit.simulation.engine.state import (
    STATIC,
    STUCK,
    Limits,
    Load,
    State,
    engines_of,
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
        refuse(not 0 <= self.prefix_share < 1, share, "--prefix-share", "Give 0 or more, below 1.")
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
    if routing.scaling is not None:
        found = "replicas come and go with requests that come by themselves, not with users who wait"
        refuse(think_ms is not None, found, "--users", "Give --rate or --arrivals.")
        return _serve_scaled(requests, costs, settings, routing, seed)
    load = load_of(requests, settings, seed, think_ms)
    return _served(requests, load, costs, settings.limits(seed), routing)


def _served(
    requests: Requests, load: Load, costs: StepCosts, limits: Limits, routing: Routing, before: int = 0
) -> EngineRun:
    """Run a constant number of engines; `before` engines have used the first random streams."""
    if routing.route == "round-robin" or (routing.replicas == 1 and routing.route != "prefix"):
        return serve_in_turn(requests, load, costs, limits, range(before, before + routing.replicas))
    states, router = _routed(limits, load, costs, routing, routing.replicas, before)
    return run_of(requests, limits, engines_of(states), router.replica, load)


def _serve_scaled(
    requests: Requests, costs: StepCosts, settings: EngineSettings, routing: Routing, seed: int
) -> EngineRun:
    """Run a changing number of replicas; there are more places than replicas, because some still drain."""
    assert routing.scaling is not None
    limits, places = settings.limits(seed), routing.scaling.most
    while True:
        load = load_of(requests, settings, seed)
        states, router = _routed(limits, load, costs, routing, places)
        if not router.fleet.i[CROWDED]:
            break
        places *= 2
    run, fleet = run_of(requests, limits, engines_of(states), router.replica, load), router.fleet
    log = fleet.log[:, : fleet.i[LOGGED]].copy()
    return replace(run, replica_ms=paid_ms(fleet, states, float(run.last_ms.max())), scaled=log)


def _routed(
    limits: Limits, load: Load, costs: StepCosts, routing: Routing, places: int, before: int = 0
) -> tuple[State, Router]:
    """Run engines behind a router until all is served, or until the router finds no place for a replica."""
    static = limits.batching == STATIC
    refuse(static, "static batches are routed in turn only", "--set route", "Take round-robin.")
    users, states = int(load.user.max()) + 1, idle_engines(limits, load, range(before, before + places))
    span = (float(load.arrival.min()), float(load.arrival.max()))
    router = Router(
        route=ROUTES[routing.route],
        slack=routing.slack,
        share=routing.prefix_share,
        output=float(load.output.mean()),
        replica=np.zeros(len(load.arrival), dtype=np.int64),
        last=np.full(users, -1, dtype=np.int32),
        home=np.zeros((users, places), dtype=np.int8),
        fleet=new_fleet(routing.scaling, routing.start_up_ms, routing.replicas, places, span),
    )
    if serve_routed(limits, load, costs, states, router) == STUCK:
        raise never_runs()
    return states, router


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
        wrong = not self.fixed_ms >= 0 or not self.ms_per_token >= 0
        refuse(wrong, "a transfer below zero", "--transfer", "Give a time that is not negative.")

    def prefilled_apart(self, prompt_tokens: IntArray) -> NDArray[np.bool_]:
        """Mark the prompts (n,) that are prefilled apart."""
        shortest, longest = self.prompts
        return np.asarray((prompt_tokens >= shortest) & (prompt_tokens <= longest))


def serve_apart(
    requests: Requests,
    costs: tuple[StepCosts, StepCosts],
    settings: tuple[EngineSettings, EngineSettings],
    transfer: Transfer = Transfer(),
    seed: int = 0,
    routing: tuple[Routing, Routing] = (Routing(), Routing()),
) -> EngineRun:
    """Run the prefill engines, then the decode engines; costs, settings and routing are pairs in that order.

    The engines are merged into one run of the requests; token gaps are those of the decoding engines.
    """
    apart = transfer.prefilled_apart(requests.prompt_tokens)
    seen, start, first, last, begun = np.full((5, len(requests)), np.nan)
    arrived, replica, runs = requests.arrival_ms.copy(), np.zeros(len(requests), dtype=np.int64), []
    if apart.any():
        given = requests.select(np.flatnonzero(apart))
        alone = replace(given, output_tokens=np.ones(len(given), dtype=np.int64))
        prefill = serve_replicas(alone, costs[0], settings[0], routing[0], seed)
        seen[apart], start[apart], replica[apart] = prefill.seen_ms, prefill.start_ms, prefill.replica
        first[apart], last[apart], begun[apart] = prefill.first_ms, prefill.last_ms, prefill.start_ms
        arrived[apart] = prefill.last_ms + transfer.fixed_ms + transfer.ms_per_token * given.prompt_tokens
        runs.append(prefill)
    rest = np.flatnonzero(~apart | (requests.output_tokens > 1))
    if len(rest):
        rows = rest[np.argsort(arrived[rest], kind="stable")]
        handed, elsewhere = replace(requests.select(rows), arrival_ms=arrived[rows]), apart[rows]
        check_fits(handed, settings[1])
        load = load_of(handed, replace(settings[1], prefix_cache=False), seed)
        # Requests prefilled elsewhere come with their prompt cached and their first token.
        cached = np.where(elsewhere, handed.prompt_tokens, load.cached).astype(np.int32)
        load = load._replace(cached=cached, given=elsewhere.astype(np.int32))
        decode = _served(handed, load, costs[1], settings[1].limits(seed), routing[1], routing[0].replicas)
        last[rows], begun[rows] = decode.last_ms, decode.start_ms
        own = ~elsewhere
        for column, of_decode in ((seen, decode.seen_ms), (start, decode.start_ms), (first, decode.first_ms)):
            column[rows[own]] = of_decode[own]
        replica[rows[own]] = routing[0].replicas + decode.replica[own]
        runs.append(decode)
    sizes = np.zeros(max(len(run.batch_sizes) for run in runs), dtype=np.int64)
    for run in runs:
        sizes[: len(run.batch_sizes)] += run.batch_sizes
    totals = {each.name: sum(getattr(run.counters, each.name) for run in runs) for each in fields(Counters)}
    whole = EngineRun(
        requests=requests,
        seen_ms=seen,
        start_ms=start,
        first_ms=first,
        last_ms=last,
        counters=Counters(**totals),
        busy_ms=sum(run.busy_ms for run in runs),
        itl=runs[-1].itl,
        batch_sizes=sizes,
        timelines=tuple(line for run in runs for line in run.timelines),
        replica=replica,
        begun_ms=begun,
    )
    return replace(whole, replica_ms=len(whole.timelines) * whole.makespan_ms)
