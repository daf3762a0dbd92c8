"""Profile likelihood: how far one parameter can go before the data object, all others following it.

With C(x) the least cost over the other parameters while one is held at x, D(x) = 2 (C(x) - C_min)/v rises from zero at
the estimate and is chi^2 with one degree of freedom at the true value; the 95 % set is {D <= 3.84}. For least squares v
is the variance of the residuals. For a robust loss it is mean(psi^2)/mean(psi'), which makes D the robust likelihood
ratio (Heritier & Ronchetti 1994). Where rows of one cell share a shift, v grows by the ratio of the sandwich variance
of the parameter to the one without the shift.

A search along the slope can miss a valley (as P_max grows without end, nothing depends on it any more), so the others
start from where they ended last and from the best costs, by non-negative least squares, at rates in other regimes.

The end of the set is bracketed by growing steps outward, the first as long as the curvature says, each started where
the last one ended, then found by false position to a fiftieth of its distance. A set that reaches the edge of the
search range is open there: its end is None, and the estimate one-sided.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from latfit.fitting.problem import FitProblem
from latfit.fitting.solver.levenberg_marquardt import minimise
from latfit.fitting.solver.loss import score_factor, score_slope
from latfit.fitting.solver.objective import Objective, by_cell, remembered, with_priors
from latfit.fitting.solver.solve import Solution
from latfit.fitting.solver.variable_projection import non_negative
from latfit.fitting.uncertainty.covariance import CHI2_95, one_row_a_cell, sandwich_root
from latfit.fitting.uncertainty.identifiability import decompose
from latfit.stats import FloatArray

_FIRST_STEP = 0.05
_GROWTH = 2.5
_CLOSE = 0.02
CROSSINGS, CLOSE_EXCESS = 30, 1e-3
"""Most steps towards a crossing, and the excess, as a share of that at an end, that counts as none."""

STEPS, CLOSE_COST = 60, 1e-10
"""Steps of a fit with one coordinate held, and the share of its cost that they may leave to be gained."""


@dataclass(frozen=True)
class ProfileInterval:
    """95 % set of a parameter; an end that the data leave open is None."""

    name: str
    value: float
    low: float | None
    high: float | None
    unit: str


def profile_interval(
    problem: FitProblem, solution: Solution, name: str, *, sigma: float | None = None
) -> ProfileInterval:
    """Profile-likelihood interval of a free parameter. sigma: spread of the residuals where it is known."""
    position = [p.name for p in problem.free_parameters].index(name)
    v = sigma**2 if sigma is not None else deviance_unit(problem, solution, position)
    ends = [_end(problem, solution, position, v, side) for side in (-1, 1)]
    low, high = (None if end is None else _value(problem, position, end) for end in ends)
    value = _value(problem, position, float(solution.z[position]))
    return ProfileInterval(name, value, low, high, problem.free_parameters[position].unit)


def _best_costs(problem: FitProblem, theta: FloatArray, held: int) -> FloatArray:
    """theta (p,) with its linear costs at their best, the outer parameters and the held one as they are."""
    model = problem.model
    index = {p.name: i for i, p in enumerate(model.parameters)}
    outer = np.array([theta[index[name]] for name in model.outer])
    X = model.basis(outer, problem.steps)
    own = model.gradient(theta, problem.steps)[:, held]
    same = np.all(np.isclose(X, own[:, None], rtol=1e-9, atol=0), axis=0)
    rest = np.maximum(problem.observed - (theta[held] * own if same.any() else 0.0), 0.0)
    weight = problem.weights / (problem.observed**2 if problem.options.residuals == "relative" else 1.0)
    coefficients = np.zeros(X.shape[1])
    coefficients[~same] = non_negative(X[None, :, ~same], rest[None], weight[None])[0]
    coefficients[same] = theta[held]
    found = model.assemble(outer, coefficients)
    return np.array([problem.fixed.get(p.name, found[i]) for i, p in enumerate(model.parameters)])


class Held:
    """The problem with one coordinate held; remembers where the others ended last."""

    def __init__(self, problem: FitProblem, solution: Solution, position: int) -> None:
        self._problem, self._position = problem, position
        self._others = np.delete(solution.z, position)
        self._objective = Objective(by_cell(remembered(problem)), solution.f_scale)

    def cost(self, x: float, enough: float = -math.inf) -> float:
        """Least cost over the others with the coordinate at x; another valley is tried where it is above `enough`."""
        if len(self._others) == 0:
            return self._at(x, self._others)
        cost, others = self._from(x, self._others)
        if cost > enough:
            far = [np.delete(z, self._position) for z in self._far(x)]
            if far:
                cost, others = min(
                    (cost, others), self._from(x, min(far, key=partial(self._at, x))), key=lambda e: e[0]
                )
        self._others = others
        return cost

    def _far(self, x: float) -> Iterator[FloatArray]:
        """Starts in other valleys, where search along a slope would not get: the best costs for rates that are the
        present ones, or full at once, or in the middle of the data."""
        problem, model = self._problem, self._problem.model
        theta = problem.theta(self._full(x, self._others))
        index = {p.name: i for i, p in enumerate(model.parameters)}
        name = problem.free_parameters[self._position].name
        for reach in (None, 5.0, 1.0):
            moved = theta.copy()
            for rate, column in model.rates if reach is not None else ():
                if reach is not None and rate != name and rate not in problem.fixed:
                    at = np.min(problem.steps[column]) if reach > 1 else np.median(problem.steps[column])
                    moved[index[rate]] = reach / float(at)
            with contextlib.suppress(ValueError, RuntimeError, np.linalg.LinAlgError):
                yield problem.coordinates(_best_costs(problem, moved, index[name]))

    def _from(self, x: float, start: FloatArray) -> tuple[float, FloatArray]:
        lower, upper = self._problem.lower.copy(), self._problem.upper.copy()
        lower[self._position] = upper[self._position] = x
        end = minimise(self._objective, self._full(x, start), STEPS, CLOSE_COST, (lower, upper))
        return end.cost, np.delete(end.z, self._position)

    def full(self, x: float) -> FloatArray:
        """All coordinates where the last one tried ended."""
        return self._full(x, self._others)

    def _at(self, x: float, rest: FloatArray) -> float:
        return self._objective.cost(self._full(x, rest))

    def _full(self, x: float, rest: FloatArray) -> FloatArray:
        return np.insert(rest, self._position, x)


def _end(problem: FitProblem, solution: Solution, position: int, v: float, side: int) -> float | None:
    """The coordinate at which D crosses 3.84 on one side; None where it does not before the edge of the range."""
    held = Held(problem, solution, position)
    start = float(solution.z[position])
    edge = float((problem.lower if side < 0 else problem.upper)[position])
    allowed = 0.5 * CHI2_95 * v

    def excess(x: float) -> float:
        return held.cost(x, solution.cost + allowed) - solution.cost - allowed

    step, inside = _first_step(problem, solution, position, v), start
    while True:
        x = inside + side * step
        outside = min(x, edge) if side > 0 else max(x, edge)
        if side * (outside - inside) <= 0:
            return None
        if excess(outside) > 0:
            return _crossing(excess, inside, outside, _CLOSE * min(abs(outside - start), 1.0))
        inside, step = outside, step * _GROWTH


def _first_step(problem: FitProblem, solution: Solution, position: int, v: float) -> float:
    """The end where D is the parabola of the curvature at the optimum, or a short step where that is further."""
    f_scale = solution.f_scale
    w, slope = problem.weights, score_slope(problem.options.loss, problem.residuals(solution.z), f_scale)
    mean_slope = max(float(w @ slope) / problem.rows, 1e-12)
    known = decompose(*with_priors(problem, solution.z, f_scale, problem.jacobian(solution.z), mean_slope))
    reach = math.sqrt(max(CHI2_95 * v * float(known.inverse()[position, position]) / mean_slope, 0.0))
    return min(reach, _FIRST_STEP) if reach > 0 else _FIRST_STEP


def _crossing(excess: Callable[[float], float], inside: float, outside: float, close: float) -> float:
    """Where the excess, below zero inside and above it outside, changes sign: false position, with the weight of an
    end that stays halved (Illinois), so that both ends close in."""
    low, high = excess(inside), excess(outside)
    for _ in range(CROSSINGS):
        if abs(outside - inside) <= close or not low < 0 < high:
            break
        x = outside - high * (outside - inside) / (high - low)
        reached = excess(x)
        if abs(reached) <= CLOSE_EXCESS * max(-low, high):
            return x
        if reached > 0:
            outside, high, low = x, reached, low / 2
        else:
            inside, low, high = x, reached, high / 2
    return 0.5 * (inside + outside)


def deviance_unit(problem: FitProblem, solution: Solution, position: int) -> float:
    """v of the module's derivation, for the coordinate at a position."""
    r, w = problem.residuals(solution.z), problem.weights
    loss, f_scale = problem.options.loss, solution.f_scale
    psi, slope = r * score_factor(loss, r, f_scale), score_slope(loss, r, f_scale)
    freedom = max(problem.rows - len(solution.z), 1)
    v = float(w @ psi**2) / freedom / max(float(w @ slope) / problem.rows, 1e-12)
    cells = one_row_a_cell(problem)
    J = cells.residual_slopes(cells.theta(solution.z), cells.steps)
    mean_slope = max(float(w @ slope) / problem.rows, 1e-12)
    known = decompose(*with_priors(cells, solution.z, f_scale, J, mean_slope))
    plain = v * known.inverse()[position, position] / mean_slope
    robust = float(np.sum(sandwich_root(problem, solution, J, np.arange(len(solution.z)))[0][:, position] ** 2))
    return v * max(robust / plain, 1.0) if plain > 0 and math.isfinite(robust) else v


def _value(problem: FitProblem, position: int, z: float) -> float:
    index = problem.free[position]
    scale = float(problem.scales[index])
    return scale * (math.exp(z) if problem.free_parameters[position].positive else z)


def within(problem: FitProblem, name: str, low: float, high: float) -> FitProblem:
    """The same problem with another search range for one parameter, in its unit."""
    position = [p.name for p in problem.free_parameters].index(name)
    parameter, scale = problem.free_parameters[position], float(problem.scales[problem.free[position]])
    ends = (low / scale, high / scale)
    lower, upper = problem.lower.copy(), problem.upper.copy()
    lower[position], upper[position] = (math.log(end) for end in ends) if parameter.positive else ends
    return replace(problem, lower=lower, upper=upper)
