"""The laws of observed over typical time that a fit keeps, of all steps and of each phase (see `model.step_ratios`).

The ratios are those to the fitted curve itself, not to one fitted without the step, about the level of the step's size
where the curve misses it: curve times level times mean ratio is then the mean of the measured steps, which is what a
queue's load goes by. Every measured step counts, marked
outliers too: they are part of what happens, unless they were dropped on purpose (`--drop outlier`). Batch sizes that do
not scatter alike have laws of their own (see `batch_groups`).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.fit.batch_groups import batch_groups
from latfit.fit.by_row import log_ratios, weights_by_row
from latfit.fit.problem import FitProblem
from latfit.model.size_levels import size_levels
from latfit.model.step_ratios import joined_ratios, step_ratios
from latfit.stats import FloatArray
from latfit.trace.phases import phases
from latfit.trace.table import Trace


def with_ratios(
    intervals: Mapping[str, Any], trace: Trace, problem: FitProblem, theta: FloatArray
) -> Mapping[str, Any]:
    """The `intervals` of the JSON contract, with `ratios` of all steps and of every phase in them."""
    ratio = np.exp(log_ratios(problem, theta, trace))
    weights, named = weights_by_row(trace), phases(trace).astype(str)
    B, S = trace.floats("B"), trace.floats("S")

    def law(rows: NDArray[np.bool_], entry: Mapping[str, Any]) -> dict[str, Any] | None:
        """entry: the phase's limits, which know for how many independent steps those count that follow each other."""
        if not rows.any():
            return None
        share = float(entry.get("in_time_share", 1.0))
        levels = size_levels(S[rows], ratio[rows], weights[rows], 1 / share)
        about = ratio[rows] / levels.factors(S[rows])
        group = batch_groups(B[rows], about, share * weights[rows])
        laws, low, high = [], [], []
        for g in range(int(group.max()) + 1):
            of = group == g
            steps = weights[rows][of]
            laws.append(step_ratios(about[of], steps, share * float(steps.sum()), levels))
            low.append(float(B[rows][of].min()))
            high.append(float(B[rows][of].max()))
        return joined_ratios(laws, np.array(low), np.array(high)).to_json()

    by_phase = {
        phase: {**entry, "ratios": law(named == phase, entry)} for phase, entry in intervals.get("by_phase", {}).items()
    }
    return {**intervals, "by_phase": by_phase, "ratios": law(np.ones(len(ratio), dtype=bool), intervals)}
