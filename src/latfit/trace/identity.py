"""What a trace says of the system that it was measured on: hardware, model, parallelism, number type, engine.

A fact comes from a column that holds one value, else from the provenance, where its parts agree. What nobody said is
left out: nothing is guessed.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from latfit.trace.table import Trace

FACTS = (
    "hardware",
    "model",
    "tp",
    "path",
    "dtype",
    "quantization",
    "device",
    "threads",
    "engine",
    "engine_version",
    "isa",
)
"""Facts of a system, the most telling first."""

NOT_SAID = ("", "unknown", "auto", "nan")
ENGINES = ("vllm", "sglang", "tensorrt_llm")
MAKERS = re.compile(r"nvidia|geforce|amd|intel|tesla|torch\.|[^a-z0-9]")
NUMBER_TYPES: Mapping[str, str] = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
}  # fmt: skip

Agreement = Literal["same", "differs", "unknown"]


@dataclass(frozen=True)
class Fact:
    """One fact of a system as the fit's trace says it and as the steps do; empty where one does not."""

    name: str
    fitted: str
    found: str

    @property
    def agreement(self) -> Agreement:
        if not self.fitted or not self.found:
            return "unknown"
        return "same" if _alike(self.name, self.fitted, self.found) else "differs"


def identity_of(trace: Trace) -> dict[str, str]:
    """Facts of the system of a trace, by the names of `FACTS`."""
    path = _only(trace, "path")
    origins = list(_origins(trace.provenance, path))
    found = {}
    for name in FACTS:
        said = _only(trace, name) or _agreed(_facts(origin).get(name) for origin in origins)
        if said:
            found[name] = said
    return found


def facts_beside(fitted: Mapping[str, str], found: Mapping[str, str]) -> list[Fact]:
    """Every fact that one of two systems says."""
    named = (Fact(name, fitted.get(name, ""), found.get(name, "")) for name in FACTS)
    return [fact for fact in named if fact.fitted or fact.found]


def _only(trace: Trace, name: str) -> str:
    """The one value of a column; empty where there are several, or none."""
    if name not in trace or not len(trace):
        return ""
    codes, values = trace.coded(name)  # of selected rows with the values of all
    return _agreed(values[code] for code in np.unique(codes).tolist())


def _agreed(values: Any) -> str:
    said = {text for value in values if value is not None and (text := str(value).strip()).lower() not in NOT_SAID}
    return said.pop() if len(said) == 1 else ""


def _origins(provenance: Mapping[str, Any], path: str) -> Iterator[Mapping[str, Any]]:
    """The provenance of every part, what belongs to the path before what belongs to all."""
    for origin in (provenance, *_within(provenance, "parts").values()):
        if isinstance(origin, Mapping):
            yield {**origin, **_within(_within(origin, "paths"), path)}


def _facts(origin: Mapping[str, Any]) -> dict[str, Any]:
    device, model = _within(origin, "device"), origin.get("model")
    kind = str(device.get("device", ""))
    engine = origin.get("engine") or next((name for name in ENGINES if name in origin), None)
    return {
        **{name: origin.get(name) for name in ("hardware", "tp", "quantization")},
        "hardware": origin.get("hardware") or device.get("gpu") or _within(origin, "machine").get("cpu"),
        "model": model.get("name") if isinstance(model, Mapping) else model,
        "dtype": device.get("dtype") or origin.get("dtype"),
        "device": kind,
        "threads": device.get("threads"),
        "isa": device.get("isa"),
        "engine": engine,
        "engine_version": origin.get(str(engine)) or origin.get("engine_version") or device.get(kind),
    }


def _within(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = facts.get(name)
    return found if isinstance(found, Mapping) else {}


def _alike(name: str, one: str, other: str) -> bool:
    """Whether two names mean the same: alike but for case, marks and makers, or, of hardware and models, one standing
    as whole words in the other."""
    short, long = sorted((MAKERS.sub(" ", text.lower()) for text in (one, other)), key=lambda text: len(_plain(text)))
    if name == "dtype":
        return NUMBER_TYPES.get(_plain(short), _plain(short)) == NUMBER_TYPES.get(_plain(long), _plain(long))
    if name not in ("hardware", "model") or not _plain(short):
        return _plain(short) == _plain(long)
    spaced = " *".join(map(re.escape, _plain(short)))
    return re.search(rf"(?<![a-z0-9]){spaced}(?![a-z0-9])", long) is not None


def _plain(text: str) -> str:
    return text.replace(" ", "")
