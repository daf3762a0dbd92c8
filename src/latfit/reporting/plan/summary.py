"""A plan in ten lines."""

from collections.abc import Sequence
from dataclasses import dataclass

from latfit.engines import BY_KEY, engine_key
from latfit.exporting import start_line
from latfit.planning import CONFIRMED, MEASURED, Plan, capacity_line
from latfit.reporting.plan.tables import choices_table, limits_table, thresholds_table
from latfit.reporting.table import State, Table
from latfit.units import format_percent

STATES: dict[str, State] = {"meets": "good", "likely": "doubt", "misses": "bad"}
OF_STEPS = ("few_data", "no_prefill")  # warnings about limits of single steps


@dataclass(frozen=True)
class PlanSummary:
    """The verdict with its state, and the lines below it.

    warnings: the most important first. others: warnings about limits of steps where the answer is of a load. tables:
    thresholds of two paths, and engine settings to choose from.
    """

    verdict: str
    state: State
    lines: Sequence[str]
    warnings: Sequence[str]
    others: Sequence[str]
    tables: Sequence[Table] = ()


def probability_text(probability: float) -> str:
    return "97.5 % or more" if probability >= CONFIRMED else format_percent(100 * probability)


def plan_summary(plan: Plan) -> PlanSummary:
    lines = [] if plan.capacity is None else [capacity_line(plan.capacity)]
    if command := engine_line(plan):
        edge = " (limited by the measured range)" if plan.settings and plan.settings.binding == MEASURED else ""
        lines.append(f"{BY_KEY[_engine_key(plan)].name} on {plan.engines_path}: {command}{edge}")
    elif _is_usable(plan):
        lines.append(f"Engine settings: {plan.unknown['settings']}.")
    tables = [limits_table(plan)] if plan.rate_per_s is None and plan.feasible else []
    if plan.both_paths:
        tables.append(thresholds_table(plan, brief=True))
    if plan.rate_per_s is None and plan.settings is not None and _is_usable(plan):
        tables.append(choices_table(plan.settings))
    others = [each for each in plan.warnings if plan.rate_per_s is not None and each.code in OF_STEPS]
    doubts = plan.doubts if plan.promise == "likely" else ()
    return PlanSummary(
        plan.answer,
        STATES[plan.promise],
        lines,
        [*doubts, *(each.text for each in plan.warnings if each not in others)],
        [each.text for each in others],
        tables,
    )


def engine_line(plan: Plan) -> str:
    """Return the command that starts an engine with the plan's settings; empty if there are none."""
    usable = plan.settings is not None and _is_usable(plan)
    return start_line(_engine_key(plan), plan.engines, model="MODEL") if usable else ""


def _is_usable(plan: Plan) -> bool:
    return plan.feasible and not plan.unsupported


def _engine_key(plan: Plan) -> str:
    return engine_key(each.system for each in plan.fits if each.path == plan.engines_path)
