"""The verdict of a plan, from the probability that its limits are met.

The tightest figure is log-normal about its estimate, each side by its own end of the 95 % interval.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from latfit.stats import student_tail

Verdict = Literal["meets", "likely", "misses"]

CONFIRMED = 0.975  # probability from which a plan meets its limits; below it, and above one half, it likely does

MOST_IDLE = 64  # times the replicas that sustain a load: they are idle, and more of them change nothing

Z = 1.959964  # of 97.5 %

OLD_NAMES = {"yes": "meets", "in doubt": "likely", "no": "misses"}


def probability_within(value: float, low: float | None, high: float | None, limit: float) -> float | None:
    """Return the probability that a figure is within its limit; None if the interval has no end on that side."""
    if value <= 0:
        return 1.0
    end = high if value <= limit else low
    if end is None or not math.isfinite(end) or end <= 0:
        return None
    reach = abs(math.log(end / value))
    distance = math.log(limit / value)
    if reach == 0:
        return 1.0 if distance >= 0 else 0.0
    return student_tail(math.inf, -Z * distance / reach)


def verdict_of(*, met: bool, probability: float | None, doubted: bool) -> Verdict:
    if not met:
        return "misses"
    confirmed = probability is not None and probability >= CONFIRMED - 1e-9
    return "meets" if confirmed and not doubted else "likely"


def upgraded(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a stored plan with today's names of verdicts."""
    return {**document, "promise": OLD_NAMES.get(document["promise"], document["promise"])}
