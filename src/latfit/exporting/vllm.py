"""vLLM: a YAML file for `vllm serve --config`, and the same as a command line."""

from latfit.exporting.command import program
from latfit.exporting.facts import PlanFacts
from latfit.exporting.files import Exported, Setting, Wanted
from latfit.exporting.reasons import (
    Engine,
    commented,
    header,
    left_out,
    loadable_model,
    replicas_left_out,
    setting_of,
    step_settings,
)
from latfit.exporting.text import flag, model_word, script, yaml_flag, yaml_text

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
ENGINE = Engine("vllm", "vLLM", ("fcfs", "priority"), REASONS)


def export(facts: PlanFacts, wanted: Wanted) -> Exported:
    settings, model = vllm_settings(facts), loadable_model(facts, wanted.model)
    notes = [*vllm_notes(facts, model), *replicas_left_out(facts)]
    yaml = header(facts, "Settings for vLLM: vllm serve --config vllm.yaml", notes)
    if model is not None:
        yaml.append(f"model: {yaml_text(model)}")
    for each in settings:
        yaml += [*commented(each, facts), yaml_flag(each.name, each.value)]
    command = script(
        header(facts, "Starts vLLM", notes),
        program("vllm", model_word(model)),
        ([*commented(each, facts, "  "), f"  {' '.join(flag(each.name, each.value))}"] for each in settings),
    )
    values = {each.name: each.value for each in settings}
    return Exported("vllm", facts.name, {"vllm.yaml": "\n".join([*yaml, ""]), "vllm.sh": command}, values)


def vllm_settings(facts: PlanFacts) -> list[Setting]:
    """What the plan says, each with its reason. Raises WrongUsage where it says nothing that vLLM could keep."""
    found = step_settings(facts, ENGINE)
    if facts.replicas is not None and facts.replicas.prefix_hit_rate > 0:
        found.append(setting_of(facts, "enable_prefix_caching", True, "prefix"))
    return found


def vllm_notes(facts: PlanFacts, model: str | None) -> list[str]:
    """What is left to vLLM's defaults, and why."""
    said = "vLLM says at its start how many it has (`KV cache size`); --gpu-memory-utilization is left as it is."
    notes = left_out(facts, ENGINE, model, said)
    if facts.replicas is not None:
        if "enable_chunked_prefill" not in facts.flags["vllm"]:
            notes.append("enable-chunked-prefill, which is vLLM's default and what the plan assumes.")
        if "async_scheduling" not in facts.flags["vllm"]:
            notes.append("async-scheduling; the plan assumes it on, vLLM's default where it can.")
    return notes
