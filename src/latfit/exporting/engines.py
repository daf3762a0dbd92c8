"""Serving engines that batch step by step: settings from a plan, each with its reason, and the files they read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from latfit.errors import WrongUsage
from latfit.exporting.command import KT, program
from latfit.exporting.facts import PlanFacts
from latfit.exporting.files import Exported, Setting, Wanted
from latfit.exporting.render import model_name, model_word, render, shell

CARRIES_MOST = "the setting with the highest capacity in simulation."
STEPS_WITHIN = "the most whose steps stay within the time between tokens."
REASONS: Mapping[str, tuple[str, str]] = {
    "requests": (
        f"Requests that a replica runs at once: {CARRIES_MOST}",
        f"Requests that decode at once: {STEPS_WITHIN}",
    ),
    "tokens": (
        f"Tokens of a step, of prompts and decoding together: {CARRIES_MOST}",
        f"Tokens of a step, of prompts and decoding together: {STEPS_WITHIN}",
    ),
    "chunk": (
        f"Tokens of one prompt in a step: {CARRIES_MOST}",
        "Tokens of one prompt in a step: the largest chunk beside requests that decode.",
    ),
    "chunked": ("Prompts are computed in chunks beside requests that decode, as in the plan.",) * 2,
    "whole": ("Whole prompts in steps of their own have a higher capacity in simulation than chunks.",) * 2,
    "gpu_prompts": ("The prompt length from which the GPU is as fast (B1 in tokens).",) * 2,
    "length": ("A whole prompt has to fit into a step.",) * 2,
    "priority": ("The most urgent class goes first, as in the plan; requests have to name their priority.",) * 2,
    "in_turn": ("A step is scheduled when the one before it has ended, as in the plan.",) * 2,
    "parallel": ("GPUs of a replica: as the plan's KV cache was computed, or its traces say.",) * 2,
    "prefix": ("The plan counts on prompts that are cached in part.",) * 2,
    "admission": ("Requests enter while KV blocks are free and are paused without any, as in the plan.",) * 2,
    "cache": ("Tokens of the KV cache of all slots together, as in the plan.",) * 2,
    "shared": ("One cache for all slots, as in the plan; else each has an equal part.",) * 2,
}
"""What a setting limits -> its reason in a plan of requests, and in one of steps."""


@dataclass(frozen=True)
class Engine:
    """A serving engine. settings: name, or `name=value` for a switch or a word -> key of REASONS.  files: name ->
    (title, template).  cache: where the engine reports the size of its KV cache.  orders: scheduling policies."""

    key: str
    title: str
    files: Mapping[str, tuple[str, str]]
    settings: Mapping[str, str]
    cache: str
    orders: tuple[str, ...] = ("fcfs",)
    parallel: str | None = "tensor_parallel_size"
    negatable: bool = field(default=False)

    def export(self, plan: PlanFacts, wanted: Wanted) -> Exported:
        """The files of a plan. Raises WrongUsage, BadInput."""
        if self.key == "llamacpp" and plan.flags.get("vllm", {}).get("enable_chunked_prefill") is False:
            raise WrongUsage(
                "the plan computes whole prompts in steps of their own; llama.cpp adds prompts to any step that fits",
                where=plan.file,
                remedy="Plan with --set batching=chunked-prefill.",
            )
        settings, model = self.settings_of(plan), model_of(plan, wanted.model)
        values = {
            "settings": [each for each in settings if each.name not in (KT, ADMISSION)],
            "other": {each.name: each for each in settings},
            "model": model,
            "program": "" if self.key == "trtllm" else " ".join(program(self.key, model_word(model))),
        }
        not_set = [*self.not_set(plan, model), *_replicas_not_set(plan)]
        files = {
            name: render(
                template, plan, title.format(model="MODEL" if model is None else shell(model)), not_set, **values
            )
            for name, (title, template) in self.files.items()
        }
        return Exported(self.key, plan.name, files, {each.name: each.value for each in settings if each.name != KT})

    def settings_of(self, plan: PlanFacts) -> list[Setting]:
        """The plan's settings. Raises WrongUsage if it has none for this engine, BadInput for an unknown one."""
        engine = None if plan.requests is None else plan.requests.engine
        order = self.orders[0] if engine is None else engine.order
        if order not in self.orders:
            raise WrongUsage(
                f"the plan schedules requests by {order}, which {self.title} does not do",
                where=plan.file,
                remedy=f"Plan with --order {self.orders[0]}.",
            )
        if self.key not in plan.flags:
            loaded = plan.batches is not None and plan.batches.rate_per_s is not None
            why = "it was made for batches" if loaded else "no step is known to meet the SLA"
            raise WrongUsage(
                f"the plan has no limits of steps for it: {why}",
                where=plan.file,
                remedy="Plan with a fit that was measured with prefill, or with per_token=... of nominal numbers.",
            )
        return [
            Setting(name, value, self._reason(name, value, plan), self.negatable)
            for name, value in {**plan.flags[self.key], **self._added(plan)}.items()
        ]

    def _reason(self, name: str, value: Any, plan: PlanFacts) -> str:
        key = self.settings.get(name if type(value) is int else f"{name}={value}")
        if key is None or (type(value) is int and value < (-1 if name == "chunked_prefill_size" else 1)):
            raise plan.damaged(f"{name} {str(value)[:40]} is no setting of {self.title}")
        return REASONS[key][1 if plan.requests is None else 0]

    def _added(self, plan: PlanFacts) -> dict[str, Any]:
        """Settings that follow from the rest of the plan."""
        found: dict[str, Any] = {}
        if self.parallel is not None and plan.gpus is not None:
            found[self.parallel] = plan.gpus
        engine = None if plan.requests is None else plan.requests.engine
        if engine is not None and self.key == "vllm" and engine.prefix_hit_rate != 0:
            found["enable_prefix_caching"] = True
        if self.key == "trtllm" and plan.kv_tokens is not None:
            found[ADMISSION] = "MAX_UTILIZATION"
        if self.key == "llamacpp" and plan.kv_tokens is not None:
            found |= {"ctx_size": plan.kv_tokens, "kv_unified": True}
        return found

    def not_set(self, plan: PlanFacts, model: str | None) -> list[str]:
        """What is left to the engine's defaults, and why."""
        requests = plan.requests
        vllm = plan.flags.get("vllm", {})
        found: list[str] = []
        if requests is None:
            found.append(f"the KV cache; the plan is of steps, whatever their number of cached tokens. {self.cache}")
        elif plan.kv_tokens is None:
            found.append(f"the KV cache, which the plan takes as unlimited. {self.cache}")
        elif self.key == "llamacpp":
            found.append("what to do when the cache is full: llama.cpp fails a request, where the plan pauses it.")
        else:
            size = f"{plan.kv_tokens:,} tokens a replica"
            found.append(f"the KV cache; the plan is for {size} and does not hold with fewer. {self.cache}")
        if model is None:
            found.append("the model, which the plan does not name. Name it at the start, or export with --model.")
        if self.parallel is not None and plan.gpus is None:
            found.append(f"tensor parallelism, which the plan does not name; {self.title}'s default is 1.")
        if self.key != "vllm" and (chunk := vllm.get("long_prefill_token_threshold")):
            found.append(f"a limit of {chunk} tokens for one prompt's part of a step: {self.title} has none.")
        if self.key == "sglang" and plan.flags["sglang"].get("enable_priority_scheduling"):
            found.append("priorities of requests: in SGLang the higher number goes first.")
        if self.key == "llamacpp":
            found.append("--ubatch-size, into which a larger step is cut: as it was when the steps were measured.")
        if requests is None or self.key not in ("vllm", "llamacpp"):
            return found
        if self.key == "vllm" and "enable_chunked_prefill" not in vllm:
            found.append("enable-chunked-prefill, which is vLLM's default and what the plan assumes.")
        if "async_scheduling" not in vllm and self.key == "vllm":
            found.append("async-scheduling; the plan assumes it on, vLLM's default where it can.")
        elif "async_scheduling" not in vllm:
            found.append("steps scheduled ahead, which the plan assumes: llama.cpp does not; plan with --synchronous.")
        return found


def _replicas_not_set(plan: PlanFacts) -> list[str]:
    if plan.requests is None:
        return []
    return [f"replicas and router: the plan is for {plan.requests.replicas.value}, {plan.requests.route}."]


def model_of(plan: PlanFacts, given: str | None) -> str | None:
    """The model as given, or as a recorded serving engine names it; None if unknown. Raises WrongUsage."""
    recorded = plan.system.get("engine") in ("vllm", "sglang", "tensorrt_llm")
    found = given if given is not None else plan.system.get("model") if recorded else None
    return None if found is None else model_name(found)


ADMISSION = "capacity_scheduler_policy"
SCRIPT = "script.sh.jinja"
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
    ("fcfs", "priority"),
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
    ("fcfs", "priority"),
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
)
