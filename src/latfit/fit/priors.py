"""What is known of parameters before the data, as rows of a fit.

A prior on a parameter, mean m and standard deviation d, enters the cost as one more squared residual r = sigma (theta -
m)/d with sigma the spread of the residuals that the loss's scale stands for. To the covariance it is such a row: it
adds j j' to the Hessian, j = sigma (dtheta/dz)/d, and sigma^2 j j' to the spread of the score, because m is off by d as
a measurement is off by its noise. For a linear model with normal noise that is the Bayesian posterior,
sigma^2 (X'X + sigma^2 D^-2)^-1.
"""

import numpy as np

from latfit.fit.loss import TUNING
from latfit.fit.problem import FitProblem
from latfit.stats import FloatArray


def prior_rows(problem: FitProblem, z: FloatArray, f_scale: float) -> tuple[FloatArray, FloatArray]:
    """(residuals (k,), Jacobian (k, free)) of the k priors on free parameters, in the residuals' unit."""
    names = [p.name for p in problem.free_parameters]
    known = [(names.index(name), *prior) for name, prior in problem.options.priors.items() if name in names]
    J = np.zeros((len(known), len(z)))
    residuals = np.zeros(len(known))
    if not known:
        return residuals, J
    sigma = f_scale / TUNING[problem.options.loss]
    theta = problem.theta(z)
    chain = problem.chain(theta)
    for row, (at, mean, deviation) in enumerate(known):
        residuals[row] = sigma * (theta[problem.free[at]] - mean) / deviation
        J[row, at] = sigma * chain[at] / deviation
    return residuals, J


def with_priors(
    problem: FitProblem, z: FloatArray, f_scale: float, J: FloatArray, slope: float = 1.0
) -> tuple[FloatArray, FloatArray]:
    """(Jacobian (n + k, free), weights (n + k,)) of the rows and the priors after them; slope: mean psi' of the rows,
    which a prior does not share."""
    more = prior_rows(problem, z, f_scale)[1]
    if len(more) == 0:
        return J, problem.weights
    weights = np.concatenate([problem.weights, np.full(len(more), 1.0 / slope)])
    return np.concatenate([J, more]), weights
