"""Policies by the names that users know, with settings that follow from the paths' times where none are given.

Defaults, each shown in the policy's settings: a fixed batch is the smallest that carries the rate at 80 % load; a
window lasts as long as one request takes on the main path, T_cut as long as the batches take that greedy service forms
at the rate (a shorter one sends to the side path what the main path would take next, and floods it under load); B1 is
the smallest batch that the main path ends no later than the side path.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from latfit.errors import WrongUsage
from latfit.policies import policy as policies
from latfit.policies.policy import DispatchTable, Limits, Policy, QueueOrder
from latfit.stats import FloatArray

NAMES = (
    "gpu-only",
    "fixed",
    "window",
    "marginal-cost",
    "three-stage",
    "cutoff",
    "optimal",
    "split",
    "deadline",
)
NEED_SIDE = ("three-stage", "cutoff", "split")
DEFAULT_LOAD = 0.8
TIE = 1e-9

Solve = Callable[[float, FloatArray], DispatchTable]
"""The optimal table for a rate per ms and T(1), T(2), ... (n,) in ms; `queueing.dispatch_mdp` has one."""


@dataclass(frozen=True)
class Settings:
    """What a user may set; None for the default."""

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
    """T(1), T(2), ... in ms on the main and the side path, to their largest batches; how many servers the main has."""

    main: FloatArray
    side: FloatArray = field(default_factory=lambda: np.empty(0))
    servers: int = 1


def named_policy(
    name: str, rate: float, times: PathTimes, settings: Settings = Settings(), solve: Solve | None = None
) -> Policy:
    """The policy called `name` for arrivals at `rate` per ms. Raises WrongUsage."""
    if name not in NAMES:
        raise WrongUsage(f"policy {name!r} is not known", where="--policy", remedy=f"Take one of {', '.join(NAMES)}.")
    limits = _limits(times, settings)
    if name in NEED_SIDE and limits.side < 1:
        raise WrongUsage(
            f"policy {name} needs two execution paths",
            where="--policy",
            remedy="Add the other one with `latfit hardware add`, or take a policy that needs only one.",
        )
    made = _make(name, rate, times, settings, limits, solve)
    order = QueueOrder(settings.ageing_ms)
    if math.isfinite(settings.ageing_ms):
        made = replace(made, settings={**made.settings, "ageing_ms": settings.ageing_ms})
    return replace(made, order=order)


def default_batch(rate: float, times: PathTimes) -> int:
    """The smallest batch that carries the rate at 80 % load, or the one that carries most."""
    sizes = np.arange(1, len(times.main) + 1)
    carried = times.servers * sizes / times.main
    enough = np.flatnonzero(carried >= rate / DEFAULT_LOAD)
    return int(sizes[enough[0]]) if len(enough) else int(sizes[np.argmax(carried)])


def default_cutoff_ms(rate: float, times: PathTimes) -> float:
    """T of the batch that forms while such a batch is served, b = rate T(b) of each server; T(1) at least."""
    share, batch = rate / times.servers, 1
    for _ in range(len(times.main)):
        formed = min(len(times.main), max(1, math.ceil(share * float(times.main[batch - 1]) - TIE)))
        if formed <= batch:
            break
        batch = formed
    return float(times.main[batch - 1])


def default_threshold(times: PathTimes) -> int:
    """B1: the smallest batch that the main path ends no later than the side path; one more than the side path takes
    where there is none."""
    both = min(len(times.main), len(times.side))
    at = np.flatnonzero(times.main[:both] <= times.side[:both])
    return int(at[0]) + 1 if len(at) else both + 1


def _make(name: str, rate: float, times: PathTimes, settings: Settings, limits: Limits, solve: Solve | None) -> Policy:
    one = float(times.main[0])
    cutoff_ms = default_cutoff_ms(rate, times) if settings.t_cut_ms is None else settings.t_cut_ms
    if name == "gpu-only":
        made = policies.gpu_only(limits)
    elif name == "fixed":
        made = policies.fixed(default_batch(rate, times) if settings.batch is None else settings.batch, limits)
    elif name == "window":
        made = policies.window(one if settings.window_ms is None else settings.window_ms, limits)
    elif name == "marginal-cost":
        made = policies.marginal_cost(rate, limits, settings.rule, settings.longest_ms)
    elif name == "cutoff":
        made = policies.cutoff(cutoff_ms, limits)
    elif name == "three-stage":
        threshold = default_threshold(times) if settings.B1 is None else settings.B1
        made = policies.three_stage(threshold, cutoff_ms, limits)
    elif name == "split":
        longest = settings.longest_ms if math.isfinite(settings.longest_ms) else one
        made = policies.split(limits, settings.merge_below, longest if settings.merge_below > 1 else 0.0)
    elif name == "deadline":
        made = policies.deadline(limits)
    elif solve is None:
        raise WrongUsage("the optimal policy needs a solver", where="--policy optimal", remedy="Hand in `solve`.")
    else:
        made = policies.optimal(solve(rate, times.main[: limits.main]), limits)
    return made


def _limits(times: PathTimes, settings: Settings) -> Limits:
    """Batches as large as the paths take, or as asked on the main path."""
    asked = settings.max_batch
    if asked is not None and not 1 <= asked <= len(times.main):
        raise WrongUsage(
            f"a largest batch of {asked}, where the path takes 1 to {len(times.main)}",
            where="--max-batch",
            remedy="Give a batch that the path can take.",
        )
    return Limits(asked or len(times.main), len(times.side))
