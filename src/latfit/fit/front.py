"""The front door of fitting: checks, solves, and gathers everything a `FitResult` holds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from latfit.fit.by_row import predicted_by_row
from latfit.fit.cautions import cautions
from latfit.fit.crossval import CrossValidation, HeldOut, cross_validate, further_validation
from latfit.fit.diagnostics import diagnose, explain
from latfit.fit.intervals import later_rows, prediction_intervals
from latfit.fit.problem import FitOptions, FitProblem, make_problem
from latfit.fit.select import resolved
from latfit.fit.solve import Solution, solve
from latfit.fit.uncertainty import uncertainty
from latfit.fit.verdict import identifiability_report, verified
from latfit.model.features import SOURCES
from latfit.model.result import Caution, Estimate, FitResult, FitStatus
from latfit.stats import error_metrics
from latfit.trace.table import Trace

BASELINES = ("constant", "linear", "saturation")


@dataclass(frozen=True)
class _Scored:
    """A solved problem with its errors, in sample and on rows left out."""

    problem: FitProblem
    solution: Solution
    metrics: Mapping[str, float]
    held_out: CrossValidation | None


def fit_trace(
    trace: Trace,
    options: FitOptions | None = None,
    *,
    data: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> FitResult:
    """Fit `options.model` to a clean trace of one system.

    data, provenance: facts that are stored with the result. A trace that cannot carry the model gives a result whose
    status is not ok and says why; it is not an error. Raises WrongUsage for options that cannot be met.
    """
    options, selection = resolved(trace, options or FitOptions())
    problem = make_problem(trace, options)
    origin = {**(provenance or {}), "fit_options": _stated(options)}
    facts = dict(data or {})
    domain = _domain(trace)
    if status := _unusable(problem):
        empty = {p.name: Estimate(math.nan, None, None, None, p.unit, False) for p in problem.model.parameters}
        return FitResult(
            options.model, status, empty, {"n": problem.rows}, domain=domain, data=facts, provenance=origin
        )
    best = _scored(trace, problem)
    doubt = verified(problem, best.solution, uncertainty(problem, best.solution))
    baselines = {name: _baseline(trace, name, options) for name in BASELINES if name != options.model}
    status = _status(best.solution, doubt.unidentified)
    scores = best.held_out.scores if best.held_out else {}
    values = {name: estimate.value for name, estimate in doubt.estimates.items()}
    warnings = list(cautions(problem, trace, values, doubt.unidentified, scores or best.metrics, baselines))
    theta = problem.theta(best.solution.z)
    left_out = best.held_out.held_out if best.held_out else None
    later = later_rows(trace, options, theta)
    tests = diagnose(trace, predicted_by_row(problem, theta, trace), free=len(problem.free), seed=options.seed)
    return FitResult(
        model=options.model,
        status=status,
        parameters=doubt.estimates,
        metrics=best.metrics,
        cross_validation={
            **scores,
            **further_validation(trace, options, theta, later),
            **({"selection": selection} if selection else {}),
        },
        baselines=baselines,
        identifiability=identifiability_report(problem, best.solution, doubt),
        diagnostics={**tests, **explain(problem, best.solution, doubt, trace, later or left_out)},
        intervals=_intervals(trace, left_out, later),
        domain=domain,
        warnings=[*warnings, *_not_converged(best.solution)],
        data=facts,
        provenance=origin,
    )


def _scored(trace: Trace, problem: FitProblem) -> _Scored:
    solution = solve(problem)
    predicted = problem.model.latency_ms(problem.theta(solution.z), problem.steps)
    metrics = error_metrics(problem.observed, predicted, problem.weights)
    held_out = cross_validate(trace, problem.options, problem.theta(solution.z))
    return _Scored(problem, solution, metrics, held_out)


def _baseline(trace: Trace, name: str, options: FitOptions) -> dict[str, Any]:
    scored = _scored(trace, make_problem(trace, replace(options, model=name, fixed={}, bounds={}, priors={})))
    return {**scored.metrics, "cv": dict(scored.held_out.scores) if scored.held_out else {}}


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


def _not_converged(solution: Solution) -> list[Caution]:
    if solution.converged:
        return []
    return [Caution("not_converged", FitStatus.NOT_CONVERGED.sentence, FitStatus.NOT_CONVERGED.remedy)]


def _intervals(trace: Trace, left_out: HeldOut | None, later: HeldOut | None) -> dict[str, Any]:
    """From later rows predicted by earlier ones where the trace is in time, else from cells left out."""
    if later is not None:
        return prediction_intervals(trace, later, ordered=True)
    return prediction_intervals(trace, left_out, ordered=False) if left_out is not None else {}


def _domain(trace: Trace) -> dict[str, list[float]]:
    names = [name for name in ("T_ms", *SOURCES) if name in trace and np.all(np.isfinite(trace.floats(name)))]
    return {name: [float(np.nanmin(trace.floats(name))), float(np.nanmax(trace.floats(name)))] for name in names}


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
