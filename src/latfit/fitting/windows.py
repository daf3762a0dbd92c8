"""Fits to window means: rows from dashboards, counters or periodic log lines.

The mean of f over a window is not f of the mean where f bends. Each window is replaced by two points per variable that
match its mean and variance, and rows are fitted as T/q with q = E f(x)/f(E x). Without standard deviations only models
linear in B and S are identifiable. Derivation: docs/theory/fitting.md, "Window means".
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.correction import Formula
from latfit.fitting.data import FitData
from latfit.messages import Message as LatfitWarning
from latfit.stats import FloatArray
from latfit.trace import LARGEST_REQUESTS, LARGEST_TOKENS, Trace, are_window_means
from latfit.units import format_percent

LINEAR = ("constant", "linear")  # models whose mean over a window equals the latency of its mean step
LEAST_BENT = 1e-4


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows behind the rows of a trace. B_sd, S_sd: standard deviations within each window (n,); None if unknown."""

    steps: Mapping[str, FloatArray]  # mean step of each row (n,)
    B_sd: FloatArray | None
    S_sd: FloatArray | None
    most_requests: float = 0.0  # largest number of requests seen in a step
    most_tokens: float = math.inf  # upper bound of the tokens of a step

    @property
    def known(self) -> bool:
        """Whether the variation within windows is known."""
        prefill = np.any(self.steps["S"] > self.steps["B"])
        counted = {"prefill_requests", "prefill_tokens"} <= set(self.steps)
        return self.B_sd is not None and (self.S_sd is not None or counted or not prefill)

    def at(self, rows: NDArray[np.intp]) -> "Windows":
        """Return some of the rows."""
        B_sd, S_sd = (None if spread is None else spread[rows] for spread in (self.B_sd, self.S_sd))
        return replace(self, steps={name: column[rows] for name, column in self.steps.items()}, B_sd=B_sd, S_sd=S_sd)

    def reached(self) -> dict[str, list[float]]:
        """Return {column: [low, high]} of B and S over the points of the windows; empty if the variation is unknown."""
        if not self.known:
            return {}
        points = [(steps["B"][weight > 0], steps["S"][weight > 0]) for weight, steps in self._points()]
        B, S = (np.concatenate(each) for each in zip(*points, strict=True))
        return {
            "B": [float(B.min()), max(float(B.max()), self.most_requests)],
            "S": [float(S.min()), max(min(float(S.max()), self.most_tokens), float(self.steps["S"].max()))],
        }

    def log_excess(self, formula: Formula) -> FloatArray:
        """Return ln q (n,): the mean latency over each window relative to the latency of its mean step."""
        total = np.zeros(len(self.steps["B"]))
        for weight, steps in self._points():
            total += weight * formula(steps)
        return np.asarray(np.log(total / formula(self.steps)))

    def _points(self) -> list[tuple[FloatArray, dict[str, FloatArray]]]:
        """Return the points of each window as (weights (n,), steps)."""
        assert self.B_sd is not None
        B, S = self.steps["B"], self.steps["S"]
        n = self.steps.get("prefill_requests", np.zeros_like(B))
        D, P = np.maximum(B - n, 0.0), np.maximum(S - B + n, 0.0)
        found = []
        for share_D, decode in _two_points(D, self.B_sd):
            for share_P, prefill in self._prefill_points(P, n):
                found.append((share_D * share_P, self._step(decode / np.where(D > 0, D, 1), prefill, (D, P, n))))
        return found

    def _prefill_points(self, P: FloatArray, n: FloatArray) -> list[tuple[FloatArray, FloatArray]]:
        """Return points (weights (n,), prefill tokens (n,)) for means P of prefill tokens and n of prefill requests."""
        assert self.B_sd is not None
        spread = None if self.S_sd is None else np.maximum(self.S_sd**2 - self.B_sd**2, 0.0)
        if "prefill_requests" in self.steps:
            share = np.where(P > 0, np.clip(np.maximum(n, P / self.most_tokens), 1e-9, 1.0), 1.0)
        elif spread is not None:
            share = np.where(spread > P**2, 1 / (1 + spread / np.maximum(P, 1e-9) ** 2), 1.0)
        else:
            share = np.ones_like(P)
        each = P / share
        rest = 0.0 * P if spread is None else np.maximum((spread + P**2) / share - each**2, 0.0)
        held = [(share * weight, x) for weight, x in _two_points(each, np.sqrt(rest))]
        return [(1 - share, np.zeros_like(P)), *held]

    def _step(
        self, decode: FloatArray, prefill: FloatArray, means: tuple[FloatArray, FloatArray, FloatArray]
    ) -> dict[str, FloatArray]:
        """Return steps with `decode` times the mean decode requests and `prefill` tokens. means: D, P, n, (n,) each."""
        D, P, n = means
        part = prefill / np.where(P > 0, P, 1)
        n_here, D_here = n * part, D * decode
        B = np.maximum(D_here + n_here, 1.0)
        context = self.steps.get("context_tokens", np.zeros_like(B))
        cached = np.minimum(self.steps.get("prefill_context_tokens", np.zeros_like(B)), context)
        every = {
            "B": B,
            "S": np.maximum(D_here + prefill, B),
            "prefill_requests": n_here,
            "prefill_tokens": prefill,
            "context_tokens": (context - cached) * decode + cached * part,
            "prefill_context_tokens": cached * part,
        }
        return {name: every[name] for name in self.steps}

    def warning(self, model: str, log_excess: FloatArray) -> LatfitWarning:
        """Return the warning for a fit of window means. log_excess: ln q of the fit (n,)."""
        told = "The rows are means over windows"
        tails = "how single steps scatter is not in them, so intervals are those of windows"
        if self.known:
            most = float(np.max(np.abs(np.expm1(log_excess))))
            bent = f" (a step of mean size takes up to {format_percent(100 * most)} else)" if most > LEAST_BENT else ""
            found = f"{told}, fitted as means over their steps{bent}; {tails}."
            return LatfitWarning("window_means", found, "Record single steps to plan for percentiles.")
        why = "and nothing says how the steps of a window differ"
        so = "so only what is linear in B and S is identifiable"
        if model not in LINEAR:
            so = f"so the bends of {model} may be those of the windows"
        remedy = "Give their standard deviations (columns B_sd and S_sd), or record single steps."
        return LatfitWarning("window_means", f"{told}, {why}, {so}; {tails}.", remedy)


def _two_points(mean: FloatArray, spread: FloatArray) -> list[tuple[FloatArray, FloatArray]]:
    """Return two points (weights (n,), values (n,)) with given mean and standard deviation and Poisson skewness."""
    c = np.where(mean > 0, spread / np.where(mean > 0, mean, 1.0), 0.0)
    root = np.sqrt(1 + c**2 / 4)
    upper = 0.5 - c / (4 * root)
    return [(1 - upper, mean * (1 + c**2 / 2 - c * root)), (upper, mean * (1 + c**2 / 2 + c * root))]


def windows_of(trace: Trace, data: FitData, asked: bool) -> Windows | None:
    """Return the windows of a trace; None if its rows are steps. asked: the user declared the rows to be means."""
    if not (asked or are_window_means(trace)) or len(trace) != len(data):
        return None
    B_sd, S_sd = (_told(trace, name) for name in ("B_sd", "S_sd"))
    requests, tokens = (_largest(trace, name) for name in (LARGEST_REQUESTS, LARGEST_TOKENS))
    return Windows(dict(data.steps), B_sd, S_sd, max(requests, default=0.0), max(tokens, default=math.inf))


def _largest(trace: Trace, name: str) -> list[float]:
    """Return the largest step that each file of a trace states; empty if a file states none."""
    parts = trace.provenance.get("parts")
    files = list(parts.values()) if isinstance(parts, Mapping) else [trace.provenance]
    told = [each.get(name) for each in files if isinstance(each, Mapping)]
    known = [float(value) for value in told if isinstance(value, int | float) and 0 < value < math.inf]
    return known if len(known) == len(files) else []


def _told(trace: Trace, name: str) -> FloatArray | None:
    """Return a column of standard deviations (n,), zero where missing; None if no row has one."""
    if name not in trace:
        return None
    found = trace.floats(name)
    return np.where(found > 0, found, 0.0) if np.any(found > 0) else None
