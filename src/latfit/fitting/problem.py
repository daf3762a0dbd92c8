"""The fit problem: rows merged and sorted by cell, residuals, free parameters, their coordinates and search box.

Coordinates z are logarithms for rates and peaks, scaled values for costs. See docs/theory/fitting.md, "Problem".
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from latfit.errors import WrongUsage
from latfit.fitting.correction import Formula, Smoothing
from latfit.fitting.data import Rows, numbered
from latfit.model import LatencyModel, Parameter, Separable, Steps, StepTable, model_named
from latfit.stats import FloatArray, by_group, weighted_quantile

WEIGHTS = ("rows", "segment", "variance")
"""Equal weight per step; equal weight per doubling of S; cells weighted by inverse variance."""

VARIANCE_FLOOR = 0.1  # lower bound of a cell's variance, as a share of the typical one: a few equal rows may be chance


@dataclass(frozen=True)
class Collapsed:
    """Distinct rows (n,), sorted by cell and T."""

    steps: StepTable  # columns that the model uses
    observed: FloatArray  # T in ms
    counts: FloatArray  # steps that each row represents
    cells: NDArray[np.int64]  # cell number
    row_of: NDArray[np.int64]  # distinct row of each row of the data (rows,)


def collapsed(data: Rows, model: LatencyModel) -> Collapsed:
    names = ("B", "S", *(name for name in model.columns if name in data.steps and name not in ("B", "S")))

    def merge() -> Collapsed:
        columns, T = {name: data.steps[name] for name in names}, data.observed
        order = np.lexsort((T, *reversed(columns.values())))
        columns, T = {name: column[order] for name, column in columns.items()}, T[order]
        first = np.ones(len(T), dtype=bool)
        new_cell = first.copy()
        new_cell[1:] = np.any([np.diff(column) != 0 for column in columns.values()], axis=0)
        first[1:] = new_cell[1:] | (np.diff(T) != 0)
        starts = np.flatnonzero(first)
        cells = np.cumsum(new_cell) - 1
        steps = StepTable({name: column[starts] for name, column in columns.items()})
        row_of = np.empty(len(T), dtype=np.int64)
        row_of[order] = np.cumsum(first) - 1
        return Collapsed(steps, T[starts], np.add.reduceat(data.weights[order], starts), cells[starts], row_of)

    return data.once(("collapsed", names), merge)


def weighted_counts(rows: Collapsed, scheme: str) -> FloatArray:
    """Return weights (n,) under a scheme of WEIGHTS, with the total of the counts."""
    counts = rows.counts
    if scheme == "rows":
        return counts
    if scheme == "segment":
        segment = np.floor(np.log2(np.maximum(rows.steps["S"], 1.0))).astype(np.int64)
        factor = 1.0 / np.bincount(segment, weights=counts)[segment]
    else:  # variance of ln T in each cell, shrunk to the typical one with the weight of four rows
        found = by_group(np.log(rows.observed), rows.cells, counts)
        freedom = np.maximum(found.size - 1, 0)
        typical = float(found.squares.sum()) / max(float(freedom.sum()), 1.0)
        variance = ((found.squares + 4 * typical) / (freedom + 4))[rows.cells]
        factor = 1.0 / np.maximum(variance, VARIANCE_FLOOR * float(np.average(variance, weights=counts)) or 1.0)
    weights = counts * factor
    return np.asarray(weights * (counts.sum() / weights.sum()))


RATE_SPAN = (1e-3, 30.0)
"""Search range of a rate: k x_max >= the first, k x_min <= the second; outside, its factor is constant."""

SPAN = 1e6  # search range of other parameters: up to this multiple of their scale, peaks also down to its inverse
ATTENTION_PER_TOKEN = 2e-4
SORTED_BELOW = 20_000
LOW_SHARE = 0.05


def scales(
    model: LatencyModel, steps: Steps, observed: FloatArray, weights: FloatArray, given: Mapping[str, float]
) -> FloatArray:
    """Return the scale of each parameter (p,), positive. given: parameters fixed by the user."""
    some = slice(None, None, max(len(observed) // SORTED_BELOW, 1))
    B, S, T = (weighted_quantile(x[some], 0.5, weights[some]) for x in (steps["B"], steps["S"], observed))
    size = {"ms": T, "request": B, "requests": B, "token": S, "tokens": S}
    means = model.column_means(steps, weights, given) if isinstance(model, Separable) else {}
    found = []
    for parameter in model.parameters:
        mean = means.get(parameter.name, 0.0)
        span = model.span(parameter.name, steps) if parameter.positive else None
        if mean > 0:
            found.append(T / mean)
        elif span is not None:
            found.append(float(np.sqrt(span[0] * span[1])))
        else:
            above, _, below = parameter.unit.partition("/")
            found.append(size.get(above, 1.0) / size.get(below, 1.0))
    return np.array(found)


RESIDUALS = ("relative", "absolute")
TUNING: Mapping[str, float] = {"linear": 1.0, "huber": 1.345, "soft_l1": 1.28710, "tukey": 4.685}
"""Losses with the scale, in standard deviations of normal residuals, at which each is 95 % efficient."""


@dataclass(frozen=True)
class FitOptions:
    """Options of a fit; values of parameters are in their unit."""

    model: str = "auto"  # A model's name, or `auto`
    loss: str = "huber"  # robust loss, see TUNING
    residuals: str = "relative"  # see RESIDUALS
    fixed: Mapping[str, float] = field(default_factory=dict)
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    starts: int = 4  # of the solver, at least
    seed: int = 0
    priors: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # mean and standard deviation
    weights: str = "rows"  # see WEIGHTS
    candidates: tuple[str, ...] = ()  # models that `auto` compares; empty for all that the columns can identify
    window_means: bool = False  # whether the rows are means over windows although no column says so
    correction: Smoothing | None = None  # smoothing of the correction table; None for no correction

    @property
    def constrained(self) -> set[str]:
        """Parameters that the user fixed, bounded or gave a prior."""
        return {*self.fixed, *self.bounds, *self.priors}

    @property
    def of_formula(self) -> "FitOptions":
        return self if self.correction is None else replace(self, correction=None)


@dataclass(frozen=True)
class FitProblem:
    """Rows (steps, observed T in ms, weights; (n,) each), the model, and the box of the free parameters in z."""

    model: LatencyModel
    steps: StepTable
    observed: FloatArray
    weights: FloatArray
    cells: NDArray[np.int64]
    options: FitOptions
    fixed: Mapping[str, float]
    scales: FloatArray
    lower: FloatArray
    upper: FloatArray

    @cached_property
    def free(self) -> list[int]:
        return [i for i, p in enumerate(self.model.parameters) if p.name not in self.fixed]

    @cached_property
    def free_parameters(self) -> list[Parameter]:
        return [self.model.parameters[i] for i in self.free]

    @property
    def rows(self) -> int:
        return round(float(self.weights.sum()))

    @cached_property
    def _positive(self) -> NDArray[np.bool_]:
        """Whether each free parameter (free,) has a logarithmic coordinate."""
        return np.array([p.positive for p in self.free_parameters], dtype=bool)

    @cached_property
    def _held(self) -> FloatArray:
        return np.array([self.fixed.get(p.name, 0.0) for p in self.model.parameters])

    def theta(self, z: FloatArray) -> FloatArray:
        """Return all parameters (..., p) at the free coordinates (..., free)."""
        own = np.array(z, dtype=np.float64)
        own[..., self._positive] = np.exp(own[..., self._positive])
        full = np.empty((*own.shape[:-1], len(self._held)))
        full[...] = self._held
        full[..., self.free] = self.scales[self.free] * own
        return full

    def coordinates(self, theta: FloatArray) -> FloatArray:
        """Return the free coordinates of theta, clipped to the box."""
        with np.errstate(over="ignore"):  # overflow is clipped to the box
            z = [
                np.log(theta[i] / self.scales[i]) if self.model.parameters[i].positive else theta[i] / self.scales[i]
                for i in self.free
            ]
        return np.asarray(np.clip(np.array(z), self.lower, self.upper))

    @property
    def relative(self) -> bool:
        return self.options.residuals == "relative"

    @cached_property
    def unit(self) -> float:
        """A typical latency in the residuals' unit: 1 for relative ones."""
        return 1.0 if self.relative else float(np.median(self.observed))

    def residuals(self, z: FloatArray) -> FloatArray:
        predicted = self.model.latency_ms(self.theta(z), self.steps)
        if not self.relative:
            return np.asarray(predicted - self.observed)
        return np.asarray(np.log(np.maximum(predicted, 1e-300) / self.observed))

    def jacobian(self, z: FloatArray) -> FloatArray:
        return self.residual_slopes(self.theta(z), self.steps)

    @cached_property
    def firsts(self) -> NDArray[np.int64]:
        """First row of each cell (m,)."""
        return np.flatnonzero(np.diff(self.cells, prepend=-1))

    def residual_slopes(self, theta: FloatArray, steps: Steps) -> FloatArray:
        """Return dr/dz (n, free) of any steps."""
        slopes = self.slopes(theta, steps)
        return slopes / np.maximum(self.model.latency_ms(theta, steps), 1e-300)[:, None] if self.relative else slopes

    def slopes(self, theta: FloatArray, steps: Steps) -> FloatArray:
        """Return dT/dz (n, free) of any steps."""
        by_parameter = self.model.gradient(theta, steps).T[self.free]
        return np.asarray((by_parameter * self.chain(theta)[:, None]).T)

    def chain(self, theta: FloatArray) -> FloatArray:
        """Return dtheta/dz (..., free) of the free parameters."""
        return np.where(self._positive, theta[..., self.free], self.scales[self.free])

    def rows_at(self, rows: NDArray[np.int64]) -> "FitProblem":
        return replace(
            self,
            steps=self.steps.at(rows),
            observed=self.observed[rows],
            weights=self.weights[rows],
            cells=self.cells[rows],
        )


def make_problem(data: Rows, options: FitOptions) -> FitProblem:
    model = model_named(options.model)
    _check_options(model, options)
    rows = collapsed(data, model)
    weights = weighted_counts(rows, options.weights)
    held = model.held(rows.steps, weights / rows.observed**2, options.fixed) if isinstance(model, Separable) else {}
    held = {name: value for name, value in held.items() if name not in options.bounds and name not in options.priors}
    natural = {p.name: p.fixed for p in model.parameters if p.fixed is not None}
    problem = FitProblem(
        model=model,
        steps=rows.steps,
        observed=rows.observed,
        weights=weights,
        cells=rows.cells,
        options=options,
        fixed=natural | held | dict(options.fixed),
        scales=scales(model, rows.steps, rows.observed, rows.counts, options.fixed),
        lower=np.empty(0),
        upper=np.empty(0),
    )
    box = np.array([_box(problem, i) for i in problem.free]).reshape(-1, 2)
    return replace(problem, lower=box[:, 0], upper=box[:, 1])


def _check_options(model: LatencyModel, options: FitOptions) -> None:
    parameters = {p.name: p for p in model.parameters}

    def refuse(found: str, where: str, remedy: str) -> None:
        raise WrongUsage(found, where=where, remedy=remedy)

    for option, given in (("--fix", options.fixed), ("--set bounds", options.bounds), ("--set prior", options.priors)):
        for name in given:
            if name not in parameters:
                refuse(f"{model.name} has no parameter {name!r}", option, f"It has {', '.join(parameters)}.")
            if name in options.fixed and given is not options.fixed:
                refuse(f"{name} is fixed and has {option.removeprefix('--set ')}", "--fix", "Give one of the two.")
    for name, value in options.fixed.items():
        least = "above" if parameters[name].positive else "of at least"
        if not np.isfinite(value) or value < 0 or (parameters[name].positive and value == 0):
            meaning = parameters[name].meaning
            refuse(f"{name} = {value:g} is not possible", "--fix", f"Give a number {least} zero ({meaning}).")
    for option, chosen, known in (
        ("--set loss", options.loss, TUNING),
        ("--set residuals", options.residuals, RESIDUALS),
        ("--set weights", options.weights, WEIGHTS),
    ):
        if chosen not in known:
            refuse(f"{chosen!r} is not known", option, f"Choose one of: {', '.join(known)}.")


def _box(problem: FitProblem, index: int) -> tuple[float, float]:
    """Return the search range of a parameter in z: its natural range, narrowed by the user's bounds."""
    model, steps, scale = problem.model, problem.steps, problem.scales[index]
    parameter = model.parameters[index]
    low, high = (scale / SPAN if parameter.positive else 0.0), scale * SPAN
    if column := dict(model.rates).get(parameter.name):
        low, high = RATE_SPAN[0] / float(steps[column].max()), RATE_SPAN[1] / float(steps[column].min())
    elif (span := model.span(parameter.name, steps)) is not None:
        low, high = span
    elif parameter.name == "tau_A":
        high = ATTENTION_PER_TOKEN * weighted_quantile(problem.observed / steps["S"], LOW_SHARE, problem.weights)
    if user := problem.options.bounds.get(parameter.name):
        low, high = max(user[0], 0.0), user[1]
    if parameter.positive:
        low = max(low, 1e-12 * scale)
        return float(np.log(low / scale)), float(np.log(high / scale))
    return low / scale, high / scale


def steps_by_row(problem: FitProblem, rows: Rows) -> StepTable:
    return StepTable({name: rows.steps[name] for name in problem.steps})


def log_ratios(problem: FitProblem, theta: FloatArray, rows: Rows) -> FloatArray:
    """Return ln(observed/predicted) (n,) of rows at parameters theta (p,)."""
    predicted = np.maximum(problem.model.latency_ms(theta, steps_by_row(problem, rows)), 1e-300)
    # logarithms first: a latency over a prediction of nothing overflows
    return np.asarray(np.log(rows.observed) - np.log(predicted))


def formula_of(problem: FitProblem, theta: FloatArray) -> Formula:
    def formula(steps: Mapping[str, FloatArray]) -> FloatArray:
        return problem.model.latency_ms(theta, StepTable(steps))

    return formula


def by_row(problem: FitProblem, rows: Rows) -> FitProblem:
    steps = steps_by_row(problem, rows)
    return replace(
        problem, steps=steps, observed=rows.observed, weights=rows.weights, cells=numbered(list(steps.values()))
    )
