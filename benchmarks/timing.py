"""Paired timing: the two sides run in turn, so that a machine whose speed drifts does not favour either."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Paired:
    """Seconds of each side (medians) and the ratio ours/theirs with its range over the pairs."""

    ours_s: float
    theirs_s: float
    ratio: float
    lowest: float
    highest: float

    def __str__(self) -> str:
        return (
            f"{self.ours_s * 1e3:.1f} ms against {self.theirs_s * 1e3:.1f} ms: "
            f"ratio {self.ratio:.2f} ({self.lowest:.2f} to {self.highest:.2f})"
        )


def paired(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    pairs: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Paired:
    """Run each side once to warm up, then `pairs` times in turn. clock: seconds; `time.process_time` counts what the
    process used, where neighbours keep the machine busy."""
    ours(), theirs()
    times = [(_seconds(ours, clock), _seconds(theirs, clock)) for _ in range(pairs)]
    ratios = [a / b for a, b in times]
    return Paired(
        statistics.median(a for a, _ in times),
        statistics.median(b for _, b in times),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
    )


def _seconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    call()
    return clock() - start
