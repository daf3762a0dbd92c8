"""What a vLLM server says of the requests that it served: its `/metrics` texts from before and after a run.

Counters and histograms of Prometheus only grow, so a run is the difference of two texts; without the first it is all
since the server started. A histogram tells the mean exactly (sum / count) and every quantile as the bucket that it lies
in, from the edge below to the edge above.

Three clocks tell of a request:

- the client's (a load generator's result): from sending it to receiving its tokens.
- the server's: TTFT, TPOT and latency from the moment that its API process has the request, tokenising it included.
- the engine's: queue, prefill and decode time, from when the scheduler has it to when a step gave its token. What the
  engine makes of a request, and what a simulation of its steps is held against: TTFT = queue + prefill, latency =
  queue + inference, TPOT as the server has it, whose distances of tokens are the engine's own.

Client - server is the network and the load generator, server - engine is tokenising, passing on and HTTP.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latfit.errors import BadInput
from latfit.trace import Source, open_source

_SAMPLE = re.compile(r"vllm:([a-zA-Z0-9_]{1,100})(?:\{(.{0,20000})\})?\s+([-+.\deEinfNa]{1,40})(?:\s+\d+)?\s*")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
MOST_BYTES = 1 << 26

TTFT, LATENCY = "time_to_first_token_seconds", "e2e_request_latency_seconds"
TPOT = ("request_time_per_output_token_seconds", "inter_token_latency_seconds", "time_per_output_token_seconds")
"""The first that a version has; the last two are means over tokens, not over requests."""
QUEUE, PREFILL, INFERENCE = (f"request_{name}_time_seconds" for name in ("queue", "prefill", "inference"))
COUNTERS: Mapping[str, str] = {
    "preemptions": "num_preemptions_total",
    "prefix_queries": "prefix_cache_queries_total",
    "prefix_hits": "prefix_cache_hits_total",
    "draft_tokens": "spec_decode_num_draft_tokens_total",
    "accepted_tokens": "spec_decode_num_accepted_tokens_total",
}
CACHE = "cache_config_info"


@dataclass(frozen=True)
class Histogram:
    """count and sum (ms) of a time, and how many lie at or below each edge (ms), rising, the last infinite."""

    count: float
    total_ms: float
    edges_ms: Sequence[float]
    reached: Sequence[float]

    @property
    def mean_ms(self) -> float:
        return self.total_ms / self.count if self.count > 0 else math.nan

    def bucket(self, q: float) -> tuple[float, float]:
        """The edges in ms between which the quantile lies; NaN where there is none."""
        if not self.count > 0:
            return math.nan, math.nan
        for i, reached in enumerate(self.reached):
            if reached >= q * self.count:
                return self.edges_ms[i - 1] if i else 0.0, self.edges_ms[i]
        return (self.edges_ms[-1] if self.edges_ms else 0.0), math.inf


@dataclass(frozen=True, repr=False)
class ServerRun:
    """What a server says of a run. times: histograms by the names of vLLM; counts: by `COUNTERS`; facts: of the KV
    cache, by the names of a recorder's provenance."""

    times: Mapping[str, Histogram]
    counts: Mapping[str, float]
    facts: Mapping[str, Any]
    source: str

    @property
    def requests(self) -> int:
        return round(self.times[LATENCY].count)

    @property
    def tpot(self) -> Histogram:
        return next(self.times[name] for name in TPOT if name in self.times)

    @property
    def of_tokens(self) -> bool:
        """Whether its TPOT is a mean over tokens and not over requests."""
        return TPOT[0] not in self.times

    def server_ms(self) -> dict[str, float]:
        """Mean TTFT, TPOT and latency as the server counts them."""
        means = {"ttft_ms": self.times[TTFT].mean_ms, "tpot_ms": self.tpot.mean_ms}
        return {**means, "latency_ms": self.times[LATENCY].mean_ms}

    def engine_ms(self) -> dict[str, float]:
        """Mean TTFT, TPOT and latency of the engine alone; of the server where it does not tell the engine's."""
        found = self.server_ms()
        if all(name in self.times for name in (QUEUE, PREFILL, INFERENCE)):
            queue, prefill, inference = (self.times[name].mean_ms for name in (QUEUE, PREFILL, INFERENCE))
            found |= {"ttft_ms": queue + prefill, "latency_ms": queue + inference}
        return found

    def quantile_ms(self, metric: str, q: float) -> tuple[float, float]:
        """The bucket in ms that the server's quantile of a metric lies in."""
        found = {"ttft_ms": self.times[TTFT], "tpot_ms": self.tpot, "latency_ms": self.times[LATENCY]}[metric]
        return found.bucket(q)


def read_server(after: str | Path, before: str | Path | None = None) -> ServerRun:
    """A run from a server's `/metrics` texts. Raises BadInput where one is no such text, where a time is missing, and
    where counters fell, so that the server started again in between."""
    last = _samples(open_source(after))
    first = {} if before is None else _samples(open_source(before))
    times = {}
    for name in (TTFT, LATENCY, *TPOT, QUEUE, PREFILL, INFERENCE):
        found = _histogram(last, first, name)
        if found is not None and found.count > 0:
            times[name] = found
    if _fell(last, first):
        raise BadInput(
            "its counters are below those of the text from before",
            where=str(after),
            remedy="Give the two texts of one server in their order; it may have started again in between.",
        )
    if not {TTFT, LATENCY} <= set(times) or not any(name in times for name in TPOT):
        raise BadInput(
            "no request finished between the two texts" if before else "no finished request in it",
            where=str(after),
            remedy="Save http://SERVER/metrics of vLLM before and after the run.",
        )
    counts = {ours: _difference(last, first, theirs) for ours, theirs in COUNTERS.items() if (theirs, "") in last}
    return ServerRun(times, counts, _facts(last), Path(after).name)


Samples = Mapping[tuple[str, str], float | dict[str, str]]
"""(name, edge of a bucket or empty) → value over all engines and models; of `CACHE` its labels."""


def _samples(source: Source) -> Samples:
    found: dict[tuple[str, str], Any] = {}
    size = 0
    with source.open() as stream:
        for line in stream:
            size += len(line)
            if size > MOST_BYTES:
                break
            told = _SAMPLE.fullmatch(line.decode("utf-8", "replace").rstrip("\n"))
            if told is None or told[1].endswith("_created"):
                continue
            labels = dict(_LABEL.findall(told[2] or ""))
            if told[1] == CACHE:
                found[CACHE, ""] = labels
                continue
            key = told[1], labels.get("le", "")
            found[key] = found.get(key, 0.0) + _number(told[3])
    if not found:
        raise BadInput(
            "holds no metrics of vLLM",
            where=source.name,
            remedy="Save http://SERVER/metrics (curl SERVER/metrics > after.txt).",
        )
    return found


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


def _difference(last: Samples, first: Samples, name: str, edge: str = "") -> float:
    after, before = last.get((name, edge), 0.0), first.get((name, edge), 0.0)
    return after - before if isinstance(after, float) and isinstance(before, float) else 0.0


def _fell(last: Samples, first: Samples) -> bool:
    names = [key for key in first if key[0].endswith(("_count", "_total")) and key in last]
    return any(_difference(last, first, *key) < 0 for key in names)


def _histogram(last: Samples, first: Samples, name: str) -> Histogram | None:
    """The difference of a histogram; None where the server has none of that name."""
    if (f"{name}_count", "") not in last:
        return None
    edges = sorted(
        (math.inf if edge == "+Inf" else _number(edge), edge) for key, edge in last if key == f"{name}_bucket" and edge
    )
    return Histogram(
        count=_difference(last, first, f"{name}_count"),
        total_ms=1e3 * _difference(last, first, f"{name}_sum"),
        edges_ms=[1e3 * value for value, _ in edges],
        reached=[_difference(last, first, f"{name}_bucket", edge) for _, edge in edges],
    )


def _facts(samples: Samples) -> dict[str, Any]:
    """Of the KV cache: block size, blocks, tokens, whether prefixes are kept."""
    labels = samples.get((CACHE, ""), {})
    if not isinstance(labels, dict):
        return {}
    named = {
        "block_size": "block_size",
        "num_gpu_blocks": "num_gpu_blocks",
        "kv_cache_size_tokens": "kv_capacity_tokens",
    }
    facts: dict[str, Any] = {
        ours: int(labels[theirs])
        for theirs, ours in named.items()
        if labels.get(theirs, "").isdecimal() and len(labels[theirs]) <= 12
    }
    if labels.get("enable_prefix_caching") in ("True", "False"):
        facts["enable_prefix_caching"] = labels["enable_prefix_caching"] == "True"
    return facts
