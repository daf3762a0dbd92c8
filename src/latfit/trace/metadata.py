"""Metadata of traces, typed: on what and how steps were measured, and of which system.

The records are the JSON in a trace's file. A fact about the system comes from a column with a single value, else from
the provenance if its parts agree.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import quote

import msgspec
import numpy as np

from latfit.engines import RECORDED
from latfit.records import OpenRecord, Record, to_builtins
from latfit.trace.table import SCHEMA, Trace

JsonObject = Mapping[str, Any]
Setting = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]

ENGINE_FORMATS = ("vllm", "trtllm", "trtllm-log", "dynamo", "sglang", "sglang-log", "splitwise")
GRAPHLESS_DEVICES = ("numpy", "openvino", "torch-cpu")  # of `latfit profile`; no engine captures graphs for them
WATCHED = "metrics"  # the source of windows taken from a running server
LARGEST_REQUESTS, LARGEST_TOKENS = "largest_step_requests", "largest_step_tokens"
"""Facts of windows: the most requests seen in a step, tokens that no step exceeded."""
REQUEST_TIMES = "request_times_so_far"
"""Fact of a recorded file: counts by bin since its run began, by the names ttft_ms and tpot_ms."""


class CellFacts(OpenRecord, frozen=True):
    """How cells were made: of which time, from how many rows; host: mean T and period in ms by phase."""

    time: str | None = None
    host: Mapping[str, Mapping[str, float]] = msgspec.field(default_factory=dict)
    rows_read: int | None = None
    dropped: Mapping[str, int] = msgspec.field(default_factory=dict)


class EngineSettings(OpenRecord, frozen=True):
    kv_capacity_tokens: Setting | Mapping[str, Setting] | None = None  # of each engine
    num_gpu_blocks: Setting | None = None
    block_size: Setting | None = None
    max_num_seqs: Setting | None = None
    max_num_batched_tokens: Setting | None = None
    long_prefill_token_threshold: Setting | None = None
    num_speculative_tokens: Setting | None = None
    max_model_len: Setting | None = None
    data_parallel_size: Setting | None = None
    async_scheduling: bool | None = None
    enable_chunked_prefill: bool | None = None
    enable_prefix_caching: bool | None = None
    model: str | JsonObject | None = None
    vllm: str | None = None  # its version
    device_type: str | None = None


SETTINGS = frozenset(EngineSettings.__struct_fields__) - {"more"}


class Provenance(EngineSettings, frozen=True):
    """Known facts of the source of steps; others are in `more`. parts: the facts of each source that was joined.

    differing: settings whose values differ between starts of the engine; paths: facts of each execution path.
    """

    what = "trace"

    format: str | None = None
    source: str | None = None
    engine: str | None = None
    engine_version: str | None = None
    hardware: str | None = None
    tp: int | str | None = None
    dtype: str | None = None
    quantization: str | None = None
    device: JsonObject = msgspec.field(default_factory=dict)
    machine: JsonObject = msgspec.field(default_factory=dict)
    paths: Mapping[str, JsonObject] = msgspec.field(default_factory=dict)
    host_time: str | None = None  # "none": sums of kernels
    cells: CellFacts | None = None
    parts: Mapping[str, JsonObject] = msgspec.field(default_factory=dict)
    differing: Mapping[str, list[int | bool | str]] = msgspec.field(default_factory=dict)
    run: str | None = None
    run_started: str | None = None
    log_clock_s: tuple[float, float] | None = None  # first and last time of a log, seconds of a year in its own zone
    runs: int | Sequence[str] = ()  # how many a log holds, or the names of recorded ones
    api_servers: Setting = 1
    largest_step_requests: float | None = None
    largest_step_tokens: float | None = None
    request_times_so_far: Mapping[str, Mapping[int, int]] = msgspec.field(default_factory=dict)
    windows: Setting | None = None
    unsteady: Setting = 0
    cut_lines: Setting = 0
    bad_lines: Setting = 0
    refused_lists: Setting = 0

    @classmethod
    def upgrade(cls, document: JsonObject) -> JsonObject:
        """Take known facts of another type for unknown ones, but leave out settings with the text None.

        Recorders of latfit 0.1.0 write it.
        """
        known = document.keys() & set(cls.__struct_fields__)
        if not _is_a(document, cls):
            kinds = {each.name: each.type for each in msgspec.structs.fields(cls)}
            known = {name for name in known if _is_a(document[name], kinds[name])}
        odd = {name: value for name, value in document.items() if name not in known}
        more = {name: value for name, value in odd.items() if name not in SETTINGS or value != "None"}
        return {**{name: document[name] for name in known}, "more": more}

    @property
    def sources(self) -> list["Provenance"]:
        return [facts_of(each) for each in self.parts.values()] if self.parts else [self]

    @property
    def settings(self) -> dict[str, Any]:
        """The engine's settings. Of several capacities the smallest decides; a count of 0 stands for none."""
        found = {name: getattr(self, name) for name in EngineSettings.__struct_fields__}
        if isinstance(self.kv_capacity_tokens, Mapping):
            found["kv_capacity_tokens"] = min(filter(None, self.kv_capacity_tokens.values()), default=None)
        return {
            name: value
            for name, value in found.items()
            if isinstance(value, str | int) and (value or value is False or name == "num_speculative_tokens")
        }

    @property
    def is_record(self) -> bool:
        """Whether all steps come from latfit's recorder or a vLLM log."""
        return all(each.run_started is not None or each.format == "vllm" for each in self.sources)

    @property
    def is_as_served(self) -> bool:
        """Whether steps took what an engine needs for them: see `EngineFacts`."""
        if self.is_record or self.vllm or self.format in ENGINE_FORMATS or self.source == WATCHED:
            return True
        return self.device.get("device") in GRAPHLESS_DEVICES


class Metadata(Record, frozen=True, tag_field="schema", tag=SCHEMA):
    what, made_by = "trace", "latfit ingest"

    provenance: JsonObject = msgspec.field(default_factory=dict)


def _is_a(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError:
        return False
    return True


def facts_of(provenance: Mapping[str, Any]) -> Provenance:
    return Provenance.from_json(to_builtins(provenance), "its provenance")


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
