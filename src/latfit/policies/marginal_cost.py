"""When to stop waiting for one more request: three readings of "marginal cost", as pure rules.

With B requests waiting and the next expected in 1/rate ms:
- literal, T(B) - T(B+1) > 1/rate: the gain is negative wherever T grows with B, so it always dispatches: it is greedy.
  It waits only where a larger batch is faster.
- amortised, T(B)/B - T(B+1)/(B+1) > 1/rate: the gain in time a request. For T = tau + alpha B it stops at the smallest
  B with B (B+1) >= rate tau. Of the three the nearest to optimal for the mean (`queueing.dispatch_mdp` says by how
  much).
- total delay, T(B) + T(1) - T(B+1) > B/rate: what the batch saves against what its members wait. For a linear T
  it stops at B >= rate tau.

Scalars in, bool out; no state. T in ms, rate per ms, B >= 1. Ties dispatch.
"""

import math
from collections.abc import Callable, Sequence

from latfit.errors import WrongUsage

TIE = 1e-12


def literal_waits(B: int, T_now: float, T_next: float, T_one: float, rate: float) -> bool:
    """The rule as it circulates; greedy wherever T grows."""
    return (T_now - T_next) * rate > 1 + TIE


def amortised_waits(B: int, T_now: float, T_next: float, T_one: float, rate: float) -> bool:
    """Wait while one more request lowers the time a request by more than its expected coming takes."""
    return (T_now / B - T_next / (B + 1)) * rate > 1 + TIE


def total_delay_waits(B: int, T_now: float, T_next: float, T_one: float, rate: float) -> bool:
    """Wait while taking one more along saves more than B requests lose by waiting for it."""
    return (T_now + T_one - T_next) * rate > B * (1 + TIE)


Rule = Callable[[int, float, float, float, float], bool]

RULES: dict[str, Rule] = {
    "literal": literal_waits,
    "amortised": amortised_waits,
    "total delay": total_delay_waits,
}


def stopping_batch(rule: str, T_ms: Sequence[float], rate: float) -> int:
    """Smallest B at which the rule dispatches, at most len(T_ms). T_ms: T(1), T(2), ..., in ms; rate per ms."""
    if rule not in RULES:
        raise WrongUsage(f"rule {rule!r} is not known", where="rule", remedy=f"Take one of {', '.join(RULES)}.")
    if not len(T_ms) or not math.isfinite(rate) or rate <= 0:
        raise WrongUsage("no times, or a rate that is not above zero", where="rate", remedy="Give both.")
    waits = RULES[rule]
    for B in range(1, len(T_ms)):
        if not waits(B, T_ms[B - 1], T_ms[B], T_ms[0], rate):
            return B
    return len(T_ms)
