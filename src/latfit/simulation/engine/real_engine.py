"""Settings of a simulated engine from what a real one's traces say of it.

The cache holds as many blocks as its tokens make of the block size. vLLM's log prints no block size: where only a log
speaks, it is vLLM's default (16 tokens, 128 on a CPU), which is said.

Drafts are simulated as k tokens a step, each accepted with probability a if all before it were: a request gains
a + a^2 + ... + a^k tokens a step. Of recorded drafts the mean gain m = accepted tokens / requests that decoded is
known; a is where the sum equals m (it rises from 0 at a = 0 to k at a = 1), found by halving.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from latfit.trace import EngineFacts

BLOCK, BLOCK_ON_CPU = 16, 128
SEQUENCES, SEQUENCES_ON_CPU, BUDGET = 256, 128, 2048
HALVINGS = 50

SAYS_NOTHING = ("model", "data_parallel_size", "max_model_len")
"""Facts that traces of other origin may hold too, and that settle no setting."""

OPTIONS: Mapping[str, str] = {
    "block_size": "--block-size",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "long_prefill_token_threshold": "--long-prefill-token-threshold",
    "kv_capacity_tokens": "--kv-blocks",
    "num_gpu_blocks": "--kv-blocks",
    "num_speculative_tokens": "--draft-tokens",
    "async_scheduling": "--synchronous",
}
"""The option that sets a fact."""

DEFAULT, ASSUMED = "vLLM's default", "assumed"
"""Where a value comes from that no source told."""


@dataclass(frozen=True)
class KnownSettings:
    """values: parameters of an engine by the names of its options (`kv_blocks`, `max_num_seqs`, `synchronous`, ...).
    origin: where each comes from: a file's name, `vLLM's default`, `observed` in the steps, or `assumed`.  files: all
    that said something.  notes: what should be known.  padded_graphs: whether steps of decoding are to be padded to the
    batches of captured graphs; where an engine made the measured steps, their times hold what its padding costs."""

    values: Mapping[str, Any] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[str] = ()
    notes: Sequence[str] = ()
    padded_graphs: bool = True


def known_settings(facts: EngineFacts, block_size: int | None = None) -> KnownSettings:
    """What can be known of an engine's settings, and the rest as vLLM has it; without `kv_blocks` where no source says
    how large the cache is. block_size: of who knows better than the sources."""
    if not {*facts.values, *facts.differing} - set(SAYS_NOTHING):
        return KnownSettings(padded_graphs=not facts.as_served)
    told: dict[str, Any] = {**facts.values, **({} if block_size is None else {"block_size": block_size})}
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    notes = [
        f"Traces differ in {name} ({', '.join(map(str, several[:4]))}): none is used{_hint(name)}."
        for name, several in facts.differing.items()
    ]
    if facts.overruled:
        parts = [
            f"{name} {facts.values[name]} ({', '.join(map(str, others[:4]))} in the trace)"
            for name, others in facts.overruled.items()
        ]
        notes.append(f"The running server's settings replace those of the trace: {'; '.join(parts)}.")

    def take(name: str, fact: str, value: Any) -> None:
        values[name], origin[name] = value, facts.sources.get(fact, ASSUMED)

    for name in ("block_size", "max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold"):
        if name in told:
            take(name, name, told[name])
    _with_defaults(values, origin, str(told.get("device_type", "")))
    if "kv_capacity_tokens" in told and told["kv_capacity_tokens"] >= 2 * values["block_size"]:
        take("kv_blocks", "kv_capacity_tokens", told["kv_capacity_tokens"] // values["block_size"])
        if origin["block_size"] == DEFAULT:
            notes.append(
                f"No source tells the tokens of a KV block: {values['block_size']} taken, vLLM's default"
                f"{' on a CPU' if values['block_size'] == BLOCK_ON_CPU else ''}; --block-size sets it."
            )
    elif "num_gpu_blocks" in told:
        take("kv_blocks", "num_gpu_blocks", told["num_gpu_blocks"])
    if origin["max_num_seqs"] == ASSUMED:
        notes.append(f"No source tells max_num_seqs: {values['max_num_seqs']} assumed; --max-num-seqs sets it.")
    if "async_scheduling" in told:
        take("synchronous", "async_scheduling", not told["async_scheduling"])
    elif told.get("device_type") == "cpu":
        values["synchronous"], origin["synchronous"] = True, DEFAULT  # its CPU backend switches asynchronous off
    else:
        origin["synchronous"] = ASSUMED
        notes.append("No source tells how steps are scheduled: asynchronous assumed; --synchronous sets it.")
    if told.get("enable_chunked_prefill") is False:
        notes.append(
            "The engine ran without chunked prefill; chunked-prefill splits prompts that the budget has no room for."
        )
    _take_observed(facts, values, origin)
    return KnownSettings(values, origin, facts.files, notes, padded_graphs=not facts.as_served)


def _hint(fact: str) -> str:
    """The option that sets a fact, as the end of a sentence; empty where there is none."""
    option = OPTIONS.get(fact)
    return f"; {option} sets it" if option else ""


def _with_defaults(values: dict[str, Any], origin: dict[str, str], device: str) -> None:
    """On GPUs vLLM's `max_num_seqs` depends on their memory and on its version."""
    cpu = device == "cpu"
    fits = values.get("max_num_batched_tokens", BUDGET)
    usual = {
        "block_size": (BLOCK_ON_CPU if cpu else BLOCK, DEFAULT),
        "max_num_batched_tokens": (BUDGET, ASSUMED),
        "max_num_seqs": (min(SEQUENCES_ON_CPU if cpu else SEQUENCES, fits), DEFAULT if cpu else ASSUMED),
    }
    for name, (value, source) in usual.items():
        if name not in values:
            values[name], origin[name] = value, source


def _take_observed(facts: EngineFacts, values: dict[str, Any], origin: dict[str, str]) -> None:
    """The share of prompts that was cached, and drafts with their acceptance."""
    did = facts.did
    queries, hits = did.get("prefix_queries", 0.0), did.get("prefix_hits", 0.0)
    if queries > 0 and 0 < hits < queries and facts.values.get("enable_prefix_caching", True):
        values["prefix_hit_rate"], origin["prefix_hit_rate"] = hits / queries, "observed"
    k = facts.values.get("num_speculative_tokens", 0)
    if k > 0:
        values["draft_tokens"], origin["draft_tokens"] = k, facts.sources["num_speculative_tokens"]
        decoded, accepted = did.get("decode_requests", 0.0), did.get("accepted_tokens", 0.0)
        if decoded > 0 and did.get("draft_tokens", 0.0) > 0:
            values["acceptance"], origin["acceptance"] = acceptance_of(accepted / decoded, k), "observed"


def acceptance_of(gain: float, k: int) -> float:
    """The probability a with a + a^2 + ... + a^k = gain, the mean number of accepted tokens of a request and step."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        if sum(middle**i for i in range(1, k + 1)) < gain:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)
