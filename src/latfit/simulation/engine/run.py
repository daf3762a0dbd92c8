"""Serve requests by one simulated engine."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from latfit.errors import BadInput
from latfit.simulation.engine import state as st
from latfit.simulation.engine.loop import advance
from latfit.simulation.engine.scheduler import advance_static
from latfit.simulation.engine.settings import NEVER_MS, EngineSettings, check_fits
from latfit.simulation.engine.state import Limits, Load, SmallIntArray, State, coming, engines_of, new_states
from latfit.simulation.engine.statistics import Timeline, gap_summary, timeline_of
from latfit.simulation.engine.step_cost import StepCosts
from latfit.stats import FloatArray, IntArray
from latfit.workload import Requests


class Counters(NamedTuple):
    """Counts over a run, in the order of `State.i`."""

    steps: int
    preemptions: int
    generated_tokens: int
    prefill_tokens: int  # with those computed again after preemption
    reused_tokens: int  # found in freed blocks
    drafted_tokens: int
    accepted_tokens: int
    computed_tokens: int
    cached_tokens: int  # prompt tokens cached when their requests started
    free_blocks: int  # at the end


@dataclass(frozen=True, eq=False, repr=False)
class EngineRun:
    """Requests of a run with their times (n,), in ms on the clock of their arrivals."""

    requests: Requests
    seen_ms: FloatArray  # when the scheduler first had the request, after the step that ran when it arrived
    start_ms: FloatArray  # begin of the first step that computed some of its tokens
    first_ms: FloatArray
    last_ms: FloatArray
    counters: Counters
    busy_ms: float  # time in steps, over all replicas
    itl: dict[str, float]  # gaps between tokens, by quantile name
    batch_sizes: IntArray
    timelines: tuple[Timeline, ...]
    replica: IntArray
    users: int = 0  # users of a closed loop, else 0
    paid_ms: float | None = None  # time for which a changing number of replicas existed; None if all always did
    # (3, k) for a changing number of replicas: times, replicas that serve, replicas requested; else None
    scaled: FloatArray | None = None
    begun_ms: FloatArray | None = None  # first decode step of each request if other engines prefill; else None

    def __repr__(self) -> str:
        found = self.counters
        return f"EngineRun({len(self.requests):,} requests, {found.steps:,} steps, {found.preemptions:,} preemptions)"

    @property
    def ttft_ms(self) -> FloatArray:
        """Arrival to first token (n,)."""
        return self.first_ms - self.requests.arrival_ms

    @property
    def served_from_ms(self) -> FloatArray:
        """When the last engine that serves it began (n,)."""
        return self.start_ms if self.begun_ms is None else self.begun_ms

    @property
    def latency_ms(self) -> FloatArray:
        """Arrival to last token (n,)."""
        return self.last_ms - self.requests.arrival_ms

    @property
    def tpot_ms(self) -> FloatArray:
        """(last - first token) / (output - 1), NaN (n,) for one token."""
        more = self.requests.output_tokens - 1
        return np.where(more > 0, (self.last_ms - self.first_ms) / np.maximum(more, 1), np.nan)

    @property
    def makespan_ms(self) -> float:
        """First arrival to last token."""
        return float(self.last_ms.max() - self.requests.arrival_ms[0])

    @property
    def replica_ms(self) -> float:
        return len(self.timelines) * self.makespan_ms if self.paid_ms is None else self.paid_ms

    @property
    def replicas(self) -> float:
        """Mean number."""
        return self.replica_ms / self.makespan_ms


def serve(
    requests: Requests,
    costs: StepCosts,
    settings: EngineSettings = EngineSettings(),
    seed: int = 0,
    think_ms: FloatArray | None = None,
) -> EngineRun:
    """Run one engine until every request is done. Raises BadInput for no request or one larger than the KV cache.

    think_ms: in a closed loop, the time (n,) before each request during which its user thinks.
    """
    check_fits(requests, settings)
    return serve_in_turn(requests, load_of(requests, settings, seed, think_ms), costs, settings.limits(seed))


def serve_in_turn(
    requests: Requests, load: Load, costs: StepCosts, limits: Limits, engines: range = range(1)
) -> EngineRun:
    """Serve request r on engine r modulo the number of engines, so that users stay on one engine."""
    first, spread = coming(load), min(len(engines), load.users) if load.users else len(engines)
    states = engines_of(new_states(limits, load, engines))
    for k, state in enumerate(states[:spread]):
        own = first[first % spread == k]
        state.inbox[: len(own)] = own
        state.i[[st.PUSHED, st.ISSUED, st.STRIDE]] = len(own), load.users + (k - load.users) % spread, spread
        state = state._replace(source=state.inbox, source_i=state.i)
        if len(own) and limits.batching == st.STATIC:
            advance_static(limits, load, costs, state)
        elif len(own) and advance(limits, load, costs, state, np.inf) == st.STUCK:
            raise never_runs()
    return run_of(requests, limits, states, np.arange(len(load.arrival)) % spread, load)


def never_runs() -> BadInput:
    found, remedy = "a request waits for KV blocks that never become free", "Give more --kv-blocks."
    return BadInput(found, where="requests", remedy=remedy)


def run_of(requests: Requests, limits: Limits, states: list[State], replica: IntArray, load: Load) -> EngineRun:
    found = states[0]
    order: IntArray | slice = slice(None)
    if load.users:
        order = np.argsort(load.arrival, kind="stable")
        requests = replace(requests, arrival_ms=load.arrival, user_id=load.user).select(order)
    counted = np.sum([state.i for state in states], axis=0)
    return EngineRun(
        requests=requests,
        seen_ms=found.seen[order],
        start_ms=found.start[order],
        first_ms=found.first[order],
        last_ms=found.last[order],
        counters=Counters(*counted[: len(Counters._fields)].tolist()),
        busy_ms=float(sum(state.f[st.BUSY] for state in states)),
        itl=gap_summary(states),
        batch_sizes=np.sum([state.batch for state in states], axis=0),
        timelines=tuple(timeline_of(limits, state) for state in states),
        replica=replica[order],
        users=load.users,
    )


def load_of(requests: Requests, settings: EngineSettings, seed: int, think_ms: FloatArray | None = None) -> Load:
    arrival, user, users = requests.arrival_ms, requests.user_id, 0
    if think_ms is not None:
        users, user = int(user.max()) + 1, user.copy()
        arrival = np.zeros(len(requests))
        arrival[:users] = think_ms[:users]
        requests = replace(requests, arrival_ms=arrival)
    span = NEVER_MS if users else float(arrival[-1] - arrival[0]) if len(arrival) else 0.0
    key, key_2 = settings.order.keys(requests, seed, span)
    block = settings.block_size
    cached = np.zeros(len(requests), dtype=np.int32)
    unit, unit_start, unit_id = _units(requests, settings)
    if settings.cached_share > 0 and unit == 0:
        cached[:] = settings.cached_share * requests.prompt_tokens // block * block
    return Load(
        arrival=arrival,
        prompt=requests.prompt_tokens,
        output=requests.output_tokens,
        cached=cached,
        given=np.zeros(len(requests), dtype=np.int32),
        key=key,
        key_2=key_2,
        user=user,
        think=np.empty(0) if think_ms is None else think_ms,
        users=users,
        unit=unit,
        unit_start=unit_start,
        unit_id=unit_id,
        known=(unit,) if unit else (),
    )


def _units(requests: Requests, settings: EngineSettings) -> tuple[int, IntArray, SmallIntArray]:
    """Tokens of a unit of known contents (0 for none), and the units of each request's prompt: see `Load`."""
    blocks, nothing = requests.prefix, (0, np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int32))
    if blocks is None or not settings.prefix_cache or settings.batching == "static":
        return nothing
    unit = math.lcm(blocks.tokens, settings.block_size)
    each = unit // blocks.tokens
    count = np.minimum(np.diff(blocks.starts) // each, requests.prompt_tokens // unit)
    starts = np.concatenate([[0], np.cumsum(count)])
    # The last recorded block of a unit names all of it.
    within = np.arange(starts[-1]) - np.repeat(starts[:-1], count)
    places = np.repeat(blocks.starts[:-1], count) + (within + 1) * each - 1
    _, names = np.unique(blocks.ids[places], return_inverse=True)
    return (unit, starts, names.astype(np.int32)) if len(places) else nothing
