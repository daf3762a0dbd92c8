"""What a policy does at a moment, by the compiled decision that the simulator runs, in words."""

import math
from dataclasses import dataclass

import numpy as np

from latfit.policies import codes
from latfit.policies.dispatch import decide
from latfit.policies.policy import Policy
from latfit.stats import FloatArray

ACTIONS = ("wait", "serve main", "serve side", "move to side")


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
    """action: one of ACTIONS; take: how many from the front of the queue; ask again at `until_ms`."""

    action: str
    take: int
    until_ms: float


def decision(policy: Policy, view: QueueView, times_ms: FloatArray) -> Decision:
    """times_ms: T(b) in ms (2, largest + 1) for b = 0, 1, ... on the main and the side path."""
    action, take, until, _ = decide(policy.code, policy.parameters, times_ms, view.as_array())
    return Decision(ACTIONS[action], int(take), float(until))
