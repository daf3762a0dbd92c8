"""What traces report about the engine that made their steps: its settings, and what it did besides computing.

Settings are in the provenance, under the same names from latfit's recorder and from vLLM's logs; counts are columns.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
MAX_SETTING = 2**40
GPU_DEVICES = ("cuda", "rocm", "xpu")
ENGINE_FORMATS = ("vllm", "trtllm", "trtllm-log", "dynamo", "sglang", "sglang-log", "splitwise")
WATCHED = "metrics"  # the source of windows taken from a running server
LARGEST_REQUESTS, LARGEST_TOKENS = "largest_step_requests", "largest_step_tokens"
"""Facts of windows: the most requests seen in a step, tokens that no step exceeded."""
GRAPHLESS_DEVICES = ("numpy", "openvino", "torch-cpu")  # of `latfit profile`; no engine captures graphs for them

COMMON_DRAFT_SHARE, DRAFT_QUANTILE, MIN_DECODES = 0.3, 0.9, 20
MAX_DRAFTS = 64
HOST_BOUND = 0.2  # share of a step's time; an engine that waits less for its device is busy itself

SUMMED = ("preemptions", "recomputed_tokens", "prefix_queries", "prefix_hits", "draft_tokens", "accepted_tokens")
"""Columns whose sums show what an engine did besides computing steps."""

REQUEST_TIMES = "request_times_so_far"
"""Fact of a recorded file: counts by bin since its run began, by the names ttft_ms and tpot_ms."""
BINS_PER_E = 100  # bins of ln ms: each is 1 % wide


@dataclass(frozen=True)
class EngineFacts:
    """What sources report about an engine: settings on which they agree, with their sources, and those that differ.

    did: sums of what it did besides, see `engine_counts`; overruled: values that the running server contradicts;
    as_served: whether a step of B requests took what an engine needs for B. Engines pad batches to captured graphs: an
    engine's own times include that, and on a CPU there is no padding.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[str] = ()
    differing: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    did: Mapping[str, float] = field(default_factory=dict)
    as_served: bool = False
    overruled: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def overruled_by(self, name: str, server: Mapping[str, Any]) -> "EngineFacts":
        """Return the facts with the settings of a running server (`name`) in place of those of earlier starts."""
        running = _settings(server)
        reported = {setting: [value] for setting, value in self.values.items()} | dict(self.differing)
        others = {key: [each for each in reported.get(key, ()) if each != value] for key, value in running.items()}
        values = dict(self.values)
        if "num_gpu_blocks" in running:  # the tokens in the trace belong to the blocks of another start
            values.pop("kv_capacity_tokens", None)
        return replace(
            self,
            values={**values, **running},
            sources={**self.sources, **dict.fromkeys(running, name)},
            files=list(dict.fromkeys([*([name] if running else []), *self.files])),
            differing={setting: found for setting, found in self.differing.items() if setting not in running},
            overruled={setting: found for setting, found in others.items() if found},
            as_served=self.as_served or _is_as_served(server),
        )


def engine_facts(
    origins: Sequence[tuple[str, Mapping[str, Any]]], did: Mapping[str, float] | None = None
) -> EngineFacts:
    """Combine the settings in the (name, provenance) of several sources; did: see `engine_counts`."""
    parts = [part for origin in origins for part in parts_of(*origin)]
    found: dict[str, dict[Any, list[str]]] = {}
    for name, provenance in parts:
        several = provenance.get("differing")  # among the starts in one source
        lists = several.items() if isinstance(several, Mapping) else ()
        values = [(setting, value) for setting, each in lists if isinstance(each, list) for value in each]
        values = [*_settings(provenance).items(), *((key, value) for key, value in values if _is_setting(key, value))]
        for setting, value in values:
            found.setdefault(setting, {}).setdefault(value, []).append(Path(name).name or name)
    agreed = {setting: next(iter(values.items())) for setting, values in found.items() if len(values) == 1}
    return EngineFacts(
        values={setting: value for setting, (value, _) in agreed.items()},
        sources={setting: count_names(names) for setting, (_, names) in agreed.items()},
        files=list(dict.fromkeys(name for _, names in agreed.values() for name in names)),
        differing={setting: tuple(values) for setting, values in found.items() if len(values) > 1},
        did=dict(did or {}),
        as_served=any(_is_as_served(provenance) for _, provenance in parts),
    )


def parts_of(name: str, provenance: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return (source, provenance) of each source that a trace was joined from."""
    parts = provenance.get("parts")
    if not isinstance(parts, Mapping):
        return [(name, provenance)]
    return [(str(part), origin) for part, origin in parts.items() if isinstance(origin, Mapping)]


def _is_as_served(provenance: Mapping[str, Any]) -> bool:
    if is_record(provenance) or "vllm" in provenance or provenance.get("format") in ENGINE_FORMATS:
        return True
    device = provenance.get("device")
    graphless = isinstance(device, Mapping) and device.get("device") in GRAPHLESS_DEVICES
    return graphless or provenance.get("source") == WATCHED


def path_on(device: str) -> str:
    """Return the execution path of an engine on a device as vLLM names it: gpu, or the device's name."""
    return "gpu" if device in GPU_DEVICES else device


def is_record(provenance: Mapping[str, Any]) -> bool:
    """Return whether all parts come from latfit's recorder or a vLLM log."""
    parts = provenance.get("parts")
    if isinstance(parts, Mapping):
        return bool(parts) and all(isinstance(part, Mapping) and is_record(part) for part in parts.values())
    return "run_started" in provenance or provenance.get("format") == "vllm"


def engine_counts(trace: Trace) -> dict[str, float]:
    """Return the sums of what the engine counted besides steps, and of the requests that decoded."""
    found = {name: float(np.nansum(trace.floats(name))) for name in SUMMED if name in trace}
    if found and "prefill_requests" in trace:
        found["decode_requests"] = float(np.nansum(trace.floats("B") - trace.floats("prefill_requests")))
    return found


def engine_notes(trace: Trace) -> list[str]:
    """Return what users should know of what an engine did besides, and of what its record leaves out."""
    facts, did = engine_facts([("", trace.provenance)]), engine_counts(trace)
    origins = [origin for _, origin in parts_of("", trace.provenance)]
    notes = []
    if k := facts.values.get("num_speculative_tokens", 0):
        accepted, drafted = did.get("accepted_tokens", 0.0), did.get("draft_tokens", 0.0)
        share = f", of which {format_percent(100 * accepted / drafted)} were accepted" if drafted else ""
        notes.append(f"Speculative decoding: up to {k} tokens drafted for each request that decodes{share}.")
    elif "num_speculative_tokens" not in facts.values and (k := draft_tokens(trace)):
        notes.append(
            f"Requests that decode compute up to {k + 1} tokens a step: drafts, which the record does not name."
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
    for origin in origins:
        windows, unsteady = origin.get("windows"), origin.get("unsteady")
        if origin.get("format") == "vllm" and _is_count(windows) and _is_count(unsteady):
            left = f", and {unsteady:,} in which the load changed too much are left out" if unsteady else ""
            notes.append(
                f"The log has no line for each step. Read were its {windows:,} windows of about ten seconds, whose"
                f" batch size is known at their ends only{left}: a coarse source. latfit record measures windows by the"
                " server's counters; --enable-logging-iteration-details logs each step."
            )
    servers = max((origin["api_servers"] for origin in origins if _is_count(origin.get("api_servers"))), default=1)
    if servers > 1:
        notes.append(
            f"The engine's steps went to {servers} API servers, each of which recorded a part of them: periods"
            " from one step to the next are not known. Record with one API server."
        )
    if "wait_ms" in trace:
        waited_ms, T_ms = trace.floats("wait_ms"), trace.floats("T_ms")
        timed = np.isfinite(waited_ms) & (T_ms > 0)
        waited = float(np.sum(waited_ms[timed]) / max(np.sum(T_ms[timed]), 1e-9))
        bound = ": the host is the bottleneck, not the device" if waited < HOST_BOUND else ""
        notes.append(f"The engine waited for the device in {format_percent(100 * waited)} of the steps' time{bound}.")
    if any(origin.get("host_time") == "none" for origin in origins):
        notes.append("The steps are sums of kernels and hold no host time, as scheduling and output handling take.")
    return notes


def draft_tokens(trace: Trace) -> int:
    """Return the drafts per decode request in a record of steps; 0 for any other trace.

    If the engine does not report them and many decode steps have extra tokens, take their 90 % quantile: steps after a
    preemption are rare, and longer by hundreds of tokens.
    """
    if not is_record(trace.provenance) or not all(name in trace for name in ("prefill_requests", "prefill_tokens")):
        return 0
    facts = engine_facts([("", trace.provenance)])
    reported = facts.values.get("num_speculative_tokens")
    if reported is not None:
        return int(reported)
    if several := facts.differing.get("num_speculative_tokens"):
        return int(max(several))
    B, S, n = (trace.floats(name) for name in ("B", "S", "prefill_requests"))
    decodes = (n == 0) & (B >= 1) & np.isfinite(S)
    if np.count_nonzero(decodes) < MIN_DECODES or np.mean(S[decodes] > B[decodes]) <= COMMON_DRAFT_SHARE:
        return 0
    usual = float(np.quantile(S[decodes] / B[decodes], DRAFT_QUANTILE))
    return int(min(np.ceil(usual) - 1, MAX_DRAFTS))


def _settings(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the right type; files may hold anything."""
    capacity = provenance.get("kv_capacity_tokens")
    if isinstance(capacity, Mapping):  # by engine; the smallest decides
        sizes = [size for size in capacity.values() if _is_count(size) and size > 0]
        provenance = {**provenance, "kv_capacity_tokens": min(sizes, default=None)}
    return {name: provenance[name] for name in (*COUNTS, *FLAGS, *NAMES) if _is_setting(name, provenance.get(name))}


def _is_setting(name: str, value: Any) -> bool:
    if name in COUNTS:
        return _is_count(value) and (value > 0 or name == "num_speculative_tokens")
    return isinstance(value, bool) if name in FLAGS else name in NAMES and isinstance(value, str) and value != ""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_SETTING


def count_names(names: Sequence[str]) -> str:
    """Return the first of some names, and how many others there are."""
    different = list(dict.fromkeys(names))
    return f"{different[0]} and {len(different) - 1} more" if len(different) > 1 else "".join(different)


def time_bin(ms: float) -> int:
    """Return the bin of a time."""
    return round(BINS_PER_E * math.log(ms))


def request_times(provenance: Mapping[str, Any]) -> dict[str, Counter[int]]:
    """Return the counts of all runs by name: of each run those of its last file, which hold all before."""
    last: dict[tuple[str, str], Counter[int]] = {}
    for _, origin in parts_of("", provenance):
        known = origin.get(REQUEST_TIMES)
        for name, counts in known.items() if isinstance(known, Mapping) else ():
            found = Counter({int(place): int(n) for place, n in counts.items()})
            key = str(origin.get("run")), str(name)
            last[key] = max(last.get(key, found), found, key=Counter.total)
    merged: dict[str, Counter[int]] = {}
    for (_, name), counts in last.items():
        merged.setdefault(name, Counter()).update(counts)
    return merged


def time_quantile(counts: Counter[int], q: float) -> float:
    """Return a quantile in ms, within half a percent."""
    reached, total = 0, counts.total()
    for place in sorted(counts):
        reached += counts[place]
        if reached >= q * total:
            return math.exp(place / BINS_PER_E)
    return math.nan
