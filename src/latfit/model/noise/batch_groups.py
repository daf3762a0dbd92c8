"""Groups of neighbouring batch sizes whose steps have the same noise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from latfit.stats import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class BatchGroups:
    """k groups in rising order: starts (k,), the first point of each; low and high (k,), its smallest and largest
    batch."""

    starts: IntArray
    low: FloatArray
    high: FloatArray

    def __len__(self) -> int:
        return len(self.starts)

    def of(self, batches: FloatArray) -> IntArray:
        """Number of the group (n,) that is nearest in ln B, the lower of two, for batches (n,), 1 or more."""
        return np.searchsorted(np.sqrt(self.high[:-1] * self.low[1:]), batches, side="left")

    def only(self, low: int, high: int) -> "BatchGroups":
        """Groups low..high - 1, their points counted from 0."""
        if high - low == 1:
            return ALIKE
        return BatchGroups(self.starts[low:high] - self.starts[low], self.low[low:high], self.high[low:high])

    def padded(self, buckets: Sequence[int]) -> "BatchGroups":
        """The same where a batch belongs to the group of the next of `buckets`: batches past the last bucket of a group
        are of the next one. A group without a bucket has no batch."""
        sizes = np.array(sorted(set(buckets)), dtype=np.float64)
        ends = np.searchsorted(self.of(sizes), np.arange(len(self)), side="right")
        # The largest batch of each group; up to the first bucket of all where the group is below it.
        last = np.where(ends > 0, sizes[np.maximum(ends, 1) - 1], 0.5)
        first = np.concatenate([[1.0], last[:-1] + 1])
        return BatchGroups(self.starts, first, last)

    def to_json(self, order: IntArray) -> dict[str, Any]:
        """With the group of each point in the given order (n,) of the points."""
        group = np.searchsorted(self.starts, order, side="right") - 1
        return {"low": self.low.tolist(), "high": self.high.tolist(), "group": group.tolist()}


ALIKE = BatchGroups(np.zeros(1, dtype=np.int64), np.ones(1), np.full(1, np.inf))
"""All batches in one group."""


def groups_from_json(document: Mapping[str, Any] | None, points: int) -> tuple[IntArray, BatchGroups]:
    """(order of the points (n,) in which the groups follow each other, groups). Raises ValueError, TypeError, KeyError
    for what are no groups."""
    if not document:
        return np.arange(points), ALIKE
    low, high = (np.asarray(document[name], dtype=np.float64) for name in ("low", "high"))
    group = np.asarray(document["group"], dtype=np.int64)
    ends = np.stack([low, high], axis=1).ravel() if low.shape == high.shape and low.ndim == 1 else np.empty(0)
    known = len(ends) > 0 and bool(np.all(np.isfinite(ends) & (ends > 0) & (np.diff(ends, prepend=0) >= 0)))
    if not known or group.shape != (points,) or set(group.tolist()) != set(range(len(low))):
        raise ValueError("groups of ratios are not rising batches with a group of each point")
    order = np.argsort(group, kind="stable")
    return order, BatchGroups(np.searchsorted(group[order], np.arange(len(low))), low, high)
