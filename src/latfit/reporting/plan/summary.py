"""A plan in ten lines: the verdict, the thresholds, the load that fits, the engine's settings, what needs action."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from latfit.exporting import TITLES, engine_key, start_line
from latfit.planning import Capacity, Cutoff, Plan, Reach, Settings, Threshold, Unknown, backed_by, capacity_line
from latfit.reporting.fit.tables import Table
from latfit.reporting.format import count
from latfit.reporting.plan.tables import choices_table, interval_text
from latfit.units import format_ms
from latfit.warning import LatfitWarning

State = Literal["good", "doubt", "bad"]
OF_STEPS = ("too_few_samples", "steps_in_doubt", "no_prefill")
"""Warnings about limits of single steps."""

STATES: dict[str, State] = {"yes": "good", "in doubt": "doubt", "no": "bad"}


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
    if isinstance(plan.capacity, Capacity):
        found.append(capacity_line(plan.capacity))
    doubts = plan.why_in_doubt if plan.promise == "in doubt" and plan.load is not None else ()
    told = [warning for warning in doubts if warning not in plan.unsupported]
    beside = [warning for warning in plan.warnings if plan.load is not None and warning.code in OF_STEPS]
    return PlanSummary(
        plan.answer,
        STATES[plan.promise],
        [*found, _engine(plan)] if plan.feasible else found,
        [*told, *(_sentence(warning) for warning in plan.warnings if warning not in beside)],
        [_sentence(warning) for warning in beside],
        choices_table(plan) if plan.load is None and plan.feasible else None,
    )


def _sentence(warning: LatfitWarning) -> str:
    return f"{warning.message} {warning.remedy}"


def _thresholds(plan: Plan) -> str:
    steps = plan.steps
    waits = " with the wait at this rate" if plan.load is not None and plan.B1.value is not None else ""
    said = [f"{_named('B1', plan.B1)}{waits}", _named("B2", steps.B2)]
    if not isinstance(plan.T_cut, Cutoff):
        said.append(f"T_cut: {plan.T_cut.reason}")
    elif plan.T_cut.value is None:
        said.append("T_cut: no value lets GPU and CPU together meet the SLA")
    else:
        said.append(f"T_cut = {format_ms(plan.T_cut.value)} ({backed_by(plan.T_cut.bound)})")
    return "; ".join(said)


def _named(name: str, found: Threshold | Unknown) -> str:
    if found.value is None:
        return f"{name}: {found.reason}"
    always = " (always the GPU)" if found.reach is Reach.ALWAYS else ""
    return f"{name} = {count(found.value)}{always or interval_text(found)}"


def _engine(plan: Plan) -> str:
    """The settings as flags of the engine whose steps they are of."""
    if not isinstance(plan.settings, Settings):
        return f"Engine settings: {plan.settings.reason}."
    key = engine_key(each.system for each in plan.fits if each.path == plan.engines_path)
    return f"{TITLES[key]} on {plan.settings.path}: {start_line(key, plan.engines)}"
