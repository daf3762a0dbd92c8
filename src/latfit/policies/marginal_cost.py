"""Decide whether to wait for one more request, expected in 1/rate ms, while B wait; ties dispatch."""

import math
from collections.abc import Callable, Sequence

from latfit.errors import refuse

TIE = 1e-12


def literal_waits(B: int, T_now: float, T_next: float, T_one: float, rate: float) -> bool:
    """Wait while T(B) - T(B+1) > 1/rate; greedy where T grows with B."""
    return (T_now - T_next) * rate > 1 + TIE


def amortised_waits(B: int, T_now: float, T_next: float, T_one: float, rate: float) -> bool:
    """Wait while T(B)/B - T(B+1)/(B+1) > 1/rate; the closest to the optimal mean."""
    return (T_now / B - T_next / (B + 1)) * rate > 1 + TIE


def total_delay_waits(B: int, T_now: float, T_next: float, T_one: float, rate: float) -> bool:
    """Wait while T(B) + T(1) - T(B+1) > B/rate."""
    return (T_now + T_one - T_next) * rate > B * (1 + TIE)


Rule = Callable[[int, float, float, float, float], bool]

RULES: dict[str, Rule] = {
    "literal": literal_waits,
    "amortised": amortised_waits,
    "total delay": total_delay_waits,
}


def stopping_batch(rule: str, T_ms: Sequence[float], rate: float) -> int:
    """Return the smallest B, at most len(T_ms), at which a rule dispatches; T_ms: T(1), T(2), ..."""
    refuse(rule not in RULES, f"rule {rule!r} is not known", "rule", f"Take one of {', '.join(RULES)}.")
    wrong = not len(T_ms) or not math.isfinite(rate) or rate <= 0
    refuse(wrong, "no times, or a rate that is not above zero", "rate", "Give both.")
    waits = RULES[rule]
    for B in range(1, len(T_ms)):
        if not waits(B, T_ms[B - 1], T_ms[B], T_ms[0], rate):
            return B
    return len(T_ms)
