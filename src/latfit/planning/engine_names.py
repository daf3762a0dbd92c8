"""Settings of a simulated engine under the names that serving engines use."""

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from latfit.engines import BY_KEY
from latfit.records import MAX_COUNT, Count

if TYPE_CHECKING:
    from latfit.simulation import EngineSettings

Setting = bool | str | Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | list[Count]
"""-1 is SGLang's word for "no chunks"."""

Flags = dict[str, Setting]


def named_flags(**values: int | None) -> dict[str, Flags]:
    """Return values by their role (`latfit.engines`) under the names of each engine that batches step by step."""
    able = [each for each in BY_KEY.values() if each.has("tokens") and (each.has("whole") or "whole" not in values)]
    return {each.key: dict(each.named_settings(values)) for each in able}


def serving_flags(settings: "EngineSettings") -> dict[str, Flags]:
    """Return the settings that a simulated engine ran with, by engine, without what is an engine's default."""
    budget = settings.max_num_batched_tokens
    values: dict[str, int | None] = {"requests": settings.max_num_seqs, "tokens": budget}
    values |= {"whole": budget, "length": budget} if settings.batching == "continuous" else {"chunked": None}
    if settings.long_prefill_token_threshold:
        values["chunk"] = settings.long_prefill_token_threshold
    if settings.order.name == "priority":
        values["priority"] = None
    if not settings.asynchronous:
        values["in_turn"] = None
    found = named_flags(**values)
    if found["vllm"].get("enable_chunked_prefill") is True:
        del found["vllm"]["enable_chunked_prefill"]
    return found
