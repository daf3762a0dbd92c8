"""What tuning an engine found: its runs, each planned and measured, and the settings that follow."""

import math
from typing import Any

from latfit.errors import BadInput
from latfit.messages import Message, message
from latfit.provenance import utc_now
from latfit.records import Record
from latfit.validation import LedgerEntry, PromisedFigure

MAX_CLIENT_DELAY = 0.1  # share of the TTFT limit
MAX_OTHER_CPUS = 0.1  # share of the CPUs that other programs may use; a load beside more is repeated once


class Run(Record, frozen=True, kw_only=True):
    """One load on one start of the engine.

    settings: its options, empty as started.  late_ms: p99 of how late the client sent.  others: share of the CPUs that
    other programs used; None where the engine was not started here.
    """

    name: str
    settings: dict[str, Any]
    rate_per_s: float
    requests: int
    failed: int
    late_ms: float
    others: float | None
    figures: list[PromisedFigure]

    @property
    def kept(self) -> bool:
        return not self.failed and bool(self.figures) and all(each.kept for each in self.figures)


class Tuning(Record, frozen=True, kw_only=True):
    """What tuning found. command: starts the engine with the settings; empty if there are none.

    settings: empty as started.  capacity_per_s: highest rate that the plan expects of one engine.  steps: what the fit
    was made from, `steps` or `windows`.
    """

    engine: str
    rate_per_s: float
    settings: dict[str, Any]
    command: str
    capacity_per_s: float | None
    capacity_interval_per_s: tuple[float, float] | None
    restarts: int
    seconds: float
    steps: str
    runs: list[Run]
    files: list[str]

    @property
    def tried(self) -> Run | None:
        """The last run with these settings; None if they were only planned."""
        return next((run for run in reversed(self.runs) if run.settings == self.settings), None)

    @property
    def messages(self) -> list[Message]:
        """What makes the answer less certain."""
        found = []
        for run in self.runs:
            limit = min((each.limit_ms for each in run.figures if "TTFT" in each.name), default=math.inf)
            if run.late_ms > MAX_CLIENT_DELAY * limit:
                found.append(message("late_client", run=run.name, late=run.late_ms))
            if (run.others or 0.0) > MAX_OTHER_CPUS:
                found.append(message("others_busy", run=run.name, share=run.others))
            if run.failed:
                found.append(message("failed_requests", run=run.name, failed=run.failed, requests=run.requests))
        if self.steps == "windows":
            text = "The engine wrote no single steps: settings rest on means over windows and are cautious"
            remedy = "vLLM writes them if latfit is installed in its environment and `latfit tune` starts it."
            found.append(message("window_means", what=text, remedy=remedy))
        missed = () if self.tried is None or self.tried.kept else self.tried.figures
        if slower := [each.name for each in missed if not each.as_planned]:
            found.append(message("not_as_planned", names=", ".join(slower)))
        return found

    def as_entry(self, source: str) -> LedgerEntry:
        """Return the last run under a plan for the ledger. source: the file of the tuning. Raises BadInput."""
        planned = [run for run in self.runs if any(each.planned_ms is not None for each in run.figures)]
        if not planned:
            remedy = "Tune with a rate that one engine meets."
            raise BadInput("no run of planned settings", where=source, remedy=remedy)
        last = planned[-1]
        return LedgerEntry(
            added=utc_now(),
            subject=self.engine,
            plan=source,
            run=last.name,
            planned_per_s=last.rate_per_s,
            measured_per_s=last.rate_per_s,
            requests=last.requests,
            failed=last.failed,
            figures=last.figures,
        )
