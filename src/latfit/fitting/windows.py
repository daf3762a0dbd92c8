"""Rows that are means over the steps of a window: from dashboards, counters, or lines that a server logs now and then.

With x = (B, S, ...) of a step and T = f(x), a row tells the means of x and T over its steps, and E f(x) is not f(E x)
where f bends:

    E f(x) = f(mu) + 1/2 sum_ij f_ij(mu) cov(x_i, x_j) + ...,

so a curve through the means is off by half its curvature times the variance within windows, and at a sharp corner by
0.4 standard deviations times the change of slope: a tenth for max(16, B) and batches that scatter like Poisson's. Let
q = E f(x) / f(mu), by the f that was fitted so far. Then T/q is what a step of mean size takes, and rows of T/q are
fitted as steps are. At the fixed point of doing so again the residual is ln T - ln E f(x), which is zero in the mean at
the truth: the fit is consistent, and means of what is linear stay as they are.

E f is a sum over points. For one variable of mean mu and standard deviation s, with c = s/mu, two points

    mu (1 + c^2/2 -+ c sqrt(1 + c^2/4)), the upper one with the weight 1/2 - c/4 / sqrt(1 + c^2/4),

have that mean, that variance and the skewness c of Poisson's; the lower one stays above zero. (Evaluating f there needs
no derivatives, which a corner does not have, and is exact to third order.) Requests that decode and prefill tokens are
taken to scatter independently of each other, so that cov(B, S) = var B, and what prefill tokens scatter by follows from
`S_sd`. Most steps hold none, some hold many: where prefill_requests are known, a share of the steps holds prefill, one
request each as far as that goes, and `S_sd` tells how these differ; where they are not, and the tokens scatter by more
than their mean, the share 1/(1 + c^2), which has their mean and variance.

The points are also what a fit of windows has measured: steps with a whole prompt are in them, though in no mean. A
source may know the largest step besides: requests that ran at a moment, tokens that no step exceeded.

Where a row tells neither, no data can say how much of a bend is the machine's and how much the windows': then `auto`
fits what is linear in B and S, for which it makes no difference, and the warning says so. A model that was named is
fitted to the means as they are, and the warning says that.

The scatter of single steps is not in the means of many, so intervals are those of windows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.correction import Formula
from latfit.fitting.data import FitData
from latfit.stats import FloatArray
from latfit.trace import LARGEST_REQUESTS, LARGEST_TOKENS, Trace, are_window_means
from latfit.units import format_percent
from latfit.warning import LatfitWarning

LINEAR = ("constant", "linear")
"""Models whose mean over a window is that of its mean step."""


LEAST_BENT = 1e-4


@dataclass(frozen=True, eq=False)
class Windows:
    """steps: mean step of each row, B_sd, S_sd: standard deviations within its window, (n,) each; None where nobody
    tells.  most_requests: of a step that was seen; most_tokens: that no step exceeded."""

    steps: Mapping[str, FloatArray]
    B_sd: FloatArray | None
    S_sd: FloatArray | None
    most_requests: float = 0.0
    most_tokens: float = math.inf

    @property
    def known(self) -> bool:
        """Whether the rows tell how the steps of a window differ."""
        prefill = np.any(self.steps["S"] > self.steps["B"])
        counted = {"prefill_requests", "prefill_tokens"} <= set(self.steps)
        return self.B_sd is not None and (self.S_sd is not None or counted or not prefill)

    def at(self, rows: NDArray[np.intp]) -> "Windows":
        """Some of the rows."""
        B_sd, S_sd = (None if spread is None else spread[rows] for spread in (self.B_sd, self.S_sd))
        return replace(self, steps={name: column[rows] for name, column in self.steps.items()}, B_sd=B_sd, S_sd=S_sd)

    def reached(self) -> dict[str, list[float]]:
        """{column: [least, most]} of B and S over the steps that stand for those of the windows; empty where these are
        not known."""
        if not self.known:
            return {}
        points = [(steps["B"][weight > 0], steps["S"][weight > 0]) for weight, steps in self._points()]
        B, S = (np.concatenate(each) for each in zip(*points, strict=True))
        return {
            "B": [float(B.min()), max(float(B.max()), self.most_requests)],
            "S": [float(S.min()), max(min(float(S.max()), self.most_tokens), float(self.steps["S"].max()))],
        }

    def log_excess(self, formula: Formula) -> FloatArray:
        """ln q (n,): of the mean over each window's steps over the latency of its mean step."""
        total = np.zeros(len(self.steps["B"]))
        for weight, steps in self._points():
            total += weight * formula(steps)
        return np.asarray(np.log(total / formula(self.steps)))

    def _points(self) -> list[tuple[FloatArray, dict[str, FloatArray]]]:
        """(weights (n,), steps) that stand for those of each window."""
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
        """(weights (n,), prefill tokens (n,)) from the means of prefill tokens and prefill requests."""
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
        """The steps with so many times the mean requests that decode, and so many prefill tokens."""
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
        """What a user should know. log_excess: as the fit took it (n,)."""
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
    """(weights (n,), values (n,)) of two points with a mean, a standard deviation, and the skewness of Poisson's."""
    c = np.where(mean > 0, spread / np.where(mean > 0, mean, 1.0), 0.0)
    root = np.sqrt(1 + c**2 / 4)
    upper = 0.5 - c / (4 * root)
    return [(1 - upper, mean * (1 + c**2 / 2 - c * root)), (upper, mean * (1 + c**2 / 2 + c * root))]


def windows_of(trace: Trace, data: FitData, asked: bool) -> Windows | None:
    """What the rows of a trace tell of their windows; None where they are steps. asked: whether a user said that they
    are means."""
    if not (asked or are_window_means(trace)) or len(trace) != len(data):
        return None
    B_sd, S_sd = (_told(trace, name) for name in ("B_sd", "S_sd"))
    requests, tokens = (_largest(trace, name) for name in (LARGEST_REQUESTS, LARGEST_TOKENS))
    return Windows(dict(data.steps), B_sd, S_sd, max(requests, default=0.0), max(tokens, default=math.inf))


def _largest(trace: Trace, name: str) -> list[float]:
    """What each file of a trace says of its largest step; nothing where one of them is silent."""
    parts = trace.provenance.get("parts")
    files = list(parts.values()) if isinstance(parts, Mapping) else [trace.provenance]
    told = [each.get(name) for each in files if isinstance(each, Mapping)]
    known = [float(value) for value in told if isinstance(value, int | float) and 0 < value < math.inf]
    return known if len(known) == len(files) else []


def _told(trace: Trace, name: str) -> FloatArray | None:
    """A standard deviation (n,), zero where a row tells none; None where no row does."""
    if name not in trace:
        return None
    found = trace.floats(name)
    return np.where(found > 0, found, 0.0) if np.any(found > 0) else None
