"""A plan in ten lines: the verdict, the thresholds, the load that fits, the engine's settings, what needs action."""

from collections.abc import Sequence
from dataclasses import dataclass

from latfit.engines import BY_KEY, engine_key
from latfit.exporting import start_line
from latfit.planning import Plan, Reach, Threshold, capacity_line
from latfit.reporting.format import count
from latfit.reporting.plan.tables import choices_table, interval_text
from latfit.reporting.table import State, Table
from latfit.units import format_ms, format_percent

STATES: dict[str, State] = {"meets": "good", "likely": "doubt", "misses": "bad"}
OF_STEPS = ("too_few_samples", "steps_in_doubt", "no_prefill")  # warnings about limits of single steps


@dataclass(frozen=True)
class PlanSummary:
    """The verdict with its state, and the lines below it.

    warnings: what to do about the answer, the most important first.  others: warnings about limits of steps where the
    answer is of a load.  choices: engine settings to choose from where the answer is of steps.
    """

    verdict: str
    state: State
    lines: Sequence[str]
    warnings: Sequence[str]
    others: Sequence[str]
    choices: Table | None = None


def probability_text(probability: float) -> str:
    """In percent, as far as an estimate supports it."""
    return "97.5 % or more" if probability >= 0.975 else format_percent(100 * probability)


def plan_summary(plan: Plan) -> PlanSummary:
    """The plan as a command prints it by default."""
    lines = [_thresholds(plan)] if plan.both_paths else []
    if plan.capacity is not None:
        lines.append(capacity_line(plan.capacity))
    if command := engine_line(plan):
        lines.append(f"{BY_KEY[_engine_key(plan)].name} on {plan.engines_path}: {command}")
    elif _is_usable(plan):
        lines.append(f"Engine settings: {plan.unknown['settings']}.")
    others = [each for each in plan.warnings if plan.rate_per_s is not None and each.code in OF_STEPS]
    doubts = plan.doubts if plan.promise == "likely" else ()
    return PlanSummary(
        plan.answer,
        STATES[plan.promise],
        lines,
        [*doubts, *(each.text for each in plan.warnings if each not in others)],
        [each.text for each in others],
        choices_table(plan.settings) if plan.rate_per_s is None and plan.settings and _is_usable(plan) else None,
    )


def _thresholds(plan: Plan) -> str:
    waits = " with the wait at this rate" if plan.rate_per_s is not None and plan.B1.value is not None else ""
    cutoff = "T_cut: no value lets GPU and CPU together meet the SLA"
    if plan.T_cut is None:
        cutoff = f"T_cut: {plan.unknown['T_cut_ms']}"
    elif plan.T_cut.value is not None:
        cutoff = f"T_cut = {format_ms(plan.T_cut.value)} (by simulation)"
    return f"{_threshold('B1', plan.B1)}{waits}; {_threshold('B2', plan.B2)}; {cutoff}"


def _threshold(name: str, threshold: Threshold) -> str:
    if threshold.value is None:
        return f"{name}: {threshold.reason}"
    always = " (always the GPU)" if threshold.reach is Reach.ALWAYS else ""
    return f"{name} = {count(threshold.value)}{always or interval_text(threshold)}"


def engine_line(plan: Plan) -> str:
    """Return the command that starts an engine with the plan's settings; empty if there are none."""
    usable = plan.settings is not None and _is_usable(plan)
    return start_line(_engine_key(plan), plan.engines) if usable else ""


def _is_usable(plan: Plan) -> bool:
    return plan.feasible and not plan.unsupported


def _engine_key(plan: Plan) -> str:
    return engine_key(each.system for each in plan.fits if each.path == plan.engines_path)
