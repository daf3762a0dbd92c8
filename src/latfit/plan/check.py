"""A plan against a simulation: the chosen way, with the scatter that the fits saw, until its percentile is known.

The simulated steps have the plan's mean times. Their spread is that of the fit's residuals; a path whose spread nobody
knows takes its mean time every time, or an exponential one where the plan assumed that (a CPU that serves one request
at a time). So what differs from the plan's law is what it left out: steps that vary, and a service that is not
exponential.
"""

import contextlib
import math
from dataclasses import replace
from functools import cache

import numpy as np

from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.hardware.estimate import phase_of
from latfit.hardware.profile import HardwareProfile
from latfit.plan.alternatives import cutoff_name
from latfit.plan.capacity import capacity_of
from latfit.plan.cutoff import cutoff_plan
from latfit.plan.result import Alternative, Cutoff, Plan, Unknown
from latfit.plan.simulated_cutoff import by_simulation
from latfit.plan.systems import GREEDY, ONE_AT_A_TIME, Both, Machine, Part, Target, machine_of
from latfit.plan.wishes import Wishes
from latfit.plan.words import rate_text
from latfit.scheduling import policy as policies
from latfit.scheduling.policy import Limits, Policy
from latfit.sim.check import Checked, check
from latfit.sim.machine import ServicePath, System, residual_factors, table_path
from latfit.sim.simulate import Options
from latfit.units import format_ms

REQUESTS = 50_000
PRECISION = 0.01
MARGIN = 0.02
"""Share of the SLA that a plan in doubt is told to keep: the simulation tells twice its precision."""

MOST_REPLICATIONS = 40
COARSE, FEW_REPLICATIONS, BISECTIONS = 0.02, 12, 7
"""What is spent on each rate when the one that the simulation allows is looked for, and on how many."""


def confirmed(plan: Plan, profile: HardwareProfile, wishes: Wishes, seed: int = 0) -> Plan:
    """The plan with `checked`: the simulated percentile of the chosen way with its 95 % interval, and whether it keeps
    the SLA. A plan that the simulation denies is not feasible. Raises WrongUsage for a plan without a rate."""
    rate = wishes.rate_each
    if rate is None:
        raise WrongUsage("there is no load to simulate", where="--check", remedy="Give --rate or --arrivals.")
    machine = machine_of(profile, plan.tokens_per_request, wishes)
    plan = _with_simulated_cutoff(plan, machine, wishes, seed)
    chosen = next((row for row in plan.alternatives if row.chosen), None)
    if chosen is None or plan.percentile is None:
        return plan
    system, policy = _simulated(machine, chosen, plan, rate)
    options = Options(
        requests=REQUESTS, replications=4, seed=seed, precision=PRECISION, most_replications=MOST_REPLICATIONS
    )
    found = check(policy, system, rate, plan.percentile, plan.sla_ms, options)
    if found.holds is False:
        return _denied(plan, chosen, found, wishes, _carried(plan, system, policy, rate, options))
    plan = _confirmed(plan, chosen, found)
    return plan if found.holds else _with_way_out(plan, chosen, machine, wishes)


def _with_simulated_cutoff(plan: Plan, machine: Machine, wishes: Wishes, seed: int) -> Plan:
    """The plan with a T_cut that the simulation vouches for, where the law's service is far from the fitted one."""
    found, both, percentile, rate = plan.T_cut, machine.both, plan.percentile, wishes.rate_each
    if (
        rate is None
        or both is None
        or percentile is None
        or not isinstance(found, Cutoff)
        or found.service["plausible"] is not False
    ):
        return plan
    system, largest = _both_paths(both, plan)
    options = Options(
        requests=REQUESTS, replications=4, seed=seed, precision=COARSE, most_replications=FEW_REPLICATIONS
    )

    @cache
    def simulated(cutoff_ms: float) -> Checked:
        policy = policies.cutoff(cutoff_ms, Limits(largest, 1))
        return check(policy, system, rate, percentile, plan.sla_ms, options)

    target = Target(plan.sla_ms, percentile / 100, plan.tokens_per_request)
    better = by_simulation(found, both, rate, target, simulated)
    plan = replace(plan, T_cut=better)
    if better.bound != "simulated":
        return plan
    old = cutoff_name(both, found.shown_ms)
    row = next(each for each in plan.alternatives if each.name == old)
    late = simulated(better.shown_ms).percentile.value
    granted = replace(
        row,
        name=cutoff_name(both, better.shown_ms),
        percentile_ms=late,
        margin=1 - late / plan.sla_ms,
        sustainable_per_s=max(row.sustainable_per_s or 0.0, rate * 1e3),
        replicas=1,
        verdict="meets the SLA in the simulation with the fitted service",
    )
    rows = [granted if each is row else each for each in plan.alternatives]
    plan = replace(plan, alternatives=rows, answer=plan.answer.replace(old, granted.name))
    return plan if plan.feasible else _rescued(plan, granted, wishes)


def _rescued(plan: Plan, row: Alternative, wishes: Wishes) -> Plan:
    """A plan that the law denied, with the way that the simulation grants."""
    assert row.margin is not None
    assert row.percentile_ms is not None
    taken = replace(row, chosen=True, verdict="taken: it " + row.verdict)
    binding = f"not known: the law denies {rate_text(plan.rate_per_s or 0.0)} already, for an exponential service"
    return replace(
        plan,
        feasible=True,
        alternatives=[taken if each is row else each for each in plan.alternatives],
        capacity=capacity_of([taken], wishes, binding) or plan.capacity,
        binding=binding,
        remedy="",
        answer=f"Serve {rate_text(plan.rate_per_s or 0.0)} with {row.name}: {plan.percentile:g} % of responses within"
        f" {format_ms(row.percentile_ms)} by simulation, {max(row.margin, 0.0):.1%} below {format_ms(plan.sla_ms)}.",
    )


def _both_paths(both: Both, plan: Plan) -> tuple[System, int]:
    """GPU and CPU with their scatter, and the GPU's largest batch."""
    phase, largest = phase_of(plan.tokens_per_request), both.gpu.times.max_batch or 1
    return System(_path(both.gpu, phase, largest), _path(both.cpu, phase, 1, alone=True)), largest


def _carried(plan: Plan, system: System, policy: Policy, rate: float, options: Options) -> float:
    """Rate per ms below `rate` that the way keeps the SLA at in the simulation, by bisection; 0 where none was found.

    The way stays as it was planned: its batches, its T_cut.
    """
    assert plan.percentile is not None
    low, high = 0.0, rate
    asked = replace(options, precision=COARSE, most_replications=FEW_REPLICATIONS)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        kept = check(policy, system, middle, plan.percentile, plan.sla_ms, asked).holds
        low, high = (middle, high) if kept else (low, middle)
    return low


def _simulated(machine: Machine, chosen: Alternative, plan: Plan, rate: float) -> tuple[System, Policy]:
    """The chosen way as a system and a policy."""
    phase = phase_of(plan.tokens_per_request)
    for part in machine.parts:
        if chosen.name == f"{part.label}, {ONE_AT_A_TIME}":
            return System(_path(part, phase, 1, alone=True)), policies.gpu_only(Limits(1))
        if chosen.name.startswith(f"{part.label}, "):
            best = part.times.best_batch()
            greedy = chosen.name.endswith(GREEDY)
            policy = policies.gpu_only(Limits(best)) if greedy else policies.marginal_cost(rate, Limits(best))
            return System(_path(part, phase, best)), policy
    assert machine.both is not None
    assert isinstance(plan.T_cut, Cutoff)
    system, largest = _both_paths(machine.both, plan)
    return system, policies.cutoff(plan.T_cut.shown_ms, Limits(largest, 1))


def _path(part: Part, phase: str, largest: int, *, alone: bool = False) -> ServicePath:
    """A path with the plan's mean times and the spread of its phase; alone: one request at a time, exponential where
    nothing is known."""
    times = part.times.table(1, largest)
    factors = residual_factors(part.path.fit, phase)
    if len(factors):
        mean = float(np.mean((factors[1:] + factors[:-1]) / 2))
        return table_path(part.path.name, times, factors=factors / mean)
    return table_path(part.path.name, times, exponential=alone)


def _with_way_out(plan: Plan, chosen: Alternative, machine: Machine, wishes: Wishes) -> Plan:
    """A plan at the edge of its SLA, with what would take it away from there: a T_cut that aims MARGIN below it, else a
    stricter SLA to plan for."""
    assert plan.percentile is not None
    aim = plan.sla_ms * (1 - MARGIN)
    target = Target(aim, plan.percentile / 100, plan.tokens_per_request)
    way_out = f"plan for --sla {format_ms(aim, 4).replace(' ', '')} or a lower rate"
    both, rate = machine.both, wishes.rate_each
    if "T_cut" in chosen.name and both is not None and rate is not None:
        with contextlib.suppress(SlaOutOfReach):
            inside = cutoff_plan(both, rate, target, wishes.objective)
            if inside.value is not None:
                way_out = f"T_cut {format_ms(inside.value)} keeps {MARGIN:.0%} of margin by formula; or {way_out}"
    told = (
        f"The plan is at the edge of {format_ms(plan.sla_ms)}, nearer than the simulation can tell (to"
        f" {PRECISION:.0%}). For a promise {way_out}."
    )
    return replace(plan, notes=[*plan.notes, told])


def _confirmed(plan: Plan, chosen: Alternative, found: Checked) -> Plan:
    """The plan with what the simulation found, which does not deny it."""
    return replace(
        _told(plan, chosen, found),
        promise="yes" if found.holds else "in doubt",
        answer=f"{plan.answer.split(' Cannot promise')[0]} Simulated: {_range(found)} (95 %).",
    )


def _told(plan: Plan, chosen: Alternative, found: Checked) -> Plan:
    notes = [text.partition("; --check")[0].rstrip(".") + "." for text in plan.notes]
    plan = replace(plan, checked={"way": chosen.name, **found.to_json()}, notes=notes)
    if not (isinstance(plan.T_cut, Cutoff) and "T_cut" in chosen.name):
        return plan
    bounds = {**plan.T_cut.bounds_ms, "simulated": found.percentile.value}
    holds = list(dict.fromkeys([*plan.T_cut.holds, "simulated"]))
    return replace(plan, T_cut=replace(plan.T_cut, bounds_ms=bounds, holds=holds))


def _range(found: Checked) -> str:
    return " to ".join(format_ms(end, 4) for end in (found.percentile.low, found.percentile.high))


def _denied(plan: Plan, chosen: Alternative, found: Checked, wishes: Wishes, carried: float) -> Plan:
    """The plan that the simulation denies, with the rate per ms that it would allow (0: none)."""
    assert plan.rate_per_s is not None
    assert chosen.percentile_ms is not None
    by_formula = format_ms(chosen.percentile_ms)
    needs = f"{chosen.name} needs {_range(found)} (95 %) where steps vary, {by_formula} by formula"
    allowed = carried * 1e3
    machines = math.ceil(plan.rate_per_s / allowed) if carried else None
    price = None if chosen.price_per_hour is None or not chosen.replicas else chosen.price_per_hour / chosen.replicas
    row = replace(
        chosen,
        sustainable_per_s=allowed or None,
        goodput_per_s=plan.rate_per_s * (found.result.slo_attainment or 0.0),
        replicas=machines,
        price_per_hour=None if price is None or machines is None else price * machines,
        verdict="meets the SLA by formula, misses it in the simulation",
    )
    rows = [row if each is chosen else each for each in plan.alternatives]
    binding = f"the SLA, beyond {rate_text(allowed)} in the simulation" if carried else "the SLA, at any rate tried"
    remedy = "No lower rate was found that it keeps the SLA at. Relax the SLA."
    if carried:
        wanted = math.ceil(plan.rate_per_s * wishes.replicas / allowed)
        remedy = (
            f"One machine carries {rate_text(allowed)} so ({chosen.name}); this rate needs {wanted} replicas:"
            f" --replicas {wanted}."
        )
    unknown = Unknown("the simulation found no rate at which the planned way meets the SLA")
    return replace(
        _told(plan, chosen, found),
        feasible=False,
        promise="no",
        alternatives=rows,
        capacity=capacity_of([row], wishes, binding) or unknown,
        binding=f"simulated, {needs}",
        remedy=remedy,
        answer=f"{rate_text(plan.rate_per_s)} cannot be served within {format_ms(plan.sla_ms)} for"
        f" {plan.percentile:g} % of responses: simulated, {needs}.",
    )
