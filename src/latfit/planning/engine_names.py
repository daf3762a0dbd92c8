"""Settings of a simulated engine under the names that serving engines use."""

from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from latfit.records import MAX_COUNT, Count

if TYPE_CHECKING:
    from latfit.simulation import EngineSettings

Setting = bool | str | Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | list[Count]
"""-1 is SGLang's word for "no chunks"."""

Flags = dict[str, Setting]


def serving_flags(settings: "EngineSettings") -> dict[str, Flags]:
    """The settings that a simulated engine ran with, by engine; what is an engine's default is left out."""
    seqs, budget = settings.max_num_seqs, settings.max_num_batched_tokens
    vllm: dict[str, Any] = {"max_num_seqs": seqs, "max_num_batched_tokens": budget}
    sglang: dict[str, Any] = {"max_running_requests": seqs}
    trtllm: dict[str, Any] = {"max_batch_size": seqs, "max_num_tokens": budget}
    if settings.long_prefill_token_threshold:
        vllm["long_prefill_token_threshold"] = settings.long_prefill_token_threshold
    if settings.batching == "continuous":
        vllm |= {"enable_chunked_prefill": False, "max_model_len": budget}
        sglang |= {"chunked_prefill_size": -1, "max_prefill_tokens": budget, "context_length": budget}
        trtllm |= {"enable_chunked_prefill": False, "max_seq_len": budget}
    else:
        sglang |= {"chunked_prefill_size": budget, "enable_mixed_chunk": True}
        trtllm["enable_chunked_prefill"] = True
    if settings.order.name == "priority":
        vllm["scheduling_policy"] = "priority"
        sglang["enable_priority_scheduling"] = True
    if not settings.asynchronous:
        vllm["async_scheduling"] = False
        sglang["disable_overlap_schedule"] = True
        trtllm["disable_overlap_scheduler"] = True
    found: dict[str, Flags] = {"vllm": vllm, "sglang": sglang, "trtllm": trtllm}
    if settings.batching != "continuous":  # llama.cpp adds prompts to any step that has room
        found["llamacpp"] = {"parallel": seqs, "batch_size": budget}
    return found
