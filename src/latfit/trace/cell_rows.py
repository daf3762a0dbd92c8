"""What cells say: a line of statistics a cell, and rows with weights that every fit can use.

A row stands for the steps of an atom, at the mean of their ln T (or at their very T, where it is one). That keeps the
shape of the noise down to the width of a bin, for the robust loss, and loses the variance within the bins, at most
BIN^2/4 and BIN^2/12 = (0.45 %)^2 for noise wider than a bin. Where that is more than 2 % of a cell's variance, an atom
of n steps becomes two rows of a = ceil(n/2) and b = floor(n/2) steps, at mean - s sqrt(b/a) and mean + s sqrt(a/b),
which have its mean and its variance s^2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latfit.stats import FloatArray
from latfit.trace.cells import B_UNIT, LABELS, S_UNIT, Atoms, Cells, Label, cell_contexts, cell_starts
from latfit.trace.table import Array, Trace

WEIGHT = "cell_rows"
"""Column of a trace made from cells: how many measured steps a row stands for."""

QUANTILES = {"p10_ms": 0.1, "p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99}
MATERIAL = 0.02
SAME_T = 1e-5
"""A spread of ln T within an atom below this is rounding of its sums."""


def row_weights(trace: Trace) -> FloatArray | None:
    """How many measured steps each row stands for (n,); None where each stands for itself."""
    return np.nan_to_num(trace.floats(WEIGHT), nan=1.0) if WEIGHT in trace else None


def step_count(trace: Trace) -> int:
    """How many measured steps the rows of a trace stand for."""
    weights = row_weights(trace)
    return len(trace) if weights is None else round(float(weights.sum()))


def weighted_rows(cells: Cells) -> Trace:
    """Rows with weights that stand for all steps of the cells, in an order that depends on the steps alone."""
    return _joined([(label, _rows(atoms, _moments(atoms))) for label, atoms in cells.atoms.items() if len(atoms)])


def cell_table(cells: Cells) -> Trace:
    """A row a cell: B, S, context_tokens (mean), labels, rows, mean_ms, mean and variance of ln T, range, quantiles."""
    return _joined([(label, _lines(atoms)) for label, atoms in cells.atoms.items() if len(atoms)])


@dataclass(frozen=True)
class _Moments:
    """By cell (m,): first atom, number of steps, mean B and S, mean and variance of ln T, the part of it within atoms.
    cell: of each atom (n,)."""

    first: NDArray[np.intp]
    count: FloatArray
    B: FloatArray
    S: FloatArray
    mean: FloatArray
    variance: FloatArray
    within: FloatArray
    cell: NDArray[np.intp]


def _moments(atoms: Atoms) -> _Moments:
    first = cell_starts(atoms)
    cell = np.repeat(np.arange(len(first)), np.diff(first, append=len(atoms)))
    n, shift, square = atoms.count.astype(np.float64), atoms.shift, atoms.square
    count = np.add.reduceat(n, first)
    mean = np.add.reduceat(n * atoms.middle + shift, first) / count
    away = atoms.middle - mean[cell]
    variance = np.add.reduceat(n * away**2 + 2 * away * shift + square, first) / count
    within = np.add.reduceat(np.maximum(square - shift**2 / n, 0.0), first) / count
    B, S = np.add.reduceat(atoms.sums[3], first) / B_UNIT, np.add.reduceat(atoms.sums[4], first) / S_UNIT
    return _Moments(first, count, B / count, S / count, mean, np.maximum(variance, 0.0), within, cell)


def _rows(atoms: Atoms, moments: _Moments) -> dict[str, Array]:
    context = cell_contexts(atoms, moments.first)[moments.cell]
    B, S = moments.B[moments.cell], moments.S[moments.cell]
    n = atoms.count.astype(np.float64)
    mean = atoms.shift / n
    spread = np.sqrt(np.maximum(atoms.square / n - mean**2, 0.0))
    spread[atoms.low == atoms.high] = 0.0
    material = (moments.within > MATERIAL * moments.variance)[moments.cell]
    split = np.flatnonzero(material & (spread > SAME_T))
    more = np.floor(n / 2) * np.isin(np.arange(len(n)), split)
    fewer = n - more
    centre = atoms.middle + mean
    T = np.where(atoms.low == atoms.high, atoms.low, np.exp(centre - spread * np.sqrt(more / fewer)))
    upper = np.exp(centre + spread * np.sqrt(fewer / np.maximum(more, 1)))[split]
    columns = {"B": B, "S": S, "T_ms": T, WEIGHT: fewer, "context_tokens": context}
    joined = {name: np.concatenate([column, column[split]]) for name, column in columns.items()}
    joined["T_ms"][len(n) :] = upper
    joined[WEIGHT][len(n) :] = more[split]
    return joined


def _lines(atoms: Atoms) -> dict[str, Array]:
    moments = _moments(atoms)
    first, count = moments.first, moments.count
    last = np.append(first[1:], len(atoms)) - 1
    inside = np.exp(atoms.middle) * (atoms.count + atoms.shift + atoms.square / 2)
    cumulative = np.cumsum(atoms.count)
    before = cumulative[first] - atoms.count[first]
    typical = np.clip(np.exp(atoms.middle), atoms.low, atoms.high)
    rank = {name: before + np.maximum(np.ceil(q * count - 1e-9), 1).astype(np.int64) for name, q in QUANTILES.items()}
    return {
        "B": moments.B,
        "S": moments.S,
        "context_tokens": cell_contexts(atoms, first),
        "rows": count.astype(np.int64),
        "mean_ms": np.add.reduceat(inside, first) / count,
        "mean_log_ms": moments.mean,
        "variance_log_ms": moments.variance,
        "min_ms": atoms.low[first],
        "max_ms": atoms.high[last],
        **{name: typical[np.searchsorted(cumulative, ranks)] for name, ranks in rank.items()},
    }


def _joined(tables: Sequence[tuple[Label, Mapping[str, Array]]]) -> Trace:
    """One trace of the tables of all labels; label and context columns that say nothing are left out."""
    if not tables:
        return Trace({})
    columns = {name: np.concatenate([table[name] for _, table in tables]) for name in tables[0][1]}
    if np.all(np.isnan(columns["context_tokens"])):
        del columns["context_tokens"]
    lengths = [len(table["B"]) for _, table in tables]
    for position, name in enumerate(LABELS):
        texts = [label[position] for label, _ in tables]
        if any(texts):
            columns[name] = np.repeat(np.array(texts, dtype=object), lengths)
    return Trace(columns)
