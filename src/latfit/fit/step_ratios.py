"""The laws of observed over typical time that a fit keeps, of all steps and of each phase (see `model.step_ratios`).

The ratios are those to the fitted curve itself, not to one fitted without the step: typical time times the mean ratio
is then the mean of the measured steps, which is what a queue's load goes by. Every measured step counts, marked
outliers too: they are part of what happens, unless they were dropped on purpose (`--drop outlier`).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from latfit.fit.by_row import log_ratios, weights_by_row
from latfit.fit.problem import FitProblem
from latfit.model.step_ratios import step_ratios
from latfit.stats import FloatArray
from latfit.trace.phases import phases
from latfit.trace.table import Trace


def with_ratios(
    intervals: Mapping[str, Any], trace: Trace, problem: FitProblem, theta: FloatArray
) -> Mapping[str, Any]:
    """The `intervals` of the JSON contract, with `ratios` of all steps and of every phase in them."""
    ratio = np.exp(log_ratios(problem, theta, trace))
    weights, named = weights_by_row(trace), phases(trace).astype(str)
    by_phase = {
        phase: {**entry, "ratios": _ratios(ratio[named == phase], weights[named == phase], entry)}
        for phase, entry in intervals.get("by_phase", {}).items()
    }
    return {**intervals, "by_phase": by_phase, "ratios": _ratios(ratio, weights, intervals)}


def _ratios(ratio: FloatArray, weights: FloatArray, entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """A law for JSON. entry: the phase's limits, which know how many independent steps they count."""
    if not len(ratio):
        return None
    worth = float(entry.get("independent_share", 1.0))
    return step_ratios(ratio, weights, worth * float(weights.sum())).to_json()
