"""Which system a trace was measured on: facts from its columns and provenance, and labels for file names.

A fact comes from a column with a single value, else from the provenance if its parts agree.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

import numpy as np

from latfit.engines import RECORDED
from latfit.trace.metadata import Provenance, facts_of
from latfit.trace.table import Trace

FACTS = (
    *("hardware", "model", "tp", "path", "dtype", "quantization", "device", "threads"),
    *("engine", "engine_version", "isa"),
)  # facts of a system, the most telling first
SYSTEM = ("hardware", "model", "tp", "dtype", "quantization", "device", "engine")
"""Facts that tell systems apart; versions, threads and instruction sets change on one machine."""

UNKNOWN_VALUES = ("", "unknown", "auto", "nan")
MAKERS = re.compile(r"nvidia|geforce|amd|intel|tesla|torch\.|[^a-z0-9]")
NUMBER_TYPES: Mapping[str, str] = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
}  # fmt: skip

MAX_LABEL_BYTES = 120  # a file name, with the source's name and what is added to it, has 255
DIGEST_DIGITS = 12


@dataclass(frozen=True)
class Fact:
    """One fact according to the fit and according to the steps; empty if unknown."""

    name: str
    fitted: str
    found: str

    @property
    def agreement(self) -> Literal["same", "differs", "unknown"]:
        if not self.fitted or not self.found:
            return "unknown"
        return "same" if _is_same(self.name, self.fitted, self.found) else "differs"


def identity_of(trace: Trace) -> dict[str, str]:
    path = _column_value(trace, "path")
    whole = facts_of(trace.provenance)
    # Facts of the path override those of the whole.
    origins = [facts_of({**each.to_json(), **each.paths.get(path, {})}) for each in (whole, *whole.sources)]
    facts = list(map(_facts, origins))
    found = {name: _column_value(trace, name) or _agreed(each.get(name) for each in facts) for name in FACTS}
    return {name: value for name, value in found.items() if value}


def facts_beside(fitted: Mapping[str, str], found: Mapping[str, str]) -> list[Fact]:
    """Return every fact that is known of one of two systems."""
    return [Fact(name, fitted.get(name, ""), found.get(name, "")) for name in FACTS if name in {*fitted, *found}]


def _column_value(trace: Trace, name: str) -> str:
    if name not in trace or not len(trace):
        return ""
    codes, values = trace.coded(name)  # of selected rows, with the values of all
    return _agreed(values[code] for code in np.unique(codes).tolist())


def _agreed(values: Iterable[Any]) -> str:
    known = {str(value).strip() for value in values if value is not None}
    known = {text for text in known if text.lower() not in UNKNOWN_VALUES}
    return known.pop() if len(known) == 1 else ""


def _facts(origin: Provenance) -> dict[str, Any]:
    device, model = origin.device, origin.model
    kind = str(device.get("device", ""))
    versions = {"vllm": origin.vllm, **origin.more}
    engine = origin.engine or next((name for name in RECORDED if versions.get(name)), None)
    return {
        "hardware": origin.hardware or device.get("gpu") or origin.machine.get("cpu"),
        "model": model.get("name") if isinstance(model, Mapping) else model,
        "tp": origin.tp,
        "dtype": device.get("dtype") or origin.dtype,
        "quantization": origin.quantization,
        "device": kind,
        "threads": device.get("threads"),
        "isa": device.get("isa"),
        "engine": engine,
        "engine_version": versions.get(str(engine)) or origin.engine_version or device.get(kind),
    }


def _is_same(name: str, one: str, other: str) -> bool:
    """Return whether two values mean the same; of hardware and models, one may be whole words of the other."""
    short, long = sorted(
        (MAKERS.sub(" ", text.lower()) for text in (one, other)), key=lambda t: len(t.replace(" ", ""))
    )
    plain, other_plain = short.replace(" ", ""), long.replace(" ", "")
    if name == "dtype":
        return NUMBER_TYPES.get(plain, plain) == NUMBER_TYPES.get(other_plain, other_plain)
    if name not in ("hardware", "model") or not plain:
        return plain == other_plain
    spaced = " *".join(map(re.escape, plain))
    return re.search(rf"(?<![a-z0-9]){spaced}(?![a-z0-9])", long) is not None


def system_label(system: Mapping[str, str], *, is_unique: bool = True) -> str:
    """Return a label of one system for file names: its values, percent-encoded; empty without varying columns.

    A long label, or one that is not unique, ends in a digest of the values.
    """
    label = ",".join(quote(value, safe="", errors="surrogatepass") for value in system.values())
    label = label or "unnamed" * bool(system)
    if is_unique and len(label) <= MAX_LABEL_BYTES:
        return label
    digest = hashlib.sha256(repr(tuple(system.values())).encode(errors="surrogatepass")).hexdigest()[:DIGEST_DIGITS]
    begin = re.sub("%.?$", "", label[: MAX_LABEL_BYTES - DIGEST_DIGITS - 1])  # never cut an escape
    return f"{begin}~{digest}"


def system_labels(systems: Sequence[Mapping[str, str]]) -> list[str]:
    """Return labels of all systems of a source that differ on any file system, also one that ignores case."""
    plain = [system_label(system).lower() for system in systems]
    return [system_label(system, is_unique=plain.count(one) == 1) for one, system in zip(plain, systems, strict=True)]
