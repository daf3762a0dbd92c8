"""The front door of fitting: checks, solves, and gathers everything a `FitResult` holds."""

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
    FLOOR_REACHED,
    better_model,
    cautions,
    cautions_in_time,
    cliff_note,
    floor_of,
)
from latfit.fitting.diagnostics.pooled import pooled_systems
from latfit.fitting.model_selection import corrected, correction_reason, is_auto, resolved, rival
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
from latfit.stats import FloatArray, error_metrics
from latfit.trace import Trace, identity_of

BASELINES = ("constant", "linear", "saturation")


@dataclass(frozen=True)
class _Scored:
    """A solved problem with its errors, in sample and on rows left out."""

    problem: FitProblem
    solution: Solution
    metrics: Errors
    validated: Validated | None
    correction: Correction | None

    @property
    def scores(self) -> CrossValidation:
        return self.validated.scores if self.validated else CrossValidation()

    @property
    def baseline(self) -> Baseline:
        return Baseline(**structs.asdict(self.metrics), cv=self.scores)


def fit_trace(
    trace: Trace,
    options: FitOptions | None = None,
    *,
    doubt: DoubtOptions | None = None,
    data: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> FitResult:
    """Fit `options.model` to a clean trace of one system.

    doubt: how the intervals of parameters are made.  data, provenance: facts that are stored with the result. A trace
    that cannot carry the model gives a result whose status is not ok and says why; it is not an error. Raises
    WrongUsage for options that cannot be met, BadInput for weights below zero.
    """
    asked, wanted = doubt or DoubtOptions(), options or FitOptions()
    check(asked)
    everything = fit_data(trace)
    contradicting = contradictions(everything)
    rows = contradicting.without(everything) if contradicting else everything
    if windows := windows_of(trace, everything, wanted.window_means):
        kept = np.delete(np.arange(len(everything)), contradicting.left_out) if contradicting else np.arange(len(rows))
        found = _of_windows(rows, windows.at(kept), wanted, asked)
    else:
        found = _chosen(rows, wanted, asked)
    found = replace(
        found,
        data=DataFacts.from_json(data or {}),
        provenance={**(provenance or {}), "identity": identity_of(trace), **found.provenance},
    )
    if not found.status.ok:
        return found
    told = found.warnings
    if contradicting:
        told = [*contradicting.warnings(everything), *told]
        steps = contradicting.to_json(everything)
        found = replace(found, diagnostics=structs.replace(found.diagnostics, contradictions=steps))
    if pooled := pooled_systems(trace, everything):
        # what differs between systems is neither noise nor the model's
        told = [pooled.warning(), *(each for each in told if each.code not in EXPLAINED_BY_POOLING)]
    return replace(found, warnings=told)


WINDOW_ROUNDS, AS_BEFORE = 8, 1e-3
"""Fits to the latencies of mean steps, which end where none of them changes by more than a share of it."""


def _of_windows(rows: FitData, windows: Windows, wanted: FitOptions, asked: DoubtOptions) -> FitResult:
    """The fit of rows that are means over windows (see `windows`). Raises WrongUsage for a correction of them."""
    if wanted.model.endswith(CORRECTION):
        raise WrongUsage(
            f"the rows are means over windows, which do not know enough for {CORRECTION}",
            where="--model",
            remedy=f"Leave {CORRECTION} out, or record single steps.",
        )
    excess = np.zeros(len(rows))
    of_means = rows
    if not windows.known:
        if is_auto(wanted.model):
            wanted = replace(wanted, model="auto", candidates=LINEAR)
    else:
        options = wanted
        for number in range(WINDOW_ROUNDS):
            if number < 2:
                options = _supported(of_means, resolved(of_means, wanted)[0])[0]
            problem, end = solved_once(of_means, options)
            before, excess = excess, windows.log_excess(formula_of(problem, problem.theta(end.z)))
            of_means = replace(rows, observed=rows.observed * np.exp(-excess), found={})
            if np.max(np.abs(excess - before)) < AS_BEFORE:
                break
    found = _chosen(of_means, wanted, asked, steps=False)
    domain = {**found.domain, **windows.reached()} if found.domain else found.domain
    return replace(found, domain=domain, warnings=[windows.warning(found.model, excess), *found.warnings])


def _chosen(rows: FitData, wanted: FitOptions, asked: DoubtOptions, *, steps: bool = True) -> FitResult:
    """The fit of the model that is wanted, or of one that takes its place, with how it was chosen. steps: whether the
    rows are single ones, which know enough to correct it."""
    options, selection = resolved(rows, wanted)
    options, notes = _supported(rows, options)
    problem = make_problem(rows, options)
    status = _unusable(problem)
    held_out = None
    if status is None and steps:
        problem, solution = solved_once(rows, options)
        options, chosen = corrected(rows, options, wanted.model, problem.theta(solution.z))
        held_out = chosen.held_out if chosen else None
        if selection and chosen:
            selection = {**selection, "reason": f"{selection['reason']} {correction_reason(options.model, chosen)}"}
    facts: dict[str, Any] = {
        "domain": _domain(rows),
        "support": rows.spots.support(rows.weights),
        "provenance": {"fit_options": {**_stated(options), "intervals": asked.intervals}},
    }
    if status:
        empty = {p.name: Estimate(math.nan, None, None, None, p.unit, False) for p in problem.model.parameters}
        return FitResult(options.model, status, empty, Errors(problem.rows), **facts)
    found = _fitted(rows, options, asked, held_out)
    if not selection:
        notes = [*notes, *outdone(rows, options, found)]
    found = replace(
        found,
        warnings=[*notes, *found.warnings],
        cross_validation=structs.replace(found.cross_validation, selection=selection or None),
        typical=typical_context(rows.steps, rows.weights),
        **facts,
    )
    return with_cliffs(found, rows) if steps else found


def with_cliffs(found: FitResult, rows: FitData) -> FitResult:
    """Return the fit with its cliffs, and a note on them."""
    cliffs = find_cliffs(rows, found)
    notes = [note for axis in ("B", "S") if (note := cliff_note([each for each in cliffs.found if each.axis == axis]))]
    diagnostics = structs.replace(found.diagnostics, cliffs=cliffs)
    return replace(found, diagnostics=diagnostics, warnings=[*found.warnings, *notes])


def _supported(data: FitData, options: FitOptions) -> tuple[FitOptions, list[LatfitWarning]]:
    """The options with a model that the rows can carry, down to a line and a constant, and what to know of that. A user
    who said something of parameters meant that model."""
    tried = [options, *([] if _spoken(options) else [_line(options), replace(_line(options), model="constant")])]
    for each in tried:
        if _unusable(make_problem(data, each)) is None:
            missing = _unusable(make_problem(data, _line(options))) if each.model == "constant" else None
            status = missing or (None if each is options else _unusable(make_problem(data, options)))
            if status is None:
                return each, []
            found = f"{status.sentence} A model of type {each.model} was fitted."
            return each, [LatfitWarning("model_replaced", found, status.remedy)]
    return options, []


def _line(options: FitOptions) -> FitOptions:
    return replace(options, model="linear", fixed={}, bounds={}, priors={}, correction=None)


def _spoken(options: FitOptions) -> bool:
    """Whether a user said something of the parameters of one model."""
    natural = {name for name, value in options.fixed.items() if value != 0}
    return bool(natural or options.bounds or options.priors)


def _fitted(data: FitData, options: FitOptions, asked: DoubtOptions, held_out: HeldOut | None = None) -> FitResult:
    """What is learnt from rows that can carry the model. held_out: rows as predicted while left out, where known."""
    best = _scored(data, options, held_out)
    problem = best.problem
    theta = problem.theta(best.solution.z)
    left_open = doubts(problem, best.solution, data, asked)
    plain = {name: _baseline(data, name, options) for name in BASELINES if name != options.model}
    baselines = {name: scored.baseline for name, scored in plain.items()}
    found, report = _told(best, left_open.uncertainty, plain.get("linear"))
    values = {name: estimate.value for name, estimate in found.estimates.items()}
    error = best.scores.mape_pct or best.metrics.mape_pct or 0.0
    warnings = cautions(problem, data, values, report, error, baselines)
    left_out = best.validated.held_out if best.validated else None
    later = later_rows(data, options, theta)
    log_ratio = _log_ratios(problem, theta, data, best.correction)
    intervals = with_noise(_intervals(data, left_out, later), data, log_ratio)
    diagnostics = diagnose(problem, best.solution, found, data, log_ratio, later or left_out)
    in_time = cautions_in_time(intervals, diagnostics)
    return FitResult(
        model=options.model,
        status=_status(best.solution, found.unidentified),
        parameters=found.estimates,
        metrics=best.metrics,
        cross_validation=further_validation(data, options, theta, best.scores, later),
        baselines=baselines,
        identifiability=report,
        diagnostics=diagnostics,
        intervals=intervals,
        warnings=[*warnings, *_missing_intervals(intervals), *in_time, *_not_converged(best.solution)],
        bootstrap=left_open.bootstrap,
        draws=left_open.draws,
        correction=best.correction,
    )


def _scored(data: FitData, options: FitOptions, held_out: HeldOut | None = None) -> _Scored:
    problem, solution = solved_once(data, options)
    theta = problem.theta(solution.z)
    correction = _correction(data, options, problem, theta)
    predicted = problem.model.latency_ms(theta, problem.steps)
    if correction is not None:
        log_ratio = _log_ratios(problem, theta, data, correction)
        metrics = error_metrics(data.observed, data.observed * np.exp(-log_ratio), data.weights)
    else:
        metrics = error_metrics(problem.observed, predicted, problem.weights)
    validated = cross_validate(data, options, theta, held_out)
    return _Scored(problem, solution, Errors.from_json(metrics), validated, correction)


def _correction(data: FitData, options: FitOptions, problem: FitProblem, theta: FloatArray) -> Correction | None:
    """What the formula misses, learnt from all rows."""
    if options.correction is None:
        return None

    log_ratio = log_ratios(problem, theta, data)
    return fit_correction(data, log_ratio, options.correction, formula_of(problem, theta))


def _log_ratios(problem: FitProblem, theta: FloatArray, data: FitData, correction: Correction | None) -> FloatArray:
    """ln(observed/predicted) (n,) of all rows."""
    plain = log_ratios(problem, theta, data)
    return plain if correction is None else plain - correction.of_steps(data.steps)


def _baseline(data: FitData, name: str, options: FitOptions) -> _Scored:
    return _scored(data, replace(options, model=name, fixed={}, bounds={}, priors={}, correction=None))


def _told(best: _Scored, doubt: Uncertainty, plain: _Scored | None) -> tuple[Uncertainty, Identifiability]:
    """What the data tell of the parameters, and the report of it."""
    problem = best.problem
    own, line = best.scores.errors, plain.scores.errors if plain else None
    if own and line and line_as_good(problem, own.mape_pct_by_fold, line.mape_pct_by_fold):
        doubt = without_bends(problem, doubt)
        return doubt, of_line(identifiability_report(problem, best.solution, doubt))
    return doubt, identifiability_report(problem, best.solution, doubt)


def _unusable(problem: FitProblem) -> FitStatus | None:
    several_cells = problem.model.columns and int(problem.cells.max()) == 0
    if problem.rows < max(len(problem.free), 2):
        return FitStatus.TOO_FEW_ROWS
    if several_cells:
        return FitStatus.ONE_CELL
    if problem.model.columns and np.ptp(problem.observed) == 0:
        return FitStatus.CONSTANT_LATENCY
    return None


def _status(solution: Solution, unidentified: list[list[str]]) -> FitStatus:
    if not solution.converged:
        return FitStatus.NOT_CONVERGED
    return FitStatus.PARTLY_IDENTIFIED if unidentified else FitStatus.CONVERGED


def _not_converged(solution: Solution) -> list[LatfitWarning]:
    if solution.converged:
        return []
    return [LatfitWarning("not_converged", FitStatus.NOT_CONVERGED.sentence, FitStatus.NOT_CONVERGED.remedy)]


MIN_CELLS_FOR_90_PCT = 19  # a conformal limit at 95 % exists from n = 1 / (1 - 0.95) - 1 on


def _missing_intervals(intervals: Mapping[str, Any]) -> list[LatfitWarning]:
    """Return a warning where single steps have no 90 % interval: of all, or of a phase with rows enough to count."""
    if not intervals.get("by_phase"):
        return [
            LatfitWarning(
                "no_interval",
                "Predictions have no intervals: too few different steps to leave some out.",
                "Measure at least four different (B, S) cells.",
            )
        ]
    silent = [
        f"{phase} steps ({found['n']:,} in {found['cells']:,} cells)"
        for phase, found in intervals["by_phase"].items()
        if found["n"] >= PHASE_ROWS and found["ratio_quantiles"]["0.95"] is None and "autocorrelated" not in found
    ]
    if not silent:
        return []
    remedy = f"Measure at least {MIN_CELLS_FOR_90_PCT} (B, S) cells of each."
    return [LatfitWarning("no_interval", f"No 90 % interval for {' and '.join(silent)}.", remedy)]


WORTH_A_LOOK_PCT = 3.0
"""An error in percent above which other models are looked at."""


def outdone(data: FitData, options: FitOptions, found: FitResult) -> list[LatfitWarning]:
    """What another model predicts far better than the one that was named. Nothing where repeats show that no model can,
    or where the user has said more than a name."""
    error = found.cross_validation.mape_pct
    floor = floor_of(found)
    if error is None or error < WORTH_A_LOOK_PCT or (floor and error < FLOOR_REACHED * floor) or _spoken(options):
        return []
    best = rival(data, options)
    if best is None or best[1] > FAR_BETTER:
        return []
    return [better_model(options.model, best[0], (best[1] * error, error))]


def _intervals(data: FitData, left_out: HeldOut | None, later: HeldOut | None) -> dict[str, Any]:
    """From later rows predicted by earlier ones where the trace is in time, else from cells left out."""
    if later is not None:
        return prediction_intervals(data, later, ordered=True, blocks=left_out)
    return prediction_intervals(data, left_out, ordered=False) if left_out is not None else {}


def _domain(data: FitData) -> dict[str, list[float]]:
    columns = {"T_ms": data.observed, **data.steps}
    return {name: [float(column.min()), float(column.max())] for name, column in columns.items()}


def _stated(options: FitOptions) -> dict[str, Any]:
    return {
        "model": options.model,
        "loss": options.loss,
        "residuals": options.residuals,
        "fixed": dict(options.fixed),
        "bounds": {name: list(span) for name, span in options.bounds.items()},
        "starts": options.starts,
        "seed": options.seed,
        "solver": "separable",
        "priors": {name: list(prior) for name, prior in options.priors.items()},
        "weights": options.weights,
        **({"candidates": list(options.candidates)} if options.candidates else {}),
        **({"window_means": True} if options.window_means else {}),
    }


def solved(cells: Trace, model: str) -> tuple[LatencyModel, FloatArray, tuple[int, ...]] | None:
    """Model, theta (p,) and free parameters of a fit to cells, and nothing about it; None where they are too few."""
    problem = make_problem(rows_of(cells), FitOptions(model))
    if len(cells) < len(problem.free):
        return None
    theta = problem.theta(solve(problem).z)
    return (problem.model, theta, tuple(problem.free)) if np.all(np.isfinite(theta)) else None
