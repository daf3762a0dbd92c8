"""What a simulated engine made of a load, as numbers for people and the JSON of `simulate`.

Times to first token, per output token and latencies are taken over requests, gaps between tokens (ITL) over tokens.
Jain's index of n users is (sum x)^2 / (n sum x^2), x being a user's mean tokens per ms of latency: 1 where all are
served alike, 1/n where one gets everything. Goodput counts requests that met all that was promised.

Means and percentiles are those of all requests of all replications together. Intervals come from what the independent
replications add to their error (Student's t): of a percentile x, with s the standard error of the share of requests at
or below x, they are read off at the shares p -+ t s. One replication has none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.simulation.engine.run import EngineRun
from latfit.simulation.policies.estimate import rises
from latfit.stats import FloatArray

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
STATISTICS = ("mean", *PERCENTILES)
STRETCHES = 60
"""Of a run, over which waits are averaged to see whether they rise."""


@dataclass(frozen=True)
class Promise:
    """What a request is promised, ms; infinite for nothing. A request's own deadline counts for its latency, too."""

    ttft_ms: float = math.inf
    tpot_ms: float = math.inf
    latency_ms: float = math.inf

    @property
    def given(self) -> bool:
        return any(math.isfinite(each) for each in (self.ttft_ms, self.tpot_ms, self.latency_ms))


def summary(
    runs: Sequence[EngineRun], promise: Promise = Promise(), warmup: float = 0.0, level: float = 0.95
) -> dict[str, Any]:
    """The entry of `simulate --json` for replications of one engine; times in ms, rates per s.

    warmup: share of the requests at the start of each run that is left out of what is said of requests.
    """
    warm = [int(warmup * len(run.requests)) for run in runs]
    singles = [_single(run, promise, left_out) for run, left_out in zip(runs, warm, strict=True)]
    found = {
        name: _joined([getattr(run, name)[left_out:] for run, left_out in zip(runs, warm, strict=True)], level)
        for name in ("latency_ms", "ttft_ms", "tpot_ms")
    }
    itl = [run.itl for run in runs]
    numbers = (
        "throughput_per_s",
        "output_tokens_per_s",
        "goodput_per_s",
        "slo_attainment",
        "fairness",
        "useful_share",
        "utilisation",
        "kv_usage",
        "queue",
    )
    means = {name: _mean([each[name] for each in singles]) for name in numbers}
    utilisation = means.pop("utilisation")
    counters = {
        name: int(sum(getattr(run.counters, name) for run in runs))
        for name in ("steps", "preemptions", "reused_tokens", "drafted_tokens", "accepted_tokens")
    }
    return {
        "requests": sum(len(run.requests) for run in runs),
        "replications": len(runs),
        **found,
        "itl_ms": {name: _mean([each[name] for each in itl]) for name in (*STATISTICS, "max")},
        **means,
        "utilisation": {"engine": utilisation},
        "batch_size": _batch_sizes(runs),
        "by_class": _by_class(runs, promise, warmup),
        **counters,
        "stable": not grows(runs),
    }


def _single(run: EngineRun, promise: Promise, warm: int) -> dict[str, Any]:
    span_s = run.makespan_ms / 1e3
    replicas = len(run.timelines)
    met = meets(run, promise)
    promised = promise.given or bool(np.isfinite(run.requests.deadline_ms).any())
    of_use = float((run.requests.prompt_tokens + run.requests.output_tokens - 1).sum())
    return {
        "throughput_per_s": len(run.requests) / span_s,
        "output_tokens_per_s": run.counters.generated_tokens / span_s,
        "goodput_per_s": float(met.sum()) / span_s,
        "slo_attainment": float(met[warm:].mean()) if promised else math.nan,
        "fairness": jain(run),
        "useful_share": of_use / run.counters.computed_tokens,
        "utilisation": run.busy_ms / (run.makespan_ms * replicas),
        "kv_usage": _over_time(run, "kv_usage") / replicas,
        "queue": _over_time(run, "waiting"),
    }


def _by_class(runs: Sequence[EngineRun], promise: Promise, warmup: float) -> list[dict[str, Any]]:
    """TTFT, latency and attainment of each class over all replications; nothing where there is one class."""
    kept = [np.arange(len(run.requests)) >= int(warmup * len(run.requests)) for run in runs]

    def of_all(columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate([column[rows] for column, rows in zip(columns, kept, strict=True)])

    classes = of_all([run.requests.class_id for run in runs])
    ttft, latency = of_all([run.ttft_ms for run in runs]), of_all([run.latency_ms for run in runs])
    met = of_all([meets(run, promise) for run in runs])
    found = [(int(each), classes == each) for each in np.unique(classes)]
    return [
        {
            "class": f"class {each}",
            "requests": int(rows.sum()),
            "ttft_ms": statistics(ttft[rows]),
            "latency_ms": statistics(latency[rows]),
            "slo_attainment": float(met[rows].mean()),
        }
        for each, rows in found
        if len(found) > 1
    ]


def meets(run: EngineRun, promise: Promise) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """True (n,) where a request got what it was promised, its own deadline included."""
    on_time = run.latency_ms <= np.minimum(run.requests.deadline_ms, promise.latency_ms)
    paced = ~(run.tpot_ms > promise.tpot_ms)
    return np.asarray(on_time & paced & (run.ttft_ms <= promise.ttft_ms))


def jain(run: EngineRun) -> float:
    """Jain's index over users; NaN where there is only one."""
    users, where = np.unique(run.requests.user_id, return_inverse=True)
    if len(users) < 2:
        return math.nan
    speed = run.requests.output_tokens / run.latency_ms
    of_user = np.bincount(where, speed) / np.bincount(where)
    return float(of_user.sum() ** 2 / (len(users) * np.sum(of_user**2)))


def grows(runs: Sequence[EngineRun]) -> bool:
    """Whether requests wait longer and longer, as they do where more come than the engine serves."""
    series = []
    for run in runs:
        if len(run.requests) < STRETCHES:
            return False
        wait = run.start_ms - run.requests.arrival_ms + run.busy_ms / run.counters.steps
        series.append(np.array([part.mean() for part in np.array_split(wait, STRETCHES)]))
    return rises(series, 0.0)


def statistics(values: FloatArray) -> dict[str, float]:
    """Mean and percentiles of the finite values; NaN where there is none."""
    kept = values[np.isfinite(values)]
    if not len(kept):
        return dict.fromkeys(STATISTICS, math.nan)
    quantiles = np.quantile(kept, list(PERCENTILES.values())).tolist()
    return dict(zip(STATISTICS, [float(kept.mean()), *quantiles], strict=True))


def _joined(times: Sequence[FloatArray], level: float) -> dict[str, Any]:
    """Statistics of all replications' times with their intervals [low, high], None for one replication."""
    from scipy.special import stdtrit

    kept = [each[np.isfinite(each)] for each in times]
    together, k = np.concatenate(kept), len(kept)
    found: dict[str, Any] = dict(statistics(together))
    spans: dict[str, Any] = {"level": level}
    t = float(stdtrit(k - 1, (1 + level) / 2)) if k > 1 else math.nan
    for name in STATISTICS:
        if k < 2 or not len(together):
            spans[name] = None
            continue
        share = PERCENTILES.get(name)
        values = [each if share is None else each <= found[name] for each in kept]
        sums, centre = np.array([each.sum() for each in values]), np.concatenate(values).mean()
        errors = (sums - centre * np.array([len(each) for each in kept])) / len(together)
        half = t * math.sqrt(k / (k - 1) * float(errors @ errors))
        if share is None:
            spans[name] = [found[name] - half, found[name] + half]
        else:
            ends = np.quantile(together, [max(share - half, 0.0), min(share + half, 1.0)])
            spans[name] = [min(float(ends[0]), found[name]), math.nan if share + half > 1 else float(ends[1])]
    return {**found, "ci": spans}


def _over_time(run: EngineRun, name: str) -> float:
    """The time average, over the time of steps, of a number of all replicas together."""
    total = 0.0
    for line in run.timelines:
        weights = line.busy * line.slice_ms
        if weights.sum() > 0:
            total += float(np.nansum(getattr(line, name) * weights) / weights.sum())
    return total


def _batch_sizes(runs: Sequence[EngineRun]) -> dict[str, float]:
    reached = np.cumsum(np.sum([run.batch_sizes for run in runs], axis=0))
    return {
        name: float(np.searchsorted(reached, math.ceil(share * reached[-1] - 1e-9)))
        for name, share in PERCENTILES.items()
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
