"""The correction table of a fit: T = formula * exp(g(x)), g multilinear on a grid in ln(1 + x).

The outermost nodes are about zero and clamp. Definition: docs/theory/fitting.md, "Correction table".
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from latfit.model.features import Features, features_of
from latfit.records import Record
from latfit.stats import FloatArray, IntArray

DECODING, PREFILL, CONTEXT, LENGTH = "decode_requests", "prefill_tokens", "decode_context", "prefill_length"
REQUESTS = "prefill_requests"

AXES: Mapping[str, tuple[Callable[[Features], FloatArray], tuple[str, ...]]] = {
    DECODING: (lambda f: f["D"], ("B", "prefill_requests")),
    PREFILL: (lambda f: f["P"], ("S", "prefill_tokens")),
    CONTEXT: (lambda f: f["KD"] / np.maximum(f["D"], 1.0), ("context_tokens",)),
    LENGTH: (lambda f: (f["KP"] + f["P"]) / np.maximum(f["n"], 1.0), ("context_tokens", "prefill_context_tokens")),
    REQUESTS: (lambda f: f["n"], ("prefill_requests",)),
}
"""Axes, each with the columns that it reads: decode requests, prefill tokens, cached tokens per decode request, cached
and new tokens per prefill request, prefill requests. More of any of them adds work."""

OF_STEPS, OF_PREFILL_ALONE = (DECODING, PREFILL, CONTEXT, LENGTH), (REQUESTS, PREFILL, LENGTH)
"""Axes of the table of all steps, and of the table of steps of prefill alone, in order."""

DECIMALS = 5  # of nodes and values
MOST = 20.0  # upper bound of |g| in a valid file
CORRECTION = "+correction"  # suffix of the name of a model with a correction


class Correction(Record, frozen=True, eq=False, omit_defaults=True):
    nodes: Mapping[str, FloatArray]  # rising values of ln(1 + x) by axis, (m_a,) each
    log_factor: FloatArray  # g at the nodes, the last axis fastest
    prefill_alone: "Correction | None" = None  # table of steps of prefill alone; None if they have none

    def __post_init__(self) -> None:
        tables: list[tuple[Correction, list[tuple[str, ...]]]] = [(self, [OF_STEPS, OF_PREFILL_ALONE])]
        if self.prefill_alone is not None:
            tables = [(self, [OF_STEPS]), (self.prefill_alone, [OF_PREFILL_ALONE])]
        for table, allowed in tables:
            names = [*table.nodes]
            if not names or names not in [[name for name in axes if name in names] for axes in allowed]:
                raise ValueError(f"no such axes: {', '.join(names) or 'none given'}")
        if any(each.ndim != 1 or len(each) < 2 or not np.all(np.diff(each) > 0) for each in self.nodes.values()):
            raise ValueError("nodes of an axis are two rising numbers or more")
        count = math.prod(map(len, self.nodes.values()))
        if self.log_factor.shape != (count,) or not np.all(np.abs(self.log_factor) < MOST):
            raise ValueError(f"log_factor is not a list of {count:,} numbers below {MOST:g}, one a node")

    def of_features(self, features: Features) -> FloatArray:
        corners, shares = corners_of(self.nodes, coordinates(self.nodes, features))
        g = np.asarray((self.log_factor[corners] * shares).sum(axis=1))
        if self.prefill_alone is None or not (only := prefill_only(features)).any():
            return g
        return np.where(only, self.prefill_alone.of_features(features), g)

    def of_steps(self, steps: Mapping[str, FloatArray]) -> FloatArray:
        return self.of_features(features_of(steps))

    @property
    def columns(self) -> tuple[str, ...]:
        tables = (self, self.prefill_alone)
        return tuple(name for table in tables if table is not None for axis in table.nodes for name in AXES[axis][1])


def prefill_only(features: Features) -> NDArray[np.bool_]:
    return np.asarray((features["P"] > 0) & (features["D"] == 0))


def coordinates(names: Iterable[str], features: Features) -> list[FloatArray]:
    return [np.log1p(np.maximum(AXES[name][0](features), 0.0)) for name in names]


def corners_of(nodes: Mapping[str, FloatArray], at: list[FloatArray]) -> tuple[IntArray, FloatArray]:
    """Return (indices of the nodes around each point, their weights), (n, 2^d) each. at: coordinates (n,) by axis."""
    lengths = [len(each) for each in nodes.values()]
    strides = [int(np.prod(lengths[a + 1 :])) for a in range(len(lengths))]
    low, part = [], []
    for x, known, stride in zip(at, nodes.values(), strides, strict=True):
        i = np.clip(np.searchsorted(known, x, side="right") - 1, 0, len(known) - 2)
        part.append(np.clip((x - known[i]) / (known[i + 1] - known[i]), 0.0, 1.0))
        low.append(i * stride)
    ends = list(itertools.product((0, 1), repeat=len(lengths)))
    base = np.sum(low, axis=0)
    corners = np.stack([base + sum(s for s, up in zip(strides, end, strict=True) if up) for end in ends], axis=1)
    shares = np.stack(
        [np.prod([w if up else 1.0 - w for w, up in zip(part, end, strict=True)], axis=0) for end in ends], axis=1
    )
    return corners, shares
