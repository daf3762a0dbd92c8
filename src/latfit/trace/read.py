"""The one way into latfit for measured steps: read, select rows, clean."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np

from latfit.errors import BadInput, WrongUsage, located
from latfit.records import convert
from latfit.trace.clean import Cleaned, CleanOptions, check_usable, clean
from latfit.trace.metadata import facts_of
from latfit.trace.readers import reader_for
from latfit.trace.readers.source import Options, Reader, Source, open_source
from latfit.trace.readers.table import steps_of
from latfit.trace.serving_engine import count_names, engine_counts, path_on
from latfit.trace.step_records import COMPUTE, MIN_PERIOD_SHARE, NO_PERIOD, PERIOD, no_periods, with_records
from latfit.trace.table import IDENTITY, KINDS, WEIGHT, Trace, concatenated, matching_rows, phases, step_count
from latfit.units import MS_PER_UNIT

IN_MEMORY = "a table in memory"  # the source of a fit that was made from no file


@dataclass(frozen=True)
class Reading:
    """How to read sources: column map, unit of the latency column, format, row filter, cleaning."""

    column_map: Mapping[str, str] = field(default_factory=dict)
    unit: str | None = None
    format: str = "auto"
    where: str | None = None
    cleaning: CleanOptions = field(default_factory=CleanOptions)

    def __post_init__(self) -> None:
        if self.unit is not None and self.unit not in MS_PER_UNIT:
            remedy = f"Choose: {', '.join(MS_PER_UNIT)}."
            raise WrongUsage(f"{self.unit!r} is not a unit", where="--unit", remedy=remedy)


@dataclass(frozen=True, repr=False, kw_only=True)
class CleanTrace(Cleaned):
    """A clean trace, with the facts that a fit stores about its data.

    formats: the reader of each source; path: the execution path that they imply; everything: the selected rows before
    cleaning; time: what T_ms is, see `timed`.
    """

    sources: Sequence[Source]
    sha256: str
    reading: Reading
    formats: Sequence[str]
    path: str | None
    everything: Trace
    time: str = COMPUTE

    @property
    def frame(self) -> Any:
        return self.trace.to_pandas()

    def __len__(self) -> int:
        return len(self.trace)

    def __repr__(self) -> str:
        return f"{super().__repr__()}, from {self.name}"

    @cached_property
    def systems(self) -> list[tuple[dict[str, str], Trace]]:
        return list(self.trace.systems())

    @property
    def name(self) -> str:
        return count_names([source.name for source in self.sources]) or "the table"


def ingest(names: str | Path | Sequence[str | Path], reading: Reading | None = None) -> CleanTrace:
    """Read, filter and clean one file or several, globs, or `-` for standard input. Raises BadInput, WrongUsage."""
    reading = reading or Reading()
    sources = _open_all([names] if isinstance(names, str | Path) else names)
    readers = [reader_for(source, reading.format) for source in sources]
    options = Options(reading.column_map, reading.unit)
    with np.errstate(over="ignore", invalid="ignore"):  # cleaning drops what no step can have
        parts = [reader.read(source, options) for reader, source in zip(readers, sources, strict=True)]
    trace = with_records(concatenated(parts, [source.name for source in sources]))
    paths = {_path_of(reader, part) for reader, part in zip(readers, parts, strict=True)}
    path = paths.pop() if len(paths) == 1 else None
    with located(sources[0].name if len(sources) == 1 else f"{len(sources)} files"):
        return _cleaned(trace, reading, sources, _sha256_of_files(sources), [reader.name for reader in readers], path)


def ingest_table(table: Trace, reading: Reading | None = None, name: str = "the table") -> CleanTrace:
    """Filter and clean a table in memory, under any column names. Raises BadInput, WrongUsage."""
    reading = reading or Reading()
    with located(name):
        trace = steps_of(table, Options(reading.column_map, reading.unit))
        return _cleaned(trace, reading, (), _sha256_of(table), ["table"], None)


def _cleaned(
    trace: Trace, reading: Reading, sources: Sequence[Source], sha256: str, formats: Sequence[str], path: str | None
) -> CleanTrace:
    if len(trace) == 0:
        raise BadInput("the table has no rows", remedy="Check how it was made, and make it again.")
    if reading.where:
        trace = trace.select(matching_rows(trace, reading.where))
        if len(trace) == 0:
            raise BadInput(f"no row matches {reading.where!r}", remedy="Correct --where.")
    cleaned = clean(trace, reading.cleaning)
    check_usable(cleaned, reading.cleaning)
    cells = facts_of(trace.provenance).cells if WEIGHT in trace else None
    time = PERIOD if cells and cells.time == PERIOD else COMPUTE
    return CleanTrace(
        **vars(cleaned),
        sources=sources,
        sha256=sha256,
        reading=reading,
        formats=formats,
        path=path,
        everything=trace,
        time=time,
    )


def _path_of(reader: Reader, part: Trace) -> str | None:
    device = facts_of(part.provenance).device_type
    return path_on(device) if reader.path is not None and device else reader.path


def _open_all(names: Sequence[str | Path]) -> list[Source]:
    """Open each name; a name with wildcards stands for the files that match it, in order."""
    sources: list[Source] = []
    for text in map(str, names):
        is_pattern = any(mark in text for mark in "*?[") and not Path(text).exists()
        matching = sorted(glob(text, recursive=True)) if is_pattern else [text]
        if not matching:
            raise BadInput("no file matches", where=text, remedy="Check the pattern; quote it against the shell.")
        sources += map(open_source, matching)
    if not sources:
        raise WrongUsage("nothing to read", remedy="Name a trace, or - for standard input.")
    return sources


def timed(steps: CleanTrace, time: str | None) -> CleanTrace:
    """Return the steps with T_ms as `time` says: compute, period, or None for the period if most rows have one.

    Rows without a period are dropped as `no_period`. Raises BadInput if no row has one, or cells were made of the other
    time.
    """
    if time == steps.time or (time is None and steps.time == PERIOD):
        return steps
    if WEIGHT in steps.trace and time is not None:
        made = "periods" if steps.time == PERIOD else "the steps' own times"
        remedy = f"Make them again with --time {time}."
        raise BadInput(f"its cells were made of {made}", where=steps.name, remedy=remedy)
    if steps.time == PERIOD:
        return replace(steps, **vars(clean(steps.everything, steps.reading.cleaning)), time=COMPUTE)
    trace, period = steps.trace, steps.trace.floats_or_nan("period_ms")
    has_period = (period > 0) & np.isfinite(period)
    if time is None and has_period.mean() < MIN_PERIOD_SHARE:
        return steps
    if not has_period.any():
        with located(steps.name):
            raise no_periods()
    left_out = int(np.count_nonzero(~has_period))
    dropped = {**steps.dropped, NO_PERIOD: left_out} if left_out else steps.dropped
    rows = trace.with_columns(T_ms=period).select(has_period)
    return replace(steps, trace=rows, dropped=dropped, time=PERIOD)


def parse_column_map(text: str | None) -> dict[str, str]:
    """Parse `B=batch,T_ms=latency` into {latfit's name: the file's name}. Raises WrongUsage."""
    columns: dict[str, str] = {}
    for pair in (text or "").split(","):
        ours, sign, theirs = map(str.strip, pair.partition("="))
        if pair.strip() and (ours not in KINDS or not theirs):
            raise WrongUsage(
                f"{ours!r} does not map a column of a trace",
                where="--map",
                remedy=f"Write NAME=COLUMN pairs such as B=batch,S=tokens,T_ms=latency; names are {', '.join(KINDS)}.",
            )
        columns |= {ours: theirs} if sign else {}
    return columns


def check_one_machine(steps: CleanTrace) -> None:
    """Raise BadInput if rows of one execution path differ in hardware, model or tp. Each path gets its own fit."""
    if len(steps.systems) != len({key.get("path", "") for key, _ in steps.systems}):
        check_one_system(steps, "Fit one with --where, or each of them with --each.")


def check_one_system(steps: CleanTrace, remedy: str = "Take the one that the fit is of with --where.") -> None:
    """Raise BadInput if the rows are of several systems or paths, so that one fit cannot be compared with them."""
    systems = steps.systems
    if len(systems) > 1:
        shown = "; ".join(f"{_system_filter(key)} ({len(rows)} rows)" for key, rows in systems[:4])
        more = f"; and {len(systems) - 4} more" if len(systems) > 4 else ""
        columns = ", ".join(name for name in IDENTITY if name in systems[0][0])
        raise BadInput(f"holds {len(systems)} systems (by {columns}): {shown}{more}", where=steps.name, remedy=remedy)


def _system_filter(key: Mapping[str, str]) -> str:
    return " and ".join(
        f"{name} == {value if value.isascii() and value.isdigit() else repr(value)}" for name, value in key.items()
    )


def data_facts(steps: CleanTrace, system: Mapping[str, str], trace: Trace) -> dict[str, Any]:
    """Return the `data` of a fit's JSON: what was read and how, so that `read_again` finds the same rows."""
    names = [str(source.path.resolve()) for source in steps.sources]
    host, counts = _host_times(steps, system), engine_counts(trace)
    without_host = any(each.host_time == "none" for each in facts_of(trace.provenance).sources)
    return {
        "source": ", ".join(names) or IN_MEMORY,
        "sources": names,
        "formats": list(steps.formats),
        "sha256": steps.sha256,
        "rows_read": steps.rows_read,
        "rows_used": step_count(trace),
        "dropped": dict(steps.dropped),
        "marked": dict(steps.marked),
        "reading": asdict(steps.reading),
        "system": dict(system),
        **({"time": steps.time, "host": host} if host else {}),
        **({"host_time": "none"} if without_host else {}),  # a table of kernels
        **({"engine_counts": counts} if counts else {}),
    }


def _host_times(steps: CleanTrace, system: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Return mean T and mean period in ms by phase, over a system's steps that have both; empty if none has."""
    rows = steps.everything
    cells = facts_of(rows.provenance).cells if WEIGHT in rows else None
    if cells and cells.host:
        return {phase: dict(means) for phase, means in cells.host.items()}
    if "period_ms" not in rows or len(steps.fate) != len(rows):
        return {}
    used = (steps.fate == 0) & (rows.floats("period_ms") > 0)
    for name, value in system.items():
        used &= rows[name].astype(str) == value
    rows = rows.select(used)
    phase = phases(rows)
    return {
        name: {column: float(rows.floats(column)[phase == name].mean()) for column in ("T_ms", "period_ms")}
        for name in sorted(set(phase.tolist()))
    }


def read_again(data: Mapping[str, Any]) -> Trace:
    """Return the clean rows that a fit with these `data` was made from. Raises BadInput if they are gone or changed."""
    if not data.get("sources"):
        raise BadInput("its rows were in memory", where=data.get("source"), remedy="Fit a file to have them again.")
    try:
        names, reading = convert(data["sources"], list[str]), convert(data.get("reading", {}), Reading)
    except ValueError as error:
        raise BadInput(f"the fit does not say how its rows were read ({error})", remedy="Fit it again.") from None
    steps = ingest(names, reading)
    if steps.sha256 != data.get("sha256"):
        raise BadInput("has changed since the fit was made", where=steps.name, remedy="Fit it again.")
    steps = timed(steps, data.get("time", COMPUTE))
    return next((rows for key, rows in steps.systems if key == data.get("system", {})), steps.trace)


def _sha256_of(table: Trace) -> str:
    digest = hashlib.sha256()
    for name, column in table.columns.items():
        content = repr(column.tolist()).encode() if column.dtype.kind == "O" else np.ascontiguousarray(column).tobytes()
        digest.update(f"{name}:{column.dtype}:".encode() + content)
    return digest.hexdigest()


def _sha256_of_files(sources: Sequence[Source]) -> str:
    digest = hashlib.sha256()
    for source in sources:
        with source.path.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()
