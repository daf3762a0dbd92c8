"""`ledger`: what plans promised, and what runs of the same load measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latfit import reporting, validation
from latfit.api.answer import State, WithPage
from latfit.api.loads import recording_of
from latfit.api.request import verb
from latfit.api.requests import LedgerAddRequest, LedgerRequest
from latfit.errors import BadInput
from latfit.inputs import read_json
from latfit.planning import ServingPlan
from latfit.tuning import Tuning
from latfit.units import count_text


@dataclass(frozen=True, repr=False, eq=False)
class LedgerAnswer(WithPage):
    """Promises with what was measured. result: the record."""

    result: validation.Ledger
    title = "Ledger of promises"

    @property
    def verdict(self) -> str:
        kept, all_ = self.result.kept
        if not all_:
            return "The ledger has no run of a planned load."
        return f"{kept} of {count_text(all_, 'promise')} kept, in {count_text(len(self.result.counted), 'run')}."

    @property
    def state(self) -> State:
        kept, all_ = self.result.kept
        return "good" if all_ and kept == all_ else "doubt" if not all_ else "bad"

    @property
    def lines(self) -> list[str]:
        return reporting.ledger_lines(self.result)

    def tables(self, *, brief: bool = False) -> "list[reporting.Table]":
        return [reporting.ledger_table(self.result, brief=brief)] if self.result.entries else []

    def to_json(self) -> dict[str, Any]:
        kept, all_ = self.result.kept
        coverage = self.result.coverage_pct
        share, interval = (None, None) if coverage is None else coverage
        return self.result.to_json() | {
            "kept": kept,
            "promises": all_,
            "coverage_pct": share,
            "coverage_interval_pct": None if interval is None else list(interval),
        }


@verb(LedgerRequest)
def ledger(request: LedgerRequest) -> LedgerAnswer:
    """Show what plans promised and what runs measured. Raises BadInput."""
    source = Path(request.ledger)
    if not source.exists():
        raise BadInput("no such ledger", where=str(source), remedy="Begin one: latfit ledger add plan.json run.json.")
    return LedgerAnswer(validation.read_ledger(source))


@verb(LedgerAddRequest)
def add_to_ledger(request: LedgerAddRequest) -> LedgerAnswer:
    """Compare a run with its plan and add both to a ledger.

    plan: a plan for requests, or the tune.json of `latfit tune`, which has its run. Raises BadInput, TargetNotWritable.
    """
    source = Path(request.plan)
    document = read_json(source, what="plan", made_by="latfit plan --out plan.json")
    tuned = isinstance(document, Mapping) and "runs" in document
    if tuned == (request.run is not None):
        found = "a tuning has its own run" if tuned else "no run is given"
        raise BadInput(found, where=str(source), remedy="Give plan.json and run.json, or tune.json alone.")
    if tuned:
        entry = Tuning.from_json(document, str(source)).as_entry(str(source))
    else:
        plan = ServingPlan.from_json(document, str(source))
        entry = validation.compare_with_plan(plan, recording_of(request.run), str(source))
    return LedgerAnswer(validation.add_entry(Path(request.ledger), entry))
