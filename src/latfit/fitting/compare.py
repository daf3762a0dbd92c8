"""Compare runs: latency ratio per phase and per region of (B, S), with simultaneous confidence intervals.

Common cells are compared step by step, phases without common cells by the predictions of both fits. The noise is that
of blocks: visits to a cell in a grid, stretches of time in a log, whole runs where each side has several starts.
Method and error rates: docs/theory/fitting.md#comparing-runs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from latfit.errors import BadInput
from latfit.fitting.data import FitData, fit_data, numbered
from latfit.fitting.prediction import read_columns_of, typical_ms
from latfit.model import FitResult, latency_draws, parameter_draws, with_typical_context
from latfit.stats import FloatArray, by_group
from latfit.trace import DECODE, UNKNOWN, Trace
from latfit.units import number

Verdict = Literal["slower", "slower within tolerance", "faster", "as fast", "unclear"]
Rows = NDArray[np.intp]

LEVEL = 0.95  # of all lower ends of a comparison together, and of all upper ends
CELL_COLUMNS = ("B", "S", "prefill_tokens", "context_tokens")
CELLS_PER_OCTAVE = 4
MIN_MATCHED_STEPS = 8  # of each run; with fewer a phase is not compared by steps
MIN_MATCHED_SHARE = 0.5  # of a run's steps in the common range
MIN_REGION_CELLS, MIN_REGION_STEPS = 5, 40
MIN_CELLS_ACROSS = 12  # of a region across phases: enough for the rank test
MIN_FREEDOM = 8  # degrees of freedom from which a pooled variance is used
LOG_BLOCKS = 12  # stretches of time per log: longer than the noise stays, enough for Student's t
MAX_BLOCK_CORRELATION = 0.8
MAX_RANKED_CELLS = 1000  # the rank test takes memory in proportion to their square
MAX_LOG_RATIO = 700.0  # beyond it exp overflows
GRID_SIDE, MAX_FIT_POINTS = 25, 400  # points at which fits are compared
OVERALL = "overall"


@dataclass(frozen=True, eq=False)
class Measured:
    """One run to compare: its fit, and its steps where they are available."""

    fit: FitResult
    steps: FitData | None = None

    @staticmethod
    def of(fit: FitResult, trace: Trace | None) -> "Measured":
        return Measured(fit, None if trace is None else fit_data(trace))


@dataclass(frozen=True)
class RegionChange:
    """Latency change of a region in percent of the baseline's, with its simultaneous interval.

    Attributes
    ----------
    B, S
        Ends of the region.
    cells
        Number of common cells, or of points where fits are compared.
    baseline_steps, steps
        Steps of each run in these cells; 0 by fits.
    low_pct, high_pct
        None where the data do not suffice for an interval.
    """

    B: tuple[float, float]
    S: tuple[float, float]
    cells: int
    baseline_steps: int
    steps: int
    change_pct: float = 0.0
    low_pct: float | None = None
    high_pct: float | None = None

    def overlaps(self, other: "RegionChange") -> bool:
        return all(max(one[0], two[0]) <= min(one[1], two[1]) for one, two in ((self.B, other.B), (self.S, other.S)))

    def verdict(self, tolerance_pct: float) -> Verdict:
        """Compare the interval with the tolerance and with zero; unclear if it holds the tolerance."""
        if self.low_pct is None or self.high_pct is None:
            return "unclear"
        if self.low_pct > tolerance_pct:
            return "slower"
        if self.high_pct < -tolerance_pct:
            return "faster"
        if self.high_pct > tolerance_pct:
            return "unclear"
        return "slower within tolerance" if self.low_pct > 0 else "as fast"


@dataclass(frozen=True)
class PhaseChange:
    """Change of a phase as a whole and of its regions, by common cells ("steps") or by predictions ("fits")."""

    phase: str
    by: Literal["steps", "fits"]
    whole: RegionChange
    regions: Sequence[RegionChange] = ()

    @property
    def tested(self) -> list[RegionChange]:
        return [self.whole, *self.regions]

    def slower(self, tolerance_pct: float) -> list[RegionChange]:
        """Return the whole phase if no region is significantly less slow, else its clearest disjoint regions."""
        found = [region for region in self.tested if region.verdict(tolerance_pct) == "slower"]
        floor = self.whole.low_pct or 0.0
        if self.whole in found and all(each.high_pct is None or each.high_pct >= floor for each in self.regions):
            return [self.whole]
        named: list[RegionChange] = []
        for region in sorted(found, key=lambda each: -(each.low_pct or 0.0)):
            if not any(region.overlaps(other) for other in named):
                named.append(region)
        return named

    def verdict(self, tolerance_pct: float) -> Verdict:
        """Return "slower" if any region is, else the verdict on the whole phase."""
        return "slower" if self.slower(tolerance_pct) else self.whole.verdict(tolerance_pct)


@dataclass(frozen=True)
class Change:
    """How one run, or one side of several runs, differs from the baseline.

    Attributes
    ----------
    only_in_one
        Phases that one run did not measure.
    overall
        All phases together and regions across them, where each is measured in a grid of cells.
    starts
        Number of runs of each side, where sides of several runs are compared.
    start_sd_pct
        Standard deviation between starts, mean over phases.
    """

    phases: Sequence[PhaseChange]
    only_in_one: Sequence[str] = ()
    overall: PhaseChange | None = None
    starts: tuple[int, int] | None = None
    start_sd_pct: float | None = None

    @property
    def parts(self) -> list[PhaseChange]:
        return [*self.phases, *([self.overall] if self.overall else [])]

    @property
    def tested(self) -> list[RegionChange]:
        return [region for part in self.parts for region in part.tested]

    def slower_across(self, tolerance_pct: float) -> list[RegionChange]:
        """Return the regions that are slower in all phases together, where no phase is by itself."""
        found = self.overall.slower(tolerance_pct) if self.overall else []
        named = [region for phase in self.phases for region in phase.slower(tolerance_pct)]
        return [region for region in found if not any(region.overlaps(other) for other in named)]

    def verdict(self, tolerance_pct: float) -> Verdict:
        """Return the gravest verdict of any phase."""
        found = {phase.verdict(tolerance_pct) for phase in self.phases}
        if self.overall is not None and self.overall.slower(tolerance_pct):
            return "slower"
        order: tuple[Verdict, ...] = ("slower", "unclear", "slower within tolerance", "faster")
        return next((verdict for verdict in order if verdict in found), "as fast")


@dataclass(frozen=True, eq=False)
class _Estimate:
    """Estimate of the log ratio in a region, before its level is known; differences: by cell, for the rank test."""

    region: RegionChange
    ratio: float
    error: float
    freedom: float
    differences: FloatArray | None = None

    def with_interval(self, alpha: float) -> RegionChange:
        """Return the region with ends that each fail with probability alpha.

        By ranks where the signs of so many cells can reach alpha, else by Student's t.
        """
        from scipy.special import stdtrit

        d = self.differences
        if d is not None and 0.5 ** len(d) <= alpha and len(d) <= MAX_RANKED_CELLS:
            ratio, low, high = signed_rank_interval(d, alpha)
        else:
            ratio = self.ratio
            if not math.isfinite(self.error):
                return replace(self.region, change_pct=percent_of(ratio))
            reach = float(stdtrit(max(self.freedom, 1.0), 1 - alpha)) * self.error if self.error else 0.0
            low, high = ratio - reach, ratio + reach
        return replace(self.region, change_pct=percent_of(ratio), low_pct=percent_of(low), high_pct=percent_of(high))


def signed_rank_interval(d: FloatArray, alpha: float) -> tuple[float, float, float]:
    """Return the Hodges-Lehmann estimate of the centre of differences (n,), and the ends that each fail with alpha.

    Wilcoxon's exact test inverted: the ends are averages of two differences. It needs 0.5**n <= alpha.
    """
    i, j = np.triu_indices(len(d))
    averages = np.sort((d[i] + d[j]) / 2)
    below, chance = np.ones(1), 0.5 ** len(d)  # number of sign patterns by the sum of positive ranks
    for rank in range(1, len(d) + 1):
        below = np.convolve(below, np.bincount([0, rank]))
    rejected = int(np.searchsorted(np.cumsum(below) * chance, alpha, side="right"))
    return float(np.median(averages)), float(averages[rejected - 1]), float(averages[-rejected])


def percent_of(ratio: float) -> float:
    return 100 * math.expm1(min(ratio, MAX_LOG_RATIO))


@dataclass(frozen=True)
class _Phase:
    """What is estimated of a phase, the whole first."""

    phase: str
    by: Literal["steps", "fits"]
    estimates: Sequence[_Estimate]
    table: "_CellTable | None" = None

    def with_intervals(self, alpha: float) -> PhaseChange:
        whole, *regions = [each.with_interval(alpha) for each in self.estimates]
        return PhaseChange(self.phase, self.by, whole, regions)


def changes_between(pairs: Sequence[tuple[Measured, Measured]]) -> list[Change]:
    """Return how much slower the second run of each pair is, all pairs as one family of tests (Bonferroni).

    Raises
    ------
    BadInput
        Two runs have no steps in common.
    """
    found = [_compare_pair(first, other) for first, other in pairs]
    alpha = (1 - LEVEL) / sum(len(part.estimates) for phases, _, overall in found for part in [*phases, *overall])
    return [
        Change(
            [phase.with_intervals(alpha) for phase in phases],
            alone,
            next((part.with_intervals(alpha) for part in overall), None),
        )
        for phases, alone, overall in found
    ]


def _compare_pair(first: Measured, other: Measured) -> tuple[list[_Phase], list[str], list[_Phase]]:
    """Return the phases, the names of those in one run only, and all phases together (one or none)."""
    _check_overlap(first.fit, other.fit)
    if first.steps is None or other.steps is None:
        return _compare_fits_on_grid(first.fit, other.fit), [], []
    runs = _align([first.steps, other.steps])
    named = [set(np.unique(run.phase).tolist()) for run in runs]
    phases = [
        _compare_cells(first.fit, runs, phase) or _compare_fits_on_steps(first.fit, other.fit, runs, phase)
        for phase in sorted(named[0] & named[1])
    ]
    compared = [phase for phase in phases if phase is not None]
    if not compared:
        raise BadInput(
            "the runs have no common steps (phase, B, S)", remedy="Compare runs of steps that overlap in B and in S."
        )
    return compared, sorted((named[0] | named[1]) - {phase.phase for phase in compared}), _join_phases(compared)


def _check_overlap(first: FitResult, other: FitResult) -> None:
    for name in ("B", "S"):
        ends = [fit.domain[name] for fit in (first, other)]
        if max(low for low, _ in ends) > min(high for _, high in ends):
            of_first, of_other = (f"{number(low)} to {number(high)}" for low, high in ends)
            raise BadInput(
                f"the runs have no common range of {name}: {of_first} in the first, {of_other} in the other",
                remedy="Compare runs of steps that overlap in B and in S.",
            )


def _join_phases(phases: Sequence[_Phase]) -> list[_Phase]:
    """Return all phases as one, with regions across them, by ranks; none where there is one phase, or a log."""
    tables = [phase.table for phase in phases if phase.table is not None]
    known = [d for phase in phases if (d := phase.estimates[0].differences) is not None]
    if len(known) < max(2, len(phases)):
        return []
    table, d = _CellTable.joined(tables), np.concatenate(known)
    regions = [cells for cells in table.split() if len(cells) >= MIN_CELLS_ACROSS]
    found = [_Estimate(table.region(cells), 0.0, math.inf, 1.0, d[cells]) for cells in regions]
    return [_Phase(OVERALL, "steps", found)] if found else []


# By steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Run:
    """Steps of a run by the columns and phase names that all compared runs know."""

    data: FitData
    columns: Mapping[str, FloatArray]
    phase: NDArray[np.str_]


def _align(steps: Sequence[FitData]) -> list[_Run]:
    """Keep the columns that all runs have; where one names no phase, all but decode steps are one phase."""
    names = [name for name in steps[0].steps if all(name in each.steps for each in steps)]
    blind = any(np.any(each.phase == UNKNOWN) for each in steps)
    return [
        _Run(
            each,
            {name: each.steps[name] for name in names},
            np.where((each.phase == DECODE) | (not blind), each.phase, UNKNOWN).astype(str),
        )
        for each in steps
    ]


@dataclass(frozen=True, eq=False)
class _Cells:
    """Steps of one run in the cells that all runs measured.

    rows: row numbers (n,); cell: cell of each (n,), 0 to m - 1; y: ln T less the baseline fit's (n,); weights: steps
    that each row stands for (n,).
    """

    run: _Run
    rows: Rows
    cell: Rows
    y: FloatArray
    weights: FloatArray

    @property
    def sizes(self) -> FloatArray:
        """Steps by cell (m,)."""
        return np.asarray(np.bincount(self.cell, self.weights), dtype=np.float64)

    @property
    def means(self) -> FloatArray:
        """Mean of y by cell (m,)."""
        return np.asarray(np.bincount(self.cell, self.weights * self.y) / self.sizes)

    def visit_means(self) -> tuple[FloatArray, Rows]:
        """Return the mean of y over each unbroken series of steps in a cell, and its cell.

        A row that stands for several steps is a visit by itself.
        """
        if not self.run.data.single:
            return self.y, self.cell
        of_row, visit = np.full(len(self.run.data), -1), np.zeros(len(self.run.data))
        of_row[self.rows], count = self.cell, 0
        for run in self.run.data.runs:
            visit[run] = count + np.cumsum(np.diff(of_row[run], prepend=-2) != 0)
            count = int(visit[run[-1]]) + 1
        number = numbered([visit[self.rows]])
        return by_group(self.y, number, self.weights).mean, self.cell[np.unique(number, return_index=True)[1]]

    def stretch(self) -> Rows:
        """Return the stretch of time that each row lies in (n,), about LOG_BLOCKS over all runs of the trace."""
        total, start = len(self.run.data), 0
        found = np.empty(total, dtype=np.intp)
        for run in self.run.data.runs:
            parts = max(1, round(LOG_BLOCKS * len(run) / total))
            found[run] = start + np.arange(len(run)) * parts // len(run)
            start += parts
        return found[self.rows]


def _match(fit: FitResult, runs: Sequence[_Run], phase: str) -> list[_Cells]:
    """Return the steps of a phase that lie in cells of all runs; none where no cell is common."""
    rows = [np.flatnonzero(run.phase == phase) for run in runs]
    bins = [
        np.concatenate(
            [
                np.round(CELLS_PER_OCTAVE * np.log2(1 + run.columns[name][row]))
                for run, row in zip(runs, rows, strict=True)
            ]
        )
        for name in CELL_COLUMNS
        if name in runs[0].columns
    ]
    cells = np.split(numbered(bins), np.cumsum([len(row) for row in rows])[:-1])
    common = np.unique(cells[0])
    for each in cells[1:]:
        common = np.intersect1d(common, each)
    found = []
    for run, row, cell in zip(runs, rows, cells, strict=True):
        kept = np.isin(cell, common)
        row, cell = row[kept], np.searchsorted(common, cell[kept])
        T = typical_ms(fit, Trace({name: column[row] for name, column in run.columns.items()}))
        found.append(_Cells(run, row, cell, np.log(run.data.observed[row] / T), run.data.weights[row]))
    return found if len(common) else []


def _compare_cells(fit: FitResult, runs: Sequence[_Run], phase: str) -> _Phase | None:
    """Compare a phase by common cells; None where too few steps lie in them."""
    parts = _match(fit, runs, phase)
    for run, part in zip(runs, parts, strict=False):
        inside = _inside(run, np.flatnonzero(run.phase == phase), runs)
        if part.weights.sum() < max(MIN_MATCHED_STEPS, MIN_MATCHED_SHARE * float(run.data.weights[inside].sum())):
            return None
    if not parts:
        return None
    table = _CellTable.of(parts)
    log = any(run.data.in_time for run in runs)
    blocks = _BlocksOfLogs(parts) if log else _BlocksOfGrids(parts)
    return _Phase(phase, "steps", [blocks.of(cells, table.region(cells)) for cells in table.split()], table)


@dataclass(frozen=True, eq=False)
class _CellTable:
    """Common cells: lowest and highest B and S (2, m), and steps of each side (2, m)."""

    low: FloatArray
    high: FloatArray
    sizes: FloatArray

    @staticmethod
    def of(parts: Sequence[_Cells], first: int = 1) -> "_CellTable":
        """Describe the cells of runs, of which the first are the baseline's."""
        cell = np.concatenate([part.cell for part in parts])
        low = np.full((2, int(cell.max()) + 1), math.inf)
        high = -low
        for axis, name in enumerate(("B", "S")):
            values = np.concatenate([part.run.columns[name][part.rows] for part in parts])
            np.minimum.at(low[axis], cell, values)
            np.maximum.at(high[axis], cell, values)
        sides = (parts[:first], parts[first:])
        return _CellTable(low, high, np.stack([np.sum([part.sizes for part in side], axis=0) for side in sides]))

    @staticmethod
    def joined(tables: "Sequence[_CellTable]") -> "_CellTable":
        return _CellTable(
            *(np.concatenate([getattr(each, name) for each in tables], axis=1) for name in ("low", "high", "sizes"))
        )

    def split(self) -> list[Rows]:
        """Return the regions that are tested, all cells first."""
        return _split_regions(np.log(self.low * self.high) / 2, self.sizes.min(axis=0))

    def region(self, cells: Rows) -> RegionChange:
        """Describe some cells, without their change."""
        B, S = ((float(self.low[axis][cells].min()), float(self.high[axis][cells].max())) for axis in (0, 1))
        counts = (round(float(size[cells].sum())) for size in self.sizes)
        return RegionChange(B, S, len(cells), *counts)


class _BlocksOfGrids:
    """Noise of cell means from visits to a cell, pooled over the cells of a region."""

    def __init__(self, parts: Sequence[_Cells]) -> None:
        visits = [part.visit_means() for part in parts]
        groups = [by_group(mean, cell, np.ones(len(mean))) for mean, cell in visits]
        self.visits, self.squares = (np.stack([getattr(each, name) for each in groups]) for name in ("size", "squares"))
        self.d = groups[1].mean - groups[0].mean
        few = self.visits.min(axis=0)  # noise with pauses is symmetric in d for equal numbers of visits only
        self.paired = _mean_of_first(*visits[1], few) - _mean_of_first(*visits[0], few)

    def of(self, cells: Rows, region: RegionChange) -> _Estimate:
        per_block = (1 / self.visits[:, cells]).sum(axis=0)
        w = 1 / per_block / np.sum(1 / per_block)
        ratio = float(w @ self.d[cells])
        pooled = self._pool(cells) or self._pool(np.arange(len(self.d)))
        if pooled is not None:
            error, freedom = math.sqrt(pooled[0] * float(w**2 @ per_block)), pooled[1]
        else:  # too few repeats: the scatter of the cells' changes contains the noise
            n = 1 / float(w @ w)
            scatter = float(w**2 @ (self.d[cells] - ratio) ** 2)
            error, freedom = (math.sqrt(scatter * n / (n - 1)), n - 1) if len(cells) > 2 else (math.inf, 1.0)
        return _Estimate(region, ratio, error, freedom, self.paired[cells])

    def _pool(self, cells: Rows) -> tuple[float, float] | None:
        """Return the variance of a visit and its degrees of freedom (Satterthwaite), None with too few of them."""
        freedom, squares = self.visits[:, cells].ravel() - 1, self.squares[:, cells].ravel()
        total = float(freedom.sum())
        if total < MIN_FREEDOM:
            return None
        below = float(np.sum(squares**2 / (freedom + 2)))
        return float(squares.sum()) / total, min(total, float(squares.sum()) ** 2 / below) if below > 0 else total


def _mean_of_first(mean: FloatArray, cell: Rows, count: FloatArray) -> FloatArray:
    """Return the mean of the first visits to each cell, as many as `count` says (m,)."""
    order = np.argsort(cell, kind="stable")
    size = np.bincount(cell)
    kept = order[np.arange(len(order)) - np.repeat(np.cumsum(size) - size, size) < count[cell[order]]]
    return by_group(mean[kept], cell[kept], np.ones(len(kept))).mean


class _BlocksOfLogs:
    """Noise of cell means from stretches of time, which all cells of a log share."""

    def __init__(self, parts: Sequence[_Cells]) -> None:
        self.parts = parts
        self.sizes, self.means = (np.stack([getattr(part, name) for part in parts]) for name in ("sizes", "means"))
        self.stretches = [part.stretch() for part in parts]

    def of(self, cells: Rows, region: RegionChange) -> _Estimate:
        w = np.zeros(self.sizes.shape[1])
        w[cells] = 1 / (1 / self.sizes[:, cells]).sum(axis=0)
        w /= w.sum()
        ratio = float(w @ (self.means[1] - self.means[0]))
        n = self.sizes.sum(axis=0)
        level = (self.sizes[0] * self.means[0] + self.sizes[1] * (self.means[1] - ratio)) / n
        lost = np.sqrt(n / np.maximum(n - 1, 1))  # what residuals about a cell's own mean lack
        variances, freedoms = [], []
        for side, (part, stretch) in enumerate(zip(self.parts, self.stretches, strict=True)):
            weight = (w / self.sizes[side])[part.cell] * part.weights
            residual = (part.y - side * ratio - level[part.cell]) * lost[part.cell]
            sums, shares = (np.bincount(stretch, each) for each in (weight * residual, weight))
            blocks = 1 / float(shares @ shares)
            if blocks <= 2:
                return _Estimate(region, ratio, math.inf, 1.0)
            squares = float(sums @ sums)
            r = min(max(float(sums[1:] @ sums[:-1]) / max(squares, 1e-300) + 1 / blocks, 0.0), MAX_BLOCK_CORRELATION)
            variances.append(squares * (1 + r) / (1 - r) * blocks / (blocks - 1))
            freedoms.append(blocks - 1)
        total = sum(variances)
        below = sum(v**2 / f for v, f in zip(variances, freedoms, strict=True))
        return _Estimate(region, ratio, math.sqrt(total), total**2 / below if below > 0 else sum(freedoms))


def _inside(run: _Run, rows: Rows, runs: Sequence[_Run]) -> Rows:
    """Return the rows that lie in the range of B and S that all runs measured."""
    for name in ("B", "S"):
        low = max(float(each.columns[name].min()) for each in runs)
        high = min(float(each.columns[name].max()) for each in runs)
        rows = rows[(run.columns[name][rows] >= low) & (run.columns[name][rows] <= high)]
    return rows


def _split_regions(place: FloatArray, weight: FloatArray) -> list[Rows]:
    """Return all cells, then the halves along B and along S, then the quarters along the wider axis.

    place: ln B and ln S of each cell (2, m); weight: its steps (m,).
    """
    everything = np.arange(len(weight))
    found = [everything]
    for axis in sorted((0, 1), key=lambda each: -float(np.ptp(place[each]))):
        found += (halves := _halve(everything, place[axis], weight))
        if len(found) <= 1 + len(halves):  # the halves along the wider axis, each cut across, or else along
            for half in halves:
                found += _halve(half, place[1 - axis], weight) or _halve(half, place[axis], weight)
    return [part for i, part in enumerate(found) if not any(np.array_equal(part, each) for each in found[:i])]


def _halve(part: Rows, along: FloatArray, weight: FloatArray) -> list[Rows]:
    """Return the cells below and above the median step along an axis; none where a half holds too little."""
    order = part[np.argsort(along[part])]
    middle = along[order][np.searchsorted(np.cumsum(weight[order]), weight[part].sum() / 2)]
    for below in (along[part] <= middle, along[part] < middle):
        halves = [part[below], part[~below]]
        if all(len(half) >= MIN_REGION_CELLS and weight[half].sum() >= MIN_REGION_STEPS for half in halves):
            return halves
    return []


# By several starts a side --------------------------------------------------------------------------------------------


def change_over_starts(first: Sequence[Measured], other: Sequence[Measured]) -> Change:
    """Return how much slower the runs of one side are than the baseline's, where each run is a start of its own.

    A run is one observation of each phase: the mean over the cells that all runs measured. Regions are not tested.

    Raises
    ------
    BadInput
        The steps of a run are not available, or the runs have no common cells.
    """
    known = [each.steps for each in (*first, *other) if each.steps is not None]
    if len(known) < len(first) + len(other):
        raise BadInput("a fit without its trace is no run", where="--alternate", remedy="Give traces in place of fits.")
    runs = _align(known)
    named = [set(np.unique(run.phase).tolist()) for run in runs]
    found = []
    for phase in sorted(set.intersection(*named)):
        parts = _match(first[0].fit, runs, phase)
        if not parts or min(part.weights.sum() for part in parts) < MIN_MATCHED_STEPS:
            continue
        weights = np.min([part.sizes for part in parts], axis=0)
        levels = np.average([part.means for part in parts], axis=1, weights=weights)
        sides = levels[: len(first)], levels[len(first) :]
        freedom = len(runs) - 2
        sd = math.sqrt(sum(float(np.sum((side - side.mean()) ** 2)) for side in sides) / freedom)
        region = _CellTable.of(parts, len(first)).region(np.arange(len(weights)))
        error = sd * math.sqrt(1 / len(first) + 1 / len(other))
        ratio = float(sides[1].mean() - sides[0].mean())
        found.append((_Phase(phase, "steps", [_Estimate(region, ratio, error, freedom)]), sd))
    if not found:
        raise BadInput("the runs have no common steps", remedy="Compare runs of one load, so that B and S overlap.")
    phases = [phase.with_intervals((1 - LEVEL) / len(found)) for phase, _ in found]
    alone = sorted(set.union(*named) - {each.phase for each in phases})
    return Change(phases, alone, None, (len(first), len(other)), 100 * float(np.mean([sd for _, sd in found])))


# By fits -------------------------------------------------------------------------------------------------------------


def _compare_fits_on_steps(first: FitResult, other: FitResult, runs: Sequence[_Run], phase: str) -> _Phase | None:
    """Compare the fits on steps of both runs in the common range; None where either has none there."""
    parts = [_inside(run, np.flatnonzero(run.phase == phase), runs) for run in runs]
    if not all(len(rows) for rows in parts):
        return None
    parts = [rows[np.linspace(0, len(rows) - 1, min(len(rows), MAX_FIT_POINTS)).astype(np.intp)] for rows in parts]
    columns = {
        name: np.concatenate([run.columns[name][rows] for run, rows in zip(runs, parts, strict=True)])
        for name in runs[0].columns
    }
    return _compare_fits(first, other, columns, phase)


def _compare_fits_on_grid(first: FitResult, other: FitResult) -> list[_Phase]:
    """Compare the fits on a geometric grid of their common range, at the mean of their typical contexts."""
    axes = []
    for name in ("B", "S"):
        low, high = (
            max(fit.domain[name][0] for fit in (first, other)),
            min(fit.domain[name][1] for fit in (first, other)),
        )
        axes.append(np.unique(np.round(np.geomspace(max(low, 1.0), high, GRID_SIDE))).astype(np.float64))
    B, S = (np.asarray(axis.ravel(), dtype=np.float64) for axis in np.meshgrid(*axes))
    prefill = FitResult.holds_prefill(B, S) & (S > B)
    decode = axes[0][axes[0] >= axes[1][0] / 2]
    phases = [(DECODE, decode, decode)]
    if first.knows_prefill and other.knows_prefill:
        phases.append((UNKNOWN, B[prefill], S[prefill]))
    known = [fit.typical for fit in (first, other) if fit.typical]
    names = {name for typical in known for name in typical}
    typical = {name: float(np.mean([each[name] for each in known if name in each])) for name in names}
    found = [
        _compare_fits(first, other, dict(with_typical_context({"B": B, "S": S}, typical)), phase)
        for phase, B, S in phases
        if len(B)
    ]
    if not found:
        raise BadInput("the fits have no common step (S >= B)", remedy="Compare fits of steps that overlap in B and S.")
    return found


def _compare_fits(first: FitResult, other: FitResult, columns: Mapping[str, FloatArray], phase: str) -> _Phase:
    """Compare the predictions of both fits for steps: the median ratio, by region."""
    ratio = np.log(typical_ms(other, Trace(columns)) / typical_ms(first, Trace(columns)))
    drawn = _draw_ratios(first, other, columns)
    misfit = model_error_sd(first, phase) ** 2 + model_error_sd(other, phase) ** 2
    same = first.model == other.model and np.array_equal(first.theta, other.theta)
    found = []
    place = np.log([columns["B"], columns["S"]])
    for part in _split_regions(place, np.full(len(ratio), float(MIN_REGION_STEPS))):
        spread = 0.0 if drawn is None else float(np.var(np.median(drawn[:, part], axis=1)))
        B, S = ((float(columns[name][part].min()), float(columns[name][part].max())) for name in ("B", "S"))
        error = 0.0 if same else math.sqrt(spread + misfit)
        found.append(_Estimate(RegionChange(B, S, len(part), 0, 0), float(np.median(ratio[part])), error, math.inf))
    return _Phase(phase, "fits", found)


def _draw_ratios(first: FitResult, other: FitResult, columns: Mapping[str, FloatArray]) -> FloatArray | None:
    """Return the log ratio (draws, n) over the parameter draws of both fits; None where one has none.

    The draws of the second are permuted: both may come from the same random numbers, which would cancel.
    """
    drawn = []
    for fit in (first, other):
        draws = parameter_draws(fit)
        if draws is None:
            return None
        read = {name: columns[name] for name in dict.fromkeys(["B", "S", *read_columns_of(fit)]) if name in columns}
        drawn.append(np.log(latency_draws(fit, draws, **read)))
    order = np.random.default_rng(0).permutation(len(drawn[1]))
    return np.asarray(drawn[1][order] - drawn[0])


def model_error_sd(fit: FitResult, phase: str) -> float:
    """Return the standard deviation of a model's error in ln T beyond the noise of repeated steps.

    An error that is smooth in B and S may be the same in a whole region, so it does not average out.
    """
    errors = fit.cross_validation.errors
    held_out = (errors.by_phase or {}).get(phase, errors.mape_pct) if errors else 0.0
    floor = (fit.diagnostics.lack_of_fit or {}).get("floor_mape_pct") or 0.0
    return math.sqrt(math.pi / 2 * max(held_out**2 - floor**2, 0.0)) / 100  # normal errors: sd = MAE * sqrt(pi/2)
