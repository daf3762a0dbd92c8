"""SGLang: the command line of its server."""

from latfit.exporting.command import KT, program
from latfit.exporting.facts import PlanFacts
from latfit.exporting.files import Exported, Wanted
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
from latfit.exporting.text import comment, model_word, script

REASONS = {
    "max_running_requests": "requests",
    "chunked_prefill_size": "tokens",
    "enable_mixed_chunk=True": "chunked",
    "max_prefill_tokens": "whole",
    "context_length": "length",
    "enable_priority_scheduling=True": "priority",
    "disable_overlap_schedule=True": "in_turn",
    KT: "gpu_prompts",
}
ENGINE = Engine("sglang", "SGLang", ("fcfs", "priority"), REASONS)


def export(facts: PlanFacts, wanted: Wanted) -> Exported:
    model = loadable_model(facts, wanted.model)
    settings = step_settings(facts, ENGINE)
    threshold = next((each for each in settings if each.name == KT), None)
    settings = [each for each in settings if each.name != KT]
    head = header(facts, "Starts SGLang", _notes(facts, model))
    if threshold is not None:
        head += comment(
            f"With experts on the CPU, in KTransformers' own build of SGLang (kvcache-ai/sglang), which has"
            f" this option: --{KT.replace('_', '-')} {threshold.value}."
        )
        head += commented(threshold, facts)
    command = script(
        head,
        program("sglang", model_word(model)),
        ([*commented(each, facts, "  "), f"  {' '.join(_flag(each.name, each.value))}"] for each in settings),
    )
    return Exported("sglang", facts.name, {"sglang.sh": command}, {each.name: each.value for each in settings})


def _flag(name: str, value: object) -> list[str]:
    option = f"--{name.replace('_', '-')}"
    return [option] if value is True else [option, str(value)]


def _notes(facts: PlanFacts, model: str | None) -> list[str]:
    said = "SGLang says at its start how many it has (`max_total_num_tokens`); --mem-fraction-static is left as it is."
    notes = [*left_out(facts, ENGINE, model, said), *chunk_left_out(facts, ENGINE), *replicas_left_out(facts)]
    if facts.flags["sglang"].get("enable_priority_scheduling"):
        notes.append("priorities of requests: in SGLang the higher number goes first.")
    return notes
