"""Metadata of traces, typed: on what and how steps were measured. The records are the JSON in a trace's file."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from latfit.records import OpenRecord, Record, to_builtins
from latfit.trace.columns import SCHEMA

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
