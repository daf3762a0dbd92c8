"""What a server did between two readings, and the mean step of it.

Counters tell it exactly. With N steps in w ms, P prompt tokens computed, F first tokens and G generated tokens, of
which a were accepted drafts of k drafted ones:

    decoding requests a step     D = (G - F - a) / N      (each gets one token a step, and its accepted drafts)
    requests a step              B = D + F / N            (a prompt's last part is in one step)
    tokens a step                S = D + (k + P) / N
    time a step                  T = w / N                where the engine worked all the time.

Whether it did is told by the gaps between tokens: a step is in the gap of each request that decodes in it, so their
mean is the mean of T over steps, weighted by D. With u = N x (mean gap) / w, u is 1 but for how D and T go together,
and less where the engine paused. Windows that begin or end without a request, or with u below `BUSY`, are idle, unless
requests waited at both ends. Of engines beside each other w counts for each.

B is known at both ends besides, so what it scattered by within the window is taken as that of a path of two straight
lines from one end to the other whose mean is B: 0 where it stood still. (On recorded steps of a real server, cut into
seconds: 0.82 in the mean, where the steps themselves had 0.87.)

llama.cpp counts the calls of llama_decode, and the slots that were busy in them, as it makes them: N and B. It counts a
prompt's tokens when the prompt is computed, and no first tokens, so S = B + P / N is one too large for each prompt; and
it has no gaps between tokens, so it counts as busy where requests run at both ends.

Triton counts executions, the samples in them and, for each request, how long it was computed: B is samples by
executions, T the mean over requests, and the engine need not be busy.

What these counters do not tell: parts of a prompt before its last, which count with it and, where nobody decodes beside
them, are no step; and what preempted requests compute again.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from latfit.metrics.names import SLOT_STEPS
from latfit.metrics.server import Reading
from latfit.metrics.state import MS_PER_S, Buckets, ServerState
from latfit.stats import IntArray

BUSY = 0.9
FEW_GAPS = 8
"""Gaps between tokens that tell whether an engine worked all the time."""


@dataclass(frozen=True)
class Interval:
    """From one state of a server to a later one, `seconds` apart."""

    first: ServerState
    last: ServerState
    seconds: float

    def count(self, name: str) -> float:
        """By how much a counter rose; NaN where there is none."""
        if name not in self.last.counters:
            return math.nan
        return self.last.counters[name] - self.first.counters.get(name, 0.0)

    def histogram(self, name: str) -> Buckets | None:
        """What it saw; None where there is none."""
        found = self.last.histograms.get(name)
        return None if found is None else found.since(self.first.histograms.get(name))

    def mean(self, name: str) -> float:
        """Of a histogram, in ms or tokens; NaN where it saw nothing."""
        found = self.histogram(name)
        return math.nan if found is None else found.mean

    def seen(self, name: str) -> float:
        """How many a histogram counted; NaN where there is none."""
        found = self.histogram(name)
        return math.nan if found is None else found.count

    @cached_property
    def steps(self) -> float:
        """Steps of all engines together; NaN where nobody counts them."""
        counted = self.seen("step_tokens")
        return self.count("steps") if math.isnan(counted) else counted

    @cached_property
    def first_tokens(self) -> float:
        return self.seen("ttft")

    @cached_property
    def prefill_tokens(self) -> float:
        """Prompt tokens that were computed: without those found in the prefix cache."""
        computed = self.count("prefill_tokens")
        if not math.isnan(computed):
            return computed
        return self.count("prompt_tokens") - _or_zero(self.count("prefix_hits"))

    @cached_property
    def decode_tokens(self) -> float:
        """Tokens of requests that decoded, drafts that were accepted among them."""
        counted = self.count("decode_tokens")
        return self.count("generation_tokens") - self.first_tokens if math.isnan(counted) else counted

    @cached_property
    def generated_tokens(self) -> float:
        counted = self.count("decode_tokens")
        return self.count("generation_tokens") if math.isnan(counted) else counted + _or_zero(self.first_tokens)

    @cached_property
    def finished(self) -> float:
        """Requests that ended; where nobody counts them, those whose latency was."""
        counted = self.count("finished")
        return self.seen("latency") if math.isnan(counted) else counted

    @cached_property
    def arrived(self) -> float:
        """Requests that came: those that ended, and what more there is now than before."""
        more = _or_zero(self.last.running - self.first.running) + _or_zero(self.last.waiting - self.first.waiting)
        return self.finished + more

    def lengths(self, n: int, rng: np.random.Generator) -> tuple[IntArray, IntArray] | None:
        """Prompt and output tokens (n,) of requests as the histograms have them, where there is none all of the mean;
        None where that is not known either."""
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
        """Share of the time that steps took, as the gaps between tokens tell (see above); NaN where too few were."""
        gaps = self.histogram("itl")
        if gaps is None or gaps.count < FEW_GAPS or not self.steps > 0:
            return math.nan
        return self.steps * gaps.mean / (self.seconds * MS_PER_S * self.last.engines)

    @property
    def was_busy(self) -> bool:
        """Whether the engine can be taken to have worked all the time."""
        if min(self.first.waiting, self.last.waiting) > 0 or self.of_executions:
            return True
        if min(self.first.running, self.last.running) <= 0:
            return False
        return math.isnan(self.worked) or self.worked >= BUSY

    @property
    def of_slots(self) -> bool:
        """Whether busy slots are counted step by step, and neither first tokens nor generated ones."""
        return SLOT_STEPS in self.last.counters

    @property
    def of_executions(self) -> bool:
        """Whether what is counted are executions of any model, without tokens."""
        return "samples" in self.last.counters

    def mean_step(self) -> dict[str, float] | None:
        """The mean step as columns of a trace; None where there was none, or the counters do not tell."""
        N, window_ms = self.steps, self.seconds * MS_PER_S
        if not N > 0:
            return None
        if self.of_executions:
            B, T_ms = max(self.count("samples") / N, 1.0), self.count("compute_ms") / max(self.finished, 1.0)
            return {"B": B, "S": B, "T_ms": T_ms, "window_ms": window_ms, "window_steps": N}
        if self.of_slots:
            B = max(self.count(SLOT_STEPS) / N, 1.0)
            return {
                "B": B,
                "S": B + self.prefill_tokens / N,
                "T_ms": window_ms / N,
                "window_ms": window_ms,
                "window_steps": N,
                "B_sd": path_sd(self.first.running, self.last.running, B),
                "prefill_tokens": self.prefill_tokens / N,
                "queued_requests": (self.first.waiting + self.last.waiting) / 2,
            }
        drafted, accepted = (_or_zero(self.count(name)) for name in ("draft_tokens", "accepted_tokens"))
        D = max(self.decode_tokens - accepted, 0.0) / N
        B = D + self.first_tokens / N
        S = D + (drafted + self.prefill_tokens) / N
        if not math.isfinite(B + S):
            return None
        usage = (self.first.kv_usage + self.last.kv_usage) / 2
        capacity = self.last.facts.get("kv_capacity_tokens")
        return {
            "B": B,
            "S": max(S, B),
            "T_ms": window_ms * self.last.engines / N,
            "window_ms": window_ms,
            "window_steps": N,
            "B_sd": path_sd(self.first.running, self.last.running, B),
            "prefill_requests": self.first_tokens / N,
            "prefill_tokens": self.prefill_tokens / N,
            "kv_usage": usage,
            "context_tokens": usage * capacity if capacity else math.nan,
            "queued_requests": (self.first.waiting + self.last.waiting) / 2,
            "prefix_queries": _or_zero(self.count("prefix_queries")),
            "prefix_hits": _or_zero(self.count("prefix_hits")),
            "draft_tokens": drafted,
            "accepted_tokens": accepted,
        }


def between(first: Reading, last: Reading) -> Interval:
    return Interval(first.state, last.state, last.t_s - first.t_s)


def path_sd(first: float, last: float, mean: float) -> float:
    """Standard deviation of a path of two straight lines from one value to another that has this mean; NaN where an end
    is not known. Its middle m makes the mean, (first + 2 m + last) / 4, and each line has the mean square
    (a^2 + a m + m^2) / 3."""
    middle = 2 * mean - (first + last) / 2
    square = sum(a * a + a * middle + middle * middle for a in (first, last)) / 6
    return math.sqrt(max(square - mean * mean, 0.0)) if math.isfinite(square) else math.nan


def _or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0
