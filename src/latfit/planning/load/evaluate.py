"""The part of a plan that needs a rate: which strategy keeps the SLA on responses, how long a request may wait for the
GPU, how much load fits, how sure that is, and what the event simulation says of it.

The headline is what will happen: the percentile of the selected strategy is that of its queue, run with the scatter of
the fit and the arrivals as they come; where nothing scatters (nominal numbers) the queue has an exact distribution,
which is that number without the noise of a run. Exact distributions and bounds otherwise only screen and explain. What
is selected is then simulated event by event, by other code, and is not feasible where that refutes it.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs

from latfit.errors import SlaOutOfReach
from latfit.hardware import HardwareProfile
from latfit.messages import Message, message
from latfit.planning import wording
from latfit.planning.load.capacity import Situation, Thresholds, best_rate, capacity_of, frontier, sensitivity
from latfit.planning.load.compare import Judged, compared, cutoff_capacity, feasible, told
from latfit.planning.load.cutoff import cutoff_plan
from latfit.planning.load.promise import Asked, Promise, asked_of, promised, promised_rate, tail_warnings
from latfit.planning.load.strategies import Machine, Part, Target, cutoff_system, machine_of, simple_systems
from latfit.planning.load.verify import MARGIN, PRECISION, simulated
from latfit.planning.request import PlanRequest
from latfit.planning.result import (
    FALLS_BACK,
    NEEDS_PATHS,
    Change,
    Cutoff,
    FrontierPoint,
    Kind,
    LoadPlan,
    RuleChoice,
    Threshold,
    Unknown,
)
from latfit.planning.steps.thresholds import gpu_threshold
from latfit.policies import RULES, stopping_batch
from latfit.queueing import ResponseDistribution, ServiceTimes, batch_response, rule_costs, scatters, settling_ms
from latfit.simulation import Checked
from latfit.stats import FloatArray

FASTER = 0.9
SLOW_START = 20.0
"""Mean responses that a queue may take from empty to its stationary state before that is told."""

DOUBT, NO = "in doubt", "no"


@dataclass(frozen=True)
class _Question:
    """A load on a machine: rate per ms at one replica."""

    machine: Machine
    rate: float
    target: Target
    request: PlanRequest


def load_plan(
    profile: HardwareProfile, sla_ms: float, percentile: float, tokens: int, request: PlanRequest
) -> LoadPlan:
    """How to serve the requested rate within an SLA in ms, for `percentile` percent of the responses."""
    rate = request.rate_each
    assert rate is not None
    target = Target(sla_ms, percentile / 100, tokens)
    ask = _Question(machine_of(profile, tokens, request), rate, target, request)
    waiting, laws = _waiting(ask)
    found = _strategies(ask, waiting)
    selected = next((each for each in found if each.row.chosen), None)
    shown = selected or told(max(found, key=lambda each: each.row.sustainable_per_s or 0.0), rate, target)
    asked = asked_of(ask.machine, target, shown.row.strategy, rate, laws_only=request.laws_only)
    promise = None if selected is None else promised(asked, selected.law)
    checked = (
        None
        if selected is None or request.laws_only
        else simulated(ask.machine, shown.row.strategy, rate, target, request.seed)
    )
    capacity = capacity_of(shown.row, request, _promised_per_s(asked, promise, shown))
    plan = LoadPlan(
        rate_per_s=rate * 1e3,
        percentile=percentile,
        alternatives=[shown.row if each.row.strategy == shown.row.strategy else each.row for each in found],
        T_cut=_with_check(waiting, shown, checked),
        capacity=capacity or Unknown(wording.NO_STRATEGY),
        B1=_threshold(ask),
        rules=_rules(ask.machine, rate),
        sensitivity=_changes(ask, shown),
        frontier=_frontier(ask, found, laws, shown),
        binding=wording.load_binding(shown.row),
        remedy="" if selected else wording.remedy([each.row for each in found], shown.row, rate * 1e3),
        promise=NO if promise is None else promise.holds(sla_ms),
        interval_ms=None if promise is None else promise.interval,
        checked=None if checked is None else {"strategy": shown.row.name, **checked.to_json()},
        laws_only=request.laws_only,
    )
    said = [*_doubts(promise, plan, asked), *tail_warnings(asked), *_after_restart(asked, shown), *_notes(plan, ask)]
    plan = replace(plan, messages=said)
    return _verified(plan, ask, shown, checked)


def _strategies(ask: _Question, waiting: Cutoff | Unknown) -> list[Judged]:
    """Every strategy at the rate, one of them chosen where any meets the SLA."""
    systems = simple_systems(ask.machine, ask.rate)
    ranges = [feasible(system, ask.target) for system in systems]
    both = ask.machine.both
    if isinstance(waiting, Cutoff) and both is not None:
        # A T_cut as long as the SLA carries what the GPU does alone, taking all that wait.
        alone = [
            max((high for _, high in own), default=0.0)
            for system, own in zip(systems, ranges, strict=True)
            if system.strategy.kind is Kind.GREEDY and system.strategy.paths == (both.gpu.label,)
        ]
        least = max(*alone, ask.rate) if waiting.value is not None else max(alone)
        capacity = cutoff_capacity(both, ask.target, least)
        systems.append(cutoff_system(both, waiting.shown_ms))
        ranges.append([(0.0, capacity)] if capacity > 0 else [])
    return compared(systems, ranges, ask.rate, ask.target, ask.request.objective)


def _waiting(ask: _Question) -> tuple[Cutoff | Unknown, Mapping[float, ResponseDistribution]]:
    """T_cut, and the distributions over it."""
    if (both := ask.machine.both) is None:
        return Unknown(FALLS_BACK), {}
    try:
        return cutoff_plan(both, ask.rate, ask.target, ask.request.objective)
    except SlaOutOfReach as error:
        return Unknown(f"{error.found}. {error.remedy}"), {}


def _with_check(waiting: Cutoff | Unknown, shown: Judged, checked: Checked | None) -> Cutoff | Unknown:
    """T_cut with what the event simulation gives for it, where it was simulated."""
    if not isinstance(waiting, Cutoff) or checked is None or shown.row.strategy.kind is not Kind.CUTOFF:
        return waiting
    return structs.replace(waiting, bounds_ms={**waiting.bounds_ms, "event_simulation": checked.percentile.value})


def _promised_per_s(asked: Asked, promise: Promise | None, shown: Judged) -> float | None:
    """The rate that is carried at the slow end of what is left open too."""
    if promise is None or promise.interval is None or promise.doubts:
        return None
    sure = promised_rate(asked, promise, (shown.row.sustainable_per_s or asked.rate * 1e3) / 1e3)
    return None if sure is None else sure * 1e3


def _verified(plan: LoadPlan, ask: _Question, shown: Judged, checked: Checked | None) -> LoadPlan:
    """The plan after its simulation: refuted, or in doubt with a way out, or as it was."""
    if checked is None or checked.holds:
        return plan
    ends = (checked.percentile.low, checked.percentile.high)
    if checked.holds is False:
        wanted = checked.percentile.high * (1 + MARGIN)
        return replace(
            plan,
            promise=NO,
            binding=wording.refuted(shown.row.name, ends),
            remedy=wording.refuted_remedy(wanted),
            alternatives=[
                structs.replace(row, chosen=False, verdict=wording.refuted(row.name, ends)) if row.chosen else row
                for row in plan.alternatives
            ],
        )
    aim, both, inside = ask.target.sla_ms * (1 - MARGIN), ask.machine.both, None
    if shown.row.strategy.kind is Kind.CUTOFF and both is not None:
        with contextlib.suppress(SlaOutOfReach):
            inside = cutoff_plan(both, ask.rate, replace(ask.target, sla_ms=aim), ask.request.objective)[0].value
    note = wording.at_the_edge(ask.target.sla_ms, PRECISION, inside, MARGIN, aim)
    return replace(plan, promise=DOUBT, messages=[*plan.messages, note])


def _threshold(ask: _Question) -> Threshold | Unknown:
    """B1 with what a request pays at the GPU at this rate before it begins."""
    if (both := ask.machine.both) is None:
        return Unknown(NEEDS_PATHS)
    try:
        extra = _extra_ms(ask, both.gpu, ask.rate)
    except SlaOutOfReach as error:
        return Unknown(wording.gpu_overloaded(error.found))
    found = gpu_threshold(both.cpu.latency, both.gpu.latency, extra_ms=extra)
    return structs.replace(found, reason=wording.with_wait(found.reason, extra))


def _extra_ms(ask: _Question, gpu: Part, rate: float) -> float:
    """The transfer, and the wait: the one that was named, or what a request finds at that GPU on average at a rate per
    ms. Raises SlaOutOfReach."""
    wait = ask.request.wait_ms
    if wait is None:
        law = batch_response(rate, gpu.times, 1, ask.machine.arrivals)
        served = max(1, min(round(getattr(law, "mean_batch", 1.0)), gpu.times.max_batch or 1))
        wait = max(0.0, law.mean_ms - gpu.times(served))
    return wait + ask.request.transfer_ms


def _rules(machine: Machine, rate: float) -> list[RuleChoice]:
    """Batching rules on the GPU (else the CPU) and how far each is from the optimum, which is left out where it cannot
    be computed; none where steps scatter, which the decision process does not know."""
    times, label = machine.main.times, machine.main.label
    best = times.best_batch()
    if rate >= best / times(best) or scatters(times):
        return []
    try:
        costs = {name: cost for name, cost in rule_costs(rate, times).items() if math.isfinite(cost.mean_ms)}
        return [RuleChoice(label, name, cost.threshold, cost.mean_ms, cost.excess) for name, cost in costs.items()]
    except SlaOutOfReach:
        T = times.table(1, times.max_batch or 1).tolist()
        return [RuleChoice(label, name, stopping_batch(name, T, rate), None, None) for name in RULES]


def _frontier(
    ask: _Question, found: Sequence[Judged], laws: Mapping[float, ResponseDistribution], shown: Judged
) -> list[FrontierPoint]:
    objective = ask.request.objective
    points = frontier(found, laws, ask.rate, ask.target, objective)
    if objective is not None and objective.throughput > 0 and shown.system.strategy.kind is not Kind.CUTOFF:
        points += best_rate(shown.system, ask.target, objective)
    return points


def _changes(ask: _Question, shown: Judged) -> list[Change]:
    carried = (shown.row.sustainable_per_s or 0.0) / 1e3
    now = Situation(ask.machine, ask.rate, ask.request.replicas, ask.target, shown.row, carried)
    return sensitivity(now, _changed_thresholds(ask))


def _changed_thresholds(ask: _Question) -> Thresholds:
    """B1 as it is, with the CPU or the GPU at nine tenths of its time, and at twice the rate, each with the wait that
    goes with it."""
    if (both := ask.machine.both) is None:
        return Thresholds()
    cpu, gpu, rate = both.cpu, both.gpu, ask.rate
    B = min(cpu.latency.batches, gpu.latency.batches, key=len)
    slow, fast = cpu.latency.typical_ms(B), gpu.latency.typical_ms(B)

    def first(ours: FloatArray, theirs: FloatArray, part: Part, load: float) -> int | None:
        with contextlib.suppress(SlaOutOfReach):
            wins = np.flatnonzero(theirs + _extra_ms(ask, part, load) <= ours)
            return int(B[wins[0]]) if len(wins) else None
        return None

    return Thresholds(
        first(slow, fast, gpu, rate),
        first(FASTER * slow, fast, gpu, rate),
        first(slow, FASTER * fast, gpu.scaled(FASTER), rate),
        first(slow, fast, gpu, 2 * rate),
    )


def _notes(plan: LoadPlan, ask: _Question) -> list[Message]:
    """What the answer assumes, and where the textbook formula would have misled."""
    machine = ask.machine
    steady = [part.label for part in machine.parts if part.times.noise is None]
    cpu = machine.cpu if machine.cpu is not None and machine.cpu.times.noise is None else None
    scattered = len(steady) < len(machine.parts)
    found = [wording.assumed(machine.arrivals.label, steady, scattered, None if cpu is None else cpu.label)]
    if isinstance(plan.T_cut, Cutoff):
        found.append(str(plan.T_cut.service["sentence"]))
        if plan.T_cut.misled:
            found.append(wording.textbook_note(plan.T_cut, ask.target.sla_ms))
    return [message("assumed", what=each) for each in found]


def _doubts(promise: Promise | None, plan: LoadPlan, asked: Asked) -> list[Message]:
    """Why the percentile cannot be promised: steps to measure, tails that were not seen."""
    if promise is None:
        return []
    found, sla_ms = [], asked.target.sla_ms
    slow = None if promise.interval is None else promise.interval[1]
    if promise.interval is not None and plan.promise == DOUBT and (slow is None or slow > sla_ms * (1 + 1e-6)):
        points = _least_known(asked)
        found.append(wording.open_interval(sla_ms, plan.percentile, promise.interval, points))
    return [*found, *promise.doubts]


def _least_known(asked: Asked) -> list[tuple[int, int, str]]:
    """Batches to measure: of those that a step of this load is likely to hold, the least known (B, S, path)."""
    points = []
    for part in asked.machine.parts:
        if part.path.fit.draws.get("values"):
            B = _visited(part.times, asked.rate)
            T, fast, slow = part.latency.range_ms(B)
            batch = int(B[int(np.argmax((slow - fast) / T))])
            points.append((batch, batch * asked.target.tokens, part.label))
    return points


def _visited(times: ServiceTimes, rate: float) -> FloatArray:
    """1 up to twice the batch that arrives in a step."""
    top = times.max_batch or 1
    reach = 1
    while reach < top and reach < 2 * rate * times(reach):
        reach = min(2 * reach, top)
    return np.arange(1.0, reach + 1)


def _after_restart(asked: Asked, shown: Judged) -> list[Message]:
    """How long a queue whose steps are quicker the more they hold takes from empty, where that is long."""
    system, mean_ms = shown.system, shown.row.mean_ms
    if system.times is None or system.rises or mean_ms is None:
        return []
    took = settling_ms(asked.rate, system.times.steady())
    if took is not None and took <= SLOW_START * mean_ms:
        return []
    return [wording.slow_start(shown.row.name, took)]
