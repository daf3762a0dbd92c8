"""Correction of a parametric model: a smooth table of ln(observed/model) over the contents of a step.

Residuals are smoothed in rounds with ever narrower kernels. Method: docs/theory/fitting.md#correction-table.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.data import Rows
from latfit.model import (
    DECIMALS,
    OF_PREFILL_ALONE,
    OF_STEPS,
    Correction,
    coordinates,
    corners_of,
    features_of,
    prefill_only,
)
from latfit.stats import FloatArray

Table = tuple[Mapping[str, FloatArray], FloatArray]  # nodes by axis, and values
Formula = Callable[[Mapping[str, FloatArray]], FloatArray]  # columns of steps (n,) -> latency in ms (n,)
DECODING, PREFILL, CONTEXT, LENGTH = OF_STEPS
REQUESTS = OF_PREFILL_ALONE[0]

OCTAVE = float(np.log(2.0))
BANDWIDTHS = (2.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.12, 0.06, 0.03)  # kernel width of each smoothing round, in octaves
PRIOR_STEPS = 0.5  # steps with residual zero that every kernel mean includes
OUTLIER = 4.5
"""Residuals count up to so many times their kind's median absolute residual: three deviations of normal noise."""

MAX_NODES = 30_000
NODE_DISTANCE = OCTAVE / 64
"""Distance of neighbouring nodes, at least; more where the grid would have more than MAX_NODES."""
MIN_PREFILL_STEPS = 30  # of prefill alone, from which they have a table, if some of them hold several requests
MAX_SWEEPS = 50
PRIOR_SUPPORT = 1e-3  # weight of a node without steps in an isotonic regression
MAX_FALL = 1e3
ROUNDING = 1e-9
FADE, FAR = 2 * OCTAVE, 3 * OCTAVE
MIN_FACTOR = 1e-3  # of ln T: a correction at the outermost nodes below it needs no farther ones
DIRECTIONS = 16

DECODE_ONLY, PREFILL_ONLY, MIXED = KINDS = range(3)


@dataclass(frozen=True)
class Smoothing:
    rounds: tuple[int, int, int]  # smoothing rounds for decode, prefill-only and mixed steps; 0 for no correction
    noise: float  # relative noise of single steps. Latency may fall by no more than this along an axis


@dataclass(frozen=True, eq=False)
class Grid:
    """Nodes of a table and the place of each step of a trace among them."""

    nodes: Mapping[str, FloatArray]  # rising ln(1 + x) by axis
    constant: Mapping[str, float]  # value along axes that do not vary
    rows: NDArray[np.bool_]  # which steps (n,) belong to the table
    nearest: NDArray[np.int64]  # node nearest to each step (n,)
    corners: NDArray[np.int64]  # nodes around each step (n, 2^d)
    shares: FloatArray  # their weights

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(x) for x in self.nodes.values())

    def at(self, table: FloatArray, rows: NDArray[np.intp]) -> FloatArray:
        return np.asarray((table.ravel()[self.corners[rows]] * self.shares[rows]).sum(axis=1))

    @cached_property
    def at_nodes(self) -> list[FloatArray]:
        return list(np.meshgrid(*self.nodes.values(), indexing="ij"))

    @cached_property
    def in_range(self) -> NDArray[np.bool_]:
        """Whether nodes lie between the least and the largest measured value of every axis."""
        measured = [x.ravel()[self.nearest[self.rows]] for x in self.at_nodes]
        inside = [(x >= of.min()) & (x <= of.max()) for x, of in zip(self.at_nodes, measured, strict=True)]
        return np.asarray(np.all(inside, axis=0))

    def kinds(self) -> NDArray[np.int64]:
        if REQUESTS in self.nodes:
            return np.full(self.shape, PREFILL_ONLY)
        at = dict(zip(self.nodes, self.at_nodes, strict=True))
        return kinds_of(*(at.get(name, np.full(self.shape, self.constant.get(name, 0.0))) for name in OF_STEPS[:2]))


def kinds_of(D: FloatArray, P: FloatArray) -> NDArray[np.int64]:
    return np.where(P == 0, DECODE_ONLY, np.where(D == 0, PREFILL_ONLY, MIXED))


def build_grids(data: Rows) -> list[Grid]:
    """Return the grid of all steps, or those of decoding and of prefill-only steps; none where steps do not differ."""

    def build() -> list[Grid]:
        features = features_of(data.steps)
        only, every = prefill_only(features), np.ones(len(data), dtype=bool)
        tables: list[tuple[Sequence[str], NDArray[np.bool_]]] = [(OF_STEPS, every)]
        if only.sum() >= MIN_PREFILL_STEPS and not only.all() and np.ptp(features["n"][only]) > 0:
            tables = [(OF_STEPS, ~only), (OF_PREFILL_ALONE, only)]
        grids = [grid for axes, rows in tables if (grid := _grid(axes, features, rows))]
        whole = grids if len(grids) == len(tables) else [_grid(OF_STEPS, features, every)]
        return [grid for grid in whole if grid]

    return data.once("correction grids", build)


def _grid(axes: Sequence[str], features: Mapping[str, FloatArray], rows: NDArray[np.bool_]) -> Grid | None:
    at = dict(zip(axes, coordinates(axes, features), strict=True))
    if not np.any(features["KP"] > 0):
        at.pop(LENGTH)  # without cached prompts the length of a prompt is its number of prefill tokens
    known = {name: x[rows & (features["D"] > 0)] if name == CONTEXT else x[rows] for name, x in at.items()}
    varying = {name: x for name, x in at.items() if len(known[name]) and np.ptp(known[name]) > 0}
    if not varying:
        return None
    nodes = _place_nodes({name: x[rows] for name, x in varying.items()})
    corners, shares = corners_of(nodes, list(varying.values()))
    nearest = np.take_along_axis(corners, np.argmax(shares, axis=1)[:, None], axis=1)[:, 0]
    constant = {name: float(np.expm1(known[name].max(initial=0.0))) for name in at if name not in varying}
    return Grid(nodes, constant, rows, nearest, corners, shares)


def _place_nodes(varying: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """Return nodes at measured values, thinned to MAX_NODES in all, and beyond either end."""
    values = {name: np.unique(x) for name, x in varying.items()}
    distance = dict.fromkeys(values, NODE_DISTANCE)
    nodes = {name: _thin(x, NODE_DISTANCE) for name, x in values.items()}
    while np.prod([float(len(x) + 2) for x in nodes.values()]) > MAX_NODES:
        longest = max(nodes, key=lambda name: len(nodes[name]))
        distance[longest] *= 1.2
        nodes[longest] = _thin(values[longest], distance[longest])
    return {name: _pad(x) for name, x in nodes.items()}


def _thin(values: FloatArray, distance: float) -> FloatArray:
    """Return rising values at least so far apart, with the first and the last."""
    kept = [values[0]]
    for value in values[1:]:
        if value - kept[-1] >= distance:
            kept.append(value)
    if len(kept) > 1:
        kept[-1] = values[-1]
    return np.array(kept)


def _pad(x: FloatArray) -> FloatArray:
    """Add nodes beyond either end: one four times as far as neighbours are apart there, one an octave off."""
    gaps = np.diff(x[x > 0])
    below, above = (
        sorted({min(4 * float(np.median(part)), OCTAVE), OCTAVE}) if len(part) else [OCTAVE]
        for part in (gaps[:4], gaps[-4:])
    )
    low = [x[0] - far for far in reversed(below) if x[0] - far > 0] if x[0] > 0 else []
    zero = [0.0] if 0 < x[0] <= OCTAVE else []
    return np.concatenate([zero, low, x, x[-1] + np.array(above)])


def smooth_in_rounds(
    grid: Grid, rows: NDArray[np.intp], log_ratio: FloatArray, weights: FloatArray, rounds: int
) -> Iterator[FloatArray]:
    """Yield the table after each smoothing round, zero outside the measured cells. rows: steps to learn from (k,)."""
    node, shape, dimensions = grid.nearest[rows], grid.shape, range(len(grid.shape))
    residual, weight = log_ratio[rows], weights[rows]
    count = np.bincount(node, weight, int(np.prod(shape))).reshape(shape)
    weight_at, table, kind = fade(grid, count > 0), np.zeros(shape), grid.kinds().ravel()[node]
    kinds, limit = [part for each in KINDS if len(part := np.flatnonzero(kind == each))], np.empty(len(rows))
    for bandwidth in BANDWIDTHS[:rounds]:
        kernels = [np.exp(-np.abs(x[:, None] - x) / (bandwidth * OCTAVE)) for x in grid.nodes.values()]
        far = np.abs(residual - table.ravel()[node])
        for part in kinds:
            limit[part] = OUTLIER * np.median(far[part])
        for size in range(1, len(shape) + 1):
            for axes in itertools.combinations(dimensions, size):
                others = tuple(axis for axis in dimensions if axis not in axes)
                rest = residual - table.ravel()[node]
                total = np.bincount(node, weight * np.clip(rest, -limit, limit), table.size).reshape(shape)
                mean, steps = (each.sum(axis=others, keepdims=True) for each in (total, count))
                for axis in axes:
                    smoothed = (np.tensordot(kernels[axis], each, axes=(1, axis)) for each in (mean, steps))
                    mean, steps = (np.moveaxis(each, 0, axis) for each in smoothed)
                table = table + mean / (steps + PRIOR_STEPS)
        yield table * weight_at


def fade(grid: Grid, measured: NDArray[np.bool_]) -> FloatArray:
    """Return the weight of the correction at nodes: 1 in the hull of measured nodes, falling to 0 outside."""
    if not measured.any():
        return np.zeros(grid.shape)
    distance = np.zeros(grid.shape)
    for x, y in itertools.combinations(grid.at_nodes, 2) if len(grid.shape) > 1 else [(grid.at_nodes[0],) * 2]:
        for angle in 2 * np.pi * np.arange(DIRECTIONS) / DIRECTIONS:
            along = np.cos(angle) * x + np.sin(angle) * y
            distance = np.maximum(distance, along - np.max(along[measured]))
    return np.where(grid.in_range, np.maximum(1 - distance / FADE, 0.0), 0.0)


@dataclass(frozen=True, eq=False)
class Smoothed:
    """What some rows teach about the nodes of a grid."""

    grid: Grid
    tables: Sequence[FloatArray]  # after 0, 1, ... smoothing rounds
    support: FloatArray  # steps at each node
    log_ms: FloatArray  # ln of the model's latency at each node

    def at_strength(self, smoothing: Smoothing) -> FloatArray:
        """Return the table of a correction: that of the chosen rounds, with latency falling by no more than noise."""
        table = np.choose(self.grid.kinds(), [self.tables[n] for n in smoothing.rounds])
        free = may_fall(self.grid, self.log_ms)
        near = fit_isotonic(self.log_ms + table, free, self.support, smoothing.noise)
        return _keep_near(table, make_monotone(near, free) - self.log_ms, smoothing.noise)


def _keep_near(table: FloatArray, rising: FloatArray, noise: float) -> FloatArray:
    return np.asarray(np.clip(table, rising - noise / 2, rising + noise / 2))


def _end_far_off(grid: Grid, table: FloatArray, noise: float, log_model: Callable[[Grid], FloatArray]) -> Table:
    """Add nodes FAR off on axes where a part that keeps T from falling is left at the outermost ones."""
    ends = [bool(np.any(np.abs(np.take(table, -1, axis)) > MIN_FACTOR)) for axis in range(table.ndim)]
    nodes = {
        name: np.append(x, x[-1] + FAR) if end else x for (name, x), end in zip(grid.nodes.items(), ends, strict=True)
    }
    wider, more = replace(grid, nodes=nodes), np.pad(table, [(0, int(end)) for end in ends])
    log_ms = log_model(wider)
    return nodes, _keep_near(more, make_monotone(log_ms + more, may_fall(wider, log_ms)) - log_ms, noise)


def smooth_residuals(
    data: Rows, rows: NDArray[np.intp], log_ratio: FloatArray, rounds: int, model: Formula
) -> Iterator[Smoothed]:
    """Smooth ln(observed/model) (k,) of rows (k,) on each grid."""
    by_row = np.zeros(len(data))
    by_row[rows] = log_ratio
    for grid in build_grids(data):
        own = rows[grid.rows[rows]]
        tables = [np.zeros(grid.shape), *smooth_in_rounds(grid, own, by_row, data.weights, rounds)]
        support = np.bincount(grid.nearest[own], data.weights[own], tables[0].size).reshape(grid.shape)
        yield Smoothed(grid, tables, np.asarray(support, dtype=np.float64), _log_model(data, model, grid))


def _log_model(data: Rows, model: Formula, grid: Grid) -> FloatArray:
    """Return ln of the model's latency at the nodes."""
    T = model(_steps_at_nodes(grid, tuple(data.steps)))
    return np.asarray(np.log(np.maximum(T, 1e-300)).reshape(grid.shape))


def fit_correction(data: Rows, log_ratio: FloatArray, smoothing: Smoothing, model: Formula) -> Correction:
    """Learn the correction from all rows; log_ratio: ln(observed/model) (n,)."""
    tables = list(smooth_residuals(data, np.arange(len(data)), log_ratio, max(smoothing.rounds), model))
    found = None
    for each in reversed(tables):
        values = each.at_strength(smoothing)
        nodes, values = _end_far_off(each.grid, values, smoothing.noise, partial(_log_model, data, model))
        rounded = {name: np.round(x, DECIMALS) for name, x in nodes.items()}
        found = Correction(rounded, np.round(values, DECIMALS).ravel(), found)
    assert found is not None
    return found


def fit_isotonic(
    table: FloatArray, free: Sequence[NDArray[np.bool_]], support: FloatArray, most: float = 0.0
) -> FloatArray:
    """Return the weighted least-squares table that rises along each axis in turn, except after `free` nodes.

    Lines that fall by `most` or less stay.
    """
    found, weights = table.copy(), support + PRIOR_SUPPORT
    for axis, loose in enumerate(free):
        lines, of_line, rise = (np.moveaxis(x, axis, -1) for x in (found, weights, _allow_falls(loose, axis)))
        raised = lines + rise
        for at in np.argwhere((np.maximum.accumulate(raised, axis=-1) - raised > most).any(axis=-1)):
            lines[(*at,)] = pool_adjacent(raised[(*at,)], of_line[(*at,)]) - rise[(*at,)]
    return found


def _allow_falls(loose: NDArray[np.bool_], axis: int) -> FloatArray:
    """Return what is added to a table so that a fall after a loose node is a rise, too."""
    fall = np.where(loose, MAX_FALL, 0.0)
    return np.asarray(np.cumsum(fall, axis=axis) - fall)


def pool_adjacent(values: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the rising values (n,) closest to these by weighted squares: the mean of each block of violators."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for mean, weight in zip(values.tolist(), weights.tolist(), strict=True):
        length = 1
        while blocks and blocks[-1][0] >= mean:
            before, more, longer = blocks.pop()
            mean, weight, length = (before * more + mean * weight) / (more + weight), weight + more, length + longer
        blocks.append((mean, weight, length))
    means, _, lengths = zip(*blocks, strict=True)
    return np.repeat(means, lengths)


def make_monotone(table: FloatArray, free: Sequence[NDArray[np.bool_]]) -> FloatArray:
    """Return the mean of the least rising table above and the largest below; `free` nodes may be followed by a fall."""
    above, below = table.copy(), table.copy()
    rises = [_allow_falls(loose, axis) for axis, loose in enumerate(free)]
    for _ in range(MAX_SWEEPS):
        before = above + below
        for axis, rise in enumerate(rises):
            above = np.maximum.accumulate(above + rise, axis=axis) - rise
            below = np.flip(np.minimum.accumulate(np.flip(below + rise, axis), axis=axis), axis) - rise
        if np.allclose(before, above + below, rtol=0, atol=ROUNDING):
            break
    return np.asarray((above + below) / 2)


def may_fall(grid: Grid, log_ms: FloatArray) -> list[NDArray[np.bool_]]:
    """Return by axis the nodes from which latency may fall: no step is there, prompts shorten, or the formula falls."""
    at, found = dict(zip(grid.nodes, grid.at_nodes, strict=True)), []
    for axis, name in enumerate(grid.nodes):
        loose = np.full(grid.shape, name == REQUESTS)
        if name == CONTEXT and DECODING in at:
            loose = at[DECODING] == 0
        if name == LENGTH and PREFILL in at:
            with np.errstate(divide="ignore"):
                own = at[LENGTH] + (np.log(np.expm1(at[REQUESTS])) if REQUESTS in at else 0.0)
            loose = (at[PREFILL] == 0) | (own < at[PREFILL])
        loose = loose | (np.diff(log_ms, axis=axis, append=np.inf) < -ROUNDING)
        found.append(loose)
    return found


def _steps_at_nodes(grid: Grid, known: Sequence[str]) -> dict[str, Any]:
    nodes = {name: np.expm1(x.ravel()) for name, x in zip(grid.nodes, grid.at_nodes, strict=True)}
    count = int(np.prod(grid.shape))
    of = {name: nodes.get(name, np.full(count, grid.constant.get(name, 0.0))) for name in OF_STEPS}
    P = of[PREFILL]
    n = nodes.get(REQUESTS, np.where(P > 0, max(grid.constant.get(REQUESTS, 1.0), 1.0), 0.0))
    D = np.where(of[DECODING] + n > 0, of[DECODING], 1.0)
    KD, KP = of[CONTEXT] * D, np.maximum(of[LENGTH] * n - P, 0.0)
    every = {
        "B": D + n,
        "S": D + P,
        "prefill_requests": n,
        "prefill_tokens": P,
        "context_tokens": KD + KP,
        "prefill_context_tokens": KP,
    }
    return {name: column for name, column in every.items() if name in known}
