"""Where a solver starts: from the search of `separable`, from custom, or at random in the box."""

import numpy as np

from latfit.fit.box import quantile
from latfit.fit.problem import FitProblem
from latfit.fit.separable import search
from latfit.stats import FloatArray

RANDOM_SPREAD = 2.0


def searched_points(problem: FitProblem, f_scale: float, wanted: int) -> list[FloatArray]:
    """Starts in z from the search over the outer parameters, best first."""
    return [problem.coordinates(candidate.theta) for candidate in search(problem, f_scale, wanted)]


def naive_points(problem: FitProblem, wanted: int) -> list[FloatArray]:
    """Starts in z that know nothing of the structure: the customary one, zero, and random ones of order one."""
    rng = np.random.default_rng(problem.options.seed)
    drawn = rng.normal(0.0, RANDOM_SPREAD, (max(wanted - 1, 0), len(problem.free)))
    drawn[:1] = 0.0
    first = problem.coordinates(customary(problem))
    return [first, *(np.clip(np.abs(z) * _signs(problem, z), problem.lower, problem.upper) for z in drawn)]


def _signs(problem: FitProblem, z: FloatArray) -> FloatArray:
    """Costs start above zero, logarithms on either side."""
    return np.where([p.positive for p in problem.free_parameters], np.sign(z), 1.0)


def customary(problem: FitProblem) -> FloatArray:
    """The start that the saturation model's literature uses, in theta: P_max from the 95th percentile of S/T, rates one
    tenth and one hundredth of the scaled axes, half a low quantile of T as fixed cost. Shapes start in the middle of
    their range, and other coefficients small."""
    T, weights = problem.observed, problem.weights
    guess = {
        "tau_0": 0.5 * quantile(T, 0.05, weights),
        "w_0": 1.0,
        "w_1": 1.0,
        "P_max": quantile(problem.steps["S"] / T, 0.95, weights),
    }
    factor = {"k_B": 0.1, "k_S": 0.01}
    theta = np.empty(len(problem.scales))
    for i, (parameter, scale) in enumerate(zip(problem.model.parameters, problem.scales, strict=True)):
        small = 1.0 if parameter.positive else 0.01
        value = guess.get(parameter.name, factor.get(parameter.name, small) * float(scale))
        theta[i] = problem.fixed.get(parameter.name, value)
    return theta
