"""Model selection by cross-validation (`--model auto`), and the choice of discrete parameters.

Every candidate is cross-validated on the same folds. The simplest candidate within one standard error of the best wins
(one-standard-error rule of Breiman et al.). Sharpness of corners and tile lengths are chosen by an extended BIC.
Derivation: docs/theory/fitting.md, "Model selection".
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from latfit.errors import WrongUsage
from latfit.fitting.checking.correction_strength import ChosenCorrection, choose_correction
from latfit.fitting.checking.crossval import (
    COLUMN_NAMES,
    EXACT,
    FEWEST_OUTSIDE,
    FOLDS,
    Fold,
    assign_folds,
    beyond,
    by_fold,
    counted_phases,
    error_by_phase,
    fold_rows,
    held_out,
    of_known_phases,
)
from latfit.fitting.data import FitData, Rows
from latfit.fitting.problem import FitOptions, FitProblem, make_problem
from latfit.fitting.solver.levenberg_marquardt import Objective, minimise
from latfit.fitting.solver.objective import by_cell, remembered
from latfit.fitting.solver.solve import solve, solved_once
from latfit.model import CORRECTION, FAMILY, MOE, Choice, Separable, decode_only, features_of, model_named
from latfit.stats import FloatArray
from latfit.units import format_percent

SAMPLE_ROWS = 1000
SHORT, LONG = 8, 60
"""Solver steps of a first trial of a value, and of its polish."""

FINALISTS = 2
MUCH = 1.5
OFFSET = "w_0"
TILES = ("Q", "V")
ORDER = (("p",), ("p_A",), ("Q", "rho"), ("V",), ("p",), ("p_A",))
"""Discrete parameters chosen together, in this order; sharpness again after the tile lengths."""


@dataclass(frozen=True)
class _State:
    """Options with the current discrete values, the optimum for them, and its cost."""

    options: FitOptions
    theta: FloatArray
    cost: float


@dataclass(frozen=True)
class _Sample:
    """Rows on which discrete values are compared, the number of steps they represent, and the scale of the loss."""

    data: Rows
    rows: int
    f_scale: float


def settled(data: Rows, options: FitOptions) -> FitOptions:
    """Return the options with every discrete parameter that the user left open fixed at its best value.

    If prefill has terms of its own and no discrete parameter is open, w_0 may be fixed at zero instead.
    """
    model = model_named(options.model)
    if not isinstance(model, Separable):
        return options
    open_choices = [choice for choice in model.choices if choice.parameter.name not in options.fixed]
    if len(data) < 2:
        return options
    few = _fewer_cells(data, options.seed)
    if not open_choices:
        return _without_offset(few, options)
    nominal = {choice.parameter.name: choice.values[0] for choice in open_choices}
    best = replace(options, fixed={**options.fixed, **nominal})
    problem = make_problem(few, best)
    if problem.rows <= len(problem.free) or np.ptp(problem.observed) == 0:
        return best
    problem, found = solved_once(few, best)
    state, sample = _State(best, problem.theta(found.z), found.cost), _Sample(few, problem.rows, found.f_scale)
    longest = float(few.steps["S"].max())
    for names in ORDER:
        state = _improved(sample, [choice for choice in open_choices if choice.parameter.name in names], state, longest)
    return state.options


def _without_offset(few: Rows, options: FitOptions) -> FitOptions:
    """Return the options with w_0 fixed at zero if that predicts a phase much better."""
    names = {parameter.name for parameter in model_named(options.model).parameters}
    spoken = {*options.fixed, *options.bounds, *options.priors}
    if not {OFFSET, "tau_M"} <= names or OFFSET in spoken:
        return options
    held = replace(options, fixed={**options.fixed, OFFSET: 0.0})
    problem = make_problem(few, options)
    holds = features_of(problem.steps)["m"] > 0
    if holds.all() or not holds.any() or problem.rows <= len(problem.free):
        return options
    problem, found = solved_once(few, options)
    if problem.theta(found.z)[[p.name for p in problem.model.parameters].index(OFFSET)] == 0:
        return options
    other = make_problem(few, held)
    beside = solve(other, warm=other.coordinates(problem.theta(found.z)))
    with_it, without = _errors_by_phase(problem, found.z, holds), _errors_by_phase(other, beside.z, holds)
    return held if bool(np.any(with_it > MUCH * without)) else options


def _errors_by_phase(problem: FitProblem, z: FloatArray, holds: NDArray[np.bool_]) -> FloatArray:
    """Return the mean absolute residual of decode steps and of steps with prefill (2,)."""
    size = np.abs(problem.residuals(z))
    return np.array([np.average(size[rows], weights=problem.weights[rows]) for rows in (~holds, holds)])


def _improved(sample: _Sample, choices: Sequence[Choice], state: _State, longest: float) -> _State:
    """Return the state with the best values of some discrete parameters, if the BIC prefers them."""
    settings = _worth_trying(choices, state.options.fixed, longest)
    trials = [replace(state.options, fixed={**state.options.fixed, **setting}) for setting in settings]
    looks = sorted((_tried(sample, trial, state.theta, SHORT) for trial in trials), key=lambda end: end.cost)
    ends = [_tried(sample, look.options, look.theta, LONG) for look in looks[:FINALISTS]]
    best = min(ends, key=lambda end: end.cost, default=state)
    gained = 0.5 * sample.rows * np.log(state.cost / max(best.cost, 1e-300))
    return best if gained > np.log(sample.rows) + np.log(max(len(settings), 1)) else state


def _worth_trying(choices: Sequence[Choice], held: Mapping[str, float], longest: float) -> list[dict[str, float]]:
    """Return settings other than the current one, with distinct tile lengths below the longest step."""
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
    """Minimise from theta for a number of steps, at the scale of the first fit."""
    problem = remembered(make_problem(sample.data, options))
    start = theta.copy()
    for i, parameter in enumerate(problem.model.parameters):
        if parameter.name in problem.fixed:
            start[i] = problem.fixed[parameter.name]
    end = minimise(Objective(by_cell(problem), sample.f_scale), problem.coordinates(start), steps=steps, gain=1e-6)
    return _State(options, problem.theta(end.z), end.cost)


def _fewer_cells(data: Rows, seed: int) -> Rows:
    """Return up to SAMPLE_ROWS rows: half random, half spread evenly over the order of S."""
    return data if len(data) <= SAMPLE_ROWS else data.once(("fewer", seed), lambda: _drawn(data, seed))


def _drawn(data: Rows, seed: int) -> Rows:
    order = np.argsort(data.steps["S"], kind="stable")
    spread = order[np.linspace(0, len(order) - 1, SAMPLE_ROWS // 2).astype(np.int64)]
    drawn = np.random.default_rng(seed).choice(len(data), SAMPLE_ROWS // 2, replace=False)
    return data.at(np.unique(np.concatenate([spread, drawn])))


AUTO = "auto"
GIVEN_UP = 0.5
"""Percentage points of error that a simpler model may cost at most."""

GIVEN_UP_SHARE = 0.05
"""Share of the best error that a simpler model may cost at most."""

MANY_ROWS = 300
"""From this many rows on, the best of the candidates is best by more than chance."""

ROWS_FOR_EXPERTS = 100
FAR_BETTER = 0.7

WORSE_BEYOND = 1.1
"""Largest ratio of a simpler model's error beyond the training range, in S, B or context, to the best one's."""

NEGLIGIBLE = 0.01
"""Share of the best error below which a difference is no reason for a larger model."""

WORSE_IN_PHASE = 1.25
"""Largest ratio of a candidate's error in a phase to that of the line, if others are as good on the whole."""

NOT_WORSE = 0.05
"""Percentage points within which an error counts as no worse than that of a reference model."""

OUTSIDE_SHARES = (0.4, 0.7)
"""Shares of the rows, lowest S, B or context first, on which extrapolation folds train."""

FEW_CELLS = 16
"""Up to this many cells, each one is a fold of its own."""

ROWS = 2000
"""Rows drawn for model selection; more would not change the choice."""

REFERENCE_MODELS = ("linear", "saturation")
FLATTEST = ("constant", "linear")


@dataclass(frozen=True)
class Score:
    """Cross-validated error of one candidate.

    Attributes
    ----------
    mape_pct
        Mean over the folds and phases, in percent.
    by_fold
        Error of each fold (K,), in percent; extrapolation folds last.
    free
        Number of free parameters.
    beyond
        Error beyond the training range, in percent, one value per column (S, B, context).
    outside
        Number of extrapolation folds.
    by_phase
        Error of each phase within the data, in percent.
    """

    mape_pct: float
    by_fold: FloatArray
    free: int
    beyond: tuple[float, ...] = ()
    outside: int = 0
    by_phase: tuple[float, ...] = ()


@dataclass(frozen=True)
class Selection:
    """The chosen model, the reason in a sentence, its fit options, and every candidate's score by name."""

    name: str
    reason: str
    options: FitOptions
    scores: Mapping[str, Score]

    def table(self) -> dict[str, dict[str, object]]:
        """Return the scores as stored with a fit."""
        return {
            name: {
                "mape_pct": score.mape_pct,
                "free_parameters": score.free,
                "mape_pct_by_fold": score.by_fold.tolist(),
            }
            for name, score in self.scores.items()
        }


RIVALS = ("hinge", "quadratic", "context", "roofline")
"""Candidates of auto besides the reference models, which every fit is compared with."""

RIVAL_ROWS = 1000


def rival(data: FitData, options: FitOptions) -> tuple[str, float] | None:
    """Return (name, error ratio) of the rival model that predicts a sample of the rows best; None if there is none.

    The comparison is quick: nominal discrete values, no second search, one scheme of folds. The ratio is the rival's
    error over that of the model in the options.
    """
    few = data.draw(RIVAL_ROWS, options.seed)
    folds = SelectionFolds(list(by_fold(assign_folds(few, options.seed)[1])))
    scores = {}
    for name in set(RIVALS) & set(candidates_for(few)) - {options.model}:
        own = replace(options, model=name, fixed={}, bounds={}, priors={})
        if (score := cross_validated(few, own, folds)) is not None:
            scores[name] = score.mape_pct
    best, named = min(scores, key=lambda name: scores[name], default=None), cross_validated(few, options, folds)
    return (best, scores[best] / named.mape_pct) if best and named else None


def is_auto(name: str) -> bool:
    return name.removesuffix(CORRECTION) in (AUTO, f"{AUTO}{MOE}")


def resolved(data: FitData, options: FitOptions) -> tuple[FitOptions, dict[str, object]]:
    """Return options that name one model with fixed discrete values; for `auto` also the reason and all scores."""
    named = replace(options, model=options.model.removesuffix(CORRECTION))
    if not is_auto(options.model):
        return settled(data, named), {}
    selection = select_model(data, named)
    return selection.options, {"model": selection.name, "reason": selection.reason, "candidates": selection.table()}


def corrected(
    data: FitData, options: FitOptions, wanted: str, theta: FloatArray
) -> tuple[FitOptions, ChosenCorrection | None]:
    """Return the options with a correction of the parametric model with parameters theta, and how it was chosen.

    Returns the options unchanged and None if `wanted` excludes a correction or held-out rows show no gain.
    """
    asked = wanted.endswith(CORRECTION)
    left_out = options.candidates and CORRECTION not in options.candidates
    if not asked and (left_out or not is_auto(wanted)):
        return options, None
    chosen = choose_correction(data, options, theta, always=asked)
    if chosen is None or chosen.smoothing is None:
        return options, None
    return replace(options, correction=chosen.smoothing), chosen


def correction_reason(model: str, chosen: ChosenCorrection) -> str:
    """Return the gain of a correction in a sentence."""
    return (
        f"What {model} misses is corrected by a table learnt from its residuals:"
        f" {_instead(chosen.before, chosen.after)} on held-out steps, every phase counted alike."
    )


def _instead(before: float, after: float) -> str:
    """Format two errors in percent, with one more digit if they would look equal."""
    old, new = format_percent(before), format_percent(after)
    return f"{new} instead of {old}" if old != new else f"{after:.2f} % instead of {before:.2f} %"


@dataclass(frozen=True)
class SelectionFolds:
    """Folds for comparing candidates.

    Attributes
    ----------
    folds
        (train, test) row numbers; extrapolation folds last.
    direction
        Column number of each extrapolation fold.
    """

    folds: Sequence[Fold]
    direction: tuple[int, ...] = ()


def candidates_for(data: Rows, experts: bool = False) -> list[str]:
    """Return the names of the models that the columns of a trace can identify, simple ones first."""
    if decode_only(data.steps):
        names = ["constant", "linear", "roofline"]
    else:
        names = ["constant", "linear", "hinge", "saturation", "saturation-gamma", "quadratic", "context", "roofline"]
    return [*names, *(f"{name}{MOE}" for name in names if name != "constant" and experts)]


def select_model(data: FitData, options: FitOptions) -> Selection:
    """Select the model for a clean trace of one system.

    Raises
    ------
    WrongUsage
        If no candidate has all parameters that the user fixed, bounded or gave a prior.
    """
    sample = data.draw(ROWS, options.seed)
    wanted = options.candidates
    carried = [name for name in candidates_for(data, options.model.endswith(MOE)) if not wanted or name in wanted]
    names = _possible(carried, options)
    folds = selection_folds(sample, options.seed)
    entries = _entered(sample, names, options, folds)
    if not entries or ("linear" in names and "linear" not in entries):
        return _of_few_steps(sample, names, options, folds)
    name = simplest(_without_constant({each: entry.score for each, entry in entries.items()}, len(sample)), len(sample))
    if decode_only(sample.steps) and (not wanted or "saturation" in wanted):
        more = _entered(sample, _possible([*names, "saturation"], options)[len(names) :], options, folds)
        if more and more["saturation"].score.mape_pct < FAR_BETTER * entries[name].score.mape_pct:
            entries, name = entries | more, "saturation"
    plain = entries[name].score
    if len(sample) >= ROWS_FOR_EXPERTS:
        concave = [f"{each}{MOE}" for each, entry in entries.items() if _near(entry.score, plain)]
        concave = [each for each in concave if each in FAMILY and each not in names and (not wanted or each in wanted)]
        more = _entered(sample, concave, options, folds)
        best = min(more, key=lambda each: more[each].score.mape_pct, default=name)
        own = f"{name}{MOE}"
        if own in more and not _pays(more[best].score, more[own].score):
            best = own
        if best != name and _pays(more[best].score, plain):
            entries, name = entries | {best: more[best]}, best
    scores = {each: entry.score for each, entry in entries.items()}
    return Selection(name, _reason(name, scores), entries[name].options, scores)


def _rows_only(data: FitData, seed: int) -> SelectionFolds:
    """Return folds of random rows for repeated cells that are too few to leave out; no folds otherwise."""
    cells = int(data.known_cell.max(initial=-1)) + 1
    repeated = not data.in_time and len(data) >= 2 * FOLDS and 2 * cells <= len(data)
    return SelectionFolds(list(by_fold(fold_rows(data, seed))) if repeated else [])


def _of_few_steps(data: FitData, names: Sequence[str], options: FitOptions, folds: SelectionFolds) -> Selection:
    """Select between a line and a constant when the trace has too few different steps to compare more models."""
    name = "linear" if "linear" in names else "saturation"
    entries = _entered(data, [each for each in FLATTEST if each in names], options, _rows_only(data, options.seed))
    if set(entries) != set(FLATTEST):
        return Selection(name, "Too few different steps to compare models.", replace(options, model=name), {})
    scores = {each: entry.score for each, entry in entries.items()}
    name = simplest(scores, len(data))
    reason = f"Too few different steps to compare more models. {_reason(name, scores)}"
    return Selection(name, reason, entries[name].options, scores)


@dataclass(frozen=True)
class _Entry:
    """A candidate's score and its fit options."""

    score: Score
    options: FitOptions


def _entered(data: FitData, names: Sequence[str], options: FitOptions, folds: SelectionFolds) -> dict[str, _Entry]:
    """Return the candidates that have enough rows for cross-validation, by name."""
    found = {}
    for name in names:
        own = settled(data, _of_requests(data, replace(options, model=name)))
        score = cross_validated(data, own, folds)
        if score is not None:
            found[name] = _Entry(score, own)
    return found


def _near(score: Score, chosen: Score) -> bool:
    """Return whether a candidate is close enough to the chosen one that an added `+moe` term may decide."""
    return score.mape_pct - chosen.mape_pct <= min(GIVEN_UP, GIVEN_UP_SHARE * chosen.mape_pct)


def _pays(concave: Score, plain: Score) -> bool:
    return plain.mape_pct - concave.mape_pct > max(GIVEN_UP, paired_error(plain, concave))


def selection_folds(data: FitData, seed: int = 0) -> SelectionFolds:
    """Return folds within the data and extrapolation folds in S, B and context.

    Folds within the data are cells or blocks of time, plus random rows if cells repeat.
    """
    cells = int(data.known_cell.max(initial=-1)) + 1
    if not data.in_time and 4 <= cells <= FEW_CELLS:
        return SelectionFolds(list(by_fold(data.known_cell)))
    inside = list(by_fold(assign_folds(data, seed)[1]))
    if not data.in_time and len(data) >= 2 * FOLDS and 2 * cells <= len(data):
        inside += by_fold(fold_rows(data, seed))
    outside, direction = [], []
    for number, name in enumerate(name for name in COLUMN_NAMES if name in data.steps):
        for share in OUTSIDE_SHARES:
            if (fold := beyond(data, name, share)) is not None:
                train, test = of_known_phases(data, fold)
                if len(train) >= len(data) / 4 and len(test) >= FEWEST_OUTSIDE:
                    outside.append((train, test))
                    direction.append(number)
    return SelectionFolds([*inside, *outside], tuple(direction))


def cross_validated(data: FitData, options: FitOptions, held: SelectionFolds) -> Score | None:
    """Return the score of one model over the folds; None if a fold has too few training rows for its parameters."""
    whole, folds = make_problem(data, options), held.folds
    if len(folds) < 2 or min(len(train) for train, _ in folds) <= len(whole.free):
        return None
    few, theta = _fewer_cells(data, options.seed), None
    if few is not data:
        problem, found = solved_once(few, options)
        theta = problem.theta(found.z)
    found = solve(whole, whole.coordinates(theta)) if theta is not None else solved_once(data, options)[1]
    left_out = held_out(data, options, whole.theta(found.z), folds)
    weight = np.bincount(left_out.fold, left_out.weights, len(folds)) if left_out is not None else np.zeros(1)
    if left_out is None or not np.all(weight > 0):
        return None
    ape = 100 * np.abs(np.expm1(-left_out.log_ratio))
    of_fold = [np.flatnonzero(left_out.fold == number) for number in range(len(folds))]
    errors = np.array([error_by_phase(data, left_out.rows[rows], ape[rows]) for rows in of_fold])
    inside = len(folds) - len(held.direction)
    error = _mean(errors[:inside], len(left_out.rows) / len(folds))
    within = [rows[left_out.rows] & (left_out.fold < inside) for rows in counted_phases(data).values()]
    by_phase = tuple(float(np.average(ape[some], weights=left_out.weights[some])) for some in within if some.any())
    if not held.direction:
        return Score(error, errors, len(whole.free), by_phase=by_phase)
    outside = np.log(np.maximum(errors[inside:], EXACT))
    by_direction = [float(np.exp(outside[np.array(held.direction) == each].mean())) for each in set(held.direction)]
    return Score(
        math.sqrt(error * float(np.exp(outside.mean()))),
        errors,
        len(whole.free),
        tuple(by_direction),
        len(held.direction),
        by_phase,
    )


def _mean(errors: FloatArray, rows: float) -> float:
    """Return the geometric mean of the errors (K,) of folds, offset by their sampling error for `rows` rows each."""
    errors = np.maximum(errors, EXACT)
    luck = float(np.median(errors)) / rows
    return max(float(np.exp(np.mean(np.log(errors + luck)))) - luck, EXACT)


def _of_requests(data: Rows, options: FitOptions) -> FitOptions:
    """Return the options, with tau_S fixed at zero for a line through decode steps only (S = B)."""
    spoken = {*options.fixed, *options.bounds, *options.priors}
    if not options.model.startswith("linear") or "tau_S" in spoken or not decode_only(data.steps):
        return options
    return replace(options, fixed={**options.fixed, "tau_S": 0.0})


def _possible(names: Sequence[str], options: FitOptions) -> list[str]:
    """Return the candidates that have every parameter the user fixed, bounded or gave a prior."""
    spoken = {*options.fixed, *options.bounds, *options.priors}
    kept = [name for name in names if spoken <= {p.name for p in FAMILY[name].parameters}]
    if not kept:
        raise WrongUsage(
            f"no model has all of {', '.join(sorted(spoken))}",
            where="--fix, --set bounds, --set prior",
            remedy="Name the model with --model, or leave them out.",
        )
    return kept


def simplest(scores: Mapping[str, Score], rows: int) -> str:
    """Return the simplest candidate within the tolerance of the best (docs/theory/fitting.md, "Model selection")."""
    best = min(scores.values(), key=lambda score: score.mape_pct)
    if (line := scores.get("linear")) is not None:
        even = {name: score for name, score in scores.items() if _keeps_up(score, line)}
        least = min(even.values(), key=lambda score: score.mape_pct)
        if least.mape_pct <= WORSE_BEYOND * best.mape_pct:
            scores, best = even, least
    ceiling = min([scores[name].mape_pct + NOT_WORSE for name in REFERENCE_MODELS if name in scores], default=np.inf)
    most = min(GIVEN_UP, GIVEN_UP_SHARE * best.mape_pct) * max(1.0, MANY_ROWS / rows)
    good = [
        name
        for name, score in scores.items()
        if score.mape_pct - best.mape_pct
        <= max(min(_luck(rows) * paired_error(score, best), most), NEGLIGIBLE * best.mape_pct)
        and score.mape_pct <= ceiling
        and all(own <= WORSE_BEYOND * least for own, least in zip(score.beyond, best.beyond, strict=True))
    ]
    names = good or [name for name, score in scores.items() if score is best]
    return min(names, key=lambda name: (scores[name].free, scores[name].mape_pct))


def _keeps_up(score: Score, line: Score) -> bool:
    """Return whether a candidate loses to the line in no phase by more than WORSE_IN_PHASE."""
    return all(own <= WORSE_IN_PHASE * least for own, least in zip(score.by_phase, line.by_phase, strict=False))


def _without_constant(scores: Mapping[str, Score], rows: int) -> Mapping[str, Score]:
    """Drop the constant unless a line is significantly worse."""
    line, flat = scores.get("linear"), scores.get("constant")
    if line is None or flat is None or line.mape_pct - flat.mape_pct > _luck(rows) * paired_error(line, flat):
        return scores
    return {name: score for name, score in scores.items() if score is not flat}


def _luck(rows: int) -> float:
    """Return the number of standard errors within which candidates count as equal."""
    return 1.0 if rows >= MANY_ROWS else 2.0


def paired_error(a: Score, b: Score) -> float:
    """Return the standard error of the difference of two models' errors, in percentage points.

    It is the paired standard error of the log ratio over the same folds, times the smaller error.
    """
    ratio = np.log(np.maximum(a.by_fold, EXACT) / np.maximum(b.by_fold, EXACT))
    parts = [part for part in np.split(ratio, [len(ratio) - a.outside]) if len(part) > 1]
    error = np.linalg.norm([np.std(part, ddof=1) / np.sqrt(len(part)) for part in parts]) / max(len(parts), 1)
    return float(error) * min(a.mape_pct, b.mape_pct)


def _reason(name: str, scores: Mapping[str, Score]) -> str:
    best = min(
        (other for other in scores if name == FLATTEST[0] or other != FLATTEST[0]),
        key=lambda other: scores[other].mape_pct,
    )
    own = scores[name]
    beside = [
        f"{other} {scores[other].mape_pct:.1f} %" for other in REFERENCE_MODELS if other in scores and other != name
    ]
    if name.endswith(MOE) and (without := name.removesuffix(MOE)) in scores and without not in REFERENCE_MODELS:
        beside.append(f"{without} {scores[without].mape_pct:.1f} %")
    against = f" ({', '.join(beside)})" if beside else ""
    flat = scores.get(FLATTEST[0], own)
    passed = ""
    if flat.mape_pct < scores[best].mape_pct:
        passed = f" A constant has {flat.mape_pct:.1f} %, but would let batches grow for nothing."
    if name == best:
        return f"{name} predicts held-out steps best: {own.mape_pct:.1f} % with {own.free} parameters{against}.{passed}"
    return (
        f"{name} is the simplest model within one standard error of the best: {own.mape_pct:.1f} % with {own.free} "
        f"parameters, {best} {scores[best].mape_pct:.1f} % with {scores[best].free}{against}.{passed}"
    )
