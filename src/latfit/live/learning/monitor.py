"""Whether a latency promise is kept: counts, and an alarm whose false-alarm rate holds at every time.

A promise says that a share of at least 1 - alpha of the requests is answered in time. Requests are taken in blocks of
m, y_t is the share of block t that was late, and the promise is kept as long as E[y_t | blocks before] <= alpha for
every t (H0). For any bet 0 <= f < 1

    L_t = 1 + f (y_t / alpha - 1) >= 0,   E[L_t | before] <= 1,

so a product of L_t from block s on is the wealth of a gambler for whom H0 makes the game fair or worse (Waudby-Smith &
Ramdas 2024). A single product started at s = 1 loses wealth for as long as the promise is kept, and would be slow to
see a breach that comes late. So one gambler starts at each block s, with the share w_s of the capital, sum_s w_s = 1,
and so with each of several bets f, from alpha/2, the best one against single requests half as often late again, in
steps of two to almost 1, as suits blocks of which most or none are late: together

    N_t = sum_{s <= t} w_s prod_{i=s..t} L_i + sum_{s > t} w_s

is a nonnegative supermartingale with N_0 = 1, and P(N_t >= 1/a at any time t, ever) <= a (Ville's inequality; Howard,
Ramdas, McAuliffe & Sekhon 2021). With W_t = sum_{s > t} w_s = 1/(1 + ln(1 + t)) a breach at block t costs only
ln(1/w_t) ~ ln t + 2 ln ln t more evidence than one known to be at t: where blocks of one request are late with
probability q, the delay is about (ln(1/a) + ln(1/w_t)) / KL(q | alpha) requests, and no test of false-alarm rate a is
faster than ln(1/a) / KL(q | alpha) in this order. (An e-detector, Shin, Ramdas & Rinaldo 2024, all of whose gamblers
start with a full purse, saves ln(1/w_t) and promises less: a mean time between false alarms, not their probability.)

An alarm ends once at most a share alpha of the last AGAIN blocks was late; nothing more is claimed for that moment.
Then a new period begins with capital 1. Period k has a_k = a / (k (k + 1)), so that all periods together have a false
alarm with probability a at most: the rate stated is that of the monitor's whole life.

What blocks are for: late requests come in bursts, since those who wait together are late together. After a late request
the next one is late with a probability far above alpha, also where alpha holds in the long run: for m = 1 H0 is false
then, and alarms come that nobody wants. H0 in blocks says that the mean over the next m requests is at most alpha,
whatever went before; it is nearly true where m is long against the bursts. That is all that is promised for dependent
requests; how near is measured in the tests.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from latfit.errors import WrongUsage
from latfit.live.waiting import Request
from latfit.stats import FloatArray

BOLDEST = 0.95
"""Of its purse a bet stakes this much at most."""

AGAIN = 20
"""Blocks of an alarm, at the least, and those that end it."""


@dataclass(frozen=True)
class Promise:
    """At least a share of the requests is answered in time. within_ms: from arrival, one for all classes or one for
    each.  false_alarm: probability of a false alarm, ever.  block: requests that are judged together; it has to be long
    against the bursts in which requests are late."""

    within_ms: float | Sequence[float]
    share: float = 0.99
    false_alarm: float = 0.01
    block: int = 1000

    def __post_init__(self) -> None:
        limits = [self.within_ms] if isinstance(self.within_ms, int | float) else list(self.within_ms)
        if not limits or not all(limit > 0 for limit in limits) or self.block < 1:
            raise WrongUsage(
                f"a promise of {self.within_ms} ms in blocks of {self.block}",
                where="promise",
                remedy="Give times above zero and one request or more.",
            )
        if not (0 < self.share < 1 and 0 < self.false_alarm < 1):
            raise WrongUsage(
                f"a share of {self.share:g} with false alarms of {self.false_alarm:g}",
                where="promise",
                remedy="Give shares between 0 and 1, such as 0.99 and 0.01.",
            )

    def limit_ms(self, class_id: int) -> float:
        """Of a class; the last one given where there are fewer."""
        if isinstance(self.within_ms, int | float):
            return float(self.within_ms)
        return float(self.within_ms[min(class_id, len(self.within_ms) - 1)])

    def kept(self, request: Request) -> bool:
        """Whether a request that ended was answered in time; an error is no answer."""
        return request.served and request.ended_ms - request.arrived_ms <= self.limit_ms(request.class_id)


class PromiseMonitor:
    """kept, broken: requests so far.  alarm: whether the promise is taken to be broken now.  alarms: how often it was.
    evidence: what the gamblers of this period made of 1; at `needed` the alarm comes."""

    def __init__(self, promise: Promise) -> None:
        self.promise = promise
        self._allowed, self._block = 1 - promise.share, promise.block
        self.kept = self.broken = self.alarms = 0
        self.alarm = False
        self._bets = stakes(self._allowed)
        self._late = self._seen = 0
        self._last: deque[int] = deque(maxlen=AGAIN)
        self._blocks, self._left = 0, 1.0
        self._purses: FloatArray = np.zeros(len(self._bets))

    @property
    def needed(self) -> float:
        period = self.alarms + (not self.alarm)
        return period * (period + 1) / self.promise.false_alarm

    @property
    def evidence(self) -> float:
        return float(self._purses.mean()) + self._left

    def add(self, kept: bool) -> bool:
        """One more request. True where that begins or ends an alarm."""
        if kept:
            self.kept += 1
        else:
            self.broken += 1
            self._late += 1
        self._seen += 1
        return self._seen == self._block and self._judge()

    def _judge(self) -> bool:
        late, self._late, self._seen = self._late, 0, 0
        if self.alarm:
            self._last.append(late)
            if len(self._last) < AGAIN or sum(self._last) > self._allowed * AGAIN * self._block:
                return False
            self.alarm = False
            self._blocks, self._left = 0, 1.0
            self._purses = np.zeros(len(self._bets))
            return True
        self._blocks += 1
        left = 1 / (1 + math.log1p(self._blocks))
        self._purses += self._left - left
        self._purses *= 1 + self._bets * (late / (self._block * self._allowed) - 1)
        self._left = left
        if self.evidence < self.needed:
            return False
        self.alarm = True
        self.alarms += 1
        self._last.clear()
        return True


def stakes(allowed: float) -> FloatArray:
    """The bets."""
    steps = max(math.ceil(math.log2(2 * BOLDEST / allowed)), 0)
    return np.append(allowed / 2 * 2.0 ** np.arange(steps), BOLDEST)
