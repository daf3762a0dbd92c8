"""Measured serving runs: recorded requests with the moments of their first and last token."""

from dataclasses import dataclass

import numpy as np

from latfit.errors import BadInput
from latfit.stats import FloatArray
from latfit.workload import Recording, Requests


@dataclass(frozen=True, eq=False, repr=False)
class Measured:
    """Requests with the times of their first and last token (n,), ms on the clock of their arrivals.

    began_s: time of the first request in seconds since 1970, None if unknown.  watched_ms: begin and end of a watch,
    which knows no single request (`watch.py`); else None.
    """

    requests: Requests
    first_ms: FloatArray
    last_ms: FloatArray
    source: str = "requests"
    notes: tuple[str, ...] = ()
    began_s: float | None = None
    watched_ms: tuple[float, float] | None = None
    engines: int = 1

    def __len__(self) -> int:
        return len(self.requests)


def as_measured(found: Recording) -> Measured:
    """Return recorded requests without impossible ones. Raises BadInput if most are."""
    if found.first_ms is None or found.last_ms is None:
        raise BadInput(
            "no times of first and last tokens",
            where=found.source,
            remedy="Give first_token_s, last_token_s or ttft_s, latency_s or ttft_ms, latency_ms; save results of"
            " `vllm bench serve` with --save-detailed.",
        )
    arrival = found.requests.arrival_ms
    wrong = ~np.isfinite(found.first_ms) | ~np.isfinite(found.last_ms)
    wrong |= (found.first_ms < arrival) | (found.last_ms < found.first_ms)
    what = f"a first token before its arrival, a last one before its first, or no time ({int(wrong.sum())} such)"
    first = f"request {int(np.argmax(wrong)) + 1} has {what}"
    if 2 * wrong.sum() >= len(wrong):
        remedy = "Leave out requests that failed; arrivals and tokens must be on one clock."
        raise BadInput(first, where=found.source, remedy=remedy)
    notes = (*found.notes, f"Left out: {first}") if wrong.any() else tuple(found.notes)
    kept = found.requests.select(~wrong)
    return Measured(kept, found.first_ms[~wrong], found.last_ms[~wrong], found.source, notes, found.began_s)
