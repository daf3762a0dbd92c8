"""What traces say of the serving engine that made their steps: its settings, and what it did besides.

Settings stand in the provenance, where latfit's recorder and the reader of vLLM's logs put them under the same names.
Several files may say different things: what differs is nobody's word. What the engine did besides (tokens found in the
prefix cache, drafts, preemptions) is counted in columns and summed here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from latfit.trace.table import Trace
from latfit.units import format_percent

COUNTS = (
    "kv_capacity_tokens", "num_gpu_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens",
    "long_prefill_token_threshold", "num_speculative_tokens", "max_model_len", "data_parallel_size",
)  # fmt: skip
FLAGS = ("async_scheduling", "enable_chunked_prefill", "enable_prefix_caching")
NAMES = ("model", "vllm", "device_type")
GPU_DEVICES = ("cuda", "rocm", "xpu")
OF_ENGINES = ("vllm", "trtllm", "dynamo", "sglang", "splitwise")
"""Formats of steps that a serving engine made."""
WATCHED = "metrics"
"""The source of windows that were taken from a running server."""
LARGEST_REQUESTS, LARGEST_TOKENS = "largest_step_requests", "largest_step_tokens"
"""Facts of windows: the most requests seen in a step, tokens that no step exceeded."""
WITHOUT_GRAPHS = ("numpy", "openvino", "torch-cpu")
"""Devices of `latfit profile` that no engine captures graphs for."""
MOST = 2**40

SUMMED = (
    "preemptions",
    "recomputed_tokens",
    "prefix_queries",
    "prefix_hits",
    "draft_tokens",
    "accepted_tokens",
)
"""Columns whose sums say what an engine did besides computing steps."""


@dataclass(frozen=True)
class EngineFacts:
    """What sources say of an engine. values: by name; sources: who said each, files: all of them; differing: names on
    which they differ, with what they say.  did: sums of what it did besides, see `engine_counts`.  as_served: whether
    steps of B requests took what an engine needs for B requests: where it pads batches to those of captured graphs, its
    own steps have that in their times, and on a CPU it pads none."""

    values: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[str] = ()
    differing: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    did: Mapping[str, float] = field(default_factory=dict)
    as_served: bool = False


def engine_facts(
    origins: Sequence[tuple[str, Mapping[str, Any]]], did: Mapping[str, float] | None = None
) -> EngineFacts:
    """The facts on which all sources agree that name them. origins: (source's name, provenance), the most trusted
    first: one that comes from somewhere else than a trace may stand in front."""
    said: dict[str, dict[Any, list[str]]] = {}
    for name, provenance in (part for origin in origins for part in parts_of(*origin)):
        for fact, value in _valid(provenance).items():
            said.setdefault(fact, {}).setdefault(value, []).append(Path(name).name or name)
        for fact, several in _differing(provenance).items():
            for value in several:
                said.setdefault(fact, {}).setdefault(value, []).append(Path(name).name or name)
    one = {fact: next(iter(values.items())) for fact, values in said.items() if len(values) == 1}
    return EngineFacts(
        values={fact: value for fact, (value, _) in one.items()},
        sources={fact: _named(names) for fact, (_, names) in one.items()},
        files=list(dict.fromkeys(name for _, names in one.values() for name in names)),
        differing={fact: tuple(values) for fact, values in said.items() if len(values) > 1},
        did=dict(did or {}),
        as_served=any(_as_served(provenance) for origin in origins for _, provenance in parts_of(*origin)),
    )


def _as_served(provenance: Mapping[str, Any]) -> bool:
    if is_record(provenance) or "vllm" in provenance or provenance.get("format") in OF_ENGINES:
        return True
    if provenance.get("source") == WATCHED:
        return True
    device = provenance.get("device")
    return isinstance(device, Mapping) and device.get("device") in WITHOUT_GRAPHS


def path_on(device: str) -> str:
    """The execution path of an engine on a device as vLLM names it: gpu, else that name."""
    return "gpu" if device in GPU_DEVICES else device


def is_record(provenance: Mapping[str, Any]) -> bool:
    """Whether it is of latfit's recorder or of an engine's log, and of nothing else besides."""
    parts = provenance.get("parts")
    if isinstance(parts, Mapping):
        return bool(parts) and all(isinstance(part, Mapping) and is_record(part) for part in parts.values())
    return "run_started" in provenance or provenance.get("format") == "vllm"


def engine_counts(trace: Trace) -> dict[str, float]:
    """Sums over steps of what the engine counted besides, and of the requests that decoded; without what no column
    says. Steps that say nothing count as none."""
    found = {name: float(np.nansum(trace.floats(name))) for name in SUMMED if name in trace}
    if found and "prefill_requests" in trace:
        found["decode_requests"] = float(np.nansum(trace.floats("B") - trace.floats("prefill_requests")))
    return found


def engine_notes(trace: Trace) -> list[str]:
    """What users should know of what an engine did besides, and of what its record leaves out."""
    facts, did = engine_facts([("", trace.provenance)]), engine_counts(trace)
    notes = []
    if k := facts.values.get("num_speculative_tokens", 0):
        accepted = did.get("accepted_tokens", 0.0), did.get("draft_tokens", 0.0)
        share = f", of which {format_percent(100 * accepted[0] / accepted[1])} were accepted" if accepted[1] else ""
        notes.append(f"Speculative decoding: up to {k} tokens drafted for each request that decodes{share}.")
    elif "num_speculative_tokens" not in facts.values and (most := _tokens_of_decoding(trace)) > 1:
        notes.append(
            f"Requests that decode compute up to {most} tokens a step: drafts, which the record does not name."
        )
    if did.get("preemptions"):
        notes.append(f"{did['preemptions']:,.0f} requests were preempted.")
    if did.get("recomputed_tokens"):
        notes.append(
            f"{did['recomputed_tokens']:,.0f} tokens were computed again after preemption, which vLLM counts as"
            " generation: they count as prefill here."
        )
    if did.get("prefix_hits") and did.get("prefix_queries"):
        share = format_percent(100 * did["prefix_hits"] / did["prefix_queries"])
        notes.append(f"{share} of the prompt tokens were found in the prefix cache and not computed.")
    parts = [origin for _, origin in parts_of("", trace.provenance)]
    notes += [note for origin in parts if (note := _of_windows(origin))]
    servers = max((origin.get("api_servers", 1) for origin in parts if _is_count(origin.get("api_servers"))), default=1)
    if servers > 1:
        notes.append(
            f"The engine's steps went to {servers} API servers, each of which recorded a part of them: periods from one"
            " step to the next are not known. Record with one API server."
        )
    if any(origin.get("host_time") == "none" for origin in parts):
        notes.append("The steps are sums of kernels and hold no host time, as scheduling and output handling take.")
    return notes


def _of_windows(origin: Mapping[str, Any]) -> str:
    """What users should know of a log whose lines of every ten seconds were read; empty for any other origin."""
    windows, unsteady = origin.get("windows"), origin.get("unsteady")
    if origin.get("format") != "vllm" or not _is_count(windows) or not _is_count(unsteady):
        return ""
    left = f", and {unsteady:,} in which the load changed too much are left out" if unsteady else ""
    return (
        f"The log has no line for each step. Read were its {windows:,} windows of about ten seconds, whose batch size"
        f" is known at their ends only{left}: a coarse source. latfit record measures windows by the server's counters;"
        " --enable-logging-iteration-details logs each step."
    )


def _tokens_of_decoding(trace: Trace) -> int:
    """Tokens a request of an engine's decode steps, where most of them have more than one."""
    if not is_record(trace.provenance) or "prefill_tokens" not in trace:
        return 1
    B, S = trace.floats("B"), trace.floats("S")
    decodes = (trace.floats("prefill_tokens") == 0) & (B >= 1) & (S >= B)
    if not decodes.any() or np.mean(S[decodes] > B[decodes]) <= 0.5:
        return 1
    return int(np.ceil(np.max(S[decodes] / B[decodes])))


def parts_of(name: str, provenance: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    parts = provenance.get("parts")
    if not isinstance(parts, Mapping):
        return [(name, provenance)]
    return [(str(part), origin) for part, origin in parts.items() if isinstance(origin, Mapping)]


def _valid(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Facts that are what they should be: files may hold anything."""
    found: dict[str, Any] = {}
    capacity = provenance.get("kv_capacity_tokens")
    if isinstance(capacity, Mapping):  # by engine; they are equal, or the smallest decides
        sizes = [size for size in capacity.values() if _is_count(size) and size > 0]
        provenance = {**provenance, "kv_capacity_tokens": min(sizes, default=None)}
    for name in COUNTS:
        value: Any = provenance.get(name)
        if _is_count(value) and (value > 0 or name == "num_speculative_tokens"):
            found[name] = value
    found |= {name: provenance[name] for name in FLAGS if isinstance(provenance.get(name), bool)}
    found |= {name: provenance[name] for name in NAMES if isinstance(provenance.get(name), str) and provenance[name]}
    return found


def _differing(provenance: Mapping[str, Any]) -> dict[str, list[Any]]:
    several = provenance.get("differing")
    if not isinstance(several, Mapping):
        return {}
    known = (*COUNTS, *FLAGS, *NAMES)
    return {
        name: [value for value in values if isinstance(value, str | int)]
        for name, values in several.items()
        if name in known and isinstance(values, list)
    }


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST


def _named(names: Sequence[str]) -> str:
    different = list(dict.fromkeys(names))
    return different[0] if len(different) == 1 else f"{different[0]} and {len(different) - 1} more"
