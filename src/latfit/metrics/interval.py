"""Counts and the mean step between two readings of a server, from the differences of its counters.

Formulas: docs/how-to/record.md ("From outside").
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from latfit.engines import SLOT_STEPS
from latfit.metrics.server import Reading
from latfit.metrics.state import MS_PER_S, Buckets, ServerState
from latfit.stats import IntArray

BUSY = 0.9  # share of the time that steps take in a busy window
MIN_GAPS = 8  # gaps between tokens, to say whether an engine worked all the time


@dataclass(frozen=True)
class Interval:
    first: ServerState
    last: ServerState
    seconds: float

    def count(self, name: str) -> float:
        return self.last.counters.get(name, math.nan) - self.first.counters.get(name, 0.0)

    def histogram(self, name: str) -> Buckets | None:
        found = self.last.histograms.get(name)
        return None if found is None else found.since(self.first.histograms.get(name))

    def mean(self, name: str) -> float:
        """Return the mean of a histogram's new values in ms or tokens; NaN without any."""
        found = self.histogram(name)
        return math.nan if found is None else found.mean

    def seen(self, name: str) -> float:
        found = self.histogram(name)
        return math.nan if found is None else found.count

    @cached_property
    def steps(self) -> float:
        """Steps of all engines together; NaN if they are not counted."""
        return _first(self.seen("step_tokens"), self.count("steps"))

    @cached_property
    def prefill_tokens(self) -> float:
        """Computed prompt tokens, without those found in the prefix cache."""
        return _first(self.count("prefill_tokens"), self.count("prompt_tokens") - or_zero(self.count("prefix_hits")))

    @cached_property
    def decode_tokens(self) -> float:
        return _first(self.count("decode_tokens"), self.count("generation_tokens") - self.seen("ttft"))

    @cached_property
    def generated_tokens(self) -> float:
        return _first(self.count("decode_tokens") + or_zero(self.seen("ttft")), self.count("generation_tokens"))

    @cached_property
    def finished(self) -> float:
        """Finished requests; if they are not counted, the values of the latency histogram."""
        return _first(self.count("finished"), self.seen("latency"))

    @cached_property
    def arrived(self) -> float:
        """Arrived requests: the finished ones and the growth of those in the server."""
        more = or_zero(self.last.running - self.first.running) + or_zero(self.last.waiting - self.first.waiting)
        return self.finished + more

    def lengths(self, n: int, rng: np.random.Generator) -> tuple[IntArray, IntArray] | None:
        """Draw prompt and output tokens (n,) from the histograms, else from the means; None if neither is known."""
        found = []
        for name, counter in (("prompt_lengths", "prompt_tokens"), ("output_lengths", "generation_tokens")):
            seen = self.histogram(name)
            mean = self.count(counter) / self.finished if self.finished > 0 else math.nan
            if seen is not None and seen.count > 0:
                found.append(seen.drawn(n, rng))
            elif mean > 0:
                found.append(np.full(n, max(1, round(mean))))
            else:
                return None
        return found[0], found[1]

    @cached_property
    def worked(self) -> float:
        """Share of the time that the engine was busy, from the gaps between tokens; NaN if there are too few."""
        gaps = self.histogram("itl")
        if gaps is None or gaps.count < MIN_GAPS or not self.steps > 0:
            return math.nan
        return self.steps * gaps.mean / (self.seconds * MS_PER_S * self.last.engines)

    @property
    def was_busy(self) -> bool:
        if min(self.first.waiting, self.last.waiting) > 0 or self.of_executions:
            return True
        if min(self.first.running, self.last.running) <= 0:
            return False
        return math.isnan(self.worked) or self.worked >= BUSY

    @property
    def of_slots(self) -> bool:
        """Whether the server counts busy slots step by step instead of tokens (llama.cpp)."""
        return SLOT_STEPS in self.last.counters

    @property
    def of_executions(self) -> bool:
        """Whether the server counts executions of any model, without tokens (Triton)."""
        return "samples" in self.last.counters

    def mean_step(self) -> dict[str, float] | None:
        """Return the mean step of an engine as columns of a trace; None without steps, or if no counter gives it."""
        N, window_ms, engines = self.steps, self.seconds * MS_PER_S, self.last.engines
        if not N > 0:
            return None
        row = {"window_ms": window_ms, "window_steps": N}
        if self.of_executions:
            B = max(self.count("samples") / N, 1.0)
            return {"B": B, "S": B, "T_ms": self.count("compute_ms") / max(self.finished, 1.0), **row}
        drafted, accepted = (or_zero(self.count(name)) for name in ("draft_tokens", "accepted_tokens"))
        if self.of_slots:
            B = max(self.count(SLOT_STEPS) / N, 1.0)
            S = B + self.prefill_tokens / N
        else:
            D = max(self.decode_tokens - accepted, 0.0) / N
            B = D + self.seen("ttft") / N
            S = max(D + (drafted + self.prefill_tokens) / N, B)
        row |= {
            "B": B,
            "S": S,
            "T_ms": window_ms * engines / N,
            "B_sd": path_sd(self.first.running / engines, self.last.running / engines, B),
            "prefill_tokens": self.prefill_tokens / N,
            "queued_requests": (self.first.waiting + self.last.waiting) / 2 / engines,
        }
        if self.of_slots or not math.isfinite(B + S):
            return row if self.of_slots else None
        usage = (self.first.kv_usage + self.last.kv_usage) / 2
        capacity = self.last.facts.get("kv_capacity_tokens")
        return {
            **row,
            "prefill_requests": self.seen("ttft") / N,
            "kv_usage": usage,
            "context_tokens": usage * capacity if capacity else math.nan,
            "prefix_queries": or_zero(self.count("prefix_queries")),
            "prefix_hits": or_zero(self.count("prefix_hits")),
            "draft_tokens": drafted,
            "accepted_tokens": accepted,
        }


def between(first: Reading, last: Reading) -> Interval:
    return Interval(first.state, last.state, last.t_s - first.t_s)


def path_sd(first: float, last: float, mean: float) -> float:
    """Return the standard deviation of a path of two straight lines with these ends and mean; NaN without an end."""
    # The middle m gives the mean (first + 2 m + last) / 4; each line has the mean square (a^2 + a m + m^2) / 3.
    middle = 2 * mean - (first + last) / 2
    square = sum(a * a + a * middle + middle * middle for a in (first, last)) / 6
    return math.sqrt(max(square - mean * mean, 0.0)) if math.isfinite(square) else math.nan


def _first(*values: float) -> float:
    return next((value for value in values if not math.isnan(value)), math.nan)


def or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0
