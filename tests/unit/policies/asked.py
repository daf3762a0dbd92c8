"""What a policy does at a moment, by the compiled decision that the simulator runs, in words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from latfit.policies import codes
from latfit.policies.dispatch import decide
from latfit.policies.policy import Policy
from latfit.stats import FloatArray

ACTIONS = ("wait", "serve main", "serve side")


@dataclass(frozen=True)
class QueueView:
    """What a policy sees. free: when each server of a path is next free, not after `now_ms` where it is idle.  aged:
    requests that have waited for T_cut."""

    now_ms: float
    waiting: int
    oldest_ms: float
    main_free_ms: Sequence[float] = (0.0,)
    side_free_ms: Sequence[float] = (math.inf,)
    aged: int = 0
    due_ms: float = math.inf

    def as_array(self) -> FloatArray:
        servers = max(len(self.main_free_ms), len(self.side_free_ms))
        view = np.full(codes.VIEW + 2 * servers, math.inf)
        view[codes.NOW], view[codes.WAITING], view[codes.OLDEST] = self.now_ms, self.waiting, self.oldest_ms
        view[codes.AGED], view[codes.DUE] = self.aged, self.due_ms
        for path, free in enumerate((self.main_free_ms, self.side_free_ms)):
            first = codes.VIEW + path * servers
            view[first : first + len(free)] = free
        return view


@dataclass(frozen=True)
class Decision:
    """action: one of ACTIONS; take: how many requests, behind the first `passed`; ask again at `until_ms`."""

    action: str
    take: int
    until_ms: float
    passed: int


def decision(policy: Policy, view: QueueView, times_ms: FloatArray) -> Decision:
    """times_ms: T(b) in ms (2, largest + 1) for b = 0, 1, ... on the main and the side path."""
    action, take, until, at = decide(policy.code, policy.parameters, times_ms, view.as_array())
    return Decision(ACTIONS[action], int(take), float(until), int(at) if action else 0)
