"""Settling the parameters that take one of a few values: sharpness of a smooth maximum, tile length.

They are properties of a machine's kernels, not of a load, so they are settled once, on a sample of the rows, and held
from then on. One after another each value is tried with the others as they are, every trial polished from the best end
so far. A value other than the nominal one must earn its place: with n rows a trial's cost c' replaces c where
n/2 ln(c/c') > ln n, as in the Bayesian information criterion for one parameter more and its coefficient.
"""

import itertools
from dataclasses import replace

import numpy as np

from latfit.fit.newton import minimise
from latfit.fit.objective import Objective, by_cell, remembered
from latfit.fit.problem import FitOptions, make_problem
from latfit.fit.solve import Solution, solve
from latfit.model.family import model_named
from latfit.model.separable import Separable
from latfit.stats import FloatArray
from latfit.trace.table import Trace

SAMPLE_ROWS = 2000


def settled(trace: Trace, options: FitOptions) -> FitOptions:
    """The options with a value fixed for every choice of the model that the user left open."""
    model = model_named(options.model)
    if not isinstance(model, Separable):
        return options
    open_choices = [choice for choice in model.choices if choice.parameter.name not in options.fixed]
    if not open_choices or len(trace) < 2:
        return options
    sample = _sample(trace, options.seed)
    best = _held(options, {choice.parameter.name: choice.values[0] for choice in open_choices})
    problem = make_problem(sample, best)
    if problem.rows <= len(problem.free) or np.ptp(problem.observed) == 0:
        return best
    found = solve(problem)
    theta, cost = problem.theta(found.z), found.cost
    longest = float(sample.floats("S").max())
    for trial in _trials(open_choices, longest):
        candidate = _held(best, trial)
        reached, end = _tried(sample, candidate, theta, found)
        if 0.5 * problem.rows * np.log(cost / max(reached, 1e-300)) > np.log(problem.rows):
            best, theta, cost = candidate, end, reached
    return best


def _trials(open_choices: list, longest: float) -> list[dict[str, float]]:  # type: ignore[type-arg]
    """Settings to try, in turn: the sharpness, tiles with each riser, the sharpness again."""
    values = {choice.parameter.name: choice.values for choice in open_choices}
    sharpness = [{"p": p} for p in values.get("p", ())]
    tiles = [q for q in values.get("Q", ()) if 0 < q < longest]
    risers = values.get("rho", (None,))
    combined = [{"Q": q} | ({} if rho is None else {"rho": rho}) for q, rho in itertools.product(tiles, risers)]
    return [*sharpness, *combined, *sharpness]


def _held(options: FitOptions, values: dict[str, float]) -> FitOptions:
    return replace(options, fixed={**options.fixed, **values})


def _tried(sample: Trace, options: FitOptions, theta: FloatArray, found: Solution) -> tuple[float, FloatArray]:
    """(cost at the first fit's scale, theta) of the optimum that a start in theta leads to."""
    problem = remembered(make_problem(sample, options))
    start = theta.copy()
    for i, parameter in enumerate(problem.model.parameters):
        if parameter.name in problem.fixed:
            start[i] = problem.fixed[parameter.name]
    end = minimise(Objective(by_cell(problem), found.f_scale), problem.coordinates(start), steps=60, gain=1e-6)
    return end.cost, problem.theta(end.z)


def _sample(trace: Trace, seed: int) -> Trace:
    """Rows, half drawn evenly and half spread evenly over the order of S."""
    if len(trace) <= SAMPLE_ROWS:
        return trace
    order = np.argsort(trace.floats("S"), kind="stable")
    spread = order[np.linspace(0, len(order) - 1, SAMPLE_ROWS // 2).astype(np.int64)]
    drawn = np.random.default_rng(seed).choice(len(trace), SAMPLE_ROWS // 2, replace=False)
    return trace.select(np.unique(np.concatenate([spread, drawn])))
