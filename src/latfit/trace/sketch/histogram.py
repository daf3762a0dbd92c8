"""Cells: a trace of any length in flat memory, as counts of steps that are alike. Two summaries merge into one.

A cell is one B, one S, one bin of the context and one label (hardware, model, tp, path, phase). Within a cell, steps
are counted in bins of ln T that are BIN = 1/64 wide: an *atom* is one such bin of one cell. A quantile of T read at the
middle of its bin is off by at most e^(BIN/2) - 1 = 0.8 %, whatever the distribution (a fixed geometric histogram;
Masson, Rim & Lee 2019 call it DDSketch).

An atom keeps integers only: with d = ln T - (middle of the bin), |d| <= BIN/2, the number of its steps and the sums of
2^36 d, 2^44 d^2, 2^12 B, 2^8 S and the context tokens, each rounded, besides the least and the largest T. Integer sums,
minima and maxima do not depend on the order, so the same steps give the same cells bit for bit, however they are spread
over files, batches and workers; sums stay below 2^63 up to 2^30 steps an atom. From them come, for any union of atoms,
the mean of ln T to 1e-11, its variance to 1e-13, the means of B and S, and that of T from
sum e^d = n + sum d + sum d^2/2 + O(n BIN^3/48), to 1e-7.

The key of an atom is one integer: whether S = B, then B, S and context as their binary exponent and the leading bits of
their fraction, as in a floating-point number, then the bin of ln T. With 15 bits B and S are exact up to 65,536 and
then 2^-15 apart. Fewer bits are geometric bins: where there are more atoms than the limit, bits of B and S and of the
context are cut off in turn until the atoms fit. A step counts at its cell's mean B, S and context, so that what bins
blur is of second order. Cutting commutes with merging, and a part never has more atoms than the whole, so the
resolution reached depends on the steps alone.

Cells come back as rows with weights that every fit can use. A row stands for the steps of an atom, at the mean of their
ln T (or at their very T, where it is one). That keeps the shape of the noise down to the width of a bin, for the robust
loss, and loses the variance within the bins, at most BIN^2/4 and BIN^2/12 = (0.45 %)^2 for noise wider than a bin.
Where that is more than 2 % of a cell's variance, an atom of n steps becomes two rows of a = ceil(n/2) and b =
floor(n/2) steps, at mean - s sqrt(b/a) and mean + s sqrt(a/b), which have its mean and its variance s^2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from latfit.stats import FloatArray, IntArray
from latfit.trace.columns import IDENTITY
from latfit.trace.table import Array, Trace

Label = tuple[str, ...]

LABELS = (*IDENTITY, "phase")
"""Columns whose values keep cells apart; a label has one text for each, empty where the trace has no such column."""

BIN = 1 / 64
RELATIVE_ERROR = float(np.expm1(BIN / 2))
"""How far a quantile of T is off at most, relative to the exact one."""

MAX_ATOMS = 1 << 20
"""What a pass holds in 0.7 GiB, and a fit takes some ten seconds for."""

LADDER = (
    (15, 0), (10, 0), (8, 1), (7, 1), (6, 1), (6, 2), (5, 2), (5, 3), (5, 4), (4, 4), (4, 5), (4, 8), (3, 8), (2, 8)
)  # fmt: skip
"""At each level of resolution: bits of B and S that are kept, bits of the context that are cut off (of 8)."""

T_BITS, CONTEXT_BITS, S_BITS, B_BITS = 12, 9, 21, 20
T_MIDDLE = 1 << (T_BITS - 1)
KNOWN_CONTEXT = 1 << (CONTEXT_BITS - 1)
SIZE_FRACTION, CONTEXT_FRACTION = 15, 3
FIRST, SECOND, B_UNIT, S_UNIT = 2.0**36, 2.0**44, 2.0**12, 2.0**8
LOG_T_LIMIT, B_LIMIT, S_LIMIT, CONTEXT_LIMIT = 31.9, 2.0**20, 2.0**24, 2.0**30
"""What keys and sums can hold: |ln T| (T in ms), B, S and context stay below."""


@dataclass(frozen=True)
class Atoms:
    """Atoms of one label, by ascending key: keys (n,), sums (6, n) of 1, 2^36 d, 2^44 d^2, 2^12 B, 2^8 S and context,
    least and largest T (n,)."""

    keys: IntArray
    sums: IntArray
    low: FloatArray
    high: FloatArray

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def count(self) -> IntArray:
        return np.asarray(self.sums[0])

    @property
    def shift(self) -> FloatArray:
        """Sum of d (n,)."""
        return np.asarray(self.sums[1] / FIRST)

    @property
    def square(self) -> FloatArray:
        """Sum of d^2 (n,)."""
        return np.asarray(self.sums[2] / SECOND)

    @property
    def middle(self) -> FloatArray:
        """Middle of the bin of ln T (n,)."""
        return np.asarray(((self.keys & ((1 << T_BITS) - 1)) - T_MIDDLE) * BIN)

    def select(self, kept: NDArray[np.bool_]) -> "Atoms":
        return Atoms(self.keys[kept], self.sums[:, kept], self.low[kept], self.high[kept])

    def cut(self, level: int) -> "Atoms":
        """The same steps at a coarser resolution."""
        return group(self.keys & _mask(level), self.sums, self.low, self.high)


@dataclass(frozen=True)
class Cells:
    """Atoms by label, the level of `LADDER` they are at, the rows that were read, and those dropped by reason.

    limit: atoms held at most, as far as the ladder goes.  unreadable: (file, reason) of what was skipped.  host: by
    phase, of steps that know their period: how many, and the sums of T and of the period in µs.
    """

    atoms: Mapping[Label, Atoms] = field(default_factory=dict)
    level: int = 0
    limit: int = MAX_ATOMS
    rows_read: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    unreadable: tuple[tuple[str, str], ...] = ()
    host: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self.atoms.values()))

    @property
    def rows_used(self) -> int:
        return sum(int(atoms.count.sum()) for atoms in self.atoms.values())

    def merge(self, other: "Cells") -> "Cells":
        """Both together; the smaller limit holds."""
        return merged((self, other))


def merged(parts: Sequence[Cells]) -> Cells:
    """All parts together, in any order with the same result."""
    level = max((part.level for part in parts), default=0)
    limit = min((part.limit for part in parts), default=MAX_ATOMS)
    labels = sorted({label for part in parts for label in part.atoms})
    atoms = {label: _united([part.atoms[label] for part in parts if label in part.atoms], level) for label in labels}
    dropped: dict[str, int] = {}
    for part in parts:
        for reason, rows in part.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + rows
    while sum(map(len, atoms.values())) > limit and level < len(LADDER) - 1:
        level += 1
        atoms = {label: group_.cut(level) for label, group_ in atoms.items()}
    unreadable = tuple(sorted({file for part in parts for file in part.unreadable}))
    host: dict[str, tuple[int, int, int]] = {}
    for phase, (steps, T, period) in ((phase, sums) for part in parts for phase, sums in part.host.items()):
        before = host.get(phase, (0, 0, 0))
        host[phase] = (before[0] + steps, before[1] + T, before[2] + period)
    return Cells(atoms, level, limit, sum(part.rows_read for part in parts), dropped, unreadable, host)


class Pool:
    """Cells being gathered. Parts wait until they are as many as what they are merged into, so that an atom is moved a
    few times only; at most three times the limit is held."""

    def __init__(self, limit: int = MAX_ATOMS, level: int = 0) -> None:
        self._gathered = Cells(level=level, limit=limit)
        self._waiting: list[Cells] = []

    @property
    def level(self) -> int:
        """The resolution reached: nothing finer is of use any more."""
        return self._gathered.level

    def add(self, part: Cells) -> None:
        self._waiting.append(part)
        if sum(map(len, self._waiting)) >= max(len(self._gathered), self._gathered.limit // 4):
            self.total()

    def total(self) -> Cells:
        self._gathered = merged([self._gathered, *self._waiting])
        self._waiting = []
        return self._gathered


def atoms_of(B: FloatArray, S: FloatArray, T: FloatArray, context: FloatArray | None = None, level: int = 0) -> Atoms:
    """Atoms of clean steps (n,) within the limits of a key; a context that is not finite or below zero is missing."""
    log = np.log(T)
    middle = np.rint(log / BIN)
    d = log - middle * BIN
    sums = np.ones((6, len(T)), dtype=np.int64)
    sums[1] = np.rint(d * FIRST)
    sums[2] = np.rint(d * d * SECOND)
    sums[3] = np.rint(B * B_UNIT)
    sums[4] = np.rint(S * S_UNIT)
    keys = (S == B).astype(np.int64) << B_BITS
    keys = ((keys | _code(B, SIZE_FRACTION)) << S_BITS) | _code(S, SIZE_FRACTION)
    keys <<= CONTEXT_BITS
    known = np.zeros(len(T), dtype=bool) if context is None else context >= 0
    sums[5] = 0
    if context is not None and known.any():
        tokens = np.where(known, context, 0.0)
        sums[5] = np.rint(tokens)
        keys |= np.where(known, _code(tokens + 1.0, CONTEXT_FRACTION) | KNOWN_CONTEXT, 0)
    keys <<= T_BITS
    keys |= middle.astype(np.int64) + T_MIDDLE
    return group(keys & _mask(level), sums, T, T)


def group(keys: IntArray, sums: IntArray, low: FloatArray, high: FloatArray) -> Atoms:
    """One atom a key."""
    order = np.argsort(keys)
    ordered = keys[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    totals = np.empty((len(sums), len(starts)), dtype=np.int64)
    for total, row in zip(totals, sums, strict=True):
        np.add.reduceat(row[order], starts, out=total)
    return Atoms(
        ordered[starts], totals, np.minimum.reduceat(low[order], starts), np.maximum.reduceat(high[order], starts)
    )


def without(cells: Cells, reason: str, dropped: Mapping[Label, NDArray[np.bool_]]) -> Cells:
    """Cells without the atoms of each label's mask (a label without one keeps all), counted under `reason`."""
    rows = sum(int(cells.atoms[label].count[mask].sum()) for label, mask in dropped.items())
    if rows == 0:
        return cells
    kept = {label: cells.atoms[label].select(~mask) for label, mask in dropped.items()}
    atoms = {**cells.atoms, **kept}
    return replace(cells, atoms=atoms, dropped={**cells.dropped, reason: cells.dropped.get(reason, 0) + rows})


def cell_starts(atoms: Atoms) -> NDArray[np.intp]:
    """The first atom of each cell."""
    return np.flatnonzero(np.diff(atoms.keys >> T_BITS, prepend=-1))


def cell_contexts(atoms: Atoms, first: NDArray[np.intp]) -> FloatArray:
    """Mean context tokens of each cell (m,), NaN where they are not known."""
    known = atoms.keys[first] >> T_BITS & KNOWN_CONTEXT > 0
    return np.where(known, np.add.reduceat(atoms.sums[5], first) / np.add.reduceat(atoms.count, first), np.nan)


def _united(parts: Sequence[Atoms], level: int) -> Atoms:
    """Atoms of one label; those that are finer than `level` are cut on the way."""
    keys = np.concatenate([part.keys for part in parts]) & _mask(level)
    sums = np.concatenate([part.sums for part in parts], axis=1)
    return group(keys, sums, np.concatenate([p.low for p in parts]), np.concatenate([p.high for p in parts]))


def _code(x: FloatArray, fraction: int) -> IntArray:
    """Exponent and leading bits of the fraction of x >= 1 as an integer that grows with x."""
    return np.asarray((np.ascontiguousarray(x).view(np.int64) >> (52 - fraction)) - (1023 << fraction))


def _mask(level: int) -> int:
    """The bits of a key that are kept at a level."""
    size, context = LADDER[level]
    cut_size = (1 << (SIZE_FRACTION - size)) - 1
    cut = (((cut_size << S_BITS) | cut_size) << CONTEXT_BITS) | ((1 << context) - 1)
    return ~(cut << T_BITS)


WEIGHT = "cell_rows"
"""Column of a trace made from cells: how many measured steps a row stands for."""
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
