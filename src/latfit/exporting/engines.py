"""Serving engines that batch step by step: settings from a plan, each with its reason, and the files they read."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from latfit.errors import BadInput, WrongUsage
from latfit.exporting.facts import MADE_BY, PlanFacts
from latfit.exporting.files import Exported, Wanted
from latfit.exporting.render import ASK_MODEL, flag_words, render, yaml_value

KT = "kt_gpu_prefill_token_threshold"  # of KTransformers' build of SGLang
ADMISSION = "capacity_scheduler_policy"
FIRST_COME = "fcfs"
SCRIPT = "script.sh.jinja"

BEST = (
    "the setting with the highest capacity in simulation",
    "the most whose steps stay within the time between tokens",
)
"""What a limit is, in a plan of requests and in one of steps."""

REASONS: Mapping[str, str] = {
    "requests": "Requests that a replica runs at once: {best}.",
    "tokens": "Tokens of a step, of prompts and decoding together: {best}.",
    "chunk": "Tokens of one prompt in a step: {best}.",
    "chunked": "Prompts are computed in chunks beside requests that decode, as in the plan.",
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


@dataclass(frozen=True)
class Setting:
    """A number or a switch by the engine's name, and why it has that value. words: on a command line."""

    name: str
    value: Any
    why: str
    words: Sequence[str]


@dataclass(frozen=True)
class Engine:
    """A serving engine."""

    key: str
    title: str
    files: Mapping[str, tuple[str, str]]  # name -> (title, template)
    settings: Mapping[str, str]  # name, or `name=value` of a switch or a word -> key of REASONS; requests first
    cache: str  # where the engine reports the size of its KV cache
    orders: tuple[str, ...] = (FIRST_COME,)  # scheduling policies
    parallel: str | None = "tensor_parallel_size"
    program: tuple[str, ...] = ()  # words that start a server, before the model
    model_option: tuple[str, ...] = ()
    negatable: bool = False  # whether switches have `--no-NAME`

    def export(self, plan: PlanFacts, wanted: Wanted) -> Exported:
        """The files of a plan. Raises WrongUsage, BadInput."""
        if self.key == "llamacpp" and plan.flags.get("vllm", {}).get("enable_chunked_prefill") is False:
            found = (
                "the plan computes whole prompts in steps of their own; llama.cpp adds prompts to any step that fits"
            )
            raise WrongUsage(found, where=plan.file, remedy="Plan with --set batching=chunked-prefill.")
        settings, model = self.settings_of(plan), model_of(plan, wanted.model)
        quoted = None if model is None else shlex.quote(model)
        values = {
            "engine": self,
            "settings": [each for each in settings if each.name not in (KT, ADMISSION)],
            "other": {each.name: each for each in settings},
            "model": model,
            "program": " ".join([*self.program, *self.model_option, quoted or ASK_MODEL]),
        }
        files = {
            name: render(template, plan, title.format(model=quoted or "MODEL"), **values)
            for name, (title, template) in self.files.items()
        }
        return Exported(self.key, plan.name, files, {each.name: each.value for each in settings if each.name != KT})

    def settings_of(self, plan: PlanFacts) -> list[Setting]:
        """The plan's settings. Raises WrongUsage if it has none for this engine, BadInput for an unknown one."""
        engine = None if plan.requests is None else plan.requests.engine
        if engine is not None and engine.order not in self.orders:
            found = f"the plan schedules requests by {engine.order}, which {self.title} does not do"
            raise WrongUsage(found, where=plan.file, remedy=f"Plan with --order {self.orders[0]}.")
        if self.key not in plan.flags:
            loaded = plan.batches is not None and plan.batches.rate_per_s is not None
            why = "it was made for batches" if loaded else "no step is known to meet the SLA"
            remedy = "Plan with a fit that was measured with prefill, or with per_token=... of nominal numbers."
            raise WrongUsage(f"the plan has no limits of steps for it: {why}", where=plan.file, remedy=remedy)
        values = dict(plan.flags[self.key])
        if self.parallel is not None and plan.gpus is not None:
            values[self.parallel] = plan.gpus
        if engine is not None and self.key == "vllm" and engine.prefix_hit_rate != 0:
            values["enable_prefix_caching"] = True
        if self.key == "trtllm" and plan.kv_tokens is not None:
            values[ADMISSION] = "MAX_UTILIZATION"
        if self.key == "llamacpp" and plan.kv_tokens is not None:
            values |= {"ctx_size": plan.kv_tokens, "kv_unified": True}
        settings = []
        for name, value in values.items():
            key = self.settings.get(name if type(value) is int else f"{name}={value}")
            if key is None or (type(value) is int and value < (-1 if name == "chunked_prefill_size" else 1)):
                found = f"not a latfit plan ({name} {str(value)[:40]} is no setting of {self.title})"
                raise BadInput(found, where=plan.file, remedy=f"Make it again with `{MADE_BY}`.")
            why = REASONS[key].format(best=BEST[plan.requests is None])
            settings.append(Setting(name, value, why, flag_words(name, value, self.negatable)))
        return settings


def model_of(plan: PlanFacts, given: str | None) -> str | None:
    """The model as given, or as a recorded serving engine names it; None if unknown. Raises WrongUsage."""
    recorded = plan.system.get("engine") in ("vllm", "sglang", "tensorrt_llm")
    name = given if given is not None else plan.system.get("model") if recorded else None
    if name is not None and (not name or name != name.strip() or name.startswith("-") or not name.isprintable()):
        found = f"{name!r} is empty, or begins with a space or '-', or has letters that cannot be printed"
        raise WrongUsage(found, where="--model", remedy="Give the name or the folder of a model.")
    return name


VLLM = Engine(
    "vllm",
    "vLLM",
    {
        "vllm.yaml": ("Settings for vLLM: vllm serve --config vllm.yaml", "vllm.yaml.jinja"),
        "vllm.sh": ("Starts vLLM", SCRIPT),
    },
    {
        "max_num_seqs": "requests",
        "max_num_batched_tokens": "tokens",
        "long_prefill_token_threshold": "chunk",
        "enable_chunked_prefill=True": "chunked",
        "enable_chunked_prefill=False": "whole",
        "max_model_len": "length",
        "scheduling_policy=priority": "priority",
        "async_scheduling=False": "in_turn",
        "tensor_parallel_size": "parallel",
        "enable_prefix_caching=True": "prefix",
    },
    "vLLM says at its start how many it has (`KV cache size`); --gpu-memory-utilization is left as it is.",
    (FIRST_COME, "priority"),
    program=("vllm", "serve"),
    negatable=True,
)
SGLANG = Engine(
    "sglang",
    "SGLang",
    {"sglang.sh": ("Starts SGLang", "sglang.sh.jinja")},
    {
        "max_running_requests": "requests",
        "chunked_prefill_size": "tokens",
        "enable_mixed_chunk=True": "chunked",
        "max_prefill_tokens": "whole",
        "context_length": "length",
        "enable_priority_scheduling=True": "priority",
        "disable_overlap_schedule=True": "in_turn",
        KT: "gpu_prompts",
        "tensor_parallel_size": "parallel",
    },
    "SGLang says at its start how many it has (`max_total_num_tokens`); --mem-fraction-static is left as it is.",
    (FIRST_COME, "priority"),
    program=("python3", "-m", "sglang.launch_server"),
    model_option=("--model-path",),
)
TRTLLM = Engine(
    "trtllm",
    "TensorRT-LLM",
    {"trtllm.yaml": ("Settings for TensorRT-LLM: trtllm-serve {model} --config trtllm.yaml", "trtllm.yaml.jinja")},
    {
        "max_batch_size": "requests",
        "max_num_tokens": "tokens",
        "enable_chunked_prefill=True": "chunked",
        "enable_chunked_prefill=False": "whole",
        "max_seq_len": "length",
        "disable_overlap_scheduler=True": "in_turn",
        "tensor_parallel_size": "parallel",
        f"{ADMISSION}=MAX_UTILIZATION": "admission",
    },
    "TensorRT-LLM says at its start how many it has; kv_cache_config is left as it is.",
)
LLAMACPP = Engine(
    "llamacpp",
    "llama.cpp",
    {"llama-server.sh": ("Starts llama.cpp's server", SCRIPT)},
    {
        "parallel": "requests",
        "batch_size": "tokens",
        "ctx_size": "cache",
        "kv_unified=True": "shared",
    },
    "--ctx-size is shared out among the slots: each part has to hold the longest prompt with its output.",
    parallel=None,
    program=("llama-server",),
    model_option=("--model",),
)
TRITON = Engine("triton", "Triton", {}, {"max_batch_size": "requests"}, "")

ENGINES = {engine.key: engine for engine in (VLLM, SGLANG, TRTLLM, LLAMACPP, TRITON)}
"""Engines whose steps a trace may hold."""

TITLES = {key: engine.title for key, engine in ENGINES.items()}
REQUEST_LIMIT = {key: next(iter(engine.settings)) for key, engine in ENGINES.items()}
"""What engines call the limit of requests in a step."""


def engine_key(systems: Iterable[Mapping[str, str]]) -> str:
    """The engine that traces name, as plans call it; vLLM, which most use, where they name none that is known."""
    for system in systems:
        plain = "".join(letter for letter in system.get("engine", "").lower() if letter.isalnum())
        key = "trtllm" if plain == "tensorrtllm" else plain
        if key in ENGINES:
            return key
    return "vllm"


def start_line(
    key: str, engines: Mapping[str, Mapping[str, Any]], order: str = FIRST_COME, model: str | None = None
) -> str:
    """Return what starts an engine with a plan's settings, in a line, or why nothing does."""
    engine = ENGINES[key]
    if order not in engine.orders:
        return f"no setting of {engine.title} does this, it does not serve requests by {order}"
    if key not in engines:
        return f"no setting of {engine.title} does this, it does not batch so (latfit export has other engines)"
    values = {name: value for name, value in engines[key].items() if name != KT}
    if not engine.program:
        listed = ", ".join(f"{name}: {yaml_value(value)}" for name, value in values.items())
        return f"{listed} (latfit export {key} writes the file)"
    return shlex.join([*engine.program, *((*engine.model_option, model) if model else ()), *vllm_flags(values)])


def vllm_flags(settings: Mapping[str, Any]) -> list[str]:
    """Words of vLLM's command line."""
    return [word for name, value in settings.items() for word in flag_words(name, value)]


def with_flags(command: Iterable[str], settings: Mapping[str, Any]) -> list[str]:
    """A command with these options in place of those that it has under the same names."""
    kept: list[str] = []
    is_value = False  # of an option that is replaced
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
