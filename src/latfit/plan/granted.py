"""What a plan says once its ways were simulated: confirmed, served by another way, or denied."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from latfit.plan.capacity import capacity_of
from latfit.plan.result import Alternative, Cutoff, Plan, Unknown
from latfit.plan.wishes import Wishes
from latfit.plan.words import rate_text
from latfit.sim.check import Checked
from latfit.units import format_ms

DENIED = "meets the SLA by formula, misses it in the simulation"


def confirmed_plan(plan: Plan, chosen: Alternative, found: Checked) -> Plan:
    """The plan with what the simulation found, which does not deny it."""
    return replace(
        _told(plan, chosen, found),
        promise="yes" if found.holds else "in doubt",
        answer=f"{plan.answer.split(' Cannot promise')[0]} Simulated: {_range(found)} (95 %).",
    )


def taken_instead(
    plan: Plan, denied: Alternative, found: Checked, row: Alternative, wishes: Wishes
) -> tuple[Plan, Alternative]:
    """(the plan with `row` in place of the way that the simulation denied, the row as it is there)."""
    taken = replace(row, chosen=True, verdict="taken")
    rows = [
        taken if each is row else replace(each, chosen=False, verdict=DENIED) if each is denied else each
        for each in plan.alternatives
    ]
    note = f"{denied.name} meets {format_ms(plan.sla_ms)} by formula, and needs {_range(found)} in the simulation."
    binding = f"the SLA, beyond {rate_text(row.sustainable_per_s or 0.0)} by formula"
    return replace(
        _without_outlook(plan, [*plan.notes, note]),
        alternatives=rows,
        capacity=capacity_of([taken], wishes, binding) or plan.capacity,
        binding=binding,
        answer=_served(plan, taken, wishes, "by formula"),
    ), taken


def granted_by_simulation(plan: Plan, row: Alternative, name: str, late_ms: float, wishes: Wishes) -> Plan:
    """The plan with a T_cut's way that the law denies and the simulation grants: taken where nothing else was, or where
    it had been taken with another T_cut."""
    assert plan.rate_per_s is not None
    granted = replace(
        _carrying(row, max(row.sustainable_per_s or 0.0, plan.rate_per_s), plan.rate_per_s),
        name=name,
        percentile_ms=late_ms,
        margin=1 - late_ms / plan.sla_ms,
        verdict="meets the SLA in the simulation with the fitted service",
    )
    take = row.chosen or not plan.feasible
    if take:
        granted = replace(granted, chosen=True, verdict=f"taken: {granted.verdict}")
    plan = replace(plan, alternatives=[granted if each is row else each for each in plan.alternatives])
    if not take:
        return plan
    binding = "the SLA; a higher rate was not simulated"
    return replace(
        _without_outlook(plan, plan.notes),
        feasible=True,
        capacity=capacity_of([granted], wishes, binding) or plan.capacity,
        binding=binding,
        remedy="",
        answer=_served(plan, granted, wishes, "by simulation"),
    )


def denied_plan(plan: Plan, chosen: Alternative, found: Checked, wishes: Wishes, carried: Mapping[str, float]) -> Plan:
    """The plan that the simulation denies. carried: rate per ms that each way would carry in the simulation."""
    assert plan.rate_per_s is not None
    assert chosen.percentile_ms is not None
    by_formula = format_ms(chosen.percentile_ms)
    needs = f"{chosen.name} needs {_range(found)} (95 %) where steps vary, {by_formula} by formula"
    rows = []
    for row in plan.alternatives:
        if row.name in carried:
            verdict = DENIED if row.margin is not None and row.margin >= 0 else row.verdict
            row = replace(_carrying(row, carried[row.name] * 1e3, plan.rate_per_s), verdict=verdict)
        if row.chosen:
            row = replace(row, goodput_per_s=plan.rate_per_s * (found.result.slo_attainment or 0.0))
        rows.append(row)
    best = max(rows, key=lambda row: row.sustainable_per_s or 0.0)
    binding, remedy = "the SLA, at any rate tried", "No lower rate was found at which it is met. Relax the SLA."
    if best.sustainable_per_s:
        binding = f"the SLA, beyond {rate_text(best.sustainable_per_s)} in the simulation"
    capacity = capacity_of([best], wishes, binding)
    if capacity is not None and capacity.sustainable_per_s is not None:
        remedy = (
            f"One machine carries {rate_text(capacity.sustainable_per_s)} in the simulation ({best.name}); this rate"
            f" takes {capacity.replicas} replicas of it: --replicas {capacity.replicas}."
        )
    return replace(
        _told(_without_outlook(plan, plan.notes), chosen, found),
        feasible=False,
        promise="no",
        alternatives=rows,
        capacity=capacity or Unknown("the simulation found no rate at which a way meets the SLA"),
        binding=f"simulated, {needs}",
        remedy=remedy,
        answer=f"{rate_text(plan.rate_per_s)} cannot be served within {format_ms(plan.sla_ms)} for"
        f" {plan.percentile:g} % of responses: simulated, {needs}.",
    )


def _carrying(row: Alternative, carried_per_s: float, rate_per_s: float) -> Alternative:
    """A way with another load that it carries, and the machines and the price that follow."""
    price = None if row.price_per_hour is None or not row.replicas else row.price_per_hour / row.replicas
    machines = math.ceil(rate_per_s / carried_per_s * (1 - 1e-9)) if carried_per_s else None
    return replace(
        row,
        sustainable_per_s=carried_per_s or None,
        replicas=machines,
        price_per_hour=None if price is None or machines is None else price * machines,
    )


def _without_outlook(plan: Plan, notes: Sequence[str]) -> Plan:
    """Without what was computed by formula for a way that is not the plan's any more."""
    return replace(plan, sensitivity=(), frontier=(), notes=notes)


def _served(plan: Plan, row: Alternative, wishes: Wishes, how: str) -> str:
    assert row.margin is not None
    assert row.percentile_ms is not None
    each = f" on each of {wishes.replicas} replicas" if wishes.replicas > 1 else ""
    return (
        f"Serve {rate_text(plan.rate_per_s or 0.0)}{each} with {row.name}: {plan.percentile:g} % of responses within"
        f" {format_ms(row.percentile_ms)} {how}, {max(row.margin, 0.0):.1%} below {format_ms(plan.sla_ms)}."
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
