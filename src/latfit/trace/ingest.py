"""The one way into latfit for measured steps: read, pick rows, clean. Every command that takes a trace comes through
here.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from latfit.errors import BadInput, WrongUsage
from latfit.trace.clean import Cleaned, clean
from latfit.trace.readers import Options, open_source, reader_for
from latfit.trace.schema import BY_NAME, IDENTITY
from latfit.trace.table import Trace
from latfit.trace.where import matching_rows
from latfit.units import MS_PER_UNIT


@dataclass(frozen=True)
class Reading:
    """How to read a source: column map, unit of the latency column, format, row filter, limit on T in ms."""

    column_map: Mapping[str, str] = field(default_factory=dict)
    unit: str | None = None
    format: str = "auto"
    where: str | None = None
    max_ms: float | None = None


@dataclass(frozen=True)
class Ingested:
    """A clean trace with the facts that a fit stores about its data."""

    source: Path
    sha256: str
    reading: Reading
    cleaned: Cleaned

    @property
    def trace(self) -> Trace:
        return self.cleaned.trace


def ingest(source: Path, reading: Reading | None = None) -> Ingested:
    """Read, filter and clean `source`. Raises BadInput, WrongUsage."""
    reading = reading or Reading()
    if reading.unit is not None and reading.unit not in MS_PER_UNIT:
        raise WrongUsage(f"{reading.unit!r} is not a unit", where="--unit", remedy=f"Choose: {', '.join(MS_PER_UNIT)}.")
    opened = open_source(source)
    trace = reader_for(opened, reading.format).read(opened, Options(reading.column_map, reading.unit))
    if len(trace) == 0:
        raise BadInput("the table has no rows", where=str(source), remedy="Check how it was made, and make it again.")
    if reading.where:
        trace = trace.select(matching_rows(trace, reading.where))
        if len(trace) == 0:
            raise BadInput(f"no row matches {reading.where!r}", where=str(source), remedy="Correct --where.")
    cleaned = clean(trace, max_ms=reading.max_ms)
    if cleaned.rows_used == 0:
        counts = ", ".join(f"{n} {reason}" for reason, n in cleaned.dropped.items())
        raise BadInput(
            f"none of its {cleaned.rows_read} rows can be used (dropped: {counts})",
            where=str(source),
            remedy="B is requests (>= 1), S tokens (>= B), T_ms milliseconds (> 0): check them, or --map and --unit.",
        )
    return Ingested(source, _sha256(source), reading, cleaned)


def parse_column_map(text: str | None) -> dict[str, str]:
    """{latfit's name: the file's name} from `B=batch,T_ms=latency`. Raises WrongUsage."""
    pairs = [pair.partition("=") for pair in (text or "").split(",") if pair.strip()]
    broken = [ours for ours, sign, theirs in pairs if not sign or ours.strip() not in BY_NAME or not theirs.strip()]
    if broken:
        raise WrongUsage(
            f"{broken[0]!r} does not map a column of a trace",
            where="--map",
            remedy=f"Write NAME=COLUMN pairs such as B=batch,S=tokens,T_ms=latency; names are {', '.join(BY_NAME)}.",
        )
    return {ours.strip(): theirs.strip() for ours, _, theirs in pairs}


def check_one_machine(ingested: Ingested) -> None:
    """Rows that differ in hardware, model or tp within one execution path never share a fit.

    Several paths of one machine do not hinder: each gets its fit. Raises BadInput that lists the systems.
    """
    systems = list(ingested.trace.systems())
    paths = {key.get("path", "") for key, _ in systems}
    if len(systems) == len(paths):
        return
    shown = "; ".join(f"{system_filter(key)} ({len(rows)} rows)" for key, rows in systems[:4])
    more = f"; and {len(systems) - 4} more" if len(systems) > 4 else ""
    columns = ", ".join(name for name in IDENTITY if name in systems[0][0])
    raise BadInput(
        f"holds {len(systems)} systems (by {columns}): {shown}{more}",
        where=str(ingested.source),
        remedy="Fit one with --where, or each of them with --each.",
    )


def data_facts(ingested: Ingested, system: Mapping[str, str], rows: int) -> dict[str, Any]:
    """The `data` of a fit's JSON: what was read and how, so that `read_again` finds the same rows."""
    cleaned = ingested.cleaned
    return {
        "source": str(ingested.source.resolve()),
        "sha256": ingested.sha256,
        "rows_read": cleaned.rows_read,
        "rows_used": rows,
        "dropped": dict(cleaned.dropped),
        "reading": asdict(ingested.reading),
        "system": dict(system),
    }


def read_again(data: Mapping[str, Any]) -> Trace:
    """The clean rows that a fit with these `data` was made from. Raises BadInput where they are gone or changed."""
    source = Path(str(data.get("source", "")))
    ingested = ingest(source, Reading(**data.get("reading", {})))
    if ingested.sha256 != data.get("sha256"):
        raise BadInput("has changed since the fit was made", where=str(source), remedy="Fit it again.")
    system = data.get("system", {})
    for key, rows in ingested.trace.systems():
        if key == system:
            return rows
    return ingested.trace


def system_filter(key: Mapping[str, str]) -> str:
    """The --where expression that picks a system."""
    return " and ".join(f"{name} == {value if value.isdigit() else repr(value)}" for name, value in key.items())


def _sha256(source: Path) -> str:
    digest = hashlib.sha256()
    with source.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
