"""Export settings to engines that batch step by step, each with its reason, and the files they read."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from latfit.engines import BY_KEY, FIRST_COME, RECORDED
from latfit.errors import BadInput, WrongUsage
from latfit.exporting.facts import MADE_BY, Exported, PlanFacts, Wanted
from latfit.exporting.render import ASK_MODEL, flag_words, render, yaml_value

ELSEWHERE = ("gpu_prompts", "admission")  # roles that templates place themselves

BEST = (
    "the setting with the highest capacity in simulation",
    "the most whose steps stay within the time between tokens",
)
"""What a limit is, in a plan of requests and in one of steps."""

REASONS: Mapping[str, str] = {
    "requests": "Requests that a replica runs at once: {best}.",
    "tokens": "Tokens of a step, of prompts and decoding together: {best}.",
    "chunk": "Tokens of one prompt in a step: {best}.",
    "chunked": "Prompts are computed in chunks, together with decoding requests, as in the plan.",
    "whole": "Whole prompts in steps of their own have a higher capacity in simulation than chunks.",
    "gpu_prompts": "The prompt length from which the GPU is as fast (B1 in tokens).",
    "length": "A whole prompt has to fit into a step.",
    "priority": "The most urgent class goes first, as in the plan; requests have to name their priority.",
    "in_turn": "A step is scheduled when the one before it has ended, as in the plan.",
    "parallel": "GPUs of a replica: as the plan's KV cache was computed, or its traces say.",
    "prefix": "The plan counts on prompts that are cached in part.",
    "admission": "Requests enter while KV blocks are free and are paused without any, as in the plan.",
    "cache": "Tokens of the KV cache of all slots together, as in the plan.",
    "shared": "One cache for all slots, as in the plan; else each has an equal part.",
}
"""By role of a setting (`latfit.engines`)."""

SCRIPT = "script.sh.jinja"
FILES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "vllm": {
        "vllm.yaml": ("Settings for vLLM: vllm serve --config vllm.yaml", "vllm.yaml.jinja"),
        "vllm.sh": ("Starts vLLM", SCRIPT),
    },
    "sglang": {"sglang.sh": ("Starts SGLang", "sglang.sh.jinja")},
    "trtllm": {
        "trtllm.yaml": ("Settings for TensorRT-LLM: trtllm-serve {model} --config trtllm.yaml", "trtllm.yaml.jinja")
    },
    "llamacpp": {"llama-server.sh": ("Starts llama.cpp's server", SCRIPT)},
}
"""By engine: title and template of each file."""


@dataclass(frozen=True)
class Setting:
    """A number or a switch by the engine's name, and its reason. words: on a command line."""

    name: str
    value: Any
    role: str
    why: str
    words: Sequence[str]


def export_engine(key: str, plan: PlanFacts, wanted: Wanted) -> Exported:
    """Return the files of a plan for an engine. Raises WrongUsage, BadInput."""
    engine = BY_KEY[key]
    if not engine.has("whole") and plan.flags.get("vllm", {}).get("enable_chunked_prefill") is False:
        found = (
            f"the plan computes whole prompts in steps of their own; {engine.name} adds prompts to any step that fits"
        )
        raise WrongUsage(found, where=plan.file, remedy="Plan with --set batching=chunked-prefill.")
    settings, model = settings_of(key, plan), model_of(plan, wanted.model)
    quoted = None if model is None else shlex.quote(model)
    values = {
        "engine": engine,
        "settings": [each for each in settings if each.role not in ELSEWHERE],
        "other": {each.role: each for each in settings},
        "model": model,
        "program": " ".join([*engine.program, *engine.model_option, quoted or ASK_MODEL]),
    }
    files = {
        name: render(template, plan, title.format(model=quoted or "MODEL"), **values)
        for name, (title, template) in FILES[key].items()
    }
    return Exported(key, plan.name, files, {each.name: each.value for each in settings if each.role != "gpu_prompts"})


vllm, sglang, trtllm, llamacpp = (partial(export_engine, key) for key in FILES)


def settings_of(key: str, plan: PlanFacts) -> list[Setting]:
    """Return the plan's settings. Raises WrongUsage if it has none for this engine, BadInput."""
    engine, simulated = BY_KEY[key], None if plan.requests is None else plan.requests.engine
    if simulated is not None and simulated.order not in engine.orders:
        found = f"the plan schedules requests by {simulated.order}, which {engine.name} does not do"
        raise WrongUsage(found, where=plan.file, remedy=f"Plan with --order {engine.orders[0]}.")
    if key not in plan.flags:
        unknown = {} if plan.batches is None else plan.batches.unknown
        why = unknown.get("settings", "its fit was measured without prefill")
        remedy = "Plan requests (--lengths), or with a fit that was measured with prefill."
        raise WrongUsage(f"the plan has no settings for {engine.name}: {why}", where=plan.file, remedy=remedy)
    more: dict[str, int | None] = {"parallel": plan.gpus}
    if simulated is not None and simulated.prefix_hit_rate != 0:
        more["prefix"] = None
    if plan.kv_tokens is not None:
        more |= {"admission": None, "cache": plan.kv_tokens, "shared": None}
    settings = []
    for name, value in {**plan.flags[key], **engine.named_settings(more)}.items():
        option = next((each for each in engine.options if each.name == name and each.takes(value)), None)
        if option is None:
            found = f"not a latfit plan ({name} {str(value)[:40]} is no setting of {engine.name})"
            raise BadInput(found, where=plan.file, remedy=f"Make it again with `{MADE_BY}`.")
        why = REASONS[option.role].format(best=BEST[plan.requests is None])
        settings.append(Setting(name, value, option.role, why, flag_words(name, value, engine.negatable)))
    return settings


def model_of(plan: PlanFacts, given: str | None) -> str | None:
    """Return the model as given, or as a recorded engine names it. Raises WrongUsage."""
    recorded = plan.system.get("engine") in RECORDED
    name = given if given is not None else plan.system.get("model") if recorded else None
    if name is not None and (not name or name != name.strip() or name.startswith("-") or not name.isprintable()):
        found = f"{name!r} is empty, or begins with a space or '-', or has letters that cannot be printed"
        raise WrongUsage(found, where="--model", remedy="Give the name or the folder of a model.")
    return name


def start_line(
    key: str,
    engines: Mapping[str, Mapping[str, Any]],
    order: str = FIRST_COME,
    model: str | None = None,
    kv_tokens: int | None = None,
) -> str:
    """Return what starts an engine with a plan's settings, in a line, or why nothing does."""
    engine = BY_KEY[key]
    if order not in engine.orders:
        return f"no setting of {engine.name} does this, it does not serve requests by {order}"
    if key not in engines:
        return f"no setting of {engine.name} does this, it does not batch so (latfit export has other engines)"
    cache = {} if kv_tokens is None else engine.named_settings({"cache": kv_tokens, "shared": None})
    apart = [each.name for each in engine.options if each.role == "gpu_prompts"]
    values = {name: value for name, value in {**engines[key], **cache}.items() if name not in apart}
    if not engine.program:
        listed = ", ".join(f"{name}: {yaml_value(value)}" for name, value in values.items())
        return f"{listed} (latfit export {key} writes the file)"
    return shlex.join([*engine.program, *((*engine.model_option, model) if model else ()), *vllm_flags(values)])


def vllm_flags(settings: Mapping[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in flag_words(name, value)]


def with_flags(command: Iterable[str], settings: Mapping[str, Any]) -> list[str]:
    """Return a command with these options in place of those of the same names."""
    kept: list[str] = []
    is_value = False  # whether the next word is the value of a replaced option
    for word in command:
        if is_value and not word.startswith("-"):
            is_value = False
            continue
        name, given, _ = word.removeprefix("--").replace("-", "_").partition("=")
        positive = name.removeprefix("no_")
        is_replaced = word.startswith("--") and (name in settings or positive in settings)
        is_value = is_replaced and not given and positive in settings and not isinstance(settings[positive], bool)
        if not is_replaced:
            kept.append(word)
    return [*kept, *vllm_flags(settings)]
