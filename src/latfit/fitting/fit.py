"""The front door of fitting: checks, solves, and gathers everything a `FitResult` holds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from latfit.errors import FitNotUsable
from latfit.fitting.checking.conformal import later_rows, prediction_intervals
from latfit.fitting.checking.crossval import HeldOut, Validated, cross_validate, further_validation
from latfit.fitting.checking.step_ratios import with_ratios
from latfit.fitting.data import FitData, fit_data, rows_of
from latfit.fitting.diagnostics.diagnose import diagnose
from latfit.fitting.diagnostics.warnings import cautions, cautions_in_time
from latfit.fitting.model_selection import resolved
from latfit.fitting.problem import FitOptions, FitProblem, log_ratios, make_problem
from latfit.fitting.solver.solve import Solution, solve, solved_once
from latfit.fitting.uncertainty.covariance import Uncertainty
from latfit.fitting.uncertainty.intervals import DoubtOptions, check, doubts
from latfit.fitting.uncertainty.report import Line, as_good, as_the_line_says, identifiability_report, told_with_line
from latfit.model import (
    Baseline,
    CrossValidation,
    DataFacts,
    Errors,
    Estimate,
    FitResult,
    FitStatus,
    Identifiability,
    LatencyModel,
    read_fit,
    typical_context,
)
from latfit.stats import FloatArray, error_metrics
from latfit.trace import Trace, check_one_machine, ingest
from latfit.warning import LatfitWarning

BASELINES = ("constant", "linear", "saturation")


@dataclass(frozen=True)
class _Scored:
    """A solved problem with its errors, in sample and on rows left out."""

    problem: FitProblem
    solution: Solution
    metrics: Errors
    validated: Validated | None

    @property
    def scores(self) -> CrossValidation:
        return self.validated.scores if self.validated else CrossValidation()

    @property
    def baseline(self) -> Baseline:
        return Baseline(**vars(self.metrics), cv=self.scores)


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
    asked = doubt or DoubtOptions()
    check(asked)
    rows = fit_data(trace)
    options, selection = resolved(rows, options or FitOptions())
    problem = make_problem(rows, options)
    origin = {**(provenance or {}), "fit_options": {**_stated(options), "intervals": asked.intervals}}
    facts = DataFacts.from_json(data or {})
    domain = _domain(rows)
    if status := _unusable(problem):
        empty = {p.name: Estimate(math.nan, None, None, None, p.unit, False) for p in problem.model.parameters}
        return FitResult(
            options.model, status, empty, Errors(problem.rows), domain=domain, data=facts, provenance=origin
        )
    found = _fitted(rows, options, asked)
    return replace(
        found,
        cross_validation=replace(found.cross_validation, selection=selection or None),
        domain=domain,
        data=facts,
        provenance=origin,
        typical=typical_context(rows.steps, rows.weights),
    )


def _fitted(data: FitData, options: FitOptions, asked: DoubtOptions) -> FitResult:
    """What is learnt from rows that can carry the model."""
    best = _scored(data, options)
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
    log_ratio = log_ratios(problem, theta, data)
    intervals = with_ratios(_intervals(data, left_out, later), data, log_ratio)
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
        warnings=[*warnings, *in_time, *_not_converged(best.solution)],
        bootstrap=left_open.bootstrap,
        draws=left_open.draws,
    )


def _scored(data: FitData, options: FitOptions) -> _Scored:
    problem, solution = solved_once(data, options)
    predicted = problem.model.latency_ms(problem.theta(solution.z), problem.steps)
    metrics = Errors.from_json(error_metrics(problem.observed, predicted, problem.weights))
    return _Scored(problem, solution, metrics, cross_validate(data, options, problem.theta(solution.z)))


def _baseline(data: FitData, name: str, options: FitOptions) -> _Scored:
    return _scored(data, replace(options, model=name, fixed={}, bounds={}, priors={}))


def _told(best: _Scored, doubt: Uncertainty, plain: _Scored | None) -> tuple[Uncertainty, Identifiability]:
    """What the data tell of the parameters, and the report of it."""
    problem = best.problem
    if best.scores.errors and plain and plain.scores.errors:
        theta = plain.problem.theta(plain.solution.z)
        values = {p.name: float(x) for p, x in zip(plain.problem.model.parameters, theta, strict=True)}
        line = Line(values, plain.scores.errors.mape_pct_by_fold)
        if as_good(problem, best.scores.errors.mape_pct_by_fold, line):
            found = as_the_line_says(problem, doubt, line)
            return found, told_with_line(identifiability_report(problem, best.solution, found), line)
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
        "solver": options.solver,
        "priors": {name: list(prior) for name, prior in options.priors.items()},
        "weights": options.weights,
    }


def fit_of(source: Path, options: FitOptions | None = None) -> FitResult:
    """The fit in a `.fit.json` file, or a fit of the trace in any other. Raises BadInput, FitNotUsable."""
    if source.name.endswith(".json"):
        found = read_fit(source)
    else:
        read = ingest(source)
        check_one_machine(read)
        found = fit_trace(read.trace, options)
    if not found.status.ok:
        raise FitNotUsable(found.status.sentence, where=str(source), remedy=found.status.remedy)
    return found


def solved(cells: Trace, model: str) -> tuple[LatencyModel, FloatArray, tuple[int, ...]] | None:
    """Model, theta (p,) and free parameters of a fit to cells, and nothing about it; None where they are too few."""
    problem = make_problem(rows_of(cells), FitOptions(model))
    if len(cells) < len(problem.free):
        return None
    theta = problem.theta(solve(problem).z)
    return (problem.model, theta, tuple(problem.free)) if np.all(np.isfinite(theta)) else None
