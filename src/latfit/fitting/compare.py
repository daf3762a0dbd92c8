"""Compare runs: latency ratio per phase and per region of (B, S), with simultaneous confidence intervals.

Noise is that of blocks: visits to a cell, stretches of time, or whole runs. See docs/theory/fitting.md#comparing-runs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from latfit.errors import BadInput
from latfit.fitting.data import FitData, fit_data, medians, numbered
from latfit.fitting.prediction import read_columns_of, typical_ms
from latfit.model import FitResult, step_draws, with_typical_context
from latfit.records import Record
from latfit.stats import FloatArray, by_group, distinct, mad_sigma, student_quantile
from latfit.trace import DECODE, UNKNOWN, Trace
from latfit.units import number

Verdict = Literal["slower", "slower within tolerance", "faster", "as fast", "unclear"]
Rows = NDArray[np.intp]

LEVEL = 0.95  # of all lower ends of a comparison together, and of all upper ends
CELL_COLUMNS = ("B", "S", "prefill_tokens", "context_tokens")
CELLS_PER_OCTAVE = 4
MIN_MATCHED_STEPS = 8  # of each run; with fewer a phase is not compared by steps
MIN_REGION_CELLS, MIN_REGION_STEPS = 5, 40
LOG_BLOCKS = 12  # stretches of time per log: longer than the noise stays, enough for a test
CLIP, CLIP_ROUNDS = 3.0, 6  # robust standard deviations up to which a block counts
MIN_FREEDOM = 1.0  # degrees of freedom of an interval
MAX_LOG_RATIO = 700.0  # beyond it exp overflows
GRID_SIDE = 25  # points of an axis on which fits are compared


@dataclass(frozen=True, eq=False)
class Measured:
    fit: FitResult
    steps: FitData | None = None

    @staticmethod
    def of(fit: FitResult, trace: Trace | None) -> "Measured":
        return Measured(fit, None if trace is None else fit_data(trace))


class RegionChange(Record, frozen=True):
    """Latency change of a region in percent of the baseline's, with its simultaneous interval."""

    B: tuple[float, float]  # ends of the region
    S: tuple[float, float]
    cells: int  # number of common cells, or of points where fits are compared
    baseline_steps: int  # in these cells; 0 by fits
    steps: int
    change_pct: float = 0.0
    low_pct: float | None = None  # None where the data do not suffice for an interval
    high_pct: float | None = None
    verdict: Verdict = "unclear"

    def overlaps(self, other: "RegionChange") -> bool:
        return all(max(one[0], two[0]) <= min(one[1], two[1]) for one, two in ((self.B, other.B), (self.S, other.S)))


def judge(low_pct: float | None, high_pct: float | None, tolerance_pct: float) -> Verdict:
    """Compare an interval with the tolerance and with zero; unclear if it contains the tolerance."""
    if low_pct is None or high_pct is None:
        return "unclear"
    if low_pct > tolerance_pct:
        return "slower"
    if high_pct < -tolerance_pct:
        return "faster"
    if high_pct > tolerance_pct:
        return "unclear"
    return "slower within tolerance" if low_pct > 0 else "as fast"


class PhaseChange(RegionChange, frozen=True, kw_only=True):
    """Change of a phase by common cells ("steps") or by predictions ("fits"); slower if any of its regions is."""

    phase: str
    by: Literal["steps", "fits"]
    tolerance_pct: float
    regions: Sequence[RegionChange] = ()

    @property
    def tested(self) -> list[RegionChange]:
        return [self, *self.regions]

    @property
    def verdict_on_whole(self) -> Verdict:
        return judge(self.low_pct, self.high_pct, self.tolerance_pct)

    @property
    def slower(self) -> list[RegionChange]:
        """The whole phase if no region is significantly less slow, else its clearest disjoint regions."""
        floor = self.low_pct or 0.0
        found: list[RegionChange] = [self] if self.verdict_on_whole == "slower" else []
        if found and all(each.high_pct is None or each.high_pct >= floor for each in self.regions):
            return found
        found += [region for region in self.regions if region.verdict == "slower"]
        named: list[RegionChange] = []
        for region in sorted(found, key=lambda each: -(each.low_pct or 0.0)):
            if not any(region.overlaps(other) for other in named):
                named.append(region)
        return named


class Change(Record, frozen=True):
    """How one run, or one side of several runs, differs from the baseline."""

    phases: Sequence[PhaseChange]
    only_in_one: Sequence[str] = ()  # phases that one run did not measure
    starts: tuple[int, int] | None = None  # number of runs of each side, where sides of several runs are compared
    start_sd_pct: float | None = None  # standard deviation between starts, mean over phases

    @property
    def tested(self) -> list[RegionChange]:
        return [region for phase in self.phases for region in phase.tested]

    @property
    def gravest(self) -> Verdict:
        found = {phase.verdict for phase in self.phases}
        order: tuple[Verdict, ...] = ("slower", "unclear", "slower within tolerance", "faster")
        return next((verdict for verdict in order if verdict in found), "as fast")


class Compared(Change, frozen=True, kw_only=True):
    """One run compared with the baseline.

    verdict: the gravest of the phases, but unclear where only the machine may have changed. one_start_each: each side
    is a single start, so the machine may explain a change.
    """

    source: str
    baseline: str
    verdict: Verdict
    system: str = ""
    differs: Sequence[str] = ()
    one_start_each: bool = False

    @classmethod
    def of(cls, change: Change, *, one_start_each: bool = False, **facts: Any) -> "Compared":
        unclear = one_start_each and change.gravest in ("slower", "faster")
        verdict = "unclear" if unclear else change.gravest
        return cls(**structs.asdict(change), verdict=verdict, one_start_each=one_start_each, **facts)

    @property
    def name(self) -> str:
        return f"{self.source} ({self.system})" if self.system else self.source


@dataclass(frozen=True)
class _Estimate:
    region: RegionChange
    ratio: float
    error: float
    freedom: float = math.inf

    def with_interval(self, alpha: float, tolerance_pct: float) -> RegionChange:
        reach = student_quantile(max(self.freedom, 1.0), 1 - alpha) * self.error if self.error else 0.0
        change, low, high = (100 * math.expm1(min(self.ratio + off, MAX_LOG_RATIO)) for off in (0.0, -reach, reach))
        if not math.isfinite(self.error):
            return structs.replace(self.region, change_pct=change)
        verdict = judge(low, high, tolerance_pct)
        return structs.replace(self.region, change_pct=change, low_pct=low, high_pct=high, verdict=verdict)


@dataclass(frozen=True)
class _Phase:
    phase: str
    by: Literal["steps", "fits"]
    estimates: Sequence[_Estimate]

    def with_intervals(self, alpha: float, tolerance_pct: float) -> PhaseChange:
        tested = [estimate.with_interval(alpha, tolerance_pct) for estimate in self.estimates]
        facts = structs.asdict(tested[0])
        if any(each.verdict == "slower" for each in tested):
            facts["verdict"] = "slower"
        return PhaseChange(**facts, phase=self.phase, by=self.by, tolerance_pct=tolerance_pct, regions=tested[1:])


def changes_between(pairs: Sequence[tuple[Measured, Measured]], tolerance_pct: float) -> list[Change]:
    """Compare the runs of each pair, all pairs as one family of tests. Raises BadInput."""
    compared = [_compare_pair(first, other) for first, other in pairs]
    alpha = (1 - LEVEL) / sum(len(phase.estimates) for phases, _ in compared for phase in phases)
    return [Change([each.with_intervals(alpha, tolerance_pct) for each in phases], alone) for phases, alone in compared]


def _compare_pair(first: Measured, other: Measured) -> tuple[list[_Phase], list[str]]:
    _check_overlap(first.fit, other.fit)
    common = _common_steps(first.fit, other.fit)
    names: set[str] = set()
    if first.steps is None or other.steps is None:
        compared = [_compare_fits(first.fit, other.fit, *part) for part in common.items()]
    else:
        runs, compared = [first.steps, other.steps], []
        log = any(data.in_time for data in runs)
        steps = _pool_steps(first.fit, runs, log)
        named = [set(np.unique(steps.phase[steps.run == number]).tolist()) for number in (0, 1)]
        names = set.union(*named)
        for phase in sorted(set.intersection(*named)):
            found = _compare_cells(steps, phase, log)
            if found is None and (grid := common.get(DECODE if phase == DECODE else UNKNOWN)) is not None:
                found = _compare_fits(first.fit, other.fit, phase, grid)
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
class _Steps:
    run: Rows  # number of the run
    phase: NDArray[np.str_]
    cell: Rows  # number of the cell: phase, B, S, prefill and cached tokens to a quarter of an octave
    block: Rows  # number of the block of steps that share their noise
    y: FloatArray  # ln T less that of the baseline's formula
    weights: FloatArray  # steps that each row stands for
    B: FloatArray
    S: FloatArray

    def at(self, rows: NDArray[Any]) -> "_Steps":
        found = _Steps(**{each.name: getattr(self, each.name)[rows] for each in fields(self)})
        return replace(found, cell=distinct(found.cell)[1])

    def of_phase(self, phase: str, runs: int) -> "_Steps | None":
        """Return the steps of a phase in cells that all runs measured; None where too few steps lie in them."""
        some = self.at(self.phase == phase)
        some = some.at(np.all(some.by_cell(some.weights, runs) > 0, axis=0)[some.cell])
        return some if np.all(np.bincount(some.run, some.weights, runs) >= MIN_MATCHED_STEPS) else None

    def by_cell(self, values: FloatArray, runs: int = 2) -> FloatArray:
        """Return sums of values (n,) by run and cell (runs, m)."""
        cells = int(self.cell.max()) + 1
        return np.bincount(self.run * cells + self.cell, values, runs * cells).reshape(runs, cells).astype(np.float64)

    def region(self, first: int = 1) -> RegionChange:
        B, S = ((float(values.min()), float(values.max())) for values in (self.B, self.S))
        of_first, others = (round(float(self.weights[side].sum())) for side in (self.run < first, self.run >= first))
        return RegionChange(B, S, int(self.cell.max()) + 1, of_first, others)


def _pool_steps(fit: FitResult, runs: Sequence[FitData], log: bool) -> _Steps:
    """Return the steps of runs by the columns that all have. Without a named phase, all but decode are one.

    Less the formula of the fit alone: a correction is closer to the steps of its own run than to those of the other.
    """
    names = [name for name in runs[0].steps if all(name in data.steps for data in runs)]
    columns = {name: np.concatenate([data.steps[name] for data in runs]) for name in names}
    phase, T, weights = (
        np.concatenate([getattr(data, name) for data in runs]) for name in ("phase", "observed", "weights")
    )
    if np.any(phase == UNKNOWN):
        phase = np.where(phase == DECODE, phase, UNKNOWN)
    octaves = [np.round(CELLS_PER_OCTAVE * np.log2(1 + columns[name])) for name in CELL_COLUMNS if name in columns]
    cell = numbered([np.unique(phase, return_inverse=True)[1].astype(np.float64), *octaves])
    block, start, count = np.arange(len(T)), 0, len(T)
    for data in runs:
        for rows in (start + own for own in data.runs):
            if log:
                parts = max(1, round(LOG_BLOCKS * len(rows) / len(data)))
                block[rows] = count + np.arange(len(rows)) * parts // len(rows)
            elif data.single:  # else each row is a visit
                block[rows] = count + np.cumsum(np.diff(cell[rows], prepend=-1) != 0)
            count += len(rows) + 1
        start += len(data)
    run = np.repeat(np.arange(len(runs)), [len(data) for data in runs])
    y = np.log(T / typical_ms(structs.replace(fit, correction=None), Trace(columns)))
    return _Steps(run, phase, cell, block, y, weights, columns["B"], columns["S"])


def _compare_cells(steps: _Steps, phase: str, log: bool) -> _Phase | None:
    common = steps.of_phase(phase, 2)
    if common is None:
        return None
    place = np.stack([by_group(np.log(x), common.cell, np.ones(len(x))).mean for x in (common.B, common.S)])
    regions = _split_regions(place, common.by_cell(common.weights).min(axis=0))
    return _Phase(phase, "steps", [_estimate_region(common.at(np.isin(common.cell, cells)), log) for cells in regions])


def _estimate_region(steps: _Steps, log: bool) -> _Estimate:
    """Estimate the change of a region from the medians of visits, or from the means of stretches of a log."""
    first, block = np.unique(steps.block, return_index=True, return_inverse=True)[1:]
    if not log:
        return _estimate(steps.region(), steps.cell[first], steps.run[first], medians(steps.y, block))
    # Remove the level that the runs share in each cell, at the change that their means show.
    sizes, sums = steps.by_cell(steps.weights), steps.by_cell(steps.weights * steps.y)
    shift = np.average(sums[1] / sizes[1] - sums[0] / sizes[0], weights=1 / (1 / sizes).sum(axis=0))
    level = (sums.sum(axis=0) - shift * sizes[1]) / sizes.sum(axis=0)
    means = by_group(steps.y - level[steps.cell], block, steps.weights).mean
    return _estimate(steps.region(), np.zeros(len(first), dtype=np.intp), steps.run[first], means)


def _estimate(region: RegionChange, cell: Rows, side: Rows, y: FloatArray) -> _Estimate:
    """Estimate side 1 less side 0 within cells from blocks (n,), with the variance of both sides pooled."""
    n, n1 = np.bincount(cell), np.bincount(cell, side)
    n0 = n - n1
    weight, spread = n0 * n1 / n, n0 * n1 / n / np.maximum(n - 1, 1)
    ratio, limit = 0.0, math.inf
    for _ in range(CLIP_ROUNDS):
        r = y - ratio * side
        r = r - (np.bincount(cell, r) / n)[cell]
        r = np.clip(r, -limit, limit)
        r = r - (np.bincount(cell, r) / n)[cell]
        ratio += float(side @ r) / float(weight.sum())
        limit = CLIP * mad_sigma(r * np.sqrt(n / (n - 1))[cell]) or math.inf
    variances = spread * np.bincount(cell, r**2)
    total = float(variances.sum())
    left = 1 - 1 / (n.sum() - len(n))  # share of the degrees of freedom within cells that the change leaves
    # Satterthwaite; E v^2 of a variance with n - 1 degrees of freedom is (n + 1) / (n - 1) of its squared mean.
    freedom = left * total**2 / max(float(np.sum(variances**2 / (n + 1))), 1e-300)
    if freedom < MIN_FREEDOM:
        return _Estimate(region, ratio, 0.0 if not np.any(r) else math.inf)
    return _Estimate(region, ratio, math.sqrt(total / left) / float(weight.sum()), freedom)


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


def change_over_starts(first: Sequence[Measured], other: Sequence[Measured], tolerance_pct: float) -> Change:
    """Compare two sides of several runs, each a start of its own and one observation of each phase. Raises BadInput."""
    known = [each.steps for each in (*first, *other) if each.steps is not None]
    if len(known) < len(first) + len(other):
        raise BadInput("a fit without its trace is no run", where="--alternate", remedy="Give traces in place of fits.")
    every, runs = _pool_steps(first[0].fit, known, log=False), len(known)
    named = [set(np.unique(every.phase[every.run == number]).tolist()) for number in range(runs)]
    found = []
    for phase in sorted(set.intersection(*named)):
        steps = every.of_phase(phase, runs)
        if steps is None:
            continue
        sizes, sums = (steps.by_cell(values, runs) for values in (steps.weights, steps.weights * steps.y))
        levels = np.average(sums / sizes, axis=1, weights=sizes.min(axis=0))
        sides = levels[: len(first)], levels[len(first) :]
        freedom = runs - 2
        sd = math.sqrt(sum(float(np.sum((side - side.mean()) ** 2)) for side in sides) / freedom)
        error = sd * math.sqrt(1 / len(first) + 1 / len(other))
        ratio = float(sides[1].mean() - sides[0].mean())
        found.append((_Phase(phase, "steps", [_Estimate(steps.region(len(first)), ratio, error, freedom)]), sd))
    if not found:
        raise BadInput("the runs have no common steps", remedy="Compare runs of one load, so that B and S overlap.")
    phases = [phase.with_intervals((1 - LEVEL) / len(found), tolerance_pct) for phase, _ in found]
    alone = sorted(set.union(*named) - {each.phase for each in phases})
    return Change(phases, alone, (len(first), len(other)), 100 * float(np.mean([sd for _, sd in found])))


# By fits -------------------------------------------------------------------------------------------------------------


def _common_steps(first: FitResult, other: FitResult) -> dict[str, dict[str, FloatArray]]:
    """Return steps on a geometric grid within the region both fits measured, by phase, at the typical context."""
    axes = []
    for name in ("B", "S"):
        low, high = (end(fit.domain[name][i] for fit in (first, other)) for i, end in enumerate((max, min)))
        axes.append(np.unique(np.round(np.geomspace(max(low, 1.0), high, GRID_SIDE))).astype(np.float64))
    B, S = (np.asarray(axis.ravel(), dtype=np.float64) for axis in np.meshgrid(*axes))
    prefill = FitResult.holds_prefill(B, S) & (S > B) & (first.knows_prefill and other.knows_prefill)
    decode = axes[0][axes[0] >= axes[1][0] / 2]
    found, typical = {}, first.typical or other.typical
    for phase, sizes in {DECODE: (decode, decode), UNKNOWN: (B[prefill], S[prefill])}.items():
        measured = ~(first.outside_support(*sizes) | other.outside_support(*sizes))
        if measured.any():
            found[phase] = dict(with_typical_context({"B": sizes[0][measured], "S": sizes[1][measured]}, typical))
    return found


def _compare_fits(first: FitResult, other: FitResult, phase: str, columns: Mapping[str, FloatArray]) -> _Phase:
    ratio = np.log(typical_ms(other, Trace(columns)) / typical_ms(first, Trace(columns)))
    variance = sum(_mean_variance(fit, columns) + model_error_sd(fit, phase) ** 2 for fit in (first, other))
    B, S = ((float(columns[name].min()), float(columns[name].max())) for name in ("B", "S"))
    error = math.sqrt(variance) if np.any(ratio) else 0.0
    return _Phase(phase, "fits", [_Estimate(RegionChange(B, S, len(ratio), 0, 0), float(ratio.mean()), error)])


def _mean_variance(fit: FitResult, columns: Mapping[str, FloatArray]) -> float:
    read = {name: columns[name] for name in dict.fromkeys(["B", "S", *read_columns_of(fit)]) if name in columns}
    drawn = step_draws(fit, read)
    return 0.0 if drawn is None else float(np.var(np.log(drawn).mean(axis=1)))


def model_error_sd(fit: FitResult, phase: str) -> float:
    """Return the standard deviation of a model's error in ln T beyond noise, which does not average out."""
    errors = fit.cross_validation.errors
    held_out = (errors.by_phase or {}).get(phase, errors.mape_pct) if errors else 0.0
    floor = (fit.diagnostics.lack_of_fit or {}).get("floor_mape_pct") or 0.0
    return math.sqrt(math.pi / 2 * max(held_out**2 - floor**2, 0.0)) / 100  # normal errors: sd = MAE * sqrt(pi/2)
