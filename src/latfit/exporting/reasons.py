"""Why a setting has its value, by what it limits: the same words for every engine."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from latfit._version import __version__
from latfit.errors import BadInput, WrongUsage
from latfit.exporting.facts import MADE_BY, PlanFacts
from latfit.exporting.files import Setting
from latfit.exporting.text import comment

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


def flags_of(facts: PlanFacts, engine: str, reasons: Mapping[str, str]) -> list[Setting]:
    """The plan's settings of an engine, each with its reason. Raises WrongUsage where the plan has none, BadInput where
    it has one that the engine lacks."""
    if engine not in facts.flags:
        raise WrongUsage(
            f"the plan has no limits of steps for it: {_why_none(facts)}",
            where=facts.file,
            remedy="Plan with a fit that was measured with prefill, or with per_token=... of nominal numbers.",
        )
    return [_reasoned(name, value, facts, reasons) for name, value in facts.flags[engine].items()]


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


def refuse_order(facts: PlanFacts, engine: str, known: Sequence[str]) -> None:
    """Raises WrongUsage where the engine does not serve in the order that the plan was simulated with."""
    order = None if facts.replicas is None else facts.replicas.order
    if order is not None and order not in known:
        raise WrongUsage(
            f"the plan serves requests by {order}, which {engine} does not do",
            where=facts.file,
            remedy=f"Plan with --order {known[0]}.",
        )


def loadable_model(facts: PlanFacts, given: str | None) -> str | None:
    """The model's name: as given, or as a serving engine that was recorded calls it; None where nobody said."""
    recorded = facts.system.get("engine") in ("vllm", "sglang", "tensorrt_llm")
    return given if given is not None else facts.system.get("model") if recorded else None


def parallel(facts: PlanFacts) -> int | None:
    """GPUs of a replica; None where nobody said."""
    said = facts.system.get("tp", "")
    return facts.tensor_parallel or (int(said) if said.isdecimal() and 0 < int(said) < 1 << 12 else None)


def kv_note(facts: PlanFacts, said: str) -> str:
    """What the plan takes for the size of the KV cache, and where the engine tells its own."""
    tokens = None if facts.replicas is None else facts.replicas.kv_tokens
    if facts.replicas is None:
        return f"the KV cache; the plan is of steps, whatever their number of cached tokens. {said}"
    if tokens is None:
        return f"the KV cache, which the plan takes as unlimited. {said}"
    return f"the KV cache; the plan is for {tokens:,} tokens a replica and does not hold with fewer. {said}"


def setting_of(facts: PlanFacts, name: str, value: Any, what: str) -> Setting:
    return Setting(name, value, why(what, facts))
