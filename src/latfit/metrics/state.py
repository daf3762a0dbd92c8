"""The metrics of a serving engine at a moment, by the same names for every engine (`latfit.engines`).

Counts of data-parallel engines are summed, the use of their KV caches is averaged.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from latfit.engines import ENGINES, Engine, Name, describe_engines
from latfit.errors import BadInput
from latfit.inputs import LARGEST_NUMBER, LARGEST_WHOLE_NUMBER
from latfit.stats import IntArray
from latfit.trace import Source

MS_PER_S = 1e3
MAX_BYTES = 1 << 26
TOKENS = ("step_tokens", "prompt_lengths", "output_lengths")
"""Histograms of tokens; all others are of seconds, and in ms here."""
RANKS = ("tp_rank", "pp_rank", "moe_ep_rank")
"""Labels of processes that compute one engine's steps together and publish the same."""
REPLICAS = ("engine", "dp_rank", "model_name")  # labels of data-parallel engines, which add up

# A line of Prometheus's text format: https://prometheus.io/docs/instrumenting/exposition_formats
_SAMPLE = re.compile(
    r"([a-zA-Z_:][a-zA-Z0-9_:]{0,150})(?:\{(.{0,20000}?)\})?\s+([-+]?[\d.eEinfINFaN+-]{1,40})(?:\s+-?\d+)?(?:\s+#.*)?\s*"
)
_LABEL = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*)"')


class Sample(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


Own = Mapping[str, Sequence[Sample]]  # samples of one engine by name, without its prefix


@dataclass(frozen=True)
class Buckets:
    """A histogram in ms or tokens: count, sum, and how many values are at or below each edge, the last infinite."""

    count: float
    total: float
    edges: Sequence[float]
    reached: Sequence[float]

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count > 0 else math.nan

    def bucket(self, q: float) -> tuple[float, float]:
        """Return the edges between which a quantile lies; NaN without values."""
        if not self.count > 0:
            return math.nan, math.nan
        edges = [0.0, *self.edges, math.inf]
        place = next((i for i, reached in enumerate(self.reached) if reached >= q * self.count), len(self.edges))
        return edges[place], edges[place + 1]

    def share_within(self, limit: float) -> tuple[float, float]:
        """Return the least and the most share that can be at or below a limit; NaN without values."""
        if not self.count > 0:
            return math.nan, math.nan
        pairs = list(zip(self.edges, self.reached, strict=True))
        below = max((n for edge, n in pairs if edge <= limit), default=0.0)
        above = min((n for edge, n in pairs if edge >= limit), default=self.count)
        return below / self.count, above / self.count

    def drawn(self, n: int, rng: np.random.Generator) -> IntArray:
        """Draw lengths (n,) of a token or more, uniform within each bucket, scaled to the mean."""
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
        if before is None:
            return self
        known = dict(zip(before.edges, before.reached, strict=True))
        reached = [n - known.get(edge, 0.0) for edge, n in zip(self.edges, self.reached, strict=True)]
        return Buckets(self.count - before.count, self.total - before.total, self.edges, reached)


@dataclass(frozen=True)
class ServerState:
    """A server at a moment: requests and share of the KV cache (NaN if unknown), the rest by names of `latfit.engines`.

    engines: how many it sums up; live: whether steps are counted as they are made.
    """

    engine: str
    running: float = math.nan
    waiting: float = math.nan
    kv_usage: float = math.nan
    counters: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, Buckets] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    engines: int = 1
    live: bool = True
    started_s: float | None = None  # creation of the counters in seconds since 1970

    def fell_below(self, before: "ServerState") -> bool:
        """Return whether a counter is below an earlier state's: the server restarted."""
        now, then = ({**s.counters, **{f"{n} ": h.count for n, h in s.histograms.items()}} for s in (self, before))
        return any(value < then.get(name, 0.0) for name, value in now.items())


def read_state(source: Source) -> ServerState:
    """Read a saved `/metrics` text. Raises BadInput."""
    with source.open() as stream:
        return state_of(stream, source.name)


def state_of(lines: Iterable[bytes], name: str) -> ServerState:
    found: dict[str, list[Sample]] = {}
    size = 0
    for line in lines:
        size += len(line)
        match = _SAMPLE.fullmatch(line.decode("utf-8", "replace").rstrip("\r\n")) if size <= MAX_BYTES else None
        if match and not line.startswith(b"#"):
            value = _number(match[3])
            value = value if abs(value) <= LARGEST_NUMBER else 0.0  # also for NaN
            found.setdefault(match[1], []).append(Sample(match[1], dict(_LABEL.findall(match[2] or "")), value))
    for engine in ENGINES:
        for prefix in engine.prefixes:
            own = {
                key.removeprefix(prefix): _one_of_ranks(each) for key, each in found.items() if key.startswith(prefix)
            }
            if own.keys() & engine.metric_names():
                return _state(engine, _busiest_model(own, engine.busiest_by))
    raise BadInput(
        f"holds no metrics of {', '.join(each.name for each in ENGINES[:-1])} or {ENGINES[-1].name}",
        where=name,
        remedy=f"Save http://SERVER/metrics (curl SERVER/metrics > after.txt) of {describe_engines()}.",
    )


def _one_of_ranks(samples: Sequence[Sample]) -> list[Sample]:
    """Keep one sample of those that the processes of one engine repeat."""
    first: dict[Any, Sample] = {}
    for number, sample in enumerate(samples):
        rest = frozenset(item for item in sample.labels.items() if item[0] not in RANKS)
        first.setdefault(rest if len(rest) < len(sample.labels) else number, sample)
    return list(first.values())


def _busiest_model(own: Own, by: str) -> Own:
    """Keep the model that computed longest: Triton's are systems of their own, ensembles consist of others."""
    spent = {sample.labels.get("model", ""): sample.value for sample in own.get(by, ())}
    if len(spent) < 2:
        return own
    model = max(spent, key=lambda name: spent[name])
    kept = {name: [s for s in each if s.labels.get("model", model) == model] for name, each in own.items()}
    return {name: each for name, each in kept.items() if each}


def _state(engine: Engine, own: Own) -> ServerState:
    counters = {name: math.fsum(found) for name, names in engine.counters.items() if (found := _values(own, names))}
    for name, (mean, divisor) in engine.means.items():
        each = _values(own, (mean,)), _values(own, (divisor,))
        if all(each):
            counters[name] = math.fsum(each[0]) * math.fsum(each[1])
    running, waiting, usage = (_values(own, engine.gauges[name]) for name in ("running", "waiting", "kv_usage"))
    histograms = {name: _buckets(own, names, name) for name, names in engine.histograms.items()}
    gauges = next((own[name.name] for name in engine.gauges["running"] if name.name in own), ())
    replicas = {tuple(sample.labels.get(label, "") for label in REPLICAS) for sample in gauges}
    return ServerState(
        engine.name,
        running=math.fsum(running) if running else math.nan,
        waiting=math.fsum(waiting) if waiting else math.nan,
        kv_usage=math.fsum(usage) / len(usage) if usage else math.nan,
        counters=counters,
        histograms={name: found for name, found in histograms.items() if found is not None},
        facts=_facts(engine, own),
        engines=max(1, len(replicas)),
        live=engine.live,
        started_s=min(
            (s.value for name in own if name.endswith("_created") for s in own[name] if s.value), default=None
        ),
    )


def _values(own: Own, names: Sequence[Name]) -> list[float]:
    found = (
        [s.value * name.unit for s in own.get(name.name, ()) if name.labels.items() <= s.labels.items()]
        for name in names
    )
    return next(filter(None, found), [])


def _buckets(own: Own, names: Sequence[Name], ours: str) -> Buckets | None:
    name = next((each.name for each in names if f"{each.name}_count" in own), None)
    if name is None:
        return None
    unit = 1.0 if ours in TOKENS else MS_PER_S
    reached: dict[float, float] = {}
    for sample in own.get(f"{name}_bucket", ()):
        edge = unit * _number(sample.labels.get("le", ""))
        if not math.isnan(edge):
            reached[edge] = reached.get(edge, 0.0) + sample.value
    count, total = (math.fsum(sample.value for sample in own.get(f"{name}_{part}", ())) for part in ("count", "sum"))
    edges = sorted(reached)
    return Buckets(count, total * unit, edges, [reached[edge] for edge in edges])


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _facts(engine: Engine, own: Own) -> dict[str, Any]:
    """Return settings from gauges (whole numbers above zero, the smallest of several engines) and labels."""
    gauge, names = engine.info
    labels = next((sample.labels for sample in own.get(gauge, ())), {})
    facts: dict[str, Any] = {}
    for theirs, ours in names.items():
        text = labels.get(theirs, "")
        if text in ("True", "False"):
            facts[ours] = text == "True"
        elif text.isdecimal() and len(text) <= 12:
            facts[ours] = int(text)
    found = {name: min(values) for name, each in engine.facts.items() if (values := _values(own, each))}
    return facts | {name: int(value) for name, value in found.items() if 1 <= value <= LARGEST_WHOLE_NUMBER}
