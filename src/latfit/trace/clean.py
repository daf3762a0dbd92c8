"""What is dropped before a fit, and why. Each rule has a name that the result reports; nothing is dropped silently.

Rules are tried in order and a row is counted under the first that drops it. Slow steps are not dropped by default: a
real prefill takes longer than any fixed limit, and the tail is what people plan for. A limit on T is there for those
who ask for it; as it selects on the response it biases the fit, and the result says so.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latfit.trace.table import Trace

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Cleaned:
    """The rows that a fit may use, how many were read, and how many each rule dropped."""

    trace: Trace
    rows_read: int
    dropped: Mapping[str, int]

    @property
    def rows_used(self) -> int:
        return len(self.trace)


def clean(trace: Trace, *, max_ms: float | None = None) -> Cleaned:
    """Drop what cannot be a step.

    Reasons: `cold_start` steps run to warm up (column `warmup`); `non_finite` a missing or infinite B, S or T;
    `zero_time` T = 0; `bad_value` T < 0, B < 1 or S < B; `max_t` T > max_ms, only where a limit is given.
    """
    B, S, T = (trace.floats(name) for name in ("B", "S", "T_ms"))
    rules: list[tuple[str, Callable[[], Mask]]] = [
        ("cold_start", lambda: trace["warmup"].astype(bool) if "warmup" in trace else np.zeros(len(trace), dtype=bool)),
        ("non_finite", lambda: ~(np.isfinite(B) & np.isfinite(S) & np.isfinite(T))),
        ("zero_time", lambda: T == 0),
        ("bad_value", lambda: (T < 0) | (B < 1) | (S < B)),
        ("max_t", lambda: (np.inf if max_ms is None else max_ms) < T),
    ]
    kept = np.ones(len(trace), dtype=bool)
    dropped = {}
    for reason, rule in rules:
        hit = kept & rule()
        if hit.any():
            dropped[reason] = int(hit.sum())
        kept &= ~hit
    return Cleaned(trace.select(kept), len(trace), dropped)
