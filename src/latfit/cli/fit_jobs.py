"""Which fits `latfit fit` makes of what it read: one a system, with its path and its file."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from latfit.trace.ingest import Ingested
    from latfit.trace.table import Trace

ASSUMED_PATH = "gpu"
"""Steps that say nothing of where they ran come from an engine's log, and engines run on GPUs."""


@dataclass(frozen=True)
class Job:
    """One system to fit: its identity (empty where the file holds one), rows, execution path, and where the fit goes.

    path is None where the fit belongs to no machine's profile; assumed: nobody said which path it is.
    """

    system: Mapping[str, str]
    rows: "Trace"
    path: str | None
    target: Path
    assumed: bool

    @property
    def label(self) -> str:
        return ".".join(_file_safe(value) for value in self.system.values())


def plan_jobs(ingested: "Ingested", *, each: bool, path: str | None, out: Path | None) -> list[Job]:
    """The systems of a trace: one a path; several of hardware, model or tp only with --each."""
    from latfit.trace.ingest import check_one_machine

    if not each:
        check_one_machine(ingested)
    systems = list(ingested.trace.systems())
    several_machines = any(set(system) - {"path"} for system, _ in systems) and each
    jobs = []
    for system, rows in systems:
        named = str(rows["path"][0]) if "path" in rows else path or ingested.path
        entered = None if several_machines else named or ASSUMED_PATH
        jobs.append(Job(system, rows, entered, Path(), assumed=named is None))
    stem = Path(ingested.sources[0].name).name.partition(".")[0] or "trace"
    return [replace(job, target=_target(out or Path(f"{stem}.fit.json"), job.label)) for job in jobs]


def _target(out: Path, label: str) -> Path:
    """NAME.fit.json, or NAME.LABEL.fit.json where a file holds several systems."""
    if not label:
        return out
    return out.with_name(f"{out.name.removesuffix('.json').removesuffix('.fit')}.{label}.fit.json")


def _file_safe(value: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in value) or "unnamed"
