"""Which rows are left out together: the ways to split a trace for validation.

* Cells: a designed grid (no time, or repetitions of cells) is split by cells, so that a repeat never predicts itself.
* Blocks of time: a log in time order is split into contiguous blocks, because neighbours in time share their noise.
* Random: rows drawn freely; the optimistic end, for comparison.
* Expanding window: rows 1..t train, t+1..t+w test, for t = m, m+s, ... <= N-w, which are floor((N-w-m)/s)+1 folds;
  windows overlap for s < w, so the spread over folds is a spread and not a standard error.
* Regions: the plane of ln B and ln S is cut at weighted thirds, and each of the up to nine regions is left out in turn.
* Extrapolation: rows with few tokens train, rows with many test.

A fold is a pair of index arrays (train, test) into the rows of a trace.
"""

import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from latfit.fit.by_row import numbered, weights_by_row
from latfit.stats import weighted_quantile, weighted_quantiles
from latfit.trace.clean import runs_in_time
from latfit.trace.table import Trace

Rows = NDArray[np.intp]
Fold = tuple[Rows, Rows]

FOLDS = 5
TRAIN_BELOW = 0.7
BY_CELL = "K-fold over (B,S) cells"
BY_TIME = "K-fold over contiguous blocks of time"


def in_time(trace: Trace) -> bool:
    """Whether the rows of a run have an order that noise can follow: a log, rather than a grid measured in repeats."""
    return "t_s" in trace and "rep" not in trace


def parts_in_time(trace: Trace, parts: int) -> NDArray[np.int64]:
    """Number of the part 0..parts-1 that each row (n,) is in: every run is cut into equal parts in its time order."""
    part = np.zeros(len(trace), dtype=np.int64)
    for rows in runs_in_time(trace):
        part[rows] = np.arange(len(rows)) * parts // len(rows)
    return part


def assign_folds(trace: Trace, seed: int = 0) -> tuple[str, NDArray[np.int64]]:
    """(scheme, fold number of each row (n,)); a single fold where there are fewer than four cells or rows."""
    if in_time(trace):
        runs = trace["run"].astype(str) if "run" in trace else np.zeros(len(trace))
        order = np.lexsort((trace.floats("t_s"), np.unique(runs, return_inverse=True)[1]))
        folds = FOLDS if len(trace) >= 4 * FOLDS else 1
        fold = np.empty(len(trace), dtype=np.int64)
        fold[order] = np.arange(len(trace)) * folds // len(trace)
        return BY_TIME, fold
    cell = numbered([trace.floats("B"), trace.floats("S")])
    cells = int(cell.max(initial=-1)) + 1
    folds = max(1, min(FOLDS, cells // 2))
    return BY_CELL, (np.random.default_rng(seed).permutation(cells) % folds)[cell]


def random_folds(rows: int, folds: int = FOLDS, seed: int = 0) -> Iterator[Fold]:
    """K random parts of the rows, each left out once."""
    part = np.random.default_rng(seed).permutation(rows) % folds
    for i in range(folds):
        yield np.flatnonzero(part != i), np.flatnonzero(part == i)


def expanding_windows(
    rows: int, min_train_size: int, test_window_size: int, stride: int | None = None
) -> Iterator[Fold]:
    """Train on rows 0..t-1, test on t..t+w-1, for t from min_train_size in strides (the window's size by default)."""
    step = test_window_size if stride is None else stride
    for end in range(min_train_size, rows - test_window_size + 1, step):
        yield np.arange(end), np.arange(end, end + test_window_size)


def expanding_in_runs(trace: Trace, windows: int = FOLDS) -> Iterator[Fold]:
    """The expanding window over all runs at once: the first half of every run trains, then equal parts follow."""
    part = parts_in_time(trace, 2 * windows)
    for i in range(windows, 2 * windows):
        train, test = np.flatnonzero(part < i), np.flatnonzero(part == i)
        if len(train) and len(test):
            yield train, test


def regions(trace: Trace) -> Iterator[tuple[str, Fold]]:
    """(name, fold) with one region of the (B,S) plane left out at a time; regions without rows are passed over."""
    weights = weights_by_row(trace)
    labels, numbers = [], []
    for name in ("B", "S"):
        column = trace.floats(name)
        edges = np.unique(weighted_quantiles(column, (1 / 3, 2 / 3), weights))
        edges = edges[edges < column.max()]
        numbers.append(np.searchsorted(edges, column, side="left"))
        ends = [column.min(), *edges, column.max()]
        labels.append([f"{name} {low:g}..{high:g}" for low, high in itertools.pairwise(ends)])
    for b, label_b in enumerate(labels[0]):
        for s, label_s in enumerate(labels[1]):
            inside = (numbers[0] == b) & (numbers[1] == s)
            if inside.any() and not inside.all():
                yield f"{label_b}, {label_s}", (np.flatnonzero(~inside), np.flatnonzero(inside))


def beyond_in_tokens(trace: Trace, share: float = TRAIN_BELOW) -> Fold | None:
    """Train on rows up to the S that a share of the rows stays at or below, test on the rest; None where none is."""
    tokens = trace.floats("S")
    limit = weighted_quantile(tokens, share, weights_by_row(trace))
    if limit >= tokens.max():
        limit = float(np.max(tokens[tokens < limit], initial=-np.inf))
    train, test = np.flatnonzero(tokens <= limit), np.flatnonzero(tokens > limit)
    return (train, test) if len(train) and len(test) else None


def spread(values: list[float]) -> float | None:
    """Standard deviation over folds; None for a single one."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def by_fold(fold: NDArray[np.int64]) -> Iterator[Fold]:
    """(train, test) for each number in an assignment of rows to folds (n,)."""
    for i in range(int(fold.max()) + 1):
        yield np.flatnonzero(fold != i), np.flatnonzero(fold == i)
