"""What a plan can be exported to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from latfit.errors import WrongUsage, refuse_taken
from latfit.exporting.facts import Exported, PlanFacts, Wanted, read_plan


@dataclass(frozen=True)
class Target:
    """What a plan can be exported to. module: of the function, whole.  takes: options beside the plan."""

    title: str
    module: str
    takes: tuple[str, ...] = ("model",)
    function: str = "export"


OPTIONS = {"model": "--model", "shapes": "--shape", "begins": "--begins"}
ENGINES, BATCHES = "latfit.exporting.engines", "latfit.exporting.batches"
TARGETS: dict[str, Target] = {
    "vllm": Target("vLLM: YAML for --config, and the command line", ENGINES, function="vllm"),
    "sglang": Target("SGLang: the command line", ENGINES, function="sglang"),
    "trtllm": Target("TensorRT-LLM: YAML for trtllm-serve --config", ENGINES, function="trtllm"),
    "llamacpp": Target("llama.cpp: the command line of llama-server", ENGINES, function="llamacpp"),
    "triton": Target("Triton: config.pbtxt of every path, and a router for T_cut", BATCHES, function="triton"),
    "tensorrt": Target("TensorRT: optimisation profile, trtexec, warm-up shapes", BATCHES, ("shapes",), "tensorrt"),
    "kubernetes": Target(
        "Kubernetes and llm-d: vLLM's Deployment and Service, KEDA's schedule, prefill apart",
        "latfit.exporting.kubernetes",
        ("model", "begins"),
    ),
}


def add_target(name: str, target: Target) -> None:
    """Export plans to a target of your own by its name. Raises WrongUsage if the name is taken."""
    refuse_taken(name, TARGETS, "target")
    TARGETS[name] = target


def export_plan(plan: str | Path | Mapping[str, Any], target: str, wanted: Wanted | None = None) -> Exported:
    """Return a plan's settings for a target. Raises WrongUsage, BadInput, SlaOutOfReach, FitNotUsable."""
    wanted = wanted or Wanted()
    if target not in TARGETS:
        raise WrongUsage(f"{target!r} is not known", where="TARGET", remedy=f"Take one of {', '.join(TARGETS)}.")
    found = TARGETS[target]
    for name, option in OPTIONS.items():
        if getattr(wanted, name) and name not in found.takes:
            raise WrongUsage(f"has no effect on {target}", where=option, remedy="Leave it out.")
    export: Callable[[PlanFacts, Wanted], Exported] = getattr(import_module(found.module), found.function)
    return export(read_plan(plan), wanted)
