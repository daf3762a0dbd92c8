"""Fit a trace: choose the model, solve, correct, cross-validate, and gather everything that a `FitResult` holds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec import structs

from latfit.errors import WrongUsage
from latfit.fitting.checking.conformal import later_rows, prediction_intervals
from latfit.fitting.checking.crossval import PHASE_ROWS, HeldOut, Validated, cross_validate, further_validation
from latfit.fitting.checking.step_noise import with_noise
from latfit.fitting.correction import fit_correction
from latfit.fitting.data import FitData, fit_data, rows_of
from latfit.fitting.diagnostics.cliffs import find_cliffs
from latfit.fitting.diagnostics.contradictions import contradictions
from latfit.fitting.diagnostics.diagnose import diagnose
from latfit.fitting.diagnostics.messages import (
    EXPLAINED_BY_POOLING,
    FAR_BETTER,
    better_model,
    cautions,
    cautions_in_time,
    cliff_note,
    may_be_beaten,
)
from latfit.fitting.diagnostics.pooled import pooled_systems
from latfit.fitting.model_selection import corrected, correction_reason, find_rival, is_auto, resolved
from latfit.fitting.problem import FitOptions, FitProblem, formula_of, log_ratios, make_problem
from latfit.fitting.solver.solve import Solution, solve, solved_once
from latfit.fitting.uncertainty.covariance import Uncertainty
from latfit.fitting.uncertainty.intervals import DoubtOptions, check, doubts
from latfit.fitting.uncertainty.report import identifiability_report, line_as_good, of_line, without_bends
from latfit.fitting.windows import LINEAR, Windows, windows_of
from latfit.messages import Message as LatfitWarning
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
    LatencyModel,
    typical_context,
)
from latfit.records import to_builtins
from latfit.stats import FloatArray, error_metrics
from latfit.trace import Trace, identity_of

BASELINES = ("constant", "linear", "saturation")
MAX_WINDOW_FITS, MIN_WINDOW_CHANGE = 8, 1e-3  # fits to the latencies of mean steps, until none changes by this share
MIN_CELLS_FOR_90_PCT = 19  # a conformal limit at 95 % exists from n = 1 / (1 - 0.95) - 1 on


@dataclass(frozen=True)
class _Scored:
    """A solved problem with its errors, in sample and on rows left out."""

    problem: FitProblem
    solution: Solution
    correction: Correction | None
    log_ratio: FloatArray
    metrics: Errors
    validated: Validated | None

    @property
    def scores(self) -> CrossValidation:
        return self.validated.scores if self.validated else CrossValidation()


def fit_trace(
    trace: Trace,
    options: FitOptions | None = None,
    *,
    doubt: DoubtOptions | None = None,
    data: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> FitResult:
    """Fit `options.model` to a clean trace of one system.

    Parameters
    ----------
    doubt
        How the intervals of parameters are made.
    data, provenance
        Facts that are stored with the result.

    Returns
    -------
    FitResult
        Its status says why a trace does not suffice for a model; that is no error.

    Raises
    ------
    WrongUsage
        For options that cannot be met.
    BadInput
        For weights below zero.
    """
    intervals, options = doubt or DoubtOptions(), options or FitOptions()
    check(intervals)
    every = fit_data(trace)
    odd = contradictions(every)
    used = np.arange(len(every)) if odd is None else np.delete(np.arange(len(every)), odd.left_out)
    rows = every if len(used) == len(every) else every.sample(used)
    if windows := windows_of(trace, every, options.window_means):
        fit = _fit_windows(rows, windows.at(used), options, intervals)
    else:
        fit = _fit_rows(rows, options, intervals)
    provenance = {**(provenance or {}), "identity": identity_of(trace), **fit.provenance}
    fit = replace(fit, data=DataFacts.from_json(data or {}), provenance=provenance)
    if not fit.status.ok:
        return fit
    messages = fit.warnings
    if odd:
        messages = [*odd.warnings(every), *messages]
        fit = replace(fit, diagnostics=structs.replace(fit.diagnostics, contradictions=odd.to_json(every)))
    if pooled := pooled_systems(trace, every):
        # what differs between systems is neither noise nor the model's
        messages = [pooled, *(each for each in messages if each.code not in EXPLAINED_BY_POOLING)]
    return replace(fit, warnings=messages)


def _fit_windows(rows: FitData, windows: Windows, options: FitOptions, intervals: DoubtOptions) -> FitResult:
    """Fit rows that are means over windows (see `windows`). Raises WrongUsage for a correction of them."""
    if options.model.endswith(CORRECTION):
        raise WrongUsage(
            f"the rows are means over windows, which do not know enough for {CORRECTION}",
            where="--model",
            remedy=f"Leave {CORRECTION} out, or record single steps.",
        )
    excess, of_means = np.zeros(len(rows)), rows
    if not windows.known:
        if is_auto(options.model):
            options = replace(options, model="auto", candidates=LINEAR)
    else:
        for number in range(MAX_WINDOW_FITS):
            if number < 2:
                named = _supported(of_means, resolved(of_means, options)[0])[0]
            problem, end = solved_once(of_means, named)
            before, excess = excess, windows.log_excess(formula_of(problem, problem.theta(end.z)))
            of_means = replace(rows, observed=rows.observed * np.exp(-excess), found={})
            if np.max(np.abs(excess - before)) < MIN_WINDOW_CHANGE:
                break
    fit = _fit_rows(of_means, options, intervals, single=False)
    domain = {**fit.domain, **windows.reached()} if fit.domain else fit.domain
    return replace(fit, domain=domain, warnings=[windows.warning(fit.model, excess), *fit.warnings])


def _fit_rows(rows: FitData, wanted: FitOptions, intervals: DoubtOptions, *, single: bool = True) -> FitResult:
    """Fit the model that is wanted, or one that takes its place. single: the rows are steps, which may be corrected."""
    options, selection = resolved(rows, wanted)
    options, notes = _supported(rows, options)
    problem = make_problem(rows, options)
    columns = {"T_ms": rows.observed, **rows.steps}
    facts: dict[str, Any] = {
        "domain": {name: [float(column.min()), float(column.max())] for name, column in columns.items()},
        "support": rows.support(),
        "provenance": {"fit_options": {**_stated(options), "intervals": intervals.intervals}},
    }
    if status := _unusable(problem):
        empty = {p.name: Estimate(math.nan, None, None, None, p.unit, False) for p in problem.model.parameters}
        return FitResult(options.model, status, empty, Errors(problem.rows), **facts)
    held_out = None
    if single:
        problem, solution = solved_once(rows, options)
        options, chosen = corrected(rows, options, wanted.model, problem.theta(solution.z))
        if chosen:
            held_out = chosen.held_out
            if selection:
                selection["reason"] = f"{selection['reason']} {correction_reason(options.model, chosen)}"
    fit = _describe(rows, options, intervals, held_out)
    error = fit.cross_validation.mape_pct
    rival = find_rival(rows, options) if not selection and may_be_beaten(error, rows, options) else None
    if rival and error and rival[1] <= FAR_BETTER:
        notes = [*notes, better_model(options.model, rival[0], rival[1] * error, error)]
    fit = replace(
        fit,
        warnings=[*notes, *fit.warnings],
        cross_validation=structs.replace(fit.cross_validation, selection=selection or None),
        typical=typical_context(rows.steps, rows.weights),
        **facts,
    )
    return with_cliffs(fit, rows) if single else fit


def with_cliffs(fit: FitResult, rows: FitData) -> FitResult:
    """Return the fit with its cliffs, and a note on them."""
    cliffs = find_cliffs(rows, fit)
    notes = [note for axis in ("B", "S") if (note := cliff_note([each for each in cliffs.found if each.axis == axis]))]
    diagnostics = structs.replace(fit.diagnostics, cliffs=cliffs)
    return replace(fit, diagnostics=diagnostics, warnings=[*fit.warnings, *notes])


def _supported(data: FitData, options: FitOptions) -> tuple[FitOptions, list[LatfitWarning]]:
    """Return options with the named model, or a line or a constant where the rows do not suffice, and a message. A user
    who constrains parameters means the model that has them."""
    status = _unusable(make_problem(data, options))
    if status is None or options.bounds or options.priors or any(options.fixed.values()):
        return options, []
    for name in ("linear", "constant"):
        simpler = _plain(options, name)
        missing = _unusable(make_problem(data, simpler))
        if missing is None:
            text = f"{status.sentence} A model of type {name} was fitted."
            return simpler, [LatfitWarning("model_replaced", text, status.remedy)]
        status = missing
    return options, []


def _plain(options: FitOptions, model: str) -> FitOptions:
    """Return options for another model, without what was said of parameters."""
    return replace(options, model=model, fixed={}, bounds={}, priors={}, correction=None)


def _describe(data: FitData, options: FitOptions, intervals: DoubtOptions, held_out: HeldOut | None) -> FitResult:
    """Solve, score and describe a model that the rows suffice for. held_out: rows as predicted while left out."""
    best = _score(data, options, held_out)
    problem, scores = best.problem, best.scores
    theta = problem.theta(best.solution.z)
    open_ = doubts(problem, best.solution, data, intervals)
    plain = {name: _score(data, _plain(options, name)) for name in BASELINES if name != options.model}
    baselines = {name: Baseline(**structs.asdict(each.metrics), cv=each.scores) for name, each in plain.items()}
    uncertainty, report = _identify(best, open_.uncertainty, plain.get("linear"))
    values = {name: estimate.value for name, estimate in uncertainty.estimates.items()}
    error = scores.mape_pct or best.metrics.mape_pct or 0.0
    left_out, later = best.validated.held_out if best.validated else None, later_rows(data, options, theta)
    limits: dict[str, Any] = {}
    if later is not None:
        limits = prediction_intervals(data, later, ordered=True, blocks=left_out)
    elif left_out is not None:
        limits = prediction_intervals(data, left_out, ordered=False)
    noisy = with_noise(limits, data, best.log_ratio)
    diagnostics = diagnose(problem, theta, uncertainty, data, best.log_ratio, later or left_out)
    messages = [
        *cautions(problem, data, values, report, error, baselines),
        *_missing_intervals(noisy),
        *cautions_in_time(noisy, diagnostics),
    ]
    status = FitStatus.PARTLY_IDENTIFIED if uncertainty.unidentified else FitStatus.CONVERGED
    if not best.solution.converged:
        status = FitStatus.NOT_CONVERGED
        messages.append(LatfitWarning("not_converged", status.sentence, status.remedy))
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
        bootstrap=open_.bootstrap,
        draws=open_.draws,
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
    validated = cross_validate(data, options, theta, held_out)
    return _Scored(problem, solution, correction, log_ratio, Errors.from_json(metrics), validated)


def _identify(best: _Scored, doubt: Uncertainty, line: _Scored | None) -> tuple[Uncertainty, Identifiability]:
    """Return what the data show of the parameters; nothing of the bends where a line predicts as well."""
    own, simple = best.scores.errors, line.scores.errors if line else None
    if own and simple and line_as_good(best.problem, own.mape_pct_by_fold, simple.mape_pct_by_fold):
        doubt = without_bends(best.problem, doubt)
        return doubt, of_line(identifiability_report(best.problem, best.solution, doubt))
    return doubt, identifiability_report(best.problem, best.solution, doubt)


def _unusable(problem: FitProblem) -> FitStatus | None:
    """Return why the rows do not suffice for a model; None where they do."""
    if problem.rows < max(len(problem.free), 2):
        return FitStatus.TOO_FEW_ROWS
    if problem.model.columns and int(problem.cells.max()) == 0:
        return FitStatus.ONE_CELL
    if problem.model.columns and np.ptp(problem.observed) == 0:
        return FitStatus.CONSTANT_LATENCY
    return None


def _missing_intervals(intervals: Mapping[str, Any]) -> list[LatfitWarning]:
    """Return a warning where single steps have no 90 % interval: of all, or of a phase with rows enough to count."""
    if not intervals.get("by_phase"):
        text = "Predictions have no intervals: too few different steps to leave some out."
        return [LatfitWarning("no_interval", text, "Measure at least four different (B, S) cells.")]
    silent = [
        f"{phase} steps ({found['n']:,} in {found['cells']:,} cells)"
        for phase, found in intervals["by_phase"].items()
        if found["n"] >= PHASE_ROWS and found["ratio_quantiles"]["0.95"] is None and "autocorrelated" not in found
    ]
    if not silent:
        return []
    remedy = f"Measure at least {MIN_CELLS_FOR_90_PCT} (B, S) cells of each."
    return [LatfitWarning("no_interval", f"No 90 % interval for {' and '.join(silent)}.", remedy)]


def _stated(options: FitOptions) -> dict[str, Any]:
    """Return the options as a file holds them, without those that say nothing."""
    stated: dict[str, Any] = to_builtins(replace(options, correction=None))
    silent = [name for name in ("correction", "candidates", "window_means") if not stated[name]]
    return {"solver": "separable", **{name: value for name, value in stated.items() if name not in silent}}


def solved(cells: Trace, model: str) -> tuple[LatencyModel, FloatArray, tuple[int, ...]] | None:
    """Model, theta (p,) and free parameters of a fit to cells, and nothing about it; None where they are too few."""
    problem = make_problem(rows_of(cells), FitOptions(model))
    if len(cells) < len(problem.free):
        return None
    theta = problem.theta(solve(problem).z)
    return (problem.model, theta, tuple(problem.free)) if np.all(np.isfinite(theta)) else None
