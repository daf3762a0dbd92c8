"""What a formula misses of a machine, learnt from its residuals.

With r_i = ln(observed_i / formula_i) the correction g (see `model.correction`) is the minimiser over its nodes of

    sum_i w_i rho((r_i - g(x_i)) / s) s^2
        + roughness * sum_axes integral [(d^2 g / dx_a^2)^2 + LEVEL (dg / dx_a)^2] dx_a + tiny |g|^2,

rho Huber's, s from the median absolute residual: the mean of a Gaussian field with independent differences along the
axes, so it is kriging of the residuals with a sparse precision matrix (Rue & Held, Gaussian Markov Random Fields,
2005, ch. 3), and tens of thousands of nodes take a fraction of a second by conjugate gradients. Second differences
count only between measured steps, where they interpolate; beyond them they would go on along a line, which no data
support, and first differences go on at the level of the last steps. What noise is, is rough: the roughness is chosen
by rows held out in the way the formula is checked (see `checking.crossval`), from nearly free to no correction at all.
Kernels work on whole tiles, so T jumps where a tile of tokens is full. Where steps are measured so finely that this
shows, there are nodes on both sides of it, and no second difference counts across.

Where steps that are nothing but prefill hold several requests, they have a grid of their own, with an axis of these
requests, and the others theirs; each is learnt from its steps alone. On one grid for all an axis more would leave too
few nodes on each.

What steps that were measured several times have of their own (see `repeats`) is added to g at their nodes. Of a grid of
few values every one has a node, where there is room, and between any two there is another, where nothing is added: so
nothing is said of steps that were not measured. The noise by which T may fall is then that of whole cells left out,
which holds what these have of their own.

Far from measured steps g has to vanish. The table holds g u with u = 2^-max(0, d - 1), where d counts the steps of the
grid, or octaves where these are shorter, to the nearest measured node; its outermost nodes hold zero, as far beyond the
last measured step as a few of them are from each other there, an octave at most.

Growing any axis adds work, so T must not fall along one. Along an edge of length h, T = formula * e^g rises wherever g
falls by no more than a = h * (least slope of ln formula on it). The nearest table that does so, weighted by the steps
about each node, is an isotonic regression of g plus the sum of a along each line: exact for one axis by pooling
adjacent violators, for several by Dykstra's (1983) projections onto each in turn, of which a few are made.

What is left is mended exactly. Let up be the least table above g with up_k >= up_j - a_jk on every edge, and down the
largest one below: both hold the inequalities, so their mean does, and where g held them already all three agree. One
node that few steps speak for, or none, would drag all beyond it along; so nodes are settled in tiers, the best measured
first, and those of each tier keep between the bounds that the tiers before leave them. g keeps off that table by half
the noise of the rows at most, so that T never falls by more than the noise.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.data import FitData, Rows, numbered
from latfit.fitting.repeats import OwnOfSteps, own_of_steps, visits_of
from latfit.model import OF_PREFILL_ALONE, OF_STEPS, Correction, coordinates, corners_of, features_of, prefill_only
from latfit.stats import MAD_TO_SIGMA, FloatArray, distinct

Formula = Callable[[Mapping[str, FloatArray]], FloatArray]
"""Columns of steps (n,) -> latency in ms (n,)."""

DECODING, PREFILL, CONTEXT, LENGTH = OF_STEPS
REQUESTS = OF_PREFILL_ALONE[0]

MOST_NODES = 30_000
LEARNT_FROM = 50_000
"""Rows that are enough to learn from, drawn evenly."""

OCTAVE = float(np.log(2.0))
PER_OCTAVE = (64, 8, 4, 4)
"""Nodes an octave at most, on grids of one axis with several values, two, three and four."""

REACH = 4
"""Distances between measured values over which a correction goes on beyond the last one, an octave at most."""

FEWEST = 4
"""Values of an axis that count as several."""
FEW = 16
"""Values of an axis up to which, in a grid whose cells are repeated, each has a node, if there is room."""
NEAR = 1e-3
"""Distance in ln(1 + x) from which values have nodes of their own: far above what a file's decimals keep apart."""
REPEATED = 2
"""Steps that are alike, in the mean, from which they can be known one by one."""
ON_A_NODE = 1 - 1e-9
"""Share of a node from which a step is on it."""

FEWEST_ALONE = 30
"""Steps that are nothing but prefill from which they have a grid of their own, where some hold several requests."""

TILE, ALONE = 64.0, 0.9
"""Tokens of which kernels work on whole multiples; share of the steps that have to decode alike for tiles to show."""

DIRECTLY = 4000
"""Nodes up to which the equations are solved by elimination."""

LEVEL = 0.3
NEARLY_ZERO = 1e-5
HUBER = 1.345
PASSES = 3
"""Solutions, each with the weights of far-off rows that the one before gives."""

RTOL, MOST_STEPS, BLOCK = 1e-3, 300, 4
"""Of conjugate gradients, on larger grids; nodes along each axis that are shifted together."""

TIERS = (512, 64, 8, 1, 0)
"""Steps about a node from which nodes with fewer do not move it where T must not fall."""

SUBDIVIDED = 3
ROUNDS = 50

PROJECTIONS, PROJECTED = 6, 1e-3
"""Rounds of projections onto the axes in turn, which end where none moves a node by more than a thousandth."""
UNMEASURED = 1e-3
"""Steps that a node without any counts as."""
NO_BOUND = 1e3
"""A fall of ln T that nothing limits."""


@dataclass(frozen=True)
class Smoothing:
    """How a correction is learnt. roughness: the weight of its differences for steps that decode, for those that are
    nothing but prefill, and for others; 0 where the formula stays as it is.  noise: relative, of the rows about it.
    own: of which of the three kinds the measured steps keep what they have of their own."""

    roughness: tuple[float, float, float]
    noise: float
    own: tuple[bool, bool, bool] = (False, False, False)


DECODE_ONLY, PREFILL_ONLY, BOTH = range(3)
KINDS = (DECODE_ONLY, PREFILL_ONLY, BOTH)


@dataclass(frozen=True, eq=False)
class Grid:
    """nodes: of each axis along which the steps of a trace differ.  constant: what they hold along the others.  at:
    coordinates (n,) of the steps by axis.  corners, shares (n, 2^d): the nodes around each, and their weights.  own:
    whether it is the grid of each step (n,).  kinds: of these.  alone: the grid of steps that are nothing but prefill,
    where they have their own."""

    nodes: Mapping[str, FloatArray]
    constant: Mapping[str, float]
    at: Sequence[FloatArray]
    corners: NDArray[np.int64]
    shares: FloatArray
    own: NDArray[np.bool_]
    kinds: Sequence[int] = KINDS
    alone: "Grid | None" = None

    @property
    def all(self) -> tuple["Grid", ...]:
        """Itself, and that of steps that are nothing but prefill."""
        return (self,) if self.alone is None else (self, self.alone)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(each) for each in self.nodes.values())

    @cached_property
    def inside(self) -> list[NDArray[np.bool_]]:
        """Whether nodes are within what was measured, by axis."""
        measured = [x[self.own] for x in self.at]
        return [(x >= of.min()) & (x <= of.max()) for x, of in zip(self.nodes.values(), measured, strict=True)]

    @cached_property
    def on_nodes(self) -> NDArray[np.intp]:
        """The node that each step (n,) is on, -1 where it is on none of this grid."""
        nearest = np.argmax(self.shares, axis=1)[:, None]
        node = np.take_along_axis(self.corners, nearest, axis=1)[:, 0].astype(np.intp)
        there = self.own & (np.take_along_axis(self.shares, nearest, axis=1)[:, 0] > ON_A_NODE)
        return np.where(there, node, -1)

    @cached_property
    def halved(self) -> "Grid | None":
        """With a node between any two, but those on both sides of a full tile; None where those are too many."""
        if np.prod([2.0 * len(x) - 1 for x in self.nodes.values()]) > MOST_NODES:
            return None
        nodes = {name: _halved(x, name) for name, x in self.nodes.items()}
        return replace(self, nodes=nodes, **_placed(nodes, self.at))

    def part(self, rows: NDArray[np.intp]) -> "Part":
        """What some of the steps measure."""
        from scipy.sparse import csr_array

        own = np.flatnonzero(self.own[rows])
        corners, shares = self.corners[rows[own]].astype(np.int32), self.shares[rows[own]]
        ends = np.arange(0, corners.size + 1, corners.shape[1], dtype=np.int32)
        X = csr_array((shares.ravel(), corners.ravel(), ends), shape=(len(own), int(np.prod(self.shape))))
        measured = np.zeros(X.shape[1], dtype=bool)
        measured[corners[np.arange(len(own)), np.argmax(shares, axis=1)]] = True
        return Part(self.nodes, self.inside, X, measured.reshape(self.shape), own)


@dataclass(frozen=True, eq=False)
class Part:
    """Some steps (k,) on a grid of m nodes. X: sparse (k, m), the weights of the nodes in g at each.  measured: nodes
    that some step is nearest to, shaped as the grid.  rows: which of the steps that were asked for are of the grid
    (k,)."""

    nodes: Mapping[str, FloatArray]
    inside: Sequence[NDArray[np.bool_]]
    X: Any
    measured: NDArray[np.bool_]
    rows: NDArray[np.intp]

    @cached_property
    def across(self) -> Any:
        return self.X.T.tocsr()

    @cached_property
    def block(self) -> NDArray[np.int32]:
        """Number of the block of neighbours that each node (m,) is in."""
        at = np.unravel_index(np.arange(self.measured.size), self.measured.shape)
        blocks = [(n - 1) // BLOCK + 1 for n in self.measured.shape]
        return np.ravel_multi_index([x // BLOCK for x in at], blocks).astype(np.int32)

    @cached_property
    def support(self) -> FloatArray:
        """Steps about each node, shaped as the grid."""
        return np.asarray(self.X.sum(axis=0)).reshape(self.measured.shape)

    @cached_property
    def near(self) -> FloatArray:
        """How near each node is to the measured ones, shaped as the grid."""
        return nearness(self)

    @cached_property
    def penalty(self) -> Any:
        """Sparse (m, m): the integrals of the squared differences."""
        return _penalty(list(self.nodes.values()), self.measured)


def grid_of(data: Rows) -> Grid | None:
    """The grid over the steps of a trace; None where they hardly differ."""
    return data.once("grid of a correction", lambda: _grid(data))


def _grid(data: Rows) -> Grid | None:
    features = features_of(data.steps)
    only = prefill_only(features)
    several = only.sum() >= FEWEST_ALONE and not only.all() and np.ptp(features["n"][only]) > 0
    alone = _grid_of(OF_PREFILL_ALONE, features, only) if several else None
    rest = _grid_of(OF_STEPS, features, ~only) if several else None
    if alone is None or rest is None:
        return _grid_of(OF_STEPS, features, np.ones(len(data), dtype=bool))
    return replace(rest, kinds=(DECODE_ONLY, BOTH), alone=replace(alone, kinds=(PREFILL_ONLY,)))


def _grid_of(axes: Sequence[str], features: Mapping[str, FloatArray], own: NDArray[np.bool_]) -> Grid | None:
    """The grid over some of the steps (n,); None where these hardly differ."""
    at = dict(zip(axes, coordinates(axes, features), strict=True))
    if not np.any(features["KP"] > 0):
        at.pop(LENGTH)  # it would be the number of prefill tokens once more
    # of steps that decode nothing the context says no more than that
    told = {name: x[own & (features["D"] > 0)] if name == CONTEXT else x[own] for name, x in at.items()}
    spread = {name: x[own] for name, x in at.items() if len(told[name]) and np.ptp(told[name]) > 0}
    if not spread:
        return None
    few = [name for name, x in spread.items() if len(distinct(x)[0]) <= FEW]
    if few and own.sum() < REPEATED * (int(numbered(list(spread.values())).max()) + 1):
        few = []
    nodes = _nodes(spread, few)
    if PREFILL in nodes and _tiles_show(features, nodes):
        nodes[PREFILL] = _with_risers(nodes[PREFILL], float(np.median(features["D"][features["P"] > 0])))
    constant = {name: float(np.expm1(told[name].max(initial=0.0))) for name in at if name not in spread}
    return Grid(nodes, constant, own=own, **_placed(nodes, [at[name] for name in spread]))


def _placed(nodes: Mapping[str, FloatArray], at: Sequence[FloatArray]) -> dict[str, Any]:
    """Where steps with these coordinates lie on a grid."""
    corners, shares = corners_of(nodes, list(at))
    return {"at": at, "corners": corners, "shares": shares}


def _halved(x: FloatArray, name: str) -> FloatArray:
    """The nodes of an axis, and one between any two that are no two sides of a full tile."""
    apart = ~_risers(x) if name == PREFILL else np.ones(len(x) - 1, dtype=bool)
    return np.sort(np.concatenate([x, ((x[1:] + x[:-1]) / 2)[apart]]))


def learnt(
    data: Rows, rows: NDArray[np.intp], log_ratio: FloatArray, smoothing: Smoothing, formula: Formula
) -> Correction:
    """The correction that some rows (k,) of a trace teach. log_ratio: ln(observed/formula) of them (k,)."""
    if len(rows) > LEARNT_FROM:
        some = np.linspace(0, len(rows) - 1, LEARNT_FROM).astype(np.intp)
        rows, log_ratio = rows[some], log_ratio[some]
    tables = smooth_tables(data, rows, log_ratio, smoothing)
    return held_from_falling(data, rows, log_ratio, tables, smoothing, formula)


def smooth_tables(
    data: Rows, rows: NDArray[np.intp], log_ratio: FloatArray, smoothing: Smoothing
) -> Iterator[tuple[Grid, Part, FloatArray]]:
    """Every grid, what some rows (k,) measure of it, and the smooth g there, before it is held from falling. log_ratio:
    ln(observed/formula) of the rows (k,)."""
    grid = grid_of(data)
    assert grid is not None
    for each in grid.all:
        part, found = each.part(rows), dict[float, FloatArray]()
        own, weights = log_ratio[part.rows], data.weights[rows[part.rows]]
        for rough in sorted({smoothing.roughness[kind] for kind in each.kinds} - {0.0}, reverse=True):
            found[rough] = smoothed(part, own, weights, rough, next(reversed(found.values()), None))
        yield each, part, faded(part, by_kind(each, found, smoothing.roughness))


def held_from_falling(
    data: Rows,
    rows: NDArray[np.intp],
    log_ratio: FloatArray,
    tables: Iterable[tuple[Grid, Part, FloatArray]],
    smoothing: Smoothing,
    formula: Formula,
) -> Correction:
    """The correction of smooth tables that some rows (k,) teach, and of what measured steps keep. log_ratio:
    ln(observed/formula) of the rows (k,)."""
    found, known = [], tuple(data.steps)
    for grid, part, table in tables:
        finer = grid.halved if any(smoothing.own[kind] for kind in grid.kinds) else None
        if finer is not None:
            table = _with_own(data, rows, grid, table, log_ratio, smoothing.own)
            grid, part = finer, finer.part(rows)
        found.append(raised(part, table, smoothing.noise, slack(grid, formula, known)))
    return replace(found[0], alone=found[1] if len(found) > 1 else None)


def own_of_kinds(
    data: Rows, rows: NDArray[np.intp], grid: Grid, table: FloatArray, log_ratio: FloatArray
) -> Iterator[tuple[int, NDArray[np.intp], FloatArray, OwnOfSteps]]:
    """What measured steps have of their own beside a table of g, of the rows (k,) of a trace that lie on its nodes: the
    kind of steps, which of the rows are of it, g there, and what they have. log_ratio: ln(observed/formula) (k,)."""
    every = grid.on_nodes
    visit = data.visits(every) if isinstance(data, FitData) else None
    on = np.flatnonzero(every[rows] >= 0)
    node = every[rows[on]]
    g, kind = table.ravel()[node], kinds_of(grid)[node]
    off = log_ratio[on] - g
    for number in grid.kinds:
        of = np.flatnonzero(kind == number)
        visits = visits_of(node[of], None if visit is None else visit[rows[on[of]]], off[of])
        if (found := own_of_steps(visits)) is not None:
            yield number, on[of], g[of], found


def _with_own(
    data: Rows, rows: NDArray[np.intp], grid: Grid, table: FloatArray, log_ratio: FloatArray, kept: Sequence[bool]
) -> FloatArray:
    """The table on the halved grid that says the same, and of the measured steps what they have of their own."""
    finer = grid.halved
    assert finer is not None
    every = np.meshgrid(*finer.nodes.values(), indexing="ij")
    corners, shares = corners_of(grid.nodes, [x.ravel() for x in every])
    found = np.asarray((table.ravel()[corners] * shares).sum(axis=1))
    for kind, some, _, own in own_of_kinds(data, rows, grid, table, log_ratio):
        if kept[kind]:
            found[finer.on_nodes[rows[some]]] += own.value
    return found.reshape(finer.shape)


def kinds(D: FloatArray, P: FloatArray) -> NDArray[np.int64]:
    """What steps hold that decode D requests and compute P prefill tokens (n,)."""
    return np.where(P == 0, DECODE_ONLY, np.where(D == 0, PREFILL_ONLY, BOTH))


def kinds_of(grid: Grid) -> NDArray[np.int64]:
    """The kind of the steps at each node (m,)."""
    if grid.kinds == (PREFILL_ONLY,):
        return np.full(int(np.prod(grid.shape)), PREFILL_ONLY)
    at = dict(zip(grid.nodes, np.meshgrid(*grid.nodes.values(), indexing="ij"), strict=True))
    some = next(iter(at.values()))
    D, P = (at.get(name, np.full(some.shape, grid.constant.get(name, 0.0))) for name in (DECODING, PREFILL))
    return kinds(D, P).ravel()


def by_kind(grid: Grid, found: Mapping[float, FloatArray], roughness: Sequence[float]) -> FloatArray:
    """g (m,) that has at each node the roughness of its kind of steps; 0: none."""
    kind = kinds_of(grid)
    g = np.zeros(len(kind))
    for number in grid.kinds:
        if roughness[number] > 0:
            g[kind == number] = found[roughness[number]][kind == number]
    return g


def _nodes(spread: Mapping[str, FloatArray], few: Sequence[str]) -> dict[str, FloatArray]:
    """Nodes at the measured values, farther apart where those are many, and some beyond either end. few: axes of which
    each value has one that is not NEAR another."""
    values = {name: np.unique(x) for name, x in spread.items()}
    long = sum(len(x) >= FEWEST for x in values.values())
    apart = dict.fromkeys(values, OCTAVE / PER_OCTAVE[max(long, 1) - 1])
    inner = {name: _thinned(x, NEAR if name in few else apart[name]) for name, x in values.items()}
    while np.prod([float(len(x) + 2) for x in inner.values()]) > MOST_NODES:
        longest = max(inner, key=lambda name: len(inner[name]))
        apart[longest] *= 1.2
        inner[longest] = _thinned(values[longest], apart[longest])
    return {name: _padded(x) for name, x in inner.items()}


def _thinned(values: FloatArray, apart: float) -> FloatArray:
    """Rising values that are at least so far apart, first and last among them."""
    kept = [values[0]]
    for value in values[1:]:
        if value - kept[-1] >= apart:
            kept.append(value)
    if len(kept) > 1:
        kept[-1] = values[-1]
    return np.array(kept)


def _padded(x: FloatArray) -> FloatArray:
    """Nodes with those beyond either end that hold zero: one as far off as REACH measured values are from each other
    there, and one at an octave."""
    below, above = (sorted({min(OCTAVE, REACH * apart), OCTAVE}) for apart in _apart_at_ends(x))
    low = [x[0] - far for far in reversed(below) if x[0] - far > 0] if x[0] > 0 else []
    return np.concatenate([[0.0] if x[0] > 0 and x[0] <= OCTAVE else [], low, x, x[-1] + np.array(above)])


def _tiles_show(features: Mapping[str, FloatArray], nodes: Mapping[str, FloatArray]) -> bool:
    """Whether steps with prefill are fine enough along their tokens to show tiles, with hardly any decoding beside."""
    P, D = features["P"][features["P"] > 0], features["D"][features["P"] > 0]
    long = [name for name, x in nodes.items() if len(x) - 2 >= FEWEST]
    alone = bool(np.mean(np.median(D) == D) >= ALONE)
    return long == [PREFILL] and alone and len(np.unique(P)) >= float(P.max()) / TILE


def _with_risers(x: FloatArray, decoding: float) -> FloatArray:
    """The nodes, and those on both sides of where a tile of tokens is full, as far as there are nodes on both sides."""
    full = np.arange(1.0, np.floor(np.expm1(x[-2]) / TILE) + 1) * TILE - decoding
    both = np.log1p(np.concatenate([full, full + 1.0]))
    inner = both[(both > x[1]) & (both < x[-2])]
    found = np.sort(np.concatenate([x, inner]))
    return np.asarray(found[np.append(True, np.diff(found) > 1e-9)])


def _risers(x: FloatArray) -> NDArray[np.bool_]:
    """Edges (m-1,) between such a pair of nodes: no step lies within."""
    P = np.expm1(x)
    return np.asarray((np.diff(P) < 1.0 + 1e-6) & (P[:-1] > TILE / 2))


def _apart_at_ends(x: FloatArray) -> tuple[float, float]:
    gaps = np.diff(x[x > 0])
    if len(gaps) == 0:
        return OCTAVE, OCTAVE
    return float(np.median(gaps[:REACH])), float(np.median(gaps[-REACH:]))


def _penalty(nodes: Sequence[FloatArray], measured: NDArray[np.bool_]) -> Any:
    from scipy.sparse import csr_array, eye_array, kron

    shape, total = measured.shape, measured.size
    found = csr_array((total, total))
    for axis, x in enumerate(nodes):
        before, after = int(np.prod(shape[:axis])), int(np.prod(shape[axis + 1 :]))
        if len(x) >= 3:
            inside = np.logical_or.accumulate(measured, axis) & np.flip(
                np.logical_or.accumulate(np.flip(measured, axis), axis), axis
            )
            triple = np.take(inside, range(len(x) - 2), axis) & np.take(inside, range(2, len(x)), axis)
            D = kron(kron(eye_array(before), _second(x)), eye_array(after), format="csr")
            D = D[np.flatnonzero(triple.ravel())]
            found = found + D.T @ D
        own = _first(x)
        found = found + LEVEL * kron(kron(eye_array(before), own.T @ own), eye_array(after), format="csr")
    return found.tocsr()


def _second(x: FloatArray) -> Any:
    from scipy.sparse import diags_array

    h, riser = np.diff(x), _risers(x)
    smooth = np.where(riser[:-1] | riser[1:], 0.0, 1.0)
    mean = np.sqrt((h[:-1] + h[1:]) / 2)
    left, right = smooth / h[:-1] / mean, smooth / h[1:] / mean
    return diags_array([left, -left - right, right], offsets=[0, 1, 2], shape=(len(x) - 2, len(x)))


def _first(x: FloatArray) -> Any:
    from scipy.sparse import diags_array

    h = np.diff(x)
    scale = 1 / np.sqrt(np.where(_risers(x), np.maximum(h, OCTAVE / PER_OCTAVE[0]), h))
    return diags_array([-scale, scale], offsets=[0, 1], shape=(len(x) - 1, len(x)))


def smoothed(
    part: Part, log_ratio: FloatArray, weights: FloatArray, roughness: float, start: FloatArray | None = None
) -> FloatArray:
    """g (m,) at the nodes from ln(observed/formula) and weights of the steps (k,), zero of none. start: where to
    begin."""
    if len(weights) == 0:
        return np.zeros(part.measured.size)
    g, trust = start, np.ones(len(weights))
    limit = float(np.max(np.abs(log_ratio), initial=0.0))
    for _ in range(PASSES if start is None else PASSES - 1):
        if g is not None:
            off = np.abs(log_ratio - part.X @ g)
            scale = max(MAD_TO_SIGMA * float(np.median(off)), 1e-6)
            trust = np.minimum(1.0, HUBER * scale / np.maximum(off, 1e-300))
        g = least_squares(part, log_ratio, weights * trust, roughness, g)
    assert g is not None
    return np.clip(g, -limit, limit)


def least_squares(
    part: Part, log_ratio: FloatArray, weights: FloatArray, roughness: float, start: FloatArray | None = None
) -> FloatArray:
    """The same without regard to rows that are far off."""
    from scipy.sparse import csc_array, csr_array, eye_array
    from scipy.sparse.linalg import splu

    X, size = part.X, part.X.shape[1]
    right = part.across @ (weights * log_ratio)
    weighted = csr_array((X.data * np.repeat(weights, np.diff(X.indptr)), X.indices, X.indptr), shape=X.shape)
    # one matrix for rows and penalty: as an operator that multiplies by one after the other it takes twice the time
    whole = part.across @ weighted + roughness * part.penalty + NEARLY_ZERO * eye_array(size)
    if size <= DIRECTLY:
        return np.asarray(splu(csc_array(whole), permc_spec="MMD_AT_PLUS_A").solve(right))
    return _by_conjugate_gradients(whole.tocsr(), right, np.zeros(size) if start is None else start, part.block)


def _by_conjugate_gradients(A: Any, b: FloatArray, start: FloatArray, block: NDArray[np.int32]) -> FloatArray:
    """x with A x = b. Preconditioned by the diagonal, and by a solution for shifts of whole blocks of nodes, which are
    what the diagonal leaves for hundreds of steps: two levels, added. block: of each node (m,)."""
    from scipy.sparse import csc_array, csr_array
    from scipy.sparse.linalg import splu

    blocks, ends = int(block.max()) + 1, np.arange(len(b) + 1, dtype=np.int32)
    within = csr_array((np.ones(len(b)), block, ends), shape=(len(b), blocks))
    shifts = splu(csc_array(within.T @ A @ within), permc_spec="MMD_AT_PLUS_A")
    scaled, x = 1 / A.diagonal(), start.copy()
    r, enough = b - A @ x, RTOL * float(np.linalg.norm(b))
    p, rho = np.zeros_like(b), np.inf
    for _ in range(MOST_STEPS):
        if float(np.linalg.norm(r)) <= enough:
            break
        z, before = scaled * r + shifts.solve(np.bincount(block, r, blocks))[block], rho
        rho = float(r @ z)
        p = z + rho / before * p
        q = A @ p
        far = rho / float(p @ q)
        x += far * p
        r -= far * q
    return x


def nearness(part: Part) -> FloatArray:
    """u, shaped as the grid: how near each node is to the measured ones, one among them."""
    far = np.where(part.measured, 0.0, np.inf)
    steps = [np.minimum(np.diff(x) / OCTAVE, 1.0) for x in part.nodes.values()]
    costs = [np.expand_dims(step, [a for a in range(far.ndim) if a != axis]) for axis, step in enumerate(steps)]
    for _ in range(ROUNDS):
        before = far
        far = -carried(carried(-far, costs), costs, backwards=True)
        if np.array_equal(before, far):
            break
    return np.asarray(0.5 ** np.maximum(far - 1.0, 0.0))


def finished(part: Part, g: FloatArray, noise: float, allowed: Sequence[FloatArray]) -> Correction:
    """The table of g (m,): zero far from the measured steps, and no fall of T that noise does not explain."""
    return raised(part, faded(part, g), noise, allowed)


def faded(part: Part, g: FloatArray) -> FloatArray:
    """g (m,) shaped as the grid, zero far from the measured steps."""
    table = g.reshape(part.measured.shape) * part.near
    for axis in range(table.ndim):
        line = np.moveaxis(table, axis, 0)
        line[~part.inside[axis]] = 0.0
    return table


def raised(part: Part, table: FloatArray, noise: float, allowed: Sequence[FloatArray]) -> Correction:
    """A table of g by which T falls by no more than the noise."""
    middle = rising(isotonic(table, allowed, part.support), allowed, part.support)
    return Correction(part.nodes, np.clip(table, middle - noise / 2, middle + noise / 2))


def isotonic(g: FloatArray, allowed: Sequence[FloatArray], support: FloatArray) -> FloatArray:
    """The table nearest to g, by squares weighted with the support, that falls along no line by more than is allowed;
    of several axes nearly so."""
    weights = support + UNMEASURED
    found, kept = g, [np.zeros_like(g) for _ in allowed]
    for _ in range(PROJECTIONS if g.ndim > 1 else 1):
        before = found
        for axis, slack in enumerate(allowed):
            wanted = found + kept[axis]
            found = _along_lines(wanted, slack, weights, axis)
            kept[axis] = wanted - found
        if np.max(np.abs(found - before)) < PROJECTED:
            break
    return found


def _along_lines(g: FloatArray, slack: FloatArray, weights: FloatArray, axis: int) -> FloatArray:
    """The nearest table that falls by no more than is allowed along one axis."""
    falls = np.moveaxis(np.diff(g, axis=axis) < -slack, axis, -1).any(axis=-1)
    if not falls.any():
        return g
    found = np.moveaxis(g.copy(), axis, -1)
    rise = np.minimum(np.moveaxis(slack, axis, -1)[falls], NO_BOUND)
    sums = np.concatenate([np.zeros((len(rise), 1)), np.cumsum(rise, axis=1)], axis=1)
    found[falls] = pooled(found[falls] + sums, np.moveaxis(weights, axis, -1)[falls]) - sums
    return np.moveaxis(found, -1, axis)


def pooled(z: FloatArray, weights: FloatArray) -> FloatArray:
    """Lines (k, m) that rise, nearest to z (k, m) by weighted squares: adjacent violators are pooled at their mean. All
    lines at once, and of each a whole run that falls, since its members end in one block whatever comes first."""
    value, weight = z.ravel(), weights.ravel()
    line, size = np.repeat(np.arange(len(z)), z.shape[1]), np.ones(z.size, dtype=np.intp)
    while (falls := (value[:-1] > value[1:]) & (line[:-1] == line[1:])).any():
        first = np.flatnonzero(np.append(True, ~falls))
        value, weight = np.add.reduceat(weight * value, first), np.add.reduceat(weight, first)
        value = value / weight
        line, size = line[first], np.add.reduceat(size, first)
    return np.repeat(value, size).reshape(z.shape)


def rising(g: FloatArray, allowed: Sequence[FloatArray], support: FloatArray) -> FloatArray:
    """A table near g that falls by no more than is allowed on any edge; nodes with more support move less."""
    found, settled = g.copy(), np.zeros(g.shape, dtype=bool)
    for least in TIERS:
        tier = (support >= least) & ~settled
        if not tier.any():
            continue
        if settled.any():
            low = carried(np.where(settled, found, -np.inf), allowed)
            high = -carried(np.where(settled, -found, -np.inf), allowed, backwards=True)
            found[tier] = np.clip(g, low, high)[tier]
        settled |= tier
        up = carried(np.where(settled, found, -np.inf), allowed)
        down = -carried(np.where(settled, -found, -np.inf), allowed, backwards=True)
        found[tier] = (up[tier] + down[tier]) / 2
    return found


def carried(g: FloatArray, allowed: Sequence[FloatArray], backwards: bool = False) -> FloatArray:
    """The least table above g that falls by no more than is allowed on any edge, seen from the other end where
    backwards."""
    found, lines = g.copy(), []
    for axis, slack in enumerate(allowed):
        line, a = np.moveaxis(found, axis, 0), np.moveaxis(slack, axis, 0)
        lines.append((line[::-1], a[::-1]) if backwards else (line, a))
    for _ in range(ROUNDS):
        before = found.copy()
        for line, a in lines:
            if not np.any(line[1:] < line[:-1] - a):
                continue
            for i in range(1, len(line)):
                np.maximum(line[i : i + 1], line[i - 1] - a[i - 1], out=line[i : i + 1])
        if np.array_equal(before, found):
            break
    return found


def slack(grid: Grid, formula: Formula, known: Sequence[str]) -> list[FloatArray]:
    """How far g may fall along each edge so that T still rises all along it, by axis. known: columns of the trace."""
    found, nodes = [], grid.nodes
    for axis, (name, x) in enumerate(nodes.items()):
        h = np.diff(x)
        inner = (x[:-1, None] + h[:, None] * np.arange(SUBDIVIDED) / SUBDIVIDED).ravel()
        fine = {**nodes, name: np.append(inner, x[-1])}
        steps = _steps_at(fine, grid.constant, known)
        T = np.log(np.maximum(formula(steps), 1e-300)).reshape([len(each) for each in fine.values()])
        rise = np.moveaxis(np.diff(T, axis=axis), axis, 0)
        rise = rise.reshape(len(h), SUBDIVIDED, *rise.shape[1:])
        # between none of something and the least measured of it the formula may jump, and at the end of a tile
        whole = (x[:-1] == 0) | (_risers(x) if name == PREFILL else False)
        jumps = whole.reshape(-1, *[1] * (rise.ndim - 2))
        least = np.where(jumps, rise.sum(axis=1), SUBDIVIDED * rise.min(axis=1))
        allowed = np.moveaxis(np.maximum(least, 0.0), 0, axis)
        found.append(np.where(_void(nodes, name), np.inf, allowed))
    return found


def _void(nodes: Mapping[str, FloatArray], name: str) -> NDArray[np.bool_]:
    """Edges along an axis from nodes that no step can be at: context of requests that are not there, more new tokens of
    a request than it has."""
    x = dict(zip(nodes, np.meshgrid(*nodes.values(), indexing="ij"), strict=True))
    void = np.zeros([len(each) for each in nodes.values()], dtype=bool)
    if name == CONTEXT and DECODING in x:
        void = x[DECODING] == 0
    if name == LENGTH and PREFILL in x:
        with np.errstate(divide="ignore"):  # no request prefills: no token does either
            own = x[LENGTH] + np.log(np.expm1(x[REQUESTS])) if REQUESTS in x else x[LENGTH]
        void = (x[PREFILL] == 0) | (own < x[PREFILL])
    return np.delete(void, -1, axis=list(nodes).index(name))


def _steps_at(
    nodes: Mapping[str, FloatArray], constant: Mapping[str, float], known: Sequence[str]
) -> dict[str, FloatArray]:
    """Steps at all nodes (m,), in the columns that a trace knows."""
    grid = np.meshgrid(*(np.expm1(x) for x in nodes.values()), indexing="ij")
    of = {name: each.ravel() for name, each in zip(nodes, grid, strict=True)}
    of |= {name: np.full(grid[0].size, value) for name, value in constant.items()}
    P = of[PREFILL]
    n = of.get(REQUESTS, (P > 0).astype(np.float64))
    D = of.get(DECODING, np.zeros(len(P)))
    D = np.where(D + n > 0, D, 1.0)
    KD = of.get(CONTEXT, np.zeros(len(P))) * D
    KP = np.maximum(of[LENGTH] * n - P, 0.0) if LENGTH in of else np.zeros(len(P))
    every = {
        "B": D + n,
        "S": D + P,
        "prefill_requests": n,
        "prefill_tokens": P,
        "context_tokens": KD + KP,
        "prefill_context_tokens": KP,
    }
    return {name: column for name, column in every.items() if name in known}
