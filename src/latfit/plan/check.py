"""A plan against a simulation: the chosen way, with the scatter that the fits saw, until its percentile is known.

Where the CPU's service is far from exponential, its T_cut is looked for by simulation first. A way that the simulation
denies gives place to the next that meets the SLA by formula; where all are denied, each is asked what load it would
carry.
"""

import contextlib
from dataclasses import replace

from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.hardware.profile import HardwareProfile
from latfit.plan.alternatives import ROUNDING, cutoff_name
from latfit.plan.cutoff import cutoff_plan
from latfit.plan.granted import confirmed_plan, denied_plan, granted_by_simulation, taken_instead
from latfit.plan.result import Alternative, Cutoff, Plan
from latfit.plan.simulated_cutoff import by_simulation
from latfit.plan.simulated_way import PRECISION, Simulator
from latfit.plan.systems import Machine, Target, machine_of
from latfit.plan.wishes import Wishes
from latfit.units import format_ms

MARGIN = 0.02
"""Share of the SLA that a plan in doubt is told to keep: the simulation tells twice its precision."""


def confirmed(plan: Plan, profile: HardwareProfile, wishes: Wishes, seed: int = 0) -> Plan:
    """The plan with `checked`: the simulated percentile of the chosen way with its 95 % interval, and whether it keeps
    the SLA. A plan of which the simulation denies every way is not feasible. Raises WrongUsage for a plan without a
    rate, or at one so low that the simulation's clock cannot tell a response."""
    rate = wishes.rate_each
    if rate is None:
        raise WrongUsage("there is no load to simulate", where="--check", remedy="Give --rate or --arrivals.")
    if plan.percentile is None:
        return plan
    machine = machine_of(profile, plan.tokens_per_request, wishes)
    simulator = Simulator(machine, plan, plan.percentile, seed)
    plan = _with_simulated_cutoff(plan, simulator, wishes, rate)
    chosen = next((row for row in plan.alternatives if row.chosen), None)
    if chosen is None:
        return plan
    first = simulator.check(chosen, plan, rate)
    for row in [chosen, *(each for each in plan.alternatives if _meets(each) and each is not chosen)]:
        found = first if row is chosen else simulator.check(row, plan, rate)
        if found.holds is False:
            continue
        if row is not chosen:
            plan, row = taken_instead(plan, chosen, first, row, wishes)
        plan = confirmed_plan(plan, row, found)
        return plan if found.holds else _with_way_out(plan, row, machine, wishes)
    able = [row for row in plan.alternatives if row.sustainable_per_s]
    carried = {row.name: simulator.carried(row, plan, min(rate, (row.sustainable_per_s or 0.0) / 1e3)) for row in able}
    return denied_plan(plan, chosen, first, wishes, carried)


def _meets(row: Alternative) -> bool:
    return row.margin is not None and row.margin >= -ROUNDING


def _with_simulated_cutoff(plan: Plan, simulator: Simulator, wishes: Wishes, rate: float) -> Plan:
    """The plan with a T_cut that the simulation vouches for, where the law's service is far from the fitted one."""
    found, both = plan.T_cut, simulator.machine.both
    if both is None or not isinstance(found, Cutoff) or found.service["plausible"] is not False:
        return plan
    target = Target(plan.sla_ms, simulator.percentile / 100, plan.tokens_per_request)
    better = by_simulation(found, both, rate, target, lambda cutoff_ms: simulator.cutoff(cutoff_ms, rate))
    plan = replace(plan, T_cut=better)
    if better.bound != "simulated":
        return plan
    row = next(each for each in plan.alternatives if each.name == cutoff_name(both, found.shown_ms))
    late = simulator.cutoff(better.shown_ms, rate).percentile.value
    return granted_by_simulation(plan, row, cutoff_name(both, better.shown_ms), late, wishes)


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
