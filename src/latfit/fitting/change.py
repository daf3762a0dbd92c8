"""How much slower one run is than another: phase by phase, and by regions of (B, S), each with its interval.

By steps, where both runs have measured the same cells. A cell holds steps of one phase that agree in B, S, prefill and
cached tokens, as far as both runs know them, to a quarter of an octave. Of each step

    y = ln T - ln f,        f the typical latency by the baseline's fit,

which takes off what steps of one cell differ in; f cancels where they agree. Of a cell c with n0 and n1 steps

    d_c = mean(y1) - mean(y0),   var d_c = v_c = phi (s0^2 g0/n0 + s1^2 g1/n1),

where s^2 is the variance of units within cells, by step. Nothing is clipped: steps of a cell often take one of two
times, which a median jumps between and a mean does not, and a pause counts by its logarithm. What is a unit:

* In a log a step is, and g says how many in a row are worth an independent one (`autocorrelation`).
* In a grid that is measured in repeats, steps one after another in a cell are a visit, and share what the next visit
  does not. A visit is the unit, and g = 1, where visits of a cell differ by more than steps dealt to them at random
  would; else a step is. A run with too few visits twice to a cell takes the variance of both runs.

phi >= 1 is what d_c varies beyond that. It is measured between neighbours, by the smaller three quarters of
(d_{c+1} - d_c)^2 / (v_{c+1} + v_c) in the order of S or in that of B, whichever gives less, so that a slowdown of a
region counts as no noise: it shows at its edge alone. Where few cells are visited twice, or hold two steps, those
differences are all that tells the noise. They have (m - 1)/2 degrees of freedom among m cells: with these Student's t
keeps about its level in simulations of 4 to 40 cells, in one order or in two.

The change of a region is the mean of d_c with weights w_c = 1/v_c, of variance 1/sum(w_c): Student's t, with the
degrees of freedom of the variances after Satterthwaite, and those of a variance pooled over unlike cells too:

    f = (sum_c Q_c)^2 / sum_c Q_c^2/(k_c + 2),     Q_c the squares of a cell within, k_c = its units - 1,

which is sum_c k_c where all scatter alike, as E Q_c^2 = k_c (k_c + 2) sigma^4. Weights of strata come from the same
variances, which adds 4 sum_s u_s (1 - u_s)/f_s of the variance for shares u_s of the weight (Meier).

In a grid, a region of eight cells or more is tested by signed ranks of d_c instead (`signed_ranks`): these need no
scatter at all, neither one that regions share nor one that can be told from few visits. Both runs count as many visits
of a cell there, or about as many in all, since d_c is symmetric about its change only so: pauses are of one sign, and
where one run averages four visits and the other has one, a test of symmetric differences would call them a slowdown.
Cells of a log share what noise follows time, so that a log keeps to the mean and its `repeat`.

Overall: where two phases or more are tested by ranks, so are all their cells together, and regions of (B, S) across
phases of a dozen cells or more: what a region of each phase holds too little for is found in all of them.

By fits, where cells do not match: the median of ln(T1/T0) over common steps, in every pair of the parameter draws that
the two fits keep. To the variance over the draws comes that of what each formula misses. Its held-out error of the
phase, where repeats explain a part of it, leaves a mean absolute error e of the formula, and e sqrt(pi/2) is the
standard deviation of a normal error. What a formula misses is smooth, so that all of a region may share it: the median
over many points is taken to be no surer than one of them,

    var r = var over draws + (pi/2) (e0^2 + e1^2).

Regions. A phase is halved at the median of the common steps in B, and in S, and the halves along the wider of the two
once more, wherever all parts hold enough cells and steps: at most eight regions, which the data cut. What all cuts
leave are the strata that variances within cells are of.

The test. A region is slower where the lower end of its interval exceeds the tolerance: H0 is "slower by at most the
tolerance", so chance alone has to get past it. All phases and regions of a comparison are one family of K, and each end
of an interval holds with 1 - 0.05/K (Bonferroni): all lower ends hold at once with 95 %, so that at most 5 % of
comparisons raise a false alarm where something is slower by exactly the tolerance, and far fewer where nothing is. The
n tests by ranks of two runs share 0.05 n/K by what they are together, which regions within regions make less strict. No
order of tests does better where one region of many is slow, and unlike Holm's this gives intervals.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from latfit.errors import BadInput
from latfit.fitting.checking.autocorrelation import TimeOrder, persistence
from latfit.fitting.data import FitData, fit_data, numbered
from latfit.fitting.prediction import read_columns_of, typical_ms
from latfit.fitting.signed_ranks import Group, most_by_chance
from latfit.model import FitResult, latency_draws, parameter_draws, with_typical_context
from latfit.stats import FloatArray, by_group
from latfit.trace import DECODE, UNKNOWN, Trace
from latfit.units import number

Verdict = Literal["slower", "faster", "as fast", "unclear"]
Cells = NDArray[np.intp]

LEVEL = 0.95
"""Probability with which all lower ends of a comparison hold at once, and so all upper ends."""
KEY = ("B", "S", "prefill_tokens", "context_tokens")
PER_OCTAVE = 4
MIN_MATCHED_STEPS = 8
"""Matched steps of each run below which a phase is not compared by steps."""
MATCHED = 0.5
"""Share of the steps of a run, within the common range, that have to lie in common cells."""
FEWEST_CELLS, ENOUGH_STEPS = 5, 40
"""Cells, and steps of each run, that a region holds at least."""
FREEDOM = 8
"""Degrees of freedom that a variance needs, and those from which it is a region's own."""
FEWEST_NEIGHBOURS = 3
FEWEST_RANKED, MOST_RANKED, FEWEST_ACROSS = 8, 1000, 12
"""Cells of a region, and of a phase, that are tested by ranks; and those of a region across phases at least."""
FEWEST_FLIPS = 1.25
"""Equal flips of signs that fit into a level, so that the most extreme gets past it."""
UNBALANCED, UNEVEN = 1.25, 2.0
"""Ratio of visits in two runs up to which all count; loss of a mean that counts cells alike up to which ranks do."""
OVERALL = "overall"
ALIKE = 1.282
"""Standard deviations from which visits count as different: a test at 10 %."""
KEPT, KEPT_MEAN = 0.75, 0.368524
"""Share of squared differences that counts, the smallest ones, and the mean of so many of chi-squared."""
FAR = 700.0
"""ln of a ratio beyond which there is no number for it."""
GRID_SIDE = 25
MOST_POINTS = 400
"""Steps of each run on which fits are compared."""


@dataclass(frozen=True, eq=False)
class Measured:
    """One run to compare: its fit, and its steps where they are at hand."""

    fit: FitResult
    steps: FitData | None = None

    @staticmethod
    def of(fit: FitResult, trace: Trace | None) -> "Measured":
        return Measured(fit, None if trace is None else fit_data(trace))


@dataclass(frozen=True)
class RegionChange:
    """How the latency of steps in a region differs, in percent of the baseline's, with its simultaneous interval
    (None where too little is measured). B, S: ends of the region.  cells: common ones, or points of fits.
    baseline_steps, steps: of each run in them; 0 by fits."""

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
        """slower, faster: by more than the tolerance, as sure as its interval.  as fast: by no more.  unclear: the
        interval holds both."""
        if self.low_pct is None or self.high_pct is None:
            return "unclear"
        if self.low_pct > tolerance_pct:
            return "slower"
        if self.high_pct < -tolerance_pct:
            return "faster"
        return "as fast" if self.high_pct <= tolerance_pct else "unclear"


@dataclass(frozen=True)
class PhaseChange:
    """The change of a phase as a whole and of its regions, none where it has one alone. by: common cells of steps, or
    predictions of the fits."""

    phase: str
    by: Literal["steps", "fits"]
    whole: RegionChange
    regions: Sequence[RegionChange] = ()

    @property
    def tested(self) -> list[RegionChange]:
        return [self.whole, *self.regions]

    def slower(self, tolerance_pct: float) -> list[RegionChange]:
        """Where it is slower: the phase as a whole where no region is surely less so, else the surest regions that do
        not overlap."""
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
        """slower where any region is; else that of the phase as a whole."""
        return "slower" if self.slower(tolerance_pct) else self.whole.verdict(tolerance_pct)


@dataclass(frozen=True)
class Change:
    """How one run differs from the baseline. only_in_one: phases that one of them has not measured.  overall: all
    phases together and regions across them, where they could be tested.  starts: of several runs a side, how many
    each side has, and start_sd_pct: the standard deviation between starts, mean over phases."""

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
        """Where it is slower across phases, and no phase by itself is known to be."""
        found = self.overall.slower(tolerance_pct) if self.overall else []
        named = [region for phase in self.phases for region in phase.slower(tolerance_pct)]
        return [region for region in found if not any(region.overlaps(other) for other in named)]

    def verdict(self, tolerance_pct: float) -> Verdict:
        """slower where any phase is, or a region across phases; unclear where a phase may be, faster where one is and
        none of those; else as fast."""
        if self.overall is not None and self.overall.slower(tolerance_pct):
            return "slower"
        found = {phase.verdict(tolerance_pct) for phase in self.phases}
        order: tuple[Verdict, ...] = ("slower", "unclear", "faster")
        return next((verdict for verdict in order if verdict in found), "as fast")


@dataclass(frozen=True)
class _Estimate:
    """ln of the ratio of a region with its standard error and degrees of freedom, and the region without interval."""

    ratio: float
    error: float
    freedom: float
    region: RegionChange
    group: Group | None = None

    def ranked(self, tests: int) -> bool:
        """Whether its cells are tested by ranks: where the signs of so many can get past a level at all."""
        return self.group is not None and FEWEST_FLIPS * 0.5 ** len(self.group.d) <= (1 - LEVEL) / tests

    def by_ranks(self, most: float) -> RegionChange:
        """With its interval, where T is no further than this from zero."""
        assert self.group is not None
        low, high = self.group.ends(most)
        return replace(
            self.region,
            change_pct=percent_of(self.group.estimate),
            low_pct=None if low is None else percent_of(low),
            high_pct=None if high is None else percent_of(high),
        )

    def at(self, tests: int) -> RegionChange:
        """With its interval by Student's t, as one of so many tests."""
        from scipy.special import stdtrit

        change = percent_of(self.ratio)
        if not math.isfinite(self.error):
            return replace(self.region, change_pct=change)
        reach = float(stdtrit(max(self.freedom, 1.0), 1 - (1 - LEVEL) / tests)) * self.error if self.error else 0.0
        low, high = (percent_of(end) for end in (self.ratio - reach, self.ratio + reach))
        return replace(self.region, change_pct=change, low_pct=low, high_pct=high)


def percent_of(ratio: float) -> float:
    return 100 * math.expm1(min(ratio, FAR))


@dataclass(frozen=True)
class _Phase:
    """What is tested of a phase, the whole first. matched: its common cells, where it is compared by them."""

    phase: str
    by: Literal["steps", "fits"]
    estimates: Sequence[_Estimate]
    matched: "_Matched | None" = None


@dataclass(frozen=True)
class _Pair:
    """What is tested of two runs. overall: across phases."""

    phases: Sequence[_Phase]
    only_in_one: Sequence[str] = ()
    overall: _Phase | None = None

    @property
    def parts(self) -> list[_Phase]:
        return [*self.phases, *([self.overall] if self.overall else [])]

    @property
    def estimates(self) -> list[_Estimate]:
        return [estimate for part in self.parts for estimate in part.estimates]

    def at(self, tests: int) -> Change:
        """With its intervals, among so many tests."""
        ranked = [each for each in self.estimates if each.ranked(tests)]
        groups = [each.group for each in ranked if each.group is not None]
        most = most_by_chance(groups, (1 - LEVEL) * len(ranked) / tests) if ranked else []
        regions = iter([each.by_ranks(far) for each, far in zip(ranked, most, strict=True)])
        found = []
        for part in self.parts:
            whole, *rest = [next(regions) if each.ranked(tests) else each.at(tests) for each in part.estimates]
            found.append(PhaseChange(part.phase, part.by, whole, rest))
        return Change(found[: len(self.phases)], self.only_in_one, found[-1] if self.overall else None)


def changes_between(pairs: Sequence[tuple[Measured, Measured]]) -> list[Change]:
    """How much slower the second run of each pair is than the first, all as one family of tests. Raises BadInput where
    two runs have nothing in common."""
    found = [_compared(first, other) for first, other in pairs]
    tests = sum(len(pair.estimates) for pair in found)
    return [pair.at(tests) for pair in found]


def _compared(first: Measured, other: Measured) -> _Pair:
    _check_overlap(first.fit, other.fit)
    if first.steps is None or other.steps is None:
        return _Pair(_by_grid(first.fit, other.fit))
    runs = common_runs([first.steps, other.steps])
    named = [set(np.unique(run.phase).tolist()) for run in runs]
    phases = [
        _by_steps(first.fit, runs, phase) or _by_common_steps(first.fit, other.fit, runs, phase)
        for phase in sorted(named[0] & named[1])
    ]
    compared = [phase for phase in phases if phase is not None]
    if not compared:
        raise BadInput(
            "the runs have no common steps (phase, B, S)", remedy="Compare runs of steps that overlap in B and in S."
        )
    alone = sorted((named[0] | named[1]) - {phase.phase for phase in compared})
    return _Pair(_grouped(compared), alone, _overall(compared))


def _check_overlap(first: FitResult, other: FitResult) -> None:
    for name in ("B", "S"):
        ends = [fit.domain[name] for fit in (first, other)]
        if max(low for low, _ in ends) > min(high for _, high in ends):
            of_first, of_other = (f"{number(low)} to {number(high)}" for low, high in ends)
            raise BadInput(
                f"the runs have no common range of {name}: {of_first} in the first, {of_other} in the other",
                remedy="Compare runs of steps that overlap in B and in S.",
            )


# By steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Run:
    """The steps of a run as they are compared: columns that both runs know, phases by names that both use, and the
    share of independent steps."""

    data: FitData
    columns: Mapping[str, FloatArray]
    phase: NDArray[np.str_]


def common_runs(steps: Sequence[FitData]) -> list[_Run]:
    """The steps of runs by the columns that all have; where one names no phase, all but decode steps are alike."""
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


def _by_steps(fit: FitResult, runs: Sequence[_Run], phase: str) -> _Phase | None:
    """A phase by common cells; None where too few steps lie in them."""
    rows = [np.flatnonzero(run.phase == phase) for run in runs]
    cells = cells_of(runs, rows)
    both = np.intersect1d(cells[0], cells[1])
    kept = [np.isin(cell, both) for cell in cells]
    weights = [run.data.weights[row] for run, row in zip(runs, rows, strict=True)]
    for run, row, keep, weight in zip(runs, rows, kept, weights, strict=True):
        inside = _inside(run, row, runs)
        if float(weight[keep].sum()) < max(MIN_MATCHED_STEPS, MATCHED * float(weight[inside].sum())):
            return None
    rows = [row[keep] for row, keep in zip(rows, kept, strict=True)]
    found = [np.searchsorted(both, cell[keep]) for cell, keep in zip(cells, kept, strict=True)]
    parts = [CellSteps.of(fit, run, row, cell) for run, row, cell in zip(runs, rows, found, strict=True)]
    sides, known = _sides(parts)
    matched = _Matched.of(sides, known, _paired(parts))
    return _Phase(phase, "steps", [matched.estimate(region) for region in matched.regions], matched)


def _grouped(phases: Sequence[_Phase]) -> list[_Phase]:
    """The phases, with the groups of cells that are tested by ranks, numbered through."""
    found, start = [], 0
    for phase in phases:
        estimates = list(phase.estimates)
        if phase.matched is not None and (d := phase.matched.paired) is not None:
            for i, cells in enumerate(phase.matched.regions):
                if len(cells) >= FEWEST_RANKED:
                    group = Group(start + cells, d[cells], np.zeros(len(cells), np.intp))
                    estimates[i] = replace(estimates[i], group=group)
            start += len(d)
        found.append(replace(phase, estimates=estimates))
    return found


def _overall(phases: Sequence[_Phase]) -> _Phase | None:
    """All phases together and regions across them, by ranks; None where there are none of two."""
    parts = [phase.matched for phase in phases if phase.matched is not None and phase.matched.paired is not None]
    if len(parts) < 2:
        return None
    sides = [_Side.joined([part.sides[i] for part in parts]) for i in (0, 1)]
    d = np.concatenate([part.paired for part in parts if part.paired is not None])
    stratum = np.repeat(np.arange(len(parts)), [len(part.d) for part in parts])
    found = [
        _Estimate(0.0, math.inf, 1.0, _region_of(sides, cells), Group(cells, d[cells], stratum[cells]))
        for cells in _regions(_place(sides), _least(sides))
        if len(cells) >= FEWEST_ACROSS
    ]
    return _Phase(OVERALL, "steps", found) if found and found[0].region.cells == len(d) else None


def cells_of(runs: Sequence[_Run], rows: Sequence[Cells]) -> list[Cells]:
    """The cell of each row, by numbers that the runs share."""
    names = [name for name in KEY if name in runs[0].columns]
    bins = [
        np.concatenate(
            [np.round(PER_OCTAVE * np.log2(1 + run.columns[name][row])) for run, row in zip(runs, rows, strict=True)]
        )
        for name in names
    ]
    return np.split(numbered(bins), np.cumsum([len(row) for row in rows])[:-1])


def _inside(run: _Run, rows: Cells, runs: Sequence[_Run]) -> NDArray[np.bool_]:
    """Which rows lie in the range of B and S that both runs have measured."""
    kept = np.ones(len(rows), dtype=bool)
    for name in ("B", "S"):
        low = max(float(each.columns[name].min()) for each in runs)
        high = min(float(each.columns[name].max()) for each in runs)
        kept &= (run.columns[name][rows] >= low) & (run.columns[name][rows] <= high)
    return kept


@dataclass(frozen=True, eq=False)
class CellSteps:
    """The steps of a phase of one run that lie in common cells: row numbers, cell and y of each (n,)."""

    run: _Run
    rows: Cells
    cell: Cells
    y: FloatArray

    @staticmethod
    def of(fit: FitResult, run: _Run, rows: Cells, cell: Cells) -> "CellSteps":
        columns = {name: column[rows] for name, column in run.columns.items()}
        return CellSteps(run, rows, cell, np.log(run.data.observed[rows] / typical_ms(fit, Trace(columns))))

    @property
    def weights(self) -> FloatArray:
        return self.run.data.weights[self.rows]

    @cached_property
    def visit(self) -> Cells:
        """The visit that each step is of (n,), from 0 on: steps of a cell one after another; a row that stands for
        several steps is one by itself."""
        if not self.run.data.single:
            return np.arange(len(self.rows))
        of_row = np.full(len(self.run.data), -1)
        of_row[self.rows] = self.cell
        visit, count = np.zeros(len(of_row)), 0
        for run in self.run.data.runs:
            visit[run] = count + np.cumsum(np.diff(of_row[run], prepend=-2) != 0)
            count = int(visit[run[-1]]) + 1
        return numbered([visit[self.rows]])

    @cached_property
    def visited(self) -> Cells:
        """The cell of each visit."""
        return self.cell[np.unique(self.visit, return_index=True)[1]]

    def mean_of(self, kept: FloatArray) -> FloatArray:
        """Mean of y in each cell (m,) over so many of its visits (m,), evenly from all."""
        visits = by_group(self.y, self.visit, self.weights)
        order = np.argsort(self.visited, kind="stable")
        count = np.bincount(self.visited)
        rank = np.empty(len(order))
        rank[order] = np.arange(len(order)) - np.repeat(np.cumsum(count) - count, count)
        share = (kept / count)[self.visited]
        taken = np.floor((rank + 1) * share + 1e-9) > np.floor(rank * share + 1e-9)
        return by_group(visits.mean[taken], self.visited[taken], visits.size[taken]).mean


@dataclass(frozen=True, eq=False)
class _Side:
    """What one run says of the common cells, each (m,): size in steps, mean of y, weighted squares of its units about
    it, count of units, lowest and highest B and S. repeat: units that are worth an independent one."""

    size: FloatArray
    mean: FloatArray
    squares: FloatArray
    units: FloatArray
    low: Mapping[str, FloatArray]
    high: Mapping[str, FloatArray]
    repeat: float

    @staticmethod
    def of(part: CellSteps, visit: Cells | None) -> "_Side":
        """visit: of each row, where visits are the units; they weigh what their steps do."""
        run, rows, cell, y, weights = part.run, part.rows, part.cell, part.y, part.weights
        low, high = (
            {name: _extreme(run.columns[name][rows], cell, upper) for name in ("B", "S")} for upper in (False, True)
        )
        scale, repeat = len(rows) / weights.sum(), 1.0  # a row may stand for several steps
        if visit is not None:
            first = np.unique(visit, return_index=True)[1]
            counts = np.asarray(np.bincount(visit), dtype=np.float64)
            y, cell, weights = by_group(y, visit, weights).mean, cell[first], counts
        groups = by_group(y, cell, weights)
        if visit is None:
            order = run.data.once("order of time", lambda: TimeOrder.of(run.data))
            repeat = persistence(order.series(rows, y - groups.mean[cell])).steps_for_one
        units = np.asarray(np.bincount(cell), dtype=np.float64)
        return _Side(groups.size, groups.mean, scale * groups.squares, units, low, high, repeat)

    @staticmethod
    def joined(parts: "Sequence[_Side]") -> "_Side":
        """The cells of several phases."""
        size, mean, squares, units = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("size", "mean", "squares", "units")
        )
        low, high = (
            {name: np.concatenate([getattr(part, end)[name] for part in parts]) for name in ("B", "S")}
            for end in ("low", "high")
        )
        return _Side(size, mean, squares, units, low, high, max(part.repeat for part in parts))

    @property
    def freedom(self) -> float:
        return float((self.units - 1).sum())


def _extreme(column: FloatArray, cell: Cells, upper: bool) -> FloatArray:
    """The least or largest value in each cell (m,)."""
    found = np.full(int(cell.max()) + 1, -math.inf if upper else math.inf)
    (np.maximum if upper else np.minimum).at(found, cell, column)
    return found


def _sides(parts: Sequence[CellSteps]) -> tuple[list[_Side], bool]:
    """Both runs by cell, and whether their units show all that a cell's mean varies by."""
    by_step = [_Side.of(part, None) for part in parts]
    if all(part.run.data.in_time for part in parts):
        return by_step, True
    if not all(part.run.data.single for part in parts):
        return by_step, False
    by_visit = [_Side.of(part, part.visit) for part in parts]
    if sum(side.freedom for side in by_visit) < FREEDOM:
        return by_step, False
    return (by_visit if _differ(by_step, by_visit) else by_step), True


def _paired(parts: Sequence[CellSteps]) -> FloatArray | None:
    """Differences of cells (m,) that are symmetric about their change: of as many visits in one run as in the other.
    None where noise follows the order of steps, so that cells may share it, or where cells were visited so unevenly
    that ranks, which count them alike, would lose much."""
    if any(part.run.data.in_time for part in parts):
        return None
    first, other = counts = [np.bincount(part.visited).astype(np.float64) for part in parts]
    if max(first.sum() / other.sum(), other.sum() / first.sum()) > UNBALANCED:
        counts = [np.minimum(first, other)] * 2
    v = 1 / counts[0] + 1 / counts[1]
    if len(v) > MOST_RANKED or float(np.mean(v) * np.mean(1 / v)) > UNEVEN:
        return None
    return parts[1].mean_of(counts[1]) - parts[0].mean_of(counts[0])


def _differ(by_step: Sequence[_Side], by_visit: Sequence[_Side]) -> bool:
    """Whether visits of a cell differ by more than its steps would, dealt to them at random: by the share of squares
    that is between visits, Beta((K-1)/2, (n-K)/2) for n steps in K visits whatever the cell's variance is."""
    excess = variance = 0.0
    for step, visit in zip(by_step, by_visit, strict=True):
        again = (visit.units > 1) & (step.squares > 0)
        a, b = (visit.units[again] - 1) / 2, (step.units - visit.units)[again] / 2
        excess += float(np.sum(visit.squares[again] / step.squares[again] - a / (a + b)))
        variance += float(np.sum(a * b / ((a + b) ** 2 * (a + b + 1))))
    return variance == 0 or excess > ALIKE * math.sqrt(variance)


@dataclass(frozen=True, eq=False)
class _Matched:
    """Common cells: the two runs, regions, d of each cell (m,), v (m,) as derived above, the stratum whose variance it
    is (m,) and the degrees of freedom of that by stratum."""

    sides: Sequence[_Side]
    regions: Sequence[Cells]
    d: FloatArray
    v: FloatArray
    stratum: Cells
    freedom: FloatArray
    paired: FloatArray | None

    @staticmethod
    def of(sides: Sequence[_Side], known: bool, paired: FloatArray | None) -> "_Matched":
        """Strata are what the cuts of all regions leave. known: whether units show all that a cell's mean varies by.
        paired: as of `_paired`."""
        place = _place(sides)
        regions = _regions(place, _least(sides))
        d = sides[1].mean - sides[0].mean
        stratum = numbered([np.isin(np.arange(len(d)), region).astype(np.float64) for region in regions])
        repeated = sum(side.freedom for side in sides) >= FREEDOM
        v, freedom = _explained(sides, stratum) if repeated else _alone(sides)
        if len(d) >= (FEWEST_NEIGHBOURS if repeated else FEWEST_CELLS):
            orders = (np.lexsort((place[0], place[1])), np.lexsort((place[1], place[0])))
            beyond = min(_scatter(d, v, order) for order in orders)
            if not repeated or (beyond > 1 and not known):  # neighbours tell the noise
                stratum, freedom = np.zeros(len(d), np.intp), np.array([(len(d) - 1) / 2])
            v = v * (max(beyond, 1.0) if repeated else beyond)
        elif not repeated:
            v = np.full(len(d), math.inf)
        return _Matched(sides, regions, d, v, stratum, freedom, paired)

    def estimate(self, cells: Cells) -> _Estimate:
        v = self.v[cells]
        w = 1 / v if np.all(v > 0) and np.all(np.isfinite(v)) else np.ones(len(v))
        ratio = float(w @ self.d[cells] / w.sum())
        share = np.bincount(self.stratum[cells], w**2 * v, len(self.freedom)) / w.sum() ** 2
        weight = np.bincount(self.stratum[cells], w, len(self.freedom)) / w.sum()
        error = math.sqrt(float(share.sum()))
        below = float(np.sum(share**2 / self.freedom)) if math.isfinite(error) else 0.0
        freedom = error**4 / below if below > 0 else 1.0
        error *= math.sqrt(1 + 4 * float(np.sum(weight * (1 - weight) / self.freedom)))
        return _Estimate(ratio, error, freedom, _region_of(self.sides, cells))


def _region_of(sides: Sequence[_Side], cells: Cells) -> RegionChange:
    """Some cells, without their change."""
    ends = [
        (
            min(float(side.low[name][cells].min()) for side in sides),
            max(float(side.high[name][cells].max()) for side in sides),
        )
        for name in ("B", "S")
    ]
    counts = [round(float(side.size[cells].sum())) for side in sides]
    return RegionChange(ends[0], ends[1], len(cells), counts[0], counts[1])


def _place(sides: Sequence[_Side]) -> FloatArray:
    """ln B and ln S of the middle of each cell (2, m)."""
    return np.log([sides[0].low[name] * sides[0].high[name] for name in ("B", "S")]) / 2


def _least(sides: Sequence[_Side]) -> FloatArray:
    """Steps of each cell (m,) that both runs have at least."""
    return np.minimum(sides[0].size, sides[1].size)


def _scatter(d: FloatArray, v: FloatArray, order: Cells) -> float:
    """How many times more neighbours differ than v explains: the mean of the lower three quarters of squared
    differences beside that of chi-squared, so that an edge of a region counts as no noise."""
    gaps = np.sort(np.diff(d[order]) ** 2 / np.maximum(v[order][1:] + v[order][:-1], 1e-300))
    return float(gaps[: math.ceil(KEPT * len(gaps))].mean()) / KEPT_MEAN


def _alone(sides: Sequence[_Side]) -> tuple[FloatArray, FloatArray]:
    """v of each cell (m,) but for a factor, from counts alone, and no degrees of freedom."""
    v = np.asarray(sides[0].repeat / sides[0].size + sides[1].repeat / sides[1].size)
    return v, np.ones(len(v))


def _explained(sides: Sequence[_Side], stratum: Cells) -> tuple[FloatArray, FloatArray]:
    """v of each cell (m,) by what the units of each run differ by within cells, and its degrees of freedom by stratum
    after Satterthwaite. A run with too few takes those of both."""
    both = replace(sides[0], squares=sides[0].squares + sides[1].squares, units=sides[0].units + sides[1].units - 1)
    own = [_within(side if side.freedom >= FREEDOM else both, stratum) for side in sides]
    parts = [variance * side.repeat / side.size for (variance, _), side in zip(own, sides, strict=True)]
    freedoms = [np.maximum(freedom / side.repeat, 1.0) for (_, freedom), side in zip(own, sides, strict=True)]
    shares = [np.bincount(stratum, part) for part in parts]
    below = shares[0] ** 2 / freedoms[0] + shares[1] ** 2 / freedoms[1]
    freedom = np.where(below > 0, (shares[0] + shares[1]) ** 2 / np.maximum(below, 1e-300), freedoms[0])
    return parts[0] + parts[1], freedom


def _within(side: _Side, stratum: Cells) -> tuple[FloatArray, FloatArray]:
    """Variance of one step of each cell (m,), and its degrees of freedom by stratum; those of all cells for a stratum
    with too few."""
    freedom, squares = side.units - 1, side.squares
    each = (freedom, squares, squares**2 / (freedom + 2))
    own, total, scattered = (np.asarray(np.bincount(stratum, column), float) for column in each)
    few = own < FREEDOM
    own, total, scattered = (np.where(few, column.sum(), column) for column in (own, total, scattered))
    worth = np.where(scattered > 0, np.minimum(own, total**2 / np.maximum(scattered, 1e-300)), own)
    return (total / own)[stratum], worth


def _regions(place: FloatArray, weight: FloatArray) -> list[Cells]:
    """All cells, and the parts of them that are tested by themselves. place: ln B and ln S (2, m).  weight: steps."""
    everything = np.arange(len(weight))
    found = [everything]
    for axis in sorted((0, 1), key=lambda each: -float(np.ptp(place[each]))):
        found += (halves := _halves(everything, place[axis], weight))
        if len(found) <= 1 + len(halves):  # the halves along the wider axis, each cut across, or else along
            for half in halves:
                found += _halves(half, place[1 - axis], weight) or _halves(half, place[axis], weight)
    return [part for i, part in enumerate(found) if not any(np.array_equal(part, each) for each in found[:i])]


def _halves(part: Cells, along: FloatArray, weight: FloatArray) -> list[Cells]:
    """The cells below and above the median step along an axis; none where a half would hold too little."""
    order = part[np.argsort(along[part])]
    middle = along[order][np.searchsorted(np.cumsum(weight[order]), weight[part].sum() / 2)]
    for below in (along[part] <= middle, along[part] < middle):
        halves = [part[below], part[~below]]
        if all(len(half) >= FEWEST_CELLS and weight[half].sum() >= ENOUGH_STEPS for half in halves):
            return halves
    return []


# By fits -------------------------------------------------------------------------------------------------------------


def _by_common_steps(first: FitResult, other: FitResult, runs: Sequence[_Run], phase: str) -> _Phase | None:
    """A phase whose cells do not match, by both fits on steps of both runs in the common range; None where either has
    none there."""
    parts = []
    for run in runs:
        rows = np.flatnonzero(run.phase == phase)
        rows = rows[_inside(run, rows, runs)]
        if not len(rows):
            return None
        parts.append(rows[np.linspace(0, len(rows) - 1, min(len(rows), MOST_POINTS)).astype(np.intp)])
    columns = {
        name: np.concatenate([run.columns[name][rows] for run, rows in zip(runs, parts, strict=True)])
        for name in runs[0].columns
    }
    return _predicted(first, other, columns, phase)


def _by_grid(first: FitResult, other: FitResult) -> list[_Phase]:
    """Phases by fits alone, on a geometric grid of their common range, at the mean of their typical contexts."""
    axes = {}
    for name in ("B", "S"):
        low = max(fit.domain[name][0] for fit in (first, other))
        high = min(fit.domain[name][1] for fit in (first, other))
        axes[name] = np.unique(np.round(np.geomspace(max(low, 1.0), high, GRID_SIDE))).astype(np.float64)
    B, S = (np.asarray(axis.ravel(), dtype=np.float64) for axis in np.meshgrid(axes["B"], axes["S"]))
    prefill = FitResult.holds_prefill(B, S) & (S > B)
    decode = axes["B"][axes["B"] >= axes["S"][0] / 2]
    phases = [(DECODE, decode, decode)]
    if first.knows_prefill and other.knows_prefill:
        phases.append((UNKNOWN, B[prefill], S[prefill]))
    known = [fit.typical for fit in (first, other) if fit.typical]
    names = {name for typical in known for name in typical}
    typical = {name: float(np.mean([each[name] for each in known if name in each])) for name in names}
    found = [
        _predicted(first, other, dict(with_typical_context({"B": B, "S": S}, typical)), phase)
        for phase, B, S in phases
        if len(B)
    ]
    if not found:
        raise BadInput("the fits have no common step (S >= B)", remedy="Compare fits of steps that overlap in B and S.")
    return found


def _predicted(first: FitResult, other: FitResult, columns: Mapping[str, FloatArray], phase: str) -> _Phase:
    """A phase by what both fits say of steps."""
    place = np.log([columns["B"], columns["S"]])
    ratio = np.log(typical_ms(other, Trace(columns)) / typical_ms(first, Trace(columns)))
    drawn = _ratio_draws(first, other, columns)
    misfit = _lack_of_fit(first, phase) ** 2 + _lack_of_fit(other, phase) ** 2
    same = first.model == other.model and np.array_equal(first.theta, other.theta)
    found = []
    # Points are no measurements: as many as a region has to hold stand for enough of them.
    for part in _regions(place, np.full(len(ratio), float(ENOUGH_STEPS))):
        spread = 0.0 if drawn is None else float(np.var(np.median(drawn[:, part], axis=1)))
        ends = [(float(columns[name][part].min()), float(columns[name][part].max())) for name in ("B", "S")]
        region = RegionChange(ends[0], ends[1], len(part), 0, 0)
        error = 0.0 if same else math.sqrt(spread + misfit)
        found.append(_Estimate(float(np.median(ratio[part])), error, math.inf, region))
    return _Phase(phase, "fits", found)


def _ratio_draws(first: FitResult, other: FitResult, columns: Mapping[str, FloatArray]) -> FloatArray | None:
    """ln of the ratio (draws, n) over what the data leave open of both fits' parameters; None where one keeps none.

    Both may have drawn by the same random numbers, which would cancel: those of the second are put in another order.
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


def _lack_of_fit(fit: FitResult, phase: str) -> float:
    """Standard deviation of ln T that a model's error has in a phase beyond the noise of repeated steps."""
    errors = fit.cross_validation.errors
    held_out = (errors.by_phase or {}).get(phase, errors.mape_pct) if errors else 0.0
    floor = (fit.diagnostics.lack_of_fit or {}).get("floor_mape_pct") or 0.0
    return math.sqrt(math.pi / 2 * max(held_out**2 - floor**2, 0.0)) / 100
