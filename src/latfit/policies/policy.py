"""Batching policies as data: a code with parameters, constructors that check them, names and defaults.

`latfit.policies.dispatch` executes a policy, the simulator and the live router use it. `POLICIES` lists all of them;
`needs_side` marks those that need a second path. Policies and defaults: docs/concepts/simulation.md.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from latfit.errors import WrongUsage, refuse_taken
from latfit.policies import codes
from latfit.policies.marginal_cost import RULES
from latfit.stats import FloatArray

DEFAULT_LOAD = 0.8
TIE = 1e-9


@dataclass(frozen=True)
class DispatchTable:
    """Table of the optimal rule: `batches[q]` of q waiting requests are served, 0 to wait.

    A longer queue is served as the last entry says. Solved for `rate` per ms and batches up to `max_batch`.
    """

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

    def takes(self, waiting: int) -> int:
        """Return how many to serve now; 0 to wait."""
        return self.batches[min(waiting, len(self.batches) - 1)]


@dataclass(frozen=True)
class QueueOrder:
    """Order of waiting requests: by class from 0, the most urgent, then first come first served.

    `ageing_ms` is the waiting time worth one class; infinite means strict priority.
    """

    ageing_ms: float = math.inf

    def __post_init__(self) -> None:
        if not self.ageing_ms > 0:
            raise WrongUsage(
                "priority ageing must be above zero", where="ageing", remedy="Give the waiting time worth one class."
            )


@dataclass(frozen=True, eq=False)
class Policy:
    """A policy as data: name, code and parameters (see `codes`). Use the constructors of this module."""

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
        """Batch by which the main path serves a long queue, which determines the capacity."""
        return self.main_largest if self.code != codes.OPTIMAL else min(self.main_largest, int(self.parameters[-1]))

    @property
    def side_largest(self) -> int:
        return int(self.parameters[codes.SIDE_LARGEST])


@dataclass(frozen=True)
class Limits:
    """Largest batches of the two paths; `side` is 0 if there is no second path or it is unused."""

    main: int
    side: int = 0

    def __post_init__(self) -> None:
        if self.main < 1 or self.side < 0:
            raise WrongUsage(
                f"largest batches {self.main} and {self.side}", where="--set max_batch", remedy="Give 1 or more."
            )


def gpu_only(limits: Limits, order: QueueOrder = QueueOrder()) -> Policy:
    """Serve all waiting requests on an idle server (greedy)."""
    return Policy("gpu-only", codes.GREEDY, _parameters(limits), {"max_batch": limits.main}, order)


def fixed(batch: int, limits: Limits) -> Policy:
    """Serve exactly `batch` requests at a time."""
    if not 1 <= batch <= limits.main:
        raise WrongUsage(
            f"a fixed batch of {batch}, where batches may hold 1 to {limits.main}",
            where="--batch",
            remedy="Give a batch that the path can take.",
        )
    parameters = _parameters(Limits(batch, limits.side), {codes.THRESHOLD: batch})
    return Policy("fixed", codes.FIXED, parameters, {"batch": batch})


def window(window_ms: float, limits: Limits, order: QueueOrder = QueueOrder()) -> Policy:
    """Start a batch when it is full or its oldest request has waited `window_ms`."""
    wait = _above_zero(window_ms, "--window", zero=True)
    settings = {"window_ms": wait, "max_batch": limits.main}
    return Policy("window", codes.WINDOW, _parameters(limits, {codes.PATIENCE: wait}), settings, order)


def marginal_cost(rate: float, limits: Limits, rule: str = "amortised", longest_ms: float = math.inf) -> Policy:
    """Wait for one more request while a rule of `marginal_cost` says so at `rate` per ms, for `longest_ms` at most."""
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
    """Serve greedily; after `cutoff_ms` a request may go to an idle side path that finishes it no later."""
    wait = _above_zero(cutoff_ms, "--t-cut")
    parameters = _parameters(_with_side(limits, "cutoff"), {codes.T_CUT: wait})
    return Policy("cutoff", codes.CUTOFF, parameters, {"t_cut_ms": wait}, needs_side=True)


def three_stage(threshold: int, cutoff_ms: float, limits: Limits) -> Policy:
    """Send `threshold` (B1) or more requests to the main path, and to an idle side path what it finishes no later.

    Other requests wait for a larger batch, for `cutoff_ms` at most.
    """
    wait = _above_zero(cutoff_ms, "--t-cut")
    if threshold < 1:
        raise WrongUsage(f"a threshold of {threshold}", where="B1", remedy="Give 1 or more.")
    parameters = _parameters(_with_side(limits, "three-stage"), {codes.T_CUT: wait, codes.THRESHOLD: threshold})
    settings = {"B1": threshold, "t_cut_ms": wait}
    return Policy("three-stage", codes.THREE_STAGE, parameters, settings, needs_side=True)


def optimal(table: DispatchTable, limits: Limits) -> Policy:
    """Serve by a table solved for a rate: how many to serve for each number waiting."""
    header = _parameters(Limits(min(limits.main, table.max_batch), limits.side))
    batches = np.array(table.batches, dtype=np.float64)
    settings = {"threshold": table.threshold, "rate_per_ms": table.rate, "max_batch": int(header[codes.MAIN_LARGEST])}
    return Policy("optimal", codes.OPTIMAL, np.concatenate([header, batches]), settings)


def split(limits: Limits, merge_below: int = 1, longest_ms: float = 0.0) -> Policy:
    """Split the queue over both paths with the least total delay.

    Fewer than `merge_below` requests wait for more, for `longest_ms` at most.
    """
    values = {codes.THRESHOLD: merge_below, codes.PATIENCE: _above_zero(longest_ms, "window", zero=True)}
    parameters = _parameters(_with_side(limits, "split"), values)
    settings = {"merge_below": merge_below, "longest_ms": longest_ms}
    return Policy("split", codes.SPLIT, parameters, settings, needs_side=True)


def deadline(limits: Limits, order: QueueOrder = QueueOrder()) -> Policy:
    """Serve batches as full as the deadlines of the waiting requests allow."""
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


Solve = Callable[[float, FloatArray], DispatchTable]
"""Solver of the optimal table, from a rate per ms and T(1), T(2), ... (n,) in ms; `queueing.dispatch_mdp` has one."""


@dataclass(frozen=True)
class Settings:
    """Settings of a user; None for the default.

    `max_batch` and `ageing_ms` apply to every policy, the others to policies that list them in POLICIES.
    """

    batch: int | None = None
    window_ms: float | None = None
    t_cut_ms: float | None = None
    B1: int | None = None
    max_batch: int | None = None
    rule: str = "amortised"
    longest_ms: float = math.inf
    merge_below: int = 1
    ageing_ms: float = math.inf


@dataclass(frozen=True, eq=False)
class PathTimes:
    """T(1), T(2), ... in ms on the main and the side path, up to their largest batches; servers of the main path."""

    main: FloatArray
    side: FloatArray = field(default_factory=lambda: np.empty(0))
    servers: int = 1


def default_batch(rate: float, times: PathTimes) -> int:
    """Return the smallest batch with capacity for the rate at 80 % load, else the one with the largest capacity."""
    sizes = np.arange(1, len(times.main) + 1)
    carried = times.servers * sizes / times.main
    enough = np.flatnonzero(carried >= rate / DEFAULT_LOAD)
    return int(sizes[enough[0]]) if len(enough) else int(sizes[np.argmax(carried)])


def default_cutoff_ms(rate: float, times: PathTimes) -> float:
    """Return T of the batch that forms while one like it is served, b = rate T(b) per server; at least T(1)."""
    share, batch = rate / times.servers, 1
    for _ in range(len(times.main)):
        formed = min(len(times.main), max(1, math.ceil(share * float(times.main[batch - 1]) - TIE)))
        if formed <= batch:
            break
        batch = formed
    return float(times.main[batch - 1])


def default_threshold(times: PathTimes) -> int:
    """Return B1, the smallest batch that the main path finishes no later than the side path, else one more than all."""
    both = min(len(times.main), len(times.side))
    at = np.flatnonzero(times.main[:both] <= times.side[:both])
    return int(at[0]) + 1 if len(at) else both + 1


@dataclass(frozen=True, eq=False)
class Inputs:
    """Inputs of a named policy: rate per ms, times of the paths, settings, largest batches, and a solver."""

    arrivals: float
    times: PathTimes
    settings: Settings
    limits: Limits
    solve: Solve | None

    @property
    def rate(self) -> float:
        """Arrival rate per ms for the defaults. Raises WrongUsage if the load has no rate."""
        if not (math.isfinite(self.arrivals) and self.arrivals > 0):
            raise WrongUsage(
                "the requests have no rate (one alone, or all at once), and the policy's default goes by it",
                where="--policy",
                remedy="Set what the policy goes by (--t-cut, --batch), or take gpu-only, fixed or window.",
            )
        return self.arrivals

    @property
    def cutoff_ms(self) -> float:
        given = self.settings.t_cut_ms
        return default_cutoff_ms(self.rate, self.times) if given is None else given


def _fixed(inputs: Inputs) -> Policy:
    batch = inputs.settings.batch
    return fixed(default_batch(inputs.rate, inputs.times) if batch is None else batch, inputs.limits)


def _window(inputs: Inputs) -> Policy:
    window_ms = inputs.settings.window_ms
    return window(float(inputs.times.main[0]) if window_ms is None else window_ms, inputs.limits)


def _three_stage(inputs: Inputs) -> Policy:
    B1 = inputs.settings.B1
    return three_stage(default_threshold(inputs.times) if B1 is None else B1, inputs.cutoff_ms, inputs.limits)


def _optimal(inputs: Inputs) -> Policy:
    if inputs.solve is None:
        raise WrongUsage("the optimal policy needs a solver", where="--policy optimal", remedy="Hand in `solve`.")
    return optimal(inputs.solve(inputs.rate, inputs.times.main[: inputs.limits.main]), inputs.limits)


def _split(inputs: Inputs) -> Policy:
    longest, merge_below = inputs.settings.longest_ms, inputs.settings.merge_below
    longest = longest if math.isfinite(longest) else float(inputs.times.main[0])
    return split(inputs.limits, merge_below, 0.0 if merge_below <= 1 else longest)


@dataclass(frozen=True)
class Named:
    """A policy with a public name; `settings` are the ones that few other policies have."""

    make: Callable[[Inputs], Policy]
    settings: tuple[str, ...] = ()
    needs_side: bool = False


POLICIES: dict[str, Named] = {
    "gpu-only": Named(lambda inputs: gpu_only(inputs.limits)),
    "fixed": Named(_fixed, ("batch",)),
    "window": Named(_window, ("window_ms",)),
    "marginal-cost": Named(
        lambda inputs: marginal_cost(inputs.rate, inputs.limits, inputs.settings.rule, inputs.settings.longest_ms),
        ("rule", "longest_ms"),
    ),
    "three-stage": Named(_three_stage, ("t_cut_ms", "B1"), needs_side=True),
    "cutoff": Named(lambda inputs: cutoff(inputs.cutoff_ms, inputs.limits), ("t_cut_ms",), needs_side=True),
    "optimal": Named(_optimal),
    "split": Named(_split, ("longest_ms", "merge_below"), needs_side=True),
    "deadline": Named(lambda inputs: deadline(inputs.limits)),
}

SPECIAL = frozenset(name for each in POLICIES.values() for name in each.settings)
"""Settings of single policies; varying one adds no points to policies without it."""


def add_policy(name: str, policy: Named) -> None:
    """Register a policy, for simulation and the live router. Raises WrongUsage if the name is taken.

    It uses an existing code, e.g. `optimal` with a table of how many to serve for each number waiting.
    """
    refuse_taken(name, POLICIES, "policy")
    POLICIES[name] = policy


def named_policy(
    name: str, rate: float, times: PathTimes, settings: Settings = Settings(), solve: Solve | None = None
) -> Policy:
    """Return the policy called `name` for arrivals at `rate` per ms. Raises WrongUsage."""
    if name not in POLICIES:
        remedy = f"Take one of {', '.join(POLICIES)}."
        raise WrongUsage(f"policy {name!r} is not known", where="--policy", remedy=remedy)
    most, own = len(times.main), settings.max_batch
    if own is not None and not 1 <= own <= most:
        raise WrongUsage(
            f"a largest batch of {own}, where the path takes 1 to {most}",
            where="--set max_batch",
            remedy="Give a batch that the path can take.",
        )
    made = POLICIES[name].make(Inputs(rate, times, settings, Limits(own or most, len(times.side)), solve))
    shown = {"ageing_ms": settings.ageing_ms} if math.isfinite(settings.ageing_ms) else {}
    return replace(made, order=QueueOrder(settings.ageing_ms), settings={**made.settings, **shown})
