"""Settings of a simulated engine under the names that serving engines use."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from latfit.records import MAX_COUNT, Count

if TYPE_CHECKING:
    from latfit.simulation import EngineSettings

Setting = bool | str | Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | list[Count]
"""-1 is SGLang's word for "no chunks"."""

Flags = dict[str, Setting]

NAMES: Mapping[str, tuple[str, str, Flags]] = {
    "vllm": ("max_num_seqs", "max_num_batched_tokens", {"enable_chunked_prefill": True}),
    "sglang": ("max_running_requests", "chunked_prefill_size", {"enable_mixed_chunk": True}),
    "trtllm": ("max_batch_size", "max_num_tokens", {"enable_chunked_prefill": True}),
    "llamacpp": ("parallel", "batch_size", {}),
}
"""By engine: its names for the requests and the tokens of a step, and what a limit of tokens takes with it."""


def chunked_flags(seqs: int, budget: int | None) -> dict[str, Flags]:
    """Return limits of a step with chunked prefill, by engine. budget: tokens; None without a limit."""
    return {
        engine: {of_seqs: seqs} | ({} if budget is None else {of_budget: budget, **fixed})
        for engine, (of_seqs, of_budget, fixed) in NAMES.items()
    }


def serving_flags(settings: "EngineSettings") -> dict[str, Flags]:
    """Return the settings that a simulated engine ran with, by engine, without what is an engine's default."""
    seqs, budget = settings.max_num_seqs, settings.max_num_batched_tokens
    found = chunked_flags(seqs, budget)
    vllm, trtllm = found["vllm"], found["trtllm"]
    del vllm["enable_chunked_prefill"]
    if settings.long_prefill_token_threshold:
        vllm["long_prefill_token_threshold"] = settings.long_prefill_token_threshold
    if settings.batching == "continuous":
        vllm |= {"enable_chunked_prefill": False, "max_model_len": budget}
        prefill = {"chunked_prefill_size": -1, "max_prefill_tokens": budget, "context_length": budget}
        found["sglang"] = {"max_running_requests": seqs, **prefill}
        trtllm |= {"enable_chunked_prefill": False, "max_seq_len": budget}
        del found["llamacpp"]  # adds prompts to any step that has room
    if settings.order.name == "priority":
        vllm["scheduling_policy"] = "priority"
        found["sglang"]["enable_priority_scheduling"] = True
    if not settings.asynchronous:
        vllm["async_scheduling"] = False
        found["sglang"]["disable_overlap_schedule"] = True
        trtllm["disable_overlap_scheduler"] = True
    return found
