"""Fit a trace: choose the model, solve, correct, cross-validate, and gather a `FitResult`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec import structs

from latfit.errors import WrongUsage
from latfit.fitting.bootstrap import DoubtOptions, check, doubts
from latfit.fitting.checking.cliffs import find_cliffs
from latfit.fitting.checking.conformal import later_rows, prediction_intervals
from latfit.fitting.checking.contradictions import contradictions, pooled_systems
from latfit.fitting.checking.crossval import HeldOut, cross_validate, further_validation
from latfit.fitting.checking.diagnose import diagnose
from latfit.fitting.checking.messages import (
    EXPLAINED_BY_POOLING,
    cautions,
    cliff_notes,
    missing_intervals,
)
from latfit.fitting.checking.step_noise import with_noise
from latfit.fitting.correction import fit_correction
from latfit.fitting.covariance import line_as_good, without_bends
from latfit.fitting.data import FitData, fit_data
from latfit.fitting.model_selection import add_correction, is_auto, resolve_model
from latfit.fitting.problem import FitOptions, FitProblem, formula_of, log_ratios, make_problem
from latfit.fitting.solver.solve import Solution, solved_once
from latfit.messages import Message as LatfitWarning, message
from latfit.model import (
    CORRECTION,
    Baseline,
    Correction,
    CrossValidation,
    DataFacts,
    Errors,
    Estimate,
    FitResult,
    FitStatus,
    Identifiability,
    decode_only,
    typical_context,
)
from latfit.records import to_builtins
from latfit.stats import FloatArray, error_metrics
from latfit.trace import Trace, are_window_means, facts_of, identity_of

LINEAR = ("constant", "linear")  # models whose mean over a window equals the latency of its mean step


def is_spread_known(trace: Trace) -> bool:
    return "B_sd" in trace and bool(np.any(trace.floats("B_sd") > 0))


def options_of_windows(trace: Trace, options: FitOptions) -> FitOptions:
    """Return options for window means. Raises WrongUsage for a correction of them."""
    if options.model.endswith(CORRECTION):
        raise WrongUsage(
            f"the rows are means over windows, which do not know enough for {CORRECTION}",
            where="--model",
            remedy=f"Leave {CORRECTION} out, or record single steps.",
        )
    if is_auto(options.model) and not is_spread_known(trace):
        return replace(options, model="auto", candidates=LINEAR)
    return options


def window_warning(model: str, spread_known: bool) -> LatfitWarning:
    found = "The rows are means over windows, each fitted as its mean step"
    tails = "how single steps scatter is not in them, so intervals are those of windows"
    if spread_known:
        return message("window_means", what=f"{found}; {tails}.", remedy="Record single steps to plan for percentiles.")
    so = "so only what is linear in B and S is identifiable"
    if model not in LINEAR:
        so = f"so the bends of {model} may be those of the windows"
    remedy = "Give their standard deviations (columns B_sd and S_sd), or record single steps."
    return message("window_means", what=f"{found}, and their spread is not known, {so}; {tails}.", remedy=remedy)


def largest_step(trace: Trace) -> dict[str, float]:
    """Return bounds of B and S of a step; 0 where a file of the trace states none.

    A step with a whole prompt is in its window, though in no mean.
    """
    sources = facts_of(trace.provenance).sources
    stated = {
        "B": [each.largest_step_requests or 0.0 for each in sources],
        "S": [each.largest_step_tokens or 0.0 for each in sources],
    }
    return {name: max(bounds) if min(bounds) > 0 else 0.0 for name, bounds in stated.items()}


BASELINES = ("constant", "linear", "saturation")


@dataclass(frozen=True)
class _Scored:
    problem: FitProblem
    solution: Solution
    correction: Correction | None
    log_ratio: FloatArray  # ln(observed/predicted) of all rows (n,)
    metrics: Errors
    scores: CrossValidation
    held_out: HeldOut | None


def fit_trace(
    trace: Trace,
    options: FitOptions | None = None,
    *,
    doubt: DoubtOptions | None = None,
    data: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> FitResult:
    """Fit `options.model` to a clean trace of one system; the status says why a trace does not suffice.

    doubt: intervals of parameters. data, provenance: facts stored with the result. Raises WrongUsage, BadInput.
    """
    doubt, wanted = doubt or DoubtOptions(), options or FitOptions()
    check(doubt)
    every = fit_data(trace)
    odd = contradictions(every)
    rows = every if odd is None else every.sample(np.delete(np.arange(len(every)), odd.left_out))
    windows = wanted.window_means or are_window_means(trace)
    if windows:
        wanted = options_of_windows(trace, wanted)
    chosen, selection = resolve_model(rows, wanted)
    chosen, notes = _supported(rows, chosen)
    facts: dict[str, Any] = {
        "domain": _domain(rows, largest_step(trace) if windows else {}),
        "support": rows.support(),
        "data": DataFacts.from_json(data or {}),
        "provenance": {
            **(provenance or {}),
            "identity": identity_of(trace),
            "fit_options": {**_stated(chosen), "intervals": doubt.intervals},
        },
    }
    problem = make_problem(rows, chosen)
    if status := _unusable(problem):
        empty = {p.name: Estimate(math.nan, None, None, None, p.unit, False) for p in problem.model.parameters}
        return FitResult(chosen.model, status, empty, Errors(problem.rows), **facts)
    if not windows:
        problem, solution = solved_once(rows, chosen)
        chosen, correction = add_correction(rows, chosen, wanted.model, problem.theta(solution.z))
        if correction and selection:
            selection["reason"] = f"{selection['reason']} A table learnt from its residuals corrects what it misses."
    best = _score(rows, chosen, correction.held_out if not windows and correction else None)
    fit = structs.replace(
        _describe(rows, chosen, best, doubt), typical=typical_context(rows.steps, rows.weights), **facts
    )
    if not windows:
        fit = structs.replace(fit, diagnostics=structs.replace(fit.diagnostics, cliffs=find_cliffs(rows, fit)))
    if odd:
        fit = structs.replace(fit, diagnostics=structs.replace(fit.diagnostics, contradictions=odd.to_json(every)))
    messages = [
        *(odd.warnings(every) if odd else []),
        *([window_warning(fit.model, is_spread_known(trace))] if windows else []),
        *notes,
        *fit.warnings,
        *(cliff_notes(fit.diagnostics.cliffs.found) if fit.diagnostics.cliffs else []),
    ]
    if pooled := pooled_systems(trace, every):
        # what differs between systems is neither noise nor the model's
        messages = [pooled, *(each for each in messages if each.code not in EXPLAINED_BY_POOLING)]
    tested = structs.replace(fit.cross_validation, selection=selection or None)
    return structs.replace(fit, warnings=messages, cross_validation=tested)


def _domain(rows: FitData, largest: Mapping[str, float]) -> dict[str, list[float]]:
    columns = {"T_ms": rows.observed, **rows.steps}
    found = {name: [float(column.min()), float(column.max())] for name, column in columns.items()}
    for name, bound in largest.items():
        found[name][1] = max(found[name][1], bound)
    return found


def _supported(data: FitData, options: FitOptions) -> tuple[FitOptions, list[LatfitWarning]]:
    """Return the options, or those of a line or constant where rows do not suffice for an unconstrained model."""
    status = _unusable(make_problem(data, options))
    if status is None or options.bounds or options.priors or any(options.fixed.values()):
        return options, []
    for name in ("linear", "constant"):
        simpler = _plain(options, name)
        missing = _unusable(make_problem(data, simpler))
        if missing is None:
            return simpler, [message("model_replaced", why=status.sentence, model=name, remedy=status.remedy)]
        status = missing
    return options, []


def _plain(options: FitOptions, model: str) -> FitOptions:
    return replace(options, model=model, fixed={}, bounds={}, priors={}, correction=None)


def _describe(data: FitData, options: FitOptions, best: _Scored, doubt: DoubtOptions) -> FitResult:
    problem, scores = best.problem, best.scores
    theta = problem.theta(best.solution.z)
    uncertainty, resampled, draws = doubts(problem, best.solution, data, doubt)
    baselines = {}
    for name in (each for each in BASELINES if each != options.model):
        plain = _score(data, _plain(options, name))
        baselines[name] = Baseline(**structs.asdict(plain.metrics), cv=plain.scores)
    as_good = line_as_good(problem, scores.errors, baselines.get("linear", Baseline()).cv.errors)
    uncertainty = without_bends(problem, uncertainty) if as_good else uncertainty
    report = Identifiability(
        uncertainty.condition_number,
        uncertainty.unidentified,
        prefill=not decode_only(problem.steps, problem.weights),
        singular_values=None if uncertainty.directions is None else uncertainty.directions.singular.tolist(),
        line_as_good=as_good,
    )
    left_out, later = best.held_out, later_rows(data, options, theta)
    limits: dict[str, Any] = {}
    if later is not None:
        limits = prediction_intervals(data, later, ordered=True, blocks=left_out)
    elif left_out is not None:
        limits = prediction_intervals(data, left_out, ordered=False)
    noisy = with_noise(limits, data, best.log_ratio)
    diagnostics = diagnose(problem, theta, uncertainty, data, best.log_ratio, later or left_out)
    values = {name: estimate.value for name, estimate in uncertainty.estimates.items()}
    error = scores.mape_pct or best.metrics.mape_pct or 0.0
    messages = [*cautions(problem, data, values, report, error, baselines, diagnostics), *missing_intervals(noisy)]
    status = FitStatus.PARTLY_IDENTIFIED if uncertainty.unidentified else FitStatus.CONVERGED
    if not best.solution.converged:
        status = FitStatus.NOT_CONVERGED
        messages.append(message("not_converged", why=status.sentence, remedy=status.remedy))
    return FitResult(
        model=options.model,
        status=status,
        parameters=uncertainty.estimates,
        metrics=best.metrics,
        cross_validation=further_validation(data, options, theta, scores, later),
        baselines=baselines,
        identifiability=report,
        diagnostics=diagnostics,
        intervals=noisy,
        warnings=messages,
        bootstrap=resampled,
        draws=draws,
        correction=best.correction,
    )


def _score(data: FitData, options: FitOptions, held_out: HeldOut | None = None) -> _Scored:
    """Solve a model, learn its correction if the options have one, and cross-validate it."""
    problem, solution = solved_once(data, options)
    theta = problem.theta(solution.z)
    log_ratio, correction = log_ratios(problem, theta, data), None
    if options.correction is not None:
        correction = fit_correction(data, log_ratio, options.correction, formula_of(problem, theta))
        log_ratio = log_ratio - correction.of_steps(data.steps)
    metrics = error_metrics(data.observed, data.observed * np.exp(-log_ratio), data.weights)
    scores, held_out = cross_validate(data, options, theta, held_out)
    return _Scored(problem, solution, correction, log_ratio, Errors.from_json(metrics), scores, held_out)


def _unusable(problem: FitProblem) -> FitStatus | None:
    if problem.rows < max(len(problem.free), 2):
        return FitStatus.TOO_FEW_ROWS
    if problem.model.columns and int(problem.cells.max()) == 0:
        return FitStatus.ONE_CELL
    if problem.model.columns and np.ptp(problem.observed) == 0:
        return FitStatus.CONSTANT_LATENCY
    return None


def _stated(options: FitOptions) -> dict[str, Any]:
    stated: dict[str, Any] = to_builtins(replace(options, correction=None))
    silent = [name for name in ("correction", "candidates", "window_means") if not stated[name]]
    return {"solver": "separable", **{name: value for name, value in stated.items() if name not in silent}}
