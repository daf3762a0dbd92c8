"""Summarise traces of any length in bounded memory: cells of similar steps, counted here or on a Dask cluster.

A bin holds the steps of one system and phase with similar B, S, context and ln T, which become coarser if there are too
many. The result is rows with weights (`cell_rows`): docs/formats.md.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.dask_cluster import run_on_dask
from latfit.errors import BadInput, first_line, located
from latfit.stats import FloatArray, IntArray
from latfit.trace.clean import (
    LOOKED_AT,
    MAX_MS,
    MIN_MS,
    check_usable,
    clean,
    shortest_plausible_ms,
)
from latfit.trace.metadata import facts_of
from latfit.trace.parquet import columns_of, provenance_of
from latfit.trace.read import Reading
from latfit.trace.readers.source import HEAD_BYTES, Options, delimiter_of, header_of
from latfit.trace.readers.table import PARQUET_MAGIC, name_columns, steps_of
from latfit.trace.serving_engine import engine_facts
from latfit.trace.step_records import COMPUTE, MIN_PERIOD_SHARE, NO_PERIOD, PERIOD, no_periods, with_records
from latfit.trace.table import IDENTITY, KINDS, WEIGHT, Trace, matching_rows, phases

LABELS = (*IDENTITY, "phase")
MAX_LABELS = 256  # different values of such a column
SUMS = ("steps", "sum_d", "sum_d2", "sum_B", "sum_S", "sum_context", "timed", "sum_T", "sum_period")
"""Columns of bins. d: ln T from the middle of its bin; timed: steps with a period, and the sums of their times."""

BIN = 1 / 64  # of ln T; a quantile read at the middle of its bin is within 0.8 %
MIN_T_BINS = 16  # a cell with fewer needs its variance within bins too
MIN_SPREAD = 1e-9  # of ln T within a bin; less is rounding
MAX_BINS = 1 << 20  # a pass holds them in less than 1 GiB

FRACTION_BITS, CONTEXT_FRACTION_BITS = 15, 3  # B and S are exact up to 65,536; 8 bins of the context per octave
T_BITS, CONTEXT_BITS, S_BITS, B_BITS = 12, 9, 21, 20  # of a key
T_MIDDLE, KNOWN_CONTEXT = 1 << (T_BITS - 1), 1 << (CONTEXT_BITS - 1)
COARSER = ((0, 0), *((size, size - 5) for size in range(5, 14)))
"""Bits cut off B and S, and off the context, at each level of resolution."""

BATCH_ROWS = 1 << 18
SAMPLED_FILES = 8  # whose provenance is read
NEEDED = {*LOOKED_AT, *LABELS, "period_ms", "draft_tokens"}
ABOUT = re.compile(
    r"(^|/)(README|LICEN[SC]E|NOTICE)[^/]*$|\.(md|rst|html|pdf|png|svg|crc|json|cells\.parquet)$", re.IGNORECASE
)
"""Files about a folder, and those that a fit of it writes into it."""
NO_PARQUET = "no Parquet file, as which the files of a folder are read"


@dataclass(frozen=True)
class Cells:
    """Bins by label and key, and what was read and dropped.

    bins: columns `label` (a place in `labels`), `key` (S = B, and the leading bits of B, S, context and ln T) and SUMS;
    short: rows with S < B; unreadable: (file, reason).
    """

    labels: Sequence[tuple[str, ...]]
    bins: Trace
    level: int = 0
    rows_read: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    short: int = 0
    unreadable: tuple[tuple[str, str], ...] = ()

    @property
    def rows_used(self) -> int:
        return int(self.bins["steps"].sum())

    def column(self, name: str) -> NDArray[np.object_]:
        return np.array([label[LABELS.index(name)] for label in self.labels], dtype=object)[self.bins["label"]]


def merge(parts: Sequence[Cells], limit: int = MAX_BINS) -> Cells:
    level = max(part.level for part in parts)
    merged = _add_up(parts, level)
    while len(merged.bins) > limit and level < len(COARSER) - 1:
        level += 1
        merged = _add_up([merged], level)
    dropped: Counter[str] = Counter()
    for part in parts:
        dropped.update(part.dropped)
    return replace(
        merged,
        level=level,
        rows_read=sum(part.rows_read for part in parts),
        dropped=dict(sorted((+dropped).items())),
        short=sum(part.short for part in parts),
        unreadable=tuple(sorted({bad for part in parts for bad in part.unreadable})),
    )


def merge_all(parts: Iterable[Cells], limit: int) -> Cells:
    """Merge parts as they come, each bin a few times only: when those that wait are as many as those merged."""
    merged, waiting = count_steps(Trace({})), list[Cells]()
    for part in parts:
        waiting.append(part)
        if sum(len(each.bins) for each in waiting) >= max(len(merged.bins), limit // 4):
            merged, waiting = merge([merged, *waiting], limit), []
    return merge([merged, *waiting], limit)


def _add_up(parts: Sequence[Cells], level: int) -> Cells:
    """Add up equal bins at a level of resolution."""
    size, context = COARSER[level]
    cut_size = (1 << size) - 1
    cut = ((((cut_size << S_BITS) | cut_size) << CONTEXT_BITS) | ((1 << context) - 1)) << T_BITS
    labels = sorted({label for part in parts for label in part.labels})
    places = [np.array([labels.index(label) for label in part.labels], dtype=np.int64) for part in parts]
    label = np.concatenate([place[part.bins["label"]] for place, part in zip(places, parts, strict=True)])
    key = np.concatenate([part.bins["key"] for part in parts]) & ~cut
    order = np.lexsort((key, label)) if len(labels) > 1 else np.argsort(key)
    label, key = label[order], key[order]
    starts = np.flatnonzero((np.diff(label, prepend=-1) != 0) | (np.diff(key, prepend=-1) != 0))
    sums = {name: np.concatenate([part.bins[name] for part in parts])[order] for name in SUMS}
    sums = {name: np.add.reduceat(column, starts) if len(starts) else column for name, column in sums.items()}
    return Cells(labels, Trace({"label": label[starts], "key": key[starts], **sums}))


def count_steps(trace: Trace, time: str | None = COMPUTE) -> Cells:
    """Return the bins of clean steps at the finest resolution. time: what T is."""
    B, S, T, context, period = map(trace.floats_or_nan, ("B", "S", "T_ms", "context_tokens", "period_ms"))
    timed = (period >= MIN_MS) & (period <= MAX_MS)
    ln_T = np.log(period if time == PERIOD else T)
    t = np.rint(ln_T / BIN)
    d = ln_T - t * BIN
    tokens = np.where(context >= 0, context, 0.0)
    keys = ((S == B).astype(np.int64) << B_BITS | _leading_bits(B, FRACTION_BITS)) << S_BITS
    keys = (keys | _leading_bits(S, FRACTION_BITS)) << CONTEXT_BITS
    bits = _leading_bits(np.minimum(tokens + 1.0, 2.0**31), CONTEXT_FRACTION_BITS)
    keys = (keys | np.where(context >= 0, bits | KNOWN_CONTEXT, 0)) << T_BITS
    keys |= t.astype(np.int64) + T_MIDDLE
    times = timed.astype(np.float64), np.where(timed, T, 0.0), np.where(timed, period, 0.0)
    sums = dict(zip(SUMS, (np.ones(len(trace)), d, d * d, B, S, tokens, *times), strict=True))
    label = trace.group(LABELS)
    firsts = np.unique(label, return_index=True)[1].tolist()
    labels = [tuple(str(trace[name][row]) if name in trace else "" for name in LABELS) for row in firsts]
    return _add_up([Cells(labels, Trace({"label": label, "key": keys, **sums}))], 0)


def _leading_bits(x: FloatArray, fraction: int) -> IntArray:
    """Return the exponent and the leading fraction bits of x >= 1 as an integer that grows with x."""
    return np.asarray((np.ascontiguousarray(x).view(np.int64) >> (52 - fraction)) - (1023 << fraction))


def _mean_ln_ms(bins: Trace) -> FloatArray:
    middle = ((bins["key"] & ((1 << T_BITS) - 1)) - T_MIDDLE) * BIN
    return np.asarray(middle + bins["sum_d"] / bins["steps"])


def weighted_rows(cells: Cells) -> Trace:
    """Return rows with weights: a bin is a row, or two with its variance in cells with few bins of T."""
    bins = cells.bins
    cell, steps = _cell_of(bins), bins["steps"]
    count = np.bincount(cell, steps)
    B, S, context = ((np.bincount(cell, bins[f"sum_{name}"]) / count)[cell] for name in ("B", "S", "context"))
    context = np.where(bins["key"] >> T_BITS & KNOWN_CONTEXT > 0, context, np.nan)
    spread = np.sqrt(np.maximum(bins["sum_d2"] / steps - (bins["sum_d"] / steps) ** 2, 0.0))
    split = (spread > MIN_SPREAD) & (np.bincount(cell) < MIN_T_BINS)[cell]
    upper = np.where(split, np.floor(steps / 2), 0.0)
    lower = steps - upper
    centre = _mean_ln_ms(bins)
    T = np.exp(centre - np.where(split, spread * np.sqrt(upper / lower), 0.0))
    T_upper = np.exp(centre + spread * np.sqrt(lower / np.maximum(upper, 1.0)))
    columns = {"B": B, "S": S, "context_tokens": context, **{name: cells.column(name) for name in LABELS}}
    columns = {name: np.append(x, x[split]) for name, x in columns.items() if name not in LABELS or np.any(x != "")}
    if np.isnan(columns["context_tokens"]).all():
        del columns["context_tokens"]
    return Trace({**columns, "T_ms": np.append(T, T_upper[split]), WEIGHT: np.append(lower, upper[split])})


def _cell_of(bins: Trace) -> IntArray:
    key = bins["key"] >> T_BITS
    return np.cumsum((np.diff(bins["label"], prepend=-1) != 0) | (np.diff(key, prepend=-1) != 0)) - 1


def find_fragments(source: str | Path, options: Options) -> tuple[list[Any], int, list[tuple[str, str]]]:
    """Return the Arrow fragments of a folder or file, the rows of Parquet files, and (file, reason) of bad ones."""
    import pyarrow as pa
    import pyarrow.dataset as ds

    try:
        checked = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
        parquet = ds.ParquetFileFormat(default_fragment_scan_options=checked)
        found = list(ds.dataset(str(source), format=parquet, schema=pa.schema([])).get_fragments())
    except (pa.ArrowException, OSError) as error:
        remedy = "Give a readable path, or a URI such as s3://bucket/folder, gs://bucket/folder, hdfs://host/folder."
        raise BadInput(f"cannot be listed ({first_line(error)})", where=str(source), remedy=remedy) from None
    is_file = len(found) == 1 and str(source).endswith(Path(found[0].path).name)
    fragments, rows, bad = [], 0, []
    for fragment in sorted(found, key=lambda each: each.path):
        head = b""
        try:
            head = fragment.open().read(HEAD_BYTES)
            if is_file and not head.startswith(PARQUET_MAGIC) and header_of(head):
                fragments.append(_text_fragment(fragment, head, options))
            elif is_file or not ABOUT.search(fragment.path):
                rows += fragment.metadata.num_rows
                fragments.append(fragment)
        except MemoryError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            broken = f"not a whole Parquet file ({first_line(error)})"
            kind = broken if head.startswith(PARQUET_MAGIC) else NO_PARQUET if head else "the file is empty"
            bad.append((fragment.path, kind))
    if not fragments and not bad:
        remedy = "Name the folder that holds the Parquet files of a trace."
        raise BadInput("holds no trace", where=str(source), remedy=remedy)
    return fragments, rows, bad


def _text_fragment(fragment: Any, head: bytes, options: Options) -> Any:
    import pyarrow as pa
    import pyarrow.dataset as ds
    from pyarrow import csv

    theirs = name_columns(header_of(head), options)[0]
    numbers = [theirs[name] for name in theirs if KINDS.get(name) in ("int", "float")]
    convert = csv.ConvertOptions(column_types=dict.fromkeys(numbers, pa.float64()))
    parse = csv.ParseOptions(delimiter=delimiter_of(head.partition(b"\n")[0].decode(errors="replace")))
    text = ds.CsvFileFormat(parse, default_fragment_scan_options=ds.CsvFragmentScanOptions(convert))
    return text.make_fragment(fragment.path, fragment.filesystem)


def read_batches(fragment: Any, reading: Reading) -> Iterator[Trace]:
    import pyarrow as pa
    import pyarrow.compute as pc

    options, path = Options(reading.column_map, reading.unit), fragment.path
    schema = fragment.physical_schema
    origin = provenance_of(path, schema.metadata)
    columns_of(schema.empty_table(), path)  # refuses equal names
    theirs = name_columns(schema.names, options)[0]
    wanted = {*NEEDED, *re.findall(r"[\w.]+", reading.where or "")}
    columns = list(dict.fromkeys(theirs[name] for name in theirs if name in wanted))
    for batch in fragment.to_batches(columns=columns, batch_size=BATCH_ROWS, batch_readahead=1, use_threads=False):
        if not len(batch):
            continue
        texts = [pa.types.is_string(kind) or pa.types.is_large_string(kind) for kind in batch.schema.types]
        arrays = [pc.dictionary_encode(a) if text else a for a, text in zip(batch.columns, texts, strict=True)]
        table = Trace(columns_of(pa.table(arrays, names=batch.schema.names), path), origin)
        with np.errstate(over="ignore", invalid="ignore"):
            trace = steps_of(table, options, in_ms=True)
        yield with_records(trace)


def summarise(fragment: Any, reading: Reading, time: str, limit: int = MAX_BINS, skip_bad: bool = False) -> Cells:
    """Return the cells of one file. Raises BadInput if it cannot be read, unless skip_bad."""
    import pyarrow as pa

    try:
        with located(fragment.path):
            return merge_all((_cells_of(trace, reading, time) for trace in read_batches(fragment, reading)), limit)
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, ValueError, BadInput) as error:
        reason = error.found if isinstance(error, BadInput) else f"cannot be read ({first_line(error)})"
        if skip_bad:
            return replace(count_steps(Trace({})), unreadable=((fragment.path, reason),))
        raise error if isinstance(error, BadInput) else unreadable(fragment.path, reason) from None


def unreadable(path: str, reason: str) -> BadInput:
    remedy = "Make it again or move it away, or leave it out: latfit ingest --skip-bad."
    if reason == NO_PARQUET:
        remedy = "Name tables and logs themselves, or leave them out: latfit ingest --skip-bad."
    return BadInput(reason, where=path, remedy=remedy)


def _cells_of(trace: Trace, reading: Reading, time: str) -> Cells:
    if reading.where:
        trace = trace.select(matching_rows(trace, reading.where))
    if facts_of(trace.provenance).is_record and "phase" not in trace:
        trace = trace.with_columns(phase=phases(trace))
    for name in LABELS:
        if name in trace and (values := len(set(trace[name].tolist()))) > MAX_LABELS:
            remedy = f"It names systems or phases, {MAX_LABELS} at most; map another column: --map {name}=COLUMN."
            raise BadInput(f"column {name} has {values:,} different values", remedy=remedy)
    cleaned = clean(trace, reading.cleaning, rows_only=True)
    steps, dropped = cleaned.trace, Counter(cleaned.dropped)
    if time == PERIOD:
        timed = steps.floats_or_nan("period_ms") > 0
        dropped[NO_PERIOD] = int(np.count_nonzero(~timed))
        steps = steps.select(timed)
    return replace(count_steps(steps, time), rows_read=len(trace), dropped=dropped, short=cleaned.short)


def compress(
    source: str | Path,
    reading: Reading = Reading(),
    *,
    time: str | None = COMPUTE,
    limit: int = MAX_BINS,
    skip_unreadable: bool = False,
    backend: str = "local",
    scheduler: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """Summarise all files of a folder (or one file) into rows with weights that fit as the steps would.

    time: compute or period; None: the period if most steps have one. limit: bins held at most. skip_unreadable: leave
    out and count bad files. scheduler: address of a Dask cluster; without it, backend="dask" starts workers here.
    Raises BadInput, WrongUsage.
    """
    fragments, rows, bad = find_fragments(source, Options(reading.column_map, reading.unit))
    if bad and not skip_unreadable:
        raise unreadable(*bad[0])
    time = time or _most_common_time(reading, fragments)
    tasks: dict[int, tuple[Any, ...]] = {
        i: (summarise, each, reading, time, limit, skip_unreadable) for i, each in enumerate(fragments)
    }

    def summaries() -> Iterator[Cells]:
        done = 0
        by_dask = (cells for _, cells in run_on_dask(tasks, scheduler))
        for cells in by_dask if backend == "dask" else (task(*arguments) for task, *arguments in tasks.values()):
            yield cells
            done += cells.rows_read
            if progress:
                progress(done, max(rows, done))

    cells = merge_all(summaries(), limit)
    cells = replace(_drop_zero_times(cells, reading), unreadable=(*bad, *cells.unreadable))
    with located(str(source)):
        if cells.rows_read == 0:
            remedy = "Correct --where." if reading.where else "Check how it was made, and make it again."
            raise BadInput("no row was found", remedy=remedy)
        if not cells.rows_used and cells.dropped.get(NO_PERIOD):
            raise no_periods()
        check_usable(cells, reading.cleaning)
    facts = _facts(cells, time, limit, str(source), len(fragments) + len(bad))
    engine = _engine_of(fragments) if "host" in facts else {}
    return weighted_rows(cells).with_provenance(**engine, cells=facts)


def _most_common_time(reading: Reading, fragments: Sequence[Any]) -> str:
    import pyarrow as pa

    for fragment in fragments:
        with suppress(pa.ArrowException, OSError, ValueError, BadInput):  # reported by the pass over all files
            for batch in read_batches(fragment, reading):
                bins = _cells_of(batch, reading, COMPUTE).bins
                return PERIOD if bins["timed"].sum() >= max(MIN_PERIOD_SHARE * bins["steps"].sum(), 1) else COMPUTE
    return COMPUTE


def _drop_zero_times(cells: Cells, reading: Reading) -> Cells:
    """Drop the bins that are too fast for any step of their system, as cleaning does."""
    if "zero_time" in reading.cleaning.keep:
        return cells
    bins = cells.bins
    T, S, steps = np.exp(_mean_ln_ms(bins)), bins["sum_S"] / bins["steps"], bins["steps"]
    slow = np.ones(len(bins), dtype=bool)
    systems = [label[: len(IDENTITY)] for label in cells.labels]
    for system in set(systems):
        rows = np.isin(bins["label"], [i for i, each in enumerate(systems) if each == system])
        slow[rows] = T[rows] >= shortest_plausible_ms(S[rows], T[rows], steps[rows])
    dropped = Counter(cells.dropped) + Counter(zero_time=int(steps[~slow].sum()))
    return replace(cells, bins=bins.select(slow), dropped=dict(dropped))


def _facts(cells: Cells, time: str, limit: int, source: str, files: int) -> dict[str, Any]:
    bins = cells.bins
    size, context = np.subtract((FRACTION_BITS, CONTEXT_FRACTION_BITS), COARSER[cells.level]).tolist()
    context_bins = f"{2**context} bins per octave" if context >= 0 else f"a bin per {2**-context} octaves"
    phase, host = cells.column("phase"), {}
    for name in sorted(set(phase[bins["timed"] > 0].tolist())):
        n, T, period = (float(bins[column][phase == name].sum()) for column in SUMS[-3:])
        host[name] = {"T_ms": T / n, "period_ms": period / n}
    return {
        "source": source,
        "files": files - len(cells.unreadable),
        "rows_read": cells.rows_read,
        "rows_used": cells.rows_used,
        "dropped": dict(cells.dropped),
        "cells": int(_cell_of(bins).max(initial=-1)) + 1,
        "counters": len(bins),
        "resolution": {
            "level": cells.level,
            "B and S": f"exact up to {2 ** (size + 1):,}, then in bins of 1/{2**size}",
            "context_tokens": f"{context_bins}, means kept",
            "quantiles of T": f"within {np.expm1(BIN / 2):.1%}",
        },
        "unreadable": [{"file": file, "reason": reason} for file, reason in cells.unreadable],
        **({"coarser": f"Telling all cells apart would take more than {limit:,} counters."} if cells.level else {}),
        **({"time": time, "host": host} if host else {}),
    }


def _engine_of(fragments: Sequence[Any]) -> dict[str, Any]:
    """Return what some of the files report about their engine, as far as they agree, and which starts (`runs`)."""
    some = fragments[:: max(len(fragments) // SAMPLED_FILES, 1)]
    origins = [(each.path, provenance_of(each.path, each.physical_schema.metadata)) for each in some]
    records = [(path, origin) for path, origin in origins if facts_of(origin).is_record]
    runs = sorted({str(origin["run"]) for _, origin in records if "run" in origin})
    return {**engine_facts(records).values, **({"runs": runs} if runs else {})}
