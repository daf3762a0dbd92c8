"""Where the search starts.

Given its rates the model is linear in non-negative coefficients, so each node of a geometric grid over the rates has a
best coefficient vector by non-negative least squares (variable projection, Golub & Pereyra 1973; Lawson & Hanson 1974):

    min_{c >= 0} || W^(1/2) (X(k) c - y) ||^2  =  min_{c >= 0} || R c - R^-T X'W y ||^2 + const,   R'R = X'W X,

which needs only the small triangle R. Rows are weighted by 1/T^2 for relative residuals, then once more with the robust
loss's factors at the first solution. The best nodes that are really different become starts; with them goes the
customary start from quantiles (P_max from the 95th percentile of S/T, rates one tenth and one hundredth of the scaled
axes, half a low quantile of T as fixed cost), which sometimes wins on small data.
"""

import itertools

import numpy as np
from scipy.linalg import solve_triangular
from scipy.optimize import nnls

from latfit.fit.loss import score_factor
from latfit.fit.problem import FitProblem
from latfit.stats import FloatArray, mad_sigma, weighted_quantile

NODES = 12
"""Grid nodes a rate."""

DIFFERENT = 0.8
"""Two nodes closer than this in every log-rate lead to the same optimum."""

_RIDGE = 1e-10


def starting_points(problem: FitProblem) -> list[FloatArray]:
    """Starts in z, best first; at least one."""
    nodes = sorted((_at_node(problem, rates) for rates in _grid(problem)), key=lambda node: node[0])
    starts: list[FloatArray] = []
    taken: list[FloatArray] = []
    for _, rates, theta in nodes:
        distinct = all(len(rates) == 0 or np.max(np.abs(np.log(rates / other))) > DIFFERENT for other in taken)
        if distinct and len(starts) < problem.options.starts:
            taken.append(rates)
            starts.append(problem.coordinates(theta))
    return [*starts, problem.coordinates(_customary(problem))]


def _grid(problem: FitProblem) -> list[FloatArray]:
    axes = []
    for rate, column in problem.model.rates:
        if rate in problem.fixed:
            axes.append(np.array([problem.fixed[rate]]))
            continue
        x = problem.steps[column]
        low, high = problem.options.bounds.get(rate, (0.05 / x.max(), 10 / x.min()))
        varies = x.min() < x.max()
        axes.append(
            np.geomspace(max(low, 1e-12), high, NODES) if varies else np.array([np.sqrt(max(low, 1e-12) * high)])
        )
    return [np.array(node) for node in itertools.product(*axes)]


def _at_node(problem: FitProblem, rates: FloatArray) -> tuple[float, FloatArray, FloatArray]:
    """(cost, rates, theta) of the best non-negative coefficients at one node of the grid."""
    X = problem.model.basis(rates, problem.steps)
    relative = problem.options.residuals == "relative"
    rows = problem.weights / (problem.observed**2 if relative else 1.0)
    coefficients = _nonnegative(X, problem.observed, rows)
    loss = problem.options.loss
    for _ in range(2):
        residuals = problem.residuals_of(X @ coefficients)
        f_scale = max(
            mad_sigma(residuals, problem.weights) * 1.5, 1e-6 * (1 if relative else float(problem.observed.max()))
        )
        coefficients = _nonnegative(X, problem.observed, rows * score_factor(loss, residuals, f_scale))
    cost = float(problem.weights @ np.abs(problem.residuals_of(X @ coefficients)))
    return cost, rates, problem.model.assemble(rates, coefficients)


def _nonnegative(X: FloatArray, y: FloatArray, weights: FloatArray) -> FloatArray:
    """argmin_{c >= 0} sum weights (X c - y)^2, through the normal equations of unit columns with a tiny ridge."""
    size = np.sqrt(weights @ X**2)
    size[size == 0] = 1.0
    unit = X / size
    gram = unit.T @ (unit * weights[:, None]) + _RIDGE * np.eye(X.shape[1])
    triangle = np.linalg.cholesky(gram)
    target = solve_triangular(triangle, unit.T @ (weights * y), lower=True)
    return np.asarray(nnls(triangle.T, target)[0] / size)


def _customary(problem: FitProblem) -> FloatArray:
    """The start that the saturation model's literature uses, for parameters by name; zero for any other."""
    T, weights = problem.observed, problem.weights
    scale = {p.name: problem.scales[i] for i, p in enumerate(problem.model.parameters)}
    peak = weighted_quantile(problem.steps["S"] / T, 0.95, weights)
    guess = {
        "tau_0": 0.5 * weighted_quantile(T, 0.05, weights),
        "w_0": 1.0,
        "w_1": 1.0,
        "P_max": peak,
        "k_B": 0.1 * scale.get("k_B", 0.0),
        "k_S": 0.01 * scale.get("k_S", 0.0),
        "tau_B": 0.01 * scale.get("tau_B", 0.0),
        "tau_S": 0.01 * scale.get("tau_S", 0.0),
    }
    return np.array([problem.fixed.get(p.name, guess.get(p.name, 0.0)) for p in problem.model.parameters])
