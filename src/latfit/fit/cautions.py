"""What a user should know about a fit before trusting it, each with what to do about it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from latfit.fit.problem import FitProblem
from latfit.model.features import decode_only
from latfit.model.result import Caution
from latfit.trace.table import Trace

LARGE_ERROR_PCT = 15.0
AS_GOOD_PCT = 0.1


def cautions(
    problem: FitProblem,
    trace: Trace,
    values: Mapping[str, float],
    unidentified: Sequence[Sequence[str]],
    scores: Mapping[str, Any],
    baselines: Mapping[str, Mapping[str, Any]],
) -> Iterator[Caution]:
    """Warnings of a usable fit; scores are its cross-validation (or its metrics where there is none)."""
    for name, (low, high) in problem.options.bounds.items():
        for end in (low, high):
            if np.isclose(values[name], end, rtol=1e-9, atol=0):
                found = f"{name} ends on the bound {end:g} that it was given."
                yield Caution("at_bound", found, "Widen --bounds, or leave it out.")
    for group in unidentified:
        yield Caution("not_identified", _cannot_tell(group), _what_to_measure(problem, group, values))
    error = float(scores.get("mape_pct", 0.0))
    line = baselines.get("linear", {}).get("cv", {}).get("mape_pct")
    if line is not None and problem.model.name != "linear" and line <= error + AS_GOOD_PCT:
        yield Caution(
            "line_as_good",
            f"A straight line predicts unseen cells as well ({line:.1f} % against {error:.1f} %).",
            "Nothing is lost with --model linear on these data; batches below saturation would tell the two apart.",
        )
    if decode_only(problem.steps, problem.weights):
        yield Caution(
            "decode_only",
            "These steps hold no prefill, so the fit says nothing about steps that do.",
            "Measure steps with prefill (S > B) before predicting them.",
        )
    if error > LARGE_ERROR_PCT:
        yield Caution("large_error", f"The typical error on unseen cells is {error:.0f} %.", _why_large(problem, trace))


def _cannot_tell(group: Sequence[str]) -> str:
    if len(group) == 1:
        return f"{group[0]} is not determined by these data."
    return f"{', '.join(group[:-1])} and {group[-1]} cannot be told apart by these data."


def _full_at_once(problem: FitProblem, values: Mapping[str, float]) -> set[str]:
    """Rates whose saturation factor is one at every measured size."""
    return {rate for rate, column in problem.model.rates if values[rate] * float(problem.steps[column].min()) > 5}


def _what_to_measure(problem: FitProblem, group: Sequence[str], values: Mapping[str, float]) -> str:
    B, S = problem.steps["B"], problem.steps["S"]
    if B.min() == B.max():
        return f"Measure other batch sizes than B={B[0]:g}."
    if np.all(S == B):
        return "Measure steps with prefill (S > B): decode alone cannot separate requests from tokens."
    if problem.model.rates and set(group) <= _full_at_once(problem, values):
        return "The machine is full from the smallest size measured, so nothing depends on it here; no remedy needed."
    wanted = []
    if {"k_B", "tau_B"} & set(group):
        wanted.append(f"small batches at many tokens (B = 1, 2, 4 at S >= {np.quantile(S, 0.9):.0f})")
    if {"k_S", "w_0", "P_max", "tau_S"} & set(group):
        wanted.append(f"few and many tokens at one batch size (S from 1 to {8 * S.max():.0f})")
    return (
        f"Measure {' and '.join(wanted or ['a wider range of B and S'])}; predictions inside the data are not affected."
    )


def _why_large(problem: FitProblem, trace: Trace) -> str:
    if "context_tokens" in trace and np.ptp(trace.floats("context_tokens")) > 0:
        return (
            "The cached context varies here and this model does not read it; fit rows of similar context with --where."
        )
    if "run" in trace and len(set(trace["run"].tolist())) > 1:
        return "Look at the residuals by run in the report: the runs may differ in more than B and S."
    return "Look at the residuals in the report; something besides B and S decides the latency here."
