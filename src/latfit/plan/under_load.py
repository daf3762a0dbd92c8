"""The part of a plan that needs a rate: which way to run the load keeps the SLA on responses, how long a request may
wait for the GPU, how much load fits, and how sure that is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from latfit.errors import SlaOutOfReach
from latfit.hardware.estimate import phase_of, spread
from latfit.hardware.profile import HardwareProfile
from latfit.plan.alternatives import compared, cutoff_system
from latfit.plan.capacity import Situation, breaks_first, capacity_of, sensitivity
from latfit.plan.cutoff import cutoff_plan
from latfit.plan.frontier import best_rate, frontier
from latfit.plan.result import Alternative, Cutoff, FrontierPoint, Interval, Plan, RuleChoice, Threshold, Unknown
from latfit.plan.systems import (
    FAST,
    ONE_AT_A_TIME,
    SLOW,
    TYPICAL,
    Machine,
    System,
    Target,
    law_or_none,
    machine_of,
    simple_systems,
)
from latfit.plan.thresholds import batches_of, curve_range, gpu_threshold
from latfit.plan.wishes import Wishes
from latfit.plan.words import rate_text
from latfit.queueing.batch_service import batch_queue
from latfit.queueing.decision import rule_costs
from latfit.queueing.service import ServiceTimes
from latfit.scheduling.marginal_cost import RULES, stopping_batch
from latfit.stats import FloatArray
from latfit.units import format_ms

FASTER = 0.9


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
    shown = chosen or max(rows, key=lambda row: row.sustainable_per_s or 0.0)
    binding = breaks_first(shown, format_ms(plan.sla_ms))
    capacity = capacity_of(rows, wishes, binding)
    varied = _Varied(profile, known, target, wishes)
    interval = None if chosen is None else _interval(varied, chosen)
    slow_steps = None if chosen is None else _slow_steps(varied, chosen)
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
        interval_ms=interval,
        slow_steps_ms=slow_steps,
        promise=_promise(chosen, interval, slow_steps, plan.sla_ms),
    )
    carried = (shown.sustainable_per_s or 0.0) / 1e3
    situation = Situation(machine, rate, wishes.replicas, target, known, shown.name, carried)
    plan = replace(plan, sensitivity=sensitivity(situation, _thresholds(machine, plan, wishes)))
    plan = replace(plan, notes=[*plan.notes, *_notes(plan, machine, wishes)])
    return replace(plan, answer=_answer(plan, chosen, wishes), remedy="" if chosen else _remedy(plan, shown))


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
            law = batch_queue(rate, both.gpu.times)
        except SlaOutOfReach as error:
            return Unknown(f"the GPU alone does not carry this rate: {error.found}")
        served = max(1, min(round(law.mean_batch), both.gpu.times.max_batch or 1))
        wait = max(0.0, law.mean_ms - both.gpu.times(served))
    extra = wait + wishes.transfer_ms
    found = gpu_threshold(cpu, gpu, plan.tokens_per_request, extra_ms=extra, context=wishes.context)
    return replace(found, reason=f"{found.reason}, with {format_ms(extra)} of wait and transfer before the GPU begins")


def _rules(machine: Machine, rate: float) -> list[RuleChoice]:
    """Batching rules on the GPU (else the CPU) and how far each is from the optimum, which is left out where it cannot
    be computed."""
    times, label = machine.main.times, machine.main.label
    if rate >= times.rate_limit():
        return []
    try:
        costs = rule_costs(rate, times)
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


@dataclass(frozen=True)
class _Varied:
    """A plan whose steps may take other times than the fit's mean."""

    profile: HardwareProfile
    waiting: Cutoff | None
    target: Target
    wishes: Wishes

    def percentile(self, chosen: Alternative, curve: int, level: float | None = None) -> float | None:
        """The chosen way's percentile with such steps, in ms; None where it is overloaded."""
        rate = self.wishes.rate_each
        assert rate is not None
        machine = machine_of(self.profile, self.target.tokens, self.wishes, curve, level)
        if level is not None and "T_cut" in chosen.name:
            # Beside a GPU the CPU's service is exponential: its mean is all that counts, its spread is in the law.
            machine = replace(machine, cpu=machine_of(self.profile, self.target.tokens, self.wishes, curve).cpu)
        systems = simple_systems(machine, rate)
        if self.waiting is not None and (both := machine.both) is not None:
            systems.append(cutoff_system(both, self.waiting.shown_ms))
        system = next((system for system in systems if system.name == chosen.name), None)
        law = None if system is None else law_or_none(system, rate)
        return None if law is None else law.percentile(self.target.q)


def _interval(varied: _Varied, chosen: Alternative) -> Interval | None:
    """The chosen way's percentile with every batch at the fast, and at the slow end of what the data allow."""
    if not any(path.fit.draws.get("values") for path in varied.profile.paths.values()):
        return None
    return varied.percentile(chosen, FAST), varied.percentile(chosen, SLOW)


def _slow_steps(varied: _Varied, chosen: Alternative) -> float | None:
    """The chosen way's percentile if every batch took the plan's percentile of its spread; infinite where that is
    overload. None where the spread is unknown, or is in the law already."""
    phase = phase_of(varied.target.tokens)
    known = any(spread(path, phase).known for path in varied.profile.paths.values())
    if not known or chosen.name.endswith(ONE_AT_A_TIME):
        return None
    found = varied.percentile(chosen, TYPICAL, varied.target.q)
    return math.inf if found is None else found


def _promise(chosen: Alternative | None, interval: Interval | None, slow_steps: float | None, sla_ms: float) -> str:
    if chosen is None:
        return "no"
    limit = sla_ms * (1 + 1e-6)
    unsure = interval is not None and (interval[1] is None or interval[1] > limit)
    return "in doubt" if unsure or (slow_steps is not None and slow_steps > limit) else "yes"


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
    found = ["Responses are for Poisson arrivals and steps that take their mean time; --check simulates what varies."]
    if isinstance(plan.T_cut, Cutoff):
        found.append(str(plan.T_cut.service["sentence"]))
        if plan.T_cut.misled:
            found.append(customary_note(plan.T_cut, plan.sla_ms))
    limit = plan.sla_ms * (1 + 1e-6)
    if plan.interval_ms is not None and plan.promise == "in doubt":
        slow = plan.interval_ms[1]
        if slow is None or slow > limit:
            found.append(_doubt(plan, machine, wishes))
    if plan.slow_steps_ms is not None and plan.slow_steps_ms > limit:
        slow_ms = "overloaded" if math.isinf(plan.slow_steps_ms) else format_ms(plan.slow_steps_ms)
        found.append(
            f"Cannot promise {format_ms(plan.sla_ms)} by formula: steps vary, and with every one at its"
            f" {plan.percentile:g}th percentile it would be {slow_ms}; --check simulates it."
        )
    return found


def customary_note(waiting: Cutoff, sla_ms: float) -> str:
    """Where the formula T_cut + ln(1/(1-q))/(mu - lambda_a) differs from what holds."""
    admits = waiting.ranges.get("poisson", ())
    holds = waiting.ranges.get("exact", ())
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
    return f"Cannot promise {format_ms(plan.sla_ms)}: {text}; measure these points: {', '.join(points)}."


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
    slow = ""
    if plan.slow_steps_ms is not None and math.isfinite(plan.slow_steps_ms):
        slow = f" ({format_ms(plan.slow_steps_ms)} if every step were a slow one)"
    return (
        f"Serve {each} with {chosen.name}: {plan.percentile:g} % of responses within"
        f" {format_ms(chosen.percentile_ms)}{slow}, {max(chosen.margin, 0.0):.1%} below {format_ms(plan.sla_ms)}.{sure}"
    )


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
    count = shown.replicas or 1
    most = f"One machine carries at most {rate_text(shown.sustainable_per_s)} within the SLA ({shown.name})"
    return f"{most}; this rate needs {count} replicas: --replicas {count}."
