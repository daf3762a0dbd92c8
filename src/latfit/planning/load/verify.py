"""A plan against a simulation: the chosen way in the simulator of `latfit simulate`, event by event, beside the law
that the plan was made with. Both have the same mean times and the same scatter; they share no code that serves a
request.

The ways of a plan in the simulator.

The simulated steps have the plan's mean times and scatter as measured; a path whose scatter nobody knows takes its mean
time every time, or an exponential one where the plan assumed that (a CPU that serves one request at a time).
"""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.hardware import HardwareProfile
from latfit.planning.load.cutoff import cutoff_plan
from latfit.planning.load.strategies import GREEDY, ONE_AT_A_TIME, Machine, Part, Target, machine_of
from latfit.planning.request import Wishes
from latfit.planning.result import Alternative, Cutoff, Plan
from latfit.planning.wording import rate_text
from latfit.policies import Limits, Policy, policy as policies
from latfit.simulation import Checked, Options, ServicePath, System, check, table_path
from latfit.units import format_ms

PRECISION = 0.01
OPTIONS = Options(precision=PRECISION, most_replications=40)


def simulated_way(machine: Machine, row: Alternative, plan: Plan, rate: float, seed: int) -> Checked:
    """A way of a plan at a rate per ms, until its percentile is known."""
    assert plan.percentile is not None
    system, policy = _simulated(machine, row, plan, rate)
    return check(policy, system, rate, plan.percentile, plan.sla_ms, replace(OPTIONS, seed=seed))


def _simulated(machine: Machine, row: Alternative, plan: Plan, rate: float) -> tuple[System, Policy]:
    """A way as a system and a policy."""
    for part in machine.parts:
        if row.name == f"{part.label}, {ONE_AT_A_TIME}":
            return System(_path(part, 1, alone=True)), policies.gpu_only(Limits(1))
        if row.name.startswith(f"{part.label}, "):
            best = part.times.best_batch()
            greedy = row.name.endswith(GREEDY)
            policy = policies.gpu_only(Limits(best)) if greedy else policies.marginal_cost(rate, Limits(best))
            return System(_path(part, best)), policy
    both = machine.both
    assert both is not None
    assert isinstance(plan.T_cut, Cutoff)
    largest = both.gpu.times.max_batch or 1
    system = System(_path(both.gpu, largest), _path(both.cpu, 1, alone=True))
    return system, policies.cutoff(plan.T_cut.shown_ms, Limits(largest, 1))


def _path(part: Part, largest: int, *, alone: bool = False) -> ServicePath:
    """alone: one request at a time, exponential where nothing is known."""
    times, law = part.times.table(1, largest), part.times.scatter
    return table_path(part.path.name, times, scatter=law, exponential=alone and law is None)


MARGIN = 0.02
"""Share of the SLA that a plan in doubt is told to keep: the simulation tells twice its precision."""


def confirmed(plan: Plan, profile: HardwareProfile, wishes: Wishes, seed: int = 0) -> Plan:
    """The plan with `checked`: the simulated percentile of the chosen way with its 95 % interval, and whether it keeps
    the SLA; not feasible where the simulation denies it. Raises WrongUsage for a plan without a rate, or at one so low
    that the simulation's clock cannot tell a response."""
    rate = wishes.rate_each
    if rate is None:
        raise WrongUsage("there is no load to simulate", where="--check", remedy="Give --rate or --arrivals.")
    chosen = next((row for row in plan.alternatives if row.chosen), None)
    if chosen is None or plan.percentile is None:
        return plan
    machine = machine_of(profile, plan.tokens_per_request, wishes)
    found = simulated_way(machine, chosen, plan, rate, seed)
    plan = _told(plan, chosen, found)
    if found.holds is False:
        return _denied(plan, chosen, found)
    said, unsure, rest = plan.answer.partition(" Cannot promise")
    plan = replace(plan, answer=f"{said} Simulated: {_range(found)} (95 %).{unsure}{rest}")
    if found.holds:
        return plan
    return _with_way_out(replace(plan, promise="in doubt"), chosen, machine, wishes)


def _told(plan: Plan, chosen: Alternative, found: Checked) -> Plan:
    checked: Mapping[str, Any] = {"way": chosen.name, **found.to_json()}
    if not (isinstance(plan.T_cut, Cutoff) and "T_cut" in chosen.name):
        return replace(plan, checked=checked)
    bounds = {**plan.T_cut.bounds_ms, "checked": found.percentile.value}
    return replace(plan, checked=checked, T_cut=replace(plan.T_cut, bounds_ms=bounds))


def _denied(plan: Plan, chosen: Alternative, found: Checked) -> Plan:
    needs = f"simulated, {chosen.name} needs {_range(found)} (95 %)"
    wanted = format_ms(found.percentile.high * (1 + MARGIN), 4).replace(" ", "")
    return replace(
        plan,
        feasible=False,
        promise="no",
        binding=needs,
        remedy=f"Ask for --sla {wanted}, or for a lower rate.",
        answer=f"{rate_text(plan.rate_per_s or 0.0)} cannot be served within {format_ms(plan.sla_ms)} for"
        f" {plan.percentile:g} % of responses: {needs}.",
    )


def _range(found: Checked) -> str:
    return " to ".join(format_ms(end, 4) for end in (found.percentile.low, found.percentile.high))


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
