"""Cells: a trace of any length in bounded memory, as counts of similar steps, here or on a Dask cluster.

Steps are counted in bins of hardware, model, tp, path, phase, B, S, context and ln T. Each bin has sums that give the
means of B, S, context and ln T and the variance of ln T. If there are too many bins, those of B, S and context are made
coarser. The result is rows with weights (`cell_rows`). See docs/formats.md.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.dask_cluster import dask_client, finished, result_of
from latfit.errors import BadInput, WrongUsage, first_line
from latfit.stats import FloatArray, IntArray
from latfit.trace.clean import (
    MAX_MS,
    MIN_MS,
    CleanOptions,
    check_enough_left,
    check_reasons,
    check_tokens,
    clean_part,
    count_short,
    shortest_plausible_ms,
)
from latfit.trace.columns import IDENTITY
from latfit.trace.filter import matching_rows
from latfit.trace.parquet import columns_of, provenance_of
from latfit.trace.readers.source import HEAD_BYTES, Options
from latfit.trace.readers.table import PARQUET_MAGIC, name_columns, steps_of
from latfit.trace.readers.text import delimiter_of, header_of
from latfit.trace.serving_engine import engine_facts, is_record
from latfit.trace.step_records import (
    COMPUTE,
    MIN_PERIOD_SHARE,
    NO_PERIOD,
    PERIOD,
    no_periods,
    with_period,
    with_recompute,
)
from latfit.trace.table import WEIGHT, Trace, phases
from latfit.units import MS_PER_UNIT

Progress = Callable[[int, int], None]
BACKENDS = LOCAL, _ = ("local", "dask")

LABELS = (*IDENTITY, "phase")
MAX_LABELS = 256  # different values of such a column
Label = tuple[str, ...]

BIN = 1 / 64  # of ln T
RELATIVE_ERROR = float(np.expm1(BIN / 2))  # of a quantile read at the middle of its bin
MIN_T_BINS = 16  # a cell with fewer needs its variance within bins too
MIN_SPREAD = 1e-9  # of ln T within a bin; less is rounding
MAX_BINS = 1 << 20  # a pass holds them in less than 1 GiB

FRACTION_BITS, CONTEXT_FRACTION_BITS = 15, 3  # B and S are exact up to 65,536; 8 bins of the context per octave
T_BITS, CONTEXT_BITS, S_BITS, B_BITS = 12, 9, 21, 20  # of a key
T_MIDDLE, KNOWN_CONTEXT = 1 << (T_BITS - 1), 1 << (CONTEXT_BITS - 1)
COARSER = (
    *((0, 0), (5, 0), (7, 1), (8, 1), (9, 1), (9, 2), (10, 2)),
    *((10, 3), (10, 4), (11, 4), (11, 5), (11, 8), (12, 8), (13, 8)),
)
"""Bits cut off B and S, and off the context, at each level of resolution."""

BATCH_ROWS = 1 << 18
SAMPLED_FILES = 8
NUMBERS = ("B", "S", "T_ms", "context_tokens", "prefill_requests", "prefill_tokens", "period_ms")
FLAGS = ("dummy", "idle", "warmup")
OF_RECORDS = ("t_s", "step", "run", "replica", "queued_requests", "draft_tokens")
NO_DATA = re.compile(r"(^|/)([._]|(README|LICEN[SC]E|NOTICE)[^/]*$)|\.(md|rst|html|pdf|png|svg)$", re.IGNORECASE)
"""Files about a folder, and hidden ones or those in hidden folders."""


@dataclass(frozen=True)
class Scan:
    """What to read and how.

    Parameters
    ----------
    limit
        Bins held at most.
    skip_unreadable
        Leave out and count what cannot be read, instead of failing.
    time
        What T is: compute or period; None: the period if most steps have one.
    """

    column_map: Mapping[str, str] = field(default_factory=dict)
    unit: str | None = None
    where: str | None = None
    cleaning: CleanOptions = field(default_factory=CleanOptions)
    limit: int = MAX_BINS
    skip_unreadable: bool = False
    time: str | None = COMPUTE


@dataclass(frozen=True)
class Bins:
    """Bins of one label, by ascending key.

    Parameters
    ----------
    keys
        (n,) S = B, and the leading bits of B, S, context and ln T, in one integer.
    sums
        (6, n) of steps, d and d^2 (d: ln T from the middle of its bin), B, S and context.
    """

    keys: IntArray
    sums: FloatArray

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def steps(self) -> FloatArray:
        return np.asarray(self.sums[0])

    @property
    def mean_ln_ms(self) -> FloatArray:
        middle = ((self.keys & ((1 << T_BITS) - 1)) - T_MIDDLE) * BIN
        return np.asarray(middle + self.sums[1] / self.steps)


@dataclass(frozen=True)
class Cells:
    """Bins by label, and what was read and dropped.

    Parameters
    ----------
    short
        Rows with fewer tokens than requests.
    host
        By phase, of steps with a period: their number, and the sums of their T and of their periods in ms.
    """

    bins: Mapping[Label, Bins] = field(default_factory=dict)
    level: int = 0
    rows_read: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    short: int = 0
    unreadable: tuple[tuple[str, str], ...] = ()
    host: Mapping[str, FloatArray] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self.bins.values()))

    @property
    def rows_used(self) -> int:
        return sum(int(bins.steps.sum()) for bins in self.bins.values())


def merge(parts: Sequence[Cells], limit: int) -> Cells:
    """Return all parts together, coarser if there are too many bins."""
    level = max(part.level for part in parts)
    bins = _group_labels([part.bins for part in parts], level)
    while sum(map(len, bins.values())) > limit and level < len(COARSER) - 1:
        level += 1
        bins = _group_labels([bins], level)
    dropped: Counter[str] = Counter()
    host: dict[str, FloatArray] = {}
    for part in parts:
        dropped.update(part.dropped)
        for phase, sums in part.host.items():
            host[phase] = host.get(phase, 0.0) + sums
    return Cells(
        bins,
        level,
        sum(part.rows_read for part in parts),
        dict(sorted((+dropped).items())),
        sum(part.short for part in parts),
        tuple(sorted({bad for part in parts for bad in part.unreadable})),
        host,
    )


def merge_all(parts: Iterable[Cells], limit: int) -> Cells:
    """Merge parts as they come, each bin a few times only: when those that wait are as many as those merged."""
    merged, waiting = Cells(), list[Cells]()
    for part in parts:
        waiting.append(part)
        if sum(map(len, waiting)) >= max(len(merged), limit // 4):
            merged, waiting = merge([merged, *waiting], limit), []
    return merge([merged, *waiting], limit)


def _group_labels(parts: Sequence[Mapping[Label, Bins]], level: int) -> dict[Label, Bins]:
    """Add up equal bins of each label at a level of resolution."""
    size, context = COARSER[level]
    cut_size = (1 << size) - 1
    cut = ((((cut_size << S_BITS) | cut_size) << CONTEXT_BITS) | ((1 << context) - 1)) << T_BITS
    found = {}
    for label in sorted({label for part in parts for label in part}):
        bins = [part[label] for part in parts if label in part]
        keys, sums = (np.concatenate(each, axis=-1) for each in zip(*((b.keys, b.sums) for b in bins), strict=True))
        found[label] = _group(keys & ~cut, sums)
    return found


def _group(keys: IntArray, sums: FloatArray) -> Bins:
    order = np.argsort(keys)
    keys = keys[order]
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    return Bins(keys[starts], np.stack([np.add.reduceat(row[order], starts) for row in sums]))


def bins_of(B: FloatArray, S: FloatArray, T: FloatArray, context: FloatArray) -> Bins:
    """Return the bins of clean steps (n,) at the finest resolution. An unknown context is NaN."""
    ln_T = np.log(T)
    t = np.rint(ln_T / BIN)
    d = ln_T - t * BIN
    known = context >= 0
    tokens = np.where(known, context, 0.0)
    keys = ((S == B).astype(np.int64) << B_BITS | _leading_bits(B, FRACTION_BITS)) << S_BITS
    keys = (keys | _leading_bits(S, FRACTION_BITS)) << CONTEXT_BITS
    bits = _leading_bits(np.minimum(tokens + 1.0, 2.0**31), CONTEXT_FRACTION_BITS)
    keys = (keys | np.where(known, bits | KNOWN_CONTEXT, 0)) << T_BITS
    return _group(keys | (t.astype(np.int64) + T_MIDDLE), np.stack([np.ones(len(T)), d, d * d, B, S, tokens]))


def _leading_bits(x: FloatArray, fraction: int) -> IntArray:
    """Return the exponent and the leading fraction bits of x >= 1 as an integer that grows with x."""
    return np.asarray((np.ascontiguousarray(x).view(np.int64) >> (52 - fraction)) - (1023 << fraction))


def weighted_rows(cells: Cells) -> Trace:
    """Return rows with weights that represent all steps.

    A bin is a row at its mean ln T. In cells with few bins of T it is two rows, with its mean and its variance.
    """
    tables = []
    for label, bins in cells.bins.items():
        table = _rows_of(bins)
        tables.append(
            table
            | {name: np.full(len(table["B"]), text, dtype=object) for name, text in zip(LABELS, label, strict=True)}
        )
    columns = {name: np.concatenate([table[name] for table in tables]) for name in (tables[0] if tables else ())}
    empty = [name for name in LABELS if name in columns and not np.any(columns[name] != "")]
    if "context_tokens" in columns and np.isnan(columns["context_tokens"]).all():
        empty.append("context_tokens")
    return Trace({name: column for name, column in columns.items() if name not in empty})


def _rows_of(bins: Bins) -> dict[str, NDArray[Any]]:
    steps, d, d2, *totals = bins.sums
    cell = np.cumsum(np.diff(bins.keys >> T_BITS, prepend=-1) != 0) - 1
    count = np.bincount(cell, steps)
    B, S, context = ((np.bincount(cell, total) / count)[cell] for total in totals)
    context = np.where(bins.keys >> T_BITS & KNOWN_CONTEXT > 0, context, np.nan)
    spread = np.sqrt(np.maximum(d2 / steps - (d / steps) ** 2, 0.0))
    split = (spread > MIN_SPREAD) & (np.bincount(cell) < MIN_T_BINS)[cell]
    upper = np.where(split, np.floor(steps / 2), 0.0)
    lower = steps - upper
    centre = bins.mean_ln_ms
    T = np.exp(centre - np.where(split, spread * np.sqrt(upper / lower), 0.0))
    T_upper = np.exp(centre + spread * np.sqrt(lower / np.maximum(upper, 1.0)))
    return {
        **{name: np.append(x, x[split]) for name, x in (("B", B), ("S", S), ("context_tokens", context))},
        "T_ms": np.append(T, T_upper[split]),
        WEIGHT: np.append(lower, upper[split]),
    }


# ------------------------------------------------------------------------------------------------------------ files


@dataclass(frozen=True)
class Part:
    """One file: Parquet, or delimited text."""

    filesystem: Any
    path: str
    rows: int
    is_parquet: bool = True


def find_parts(source: str | Path, filesystem: Any = None) -> tuple[list[Part], list[tuple[str, str]]]:
    """Return the files of a folder (or one file) at a path or URI, and (file, reason) of unreadable ones.

    Raises BadInput if there is no such place or no file in it.
    """
    import pyarrow as pa
    from pyarrow import fs

    try:
        if filesystem is None and "://" not in str(source):
            filesystem, root = fs.LocalFileSystem(), str(Path(source).resolve())
        elif filesystem is None:
            filesystem, root = fs.FileSystem.from_uri(str(source))
        else:
            root = str(source)
        info = filesystem.get_file_info(root)
        is_file = info.type == fs.FileType.File
        inside = [info] if is_file else filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    except (pa.ArrowException, OSError) as error:
        raise BadInput(
            f"cannot be listed ({first_line(error)})",
            where=str(source),
            remedy="Give a readable path, or a URI such as s3://bucket/folder, gs://bucket/folder, hdfs://host/folder.",
        ) from None
    files = [each.path for each in inside if each.type == fs.FileType.File]
    paths = sorted(path for path in files if is_file or not NO_DATA.search(path.removeprefix(root)))
    if not paths:
        remedy = "Name the folder that holds the Parquet files of a trace."
        raise BadInput("holds no trace", where=str(source), remedy=remedy)
    found = [_part_or_reason(filesystem, path, allow_text=is_file) for path in paths]
    parts = [part for part in found if isinstance(part, Part)]
    return parts, [(path, part) for path, part in zip(paths, found, strict=True) if isinstance(part, str)]


def _part_or_reason(filesystem: Any, path: str, allow_text: bool) -> Part | str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with filesystem.open_input_file(path) as stream:
            head = stream.read(HEAD_BYTES)
            if head.startswith(PARQUET_MAGIC):
                return Part(filesystem, path, pq.ParquetFile(stream).metadata.num_rows)
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        return f"not a whole Parquet file ({first_line(error)})"
    is_table = allow_text and header_of(head)
    return Part(filesystem, path, 0, is_parquet=False) if is_table else "not a Parquet file"


def read_batches(part: Part, scan: Scan) -> Iterator[Trace]:
    """Yield the steps of a file, some rows at a time, as they are read elsewhere. Raises BadInput."""
    options = Options(scan.column_map, scan.unit)
    for table, origin in _tables(part, scan, options):
        with np.errstate(over="ignore", invalid="ignore"):
            trace = steps_of(Trace(columns_of(table, part.path), origin), options, part.path, in_ms=True)
        yield with_period(with_recompute(trace)) if is_record(origin) else trace


def _tables(part: Part, scan: Scan, options: Options) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Yield (Arrow table of the columns that are needed, provenance of the file)."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.dataset as ds
    from pyarrow import csv

    file_format: Any = ds.ParquetFileFormat()
    if not part.is_parquet:
        with part.filesystem.open_input_stream(part.path) as stream:
            head = stream.read(HEAD_BYTES)
        theirs = name_columns(header_of(head), options, part.path).columns
        kinds = {theirs[name]: pa.float64() for name in NUMBERS if name in theirs}  # not guessed from the first block
        file_format = ds.CsvFileFormat(
            parse_options=csv.ParseOptions(delimiter=delimiter_of(head.partition(b"\n")[0].decode(errors="replace"))),
            default_fragment_scan_options=ds.CsvFragmentScanOptions(csv.ConvertOptions(column_types=kinds)),
        )
    fragment = file_format.make_fragment(part.path, part.filesystem)
    schema = fragment.physical_schema
    origin = provenance_of(part.path, schema.metadata)
    names = list(schema.names)
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadInput(f"two columns {twice}", where=part.path, remedy="Rename one of them.")
    theirs = name_columns(names, options, part.path).columns
    words = re.findall(r"[\w.]+", scan.where or "")
    wanted = {*NUMBERS, *FLAGS, *LABELS, *words, *(OF_RECORDS if is_record(origin) else ())}
    columns = list(dict.fromkeys(theirs[name] for name in theirs if name in wanted))
    for ours in ("B", "S", "T_ms"):
        kind = schema.field(theirs[ours]).type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
            raise BadInput(f"column {theirs[ours]} holds {kind}, not numbers", where=part.path, remedy="Correct --map.")
    batches = fragment.to_batches(columns=columns, batch_size=BATCH_ROWS, batch_readahead=1, use_threads=False)
    for batch in batches:
        if len(batch):
            texts = [pa.types.is_string(kind) or pa.types.is_large_string(kind) for kind in batch.schema.types]
            arrays = [pc.dictionary_encode(a) if text else a for a, text in zip(batch.columns, texts, strict=True)]
            yield pa.table(arrays, names=batch.schema.names), origin


def summarise(part: Part, scan: Scan, progress: Callable[[int], None] | None = None) -> Cells:
    """Return the cells of one file. Raises BadInput if it cannot be read, unless that is to be skipped."""
    import pyarrow as pa

    def batches() -> Iterator[Cells]:
        for trace in read_batches(part, scan):
            yield _cells_of(trace, scan, part.path)
            if progress:
                progress(len(trace))

    try:
        return merge_all(batches(), scan.limit)
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, ValueError, BadInput) as error:
        reason = error.found if isinstance(error, BadInput) else f"cannot be read ({first_line(error)})"
        if scan.skip_unreadable:
            return Cells(unreadable=((part.path, reason),))
        raise error if isinstance(error, BadInput) else unreadable(part.path, reason) from None


def unreadable(path: str, reason: str) -> BadInput:
    """Return the error for a file that is no part of a trace."""
    return BadInput(
        reason, where=path, remedy="Make it again or move it away, or leave it out: latfit ingest --skip-bad."
    )


def _cells_of(trace: Trace, scan: Scan, path: str) -> Cells:
    """Filter, clean and count the steps of a batch. Raises BadInput if a label column has too many values."""
    if scan.where:
        trace = trace.select(matching_rows(trace, scan.where))
    rows, short = len(trace), count_short(trace)
    used, dropped = clean_part(trace, scan.cleaning)
    period = trace.floats("period_ms") if "period_ms" in trace else np.full(len(trace), np.nan)
    known = used & (period >= MIN_MS) & (period <= MAX_MS)
    times = np.stack([known[known], trace.floats("T_ms")[known], period[known]])
    phase = phases(trace.select(known)) if known.any() else np.empty(0, dtype=object)
    host = {name: times[:, phase == name].sum(axis=1) for name in dict.fromkeys(phase.tolist())}
    if scan.time == PERIOD:
        dropped[NO_PERIOD] = int(np.count_nonzero(used & ~known))
        trace, used = trace.with_columns(T_ms=period), known
    return Cells(_bins_by_label(trace.select(used), path), 0, rows, dropped, short, host=host)


def _bins_by_label(trace: Trace, path: str) -> dict[Label, Bins]:
    """Return the bins of clean steps. Raises BadInput if a label column has too many values to name systems."""
    found = {}
    context = trace.floats("context_tokens") if "context_tokens" in trace else np.full(len(trace), np.nan)
    for name in LABELS:
        if name in trace and (values := int(trace.group([name]).max(initial=0)) + 1) > MAX_LABELS:
            raise BadInput(
                f"column {name} has {values:,} different values",
                where=path,
                remedy=f"It names systems or phases, {MAX_LABELS} at most; map another column: --map {name}=COLUMN.",
            )
    for rows in trace.split(LABELS) if len(trace) else []:
        label = tuple(str(trace[name][rows[0]]) if name in trace else "" for name in LABELS)
        B, S, T = (trace.floats(name)[rows] for name in ("B", "S", "T_ms"))
        found[label] = bins_of(B, S, T, context[rows])
    return found


# ------------------------------------------------------------------------------------------------------- whole pass


@dataclass(frozen=True)
class Compressed:
    """The cells of a source, the facts that a fit stores, and what records report about their engine."""

    cells: Cells
    facts: Mapping[str, Any]
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def trace(self) -> Trace:
        """Rows with weights that fit as the steps would, with the facts as provenance."""
        return weighted_rows(self.cells).with_provenance(**{**self.engine, "cells": dict(self.facts)})


def compress(
    source: str | Path,
    scan: Scan | None = None,
    *,
    filesystem: Any = None,
    backend: str = "local",
    scheduler: str | None = None,
    progress: Progress | None = None,
) -> Compressed:
    """Summarise all files of a folder (or one file) into cells.

    Parameters
    ----------
    filesystem
        Of pyarrow; by default found from a URI such as s3://bucket/folder.
    scheduler
        Address of a Dask cluster; without it, backend="dask" starts workers on this host.

    Raises
    ------
    BadInput, WrongUsage, LatfitError
    """
    scan = scan or Scan()
    _check_options(scan, backend, scheduler)
    parts, bad = find_parts(source, filesystem)
    if bad and not scan.skip_unreadable:
        raise unreadable(*bad[0])
    scan = _with_time(scan, parts, str(source))
    summaries = _summaries(parts, scan, scheduler if backend == "dask" else LOCAL, progress)
    cells = merge_all(chain(summaries, [Cells(unreadable=tuple(bad))]), scan.limit)
    cells = _drop_zero_times(cells, scan.cleaning)
    if cells.rows_read == 0:
        remedy = "Correct --where." if scan.where else "Check how it was made, and make it again."
        raise BadInput("no row was found", where=str(source), remedy=remedy)
    check_tokens(cells.short, cells.rows_read, scan.cleaning, str(source))
    check_enough_left(cells, scan.cleaning, str(source))
    facts = _facts(cells, scan, str(source), len(parts) + len(bad))
    return Compressed(cells, facts, _engine_of(parts) if cells.host else {})


def _check_options(scan: Scan, backend: str, scheduler: str | None) -> None:
    check_reasons(scan.cleaning)
    if backend not in BACKENDS:
        raise WrongUsage(f"{backend!r} is not known", where="--set backend", remedy=f"Choose: {', '.join(BACKENDS)}.")
    if scheduler is not None and backend != "dask":
        raise WrongUsage("a scheduler belongs to Dask", where="--set scheduler", remedy="Add --set backend=dask.")
    if scan.unit is not None and scan.unit not in MS_PER_UNIT:
        raise WrongUsage(f"{scan.unit!r} is not a unit", where="--unit", remedy=f"Choose: {', '.join(MS_PER_UNIT)}.")


def _with_time(scan: Scan, parts: Sequence[Part], where: str) -> Scan:
    """Decide what T is by the first batches of some files. Raises BadInput if no step has a required period."""
    import pyarrow as pa

    if scan.time == COMPUTE:
        return scan
    with_a_period, used = 0.0, 0
    for part in parts[:: max(len(parts) // SAMPLED_FILES, 1)]:
        with suppress(pa.ArrowException, OSError, ValueError, BadInput):  # reported by the pass over all files
            for batch in islice(read_batches(part, scan), 1):
                found = _cells_of(batch, replace(scan, time=COMPUTE), part.path)
                used += found.rows_used
                with_a_period += sum(float(steps) for steps, *_ in found.host.values())
    share = with_a_period / used if used else 0.0
    if scan.time == PERIOD and share == 0:
        raise no_periods(where)
    return replace(scan, time=PERIOD if scan.time == PERIOD or share >= MIN_PERIOD_SHARE else COMPUTE)


def _summaries(parts: Sequence[Part], scan: Scan, scheduler: str | None, progress: Progress | None) -> Iterator[Cells]:
    """Yield the cells of each file. scheduler: LOCAL, the address of a Dask cluster, or None for one of this host."""
    done, rows = 0, sum(part.rows for part in parts)

    def report(more: int) -> None:
        nonlocal done
        done += more
        if progress:
            progress(done, max(rows, done))

    if scheduler == LOCAL:
        yield from (summarise(part, scan, report) for part in parts)
        return
    with dask_client(scheduler) as client:
        futures = {client.submit(summarise, part, scan, pure=False): part for part in parts}
        for future in finished(client, list(futures)):
            yield result_of(future)
            report(futures[future].rows)


def _drop_zero_times(cells: Cells, options: CleanOptions) -> Cells:
    """Drop the bins that are too fast for any step of their system, as cleaning does."""
    bins, dropped = dict(cells.bins), Counter(cells.dropped)
    systems = {label[: len(IDENTITY)] for label in bins} if "zero_time" not in options.keep else ()
    for system in systems:
        of_system = {label: each for label, each in bins.items() if label[: len(IDENTITY)] == system}
        rows = weighted_rows(replace(cells, bins=of_system))
        limit = shortest_plausible_ms(rows.floats("S"), rows.floats("T_ms"), rows.floats(WEIGHT))
        for label, each in of_system.items():
            fast = np.exp(each.mean_ln_ms) < limit
            dropped["zero_time"] += int(each.steps[fast].sum())
            bins[label] = Bins(each.keys[~fast], each.sums[:, ~fast])
    return replace(cells, bins={label: each for label, each in bins.items() if len(each)}, dropped=dict(+dropped))


def _facts(cells: Cells, scan: Scan, source: str, files: int) -> dict[str, Any]:
    size, context = (
        bits - cut for bits, cut in zip((FRACTION_BITS, CONTEXT_FRACTION_BITS), COARSER[cells.level], strict=True)
    )
    bins = f"{2**context} bins per octave" if context >= 0 else f"a bin per {2**-context} octaves"
    facts: dict[str, Any] = {
        "source": source,
        "files": files - len(cells.unreadable),
        "rows_read": cells.rows_read,
        "rows_used": cells.rows_used,
        "dropped": dict(cells.dropped),
        "cells": sum(len(np.unique(bins.keys >> T_BITS)) for bins in cells.bins.values()),
        "counters": len(cells),
        "resolution": {
            "level": cells.level,
            "B and S": f"exact up to {2 ** (size + 1):,}, then in bins of 1/{2**size}",
            "context_tokens": f"{bins}, means kept",
            "quantiles of T": f"within {RELATIVE_ERROR:.1%}",
        },
        "unreadable": [{"file": file, "reason": reason} for file, reason in cells.unreadable],
    }
    if cells.level:
        facts["coarser"] = f"Telling all cells apart would take more than {scan.limit:,} counters."
    if cells.host:
        means = {phase: sums[1:] / sums[0] for phase, sums in sorted(cells.host.items())}
        host = {phase: {"T_ms": float(T), "period_ms": float(period)} for phase, (T, period) in means.items()}
        facts |= {"time": scan.time, "host": host}
    return facts


def _engine_of(parts: Sequence[Part]) -> dict[str, Any]:
    """Return what some of the files report about their engine, as far as they agree, and which starts (`runs`)."""
    import pyarrow.parquet as pq

    origins = []
    for part in parts[:: max(len(parts) // SAMPLED_FILES, 1)]:
        if part.is_parquet:
            with part.filesystem.open_input_file(part.path) as stream:
                origins.append((part.path, provenance_of(part.path, pq.read_schema(stream).metadata)))
    records = [(path, origin) for path, origin in origins if is_record(origin)]
    runs = sorted({str(origin["run"]) for _, origin in records if "run" in origin})
    return {**engine_facts(records).values, **({"runs": runs} if runs else {})}
