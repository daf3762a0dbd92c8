"""The part of a plan that needs a rate: which way to run the load keeps the SLA on responses, how long a request may
wait for the GPU, how much load fits, and how sure that is.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from latfit.errors import SlaOutOfReach
from latfit.hardware import HardwareProfile
from latfit.planning.load.capacity import Situation, best_rate, breaks_first, capacity_of, frontier, sensitivity
from latfit.planning.load.compare import compared
from latfit.planning.load.cutoff import cutoff_plan
from latfit.planning.load.promise import Asked, Promise, promised, promised_rate, tail_notes, with_promise
from latfit.planning.load.strategies import Machine, System, Target, machine_of, simple_systems
from latfit.planning.request import Wishes
from latfit.planning.result import (
    Alternative,
    Capacity,
    Cutoff,
    FrontierPoint,
    Interval,
    Plan,
    RuleChoice,
    Threshold,
    Unknown,
)
from latfit.planning.steps.thresholds import batches_of, curve_range, gpu_threshold
from latfit.planning.wording import rate_text
from latfit.policies import RULES, stopping_batch
from latfit.queueing import ServiceTimes, batch_response, rule_costs, scatters, settling_ms
from latfit.stats import FloatArray
from latfit.units import format_ms

FASTER = 0.9
SLOW_START = 20.0
"""Mean responses that a queue may take from empty to its stationary state before that is told."""


def with_load(plan: Plan, profile: HardwareProfile, percentile: float, wishes: Wishes) -> Plan:
    """The plan with everything that the rate decides. percentile: of responses, exact whatever the fit's intervals."""
    rate = wishes.rate_each
    assert rate is not None
    target = Target(plan.sla_ms, percentile / 100, plan.tokens_per_request)
    machine = machine_of(profile, plan.tokens_per_request, wishes)
    systems = simple_systems(machine, rate)
    waiting = _waiting(machine, rate, target, wishes, plan.T_cut)
    known = waiting if isinstance(waiting, Cutoff) else None
    rows = compared(machine, systems, known, rate, target, wishes.objective)
    chosen = next((row for row in rows if row.chosen), None)
    promise = None
    if chosen is not None:
        promise = promised(Asked(profile, target, wishes, known, chosen.name))
        assert promise is not None
        better = with_promise(chosen, promise, plan.sla_ms)
        rows = [better if row is chosen else row for row in rows]
        chosen = better
    shown = chosen or max(rows, key=lambda row: row.sustainable_per_s or 0.0)
    asked = Asked(profile, target, wishes, known, shown.name)
    binding = breaks_first(shown, format_ms(plan.sla_ms))
    capacity = capacity_of(rows, wishes, binding)
    plan = replace(
        plan,
        rate_per_s=rate * 1e3,
        percentile=percentile,
        T_cut=waiting,
        alternatives=rows,
        feasible=chosen is not None,
        capacity=capacity or Unknown("no way to run this load meets the SLA at any rate"),
        B1_at_rate=_loaded_threshold(machine, rate, plan, wishes),
        rules=_rules(machine, rate),
        frontier=_frontier(machine, systems, shown, rate, target, wishes),
        binding=binding,
        interval_ms=None if promise is None else promise.interval,
        promise="no" if promise is None else promise.holds(plan.sla_ms),
    )
    sure_of = promise is not None and promise.interval is not None and not promise.doubts
    if sure_of and isinstance(capacity, Capacity):
        sure = promised_rate(asked, (shown.sustainable_per_s or rate * 1e3) / 1e3)
        plan = replace(plan, capacity=replace(capacity, promised_per_s=None if sure is None else sure * 1e3))
    carried = (shown.sustainable_per_s or 0.0) / 1e3
    situation = Situation(machine, rate, wishes.replicas, target, known, shown, carried)
    plan = replace(plan, sensitivity=sensitivity(situation, _thresholds(machine, plan, wishes)))
    notes = [*plan.notes, *_notes(plan, machine, wishes)]
    notes += [*tail_notes(asked), *(_doubted(promise) if promise is not None else []), *_after_restart(asked, shown)]
    plan = replace(plan, notes=notes)
    return replace(plan, answer=_answer(plan, chosen, wishes), remedy="" if chosen else _remedy(plan, shown))


def _doubted(promise: Promise) -> list[str]:
    return [f"Cannot promise it: {doubt}." for doubt in promise.doubts]


def _after_restart(asked: Asked, shown: Alternative) -> list[str]:
    """How long a queue whose steps are quicker the more they hold takes from empty, where that is long."""
    system = asked.system(machine_of(asked.profile, asked.target.tokens, asked.wishes))
    if system is None or system.times is None or system.rises or shown.mean_ms is None:
        return []
    took = settling_ms(asked.rate, replace(system.times, scatter=None))
    if took is not None and took <= SLOW_START * shown.mean_ms:
        return []
    after = "very long" if took is None or math.isinf(took) else f"about {format_ms(took, 2)}"
    return [
        f"{shown.name}: metastable after a restart. From empty it takes {after} until the queue is as planned: steps"
        " that hold few requests are slow, and all who come meanwhile wait. Start with little load, or full batches."
    ]


def _waiting(
    machine: Machine, rate: float, target: Target, wishes: Wishes, without: Unknown | Cutoff
) -> Unknown | Cutoff:
    if (both := machine.both) is None:
        return without
    try:
        return cutoff_plan(both, rate, target, wishes.objective)
    except SlaOutOfReach as error:
        return Unknown(f"{error.found}. {error.remedy}")


def _loaded_threshold(machine: Machine, rate: float, plan: Plan, wishes: Wishes) -> Threshold | Unknown:
    """B1 with the wait that a request finds at the GPU on average; a wait that was named is in B1 already."""
    if (both := machine.both) is None:
        return Unknown("needs two execution paths")
    cpu, gpu = both.cpu.path, both.gpu.path
    wait = wishes.wait_ms
    if wait is None:
        try:
            law = batch_response(rate, both.gpu.times, 1, machine.arrivals)
        except SlaOutOfReach as error:
            return Unknown(f"the GPU alone does not carry this rate: {error.found}")
        served = max(1, min(round(getattr(law, "mean_batch", 1.0)), both.gpu.times.max_batch or 1))
        wait = max(0.0, law.mean_ms - both.gpu.times(served))
    extra = wait + wishes.transfer_ms
    found = gpu_threshold(cpu, gpu, plan.tokens_per_request, extra_ms=extra, context=wishes.context)
    return replace(found, reason=f"{found.reason}, with {format_ms(extra)} of wait and transfer before the GPU begins")


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
    machine: Machine, systems: Sequence[System], shown: Alternative, rate: float, target: Target, wishes: Wishes
) -> list[FrontierPoint]:
    points = frontier(machine, systems, rate, target, wishes.objective)
    if wishes.objective is not None and wishes.objective.throughput > 0:
        system = next((system for system in systems if system.name == shown.name), None)
        points += [] if system is None else best_rate(system, target, wishes.objective)
    return points


def _thresholds(machine: Machine, plan: Plan, wishes: Wishes) -> dict[float, Threshold]:
    """B1 as it is (1), with the CPU at nine tenths of its time (0.9), and with the GPU (-0.9)."""
    if (both := machine.both) is None:
        return {}
    paths = (both.cpu.path, both.gpu.path)
    B = batches_of(*paths, tokens=plan.tokens_per_request)
    slow, fast = (curve_range(path, B, plan.tokens_per_request, wishes.context)[0] for path in paths)
    extra = wishes.transfer_ms + (wishes.wait_ms or 0.0)
    found = {}
    for key, ours, theirs in ((1.0, slow, fast), (FASTER, FASTER * slow, fast), (-FASTER, slow, FASTER * fast)):
        wins = np.flatnonzero(theirs + extra <= ours)
        found[key] = Threshold(int(B[wins[0]]) if len(wins) else None, "")
    return found


def _notes(plan: Plan, machine: Machine, wishes: Wishes) -> list[str]:
    """What the answer assumes, and where the customary formula would have misled."""
    found = [_assumed(machine)]
    if isinstance(plan.T_cut, Cutoff):
        found.append(str(plan.T_cut.service["sentence"]))
        if plan.T_cut.misled:
            found.append(customary_note(plan.T_cut, plan.sla_ms))
    limit = plan.sla_ms * (1 + 1e-6)
    if plan.interval_ms is not None and plan.promise == "in doubt":
        slow = plan.interval_ms[1]
        if slow is None or slow > limit:
            found.append(_doubt(plan, machine, wishes))
    return found


def _assumed(machine: Machine) -> str:
    """What the responses are for."""
    steady = [part.label for part in machine.parts if part.times.scatter is None]
    said = f"Responses are for {machine.arrivals.label}"
    if len(steady) < len(machine.parts):
        said += ", and steps that scatter as measured, independently of each other"
    if steady:
        said += f"; steps on {' and '.join(steady)} take their mean time"
    if machine.cpu is not None and machine.cpu.times.scatter is None:
        said += f", one request at a time on {machine.cpu.label} an exponential one"
    return f"{said}."


def customary_note(waiting: Cutoff, sla_ms: float) -> str:
    """Where the formula T_cut + ln(1/(1-q))/(mu - lambda_a) differs from what holds."""
    admits = waiting.ranges.get("poisson", ())
    holds = waiting.granted
    if not admits:
        return "The customary formula finds no T_cut here, though there are some."
    if not holds:
        return f"The customary formula would admit T_cut up to {format_ms(admits[-1][1])}; none meets the SLA."
    return (
        f"The customary formula would admit T_cut up to {format_ms(admits[-1][1])} and promise {format_ms(sla_ms)};"
        f" it holds only up to {format_ms(holds[-1][1])}."
    )


def _doubt(plan: Plan, machine: Machine, wishes: Wishes) -> str:
    """Which batches to measure: those that a step of this load is likely to hold, the least known first."""
    assert plan.interval_ms is not None
    low, high = (None if end is None else format_ms(end) for end in plan.interval_ms)
    points = []
    for part in machine.parts:
        if not part.path.fit.draws.get("values"):
            continue
        B = _visited(part.times, plan.rate_per_s or 0.0)
        T, fast, slow = curve_range(part.path, B, plan.tokens_per_request, wishes.context)
        worst = int(np.argmax((slow - fast) / T))
        batch = int(B[worst])
        points.append(f"B={batch} S={batch * plan.tokens_per_request:,} on {part.label}")
    text = f"over what the data allow the {plan.percentile:g}th percentile is {low} to {high or 'without bound'}"
    more = f"measure these points: {', '.join(points)}" if points else "measure more steps"
    return f"Cannot promise {format_ms(plan.sla_ms)}: {text}; {more}."


def _visited(times: ServiceTimes, rate_per_s: float) -> FloatArray:
    """1 up to twice the batch that arrives in a step."""
    top = times.max_batch or 1
    reach = 1
    while reach < top and reach < 2 * rate_per_s / 1e3 * times(reach):
        reach = min(2 * reach, top)
    return np.arange(1.0, reach + 1)


def _answer(plan: Plan, chosen: Alternative | None, wishes: Wishes) -> str:
    """The decision in a sentence."""
    each = rate_text(plan.rate_per_s or 0.0) + (
        f" on each of {wishes.replicas} replicas" if wishes.replicas > 1 else ""
    )
    promised = f"{format_ms(plan.sla_ms)} for {plan.percentile:g} % of responses"
    if chosen is None:
        return f"{each} cannot be served within {promised}: {_least(plan)}."
    assert chosen.percentile_ms is not None
    assert chosen.margin is not None
    sure = " Cannot promise it: see below." if plan.promise == "in doubt" else ""
    return (
        f"Serve {each} with {chosen.name}: {plan.percentile:g} % of responses within"
        f" {format_ms(chosen.percentile_ms)}{interval_text(plan.interval_ms)}, {max(chosen.margin, 0.0):.1%} below"
        f" {format_ms(plan.sla_ms)}.{sure}"
    )


def interval_text(interval: Interval | None) -> str:
    """` (95 %: 11.2 to 12.4 ms)`; empty without one."""
    if interval is None or interval[0] is None:
        return ""
    high = "no upper end" if interval[1] is None else format_ms(interval[1])
    return f" (95 %: {format_ms(interval[0])} to {high})"


def _least(plan: Plan) -> str:
    able = [row for row in plan.alternatives if row.percentile_ms is not None and np.isfinite(row.percentile_ms)]
    if not able:
        return "every way to run it is overloaded"
    best = min(able, key=lambda row: row.percentile_ms or 0.0)
    assert best.percentile_ms is not None
    return f"the best, {best.name}, needs {format_ms(best.percentile_ms)}"


def _remedy(plan: Plan, shown: Alternative) -> str:
    """What would make it feasible."""
    if shown.sustainable_per_s is None:
        return f"No rate meets it: {_least(plan)}. Relax the SLA, or make the step faster; replicas do not help."
    rate = plan.rate_per_s or 0.0
    above = next(((low, high) for low, high in shown.feasible_per_s if rate < low), None)
    if above is not None:
        return (
            f"{shown.name} meets it from {rate_text(above[0])} to {rate_text(above[1])} a machine, where batches fill:"
            " send the load to fewer machines, or relax the SLA."
        )
    count = shown.replicas or 1
    most = f"One machine carries at most {rate_text(shown.sustainable_per_s)} within the SLA ({shown.name})"
    return f"{most}; this rate needs {count} replicas: --replicas {count}."
