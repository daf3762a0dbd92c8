"""Settling the parameters that take one of a few values: sharpness of a smooth maximum, length of a tile.

They are properties of a machine's kernels, not of a load, so they are settled once, on a sample of the rows, and held
from then on. In turn each gets its best value with the others as they are: all values are tried with a short
polish from the best end so far, and the most promising with a long one. A value other than the nominal one must earn
its place: with n rows and v values a trial's cost c' replaces c where n/2 ln(c/c') > ln n + ln v, as in the extended
Bayesian information criterion (Chen & Chen 2008) for one parameter more and its coefficient.

The work before the first token, w_0, makes a step dearer the fewer tokens it has. In a model that prices decode and
prefill apart it may follow steps of one phase at the expense of the other: with mixed steps in plenty it can put ten
times the measured latency on a small decode step. It is held at zero where a phase is predicted much better without it.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from latfit.fit.newton import minimise
from latfit.fit.objective import Objective, by_cell, remembered
from latfit.fit.problem import FitOptions, make_problem
from latfit.fit.solve import solve
from latfit.model.family import model_named
from latfit.model.features import features_of
from latfit.model.separable import Choice, Separable
from latfit.stats import FloatArray
from latfit.trace.table import Trace

SAMPLE_ROWS = 2000
SHORT, LONG = 8, 60
"""Steps of a first look at a value, and of a polish."""

FINALISTS = 2
MUCH = 1.5
OFFSET = "w_0"
TILES = ("Q", "V")
ORDER = (("p",), ("p_A",), ("Q", "rho"), ("V",), ("p",), ("p_A",))
"""Choices that are settled together, in turn; each sharpness once more when the tiles are known."""


@dataclass(frozen=True)
class _State:
    """Choices as they are held, the optimum there, and its cost."""

    options: FitOptions
    theta: FloatArray
    cost: float


@dataclass(frozen=True)
class _Sample:
    """The rows that choices are settled on, how many steps they stand for, and the scale of the loss."""

    trace: Trace
    rows: int
    f_scale: float


def settled(trace: Trace, options: FitOptions) -> FitOptions:
    """The options with a value fixed for every choice of the model that the user left open."""
    model = model_named(options.model)
    if not isinstance(model, Separable):
        return options
    open_choices = [choice for choice in model.choices if choice.parameter.name not in options.fixed]
    if len(trace) < 2:
        return options
    few = _sample(trace, options.seed)
    if not open_choices:
        return _without_offset(few, options)
    nominal = {choice.parameter.name: choice.values[0] for choice in open_choices}
    best = replace(options, fixed={**options.fixed, **nominal})
    problem = make_problem(few, best)
    if problem.rows <= len(problem.free) or np.ptp(problem.observed) == 0:
        return best
    found = solve(problem)
    state, sample = _State(best, problem.theta(found.z), found.cost), _Sample(few, problem.rows, found.f_scale)
    longest = float(few.floats("S").max())
    for names in ORDER:
        state = _improved(sample, [choice for choice in open_choices if choice.parameter.name in names], state, longest)
    return state.options


def _without_offset(few: Trace, options: FitOptions) -> FitOptions:
    """The options with w_0 held at zero, where that predicts a phase much better."""
    names = {parameter.name for parameter in model_named(options.model).parameters}
    spoken = {*options.fixed, *options.bounds, *options.priors}
    if not {OFFSET, "tau_M"} <= names or OFFSET in spoken:
        return options
    held = replace(options, fixed={**options.fixed, OFFSET: 0.0})
    with_it, without = _errors_by_phase(few, options), _errors_by_phase(few, held)
    return held if bool(np.any(with_it > MUCH * without)) else options


def _errors_by_phase(few: Trace, options: FitOptions) -> FloatArray:
    """Mean absolute residuals of steps that only decode and of those that hold prefill, where there are both."""
    problem = remembered(make_problem(few, options))
    holds = features_of(problem.steps)["m"] > 0
    if holds.all() or not holds.any() or problem.rows <= len(problem.free):
        return np.zeros(1)
    size = np.abs(problem.residuals(solve(problem).z))
    return np.array([np.average(size[rows], weights=problem.weights[rows]) for rows in (~holds, holds)])


def _improved(sample: _Sample, choices: Sequence[Choice], state: _State, longest: float) -> _State:
    """The state with the best values of some choices, where others than those held earn their place."""
    settings = _worth_trying(choices, state.options.fixed, longest)
    trials = [replace(state.options, fixed={**state.options.fixed, **setting}) for setting in settings]
    looks = sorted((_tried(sample, trial, state.theta, SHORT) for trial in trials), key=lambda end: end.cost)
    ends = [_tried(sample, look.options, look.theta, LONG) for look in looks[:FINALISTS]]
    best = min(ends, key=lambda end: end.cost, default=state)
    gained = 0.5 * sample.rows * np.log(state.cost / max(best.cost, 1e-300))
    return best if gained > np.log(sample.rows) + np.log(max(len(settings), 1)) else state


def _worth_trying(choices: Sequence[Choice], held: Mapping[str, float], longest: float) -> list[dict[str, float]]:
    """Settings other than the one held, of tiles that the steps reach beyond and that differ from each other."""
    names = [choice.parameter.name for choice in choices]
    if "V" in names and held.get("Q", 0.0) == 0:
        return []
    tried = [dict(zip(names, values, strict=True)) for values in itertools.product(*(c.values for c in choices))]
    taken = held.get("Q", 0.0) if "V" in names else 0.0
    return [
        setting
        for setting in tried
        if any(held[name] != value for name, value in setting.items())
        and all(0 < setting[name] < longest and setting[name] != taken for name in names if name in TILES)
    ]


def _tried(sample: _Sample, options: FitOptions, theta: FloatArray, steps: int) -> _State:
    """The optimum, at the first fit's scale, that a start in theta leads to within some steps."""
    problem = remembered(make_problem(sample.trace, options))
    start = theta.copy()
    for i, parameter in enumerate(problem.model.parameters):
        if parameter.name in problem.fixed:
            start[i] = problem.fixed[parameter.name]
    end = minimise(Objective(by_cell(problem), sample.f_scale), problem.coordinates(start), steps=steps, gain=1e-6)
    return _State(options, problem.theta(end.z), end.cost)


def _sample(trace: Trace, seed: int) -> Trace:
    """Rows, half drawn evenly and half spread evenly over the order of S."""
    if len(trace) <= SAMPLE_ROWS:
        return trace
    order = np.argsort(trace.floats("S"), kind="stable")
    spread = order[np.linspace(0, len(order) - 1, SAMPLE_ROWS // 2).astype(np.int64)]
    drawn = np.random.default_rng(seed).choice(len(trace), SAMPLE_ROWS // 2, replace=False)
    return trace.select(np.unique(np.concatenate([spread, drawn])))
