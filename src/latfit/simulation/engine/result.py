"""Summarise engine simulations: docs/theory/simulation.md, "Statistics of engine runs".

Token gaps (ITL) are statistics over tokens, other times over requests; replications are pooled.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.simulation.engine.replicas import Routing
from latfit.simulation.engine.run import EngineRun
from latfit.simulation.engine.settings import EngineSettings
from latfit.simulation.policies.estimate import rises
from latfit.simulation.summary import (
    LEVEL,
    PERCENTILES,
    STATISTICS,
    ClassOutcome,
    EngineSummary,
    Interval,
    size_percentiles,
    times_of,
)
from latfit.stats import FloatArray, student_quantile

MEANS = (
    "throughput_per_s", "output_tokens_per_s", "goodput_per_s", "slo_attainment", "fairness", "useful_share",
    "kv_usage", "queue", "replica_hours", "prefix_hit_rate",
)  # fmt: skip
"""Numbers of a run that are averaged over replications."""

COUNTERS = ("steps", "preemptions", "reused_tokens", "drafted_tokens", "accepted_tokens")
"""Numbers of a run that are summed over replications."""

LIMITS = ("max_num_seqs", "max_num_batched_tokens", "kv_blocks", "block_size")
LEAST_BOUNDED = 8  # replications that a Cantelli bound needs: with fewer their standard deviation is unusable
FULL = 0.9  # share of KV cache or busy time from which that resource is the bottleneck
FEWEST = 30  # requests of a run below which it shows nothing about capacity
BACKLOG = 0.25
HOUR_MS = 3.6e6
STRETCHES = 60  # stretches of a run over which waits are averaged to detect growth


@dataclass(frozen=True)
class Promise:
    """Limits for every request in ms, infinite for none; those of a request's class apply as well."""

    ttft_ms: float = math.inf
    tpot_ms: float = math.inf
    latency_ms: float = math.inf


@dataclass(frozen=True, eq=False, repr=False)
class EngineResult:
    settings: EngineSettings
    routing: Routing
    prefill_replicas: int  # engines that only prefill; 0 for none
    rate_per_s: float  # arrival rate; NaN if all requests arrive at once
    summary: EngineSummary
    seed: int
    first: EngineRun | None = None  # first replication; None in a sweep
    notes: Sequence[str] = ()
    users: int = 0  # users of a closed loop, else 0
    labels: Mapping[str, Any] = field(default_factory=dict)  # settings that a sweep varied

    @property
    def engine(self) -> str:
        return self.settings.batching

    @property
    def order(self) -> str:
        return self.settings.order.name

    @property
    def bottleneck(self) -> str | None:
        """Name the resource whose limit is reached, or the steps if the engine is overloaded; else None."""
        found, settings = self.summary, self.settings
        if found.preemptions or found.kv_usage > FULL:
            return f"the KV cache ({100 * found.kv_usage:.0f} % used, {found.preemptions:,} preemptions)"
        if found.batch_size["p90"] >= settings.max_num_seqs:
            return f"max_num_seqs = {settings.max_num_seqs:,}"
        return "the time of its steps" if found.utilisation > FULL and not found.stable else None

    @property
    def limits(self) -> dict[str, Any]:
        scaling = self.routing.scaling
        start_up = {} if scaling is None else {**scaling.to_json(), "start_up_s": self.routing.start_up_ms / 1e3}
        return {
            **{name: getattr(self.settings, name) for name in LIMITS},
            "replicas": self.routing.replicas,
            "route": self.routing.route,
            "prefill_replicas": self.prefill_replicas,
            **start_up,
        }

    def row(self) -> dict[str, Any]:
        """Return a flat row: times in ms, rates per second, shares from 0 to 1."""
        found = self.summary
        row: dict[str, Any] = {name: getattr(self, name) for name in ("engine", "order", "rate_per_s")}
        for metric in ("ttft", "tpot", "latency"):
            row |= {f"{metric}_{name}_ms": each.value for name, each in getattr(found, metric).items()}
        row |= {f"itl_{name}_ms": value for name, value in found.itl.items()}
        row |= {name: getattr(found, name) for name in (*MEANS, "utilisation", "requests", "replications", "stable")}
        row |= {name: getattr(found, name) for name in COUNTERS}
        users = {"users": self.users} if self.users else {}
        return {**row, **self.limits, **self.labels, **users, "seed": self.seed}

    def __repr__(self) -> str:
        state = "" if self.summary.stable else ", unstable"
        ttft, tpot, latency = self.summary.ttft.p99, self.summary.tpot.p99, self.summary.latency.p99
        p99 = f"ttft {ttft:.4g}, tpot {tpot:.4g}, latency {latency:.4g}"
        return f"EngineResult({self.engine}, {self.order}, {self.rate_per_s:.4g} req/s, p99 in ms: {p99}{state})"

    def to_json(self) -> dict[str, Any]:
        found = {
            "policy": self.engine,
            "engine": self.engine,
            "order": self.order,
            "rate_per_s": self.rate_per_s,
            **({"users": self.users} if self.users else {}),
            **self.summary.to_json(),
            "share": {"engine": 1.0},
            "settings": {**self.limits, **self.labels},
            "seed": self.seed,
            "notes": list(self.notes),
        }
        if self.first is not None and self.first.scaled is not None:
            changes = [{"t_s": t / 1e3, "serving": int(n), "asked_for": int(m)} for t, n, m in self.first.scaled.T]
            found["replicas_over_time"] = changes
        return found

    document = to_json


def summarise(
    runs: Sequence[EngineRun], promise: Promise = Promise(), warmup: float = 0.0, classes: Sequence[str] = ()
) -> EngineSummary:
    counted = [(run, counted_in(run, warmup)) for run in runs]
    times = {name: [getattr(run, f"{name}_ms")[rows] for run, rows in counted] for name in ("ttft", "tpot", "latency")}
    together = {name: np.concatenate(parts) for name, parts in times.items()}
    met = np.concatenate([np.where(limited(run, promise), meets(run, promise), np.nan)[rows] for run, rows in counted])
    class_id = np.concatenate([run.requests.class_id[rows] for run, rows in counted])
    several = np.unique(class_id)
    by_class: list[ClassOutcome] = []
    for each in several if len(several) > 1 else ():
        rows = class_id == each
        found: dict[str, Any] = {
            metric: {name: each.value for name, each in statistics([column[rows]]).items()}
            for metric, column in together.items()
        }
        name = (classes[each] if each < len(classes) else "") or f"class {each}"
        by_class.append(ClassOutcome(name, int(rows.sum()), **found, slo_attainment=float(met[rows].mean())))
    singles = [_numbers_of(run, rows, promise) for run, rows in counted]
    means: dict[str, Any] = {name: float(np.mean([each[name] for each in singles])) for name in MEANS}
    counts: dict[str, Any] = {name: int(sum(getattr(run.counters, name) for run in runs)) for name in COUNTERS}
    pooled: dict[str, Any] = {name: times_of(statistics(parts), only_known=True) for name, parts in times.items()}
    return EngineSummary(
        requests=sum(len(run.requests) for run in runs),
        replications=len(runs),
        **pooled,
        itl={name: float(np.mean([run.itl[name] for run in runs])) for name in (*STATISTICS, "max")},
        **means,
        busy={"engine": float(np.mean([each["utilisation"] for each in singles]))},
        batch_size=size_percentiles(np.sum([run.batch_sizes for run in runs], axis=0)),
        by_class=by_class,
        **counts,
        stable=bool(runs[0].users) or not grows(runs),
    )


def counted_in(run: EngineRun, warmup: float) -> slice:
    """Select the requests after the warm-up; of a closed loop those sent while all users were active."""
    end = len(run.requests)
    if run.users:
        end = max(int(np.searchsorted(run.requests.arrival_ms, _all_there_until(run), side="right")), 1)
    return slice(int(warmup * end), end)


def _all_there_until(run: EngineRun) -> float:
    """Return when the first user of a closed loop has no request left to send."""
    last = np.full(run.users, -math.inf)
    np.maximum.at(last, run.requests.user_id, run.last_ms)
    return float(last.min())


def _numbers_of(run: EngineRun, counted: slice, promise: Promise) -> dict[str, float]:
    asked, span_s, ended = run.requests, run.makespan_ms / 1e3, np.ones(len(run.requests), dtype=bool)
    if run.users:
        start, end = float(asked.arrival_ms[counted.start]), _all_there_until(run)
        ended = (run.last_ms > start) & (run.last_ms <= end)
        span_s = (end - start) / 1e3
    met = meets(run, promise)
    return {
        "throughput_per_s": float(ended.sum()) / span_s,
        "output_tokens_per_s": float(asked.output_tokens[ended].sum()) / span_s,
        "goodput_per_s": float(met[ended].sum()) / span_s,
        "slo_attainment": float(met[counted].mean()) if limited(run, promise).any() else math.nan,
        "fairness": jain(run),
        "useful_share": float((asked.prompt_tokens + asked.output_tokens - 1).sum()) / run.counters.computed_tokens,
        "utilisation": run.busy_ms / run.replica_ms,
        "kv_usage": _kv_usage(run),
        "queue": sum(_over_time(run, "waiting")),
        "replica_hours": run.replica_ms / HOUR_MS,
        "prefix_hit_rate": run.counters.cached_tokens / float(asked.prompt_tokens.sum()),
    }


def _limits_of(run: EngineRun, promise: Promise) -> list[FloatArray]:
    """Return the limits of requests (n,), those of their class included."""
    own = (run.requests.ttft_slo_ms, run.requests.tpot_slo_ms, run.requests.deadline_ms)
    return [np.minimum(each, limit) for each, limit in zip(own, vars(promise).values(), strict=True)]


def limited(run: EngineRun, promise: Promise) -> NDArray[np.bool_]:
    return np.asarray(np.isfinite(np.min(_limits_of(run, promise), axis=0)))


def meets(run: EngineRun, promise: Promise) -> NDArray[np.bool_]:
    """Mark the requests (n,) that met all their limits."""
    ttft, tpot, latency = _limits_of(run, promise)
    return (run.ttft_ms <= ttft) & ~(run.tpot_ms > tpot) & (run.latency_ms <= latency)


def jain(run: EngineRun) -> float:
    """Return Jain's fairness index over users."""
    users, where = np.unique(run.requests.user_id, return_inverse=True)
    if len(users) < 2:
        return math.nan
    speed = run.requests.output_tokens / run.latency_ms
    of_user = np.bincount(where, speed) / np.bincount(where)
    return float(of_user.sum() ** 2 / (len(users) * np.sum(of_user**2)))


def grows(runs: Sequence[EngineRun]) -> bool:
    """Return whether waits grow without bound."""
    series = []
    for run in runs:
        if len(run.requests) < STRETCHES:
            return False
        wait = run.served_from_ms - run.requests.arrival_ms + run.busy_ms / run.counters.steps
        starts = np.linspace(0, len(wait), STRETCHES, endpoint=False).astype(int)
        series.append(np.add.reduceat(wait, starts) / np.diff(starts, append=len(wait)))
    return rises(series, 0.0)


def backlogged(runs: Sequence[EngineRun]) -> bool:
    shares = [
        float(np.mean(run.served_from_ms > run.requests.arrival_ms.max()))
        for run in runs
        if len(run.requests) >= FEWEST
    ]
    return bool(shares) and sum(shares) / len(shares) > BACKLOG


def statistics(times: Sequence[FloatArray]) -> dict[str, Interval]:
    finite = [each[np.isfinite(each)] for each in times]
    return {name: interval_of(finite, PERCENTILES.get(name)) for name in STATISTICS}


def interval_of(times: Sequence[FloatArray], share: float | None = None) -> Interval:
    """Return the mean, or the quantile `share`, of pooled numbers with its interval, NaN for one run."""
    together, k = np.concatenate(times), len(times)
    if not len(together):
        return Interval(math.nan, math.nan, math.nan)
    value = float(together.mean() if share is None else np.quantile(together, share))
    if k < 2:
        return Interval(value, math.nan, math.nan)
    values = [each if share is None else each <= value for each in times]
    sums, centre = np.array([each.sum() for each in values]), np.concatenate(values).mean()
    errors = (sums - centre * np.array([len(each) for each in times])) / len(together)
    half = student_quantile(k - 1, (1 + LEVEL) / 2) * math.sqrt(k / (k - 1) * float(errors @ errors))
    if share is None:
        return Interval(value, value - half, value + half)
    ends = np.quantile(together, [max(share - half, 0.0), min(share + half, 1.0)])
    return Interval(value, min(float(ends[0]), value), math.nan if share + half > 1 else float(ends[1]))


def bound_of(times: Sequence[FloatArray], share: float) -> float:
    """Bound a quantile from above by Cantelli's inequality; NaN with few replications."""
    kept = [each for each in times if len(each)]
    if len(kept) < LEAST_BOUNDED:
        return math.nan
    found = np.array([np.quantile(each, (1 + share) / 2) for each in kept])
    return float(found.mean() + math.sqrt(2 / (1 - share) - 1) * found.std(ddof=1))


def _over_time(run: EngineRun, name: str) -> list[float]:
    """Average a number of each replica over the time of its steps."""
    spent = [line.busy * line.slice_ms for line in run.timelines]
    values = [getattr(line, name) for line in run.timelines]
    return [float(np.nansum(v * w) / w.sum()) if w.sum() > 0 else 0.0 for v, w in zip(values, spent, strict=True)]


def _kv_usage(run: EngineRun) -> float:
    """Return the mean share of KV cache in use per replica; those that come and go count while they make steps."""
    usage = _over_time(run, "kv_usage")
    if run.scaled is None:
        return sum(usage) / len(usage)
    return float(np.average(usage, weights=[float((line.busy * line.slice_ms).sum()) for line in run.timelines]))
