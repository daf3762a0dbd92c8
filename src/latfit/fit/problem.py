"""What is to be fitted: rows, residuals, free parameters and their coordinates.

Residuals are relative by default, r = ln(predicted/observed): to first order the relative error, and its fit is not
biased by multiplicative noise, as (predicted - observed)/observed is (by e^(-1.5 s^2) for log-normal noise s). Absolute
residuals r = predicted - observed, in ms, are an option.

The solver works on z: ln(theta/scale) for parameters that are positive by nature, theta/scale for those that may be
zero, so that z is of order one for any machine. Identical rows count once with their number as weight; rows of a trace
made from cells stand for many steps already.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from latfit.errors import WrongUsage
from latfit.fit.box import natural_range, scales
from latfit.fit.collapse import WEIGHTS, collapse, read_columns, weighted_counts
from latfit.fit.loss import RHO
from latfit.model.family import model_named
from latfit.model.features import StepTable
from latfit.model.separable import Separable
from latfit.model.terms import LatencyModel, Parameter, Steps
from latfit.stats import FloatArray
from latfit.trace.cell_rows import row_weights
from latfit.trace.table import Trace

RESIDUALS = ("relative", "absolute")

SOLVERS = ("separable", "trf")


@dataclass(frozen=True)
class FitOptions:
    """What a user may choose. fixed: {parameter: value}; bounds: {parameter: (low, high)}, priors: {parameter: (mean,
    standard deviation)}, each in the parameter's unit; solver: see SOLVERS; weights: see `collapse.WEIGHTS`."""

    model: str = "saturation"
    loss: str = "huber"
    residuals: str = "relative"
    fixed: Mapping[str, float] = field(default_factory=dict)
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    starts: int = 4
    seed: int = 0
    solver: str = "separable"
    priors: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    weights: str = "rows"


@dataclass(frozen=True)
class FitProblem:
    """Rows (steps, observed T in ms, weights; each (n,)), structure, and the box of the free parameters in z."""

    model: LatencyModel
    steps: Steps
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
        """Indices of the parameters that are searched."""
        return [i for i, p in enumerate(self.model.parameters) if p.name not in self.fixed]

    @cached_property
    def free_parameters(self) -> list[Parameter]:
        return [self.model.parameters[i] for i in self.free]

    @property
    def rows(self) -> int:
        return round(float(self.weights.sum()))

    @cached_property
    def _positive(self) -> NDArray[np.bool_]:
        """Which free parameters (free,) are searched by their logarithm."""
        return np.array([p.positive for p in self.free_parameters], dtype=bool)

    @cached_property
    def _held(self) -> FloatArray:
        """All parameters (p,), zero where they are free."""
        return np.array([self.fixed.get(p.name, 0.0) for p in self.model.parameters])

    def theta(self, z: FloatArray) -> FloatArray:
        """All parameters (p,) from the free coordinates."""
        full, own = self._held.copy(), np.array(z, dtype=np.float64)
        own[self._positive] = np.exp(own[self._positive])
        full[self.free] = self.scales[self.free] * own
        return full

    def coordinates(self, theta: FloatArray) -> FloatArray:
        """Free coordinates of theta, moved into the box."""
        z = [
            np.log(theta[i] / self.scales[i]) if self.model.parameters[i].positive else theta[i] / self.scales[i]
            for i in self.free
        ]
        return np.asarray(np.clip(np.array(z), self.lower, self.upper))

    def residuals(self, z: FloatArray) -> FloatArray:
        return self.residuals_of(self.model.latency_ms(self.theta(z), self.steps))

    def residuals_of(self, predicted: FloatArray) -> FloatArray:
        if self.options.residuals == "absolute":
            return np.asarray(predicted - self.observed)
        return np.asarray(np.log(np.maximum(predicted, 1e-300) / self.observed))

    def jacobian(self, z: FloatArray) -> FloatArray:
        """dr/dz (n, free)."""
        theta = self.theta(z)
        slopes = self.slopes(theta)
        if self.options.residuals == "absolute":
            return slopes
        predicted = np.maximum(self.model.latency_ms(theta, self.steps), 1e-300)
        return slopes / predicted[:, None]

    def slopes(self, theta: FloatArray) -> FloatArray:
        """dT/dz (n, free)."""
        by_parameter = self.model.gradient(theta, self.steps).T[self.free]
        return np.asarray((by_parameter * self.chain(theta)[:, None]).T)

    def chain(self, theta: FloatArray) -> FloatArray:
        """dtheta/dz of the free parameters."""
        return np.where(self._positive, theta[self.free], self.scales[self.free])

    def rows_at(self, rows: NDArray[np.int64]) -> "FitProblem":
        """The same problem on some of its rows."""
        steps = StepTable(self.steps).at(rows)
        return replace(
            self, steps=steps, observed=self.observed[rows], weights=self.weights[rows], cells=self.cells[rows]
        )


def make_problem(trace: Trace, options: FitOptions) -> FitProblem:
    """The problem of fitting `options.model` to a clean trace. Raises WrongUsage for options that cannot be met."""
    model = model_named(options.model)
    _check_options(model, options)
    rows = collapse(trace, read_columns(trace, model.columns), row_weights(trace))
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
    names = [p.name for p in model.parameters]
    for option, given in (("--fix", options.fixed), ("--bounds", options.bounds), ("--prior", options.priors)):
        for name in given:
            if name not in names:
                raise WrongUsage(
                    f"{model.name} has no parameter {name!r}",
                    where=option,
                    remedy=f"Its parameters are {', '.join(names)}.",
                )
    for name, (mean, deviation) in options.priors.items():
        if options.solver == "trf" or not (np.isfinite(mean) and 0 < deviation < np.inf):
            raise WrongUsage(
                f"the prior on {name} cannot be used",
                where="--prior",
                remedy="Give a mean and a standard deviation above zero, and leave out --solver trf.",
            )
    if both := set(options.fixed) & set(options.bounds):
        raise WrongUsage(f"{sorted(both)[0]} is both fixed and bounded", where="--fix", remedy="Give one of the two.")
    for option, value, known in (
        ("--loss", options.loss, tuple(RHO)),
        ("--residuals", options.residuals, RESIDUALS),
        ("--solver", options.solver, SOLVERS),
        ("--weights", options.weights, WEIGHTS),
    ):
        if value not in known:
            raise WrongUsage(f"{value!r} is not known", where=option, remedy=f"Choose one of: {', '.join(known)}.")
    for parameter in model.parameters:
        held = options.fixed.get(parameter.name)
        if held is not None and (not np.isfinite(held) or held < 0 or (parameter.positive and held == 0)):
            raise WrongUsage(
                f"{parameter.name} = {held:g} is not possible",
                where="--fix",
                remedy=f"It is the {parameter.meaning}, {'above' if parameter.positive else 'at least'} zero.",
            )


def _box(problem: FitProblem, index: int) -> tuple[float, float]:
    """Search range of a parameter in z: what the data could show, narrowed by the user's bounds."""
    parameter, scale = problem.model.parameters[index], problem.scales[index]
    low, high = natural_range(problem.model, parameter, scale, problem.steps, problem.observed, problem.weights)
    user = problem.options.bounds.get(parameter.name)
    if user:
        low, high = max(user[0], 0.0), user[1]
    if parameter.positive:
        low = max(low, 1e-12 * scale)
        return float(np.log(low / scale)), float(np.log(high / scale))
    return low / scale, high / scale
