"""Why a setting has its value, by what it limits: the same words for every engine."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from latfit._version import __version__
from latfit.errors import BadInput, WrongUsage
from latfit.exporting.facts import MADE_BY, PlanFacts
from latfit.exporting.files import Setting
from latfit.exporting.text import checked_name, comment

MOST_DIGITS = 5
"""Of a number of GPUs that a trace says, from which on it is none."""

Words = Mapping[str, tuple[str, str]]
"""By what it limits: for a plan of requests, and for one of steps."""

WHY: Words = {
    "requests": (
        "Requests that a replica runs at once: the setting that carries most load in simulation.",
        "Requests that decode at once: the most whose steps stay within the time between tokens.",
    ),
    "tokens": (
        "Tokens of a step, of prompts and decoding together: the setting that carries most load in simulation.",
        "Tokens of a step, of prompts and decoding together: the most whose steps stay within the time between tokens.",
    ),
    "chunk": (
        "Tokens of one prompt in a step: the setting that carries most load in simulation.",
        "Tokens of one prompt in a step: the largest chunk beside requests that decode.",
    ),
    "chunked": ("Prompts are computed in chunks beside requests that decode, as in the plan.",) * 2,
    "whole": ("Whole prompts in steps of their own: this carries more load in simulation than chunks.",) * 2,
    "gpu_prompts": ("The prompt length from which the GPU is as fast (B1 in tokens).",) * 2,
    "length": ("A whole prompt has to fit into a step.",) * 2,
    "priority": ("The most urgent class goes first, as in the plan; requests have to name their priority.",) * 2,
    "in_turn": ("A step is planned when the one before it has ended, as in the plan.",) * 2,
    "parallel": ("GPUs that hold the model together: as the plan's KV cache was computed, or its traces say.",) * 2,
    "prefix": ("The plan counts on prompts that are cached in part.",) * 2,
    "admission": ("Requests enter while KV blocks are free and are paused where none are left, as in the plan.",) * 2,
}


def why(what: str, facts: PlanFacts) -> str:
    """The reason of a setting."""
    return WHY[what][0 if facts.kind == "requests" else 1]


def validity(facts: PlanFacts) -> str:
    """Where a number comes from and when it holds."""
    return f"Of {facts.name}: holds for {facts.holds}; rests on {facts.errors}."


def commented(setting: Setting, facts: PlanFacts, indent: str = "") -> list[str]:
    """The comment above a setting."""
    return comment(f"{setting.why} {validity(facts)}", indent)


def header(facts: PlanFacts, what: str, notes: Iterable[str] = ()) -> list[str]:
    """The comment that a file begins with: the plan, what it holds for and rests on, what is open or left out."""
    lines = [
        *comment(f"{what}, exported by latfit {__version__} from {facts.name}."),
        *comment(f"Plan: {facts.answer}"),
        *comment(f"Holds for {facts.holds}."),
        *comment(f"Rests on {facts.errors}."),
    ]
    for each in facts.open:
        lines += comment(f"! {each}")
    for each in facts.assumed:
        lines += comment(f"Assumed: {each}")
    for each in notes:
        lines += comment(f"Not set: {each}")
    return lines


@dataclass(frozen=True)
class Engine:
    """One that batches step by step. key: of its settings in a plan.  orders: of requests, that it serves in.  reasons:
    of a setting, by its name where it is a number, else by `name=value`."""

    key: str
    title: str
    orders: tuple[str, ...]
    reasons: Mapping[str, str]


def step_settings(facts: PlanFacts, engine: Engine) -> list[Setting]:
    """The plan's settings of an engine and the GPUs of a replica, each with its reason. Raises WrongUsage where the
    plan has none or serves in another order, BadInput where it has one that the engine lacks."""
    order = engine.orders[0] if facts.replicas is None else facts.replicas.order
    if order not in engine.orders:
        raise WrongUsage(
            f"the plan serves requests by {order}, which {engine.title} does not do",
            where=facts.file,
            remedy=f"Plan with --order {engine.orders[0]}.",
        )
    if engine.key not in facts.flags:
        raise WrongUsage(
            f"the plan has no limits of steps for it: {_why_none(facts)}",
            where=facts.file,
            remedy="Plan with a fit that was measured with prefill, or with per_token=... of nominal numbers.",
        )
    found = [_reasoned(name, value, facts, engine.reasons) for name, value in facts.flags[engine.key].items()]
    if (count := parallel(facts)) is not None:
        found.append(setting_of(facts, "tensor_parallel_size", count, "parallel"))
    return found


def batch_settings(facts: PlanFacts, key: str, title: str) -> Mapping[str, Any]:
    """The plan's settings of an engine that batches whole requests. Raises WrongUsage where it has none."""
    if facts.kind == "requests":
        raise WrongUsage(
            f"the plan is of requests with prompts and outputs: it has no batches for {title}",
            where=facts.file,
            remedy="Plan batches: latfit plan --sla 20ms --rate 500/s --out plan.json; or export to trtllm.",
        )
    if key not in facts.flags:
        raise WrongUsage("the plan has no batch within its SLA", where=facts.file, remedy="Plan with a longer --sla.")
    return facts.flags[key]


def _reasoned(name: str, value: Any, facts: PlanFacts, reasons: Mapping[str, str]) -> Setting:
    """reasons: by the setting's name where it is a number, else by `name=value`."""
    key = name if type(value) is int else f"{name}={value}"
    if key not in reasons:
        raise BadInput(
            f"{name} {value} is no setting of the engine", where=facts.file, remedy=f"Make it again with `{MADE_BY}`."
        )
    return setting_of(facts, name, value, reasons[key])


def _why_none(facts: PlanFacts) -> str:
    return "it was made for batches" if facts.kind == "batches" else "no step of the engine is known to meet the SLA"


def loadable_model(facts: PlanFacts, given: str | None) -> str | None:
    """The model's name: as given, or as a serving engine that was recorded calls it; None where nobody said. Raises
    WrongUsage for one that no program can be given."""
    recorded = facts.system.get("engine") in ("vllm", "sglang", "tensorrt_llm")
    found = given if given is not None else facts.system.get("model") if recorded else None
    return None if found is None else checked_name(found, "--model")


def parallel(facts: PlanFacts) -> int | None:
    """GPUs of a replica; None where nobody said."""
    said = facts.system.get("tp", "")
    return facts.tensor_parallel or (int(said) or None if said.isdecimal() and len(said) < MOST_DIGITS else None)


def left_out(facts: PlanFacts, engine: Engine, model: str | None, said: str) -> list[str]:
    """What no engine is told. said: where the engine tells the size of its KV cache."""
    notes = [_kv_note(facts, said)]
    if model is None:
        notes.append("the model, which the plan does not name. Name it at the start, or export with --model.")
    if parallel(facts) is None:
        notes.append(f"tensor parallelism, which the plan does not name; {engine.title}'s default is 1.")
    return notes


def chunk_left_out(facts: PlanFacts, engine: Engine) -> list[str]:
    """Where an engine has no limit for one prompt's part of a step, as vLLM has."""
    chunk = facts.flags.get("vllm", {}).get("long_prefill_token_threshold")
    if not chunk:
        return []
    return [f"a limit of {chunk} tokens for one prompt's part of a step: {engine.title} has none beside the step's."]


def replicas_left_out(facts: PlanFacts) -> list[str]:
    """Where one engine is started, of however many the plan has."""
    if facts.replicas is None:
        return []
    return [f"replicas and router: the plan is for {facts.replicas.count}, {facts.replicas.route}."]


def _kv_note(facts: PlanFacts, said: str) -> str:
    """What the plan takes for the size of the KV cache, and where the engine tells its own."""
    tokens = None if facts.replicas is None else facts.replicas.kv_tokens
    if facts.replicas is None:
        return f"the KV cache; the plan is of steps, whatever their number of cached tokens. {said}"
    if tokens is None:
        return f"the KV cache, which the plan takes as unlimited. {said}"
    return f"the KV cache; the plan is for {tokens:,} tokens a replica and does not hold with fewer. {said}"


def setting_of(facts: PlanFacts, name: str, value: Any, what: str) -> Setting:
    return Setting(name, value, why(what, facts))
