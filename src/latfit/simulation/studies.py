"""Test claims of the literature on a given machine: batching policies on two paths, and serving engines.

Policies meet the same Poisson arrivals at several loads; a p99 limit of SLA_FACTOR × T(1) determines the capacity of
each. Engines compare static with continuous batching, and scheduling policies above capacity. Usage and results:
docs/concepts/simulation.md; settings: docs/theory/simulation.md, "Settings of the study".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from latfit.policies import POLICIES, Solve, default_cutoff_ms
from latfit.simulation.engine.result import summarise
from latfit.simulation.engine.run import serve
from latfit.simulation.engine.settings import EngineSettings, Order
from latfit.simulation.engine.step_cost import StepCosts, linear_costs
from latfit.simulation.policies.result import SimResult
from latfit.simulation.policies.run import Options
from latfit.simulation.policies.service import ServicePath, System, path_times
from latfit.simulation.policies.sweep import Grid, Point, points_of
from latfit.simulation.summary import EngineSummary
from latfit.stats import FloatArray
from latfit.workload import OpenLoad, Poisson, Requests, make_requests

STUDIED = ("gpu-only", "fixed", "window", "marginal-cost", "three-stage", "cutoff", "split", "optimal")
LOADS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.05)
"""Arrival rates as shares of the main path's capacity."""

SLA_FACTOR = 2.5

ONE_PATH = "needs a second path, which this machine does not have"


@dataclass(frozen=True)
class Finding:
    """A claim and the result on this machine."""

    claim: str
    found: str


def policy_points(system: System, options: Options, solve: Solve) -> list[Point]:
    """Return all policies at all loads; policies with a T_cut also at half and twice the default."""
    names = [name for name in STUDIED if system.side is not None or not POLICIES[name].needs_side]
    limit = system.main.rate_limit(system.main.largest)
    sla_ms = options.sla_ms if math.isfinite(options.sla_ms) else study_sla_ms(system)
    asked = replace(options, sla_ms=sla_ms)
    points = []
    for share in LOADS:
        rate = share * limit
        cutoff = default_cutoff_ms(rate, path_times(system))
        for name in names:
            varied = {"t_cut_ms": (cutoff / 2, cutoff, 2 * cutoff)} if "t_cut_ms" in POLICIES[name].settings else {}
            grid, load = Grid((name,), (rate,), varied), OpenLoad(Poisson(rate))
            # Near and above capacity no optimal table exists: skip these points.
            points += points_of(grid, system, load, asked, solve=solve, skipped=[])
    return points


def study_sla_ms(system: System) -> float:
    """Return the default limit on p99, in ms."""
    return SLA_FACTOR * float(system.main.typical_ms[1])


def findings(runs: Sequence[SimResult], system: System, sla_ms: float | None = None) -> list[Finding]:
    """Return the claims of the literature with the results of these runs."""
    limit_ms = study_sla_ms(system) if sla_ms is None or math.isinf(sla_ms) else sla_ms
    names = [name for name in STUDIED if name in {run.policy for run in runs}]
    carried = {name: carried_rate(runs, name, limit_ms) for name in names}
    most = max(carried, key=lambda name: carried[name])
    alone, both = carried.get("gpu-only", 0.0), carried.get("three-stage")
    tails = {slow: _ratios(runs, slow, "three-stage") for slow in ("fixed", "gpu-only")}
    excess = _ratios(runs, "gpu-only", "optimal", "mean")
    return [
        Finding(
            "three-stage lowers p99 2.5x",
            ", ".join(f"{min(r):.2f} to {max(r):.2f}x vs {slow}" for slow, r in tails.items() if r) or ONE_PATH,
        ),
        Finding(
            "three-stage raises throughput 1.4x",
            ONE_PATH if both is None else f"{both / alone:.2f}x" if alone > 0 else "gpu-only carries none",
        ),
        Finding("gpu-only tails explode under load", _tails(runs, "gpu-only")),
        Finding(
            "waiting or not decides",
            f"gpu-only {100 * (max(excess) - 1):+.2g} % over optimal" if excess else "no optimal table at these loads",
        ),
        Finding(
            "both paths carry the most load within the SLA",
            f"most: {most}, {carried[most]:,.0f}/s",
        ),
    ]


def best_run(runs: Sequence[SimResult], policy: str, rate_per_s: float) -> SimResult | None:
    """Return the stable run of a policy at a rate with the lowest p99."""
    own = [
        run
        for run in runs
        if run.policy == policy and run.stable and math.isclose(run.rate_per_s, rate_per_s, rel_tol=1e-9)
    ]
    return min(own, key=lambda run: run.latency["p99"].value, default=None)


def carried_rate(runs: Sequence[SimResult], policy: str, limit_ms: float) -> float:
    """Return the capacity of a policy under a p99 limit, per second.

    Interpolates between the rates of the runs; 0 if the limit is never met, the highest stable rate if it always is.
    """
    carried, tail = 0.0, 0.0
    for rate in _rates(runs):
        run = best_run(runs, policy, rate)
        if run is None:
            break
        p99 = run.latency["p99"].value
        if p99 > limit_ms:
            # p99 may be too long at low load only: a fixed batch waits to fill.
            if carried:
                return carried + (rate - carried) * (limit_ms - tail) / (p99 - tail)
            continue
        carried, tail = rate, p99
    return carried


def _rates(runs: Sequence[SimResult]) -> list[float]:
    return sorted({run.rate_per_s for run in runs})


def _ratios(runs: Sequence[SimResult], slow: str, fast: str, statistic: str = "p99") -> list[float]:
    """Return p99 or another statistic of `slow` over that of `fast` at each rate where both are stable."""
    pairs = [(best_run(runs, slow, rate), best_run(runs, fast, rate)) for rate in _rates(runs)]
    return [
        a.latency[statistic].value / b.latency[statistic].value for a, b in pairs if a is not None and b is not None
    ]


def _tails(runs: Sequence[SimResult], policy: str) -> str:
    found = [run.latency["p99"].value for rate in _rates(runs) if (run := best_run(runs, policy, rate))]
    if not found:
        return "stable at no rate"
    return f"p99 {found[0]:.3g} to {found[-1]:.3g} ms"


REQUESTS = 3000
PROMPT_LOG_MEAN, PROMPT_LOG_SD, OUTPUT_MEAN = 5.0, 1.0, 150
SEQUENCES = 32
USERS = 10
LOAD = 1.05
PROMISE = 2.5
PADDED_EXAMPLE = (100, 500, 50)

ORDERS = (Order("fcfs"), Order("sjf"), Order("sjf", length_error=0.8), Order("slo"), Order("fair"))


@dataclass(frozen=True)
class StudyRun:
    """An engine of the study.

    Attributes
    ----------
    rate_per_s
        Arrival rate; None if all requests are present at the start.
    heavy_ms, others_ms
        Mean latency of the user who sends half of the requests, and of the others; None with one user.
    """

    name: str
    rate_per_s: float | None
    summary: EngineSummary
    heavy_ms: float | None = None
    others_ms: float | None = None

    def to_json(self) -> dict[str, Any]:
        users = (
            {}
            if self.heavy_ms is None
            else {
                "mean_of_heavy_user_ms": self.heavy_ms,
                "mean_of_others_ms": self.others_ms,
            }
        )
        return {
            "policy": self.name,
            "rate_per_s": self.rate_per_s,
            "settings": {},
            **self.summary.to_json(),
            **users,
        }


@dataclass(frozen=True, eq=False)
class ServingStudy:
    """Engine runs and the claims they test."""

    runs: Sequence[StudyRun]
    findings: Sequence[Finding]


def serving_study(path: ServicePath, seed: int = 0) -> ServingStudy:
    """Run engines whose steps cost as much as the path's batches."""
    times = path.typical_ms
    alpha = max(0.0, float(times[-1] - times[1]) / max(1, path.largest - 1))
    costs = linear_costs(max(float(times[1]) - alpha, 1e-6), 0.0, alpha)
    together = _requests(np.zeros(REQUESTS), seed, float("inf"))
    batching = {
        name: _run(f"{name} batching", together, costs, _settings(name), seed)
        for name in ("static", "continuous", "chunked-prefill")
    }
    rate = LOAD * REQUESTS / _makespan_ms(together, costs, seed)
    arrivals = np.cumsum(np.random.default_rng([seed, 2]).exponential(1 / rate, REQUESTS))
    promise_ms = PROMISE * OUTPUT_MEAN * float(times[min(SEQUENCES, path.largest)])
    offered = _requests(arrivals, seed, promise_ms)
    ordered = [
        _run(_order_name(order), offered, costs, replace(_settings("chunked-prefill"), order=order), seed)
        for order in ORDERS
    ]
    example = make_requests(np.zeros(3), 1, np.array(PADDED_EXAMPLE))
    padded = _run("padded example", example, costs, _settings("static"), seed)
    found = [_padding(padded), _continuous(batching), *_orders(ordered)]
    return ServingStudy([*batching.values(), padded, *ordered], found)


def _requests(arrivals: FloatArray, seed: int, promise_ms: float) -> Requests:
    """Make requests with the same lengths, users and classes for any arrivals."""
    n, rng = len(arrivals), np.random.default_rng([seed, 1])
    prompt = np.maximum(1, np.rint(np.exp(rng.normal(PROMPT_LOG_MEAN, PROMPT_LOG_SD, n)))).astype(np.int64)
    output = rng.geometric(1 / OUTPUT_MEAN, n)
    user = np.where(rng.random(n) < 0.5, 0, rng.integers(1, USERS, n))
    urgent = rng.random(n) < 0.3
    deadline = np.where(urgent, promise_ms, np.inf)
    return make_requests(arrivals, prompt, output, class_id=~urgent, user_id=user, deadline_ms=deadline)


def _settings(batching: str) -> EngineSettings:
    """Make settings with enough KV cache for all requests, so that only batching differs."""
    return EngineSettings(batching=batching, max_num_seqs=SEQUENCES, kv_blocks=200_000, padded_graphs=False)


def _run(name: str, requests: Requests, costs: StepCosts, settings: EngineSettings, seed: int) -> StudyRun:
    run = serve(requests, costs, settings, seed)
    rate = None if requests.arrival_ms[-1] == 0 else requests.rate * 1000
    heavy = requests.user_id == 0
    if not heavy.any() or heavy.all():
        return StudyRun(name, rate, summarise([run]))
    means = (float(run.latency_ms[users].mean()) for users in (heavy, ~heavy))
    return StudyRun(name, rate, summarise([run]), *means)


def _makespan_ms(requests: Requests, costs: StepCosts, seed: int) -> float:
    return float(serve(requests, costs, _settings("chunked-prefill"), seed).last_ms.max())


def _order_name(order: Order) -> str:
    return f"{order.name} (length error {order.length_error:g})" if order.length_error else order.name


def _padding(run: StudyRun) -> Finding:
    return Finding(
        "a static batch (100, 500, 50) is 43.3 % efficient",
        f"{100 * run.summary.useful_share:.1f} %",
    )


def _continuous(batching: Mapping[str, StudyRun]) -> Finding:
    static = batching["static"].summary
    gains = [
        f"{run.summary.output_tokens_per_s / static.output_tokens_per_s:.2f}x {name}"
        for name, run in batching.items()
        if name != "static"
    ]
    return Finding("continuous batching: 2.5x the throughput", ", ".join(gains))


def _orders(runs: Sequence[StudyRun]) -> list[Finding]:
    found = {run.name: run for run in runs}
    latency = {name: run.summary.latency for name, run in found.items()}
    means = {name: each["mean"].value / latency["fcfs"]["mean"].value for name, each in latency.items()}
    tail = latency["sjf"]["p99"].value / latency["fcfs"]["p99"].value
    met = {name: f"{100 * run.summary.slo_attainment:.0f} %" for name, run in found.items()}
    others = {name: f"{(run.others_ms or math.nan) / 1e3:.2f}" for name, run in found.items()}
    return [
        Finding(
            "shortest job first is faster",
            f"mean {means['sjf']:.2f}x, p99 {tail:.2f}x",
        ),
        Finding("SLO-aware order meets more deadlines", f"{met['slo']} vs {met['fcfs']}"),
        Finding("fair order protects from a heavy user", f"others' mean {others['fcfs']} to {others['fair']} s"),
    ]
