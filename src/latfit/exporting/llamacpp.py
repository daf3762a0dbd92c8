"""llama.cpp: the command line of llama-server."""

from latfit.errors import WrongUsage
from latfit.exporting.command import program
from latfit.exporting.facts import PlanFacts
from latfit.exporting.files import Exported, Setting, Wanted
from latfit.exporting.reasons import (
    Engine,
    chunk_left_out,
    commented,
    header,
    left_out,
    loadable_model,
    replicas_left_out,
    step_settings,
)
from latfit.exporting.text import flag, model_word, script

REASONS = {"parallel": "requests", "batch_size": "tokens"}
ENGINE = Engine("llamacpp", "llama.cpp", ("fcfs",), REASONS)


def export(facts: PlanFacts, wanted: Wanted) -> Exported:
    if facts.flags.get("vllm", {}).get("enable_chunked_prefill") is False:
        raise WrongUsage(
            "the plan computes whole prompts in steps of their own; llama.cpp adds prompts to any step that has room",
            where=facts.file,
            remedy="Plan with --batching chunked-prefill.",
        )
    model = loadable_model(facts, wanted.model)
    settings = [each for each in step_settings(facts, ENGINE) if each.name in REASONS]
    cache = _cache(facts)
    command = script(
        header(facts, "Starts llama.cpp's server", _notes(facts, model)),
        program("llamacpp", model_word(model)),
        ([*commented(each, facts, "  "), f"  {' '.join(flag(each.name, each.value))}"] for each in [*settings, *cache]),
    )
    values = {each.name: each.value for each in [*settings, *cache]}
    return Exported("llamacpp", facts.name, {"llama-server.sh": command}, values)


def _cache(facts: PlanFacts) -> list[Setting]:
    """The KV cache, shared among the slots as the plan's is among requests."""
    tokens = None if facts.replicas is None else facts.replicas.kv_tokens
    if tokens is None:
        return []
    return [
        Setting("ctx_size", tokens, "Tokens of the KV cache of all slots together, as the plan has it."),
        Setting("kv_unified", True, "One cache for all slots, as in the plan; else each has an equal part."),
    ]


def _notes(facts: PlanFacts, model: str | None) -> list[str]:
    said = "--ctx-size is shared out among the slots: each part has to hold the longest prompt with its output."
    kept = [*left_out(facts, ENGINE, model, said), *chunk_left_out(facts, ENGINE), *replicas_left_out(facts)]
    notes = [each for each in kept if not each.startswith("tensor parallelism")]
    if _cache(facts):
        notes = [each for each in notes if not each.startswith("the KV cache")]
        notes.append("what to do when the cache is full: llama.cpp pauses no request, as the plan does, but fails it.")
    notes.append("--ubatch-size, into which a larger step is cut: as it was when the steps were measured.")
    if facts.kind == "requests" and "async_scheduling" not in facts.flags.get("vllm", {}):
        notes.append("steps planned ahead, which the plan assumes: llama.cpp does not; plan with --synchronous.")
    return notes
