"""What traces report about the engine that made their steps: its settings, and what it did besides computing."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from latfit.stats import weighted_quantile
from latfit.trace.metadata import SETTINGS, facts_of
from latfit.trace.table import Trace
from latfit.units import format_percent

GPU_DEVICES = ("cuda", "rocm", "xpu")
COMMON_DRAFT_SHARE, DRAFT_QUANTILE, MIN_DECODES = 0.3, 0.9, 20
MAX_DRAFTS = 64
HOST_BOUND = 0.2  # share of a step's time; an engine that waits less for its device is busy itself

SUMMED = ("preemptions", "recomputed_tokens", "prefix_queries", "prefix_hits", "draft_tokens", "accepted_tokens")
"""Columns whose sums show what an engine did besides computing steps."""

BINS_PER_E = 100  # bins of ln ms: each is 1 % wide


@dataclass(frozen=True)
class EngineFacts:
    """What sources report about an engine: settings on which they agree, with their sources, and those that differ.

    overruled: values that the running server contradicts; as_served: whether a step of B requests took what an engine
    needs for B, which pads batches to captured graphs.
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
        facts = facts_of(server)
        running = facts.settings
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
            as_served=self.as_served or facts.is_as_served,
        )


def engine_facts(
    origins: Sequence[tuple[str, Mapping[str, Any]]], did: Mapping[str, float] | None = None
) -> EngineFacts:
    """Combine the settings in the (name, provenance) of several sources; did: see `engine_counts`."""
    whole = [(name, facts_of(provenance)) for name, provenance in origins]
    parts = [part for name, facts in whole for part in zip(facts.parts or [name], facts.sources, strict=True)]
    found: dict[str, dict[Any, list[str]]] = {}
    for name, facts in parts:
        several = [(setting, value) for setting, values in facts.differing.items() for value in values]
        for setting, value in [*facts.settings.items(), *several]:
            if setting in SETTINGS:
                found.setdefault(setting, {}).setdefault(value, []).append(Path(name).name or name)
    agreed = {setting: next(iter(values.items())) for setting, values in found.items() if len(values) == 1}
    return EngineFacts(
        values={setting: value for setting, (value, _) in agreed.items()},
        sources={setting: count_names(names) for setting, (_, names) in agreed.items()},
        files=list(dict.fromkeys(name for _, names in agreed.values() for name in names)),
        differing={setting: tuple(values) for setting, values in found.items() if len(values) > 1},
        did=dict(did or {}),
        as_served=any(facts.is_as_served for _, facts in parts),
    )


def path_on(device: str) -> str:
    """Return the execution path of an engine on a device as vLLM names it: gpu, or the device's name."""
    return "gpu" if device in GPU_DEVICES else device


def engine_counts(trace: Trace) -> dict[str, float]:
    found = {name: float(np.nansum(trace.floats(name))) for name in SUMMED if name in trace}
    if found and "prefill_requests" in trace:
        found["decode_requests"] = float(np.nansum(trace.floats("B") - trace.floats("prefill_requests")))
    return found


def engine_notes(trace: Trace) -> list[str]:
    facts, did = engine_facts([("", trace.provenance)]), engine_counts(trace)
    sources = facts_of(trace.provenance).sources
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
    for each in sources:
        if each.format == "vllm" and each.windows is not None:
            left = f", and {each.unsteady:,} in which the load changed too much are left out" if each.unsteady else ""
            notes.append(
                f"The log has no line for each step. Read were its {each.windows:,} windows of about ten seconds, whose"
                f" batch size is known at their ends only{left}: a coarse source. latfit record measures windows by the"
                " server's counters; --enable-logging-iteration-details logs each step."
            )
    servers = max(each.api_servers for each in sources)
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
    if any(each.host_time == "none" for each in sources):
        notes.append("The steps are sums of kernels and hold no host time, as scheduling and output handling take.")
    return notes


def draft_tokens(trace: Trace) -> int:
    """Return the drafts per decode request in a record of steps; 0 for any other trace.

    Where the engine does not report them, the 90 % quantile of extra tokens: steps after a preemption are rare.
    """
    if not facts_of(trace.provenance).is_record or not all(
        name in trace for name in ("prefill_requests", "prefill_tokens")
    ):
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


def count_names(names: Sequence[str]) -> str:
    different = list(dict.fromkeys(names))
    return f"{different[0]} and {len(different) - 1} more" if len(different) > 1 else "".join(different)


def time_bin(ms: float) -> int:
    return round(BINS_PER_E * math.log(ms))


def request_times(provenance: Mapping[str, Any]) -> dict[str, Counter[int]]:
    """Return the counts of all runs by name: of each run those of its last file, which hold all before."""
    last: dict[tuple[str, str], Counter[int]] = {}
    for each in facts_of(provenance).sources:
        for name, counts in each.request_times_so_far.items():
            found, key = Counter(counts), (str(each.run), name)
            last[key] = max(last.get(key, found), found, key=Counter.total)
    merged: dict[str, Counter[int]] = {}
    for (_, name), counts in last.items():
        merged.setdefault(name, Counter()).update(counts)
    return merged


def time_quantile(counts: Counter[int], q: float) -> float:
    """Return a quantile in ms, within half a percent."""
    places, numbers = (np.array(list(each), dtype=np.float64) for each in (counts, counts.values()))
    return math.exp(weighted_quantile(places, q, numbers) / BINS_PER_E) if counts else math.nan
