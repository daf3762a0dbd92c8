"""Monitor a latency promise, with a bounded probability of ever raising a false alarm.

Betting test of a bounded mean (Waudby-Smith & Ramdas 2024), started at every block of requests. See
docs/theory/planning.md#learning-while-it-serves.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from latfit.errors import refuse
from latfit.live.waiting import Request
from latfit.stats import FloatArray

MAX_STAKE = 0.95  # share of its capital that a bet risks, at most
ALARM_BLOCKS = 20  # an alarm ends when the promise is met over so many blocks


@dataclass(frozen=True)
class Promise:
    """At least a share of the requests is answered in time. Raises WrongUsage."""

    within_ms: float | Sequence[float]  # from arrival to answer: one for all classes, or one for each
    share: float = 0.99  # of the requests
    false_alarm: float = 0.01  # probability of ever raising a false alarm
    block: int = 1000  # requests that are judged together; longer than the bursts in which requests are late

    def __post_init__(self) -> None:
        are_limits = bool(self._limits) and all(limit > 0 for limit in self._limits)
        is_promise = are_limits and self.block >= 1 and 0 < self.share < 1 and 0 < self.false_alarm < 1
        blocks = f"in blocks of {self.block}, false alarms of {self.false_alarm:g}"
        remedy = "Give times above zero, one request or more, and shares between 0 and 1, such as 0.99."
        refuse(not is_promise, f"{self.share:g} within {self.within_ms} ms {blocks}", "promise", remedy)

    @property
    def _limits(self) -> Sequence[float]:
        return [self.within_ms] if isinstance(self.within_ms, int | float) else self.within_ms

    def limit_ms(self, class_id: int) -> float:
        return float(self._limits[min(class_id, len(self._limits) - 1)])

    def kept(self, request: Request) -> bool:
        return request.served and request.ended_ms - request.arrived_ms <= self.limit_ms(request.class_id)


class PromiseMonitor:
    """Count requests, and raise an alarm when the promise is broken."""

    def __init__(self, promise: Promise) -> None:
        self.promise = promise
        self._allowed = 1 - promise.share
        self._stakes = stakes(self._allowed)
        self.kept = self.broken = self.alarms = 0
        self.alarm = False
        self._late_in_block = self._seen_in_block = 0
        self._recent_late: deque[int] = deque(maxlen=ALARM_BLOCKS)
        self._restart()

    def _restart(self) -> None:
        self._blocks, self._reserve = 0, 1.0
        self._capital: FloatArray = np.zeros(len(self._stakes))

    @property
    def needed(self) -> float:
        """Return the evidence at which the alarm comes; 1 / needed sums to `false_alarm` over all periods."""
        period = self.alarms + (not self.alarm)
        return period * (period + 1) / self.promise.false_alarm

    @property
    def evidence(self) -> float:
        """Return the capital that the bets of this period made of 1."""
        return float(self._capital.mean()) + self._reserve

    def add(self, kept: bool) -> bool:
        """Add a request. Return whether the alarm begins or ends."""
        self.kept += kept
        self.broken += not kept
        self._late_in_block += not kept
        self._seen_in_block += 1
        if self._seen_in_block < self.promise.block:
            return False
        late, self._late_in_block, self._seen_in_block = self._late_in_block, 0, 0
        return self._may_end_alarm(late) if self.alarm else self._bet(late)

    def _bet(self, late: int) -> bool:
        self._blocks += 1
        reserve = 1 / (1 + math.log1p(self._blocks))
        self._capital += self._reserve - reserve  # of the bets that start at this block
        self._capital *= 1 + self._stakes * (late / (self.promise.block * self._allowed) - 1)
        self._reserve = reserve
        if self.evidence < self.needed:
            return False
        self.alarm = True
        self.alarms += 1
        self._recent_late.clear()
        return True

    def _may_end_alarm(self, late: int) -> bool:
        self._recent_late.append(late)
        most = self._allowed * ALARM_BLOCKS * self.promise.block
        if len(self._recent_late) < ALARM_BLOCKS or sum(self._recent_late) > most:
            return False
        self.alarm = False
        self._restart()
        return True


def stakes(allowed: float) -> FloatArray:
    """Return the shares that bets risk: doubling from half the allowed share."""
    steps = max(math.ceil(math.log2(2 * MAX_STAKE / allowed)), 0)
    return np.append(allowed / 2 * 2.0 ** np.arange(steps), MAX_STAKE)
