"""Batching policies as data, which `latfit.policies.dispatch` executes: docs/concepts/simulation.md."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from latfit.errors import WrongUsage, refuse, refuse_taken
from latfit.policies import codes
from latfit.policies.marginal_cost import RULES
from latfit.stats import FloatArray

DEFAULT_LOAD = 0.8
TIE = 1e-9


@dataclass(frozen=True)
class DispatchTable:
    """`batches[q]` of q waiting requests are served, 0 to wait; a longer queue as the last entry says. rate: per ms."""

    batches: tuple[int, ...]
    rate: float
    max_batch: int

    def __post_init__(self) -> None:
        fits = all(0 <= b <= min(q, self.max_batch) for q, b in enumerate(self.batches))
        found = "an entry is above what waits or the largest batch, or the last one serves nobody"
        remedy = "Give a batch of 0 to q for each number q waiting, at the end one above 0."
        refuse(not fits or not self.batches or self.batches[-1] < 1, found, "dispatch table", remedy)

    @property
    def threshold(self) -> int:
        return next(q for q, b in enumerate(self.batches) if b)

    def takes(self, waiting: int) -> int:
        return self.batches[min(waiting, len(self.batches) - 1)]


@dataclass(frozen=True, eq=False)
class Policy:
    """A policy as data: name, code and parameters (see `codes`). Use the constructors of this module.

    ageing_ms: waiting time worth one class; infinite for strict priority.
    """

    name: str
    code: int
    parameters: FloatArray
    settings: Mapping[str, Any] = field(default_factory=dict)
    ageing_ms: float = math.inf
    needs_side: bool = False

    @property
    def main_largest(self) -> int:
        return int(self.parameters[codes.MAIN_LARGEST])

    @property
    def long_queue_batch(self) -> int:
        """Batch by which the main path serves a long queue."""
        return self.main_largest if self.code != codes.OPTIMAL else min(self.main_largest, int(self.parameters[-1]))

    @property
    def side_largest(self) -> int:
        return int(self.parameters[codes.SIDE_LARGEST])


@dataclass(frozen=True)
class Limits:
    main: int
    side: int = 0

    def __post_init__(self) -> None:
        wrong = self.main < 1 or self.side < 0
        refuse(wrong, f"largest batches {self.main} and {self.side}", "--set max_batch", "Give 1 or more.")


def gpu_only(limits: Limits) -> Policy:
    """Serve all waiting requests on an idle server (greedy)."""
    return Policy("gpu-only", codes.GREEDY, _parameters(limits), {"max_batch": limits.main})


def fixed(batch: int, limits: Limits) -> Policy:
    found = f"a fixed batch of {batch}, where batches may hold 1 to {limits.main}"
    refuse(not 1 <= batch <= limits.main, found, "--batch", "Give a batch that the path can take.")
    parameters = _parameters(Limits(batch, limits.side), {codes.THRESHOLD: batch})
    return Policy("fixed", codes.FIXED, parameters, {"batch": batch})


def window(window_ms: float, limits: Limits) -> Policy:
    """Start a batch when it is full or its oldest request has waited `window_ms`."""
    parameters = _parameters(limits, {codes.PATIENCE: _checked_time(window_ms, "--window", zero=True)})
    return Policy("window", codes.WINDOW, parameters, {"window_ms": float(window_ms), "max_batch": limits.main})


def marginal_cost(rate: float, limits: Limits, rule: str = "amortised", longest_ms: float = math.inf) -> Policy:
    """Wait for one more request while a rule of `marginal_cost` says so at `rate` per ms, for `longest_ms` at most."""
    refuse(rule not in RULES, f"rule {rule!r} is not known", "--set rule", f"Take one of {', '.join(RULES)}.")
    number = list(RULES).index(rule)
    values = {codes.RATE: _checked_time(rate, "--rate"), codes.RULE: number, codes.PATIENCE: longest_ms}
    settings = {"rule": rule, "rate_per_ms": rate, "max_batch": limits.main}
    return Policy("marginal-cost", codes.MARGINAL, _parameters(limits, values), settings)


def cutoff(cutoff_ms: float, limits: Limits) -> Policy:
    """Serve greedily; after `cutoff_ms` a request may go to an idle side path that finishes it no later."""
    wait = _checked_time(cutoff_ms, "--t-cut")
    return _on_both_paths("cutoff", codes.CUTOFF, limits, {codes.T_CUT: wait}, {"t_cut_ms": wait})


def three_stage(threshold: int, cutoff_ms: float, limits: Limits) -> Policy:
    """Send `threshold` (B1) or more requests to the main path, and to an idle side path what it finishes no later.

    Others wait for `cutoff_ms` at most.
    """
    refuse(threshold < 1, f"a threshold of {threshold}", "B1", "Give 1 or more.")
    wait = _checked_time(cutoff_ms, "--t-cut")
    values = {codes.T_CUT: wait, codes.THRESHOLD: threshold}
    return _on_both_paths("three-stage", codes.THREE_STAGE, limits, values, {"B1": threshold, "t_cut_ms": wait})


def optimal(table: DispatchTable, limits: Limits) -> Policy:
    header = _parameters(Limits(min(limits.main, table.max_batch), limits.side))
    batches = np.array(table.batches, dtype=np.float64)
    settings = {"threshold": table.threshold, "rate_per_ms": table.rate, "max_batch": int(header[codes.MAIN_LARGEST])}
    return Policy("optimal", codes.OPTIMAL, np.concatenate([header, batches]), settings)


def split(limits: Limits, merge_below: int = 1, longest_ms: float = 0.0) -> Policy:
    """Split the queue over both paths with the least total delay.

    Fewer than `merge_below` requests wait for more, for `longest_ms` at most.
    """
    values = {codes.THRESHOLD: merge_below, codes.PATIENCE: _checked_time(longest_ms, "window", zero=True)}
    settings = {"merge_below": merge_below, "longest_ms": longest_ms}
    return _on_both_paths("split", codes.SPLIT, limits, values, settings)


def deadline(limits: Limits) -> Policy:
    return Policy("deadline", codes.DEADLINE, _parameters(limits), {"max_batch": limits.main})


def _on_both_paths(
    name: str, code: int, limits: Limits, values: Mapping[int, float], settings: Mapping[str, Any]
) -> Policy:
    remedy = "Add the other one with `latfit hardware add`, or take a policy that needs only one."
    refuse(limits.side < 1, f"policy {name} needs two execution paths", "--policy", remedy)
    return Policy(name, code, _parameters(limits, values), settings, needs_side=True)


def _parameters(limits: Limits, values: Mapping[int, float] | None = None) -> FloatArray:
    parameters = np.zeros(codes.HEADER)
    parameters[codes.PATIENCE] = parameters[codes.T_CUT] = math.inf
    parameters[codes.MAIN_LARGEST], parameters[codes.SIDE_LARGEST] = limits.main, limits.side
    for place, value in (values or {}).items():
        parameters[place] = value
    return parameters


def _checked_time(value: float, where: str, *, zero: bool = False) -> float:
    wrong = math.isnan(value) or value < 0 or (value == 0 and not zero)
    refuse(wrong, f"{value:g} ms is not above zero", where, "Give a time above zero.")
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
    """T(1), T(2), ... in ms on the main and the side path; servers of the main path."""

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
    arrivals: float
    times: PathTimes
    settings: Settings
    limits: Limits
    solve: Solve | None

    @property
    def rate(self) -> float:
        """Arrival rate per ms for the defaults. Raises WrongUsage if the load has none."""
        found = "the requests have no rate (one alone, or all at once), and the policy's default goes by it"
        remedy = "Set what the policy goes by (--t-cut, --batch), or take gpu-only, fixed or window."
        refuse(not (math.isfinite(self.arrivals) and self.arrivals > 0), found, "--policy", remedy)
        return self.arrivals

    def given(self, name: str, default: Callable[[], Any]) -> Any:
        value = getattr(self.settings, name)
        return default() if value is None else value

    @property
    def cutoff_ms(self) -> float:
        return float(self.given("t_cut_ms", lambda: default_cutoff_ms(self.rate, self.times)))


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
    make: Callable[[Inputs], Policy]
    settings: tuple[str, ...] = ()
    needs_side: bool = False


POLICIES: dict[str, Named] = {
    "gpu-only": Named(lambda i: gpu_only(i.limits)),
    "fixed": Named(lambda i: fixed(i.given("batch", lambda: default_batch(i.rate, i.times)), i.limits), ("batch",)),
    "window": Named(lambda i: window(i.given("window_ms", lambda: float(i.times.main[0])), i.limits), ("window_ms",)),
    "marginal-cost": Named(
        lambda i: marginal_cost(i.rate, i.limits, i.settings.rule, i.settings.longest_ms), ("rule", "longest_ms")
    ),
    "three-stage": Named(
        lambda i: three_stage(i.given("B1", lambda: default_threshold(i.times)), i.cutoff_ms, i.limits),
        ("t_cut_ms", "B1"),
        needs_side=True,
    ),
    "cutoff": Named(lambda i: cutoff(i.cutoff_ms, i.limits), ("t_cut_ms",), needs_side=True),
    "optimal": Named(_optimal),
    "split": Named(_split, ("longest_ms", "merge_below"), needs_side=True),
    "deadline": Named(lambda i: deadline(i.limits)),
}

SPECIAL = frozenset(name for each in POLICIES.values() for name in each.settings)
"""Settings of single policies; varying one adds no points to policies without it."""


def add_policy(name: str, policy: Named) -> None:
    """Register a policy of an existing code, for simulation and the live router. Raises WrongUsage for a name taken."""
    refuse_taken(name, POLICIES, "policy")
    POLICIES[name] = policy


def named_policy(
    name: str, rate: float, times: PathTimes, settings: Settings = Settings(), solve: Solve | None = None
) -> Policy:
    """Return the policy called `name` for arrivals at `rate` per ms. Raises WrongUsage."""
    refuse(name not in POLICIES, f"policy {name!r} is not known", "--policy", f"Take one of {', '.join(POLICIES)}.")
    most, own, ageing = len(times.main), settings.max_batch, settings.ageing_ms
    found = f"a largest batch of {own}, where the path takes 1 to {most}"
    refuse(own is not None and not 1 <= own <= most, found, "--set max_batch", "Give a batch that the path can take.")
    refuse(not ageing > 0, "priority ageing must be above zero", "ageing", "Give the waiting time worth one class.")
    made = POLICIES[name].make(Inputs(rate, times, settings, Limits(own or most, len(times.side)), solve))
    shown = {"ageing_ms": ageing} if math.isfinite(ageing) else {}
    return replace(made, ageing_ms=ageing, settings={**made.settings, **shown})
