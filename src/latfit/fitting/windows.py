"""Rows that are means over windows: dashboards, counters or periodic log lines.

The mean latency of a window is that of its mean step where the model is linear in B and S. Other models need to know
how much B varies within a window: docs/theory/fitting.md, "Window means".
"""

from dataclasses import replace

import numpy as np

from latfit.errors import WrongUsage
from latfit.fitting.model_selection import is_auto
from latfit.fitting.problem import FitOptions
from latfit.messages import Message as LatfitWarning, message
from latfit.model import CORRECTION
from latfit.trace import Trace, facts_of

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
