"""ServerState: what a serving engine says of itself at a moment, by the same names whatever engine it is.

Counters and histograms only grow, so what happened in between two moments is their difference (`Interval`). A histogram
tells the mean exactly (sum / count) and every quantile as the bucket that it lies in, from the edge below to the one
above. Of engines beside each other (data parallel) counts and requests are sums, and the use of the KV cache is a mean.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from latfit.errors import BadInput
from latfit.inputs import LARGEST_WHOLE_NUMBER
from latfit.metrics.exposition import Sample, samples_in
from latfit.metrics.names import ENGINES, RANKS, REPLICAS, TRITON, Engine, Name, Names
from latfit.stats import IntArray
from latfit.trace import Source

MS_PER_S = 1e3
TOKENS = ("step_tokens", "prompt_lengths", "output_lengths")
"""Histograms of tokens; all others are of seconds, and in ms here."""

CACHE_INFO = "cache_config_info"
"""vLLM's gauge whose labels are the settings of its KV cache."""


@dataclass(frozen=True)
class Buckets:
    """A histogram: count and sum of what was seen (ms, or tokens), and how many are at or below each edge, rising, the
    last infinite."""

    count: float
    total: float
    edges: Sequence[float]
    reached: Sequence[float]

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count > 0 else math.nan

    def bucket(self, q: float) -> tuple[float, float]:
        """The edges between which a quantile lies; NaN where there is none."""
        if not self.count > 0:
            return math.nan, math.nan
        for i, reached in enumerate(self.reached):
            if reached >= q * self.count:
                return self.edges[i - 1] if i else 0.0, self.edges[i]
        return (self.edges[-1] if self.edges else 0.0), math.inf

    def share_within(self, limit: float) -> tuple[float, float]:
        """The least and the most share that can be at or below a limit, by the buckets around it; NaN where nothing was
        seen."""
        if not self.count > 0:
            return math.nan, math.nan
        below = max((n for edge, n in zip(self.edges, self.reached, strict=True) if edge <= limit), default=0.0)
        above = min((n for edge, n in zip(self.edges, self.reached, strict=True) if edge >= limit), default=self.count)
        return below / self.count, above / self.count

    def drawn(self, n: int, rng: np.random.Generator) -> IntArray:
        """Lengths (n,) of a token or more as it has them: each bucket evenly, then scaled to its mean; the last bucket
        goes to twice its lower edge. All of the mean where there are no buckets."""
        edges = np.array([0.0, *self.edges])
        counts = np.diff(np.array([0.0, *self.reached])).clip(0.0)
        top = edges[np.isfinite(edges)].max()
        if not (top > 0 and counts.sum() > 0):
            return np.full(n, max(1, round(self.mean)))
        edges = np.where(np.isfinite(edges), edges, 2 * top)
        which = rng.choice(len(counts), n, p=counts / counts.sum())
        lengths = edges[which] + (edges[which + 1] - edges[which]) * rng.random(n)
        return np.asarray(np.maximum(np.rint(lengths * self.mean / lengths.mean()), 1), dtype=np.int64)

    def since(self, before: "Buckets | None") -> "Buckets":
        """What came after an earlier state of it."""
        if before is None:
            return self
        known = dict(zip(before.edges, before.reached, strict=True))
        reached = [n - known.get(edge, 0.0) for edge, n in zip(self.edges, self.reached, strict=True)]
        return Buckets(self.count - before.count, self.total - before.total, self.edges, reached)


@dataclass(frozen=True)
class ServerState:
    """engine: its name.  running, waiting: requests; kv_usage: share of the KV cache; NaN where it does not tell.
    counters: tokens and requests so far.  histograms: times and lengths, see `names`.  facts: settings, by the names of
    a recorder's provenance.  engines: how many it sums up.  live: whether steps are counted as they are made."""

    engine: str
    running: float = math.nan
    waiting: float = math.nan
    kv_usage: float = math.nan
    counters: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, Buckets] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    engines: int = 1
    live: bool = True

    def fell_below(self, before: "ServerState") -> bool:
        """Whether a counter is below an earlier state's: the server started again."""
        counts = [(n, before.counters.get(name, 0.0)) for name, n in self.counters.items()]
        counts += [
            (h.count, before.histograms[name].count) for name, h in self.histograms.items() if name in before.histograms
        ]
        return any(now < then for now, then in counts)


def read_state(source: Source) -> ServerState:
    """The state that a saved `/metrics` text tells. Raises BadInput."""
    with source.open() as stream:
        return state_of(stream, source.name)


def state_of(lines: Iterable[bytes], name: str) -> ServerState:
    """The state that the lines of a `/metrics` text tell. Raises BadInput (under `name`) where no engine is known that
    publishes such."""
    found: dict[str, list[Sample]] = {}
    for sample in samples_in(lines):
        if not sample.name.endswith("_created"):
            found.setdefault(sample.name, []).append(sample)
    for engine in ENGINES:
        for prefix in engine.prefixes:
            own = {
                key.removeprefix(prefix): _one_of_ranks(each) for key, each in found.items() if key.startswith(prefix)
            }
            if own.keys() & known_names(engine):
                return _state(engine, _busiest_model(own) if engine is TRITON else own)
    raise BadInput(
        f"holds no metrics of {', '.join(each.name for each in ENGINES[:-1])} or {ENGINES[-1].name}",
        where=name,
        remedy="Save http://SERVER/metrics (curl SERVER/metrics > after.txt); SGLang needs --enable-metrics, llama.cpp"
        " --metrics.",
    )


Own = Mapping[str, Sequence[Sample]]


def known_names(engine: Engine) -> set[str]:
    """The names that are read of an engine."""
    kinds = [engine.gauges, engine.counters, engine.facts]
    single = {_name(each).name for kind in kinds for names in kind.values() for each in names}
    return single | {f"{_name(each).name}_count" for names in engine.histograms.values() for each in names}


def _one_of_ranks(samples: Sequence[Sample]) -> list[Sample]:
    """Without what processes of one engine publish again."""
    if not any(rank in samples[0].labels for rank in RANKS):
        return list(samples)
    first: dict[tuple[tuple[str, str], ...], Sample] = {}
    for sample in samples:
        first.setdefault(tuple(sorted(item for item in sample.labels.items() if item[0] not in RANKS)), sample)
    return list(first.values())


def _busiest_model(own: Own) -> Own:
    """Triton's models are systems of their own, ensembles made of others: the one that computed longest."""
    spent = {
        sample.labels.get("model", ""): sample.value for sample in own.get("inference_compute_infer_duration_us", ())
    }
    if len(spent) < 2:
        return own
    model = max(spent, key=lambda name: spent[name])
    return {
        name: kept for name, each in own.items() if (kept := [s for s in each if s.labels.get("model", model) == model])
    }


def _state(engine: Engine, own: Own) -> ServerState:
    gauges = {name: _values(own, names) for name, names in engine.gauges.items()}
    counters = {name: _values(own, names) for name, names in engine.counters.items()}
    histograms = {name: _buckets(own, names, name) for name, names in engine.histograms.items()}
    usage = gauges["kv_usage"]
    each_running = own.get(_first_name(engine, own), ())
    several = {tuple(sample.labels.get(label, "") for label in REPLICAS) for sample in each_running}
    return ServerState(
        engine.name,
        running=math.fsum(gauges["running"]) if gauges["running"] else math.nan,
        waiting=math.fsum(gauges["waiting"]) if gauges["waiting"] else math.nan,
        kv_usage=math.fsum(usage) / len(usage) if usage else math.nan,
        counters={name: math.fsum(values) for name, values in counters.items() if values} | _products(engine, own),
        histograms={name: seen for name, seen in histograms.items() if seen is not None},
        facts=_cache_facts(own) | _gauge_facts(engine.facts, own),
        engines=max(1, len(several)),
        live=engine.live,
    )


def _products(engine: Engine, own: Own) -> dict[str, float]:
    """Counters that are published as a mean beside what it is divided by."""
    found = {}
    for name, (mean, divisor) in engine.means.items():
        each = _values(own, (mean,)), _values(own, (divisor,))
        if all(each):
            found[name] = math.fsum(each[0]) * math.fsum(each[1])
    return found


def _first_name(engine: Engine, own: Own) -> str:
    """The name of the requests that run, which every engine tells apart."""
    return next((name for each in engine.gauges["running"] if (name := _name(each).name) in own), "")


def _name(name: Name | str) -> Name:
    return Name(name) if isinstance(name, str) else name


def _values(own: Own, names: Sequence[Name | str]) -> list[float]:
    """The samples of the first name that the text has, in our unit."""
    for each in map(_name, names):
        found = [
            sample.value * each.unit
            for sample in own.get(each.name, ())
            if all(sample.labels.get(label) == value for label, value in each.labels.items())
        ]
        if found:
            return found
    return []


def _buckets(own: Own, names: Sequence[Name | str], ours: str) -> Buckets | None:
    for each in map(_name, names):
        if f"{each.name}_count" not in own:
            continue
        unit = 1.0 if ours in TOKENS else MS_PER_S
        reached: dict[float, float] = {}
        for sample in own.get(f"{each.name}_bucket", ()):
            edge = _edge(sample.labels.get("le", ""))
            if not math.isnan(edge):
                reached[edge * unit] = reached.get(edge * unit, 0.0) + sample.value
        edges = sorted(reached)
        count, total = (
            math.fsum(sample.value for sample in own.get(f"{each.name}_{part}", ())) for part in ("count", "sum")
        )
        return Buckets(count, total * unit, edges, [reached[edge] for edge in edges])
    return None


def _edge(text: str) -> float:
    try:
        return math.inf if text == "+Inf" else float(text)
    except ValueError:
        return math.nan


def _gauge_facts(names: Names, own: Own) -> dict[str, Any]:
    """Settings that are gauges: whole numbers above zero, the smallest of several engines'."""
    found = {name: min(values) for name, each in names.items() if (values := _values(own, each))}
    return {name: int(value) for name, value in found.items() if 1 <= value <= LARGEST_WHOLE_NUMBER}


def _cache_facts(own: Own) -> dict[str, Any]:
    """Of vLLM's KV cache: block size, blocks, tokens, whether prefixes are kept."""
    labels = next((sample.labels for sample in own.get(CACHE_INFO, ())), {})
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
