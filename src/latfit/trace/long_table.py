"""Tables too long to hold: read in chunks, twice; cleaned on the few columns that the rules look at; written as read.

The first pass types each chunk as a table in memory is typed, and keeps of it what a rule of cleaning may ask for,
whole numbers in half of their bytes. All rules then see all rows at once, by the same functions: which rows stay does
not depend on the chunks. The second pass writes the rows that stay, chunk by chunk.

What a chunk alone cannot settle is left to the table in memory, and `table_in_chunks` gives None: points in time, which
count from the first; a column of numbers in one chunk and of texts in another; cells with weights; compressed text.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from latfit.threads import on_threads
from latfit.trace.columns import BY_NAME, IDENTITY
from latfit.trace.filter import matching_rows
from latfit.trace.parquet import WHOLE, chunks_of, columns_of, write_chunks, write_trace
from latfit.trace.read import (
    CleanTrace,
    Reading,
    check_unit_name,
    cleaned_steps,
    no_row_matches,
    opened,
    sha256_of_files,
)
from latfit.trace.readers import reader_for
from latfit.trace.readers.reader import Options
from latfit.trace.readers.source import Source
from latfit.trace.readers.table import PARQUET_MAGIC, READER, check_unit, named_columns, provenance_of, typed
from latfit.trace.readers.text import UTF16_MARKS, Tally, header_of, parsed, plain_text
from latfit.trace.sketch.histogram import WEIGHT
from latfit.trace.table import Array, Trace

LONG_BYTES = 1 << 25
"""A table of fewer bytes is read at once: it takes less than half a gigabyte."""
CHUNK_ROWS, CHUNK_BYTES = 1 << 17, 1 << 23
GROWTH = 4
"""Of a column that is full: copied seldom, and what is not filled takes no memory."""

LOOKED_AT = (
    *("B", "S", "T_ms", "t_s", "step", "rep", "run", "replica", "dummy", "idle", "warmup", "queued_requests"),
    *("prefill_requests", "prefill_tokens", "context_tokens", "prefill_context_tokens"),
    *IDENTITY,
)
"""Columns that the rules of cleaning and the notes of a reading look at."""

DROPPED, KEPT = 1, 2


class NotInChunks(Exception):
    """What a chunk alone cannot settle."""


@dataclass
class _Growing:
    """A column that grows. In one piece: what is freed of many small ones stays with the process."""

    content: Array = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    rows: int = 0

    def add(self, part: Array) -> None:
        kind = np.result_type(self.content.dtype, part.dtype) if self.rows else part.dtype
        if self.rows + len(part) > len(self.content) or kind != self.content.dtype:
            grown = np.empty(max(self.rows + len(part), int(GROWTH * self.rows)), dtype=kind)
            grown[: self.rows] = self.content[: self.rows]
            self.content = grown
        self.content[self.rows : self.rows + len(part)] = part
        self.rows += len(part)

    def whole(self) -> Array:
        return self.content[: self.rows]


@dataclass
class _Survey:
    """What the first pass finds. looked_at: the rows asked for, by column, in parts.  picked: which rows these are, in
    parts; none where all are.  kinds: the type of each column.  broken: where a column of whole numbers has others, as
    bits of all rows, in parts."""

    looked_at: dict[str, _Growing] = field(default_factory=dict)
    labels: dict[str, dict[str, int]] = field(default_factory=dict)
    picked: list[NDArray[np.bool_]] = field(default_factory=list)
    kinds: dict[str, np.dtype[Any]] = field(default_factory=dict)
    broken: dict[str, list[tuple[int, Array]]] = field(default_factory=dict)
    rows: int = 0

    def add(self, chunk: Trace, where: str | None) -> None:
        self._add_kinds(chunk)
        rows = np.ones(len(chunk), dtype=bool) if where is None else matching_rows(chunk, where)
        self.picked.append(rows)
        for name in LOOKED_AT:
            if name not in chunk:
                continue
            column = chunk[name]
            if column.dtype == object:
                column = self._numbered(chunk, name)
            elif _counts(name):
                column = _narrow(column)
            self.looked_at.setdefault(name, _Growing()).add(column if where is None else column[rows])
        self.rows += len(chunk)

    def _add_kinds(self, chunk: Trace) -> None:
        if self.kinds and set(chunk.columns) != set(self.kinds):
            raise NotInChunks
        for name, column in chunk.columns.items():
            known = self.kinds.get(name, column.dtype)
            if (known.kind == "O") != (column.dtype.kind == "O") or column.dtype.kind not in "iufbO":
                raise NotInChunks
            self.kinds[name] = np.result_type(known, column.dtype)
            if _counts(name):
                broken = ~((np.abs(column) < WHOLE) & (column == np.rint(column)))
                if broken.any():
                    self.broken.setdefault(name, []).append((self.rows, np.flatnonzero(broken).astype(np.int32)))

    def _numbered(self, chunk: Trace, name: str) -> Array:
        known = self.labels.setdefault(name, {})
        codes, values = chunk.coded(name)
        return np.array([known.setdefault(value, len(known)) for value in values], dtype=np.int32)[codes]

    def trace(self, provenance: dict[str, Any]) -> Trace:
        """The columns looked at. Each part is let go as its column is put together."""
        columns: dict[str, Array] = {}
        codes = {}
        for name in list(self.looked_at):
            column = self.looked_at.pop(name).whole()
            if name in self.labels:
                values = list(self.labels[name])
                codes[name] = column, values
                column = np.array(values, dtype=object)[column]
            columns[name] = column
        return Trace(columns, provenance, codes)

    def whole(self, name: str, kept: NDArray[np.bool_]) -> bool:
        """Whether a column holds whole numbers in the rows that are kept."""
        return not any(kept[first + rows].any() for first, rows in self.broken.get(name, []))


@dataclass
class _Chunks:
    """The table of a source in parts. facts: what its provenance says, complete when all parts were read."""

    source: Source
    options: Options
    facts: dict[str, Any] = field(default_factory=dict)
    in_ms: bool = False

    def steps(self) -> Iterator[Trace]:
        """The parts under latfit's names, T in milliseconds."""
        for found in self._found():
            named = named_columns(found.columns, self.options, self.source.name)
            if any(column.dtype.kind == "M" for column in named.columns.values()) or WEIGHT in named.columns:
                raise NotInChunks
            columns = {name: typed(name, column) for name, column in named.columns.items()}
            with np.errstate(over="ignore"):  # what is no time in any unit is dropped by cleaning
                columns["T_ms"] = columns["T_ms"] * named.ms_per_unit
            self.facts |= {**found.provenance, **provenance_of(named)}
            yield Trace(columns)

    def _found(self) -> Iterator[Trace]:
        if self.source.head.startswith(PARQUET_MAGIC):
            for chunk in chunks_of(self.source.path, self.source.name, CHUNK_ROWS):
                self.in_ms = bool(chunk.provenance)
                yield chunk
            return
        tally, rows = Tally(), 0
        with self.source.path.open("rb") as stream, on_threads(1) as ahead:
            header = stream.readline()
            following = ahead.submit(_next_of, stream, header)
            while found := following.result():
                table, wrong = found
                following = ahead.submit(_next_of, stream, header)
                tally.bad += len(wrong)
                rows += table.num_rows
                if tally.bad > rows:
                    raise NotInChunks
                if table.num_rows:
                    yield Trace(columns_of(table, self.source.name))
        self.facts |= tally.facts()


def _next_of(stream: BinaryIO, header: bytes) -> tuple[Any, Sequence[object]] | None:
    """The next part of a file as a table, with the lines that are not in it; None at its end."""
    block = stream.read(CHUNK_BYTES)
    return parsed(plain_text(header + block + stream.readline())) if block else None


@dataclass(frozen=True)
class LongTable:
    """A table that was cleaned and not held. read: as of any other source, with the columns that were looked at.

    fate: whether each row of the file is KEPT or DROPPED, 0 where it was not asked for.
    """

    read: CleanTrace
    fate: NDArray[np.uint8]
    survey: _Survey
    chunks: _Chunks

    def write(self, target: Path, dropped: Path | None = None, **provenance: Any) -> None:
        """Write the clean trace, and the dropped rows with their reasons, each whole or not at all."""
        parts: list[Trace] = []
        facts = {**self.read.trace.provenance, **provenance}
        write_chunks(target, self._kinds(), self._kept(None if dropped is None else parts), facts)
        if dropped is not None:
            reasons = self.read.cleaned.reasons
            columns = {name: np.concatenate([part[name] for part in parts]) for name in self.survey.kinds}
            columns["reason"] = reasons[self.read.cleaned.fate > 0]
            write_trace(dropped, Trace(columns, self.read.trace.provenance))

    def _kept(self, dropped: list[Trace] | None) -> Iterator[Trace]:
        first = 0
        for chunk in self.chunks.steps():
            fate = self.fate[first : first + len(chunk)]
            first += len(chunk)
            if dropped is not None:
                dropped.append(chunk.select(fate == DROPPED))
            if (fate == KEPT).any():
                yield chunk if (fate == KEPT).all() else chunk.select(fate == KEPT)

    def _kinds(self) -> Mapping[str, Any]:
        """The Arrow type of each column: whole numbers where all are whole, as in a trace that is held."""
        import pyarrow as pa

        kept, found = self.fate == KEPT, {}
        for name, kind in self.survey.kinds.items():
            if kind.kind == "O":
                found[name] = pa.dictionary(pa.int32(), pa.string())
            elif _counts(name) and self.survey.whole(name, kept):
                found[name] = pa.int32() if name == "B" else pa.int64()
            else:
                found[name] = pa.from_numpy_dtype(kind)
        return found


def table_in_chunks(names: Sequence[str | Path], reading: Reading) -> LongTable | None:
    """A table cleaned in chunks; None for what is not long, no table, or not to be had in chunks. Raises BadInput."""
    import pyarrow as pa

    check_unit_name(reading)
    if len(names) > 1 or not Path(names[0]).is_file():
        return None
    (source,) = sources = opened(names)
    if not _in_chunks(source, reading):
        return None
    chunks, survey = _Chunks(source, Options(reading.column_map, reading.unit)), _Survey()
    try:
        for chunk in chunks.steps():
            survey.add(chunk, reading.where)
    except (NotInChunks, ValueError):
        return None
    if not survey.kinds:
        return None
    pa.default_memory_pool().release_unused()
    trace = survey.trace(chunks.facts)
    if not len(trace):
        raise no_row_matches(reading, source.name)
    if not chunks.in_ms:
        check_unit(trace["T_ms"], chunks.options, source.name)
    with on_threads(1) as beside:
        digest = beside.submit(sha256_of_files, sources)
        _, cleaned = cleaned_steps(trace, replace(reading, where=None), source.name)
    fate = np.zeros(survey.rows, dtype=np.uint8)
    fate[np.concatenate(survey.picked)] = np.where(cleaned.fate == 0, KEPT, DROPPED)
    read = CleanTrace(sources, digest.result(), reading, cleaned, [READER.name], READER.path, trace)
    return LongTable(read, fate, survey, chunks)


def _in_chunks(source: Source, reading: Reading) -> bool:
    """Whether it is a long table, as plain text or Parquet."""
    if source.path.stat().st_size < LONG_BYTES or reader_for(source, reading.format) is not READER:
        return False
    delimited = bool(header_of(source.head)) and not source.head.startswith(UTF16_MARKS)
    plain = delimited and source.head.lstrip()[:1] not in (b"{", b"[") and source.head[:1] not in b"\r\n"
    return source.compression is None and (source.head.startswith(PARQUET_MAGIC) or plain)


def _counts(name: str) -> bool:
    return name in BY_NAME and BY_NAME[name].kind == "int"


def _narrow(column: Array) -> Array:
    """Whole numbers in four bytes, where they have room there."""
    with np.errstate(invalid="ignore"):
        narrow = column.astype(np.int32)
    return narrow if np.array_equal(narrow, column) else column
