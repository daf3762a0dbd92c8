"""vLLM: a YAML file for `vllm serve --config`, and the same as a command line."""

from latfit.exporting.facts import PlanFacts
from latfit.exporting.files import Exported, Setting, Wanted
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
from latfit.exporting.text import checked_name, flag, script, shell, yaml_flag, yaml_text

REASONS = {
    "max_num_seqs": "requests",
    "max_num_batched_tokens": "tokens",
    "long_prefill_token_threshold": "chunk",
    "enable_chunked_prefill=True": "chunked",
    "enable_chunked_prefill=False": "whole",
    "max_model_len": "length",
    "scheduling_policy=priority": "priority",
    "async_scheduling=False": "in_turn",
}
MODEL_MISSING = "Set MODEL to the name or the folder of the model."


def export(facts: PlanFacts, wanted: Wanted) -> Exported:
    settings, model = vllm_settings(facts), loadable_model(facts, wanted.model)
    if model is not None:
        checked_name(model, "--model")
    yaml = header(facts, "Settings for vLLM: vllm serve --config vllm.yaml", vllm_notes(facts, model))
    if model is not None:
        yaml.append(f"model: {yaml_text(model)}")
    for each in settings:
        yaml += [*commented(each, facts), yaml_flag(each.name, each.value)]
    named = f'"${{MODEL:?{MODEL_MISSING}}}"' if model is None else shell(model)
    command = script(
        header(facts, "Starts vLLM", vllm_notes(facts, model)),
        ("vllm", "serve", named),
        ([*commented(each, facts, "  "), f"  {' '.join(flag(each.name, each.value))}"] for each in settings),
    )
    values = {each.name: each.value for each in settings}
    return Exported("vllm", facts.name, {"vllm.yaml": "\n".join([*yaml, ""]), "vllm.sh": command}, values)


def vllm_settings(facts: PlanFacts) -> list[Setting]:
    """What the plan says, each with its reason. Raises WrongUsage where it says nothing that vLLM could keep."""
    refuse_order(facts, "vLLM", ("fcfs", "priority"))
    found = flags_of(facts, "vllm", REASONS)
    if (count := parallel(facts)) is not None:
        found.append(setting_of(facts, "tensor_parallel_size", count, "parallel"))
    if facts.replicas is not None and facts.replicas.prefix_hit_rate > 0:
        found.append(setting_of(facts, "enable_prefix_caching", True, "prefix"))
    return found


def vllm_notes(facts: PlanFacts, model: str | None) -> list[str]:
    """What is left to vLLM's defaults, and why."""
    said = "vLLM says at its start how many it has (`KV cache size`); --gpu-memory-utilization is left as it is."
    notes = [kv_note(facts, said)]
    if model is None:
        notes.append("the model, which the plan does not name. Put it behind `vllm serve`, or export with --model.")
    if parallel(facts) is None:
        notes.append("tensor-parallel-size, which the plan does not name; vLLM's default is 1.")
    if facts.replicas is not None:
        if "enable_chunked_prefill" not in facts.flags["vllm"]:
            notes.append("enable-chunked-prefill, which is vLLM's default and what the plan assumes.")
        if "async_scheduling" not in facts.flags["vllm"]:
            notes.append("async-scheduling; the plan assumes it on, vLLM's default where it can.")
        notes.append(f"replicas and router: the plan is for {facts.replicas.count}, {facts.replicas.route}.")
    return notes
