"""The one way into latfit for measured steps: read, pick rows, clean. Every command that takes a trace comes through
here.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np

from latfit.errors import BadInput, WrongUsage
from latfit.threads import on_threads
from latfit.trace.clean import Cleaned, CleanOptions, check_not_most, clean
from latfit.trace.columns import BY_NAME, IDENTITY
from latfit.trace.filter import matching_rows
from latfit.trace.period import COMPUTE, MOSTLY, NO_PERIOD, PERIOD, no_periods, with_period
from latfit.trace.readers import reader_for
from latfit.trace.readers.reader import Options, Reader
from latfit.trace.readers.source import Source, open_source
from latfit.trace.readers.table import steps_of
from latfit.trace.recompute import with_recompute
from latfit.trace.serving_engine import engine_counts, path_on
from latfit.trace.sketch.histogram import WEIGHT, step_count
from latfit.trace.table import Trace, concatenated, phases
from latfit.units import MS_PER_UNIT


@dataclass(frozen=True)
class Reading:
    """How to read sources: column map, unit of the latency column, format, row filter, and what cleaning does."""

    column_map: Mapping[str, str] = field(default_factory=dict)
    unit: str | None = None
    format: str = "auto"
    where: str | None = None
    cleaning: CleanOptions = field(default_factory=CleanOptions)


IN_MEMORY = "a table in memory"
"""The source of a fit that was made from no file."""


@dataclass(frozen=True, repr=False)
class CleanTrace:
    """A clean trace with the facts that a fit stores about its data.

    formats: the reader of each source.  path: the execution path that the formats imply, where they do.
    everything: the rows as read, before cleaning.  time: what T_ms is: compute, the time that the source tells, or the
    period from one step to the next (see `timed`).
    """

    sources: Sequence[Source]
    sha256: str
    reading: Reading
    cleaned: Cleaned
    formats: Sequence[str]
    path: str | None
    everything: Trace
    time: str = COMPUTE

    @property
    def trace(self) -> Trace:
        return self.cleaned.trace

    @property
    def frame(self) -> Any:
        """The steps as a pandas DataFrame."""
        return self.trace.to_pandas()

    @property
    def rows_read(self) -> int:
        return self.cleaned.rows_read

    @property
    def dropped(self) -> Mapping[str, int]:
        """How many rows each rule of cleaning dropped."""
        return self.cleaned.dropped

    @property
    def marked(self) -> Mapping[str, int]:
        """How many rows are marked (outliers) and still in."""
        return self.cleaned.marked

    def __len__(self) -> int:
        return len(self.trace)

    def __repr__(self) -> str:
        return f"{self.cleaned!r}, from {self.name}"

    @cached_property
    def systems(self) -> list[tuple[dict[str, str], Trace]]:
        """What tells each system from the others, and its rows: see `Trace.systems`."""
        return list(self.trace.systems())

    @property
    def name(self) -> str:
        """What errors call it."""
        if not self.sources:
            return "the table"
        more = f" and {len(self.sources) - 1} more" if len(self.sources) > 1 else ""
        return f"{self.sources[0].name}{more}"


def ingest(names: str | Path | Sequence[str | Path], reading: Reading | None = None) -> CleanTrace:
    """Read, filter and clean one file or several, globs, or `-` for standard input. Raises BadInput, WrongUsage."""
    reading = reading or Reading()
    check_unit_name(reading)
    sources = opened([names] if isinstance(names, str | Path) else names)
    readers = [reader_for(source, reading.format) for source in sources]
    options = Options(reading.column_map, reading.unit)
    with np.errstate(over="ignore", invalid="ignore"):  # what no step can hold is dropped by cleaning
        parts = [reader.read(source, options) for reader, source in zip(readers, sources, strict=True)]
    trace = concatenated(parts, [source.name for source in sources])
    trace = with_period(with_recompute(trace))
    implied = {_path_of(reader, part) for reader, part in zip(readers, parts, strict=True)}
    where = sources[0].name if len(sources) == 1 else f"{len(sources)} files"
    with on_threads(1) as beside:
        digest = beside.submit(sha256_of_files, sources)
        picked, cleaned = cleaned_steps(trace, reading, where)
    path = implied.pop() if len(implied) == 1 else None
    formats = [reader.name for reader in readers]
    return CleanTrace(sources, digest.result(), reading, cleaned, formats, path, picked, _time_in_cells(trace))


def _path_of(reader: Reader, part: Trace) -> str | None:
    """The path that a format implies, and the device that an engine names where it is another one."""
    device = part.provenance.get("device_type")
    return path_on(device) if reader.path is not None and isinstance(device, str) else reader.path


def ingest_table(table: Trace, reading: Reading | None = None, name: str = "the table") -> CleanTrace:
    """A table in memory, under whatever column names, filtered and cleaned. Raises BadInput, WrongUsage."""
    reading = reading or Reading()
    check_unit_name(reading)
    trace = steps_of(table, Options(reading.column_map, reading.unit), name)
    picked, cleaned = cleaned_steps(trace, reading, name)
    return CleanTrace((), _sha256_of(table), reading, cleaned, ["table"], None, picked, _time_in_cells(trace))


def _time_in_cells(trace: Trace) -> str:
    """What T is in a trace of cells, which say it; compute in any other."""
    cells = trace.provenance.get("cells") if WEIGHT in trace else None
    return PERIOD if isinstance(cells, Mapping) and cells.get("time") == PERIOD else COMPUTE


def timed(steps: CleanTrace, time: str | None) -> CleanTrace:
    """The steps with the period as T_ms, or as they are.

    time: compute, period, or None: the period where most rows know theirs. Rows without one (the engine paused behind
    them) are left out and counted. Raises BadInput where periods are asked for and there are none.
    """
    if time == steps.time or (time is None and steps.time == PERIOD):
        return steps
    if WEIGHT in steps.trace and time is not None:
        made = "periods" if steps.time == PERIOD else "the steps' own times"
        raise BadInput(
            f"its cells were made of {made}", where=steps.name, remedy=f"Make them again with --time {time}."
        )
    if steps.time == PERIOD:
        return timed(replace(steps, cleaned=clean(steps.everything, steps.reading.cleaning), time=COMPUTE), time)
    trace = steps.trace
    found = trace.floats("period_ms") if "period_ms" in trace else np.full(len(trace), np.nan)
    known = (found > 0) & np.isfinite(found)
    if time == COMPUTE or (time is None and known.mean() < MOSTLY):
        return steps
    if not known.any():
        raise no_periods(steps.name)
    left_out = int(np.count_nonzero(~known))
    dropped = {**steps.dropped, NO_PERIOD: left_out} if left_out else steps.dropped
    rows = trace.with_columns(T_ms=found).select(known)
    return replace(steps, cleaned=replace(steps.cleaned, trace=rows, dropped=dropped), time=PERIOD)


def host_times(steps: CleanTrace, system: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Mean T and mean period in ms by phase, of a system's steps that know both; empty where none does."""
    rows = steps.everything
    cells = rows.provenance.get("cells")
    if WEIGHT in rows and isinstance(cells, Mapping) and isinstance(cells.get("host"), Mapping):
        return {str(phase): dict(means) for phase, means in cells["host"].items() if isinstance(means, Mapping)}
    if "period_ms" not in rows or len(steps.cleaned.fate) != len(rows):
        return {}
    used = (steps.cleaned.fate == 0) & (rows.floats("period_ms") > 0)
    for name, value in system.items():
        used &= rows[name].astype(str) == value
    rows = rows.select(used)
    named = phases(rows).astype(str)
    means = {}
    for phase in np.unique(named).tolist():
        inside = named == phase
        means[phase] = {name: float(rows.floats(name)[inside].mean()) for name in ("T_ms", "period_ms")}
    return means


def check_unit_name(reading: Reading) -> None:
    if reading.unit is not None and reading.unit not in MS_PER_UNIT:
        raise WrongUsage(f"{reading.unit!r} is not a unit", where="--unit", remedy=f"Choose: {', '.join(MS_PER_UNIT)}.")


def cleaned_steps(trace: Trace, reading: Reading, where: str) -> tuple[Trace, Cleaned]:
    """The rows that were asked for, and what of them a fit may use. Raises BadInput where nothing or little is left."""
    if len(trace) == 0:
        raise BadInput("the table has no rows", where=where, remedy="Check how it was made, and make it again.")
    if reading.where:
        trace = trace.select(matching_rows(trace, reading.where))
        if len(trace) == 0:
            raise no_row_matches(reading, where)
    cleaned = clean(trace, reading.cleaning)
    if cleaned.rows_used == 0:
        counts = ", ".join(f"{n} {reason}" for reason, n in cleaned.dropped.items())
        raise BadInput(
            f"none of its {cleaned.rows_read} rows can be used (dropped: {counts})",
            where=where,
            remedy="B is requests (>= 1), S tokens (>= B), T_ms milliseconds (> 0), prefill and context tokens are 0 or"
            " more (empty where unknown): check them, or --map and --unit.",
        )
    check_not_most(cleaned, reading.cleaning, where)
    return trace, cleaned


def no_row_matches(reading: Reading, where: str) -> BadInput:
    """The error for a row filter that keeps nothing."""
    return BadInput(f"no row matches {reading.where!r}", where=where, remedy="Correct --where.")


def opened(names: Sequence[str | Path]) -> list[Source]:
    """A source for each name; a name with wildcards stands for the files that match it, in order."""
    found: list[Source] = []
    for name in names:
        text = str(name)
        if any(mark in text for mark in "*?[") and not Path(text).exists():
            matching = sorted(glob(text, recursive=True))
            if not matching:
                raise BadInput("no file matches", where=text, remedy="Check the pattern; quote it against the shell.")
            found += [open_source(match) for match in matching]
        else:
            found.append(open_source(name))
    if not found:
        raise WrongUsage("nothing to read", remedy="Name a trace, or - for standard input.")
    return found


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


def check_one_machine(ingested: CleanTrace) -> None:
    """Rows that differ in hardware, model or tp within one execution path never share a fit.

    Several paths of one machine do not hinder: each gets its fit. Raises BadInput that lists the systems.
    """
    paths = {key.get("path", "") for key, _ in ingested.systems}
    if len(ingested.systems) != len(paths):
        raise _several(ingested, "Fit one with --where, or each of them with --each.")


def check_one_system(ingested: CleanTrace, remedy: str = "Take the one that the fit is of with --where.") -> None:
    """One fit is never held against rows of several systems or paths. Raises BadInput that lists them."""
    if len(ingested.systems) > 1:
        raise _several(ingested, remedy)


def _several(ingested: CleanTrace, remedy: str) -> BadInput:
    systems = ingested.systems
    shown = "; ".join(f"{system_filter(key)} ({len(rows)} rows)" for key, rows in systems[:4])
    more = f"; and {len(systems) - 4} more" if len(systems) > 4 else ""
    columns = ", ".join(name for name in IDENTITY if name in systems[0][0])
    return BadInput(f"holds {len(systems)} systems (by {columns}): {shown}{more}", where=ingested.name, remedy=remedy)


def data_facts(ingested: CleanTrace, system: Mapping[str, str], trace: Trace) -> dict[str, Any]:
    """The `data` of a fit's JSON: what was read and how, so that `read_again` finds the same rows."""
    cleaned = ingested.cleaned
    names = [str(source.path.resolve()) for source in ingested.sources]
    host = host_times(ingested, system)
    facts: dict[str, Any] = {"time": ingested.time, "host": host} if host else {}
    if _without_host(trace.provenance):
        facts["host_time"] = "none"
    if counts := engine_counts(trace):
        facts["engine_counts"] = counts
    return {
        "source": ", ".join(names) or IN_MEMORY,
        "sources": names,
        "formats": list(ingested.formats),
        "sha256": ingested.sha256,
        "rows_read": cleaned.rows_read,
        "rows_used": step_count(trace),
        "dropped": dict(cleaned.dropped),
        "marked": dict(cleaned.marked),
        "reading": asdict(ingested.reading),
        "system": dict(system),
        **facts,
    }


def _without_host(provenance: Mapping[str, Any]) -> bool:
    """Whether a source, or a part of it, is a table of kernels."""
    parts = provenance.get("parts")
    several = parts.values() if isinstance(parts, Mapping) else ()
    return provenance.get("host_time") == "none" or any(
        isinstance(part, Mapping) and part.get("host_time") == "none" for part in several
    )


def read_again(data: Mapping[str, Any]) -> Trace:
    """The clean rows that a fit with these `data` was made from. Raises BadInput where they are gone or changed."""
    names = data.get("sources", [])
    if not names:
        raise BadInput("its rows were in memory", where=data.get("source"), remedy="Fit a file to have them again.")
    ingested = ingest(_texts(names), _as_read(data.get("reading", {})))
    if ingested.sha256 != data.get("sha256"):
        raise BadInput("has changed since the fit was made", where=ingested.name, remedy="Fit it again.")
    ingested = timed(ingested, data.get("time", COMPUTE))
    system = data.get("system", {})
    for key, rows in ingested.systems:
        if key == system:
            return rows
    return ingested.trace


def _as_read(stored: Mapping[str, Any]) -> Reading:
    """How the rows of a fit were read. Raises BadInput for what `data_facts` never wrote."""
    try:
        cleaning = CleanOptions(**stored.get("cleaning", {}))
        found = Reading(**{**stored, "cleaning": cleaning})
        _texts([*found.column_map, *found.column_map.values(), found.format, found.unit or "", found.where or ""])
        _texts([*cleaning.keep, *cleaning.drop])
        float(0.0 if cleaning.max_ms is None else cleaning.max_ms)
    except (TypeError, ValueError, AttributeError) as error:
        raise _not_said() from error
    return found


def _texts(entries: Any) -> list[str]:
    if not isinstance(entries, list | tuple) or not all(isinstance(each, str) for each in entries):
        raise _not_said()
    return list(entries)


def _not_said() -> BadInput:
    return BadInput("the fit does not say how its rows were read", remedy="Fit it again.")


def system_filter(key: Mapping[str, str]) -> str:
    """The --where expression that picks a system."""
    return " and ".join(
        f"{name} == {value if value.isascii() and value.isdigit() else repr(value)}" for name, value in key.items()
    )


def _sha256_of(table: Trace) -> str:
    """Digest of a table in memory, by column."""
    digest = hashlib.sha256()
    for name, column in table.columns.items():
        content = repr(column.tolist()).encode() if column.dtype.kind == "O" else np.ascontiguousarray(column).tobytes()
        digest.update(f"{name}:{column.dtype}:".encode() + content)
    return digest.hexdigest()


def sha256_of_files(sources: Sequence[Source]) -> str:
    """Digest of the files' bytes, one after another."""
    digest = hashlib.sha256()
    for source in sources:
        with source.path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
