"""Priors in the estimate, its covariance, its profile and its resamples: for a line with normal noise they are the
Bayesian posterior, which has a closed form."""

import numpy as np
import pytest

from latfit.fitting.covariance import uncertainty
from latfit.fitting.data import rows_of
from latfit.fitting.problem import FitOptions, FitProblem, make_problem
from latfit.fitting.solver.solve import Solution, solve
from latfit.stats import FloatArray
from latfit.trace.table import Trace

NOISE = 0.5
PRIOR = {"tau_S": (0.03, 0.002)}


def line(rows: int = 400) -> tuple[Trace, FloatArray]:
    """Decode-like steps T = 5 + 0.1 B + 0.02 S with normal noise in ms, and their design (n, 3)."""
    rng = np.random.default_rng(7)
    B, S = rng.integers(1, 9, rows).astype(float), rng.integers(10, 200, rows).astype(float)
    X = np.stack([np.ones(rows), B, S], axis=1)
    return Trace({"B": B, "S": S, "T_ms": X @ [5, 0.1, 0.02] + NOISE * rng.standard_normal(rows)}), X


def solved(trace: Trace, options: FitOptions) -> tuple[FitProblem, Solution]:
    problem = make_problem(rows_of(trace), options)
    return problem, solve(problem)


def posterior(trace: Trace, X: FloatArray, sigma: float) -> tuple[FloatArray, FloatArray]:
    """Mean (3,) and standard deviation (3,) of the costs, sigma being known."""
    mean, deviation = PRIOR["tau_S"]
    known = np.diag([0.0, 0.0, 1 / deviation**2])
    covariance = np.linalg.inv(X.T @ X / sigma**2 + known)
    centre = covariance @ (X.T @ trace["T_ms"] / sigma**2 + known @ [0, 0, mean])
    return centre, np.sqrt(np.diag(covariance))


OPTIONS = FitOptions(model="linear", loss="linear", residuals="absolute", priors=PRIOR)


def test_estimate_and_errors_are_the_posterior() -> None:
    """sigma is estimated from 400 rows, to 1/sqrt(800) = 3.5 %; the sandwich's errors to about as much again."""
    trace, X = line()
    problem, solution = solved(trace, OPTIONS)
    estimates = uncertainty(problem, solution).estimates
    centre, spread = posterior(trace, X, NOISE)
    for name, value, error in zip(("tau_0", "tau_B", "tau_S"), centre, spread, strict=True):
        assert estimates[name].value == pytest.approx(value, abs=0.15 * error)
        assert estimates[name].std_error == pytest.approx(error, rel=0.15)


def test_a_prior_identifies_what_the_steps_alone_do_not() -> None:
    """Steps of S = B tell tau_B + tau_S only; knowing tau_S to 0.001 tells tau_B to as much."""
    B = np.repeat(np.arange(1.0, 65.0), 4)
    T = (8 + 0.05 * B) * np.exp(np.random.default_rng(0).normal(0, 0.002, len(B)))
    trace = Trace({"B": B, "S": B, "T_ms": T})
    alone = uncertainty(*solved(trace, FitOptions(model="linear"))).estimates
    told = uncertainty(*solved(trace, FitOptions(model="linear", priors={"tau_S": (0.02, 0.001)}))).estimates
    assert not alone["tau_B"].identified
    assert told["tau_B"].identified
    assert told["tau_B"].value == pytest.approx(0.03, abs=0.003)
    assert told["tau_S"].std_error == pytest.approx(0.001, rel=0.1)
    assert told["tau_B"].std_error == pytest.approx(0.001, rel=0.2)
