"""Settings of a serving engine under the usual names, and as the compiled core reads them."""

import math
from dataclasses import dataclass, field

import numpy as np

from latfit.errors import BadInput, refuse
from latfit.simulation.engine import state as st
from latfit.simulation.engine.state import Limits
from latfit.stats import FloatArray
from latfit.workload import Requests

POSITIVE = ("max_num_seqs", "max_num_batched_tokens", "block_size", "start_at")
COUNTS = (*POSITIVE, "kv_blocks", "long_prefill_token_threshold")
ENGINES = {
    "chunked-prefill": st.CHUNKED,
    "continuous": st.CONTINUOUS,
    "selective": st.SELECTIVE,
    "static": st.STATIC,
}
ORDERS = {
    "fcfs": st.FCFS,  # the first that came
    "sjf": st.KEYED,  # the shortest predicted output
    "slo": st.DEADLINE,  # the earliest deadline; of those that are late the most urgent class
    "priority": st.KEYED,  # the most urgent class, with ageing
    "fair": st.FAIR,  # the user who was served least
    "switch": st.SWITCH,  # the earliest deadline while few wait, else the shortest within a class
}
NEVER_MS = 1e12


@dataclass(frozen=True)
class Order:
    """Which waiting request comes next; preempted ones always come before all others."""

    name: str = "fcfs"
    length_error: float = 0.0  # standard deviation of the logarithm of predicted over true output
    ageing_ms: float = math.inf  # waiting time worth one class
    switch_at: int = 32  # requests waiting

    def __post_init__(self) -> None:
        refuse(self.name not in ORDERS, f"{self.name!r} is not an order", "--order", f"One of {', '.join(ORDERS)}.")
        wrong = not self.length_error >= 0 or not self.ageing_ms > 0 or self.switch_at < 1
        refuse(wrong, "a length error, an ageing or a switch below zero", "--order", "Correct the number.")

    def keys(self, requests: Requests, seed: int, span_ms: float) -> tuple[FloatArray, FloatArray]:
        """Return keys (n,), lower first; the second is for many waiting (`switch`) or late (`slo`)."""
        arrival, output = requests.arrival_ms, requests.output_tokens
        if ORDERS[self.name] in (st.FCFS, st.FAIR):
            return np.empty(0), np.empty(0)
        if self.name == "priority":
            level = requests.class_id.astype(np.float64)
            # Ageing that outlasts the whole run is none: whole classes go before each other.
            worth = min(self.ageing_ms, span_ms + 1.0)
            return np.asarray(arrival + level * worth, dtype=np.float64), arrival
        noise = np.random.default_rng([seed, 1]).normal(0.0, 1.0, len(output))
        predicted = np.asarray(output * np.exp(self.length_error * noise), dtype=np.float64)
        if self.name == "sjf":
            return predicted, arrival
        deadline = arrival + np.minimum(np.minimum(requests.deadline_ms, requests.ttft_slo_ms), NEVER_MS)
        if self.name == "switch":
            longest = float(predicted.max(initial=0.0)) + 1.0
            return deadline, np.asarray(requests.class_id * longest + predicted, dtype=np.float64)
        return deadline, np.asarray(requests.class_id * (span_ms + 1.0) + arrival, dtype=np.float64)


@dataclass(frozen=True)
class Speculation:
    """`draft_tokens` take `draft_ms` each, and are accepted one after the other with probability `acceptance`."""

    draft_tokens: int = 0
    acceptance: float = 0.7
    draft_ms: float = 0.0

    def __post_init__(self) -> None:
        wrong = self.draft_tokens < 0 or not 0 <= self.acceptance <= 1 or not self.draft_ms >= 0
        found = f"{self.draft_tokens} draft tokens, accepted with probability {self.acceptance:g}"
        refuse(wrong, found, "--set draft_tokens", "Give a count that is not negative and a probability.")


MOST, MOST_BLOCK = 2**40, 2**20  # of any count, and of tokens in a block: products of two are whole numbers of 64 bits


@dataclass(frozen=True)
class EngineSettings:
    """One engine. Times in ms, lengths in tokens."""

    batching: str = "chunked-prefill"
    order: Order = field(default_factory=Order)
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    kv_blocks: int = 8192  # what the engine resolves at its start, its null block included
    block_size: int = 16
    long_prefill_token_threshold: int = 0
    null_blocks: int = 1
    start_at: int = 1  # continuous: how many must wait before a step of prefill interrupts decoding
    asynchronous: bool = True  # a step is planned while the one before it runs
    reuse_freed: bool = True  # a preempted request finds its blocks again if nobody took them
    swap_ms_per_token: float | None = None  # cost of moving preempted requests out and in, in place of recomputation
    cached_share: float = 0.0  # of every prompt
    prefix_cache: bool = True  # recorded contents of prompts are found again, in place of that share
    padded_graphs: bool = True  # decode steps are padded to the batch size of a captured graph
    speculation: Speculation = field(default_factory=Speculation)
    fast: bool = True  # repeated steps in one go

    def __post_init__(self) -> None:
        engines, static = ", ".join(ENGINES), self.batching == "static"
        refuse(self.batching not in ENGINES, f"{self.batching!r} is not an engine", "--batching", f"One of {engines}.")
        for name in COUNTS:
            value, option = getattr(self, name), f"--{name.replace('_', '-')}"
            least, most = int(name in POSITIVE), MOST_BLOCK if name == "block_size" else MOST
            refuse(value < least, f"{value} is too few", option, f"Give {least} or more.")
            refuse(value > most, f"{value} is more than any engine has", option, f"Give {most} at most.")
        few = f"{self.kv_blocks} blocks hold no request, {self.null_blocks} are reserved"
        refuse(self.kv_blocks <= self.null_blocks, few, "--kv-blocks", f"Give {self.null_blocks + 1} or more.")
        share = f"a share of {self.cached_share:g}"
        refuse(not 0 <= self.cached_share < 1, share, "--set prefix_hit_rate", "Give 0 or more, below 1.")
        unordered = "static batches are formed first come first served, without drafts"
        ordered = self.order.name != "fcfs" or self.speculation.draft_tokens > 0
        refuse(static and ordered, unordered, "--batching", "Take another engine.")
        small = f"a budget of {self.max_num_batched_tokens} tokens cannot hold {self.max_num_seqs} requests"
        wrong = self.batching == "chunked-prefill" and self.max_num_batched_tokens < self.max_num_seqs
        refuse(wrong, small, "--max-num-batched-tokens", "Give at least as many tokens as requests.")

    @property
    def cache_tokens(self) -> int:
        return (self.kv_blocks - self.null_blocks) * self.block_size

    def limits(self, seed: int) -> Limits:
        return Limits(
            batching=ENGINES[self.batching],
            order=ORDERS[self.order.name],
            max_num_seqs=self.max_num_seqs,
            budget=self.max_num_batched_tokens,
            blocks=self.kv_blocks - self.null_blocks,
            block_size=self.block_size,
            long_prefill=self.long_prefill_token_threshold,
            start_at=self.start_at,
            asynchronous=int(self.asynchronous),
            reuse=int(self.reuse_freed and self.swap_ms_per_token is None),
            swap=int(self.swap_ms_per_token is not None),
            draft=self.speculation.draft_tokens,
            switch_at=self.order.switch_at,
            seed=seed,
            fast=int(self.fast),
            graphs=int(self.padded_graphs),
            timed=int(self.order.name in ("slo", "priority", "switch")),
            accept=self.speculation.acceptance,
            draft_ms=self.speculation.draft_ms,
            swap_ms=self.swap_ms_per_token or 0.0,
        )


def check_fits(requests: Requests, settings: EngineSettings) -> None:
    """Raise BadInput for no request, or for one with more tokens than the KV cache holds."""
    if not len(requests):
        raise BadInput("there is no request", where="requests", remedy="Give at least one.")
    room, block = settings.cache_tokens, settings.block_size
    most = requests.prompt_tokens + requests.output_tokens - 1 + settings.speculation.draft_tokens
    # A whole number of blocks is held, so the last block counts in full.
    too_large = np.flatnonzero(-(-most // block) * block > room)
    if len(too_large):
        row = int(too_large[0])
        prompt, output = int(requests.prompt_tokens[row]), int(requests.output_tokens[row])
        found = f"request {row + 1} has {prompt:,} prompt and {output:,} output tokens, more than the KV cache holds"
        found += f" ({room:,}); {len(too_large):,} of {len(requests):,} requests do not fit"
        raise BadInput(found, where="requests", remedy="Give more --kv-blocks, or leave such requests out.")
