"""TensorRT-LLM: a YAML file for `trtllm-serve --config` and the LLM API."""

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
    setting_of,
    step_settings,
)
from latfit.exporting.text import shell, yaml_value

REASONS = {
    "max_batch_size": "requests",
    "max_num_tokens": "tokens",
    "enable_chunked_prefill=True": "chunked",
    "enable_chunked_prefill=False": "whole",
    "max_seq_len": "length",
    "disable_overlap_scheduler=True": "in_turn",
}
ENGINE = Engine("trtllm", "TensorRT-LLM", ("fcfs",), REASONS)
ADMISSION = "capacity_scheduler_policy"


def export(facts: PlanFacts, wanted: Wanted) -> Exported:
    model = loadable_model(facts, wanted.model)
    start = "MODEL" if model is None else shell(model)
    settings = step_settings(facts, ENGINE)
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
    said = "TensorRT-LLM says at its start how many it has; kv_cache_config is left as it is."
    return [*left_out(facts, ENGINE, model, said), *chunk_left_out(facts, ENGINE), *replicas_left_out(facts)]
