"""SGLang: the command line of its server."""

from latfit.exporting.facts import PlanFacts
from latfit.exporting.files import Exported, Wanted
from latfit.exporting.reasons import (
    commented,
    flags_of,
    header,
    kv_note,
    loadable_model,
    parallel,
    refuse_order,
    setting_of,
    validity,
)
from latfit.exporting.text import checked_name, comment, script, shell
from latfit.exporting.vllm import MODEL_MISSING

REASONS = {
    "max_running_requests": "requests",
    "chunked_prefill_size": "tokens",
    "enable_mixed_chunk=True": "chunked",
    "max_prefill_tokens": "whole",
    "context_length": "length",
    "enable_priority_scheduling=True": "priority",
    "disable_overlap_schedule=True": "in_turn",
    "kt_gpu_prefill_token_threshold": "chunk",
}
KT = "kt_gpu_prefill_token_threshold"


def export(facts: PlanFacts, wanted: Wanted) -> Exported:
    refuse_order(facts, "SGLang", ("fcfs", "priority"))
    model = loadable_model(facts, wanted.model)
    if model is not None:
        checked_name(model, "--model")
    settings = flags_of(facts, "sglang", REASONS)
    threshold = next((each for each in settings if each.name == KT), None)
    settings = [each for each in settings if each.name != KT]
    if (count := parallel(facts)) is not None:
        settings.append(setting_of(facts, "tensor_parallel_size", count, "parallel"))
    head = header(facts, "Starts SGLang", _notes(facts, model))
    if threshold is not None:
        head += comment(
            f"With KTransformers' experts on the CPU: --kt-gpu-prefill-token-threshold {threshold.value}, the prompt"
            f" length from which the GPU is as fast (B1 in tokens). {validity(facts)}"
        )
    named = f'"${{MODEL:?{MODEL_MISSING}}}"' if model is None else shell(model)
    command = script(
        head,
        ("python3", "-m", "sglang.launch_server", "--model-path", named),
        ([*commented(each, facts, "  "), f"  {' '.join(_flag(each.name, each.value))}"] for each in settings),
    )
    return Exported("sglang", facts.name, {"sglang.sh": command}, {each.name: each.value for each in settings})


def _flag(name: str, value: object) -> list[str]:
    option = f"--{name.replace('_', '-')}"
    return [option] if value is True else [option, str(value)]


def _notes(facts: PlanFacts, model: str | None) -> list[str]:
    said = "SGLang says at its start how many it has (`max_total_num_tokens`); --mem-fraction-static is left as it is."
    notes = [kv_note(facts, said)]
    if model is None:
        notes.append("the model, which the plan does not name. Set MODEL, or export with --model.")
    if parallel(facts) is None:
        notes.append("tensor-parallel-size, which the plan does not name; SGLang's default is 1.")
    if chunk := facts.flags.get("vllm", {}).get("long_prefill_token_threshold"):
        notes.append(f"a limit of {chunk} tokens for one prompt's part of a step: SGLang has none beside the step's.")
    if facts.replicas is not None:
        notes.append(f"replicas and router: the plan is for {facts.replicas.count}, {facts.replicas.route}.")
        if facts.flags["sglang"].get("enable_priority_scheduling"):
            notes.append("priorities of requests: in SGLang the higher number goes first.")
    return notes
