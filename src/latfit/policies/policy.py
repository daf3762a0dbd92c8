"""Policies by name: a code with its parameters, and the order in which requests are taken from the queue.

Each maker checks its parameters and says in `needs_side` whether it cannot work without a second path. A policy is
data: `decide` asks the compiled decision, which the simulator uses too.

The optimal rule as a table: for each number waiting at an idle server, how many to serve. It solves nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from latfit.errors import WrongUsage
from latfit.policies import codes
from latfit.policies.marginal_cost import RULES
from latfit.stats import FloatArray


@dataclass(frozen=True)
class DispatchTable:
    """batches[q] of q waiting requests are served, 0 to wait, q = 0, 1, ...; beyond its end as many as at its end, the
    batch for long queues. Solved for `rate` per ms and batches up to `max_batch`."""

    batches: tuple[int, ...]
    rate: float
    max_batch: int

    def __post_init__(self) -> None:
        fits = all(0 <= b <= min(q, self.max_batch) for q, b in enumerate(self.batches))
        if not fits or not self.batches or self.batches[-1] < 1:
            raise WrongUsage(
                "an entry is above what waits or the largest batch, or the last one serves nobody",
                where="dispatch table",
                remedy="Give a batch of 0 to q for each number q waiting, at the end one above 0.",
            )

    @property
    def threshold(self) -> int:
        """Smallest queue that is served."""
        return next(q for q, b in enumerate(self.batches) if b)

    @property
    def _end(self) -> int:
        """Beyond it nothing changes."""
        return max(len(self.batches), self.max_batch) + 1

    def takes(self, waiting: int) -> int:
        """How many to serve now; 0 to wait."""
        return self.batches[min(waiting, len(self.batches) - 1)]


ACTIONS = ("wait", "serve main", "serve side", "move to side")


@dataclass(frozen=True)
class QueueOrder:
    """Which request is next. Classes count from 0, the most urgent; within a class first come, first served.

    ageing_ms: waiting so long makes up for one class; infinite: a class always goes before the next one.
    """

    ageing_ms: float = math.inf

    def __post_init__(self) -> None:
        if not self.ageing_ms > 0:
            raise WrongUsage(
                "ageing must be above zero", where="ageing", remedy="Give the ms that make up for a class."
            )


@dataclass(frozen=True)
class QueueView:
    """What a policy sees. free: when a server of the path is next free, not after `now_ms` where one is idle."""

    now_ms: float
    waiting: int
    oldest_ms: float
    main_free_ms: float = 0.0
    side_free_ms: float = math.inf
    side_waiting: int = 0
    due_ms: float = math.inf

    def as_array(self) -> FloatArray:
        view = np.empty(codes.VIEW)
        view[codes.NOW], view[codes.WAITING], view[codes.OLDEST] = self.now_ms, self.waiting, self.oldest_ms
        view[codes.MAIN_FREE], view[codes.SIDE_FREE] = self.main_free_ms, self.side_free_ms
        view[codes.SIDE_WAITING], view[codes.DUE] = self.side_waiting, self.due_ms
        return view


@dataclass(frozen=True)
class Decision:
    """action: one of ACTIONS; take: how many from the front of the queue.

    For `wait`: ask again at `until_ms`, when `at` requests wait, or when a path becomes free.
    """

    action: str
    take: int
    until_ms: float
    at: int


@dataclass(frozen=True, eq=False)
class Policy:
    """A rule as data: its name, code and parameters (see `codes`). Make one with the functions of this module."""

    name: str
    code: int
    parameters: FloatArray
    settings: Mapping[str, Any] = field(default_factory=dict)
    order: QueueOrder = QueueOrder()
    needs_side: bool = False

    @property
    def main_largest(self) -> int:
        return int(self.parameters[codes.MAIN_LARGEST])

    @property
    def long_queue_batch(self) -> int:
        """Batch by which the main path serves a long queue; it decides what load is carried."""
        return self.main_largest if self.code != codes.OPTIMAL else min(self.main_largest, int(self.parameters[-1]))

    @property
    def side_largest(self) -> int:
        return int(self.parameters[codes.SIDE_LARGEST])

    def decide(self, view: QueueView, times_ms: FloatArray) -> Decision:
        """What to do now. times_ms: T(b) in ms (2, largest + 1) for b = 0, 1, ... on the main and the side path."""
        from latfit.policies.dispatch import decide

        action, take, until, at = decide(self.code, self.parameters, times_ms, view.as_array())
        return Decision(ACTIONS[action], int(take), float(until), int(at))


@dataclass(frozen=True)
class Limits:
    """Largest batches of the two paths; side 0 where there is no second path or it is not to be used."""

    main: int
    side: int = 0

    def __post_init__(self) -> None:
        if self.main < 1 or self.side < 0:
            raise WrongUsage(
                f"largest batches {self.main} and {self.side}", where="--max-batch", remedy="Give 1 or more."
            )


def gpu_only(limits: Limits, order: QueueOrder = QueueOrder()) -> Policy:
    """Greedy: an idle server takes all that wait."""
    return Policy("gpu-only", codes.GREEDY, _parameters(limits), {"max_batch": limits.main}, order)


def fixed(batch: int, limits: Limits) -> Policy:
    """Exactly `batch` requests at a time."""
    if not 1 <= batch <= limits.main:
        raise WrongUsage(
            f"a fixed batch of {batch}, where batches may hold 1 to {limits.main}",
            where="--batch",
            remedy="Give a batch that the path can take.",
        )
    parameters = _parameters(Limits(batch, limits.side), {codes.THRESHOLD: batch})
    return Policy("fixed", codes.FIXED, parameters, {"batch": batch})


def window(window_ms: float, limits: Limits, order: QueueOrder = QueueOrder()) -> Policy:
    """A batch starts when it is full or its oldest request has waited `window_ms`."""
    wait = _above_zero(window_ms, "--window", zero=True)
    settings = {"window_ms": wait, "max_batch": limits.main}
    return Policy("window", codes.WINDOW, _parameters(limits, {codes.PATIENCE: wait}), settings, order)


def marginal_cost(rate: float, limits: Limits, rule: str = "amortised", longest_ms: float = math.inf) -> Policy:
    """Wait for one more request while that pays, by one of the rules in `marginal_cost`, at `rate` per ms; no request
    waits longer than `longest_ms` for others."""
    if rule not in RULES:
        raise WrongUsage(f"rule {rule!r} is not known", where="--rule", remedy=f"Take one of {', '.join(RULES)}.")
    values = {
        codes.RATE: _above_zero(rate, "--rate"),
        codes.RULE: list(RULES).index(rule),
        codes.PATIENCE: longest_ms,
    }
    settings = {"rule": rule, "rate_per_ms": rate, "max_batch": limits.main}
    return Policy("marginal-cost", codes.MARGINAL, _parameters(limits, values), settings)


def cutoff(cutoff_ms: float, limits: Limits) -> Policy:
    """Greedy, with waiting cut off at `cutoff_ms`: who still waits moves to the side path."""
    wait = _above_zero(cutoff_ms, "--t-cut")
    parameters = _parameters(_with_side(limits, "cutoff"), {codes.T_CUT: wait})
    return Policy("cutoff", codes.CUTOFF, parameters, {"t_cut_ms": wait}, needs_side=True)


def three_stage(threshold: int, cutoff_ms: float, limits: Limits) -> Policy:
    """`threshold` (B1) or more go to the main path; fewer to the side path where it is idle and ends no later; the rest
    waits, for `cutoff_ms` at most."""
    wait = _above_zero(cutoff_ms, "--t-cut")
    if threshold < 1:
        raise WrongUsage(f"a threshold of {threshold}", where="B1", remedy="Give 1 or more.")
    parameters = _parameters(_with_side(limits, "three-stage"), {codes.T_CUT: wait, codes.THRESHOLD: threshold})
    settings = {"B1": threshold, "t_cut_ms": wait}
    return Policy("three-stage", codes.THREE_STAGE, parameters, settings, needs_side=True)


def optimal(table: DispatchTable, limits: Limits) -> Policy:
    """The table that `queueing.dispatch_mdp` solved for a rate: how many to serve of each number waiting."""
    header = _parameters(Limits(min(limits.main, table.max_batch), limits.side))
    batches = np.array(table.batches, dtype=np.float64)
    settings = {"threshold": table.threshold, "rate_per_ms": table.rate, "max_batch": int(header[codes.MAIN_LARGEST])}
    return Policy("optimal", codes.OPTIMAL, np.concatenate([header, batches]), settings)


def split(limits: Limits, merge_below: int = 1, longest_ms: float = 0.0) -> Policy:
    """The queue is split over both paths where that is fastest; fewer than `merge_below` requests wait for others, for
    `longest_ms` at most."""
    values = {codes.THRESHOLD: merge_below, codes.PATIENCE: _above_zero(longest_ms, "window", zero=True)}
    parameters = _parameters(_with_side(limits, "split"), values)
    settings = {"merge_below": merge_below, "longest_ms": longest_ms}
    return Policy("split", codes.SPLIT, parameters, settings, needs_side=True)


def deadline(limits: Limits, order: QueueOrder = QueueOrder()) -> Policy:
    """Batches as full as the deadlines of the waiting requests allow."""
    return Policy("deadline", codes.DEADLINE, _parameters(limits), {"max_batch": limits.main}, order)


def _parameters(limits: Limits, values: Mapping[int, float] | None = None) -> FloatArray:
    parameters = np.zeros(codes.HEADER)
    parameters[codes.PATIENCE] = parameters[codes.T_CUT] = math.inf
    parameters[codes.MAIN_LARGEST], parameters[codes.SIDE_LARGEST] = limits.main, limits.side
    for place, value in (values or {}).items():
        parameters[place] = value
    return parameters


def _with_side(limits: Limits, name: str) -> Limits:
    if limits.side < 1:
        raise WrongUsage(
            f"policy {name} needs two execution paths",
            where="--policy",
            remedy="Add the other one with `latfit hardware add`, or take a policy that needs only one.",
        )
    return limits


def _above_zero(value: float, where: str, *, zero: bool = False) -> float:
    if math.isnan(value) or value < 0 or (value == 0 and not zero):
        raise WrongUsage(f"{value:g} ms is not above zero", where=where, remedy="Give a time above zero.")
    return float(value)


def to_buckets(times_ms: FloatArray, buckets: Sequence[int]) -> FloatArray:
    """T(b) in ms (..., largest + 1) of an engine that pads a batch to the next of `buckets`, the last being the cap."""
    sizes = np.array(sorted(set(buckets)), dtype=np.int64)
    if not len(sizes) or sizes[0] < 1 or sizes[-1] >= times_ms.shape[-1]:
        raise WrongUsage(
            f"buckets {list(buckets)} are not between 1 and the largest batch",
            where="buckets",
            remedy="Give the batch sizes that the engine has captured.",
        )
    b = np.arange(sizes[-1] + 1)
    padded: FloatArray = times_ms[..., sizes[np.searchsorted(sizes, b)]]
    return padded
