"""Compare runs: latency ratio per phase and per region of (B, S), with simultaneous confidence intervals.

Common cells are compared step by step, phases without common cells by the predictions of both fits. Noise is that of
blocks: visits to a cell, stretches of time, or whole runs. Method: docs/theory/fitting.md#comparing-runs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from latfit.errors import BadInput
from latfit.fitting.data import FitData, fit_data, medians, numbered
from latfit.fitting.prediction import read_columns_of, typical_ms
from latfit.model import FitResult, latency_draws, parameter_draws, with_typical_context
from latfit.stats import FloatArray, by_group, distinct, mad_sigma
from latfit.trace import DECODE, UNKNOWN, Trace
from latfit.units import number

Verdict = Literal["slower", "slower within tolerance", "faster", "as fast", "unclear"]
Rows = NDArray[np.intp]

LEVEL = 0.95  # of all lower ends of a comparison together, and of all upper ends
CELL_COLUMNS = ("B", "S", "prefill_tokens", "context_tokens")
CELLS_PER_OCTAVE = 4
MIN_MATCHED_STEPS = 8  # of each run; with fewer a phase is not compared by steps
MIN_REGION_CELLS, MIN_REGION_STEPS = 5, 40
LOG_BLOCKS = 12  # stretches of time per log: longer than the noise stays, enough for Student's t
MAX_BLOCK_CORRELATION = 0.8
CLIP, CLIP_ROUNDS = 3.0, 3  # robust standard deviations up to which a visit counts
MAX_LOG_RATIO = 700.0  # beyond it exp overflows
GRID_SIDE = 25  # points of an axis on which fits are compared


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
    """Latency change of a region in percent of the baseline's, with its simultaneous interval."""

    B: tuple[float, float]  # ends of the region
    S: tuple[float, float]
    cells: int  # number of common cells, or of points where fits are compared
    baseline_steps: int  # in these cells; 0 by fits
    steps: int
    change_pct: float = 0.0
    low_pct: float | None = None  # None where the data do not suffice for an interval
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
    """How one run, or one side of several runs, differs from the baseline."""

    phases: Sequence[PhaseChange]
    only_in_one: Sequence[str] = ()  # phases that one run did not measure
    starts: tuple[int, int] | None = None  # number of runs of each side, where sides of several runs are compared
    start_sd_pct: float | None = None  # standard deviation between starts, mean over phases

    @property
    def tested(self) -> list[RegionChange]:
        return [region for phase in self.phases for region in phase.tested]

    def verdict(self, tolerance_pct: float) -> Verdict:
        """Return the gravest verdict of any phase."""
        found = {phase.verdict(tolerance_pct) for phase in self.phases}
        order: tuple[Verdict, ...] = ("slower", "unclear", "slower within tolerance", "faster")
        return next((verdict for verdict in order if verdict in found), "as fast")


@dataclass(frozen=True)
class _Estimate:
    """Estimate of the log ratio in a region, before its level is known."""

    region: RegionChange
    ratio: float
    error: float = math.inf
    freedom: float = 1.0

    def with_interval(self, alpha: float) -> RegionChange:
        """Return the region with ends that each fail with probability alpha, by Student's t."""
        from scipy.special import stdtrit

        reach = float(stdtrit(max(self.freedom, 1.0), 1 - alpha)) * self.error if self.error else 0.0
        change, low, high = (100 * math.expm1(min(self.ratio + off, MAX_LOG_RATIO)) for off in (0.0, -reach, reach))
        if not math.isfinite(self.error):
            return replace(self.region, change_pct=change)
        return replace(self.region, change_pct=change, low_pct=low, high_pct=high)


@dataclass(frozen=True)
class _Phase:
    """What is estimated of a phase, the whole first."""

    phase: str
    by: Literal["steps", "fits"]
    estimates: Sequence[_Estimate]

    def with_intervals(self, alpha: float) -> PhaseChange:
        whole, *regions = [estimate.with_interval(alpha) for estimate in self.estimates]
        return PhaseChange(self.phase, self.by, whole, regions)


def changes_between(pairs: Sequence[tuple[Measured, Measured]]) -> list[Change]:
    """Return how much slower the second run of each pair is, all pairs as one family of tests. Raises BadInput."""
    compared = [_compare_pair(first, other) for first, other in pairs]
    alpha = (1 - LEVEL) / sum(len(phase.estimates) for phases, _ in compared for phase in phases)
    return [Change([phase.with_intervals(alpha) for phase in phases], alone) for phases, alone in compared]


def _compare_pair(first: Measured, other: Measured) -> tuple[list[_Phase], list[str]]:
    """Return the phases, and the names of those in one run only."""
    _check_overlap(first.fit, other.fit)
    common = _common_steps(first.fit, other.fit)
    names: set[str] = set()
    if first.steps is None or other.steps is None:
        compared = [_compare_fits(first.fit, other.fit, *part) for part in common.items()]
    else:
        runs, compared = _align([first.steps, other.steps]), []
        named = [set(np.unique(run.phase).tolist()) for run in runs]
        names = set.union(*named)
        for phase in sorted(set.intersection(*named)):
            found = _compare_cells(first.fit, runs, phase)
            if found is None and (steps := common.get(DECODE if phase == DECODE else UNKNOWN)) is not None:
                found = _compare_fits(first.fit, other.fit, phase, steps)
            compared += [] if found is None else [found]
    if not compared:
        raise BadInput(
            "the runs have no common steps (phase, B, S)", remedy="Compare runs of steps that overlap in B and in S."
        )
    return compared, sorted(names - {phase.phase for phase in compared})


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
    """Steps of a run by the columns and phase names that all compared runs know."""

    data: FitData
    columns: Mapping[str, FloatArray]
    phase: NDArray[np.str_]


def _align(steps: Sequence[FitData]) -> list[_Run]:
    """Keep the columns that all runs have; where one names no phase, all but decode steps are one phase."""
    names = [name for name in steps[0].steps if all(name in data.steps for data in steps)]
    blind = any(np.any(data.phase == UNKNOWN) for data in steps)
    return [
        _Run(
            data,
            {name: data.steps[name] for name in names},
            np.where((data.phase == DECODE) | (not blind), data.phase, UNKNOWN).astype(str),
        )
        for data in steps
    ]


@dataclass(frozen=True, eq=False)
class _Cells:
    """Steps of one run in the cells that all runs measured, (n,) each."""

    run: _Run
    rows: Rows  # row numbers
    cell: Rows  # 0 to m - 1
    y: FloatArray  # ln T less the baseline fit's
    weights: FloatArray  # steps that each row stands for
    block: Rows  # number of the block of steps that share their noise

    @property
    def sizes(self) -> FloatArray:
        """Steps by cell (m,)."""
        return np.asarray(np.bincount(self.cell, self.weights), dtype=np.float64)

    @property
    def means(self) -> FloatArray:
        """Mean of y by cell (m,)."""
        return np.asarray(np.bincount(self.cell, self.weights * self.y) / self.sizes)

    def among(self, cells: Rows) -> "_Cells":
        """Return the steps in some cells, numbered by their place among them."""
        place = np.full(int(self.cell.max()) + 1, -1)
        place[cells] = np.arange(len(cells))
        some = place[self.cell] >= 0
        columns = {name: getattr(self, name)[some] for name in ("rows", "y", "weights", "block")}
        return replace(self, cell=place[self.cell[some]], **columns)

    def in_visits(self) -> "_Cells":
        """Return one step for each visit, with the median of its steps; a row of several steps is a visit."""
        if not self.run.data.single:
            return replace(self, weights=np.ones(len(self.y)), block=np.arange(len(self.y)))
        first = np.unique(self.block, return_index=True)[1]
        y, count = medians(self.y, distinct(self.block)[1]), len(first)
        return _Cells(self.run, self.rows[first], self.cell[first], y, np.ones(count), np.arange(count))


def _visits(data: FitData, rows: Rows, cell: Rows) -> Rows:
    """Return the number of the unbroken series of steps in one cell that each of some rows belongs to."""
    of_row, visit, count = np.full(len(data), -1), np.zeros(len(data), dtype=np.intp), 0
    of_row[rows] = cell
    for run in data.runs:
        visit[run] = count + np.cumsum(np.diff(of_row[run], prepend=-2) != 0)
        count = int(visit[run[-1]]) + 1
    return visit[rows]


def _stretches(data: FitData, rows: Rows) -> Rows:
    """Return the stretch of time that each of some rows lies in, about LOG_BLOCKS over all runs of the trace."""
    stretch, start = np.empty(len(data), dtype=np.intp), 0
    for run in data.runs:
        parts = max(1, round(LOG_BLOCKS * len(run) / len(data)))
        stretch[run] = start + np.arange(len(run)) * parts // len(run)
        start += parts
    return stretch[rows]


def _match(fit: FitResult, runs: Sequence[_Run], phase: str, log: bool) -> list[_Cells]:
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
    for other in cells[1:]:
        common = np.intersect1d(common, other)
    matched = []
    for run, row, cell in zip(runs, rows, cells, strict=True):
        inside = np.isin(cell, common)
        row, cell = row[inside], np.searchsorted(common, cell[inside])
        T = typical_ms(fit, Trace({name: column[row] for name, column in run.columns.items()}))
        block = _stretches(run.data, row) if log else _visits(run.data, row, cell)
        matched.append(_Cells(run, row, cell, np.log(run.data.observed[row] / T), run.data.weights[row], block))
    return matched if len(common) else []


def _compare_cells(fit: FitResult, runs: Sequence[_Run], phase: str) -> _Phase | None:
    """Compare a phase by common cells; None where too few steps lie in them."""
    log = any(run.data.in_time for run in runs)
    parts = _match(fit, runs, phase, log)
    if not parts or min(part.weights.sum() for part in parts) < MIN_MATCHED_STEPS:
        return None
    cell = np.concatenate([part.cell for part in parts])
    sizes = [np.concatenate([part.run.columns[name][part.rows] for part in parts]) for name in ("B", "S")]
    place = np.stack([by_group(np.log(size), cell, np.ones(len(cell))).mean for size in sizes])
    blocks, found = parts if log else [part.in_visits() for part in parts], []
    for cells in _split_regions(place, np.min([part.sizes for part in parts], axis=0)):
        region = _region([part.among(cells) for part in parts])
        found.append(_estimate([part.among(cells) for part in blocks], region, log))
    return _Phase(phase, "steps", found)


def _estimate(parts: Sequence[_Cells], region: RegionChange, log: bool) -> _Estimate:
    """Estimate the change of a region, its standard error from sums over blocks; visits of a grid are clipped."""
    sizes = np.stack([part.sizes for part in parts])
    w = 1 / (1 / sizes).sum(axis=0)
    w /= w.sum()
    n = sizes.sum(axis=0)
    for _ in range(1 if log else CLIP_ROUNDS):
        means = np.stack([part.means for part in parts])
        ratio = float(w @ (means[1] - means[0]))
        level = (sizes[0] * means[0] + sizes[1] * (means[1] - ratio)) / n
        residuals = [part.y - side * ratio - level[part.cell] for side, part in enumerate(parts)]
        if not log and (limit := CLIP * mad_sigma(np.concatenate(residuals))) > 0:
            parts = [
                replace(part, y=part.y - r + np.clip(r, -limit, limit))
                for part, r in zip(parts, residuals, strict=True)
            ]
    lost = np.sqrt(n / np.maximum(n - 1, 1))  # what residuals about a cell's own mean lack
    free = 1 - len(n) / float(n.sum())  # share of the degrees of freedom that these means leave
    variances, freedoms = [], []
    for side, (part, residual) in enumerate(zip(parts, residuals, strict=True)):
        weight = (w / sizes[side])[part.cell] * part.weights
        sums, shares = (np.bincount(part.block, values) for values in (weight * residual * lost[part.cell], weight))
        blocks = 1 / float(shares @ shares)
        if blocks * free <= 2:
            return _Estimate(region, ratio)
        squares, r = float(sums @ sums), 0.0
        if log:
            r = float(sums[1:] @ sums[:-1]) / max(squares, 1e-300) + 1 / blocks
            r = min(max(r, 0.0), MAX_BLOCK_CORRELATION)
        variances.append(squares * (1 + r) / (1 - r) * (blocks / (blocks - 1) if log else 1.0))
        freedoms.append(blocks * free - 1)
    total = sum(variances)
    below = sum(v**2 / f for v, f in zip(variances, freedoms, strict=True))
    return _Estimate(region, ratio, math.sqrt(total), total**2 / below if below > 0 else sum(freedoms))


def _region(parts: Sequence[_Cells], first: int = 1) -> RegionChange:
    """Describe the steps of runs, of which the first are the baseline's, without their change."""
    ends = []
    for name in ("B", "S"):
        values = np.concatenate([part.run.columns[name][part.rows] for part in parts])
        ends.append((float(values.min()), float(values.max())))
    counts = (round(sum(float(part.weights.sum()) for part in side)) for side in (parts[:first], parts[first:]))
    return RegionChange(ends[0], ends[1], len(parts[0].sizes), *counts)


def _split_regions(place: FloatArray, weight: FloatArray) -> list[Rows]:
    """Return all cells, their halves along B and S, and quarters. place: ln B, ln S (2, m); weight: steps (m,)."""
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

    A run is one observation of each phase: the mean over the cells that all runs measured. Raises BadInput.
    """
    known = [each.steps for each in (*first, *other) if each.steps is not None]
    if len(known) < len(first) + len(other):
        raise BadInput("a fit without its trace is no run", where="--alternate", remedy="Give traces in place of fits.")
    runs = _align(known)
    named = [set(np.unique(run.phase).tolist()) for run in runs]
    found = []
    for phase in sorted(set.intersection(*named)):
        parts = _match(first[0].fit, runs, phase, log=False)
        if not parts or min(part.weights.sum() for part in parts) < MIN_MATCHED_STEPS:
            continue
        weights = np.min([part.sizes for part in parts], axis=0)
        levels = np.average([part.means for part in parts], axis=1, weights=weights)
        sides = levels[: len(first)], levels[len(first) :]
        freedom = len(runs) - 2
        sd = math.sqrt(sum(float(np.sum((side - side.mean()) ** 2)) for side in sides) / freedom)
        region = _region(parts, len(first))
        error = sd * math.sqrt(1 / len(first) + 1 / len(other))
        ratio = float(sides[1].mean() - sides[0].mean())
        found.append((_Phase(phase, "steps", [_Estimate(region, ratio, error, freedom)]), sd))
    if not found:
        raise BadInput("the runs have no common steps", remedy="Compare runs of one load, so that B and S overlap.")
    phases = [phase.with_intervals((1 - LEVEL) / len(found)) for phase, _ in found]
    alone = sorted(set.union(*named) - {each.phase for each in phases})
    return Change(phases, alone, (len(first), len(other)), 100 * float(np.mean([sd for _, sd in found])))


# By fits -------------------------------------------------------------------------------------------------------------


def _common_steps(first: FitResult, other: FitResult) -> dict[str, dict[str, FloatArray]]:
    """Return steps on a geometric grid of the fits' common range, by phase, at the typical context."""
    axes = []
    for name in ("B", "S"):
        low, high = (end(fit.domain[name][i] for fit in (first, other)) for i, end in enumerate((max, min)))
        axes.append(np.unique(np.round(np.geomspace(max(low, 1.0), high, GRID_SIDE))).astype(np.float64))
    B, S = (np.asarray(axis.ravel(), dtype=np.float64) for axis in np.meshgrid(*axes))
    prefill = FitResult.holds_prefill(B, S) & (S > B) & (first.knows_prefill and other.knows_prefill)
    decode = axes[0][axes[0] >= axes[1][0] / 2]
    phases = {DECODE: (decode, decode), UNKNOWN: (B[prefill], S[prefill])}
    typical = first.typical or other.typical
    return {phase: dict(with_typical_context({"B": B, "S": S}, typical)) for phase, (B, S) in phases.items() if len(B)}


def _compare_fits(first: FitResult, other: FitResult, phase: str, columns: Mapping[str, FloatArray]) -> _Phase:
    """Compare the predictions of both fits for steps: the mean log ratio."""
    ratio = np.log(typical_ms(other, Trace(columns)) / typical_ms(first, Trace(columns)))
    variance = sum(_mean_variance(fit, columns) + model_error_sd(fit, phase) ** 2 for fit in (first, other))
    B, S = ((float(columns[name].min()), float(columns[name].max())) for name in ("B", "S"))
    error = math.sqrt(variance) if np.any(ratio) else 0.0
    return _Phase(
        phase, "fits", [_Estimate(RegionChange(B, S, len(ratio), 0, 0), float(ratio.mean()), error, math.inf)]
    )


def _mean_variance(fit: FitResult, columns: Mapping[str, FloatArray]) -> float:
    """Return the variance of the mean ln T of steps over the parameter draws of a fit; 0 without draws."""
    draws = parameter_draws(fit)
    if draws is None:
        return 0.0
    read = {name: columns[name] for name in dict.fromkeys(["B", "S", *read_columns_of(fit)]) if name in columns}
    return float(np.var(np.log(latency_draws(fit, draws, **read)).mean(axis=1)))


def model_error_sd(fit: FitResult, phase: str) -> float:
    """Return the standard deviation of a model's error in ln T beyond noise, which does not average out in a region."""
    errors = fit.cross_validation.errors
    held_out = (errors.by_phase or {}).get(phase, errors.mape_pct) if errors else 0.0
    floor = (fit.diagnostics.lack_of_fit or {}).get("floor_mape_pct") or 0.0
    return math.sqrt(math.pi / 2 * max(held_out**2 - floor**2, 0.0)) / 100  # normal errors: sd = MAE * sqrt(pi/2)
