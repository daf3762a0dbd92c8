"""Rows of one part of a dataset to cells: filter, clean, label, count.

Cleaning is `trace/clean.py`'s, for the rules that can be decided from a row alone. Duplicates and a cold start that
nobody marked need the order of rows and are not looked for: here rows come in any order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.errors import BadInput
from latfit.stats import FloatArray
from latfit.trace.cells import (
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
from latfit.trace.clean import RULES, CleanOptions
from latfit.trace.dataset import Part, batches, first_line
from latfit.trace.table import Array, Trace
from latfit.trace.where import matching_rows
from latfit.units import MS_PER_UNIT

Mask = NDArray[np.bool_]

NUMBERS = ("B", "S", "T_ms", "context_tokens", "prefill_requests", "prefill_tokens")
FLAGS = ("dummy", "idle", "warmup")
MOST_LABELS = 256
NOT_BY_ROW = ("zero_time", "duplicate", "outlier")
ROW_RULES = tuple(rule for rule in RULES if rule.reason not in NOT_BY_ROW)


@dataclass(frozen=True)
class Scan:
    """What to read and how: column map, unit of T, row filter, cleaning; at most `limit` atoms are held.

    skip_unreadable: leave out what cannot be read as a trace, and count it, instead of failing at the first.
    """

    column_map: Mapping[str, str] = field(default_factory=dict)
    unit: str | None = None
    where: str | None = None
    cleaning: CleanOptions = field(default_factory=CleanOptions)
    limit: int = MAX_ATOMS
    skip_unreadable: bool = False


def summarise(filesystem: Any, part: Part, scan: Scan, level: int = 0) -> Cells:
    """The cells of one part, at `level` or coarser.

    Raises BadInput where it cannot be read, unless that is to be skipped: then the part as a whole is.
    """
    import pyarrow as pa

    pool = Pool(scan.limit, level)
    try:
        for batch in batches(filesystem, part, _wanted(scan), scan.column_map):
            pool.add(_cells_of(batch, scan, part.path, pool.level))
    except (pa.ArrowException, OSError) as error:
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
    atoms = {}
    for label, members in _labels(batch, path):
        mask = used if members is None else used & members
        if not mask.any():
            continue
        rows: Any = slice(None) if mask.all() else np.flatnonzero(mask)
        B, S, T = (trace.floats(name)[rows] for name in ("B", "S", "T_ms"))
        context = trace["context_tokens"][rows] if "context_tokens" in trace else None
        atoms[label] = atoms_of(B, S, T, context, level)
    return Cells(atoms, level, scan.limit, len(trace), dropped)


def _cleaned(trace: Trace, options: CleanOptions) -> tuple[Mask, dict[str, int]]:
    """Mask of the rows that can be steps, and how many each rule dropped, the first that applies."""
    used = np.ones(len(trace), dtype=bool)
    dropped: dict[str, int] = {}

    def drop(reason: str, hit: Mask) -> None:
        hit = hit & used
        if number := int(np.count_nonzero(hit)):
            dropped[reason] = number
            used[hit] = False

    for rule in ROW_RULES:
        if rule.reason == "bad_value" and "zero_time" not in options.keep:
            drop("zero_time", trace["T_ms"] == 0)
        if rule.reason not in options.keep:
            drop(rule.reason, rule.find(trace, options))
    drop("out_of_range", _out_of_range(trace))
    return used, dropped


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
    return np.array([value in (True, 1, "true", "True", "1") for value in column.to_pylist()], dtype=bool)
