"""A folder of Parquet files, here or on object storage, as parts that fit in memory and can be read anywhere; and the
rows of one part to cells: filter, clean, label, count.

All footers are read first: what is not a trace is found before the long pass, and the number of rows is known. A part
is some row groups of one file; within it rows come in batches. Files whose name starts with `_` or `.` are markers of
the programs that wrote the folder and are passed over, as are its README, licence, pages and pictures.

Files of latfit's recorder are read as they are elsewhere: tokens computed again after preemption count as prefill, and
T is the period where that is asked for, both found within a batch.

Cleaning is `trace/clean.py`'s, for the rules that can be decided from a row alone. Duplicates and a cold start that
nobody marked need the order of rows and are not looked for: here rows come in any order.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.errors import BadInput, first_line
from latfit.stats import FloatArray
from latfit.threads import on_threads
from latfit.trace.clean import RULES, CleanOptions, tried
from latfit.trace.columns import BY_NAME, REQUIRED
from latfit.trace.filter import matching_rows
from latfit.trace.parquet import provenance_of
from latfit.trace.period import COMPUTE, NO_PERIOD, PERIOD, with_period
from latfit.trace.readers.table import PARQUET_MAGIC, is_set
from latfit.trace.recompute import with_recompute
from latfit.trace.serving_engine import engine_facts, is_record
from latfit.trace.sketch.histogram import (
    B_LIMIT,
    CONTEXT_LIMIT,
    LABELS,
    LOG_T_LIMIT,
    MAX_ATOMS,
    S_LIMIT,
    Cells,
    Label,
    Pool,
    atoms_of,
)
from latfit.trace.table import Array, Trace, phases
from latfit.units import MS_PER_UNIT

PART_ROWS = 4 << 20
BATCH_ROWS = 1 << 18
STREAM_BYTES = 1 << 20
FOOTERS_AT_ONCE = 8
DOCUMENTS, ABOUT = (".md", ".rst", ".html", ".pdf", ".png", ".svg"), ("README", "LICENSE", "LICENCE", "NOTICE")
"""Ends and beginnings of names of files that tell of a folder."""


@dataclass(frozen=True)
class Part:
    """Row groups of one file, with their number of rows."""

    path: str
    row_groups: tuple[int, ...]
    rows: int


@dataclass(frozen=True)
class Dataset:
    """Parts of all good files under `root` (by path), and (file, reason) of the others."""

    filesystem: Any
    root: str
    files: int
    parts: tuple[Part, ...]
    unreadable: tuple[tuple[str, str], ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)


def open_dataset(source: str | Path, column_map: Mapping[str, str], filesystem: Any = None) -> Dataset:
    """Find and check the files of a folder, or the one file, at a path or URI (`s3://…`) of a pyarrow filesystem.

    Raises BadInput where there is no such place or no file in it.
    """
    filesystem, root = _located(source, filesystem)
    paths = _files(filesystem, root, str(source))
    with on_threads(FOOTERS_AT_ONCE) as pool:
        found = list(pool.map(partial(_parts_of, filesystem, column_map=column_map), paths))
    parts = tuple(part for parts_or_reason in found if isinstance(parts_or_reason, list) for part in parts_or_reason)
    unreadable = tuple((path, reason) for path, reason in zip(paths, found, strict=True) if isinstance(reason, str))
    return Dataset(filesystem, root, len(paths), parts, unreadable)


def batches(filesystem: Any, part: Part, wanted: Sequence[str], column_map: Mapping[str, str]) -> Iterator[Any]:
    """Record batches of a part with those of the `wanted` columns that the file has, under latfit's names; of a record
    with its periods."""
    import pyarrow.parquet as pq

    with filesystem.open_input_file(part.path) as stream:
        file = pq.ParquetFile(stream, buffer_size=STREAM_BYTES)
        present = set(file.schema_arrow.names)
        origin = _origin(part.path, file.schema_arrow.metadata)
        recorded = is_record(origin)
        theirs = {name: column_map.get(name, name) for name in (*wanted, *(OF_RECORDS if recorded else ()))}
        names = [name for name in theirs if theirs[name] in present and not _shadowed(name, column_map)]
        for row_group in part.row_groups:
            columns = list(dict.fromkeys(theirs[name] for name in names))
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[row_group], columns=columns):
                found = batch.select([theirs[name] for name in names]).rename_columns(names)
                yield _as_read(found, origin, part.path) if recorded else found


def _origin(path: str, metadata: Any) -> Mapping[str, Any]:
    try:
        return provenance_of(path, metadata)
    except BadInput:
        return {}


def _as_read(batch: Any, origin: Mapping[str, Any], path: str) -> Any:
    """A batch of a record as its file is read: recomputed tokens as prefill, and periods."""
    import pyarrow as pa

    columns: dict[str, Array] = {}
    for name in batch.schema.names:
        column = batch.column(name)
        if name in ("run", "replica"):
            codes = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
            columns[name] = _floats(codes.indices.cast(pa.float64()))
        elif name == "phase":
            texts, index = _texts(batch, name, path)
            columns[name] = np.array(texts, dtype=object)[index]
        elif name in FLAGS:
            columns[name] = _flags(column)
        elif name in (*NUMBERS, *OF_RECORDS):
            columns[name] = _floats(column)
    trace = with_period(with_recompute(Trace(columns, origin)))
    for name in ("prefill_requests", "prefill_tokens", "phase", "period_ms"):
        if name in trace and trace[name] is not columns.get(name):
            values = pa.array(trace[name])
            place = batch.schema.get_field_index(name)
            batch = batch.append_column(name, values) if place < 0 else batch.set_column(place, name, values)
    return batch


def _shadowed(name: str, column_map: Mapping[str, str]) -> bool:
    """Whether the file's own column of this name has been mapped to another."""
    return name not in column_map and name in column_map.values()


def _located(source: str | Path, filesystem: Any) -> tuple[Any, str]:
    import pyarrow as pa
    from pyarrow import fs

    if filesystem is not None:
        return filesystem, str(source)
    if "://" not in str(source):
        return fs.LocalFileSystem(), str(Path(source).resolve())
    try:
        found, path = fs.FileSystem.from_uri(str(source))
    except (pa.ArrowException, OSError) as error:
        raise BadInput(
            f"cannot be opened ({first_line(error)})",
            where=str(source),
            remedy="Give a path, or a URI such as s3://bucket/folder, gs://bucket/folder or hdfs://host/folder.",
        ) from None
    return found, path


def _files(filesystem: Any, root: str, shown: str) -> list[str]:
    from pyarrow import fs

    try:
        info = filesystem.get_file_info(root)
        if info.type == fs.FileType.File:
            return [root]
        inside = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    except OSError as error:
        remedy = "Check the name, and that it can be read from here."
        raise BadInput(f"cannot be listed ({first_line(error)})", where=shown, remedy=remedy) from None
    paths = sorted(
        entry.path
        for entry in inside
        if entry.type == fs.FileType.File
        and not any(step.startswith(("_", ".")) for step in entry.path.removeprefix(root).split("/"))
        and not _is_document(entry.base_name)
    )
    if not paths:
        raise BadInput("holds no trace", where=shown, remedy="Name the folder that holds the Parquet files of a trace.")
    return paths


def _is_document(name: str) -> bool:
    return name.lower().endswith(DOCUMENTS) or name.upper().startswith(ABOUT)


def _parts_of(filesystem: Any, path: str, column_map: Mapping[str, str]) -> list[Part] | str:
    """The parts of a file, or why it cannot be read as a trace."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with filesystem.open_input_file(path) as stream:
            if stream.read(len(PARQUET_MAGIC)) != PARQUET_MAGIC:
                return "no Parquet file, of which cells are made"
            footer = pq.ParquetFile(stream)
            schema, metadata = footer.schema_arrow, footer.metadata
            if reason := _column_reason(schema, column_map):
                return reason
            return _split(path, [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)])
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        return f"not a whole Parquet file ({first_line(error)})"


def _column_reason(schema: Any, column_map: Mapping[str, str]) -> str | None:
    import pyarrow as pa

    for name in REQUIRED:
        theirs = column_map.get(name, name)
        if schema.names.count(theirs) != 1 or _shadowed(name, column_map):
            there = ", ".join(schema.names[:12])
            return f"{'no column' if theirs not in schema.names else 'two columns'} {theirs} (there are {there})"
    for name in (*BY_NAME, *LABELS):
        theirs = column_map.get(name, name)
        if schema.names.count(theirs) > 1:
            return f"two columns {theirs}"
        if name in LABELS:
            continue
        if BY_NAME[name].kind in ("int", "float") and theirs in schema.names:
            kind = schema.field(theirs).type
            if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
                return f"column {theirs} holds {kind}, not numbers"
    return None


def _split(path: str, rows: Sequence[int]) -> list[Part]:
    """Row groups in file order, gathered until a part has PART_ROWS."""
    parts: list[Part] = []
    gathered: list[int] = []
    size = 0
    for i, number in enumerate(rows):
        gathered.append(i)
        size += number
        if size >= PART_ROWS or i == len(rows) - 1:
            parts.append(Part(path, tuple(gathered), size))
            gathered, size = [], 0
    return parts


Mask = NDArray[np.bool_]

NUMBERS = ("B", "S", "T_ms", "context_tokens", "prefill_requests", "prefill_tokens")
FLAGS = ("dummy", "idle", "warmup")
OF_RECORDS = ("t_s", "step", "run", "replica", "queued_requests", "draft_tokens", "period_ms")
"""Columns that are read of records besides."""
LONGEST_US = 1 << 40
"""Sums of so many steps as a batch has stay below 2^63."""
MOST_LABELS = 256
ROW_RULES = tuple(rule for rule in RULES if rule.by_row)


@dataclass(frozen=True)
class Scan:
    """What to read and how: column map, unit of T, row filter, cleaning; at most `limit` atoms are held.

    skip_unreadable: leave out what cannot be read as a trace, and count it, instead of failing at the first.  time:
    what T is, compute or period; None: the period where most steps know theirs.
    """

    column_map: Mapping[str, str] = field(default_factory=dict)
    unit: str | None = None
    where: str | None = None
    cleaning: CleanOptions = field(default_factory=CleanOptions)
    limit: int = MAX_ATOMS
    skip_unreadable: bool = False
    time: str | None = COMPUTE


def summarise(filesystem: Any, part: Part, scan: Scan, level: int = 0) -> Cells:
    """The cells of one part, at `level` or coarser.

    Raises BadInput where it cannot be read, unless that is to be skipped: then the part as a whole is.
    """
    import pyarrow as pa

    pool = Pool(scan.limit, level)
    try:
        for batch in batches(filesystem, part, _wanted(scan), scan.column_map):
            pool.add(_cells_of(batch, scan, part.path, pool.level))
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = f"{part.rows:,} rows cannot be read ({first_line(error)})"
        if not scan.skip_unreadable:
            raise unreadable(part.path, reason) from None
        return Cells(limit=scan.limit, unreadable=((part.path, reason),))
    return pool.total()


def unreadable(path: str, reason: str) -> BadInput:
    """The error for a file that is no part of a trace."""
    return BadInput(
        reason, where=path, remedy="Make it again or move it away, or go on without such files: --skip-bad."
    )


def _wanted(scan: Scan) -> Sequence[str]:
    """Columns to read where a file has them; words of the row filter among them."""
    words = "".join(c if c.isalnum() or c in "_." else " " for c in scan.where or "").split()
    return list(dict.fromkeys([*NUMBERS, *FLAGS, *LABELS, *words]))


def _cells_of(batch: Any, scan: Scan, path: str, level: int) -> Cells:
    if scan.where:
        batch = batch.filter(_filter_mask(batch, scan.where))
    trace = Trace(
        {name: _floats(batch.column(name)) for name in NUMBERS if name in batch.schema.names}
        | {name: _flags(batch.column(name)) for name in FLAGS if name in batch.schema.names}
    )
    if scan.unit:
        trace = trace.with_columns(T_ms=trace["T_ms"] * MS_PER_UNIT[scan.unit])
    used, dropped = _cleaned(trace, scan.cleaning)
    host: dict[str, tuple[int, int, int]] = {}
    if "period_ms" in batch.schema.names:
        period = _floats(batch.column("period_ms"))
        known = used & (period > 0) & (period < np.exp(LOG_T_LIMIT))
        host = _host_of(trace, _phases_of(batch, trace, path), period, known)
        if scan.time == PERIOD:
            dropped[NO_PERIOD] = int(np.count_nonzero(used & ~known))
            trace, used = trace.with_columns(T_ms=period), known
    elif scan.time == PERIOD:
        dropped[NO_PERIOD], used = int(np.count_nonzero(used)), np.zeros(len(trace), dtype=bool)
    atoms = {}
    for label, members in _labels(batch, path):
        mask = used if members is None else used & members
        if not mask.any():
            continue
        rows: Any = slice(None) if mask.all() else np.flatnonzero(mask)
        B, S, T = (trace.floats(name)[rows] for name in ("B", "S", "T_ms"))
        context = trace["context_tokens"][rows] if "context_tokens" in trace else None
        atoms[label] = atoms_of(B, S, T, context, level)
    return Cells(atoms, level, scan.limit, len(trace), dropped, host=host)


def _phases_of(batch: Any, trace: Trace, path: str) -> tuple[list[str], Array]:
    """The different phases of a batch, and the number of each row's."""
    if "phase" in batch.schema.names:
        return _texts(batch, "phase", path)
    named = phases(trace).tolist()
    texts = list(dict.fromkeys(named))
    return texts, np.array([texts.index(name) for name in named], dtype=np.int64)


def _host_of(
    trace: Trace, phases_of_rows: tuple[list[str], Array], period: FloatArray, known: Mask
) -> dict[str, tuple[int, int, int]]:
    """By phase: steps that know their period, and the sums of T and of the period in µs."""
    T_us, period_us = (np.rint(np.minimum(1e3 * each, LONGEST_US)) for each in (trace["T_ms"], period))
    found = {}
    for number, phase in enumerate(phases_of_rows[0]):
        rows = known & (phases_of_rows[1] == number)
        if rows.any():
            found[phase] = int(rows.sum()), int(T_us[rows].sum()), int(period_us[rows].sum())
    return found


def share_with_period(dataset: Dataset, scan: Scan) -> float:
    """Of clean steps at the beginning of some parts, the share that knows its period. What is wrong with a part, the
    pass over all of them says."""
    import pyarrow as pa

    known = used = 0
    for part in dataset.parts[:: max(len(dataset.parts) // PARTS_LOOKED_AT, 1)]:
        with suppress(pa.ArrowException, OSError, ValueError):
            batch = next(batches(dataset.filesystem, part, _wanted(scan), scan.column_map), None)
            if batch is not None:
                found = _cells_of(batch, replace(scan, time=COMPUTE), part.path, 0)
                used += found.rows_used
                known += sum(steps for steps, _, _ in found.host.values())
    return known / used if used else 0.0


def engine_of(dataset: Dataset) -> dict[str, Any]:
    """What some of the files say of the engine that made them, where they agree, and of which starts they are."""
    import pyarrow.parquet as pq

    origins = []
    for part in dataset.parts[:: max(len(dataset.parts) // PARTS_LOOKED_AT, 1)]:
        with dataset.filesystem.open_input_file(part.path) as stream:
            origins.append((part.path, _origin(part.path, pq.read_schema(stream).metadata)))
    records = [(path, origin) for path, origin in origins if is_record(origin)]
    runs = sorted({str(origin["run"]) for _, origin in records if "run" in origin})
    return {**engine_facts(records).values, **({"runs": runs} if runs else {})}


PARTS_LOOKED_AT = 8


def _cleaned(trace: Trace, options: CleanOptions) -> tuple[Mask, dict[str, int]]:
    """Mask of the rows that can be steps, and how many each rule dropped, the first that applies."""
    used = np.ones(len(trace), dtype=bool)
    dropped: dict[str, int] = {}
    for rule, hit in tried(trace, options, ROW_RULES):
        dropped[rule.reason] = int(np.count_nonzero(hit))
        used &= ~hit
    outside = used & _out_of_range(trace)
    if outside.any():
        dropped["out_of_range"] = int(np.count_nonzero(outside))
    return used & ~outside, dropped


def _out_of_range(trace: Trace) -> Mask:
    """Rows that no key can hold; they are no steps, whatever rules are switched off."""
    B, S, T = (trace.floats(name) for name in ("B", "S", "T_ms"))
    low, high = np.exp(-LOG_T_LIMIT), np.exp(LOG_T_LIMIT)
    held = (B >= 1) & (B < B_LIMIT) & (S >= 1) & (S < S_LIMIT) & (low < T) & (high > T)
    if "context_tokens" in trace:
        held &= ~(trace["context_tokens"] >= CONTEXT_LIMIT)
    return np.asarray(~held)


def _labels(batch: Any, path: str) -> Iterator[tuple[Label, Mask | None]]:
    """The labels of a batch, each with the mask of its rows (None where it has them all)."""
    labels: list[Label] = [()]
    codes = np.zeros(len(batch), dtype=np.int64)
    for name in LABELS:
        texts, index = _texts(batch, name, path)
        if len(texts) == 1:
            labels = [(*label, texts[0]) for label in labels]
            continue
        codes = codes * len(texts) + index
        found = np.flatnonzero(np.bincount(codes))
        labels = [(*labels[i // len(texts)], texts[i % len(texts)]) for i in found]
        codes = np.searchsorted(found, codes)
    for i, label in enumerate(labels):
        yield label, None if len(labels) == 1 else codes == i


def _texts(batch: Any, name: str, path: str) -> tuple[list[str], Array]:
    """The different texts of a label column and the number of each row's; one empty text where there is no column."""
    import pyarrow as pa

    if name not in batch.schema.names:
        return [""], np.zeros(len(batch), dtype=np.int64)
    column = batch.column(name)
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    spelt = ["" if value is None else str(value) for value in (*encoded.dictionary.to_pylist(), None)]
    texts = list(dict.fromkeys(spelt if encoded.null_count or len(spelt) == 1 else spelt[:-1]))
    if len(texts) > MOST_LABELS:
        raise BadInput(
            f"column {name} has {len(texts):,} different values",
            where=path,
            remedy=f"It names systems or phases, {MOST_LABELS} at most; take another column with --map {name}=COLUMN.",
        )
    index = encoded.indices.fill_null(len(spelt) - 1).to_numpy(zero_copy_only=False)
    return texts, np.array([texts.index(text) if text in texts else 0 for text in spelt])[index]


def _filter_mask(batch: Any, where: str) -> Any:
    """Arrow mask of the rows that the filter keeps; texts compare as texts, numbers as numbers."""
    import pyarrow as pa

    columns: dict[str, Array] = {}
    for name in batch.schema.names:
        column = batch.column(name)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        columns[name] = column.to_numpy(zero_copy_only=False)
    return pa.array(matching_rows(Trace(columns), where))


def _floats(column: Any) -> FloatArray:
    """Numbers as float64, missing ones NaN."""
    import pyarrow as pa

    if pa.types.is_decimal(column.type) or column.null_count:
        column = column.cast(pa.float64(), safe=False)
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64)


def _flags(column: Any) -> Mask:
    """Flags as the table reader reads them: true, 1 and their spellings, everything else false."""
    import pyarrow as pa

    if pa.types.is_boolean(column.type):
        return np.asarray(column.fill_null(False).to_numpy(zero_copy_only=False), dtype=bool)
    return np.array([is_set(value) for value in column.to_pylist()], dtype=bool)
