"""Identical rows counted once: the cost of a fit is the same, and real logs repeat themselves.

Rows are sorted by what the model reads of them, then by latency, so that the rows of one cell (same step, any latency)
lie together in order of their latency. Many rows of whole numbers are sorted by counting (see `gather`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latfit.model.features import StepTable
from latfit.stats import FloatArray
from latfit.trace.table import Trace

WEIGHTS = ("rows", "segment", "variance")
"""Every step counts the same; every doubling of S counts the same; cells count by the inverse of their variance."""

COUNTED_FROM = 20_000
"""Rows from which counting is worth loading compiled code for."""

FEW_KEYS = 4
"""Keys a row up to which they are counted at once."""

VARIANCE_FLOOR = 0.1
"""A cell's variance counts as at least this share of the typical one: a few equal rows are luck, not certainty."""


@dataclass(frozen=True)
class Collapsed:
    """Different rows: columns that the model reads, T in ms, how many steps each stands for, its cell; each (n,)."""

    steps: StepTable
    observed: FloatArray
    counts: FloatArray
    cells: NDArray[np.int64]


def read_columns(trace: Trace, wanted: Sequence[str]) -> list[str]:
    """B, S and those of the wanted columns that every row of the trace has."""
    known = [name for name in wanted if name in trace and name not in ("B", "S")]
    return ["B", "S", *(name for name in known if np.all(np.isfinite(trace.floats(name))))]


def collapse(trace: Trace, names: Sequence[str], weights: FloatArray | None) -> Collapsed:
    """The different rows of a trace by the columns `names`; weights: steps that a row stands for (n,), or one each."""
    columns = {name: trace.floats(name) for name in names}
    T = trace.floats("T_ms")
    if weights is None and len(T) >= COUNTED_FROM and (counted := _counted(columns, T)) is not None:
        return counted
    order = np.lexsort((T, *reversed(columns.values())))
    columns = {name: column[order] for name, column in columns.items()}
    T = T[order]
    first = np.ones(len(T), dtype=bool)
    new_cell = first.copy()
    new_cell[1:] = np.any([np.diff(column) != 0 for column in columns.values()], axis=0)
    first[1:] = new_cell[1:] | (np.diff(T) != 0)
    starts = np.flatnonzero(first)
    ones = np.ones(len(T)) if weights is None else weights[order]
    cells = np.cumsum(new_cell) - 1
    steps = StepTable({name: column[starts] for name, column in columns.items()})
    return Collapsed(steps, T[starts], np.add.reduceat(ones, starts), cells[starts])


def _counted(columns: Mapping[str, FloatArray], T: FloatArray) -> Collapsed | None:
    """The same by counting; None where a column holds fractions, or too many values for one key."""
    from latfit.fit import gather

    spans = [gather.whole_span(column) for column in columns.values()]
    keys = math.prod(span for _, span in spans)
    if not 0 < keys < gather.LARGEST_KEY:
        return None
    key = np.zeros(len(T), dtype=np.int64)
    for column, (low, span) in zip(columns.values(), spans, strict=True):
        gather.add_digit(key, column, low, int(span))
    if keys <= FEW_KEYS * len(T):
        by_cell, starts, cell_keys = gather.counted(key, T, int(keys))
    else:
        order = gather.radix_order(key, int(keys))
        starts = gather.key_starts(key, order)
        by_cell, cell_keys = T[order], key[order[starts]]
    del key
    observed, counts, firsts = gather.different(by_cell, starts)
    del by_cell
    sizes = np.diff(firsts, append=len(observed))
    by_name = {}
    for name, (low, span) in reversed([*zip(columns, spans, strict=True)]):
        cell_keys, digit = np.divmod(cell_keys, int(span))
        by_name[name] = np.repeat(low + digit, sizes)
    steps = StepTable({name: by_name[name] for name in columns})
    return Collapsed(steps, observed, counts, np.repeat(np.arange(len(firsts)), sizes))


def weighted_counts(rows: Collapsed, scheme: str) -> FloatArray:
    """Weights (n,) of the rows under a scheme of WEIGHTS, with the same total as their counts."""
    counts = rows.counts
    if scheme == "rows":
        return counts
    if scheme == "segment":
        segment = np.floor(np.log2(np.maximum(rows.steps["S"], 1.0))).astype(np.int64)
        factor = 1.0 / np.bincount(segment, weights=counts)[segment]
    else:
        variance = _cell_variance(rows)
        factor = 1.0 / np.maximum(variance, VARIANCE_FLOOR * float(np.average(variance, weights=counts)) or 1.0)
    weights = counts * factor
    return np.asarray(weights * (counts.sum() / weights.sum()))


def _cell_variance(rows: Collapsed) -> FloatArray:
    """Variance of ln T in each row's cell (n,), drawn to the typical one as if four more rows had it."""
    logs, cells, counts = np.log(rows.observed), rows.cells, rows.counts
    size = np.bincount(cells, weights=counts)
    mean = np.bincount(cells, weights=counts * logs) / size
    squares = np.bincount(cells, weights=counts * (logs - mean[cells]) ** 2)
    freedom = np.maximum(size - 1, 0)
    typical = float(squares.sum()) / max(float(freedom.sum()), 1.0)
    return np.asarray(((squares + 4 * typical) / (freedom + 4))[cells])
