"""SciPy's trust region from starts that know nothing of a model's structure: the peer of the fit's solver."""

import numpy as np
from scipy.optimize import least_squares

from latfit.fitting.problem import FitProblem
from latfit.fitting.solver.levenberg_marquardt import Descents, Minimum
from latfit.fitting.solver.objective import RHO
from latfit.stats import FloatArray, weighted_quantile

RANDOM_SPREAD = 2.0


def naive_points(problem: FitProblem, wanted: int) -> list[FloatArray]:
    """Return starts in z that ignore the structure: the textbook one, zero, and random ones of order one."""
    rng = np.random.default_rng(problem.options.seed)
    drawn = rng.normal(0.0, RANDOM_SPREAD, (max(wanted - 1, 0), len(problem.free)))
    drawn[:1] = 0.0
    positive = [p.positive for p in problem.free_parameters]
    signed = np.abs(drawn) * np.where(positive, np.sign(drawn), 1.0)
    return [problem.coordinates(textbook_start(problem)), *np.clip(signed, problem.lower, problem.upper)]


def textbook_start(problem: FitProblem) -> FloatArray:
    """Return the textbook start of the saturation model, as theta (p,).

    P_max is the 95th percentile of S/T, k_B and k_S a tenth and a hundredth of their scale, tau_0 half the 5th
    percentile of T. Shapes start in the middle of their range, other coefficients small.
    """
    T, weights = problem.observed, problem.weights
    guess = {
        "tau_0": 0.5 * weighted_quantile(T, 0.05, weights),
        "w_0": 1.0,
        "w_1": 1.0,
        "P_max": weighted_quantile(problem.steps["S"] / T, 0.95, weights),
    }
    factor = {"k_B": 0.1, "k_S": 0.01}
    theta = np.empty(len(problem.scales))
    for i, (parameter, scale) in enumerate(zip(problem.model.parameters, problem.scales, strict=True)):
        small = 1.0 if parameter.positive else 0.01
        value = guess.get(parameter.name, factor.get(parameter.name, small) * float(scale))
        theta[i] = problem.fixed.get(parameter.name, value)
    return theta


def trust_region(descent: Descents, start: FloatArray) -> Minimum:
    """Minimise by SciPy's trust-region reflective algorithm on all rows, without priors."""
    problem, rows = descent.problem, descent.rows
    rho, sizes = RHO[problem.options.loss], rows.sizes
    with np.errstate(all="ignore"):  # aliased columns cause division by zero in SciPy's subproblem
        result = least_squares(
            lambda z: rows.by_row(rows.predicted(z)) - rows.y,
            np.clip(start, problem.lower, problem.upper),
            jac=lambda z: np.repeat(problem.jacobian(z), sizes, axis=0),
            bounds=(problem.lower, problem.upper),
            method="trf",
            x_scale="jac",
            loss=lambda z: np.asarray(rho(z) * rows.weights),
            f_scale=float(descent.f_scale[0]),
            ftol=1e-11,
            xtol=1e-11,
            gtol=1e-11,
            max_nfev=400,
        )
    return Minimum(result.x, descent.cost(result.x), bool(result.status > 0))
