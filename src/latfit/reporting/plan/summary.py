"""A plan in ten lines: the verdict, the thresholds, the load that fits, the engine's settings, what needs action."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from latfit.exporting import TITLES, engine_key, start_line
from latfit.planning import Plan, Reach, Threshold, capacity_line
from latfit.reporting.fit.tables import Table
from latfit.reporting.format import count
from latfit.reporting.plan.tables import choices_table, interval_text
from latfit.units import format_ms

State = Literal["good", "doubt", "bad"]
OF_STEPS = ("too_few_samples", "steps_in_doubt", "no_prefill")
"""Warnings about limits of single steps."""

STATES: dict[str, State] = {"meets": "good", "likely": "doubt", "misses": "bad"}


@dataclass(frozen=True)
class PlanSummary:
    """verdict: the plan in a sentence, state: how sure it is.  lines: thresholds, load, settings.  warnings: what to do
    about the answer, the most important first; others: about limits of steps, where the answer is of a load.  choices:
    engine settings to choose from, where the answer is of steps."""

    verdict: str
    state: State
    lines: Sequence[str]
    warnings: Sequence[str]
    others: Sequence[str]
    choices: Table | None = None


def plan_summary(plan: Plan) -> PlanSummary:
    """The plan as a command prints it by default."""
    found = [_thresholds(plan)] if plan.both_paths else []
    if plan.capacity is not None:
        found.append(capacity_line(plan.capacity))
    told = plan.doubts if plan.promise == "likely" else ()
    beside = [warning for warning in plan.warnings if plan.rate_per_s is not None and warning.code in OF_STEPS]
    usable = plan.feasible and not plan.unsupported
    return PlanSummary(
        plan.answer,
        STATES[plan.promise],
        [*found, _engine(plan)] if usable else found,
        [*told, *(warning.text for warning in plan.warnings if warning not in beside)],
        [warning.text for warning in beside],
        choices_table(plan) if plan.rate_per_s is None and usable else None,
    )


def _thresholds(plan: Plan) -> str:
    waits = " with the wait at this rate" if plan.rate_per_s is not None and plan.B1.value is not None else ""
    said = [f"{_named('B1', plan.B1)}{waits}", _named("B2", plan.B2)]
    if plan.T_cut is None:
        said.append(f"T_cut: {plan.unknown['T_cut_ms']}")
    elif plan.T_cut.value is None:
        said.append("T_cut: no value lets GPU and CPU together meet the SLA")
    else:
        said.append(f"T_cut = {format_ms(plan.T_cut.value)} (by simulation)")
    return "; ".join(said)


def _named(name: str, found: Threshold) -> str:
    if found.value is None:
        return f"{name}: {found.reason}"
    always = " (always the GPU)" if found.reach is Reach.ALWAYS else ""
    return f"{name} = {count(found.value)}{always or interval_text(found)}"


def _engine(plan: Plan) -> str:
    """Return the settings as flags of the engine whose steps they are of."""
    if plan.settings is None:
        return f"Engine settings: {plan.unknown['settings']}."
    return f"{TITLES[_engine_key(plan)]} on {plan.settings.path}: {engine_line(plan)}"


def engine_line(plan: Plan) -> str:
    """Return the command that starts an engine with the plan's settings; empty if there are none."""
    usable = plan.settings is not None and plan.feasible and not plan.unsupported
    return start_line(_engine_key(plan), plan.engines) if usable else ""


def _engine_key(plan: Plan) -> str:
    return engine_key(each.system for each in plan.fits if each.path == plan.engines_path)
