"""TensorRT-LLM: a YAML file for `trtllm-serve --config` and the LLM API."""

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
)
from latfit.exporting.text import checked_name, shell, yaml_value

REASONS = {
    "max_batch_size": "requests",
    "max_num_tokens": "tokens",
    "enable_chunked_prefill=True": "chunked",
    "enable_chunked_prefill=False": "whole",
    "max_seq_len": "length",
    "disable_overlap_scheduler=True": "in_turn",
}
ADMISSION = "capacity_scheduler_policy"


def export(facts: PlanFacts, wanted: Wanted) -> Exported:
    refuse_order(facts, "trtllm-serve", ("fcfs",))
    model = loadable_model(facts, wanted.model)
    start = "MODEL" if model is None else shell(checked_name(model, "--model"))
    settings = flags_of(facts, "trtllm", REASONS)
    if (count := parallel(facts)) is not None:
        settings.append(setting_of(facts, "tensor_parallel_size", count, "parallel"))
    lines = header(facts, f"Settings for TensorRT-LLM: trtllm-serve {start} --config trtllm.yaml", _notes(facts, model))
    for each in settings:
        lines += [*commented(each, facts), f"{each.name}: {yaml_value(each.value)}"]
    if facts.replicas is not None and facts.replicas.kv_tokens is not None:
        admission = setting_of(facts, ADMISSION, "MAX_UTILIZATION", "admission")
        lines += ["scheduler_config:", *commented(admission, facts, "  "), f"  {ADMISSION}: {admission.value}"]
        settings.append(admission)
    values = {each.name: each.value for each in settings}
    return Exported("trtllm", facts.name, {"trtllm.yaml": "\n".join([*lines, ""])}, values)


def _notes(facts: PlanFacts, model: str | None) -> list[str]:
    notes = [kv_note(facts, "TensorRT-LLM says at its start how many it has; kv_cache_config is left as it is.")]
    if model is None:
        notes.append("the model, which the plan does not name.")
    if parallel(facts) is None:
        notes.append("tensor_parallel_size, which the plan does not name; the default is 1.")
    if chunk := facts.flags.get("vllm", {}).get("long_prefill_token_threshold"):
        notes.append(f"a limit of {chunk} tokens for one prompt's part of a step: there is none beside the step's.")
    if facts.replicas is not None:
        notes.append(f"replicas and router: the plan is for {facts.replicas.count}, {facts.replicas.route}.")
    return notes
