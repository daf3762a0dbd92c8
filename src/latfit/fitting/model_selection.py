"""Model selection by cross-validation (`--model auto`), and the choice of discrete parameters by an extended BIC.

The simplest candidate within a tolerance of the best wins: docs/theory/fitting.md, "Model selection".
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from latfit.errors import WrongUsage, tell
from latfit.fitting.checking.correction_strength import MIN_CELLS, MIN_ROWS, ChosenCorrection, choose_correction
from latfit.fitting.checking.crossval import (
    COLUMN_NAMES,
    EXACT,
    FEWEST_OUTSIDE,
    FOLDS,
    Fold,
    assign_folds,
    beyond,
    by_fold,
    errors_by_phase,
    fold_rows,
    held_out,
    mean_error,
    of_known_phases,
)
from latfit.fitting.data import FitData, Rows
from latfit.fitting.problem import FitOptions, make_problem
from latfit.fitting.solver.levenberg_marquardt import Descents, minimise_all
from latfit.fitting.solver.objective import by_cell
from latfit.fitting.solver.solve import solved_once
from latfit.model import CORRECTION, FAMILY, MOE, Choice, Separable, decode_only, model_named
from latfit.stats import FloatArray

SAMPLE_ROWS = 1000
STEPS = 20  # of the solver in the trial of a value
GAIN = 1e-4  # relative reduction of the cost below which the trial of a value stops
TILES = ("Q", "V")
ORDER = (("p",), ("p_A",), ("Q", "rho"), ("V",), ("p",), ("p_A",))
"""Discrete parameters chosen together, in this order; sharpness again after the tile lengths."""


@dataclass(frozen=True)
class _State:
    """Options with the current discrete values, the optimum for them, and its cost."""

    options: FitOptions
    theta: FloatArray
    cost: float


def fix_choices(data: Rows, options: FitOptions) -> tuple[FitOptions, FloatArray | None]:
    """Fix every discrete parameter that the user left open at its best value; return also theta where that is new."""
    model = model_named(options.model)
    if not isinstance(model, Separable):
        return options, None
    open_choices = [choice for choice in model.choices if choice.parameter.name not in options.fixed]
    if len(data) < 2 or not open_choices:
        return options, None
    few = _sample_rows(data, options.seed)
    nominal = {choice.parameter.name: choice.values[0] for choice in open_choices}
    best = replace(options, fixed={**options.fixed, **nominal})
    problem = make_problem(few, best)
    if problem.rows <= len(problem.free) or np.ptp(problem.observed) == 0:
        return best, None
    problem, found = solved_once(few, best)
    state, rows, longest = _State(best, problem.theta(found.z), found.cost), problem.rows, float(few.steps["S"].max())
    for names in ORDER:
        choices = [choice for choice in open_choices if choice.parameter.name in names]
        settings = _settings_to_try(choices, state.options.fixed, longest)
        ends = [_refit_with(few, found.f_scale, state, setting) for setting in settings]
        least = min(ends, key=lambda end: end.cost, default=state)
        gained = 0.5 * rows * np.log(state.cost / max(least.cost, 1e-300))
        if gained > np.log(rows) + np.log(max(len(settings), 1)):  # extended BIC
            state = least
    return state.options, None if state.options is best else state.theta


def _settings_to_try(choices: Sequence[Choice], held: Mapping[str, float], longest: float) -> list[dict[str, float]]:
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


def _refit_with(data: Rows, f_scale: float, state: _State, setting: Mapping[str, float]) -> _State:
    options = replace(state.options, fixed={**state.options.fixed, **setting})
    problem = make_problem(data, options)
    names = [p.name for p in problem.model.parameters]
    start = np.array([problem.fixed.get(name, x) for name, x in zip(names, state.theta, strict=True)])
    descent = Descents.alike(by_cell(problem), f_scale)
    (end,) = minimise_all(descent, problem.coordinates(start)[None], steps=STEPS, gain=GAIN)
    return _State(options, problem.theta(end.z), end.cost)


def _sample_rows(data: Rows, seed: int) -> Rows:
    """Return up to SAMPLE_ROWS rows: half random, half spread evenly over the order of S."""

    def draw() -> Rows:
        order = np.argsort(data.steps["S"], kind="stable")
        spread = order[np.linspace(0, len(order) - 1, SAMPLE_ROWS // 2).astype(np.int64)]
        drawn = np.random.default_rng(seed).choice(len(data), SAMPLE_ROWS // 2, replace=False)
        return data.at(np.unique(np.concatenate([spread, drawn])))

    return data if len(data) <= SAMPLE_ROWS else data.once(("fewer", seed), draw)


AUTO = "auto"
GIVEN_UP = 0.5  # percentage points of error that a simpler model may cost at most
GIVEN_UP_SHARE = 0.05  # share of the best error that a simpler model may cost at most
MANY_ROWS = 300  # from this many rows on, the best of the candidates is best by more than chance
ROWS_FOR_EXPERTS = 100
WORSE_BEYOND = 1.1
"""Largest ratio of a simpler model's error beyond the training range, in S, B or context, to the best one's."""

NEGLIGIBLE = 0.01  # share of the best error below which a difference is no reason for a larger model
WORSE_IN_PHASE = 1.25
"""Largest ratio of a candidate's error in a phase to that of the line, and of the best if it is a simpler one."""

OUTSIDE_SHARES = (0.4, 0.7)  # shares of the rows, lowest S, B or context first, on which extrapolation folds train
FEW_CELLS = 16  # up to this many cells, each one is a fold of its own
ROWS = 2000  # rows drawn for model selection; more would not change the choice
REFERENCE_MODELS = ("linear", "saturation")
FLATTEST = ("constant", "linear")


@dataclass(frozen=True)
class Score:
    """Cross-validated error of one candidate."""

    mape_pct: float  # mean over the folds and phases, in percent
    by_fold: FloatArray  # error of each fold (K,), in percent; extrapolation folds last
    free: int  # number of free parameters
    beyond: tuple[float, ...] = ()  # error beyond the training range, in percent, by column with such folds
    outside: int = 0  # number of extrapolation folds
    by_phase: tuple[float, ...] = ()  # error of each phase within the data, in percent
    options: FitOptions = field(default_factory=FitOptions)  # of its fit


@dataclass(frozen=True)
class Selection:
    """The chosen model, the reason in a sentence, its options, and every candidate's score by name."""

    name: str
    reason: str
    options: FitOptions
    scores: Mapping[str, Score]


def is_auto(name: str) -> bool:
    return name.removesuffix(CORRECTION) in (AUTO, f"{AUTO}{MOE}")


def resolve_model(data: FitData, options: FitOptions) -> tuple[FitOptions, dict[str, object]]:
    """Return options that name one model with fixed discrete values; for `auto` also the reason and all scores."""
    named = replace(options, model=options.model.removesuffix(CORRECTION))
    if not is_auto(options.model):
        return fix_choices(data, named)[0], {}
    chosen = select_model(data, named)
    candidates = {
        name: {"mape_pct": each.mape_pct, "free_parameters": each.free, "mape_pct_by_fold": each.by_fold.tolist()}
        for name, each in chosen.scores.items()
    }
    return chosen.options, {"model": chosen.name, "reason": chosen.reason, "candidates": candidates}


def add_correction(
    data: FitData, options: FitOptions, wanted: str, theta: FloatArray
) -> tuple[FitOptions, ChosenCorrection | None]:
    """Return the options with a correction, and how it was chosen; unchanged and None without one."""
    asked = wanted.endswith(CORRECTION)
    left_out = options.candidates and CORRECTION not in options.candidates
    if not asked and (left_out or not is_auto(wanted)):
        return options, None
    chosen = choose_correction(data, options, theta, always=asked)
    if asked and chosen is None:
        tell(f"note: {CORRECTION} has no effect: too few rows or cells, at least {MIN_ROWS} and {MIN_CELLS}.")
    if chosen is None or chosen.smoothing is None:
        return options, None
    return replace(options, correction=chosen.smoothing), chosen


@dataclass(frozen=True)
class SelectionFolds:
    folds: Sequence[Fold]  # (train, test) row numbers; extrapolation folds last
    direction: tuple[int, ...] = ()  # column number of each extrapolation fold


def candidates_for(data: Rows, experts: bool = False) -> list[str]:
    names = ["constant", "linear", *([] if decode_only(data.steps) else ["hinge"]), "saturation", "roofline"]
    return [*names, *(f"{name}{MOE}" for name in names if name != "constant" and experts)]


def select_model(data: FitData, options: FitOptions) -> Selection:
    """Select the model for a clean trace of one system. Raises WrongUsage if none has all constrained parameters."""
    sample = data.draw(ROWS, options.seed)
    wanted, experts = options.candidates, options.model.endswith(MOE)
    names = _possible([name for name in candidates_for(data, experts) if not wanted or name in wanted], options)
    folds = selection_folds(sample, options.seed)
    scores = _score_all(sample, names, options, folds)
    if not scores or ("linear" in names and "linear" not in scores):
        name = "linear" if "linear" in names else names[0]
        return Selection(name, "Too few different steps to compare models.", replace(options, model=name), {})
    name = simplest(_without_constant(scores, len(sample)), len(sample))
    with_experts = f"{name}{MOE}"
    if len(sample) >= ROWS_FOR_EXPERTS and with_experts in FAMILY and with_experts not in names and not wanted:
        more = cross_validated(sample, replace(scores[name].options, model=with_experts), folds)
        gain = scores[name].mape_pct - more.mape_pct if more else 0.0
        if more and gain > GIVEN_UP and gain > paired_error(scores[name], more):
            name, scores = with_experts, {**scores, with_experts: more}
    return Selection(name, _reason(name, scores), scores[name].options, scores)


def _score_all(data: FitData, names: Sequence[str], options: FitOptions, folds: SelectionFolds) -> dict[str, Score]:
    found = {}
    for name in names:
        own, theta = fix_choices(data, _fix_tau_S_of_decode(data, replace(options, model=name)))
        if (score := cross_validated(data, own, folds, theta)) is not None:
            found[name] = score
    return found


def selection_folds(data: FitData, seed: int = 0) -> SelectionFolds:
    """Return folds within the data (cells, blocks of time, repeats) and, with more than FEW_CELLS cells, beyond it."""
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


def cross_validated(
    data: FitData, options: FitOptions, held: SelectionFolds, theta: FloatArray | None = None
) -> Score | None:
    """Return the score of one model over the folds; None if a fold cannot be fitted.

    theta: where the folds' fits start; without it, the fit of a sample.
    """
    folds, free = held.folds, len(make_problem(data, options).free)
    if len(folds) < 2 or any(len(t) <= free or len(np.unique(data.known_cell[t])) < free for t, _ in folds):
        return None
    if theta is None:
        problem, found = solved_once(_sample_rows(data, options.seed), options)
        theta = problem.theta(found.z)
    left_out = held_out(data, options, theta, folds)
    weight = np.bincount(left_out.fold, left_out.weights, len(folds)) if left_out is not None else np.zeros(1)
    if left_out is None or not np.all(weight > 0):
        return None
    ape = 100 * np.abs(np.expm1(-left_out.log_ratio))
    of_fold = [np.flatnonzero(left_out.fold == number) for number in range(len(folds))]
    errors = np.array([mean_error(data, left_out.rows[rows], ape[rows]) for rows in of_fold])
    inside = len(folds) - len(held.direction)
    error = _mean(errors[:inside], len(left_out.rows) / len(folds))
    within = left_out.fold < inside
    by_phase = tuple(errors_by_phase(data, left_out.rows[within], ape[within]).values())
    by_direction: list[float] = []
    if held.direction:
        outside = np.log(np.maximum(errors[inside:], EXACT))
        by_direction = [float(np.exp(outside[np.array(held.direction) == each].mean())) for each in set(held.direction)]
        error = math.sqrt(error * float(np.exp(outside.mean())))
    return Score(error, errors, free, tuple(by_direction), len(held.direction), by_phase, options)


def _mean(errors: FloatArray, rows: float) -> float:
    """Return the geometric mean of the errors (K,) of folds, offset so that those near zero do not dominate."""
    errors = np.maximum(errors, EXACT)
    luck = float(np.median(errors)) / rows
    return max(float(np.exp(np.mean(np.log(errors + luck)))) - luck, EXACT)


def _fix_tau_S_of_decode(data: Rows, options: FitOptions) -> FitOptions:
    """Return the options, with tau_S fixed at zero for a line through decode steps only (S = B)."""
    if not options.model.startswith("linear") or "tau_S" in options.constrained or not decode_only(data.steps):
        return options
    return replace(options, fixed={**options.fixed, "tau_S": 0.0})


def _possible(names: Sequence[str], options: FitOptions) -> list[str]:
    """Return the candidates that have every parameter the user fixed, bounded or gave a prior."""
    constrained = options.constrained
    kept = [name for name in names if constrained <= {p.name for p in FAMILY[name].parameters}]
    if not kept:
        raise WrongUsage(
            f"no model has all of {', '.join(sorted(constrained))}",
            where="--fix, --set bounds, --set prior",
            remedy="Name the model with --model, or leave them out.",
        )
    return kept


def simplest(scores: Mapping[str, Score], rows: int) -> str:
    """Return the simplest candidate within the tolerance of the best (docs/theory/fitting.md, "Model selection")."""
    scores = _without_losers(scores)
    best = min(scores.values(), key=lambda score: score.mape_pct)
    most = min(GIVEN_UP, GIVEN_UP_SHARE * best.mape_pct) * max(1.0, MANY_ROWS / rows)

    def is_good(score: Score) -> bool:
        tolerance = max(min(_errors_apart(rows) * paired_error(score, best), most), NEGLIGIBLE * best.mape_pct)
        near = _is_within(WORSE_BEYOND, score.beyond, best.beyond)
        return (
            score.mape_pct - best.mape_pct <= tolerance
            and near
            and _is_within(WORSE_IN_PHASE, score.by_phase, best.by_phase)
        )

    names = [name for name, score in scores.items() if score is best or is_good(score)]
    return min(names, key=lambda name: (scores[name].free, scores[name].mape_pct))


def _without_losers(scores: Mapping[str, Score]) -> Mapping[str, Score]:
    """Leave out candidates that lose to the line in some phase, unless all others are worse on the whole."""
    if (line := scores.get("linear")) is None:
        return scores
    even = {name: score for name, score in scores.items() if _is_within(WORSE_IN_PHASE, score.by_phase, line.by_phase)}
    best, least = (min(score.mape_pct for score in some.values()) for some in (scores, even))
    return even if least <= WORSE_BEYOND * best else scores


def _is_within(ratio: float, errors: Sequence[float], reference: Sequence[float]) -> bool:
    return all(own <= ratio * least for own, least in zip(errors, reference, strict=False))


def _without_constant(scores: Mapping[str, Score], rows: int) -> Mapping[str, Score]:
    line, flat = scores.get("linear"), scores.get("constant")
    if line is None or flat is None or line.mape_pct - flat.mape_pct > _errors_apart(rows) * paired_error(line, flat):
        return scores
    return {name: score for name, score in scores.items() if score is not flat}


def _errors_apart(rows: int) -> float:
    """Return the number of standard errors within which candidates count as equal."""
    return 1.0 if rows >= MANY_ROWS else 2.0


def paired_error(a: Score, b: Score) -> float:
    """Return the standard error of the difference of two models' errors over the folds, in percentage points."""
    ratio = np.log(np.maximum(a.by_fold, EXACT) / np.maximum(b.by_fold, EXACT))
    parts = [part for part in np.split(ratio, [len(ratio) - a.outside]) if len(part) > 1]
    error = np.linalg.norm([np.std(part, ddof=1) / np.sqrt(len(part)) for part in parts]) / max(len(parts), 1)
    return float(error) * min(a.mape_pct, b.mape_pct)


def _reason(name: str, scores: Mapping[str, Score]) -> str:
    rivals = {other: score for other, score in scores.items() if name == FLATTEST[0] or other != FLATTEST[0]}
    best = min(_without_losers(rivals), key=lambda other: scores[other].mape_pct)
    own = scores[name]
    others = [other for other in REFERENCE_MODELS if other in scores and other != name]
    against = f" ({', '.join(f'{other} {scores[other].mape_pct:.1f} %' for other in others)})" if others else ""
    if name == best:
        return f"{name} predicts held-out steps best: {own.mape_pct:.1f} % with {own.free} parameters{against}."
    return (
        f"{name} is the simplest model within the tolerance of the best: {own.mape_pct:.1f} % with {own.free} "
        f"parameters, {best} {scores[best].mape_pct:.1f} % with {scores[best].free}{against}."
    )
