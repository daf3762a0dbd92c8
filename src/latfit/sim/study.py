"""The literature's claims on batching over two paths, put to the test on a given machine.

All policies meet the same Poisson arrivals, at rates from a twentieth of what the GPU alone serves to above it. A limit
on p99 of SLA_FACTOR times the GPU's time for one request says how much load each policy carries.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.scheduling.named import NEED_SIDE, Solve
from latfit.sim.grid import Grid, points_of
from latfit.sim.hardware import path_times
from latfit.sim.machine import System
from latfit.sim.simulate import Options
from latfit.sim.sweep import Point
from latfit.workload.arrivals import Poisson
from latfit.workload.load import OpenLoad

Run = Mapping[str, Any]

POLICIES = ("gpu-only", "fixed", "window", "marginal-cost", "three-stage", "cutoff", "split", "optimal")
LOADS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.05)
"""Shares of what the GPU alone serves with its largest batch."""

SLA_FACTOR = 2.5


@dataclass(frozen=True)
class Finding:
    """What is claimed, and what came out here."""

    claim: str
    found: str


def policy_points(system: System, options: Options, solve: Solve) -> list[Point]:
    """Every policy at every load; three-stage also with half and twice its T_cut. Raises WrongUsage for one path."""
    if system.side is None:
        raise WrongUsage(
            "the study compares policies over two execution paths, and there is only one",
            where="--study policies",
            remedy="Add a GPU and a CPU path (`latfit hardware add`), or quote them: --path gpu=8ms+0.05ms*256"
            " --path amx=exp:2ms.",
        )
    limit = system.main.rate_limit(system.main.largest)
    sla_ms = options.sla_ms if math.isfinite(options.sla_ms) else study_sla_ms(system)
    asked = replace(options, sla_ms=sla_ms)
    one = float(path_times(system).main[0])
    points = []
    for share in LOADS:
        rate = share * limit
        for name in POLICIES:
            varied = {"t_cut_ms": (one / 2, one, 2 * one)} if name in NEED_SIDE and name != "split" else {}
            try:
                points += points_of(Grid((name,), (rate,), varied), system, OpenLoad(Poisson(rate)), asked, solve=solve)
            except SlaOutOfReach:
                # Near and above its capacity there is no optimal table: every rule is as good, or none is.
                continue
    return points


def study_sla_ms(system: System) -> float:
    """The limit on p99 where none is given."""
    return SLA_FACTOR * float(system.main.typical_ms[1])


def findings(runs: Sequence[Run], system: System, sla_ms: float | None = None) -> list[Finding]:
    """The claims of the literature, each with what these runs say."""
    limit_ms = study_sla_ms(system) if sla_ms is None or math.isinf(sla_ms) else sla_ms
    carried = {name: carried_rate(runs, name, limit_ms) for name in POLICIES}
    return [
        _tail(runs),
        _throughput(carried, limit_ms),
        _fixed(runs),
        _greedy_is_enough(runs),
        Finding(
            "The most load with p99 within the limit goes to the policy that uses both paths.",
            f"Arrivals/s with p99 within {limit_ms:.3g} ms: "
            + ", ".join(f"{name} {rate:,.0f}" for name, rate in sorted(carried.items(), key=lambda item: -item[1]))
            + ".",
        ),
    ]


def best_run(runs: Sequence[Run], policy: str, rate_per_s: float) -> Run | None:
    """The stable run of a policy at a rate with the least p99."""
    own = [
        run
        for run in runs
        if run["policy"] == policy and run["stable"] and math.isclose(run["rate_per_s"], rate_per_s, rel_tol=1e-9)
    ]
    return min(own, key=lambda run: float(run["latency_ms"]["p99"]), default=None)


def carried_rate(runs: Sequence[Run], policy: str, limit_ms: float) -> float:
    """The highest rate per second of the runs at which the policy's p99 is within the limit; 0 where at none."""
    met = [
        run["rate_per_s"]
        for run in runs
        if run["policy"] == policy and run["stable"] and run["latency_ms"]["p99"] <= limit_ms
    ]
    return float(max(met, default=0.0))


def _rates(runs: Sequence[Run]) -> list[float]:
    return sorted({float(run["rate_per_s"]) for run in runs})


def _ratios(runs: Sequence[Run], slow: str, fast: str) -> list[tuple[float, float, float]]:
    """(p99 of `slow` over that of `fast`, both in ms the first of them) by rate, where both are stable."""
    found = []
    for rate in _rates(runs):
        a, b = best_run(runs, slow, rate), best_run(runs, fast, rate)
        if a is not None and b is not None:
            found.append((a["latency_ms"]["p99"] / b["latency_ms"]["p99"], a["latency_ms"]["p99"], rate))
    return found


def _tail(runs: Sequence[Run]) -> Finding:
    parts = []
    for slow in ("fixed", "gpu-only"):
        ratios = _ratios(runs, slow, "three-stage")
        if ratios:
            most, least = max(ratios), min(ratios)
            parts.append(
                f"against {slow} by a factor of {least[0]:.2f} (at {least[2]:,.0f}/s) to {most[0]:.2f}"
                f" ({most[1]:.3g} to {most[1] / most[0]:.3g} ms at {most[2]:,.0f}/s)"
            )
    return Finding(
        "Three-stage batching lowers p99 from 45 to 18 ms, a factor of 2.5.",
        "Here it changes p99 " + "; ".join(parts) + "." if parts else "No rate was stable under both.",
    )


def _throughput(carried: Mapping[str, float], limit_ms: float) -> Finding:
    alone, both = carried["gpu-only"], carried["three-stage"]
    gain = f"{both / alone:.2f} times as much" if alone > 0 else "against none by gpu-only"
    return Finding(
        "Three-stage batching raises throughput 1.4 times.",
        f"Within {limit_ms:.3g} ms at p99 three-stage carries {both:,.0f}/s and gpu-only {alone:,.0f}/s: {gain}.",
    )


def _fixed(runs: Sequence[Run]) -> Finding:
    rates = _rates(runs)
    ends = [best_run(runs, "fixed", rate) for rate in (rates[0], rates[-2])]
    texts = [
        f"{run['latency_ms']['p99']:.3g} ms at {run['rate_per_s']:,.0f}/s (batch {run['settings']['batch']})"
        for run in ends
        if run is not None
    ]
    return Finding(
        "The tail of GPU-only serving explodes under load.",
        "With a fixed batch p99 is " + ", ".join(texts) + "; " + _growth(runs, "gpu-only"),
    )


def _growth(runs: Sequence[Run], policy: str) -> str:
    stable = [run for rate in _rates(runs) if (run := best_run(runs, policy, rate)) is not None]
    if not stable:
        return f"{policy} was stable at no rate."
    low, high = stable[0], stable[-1]
    return (
        f"{policy} with greedy batches goes from {low['latency_ms']['p99']:.3g} ms at {low['rate_per_s']:,.0f}/s to"
        f" {high['latency_ms']['p99']:.3g} ms at {high['rate_per_s']:,.0f}/s."
    )


def _greedy_is_enough(runs: Sequence[Run]) -> Finding:
    worst: dict[str, tuple[float, float]] = {}
    for rate in _rates(runs):
        best = best_run(runs, "optimal", rate)
        for name in ("gpu-only", "marginal-cost", "window"):
            run = best_run(runs, name, rate)
            if best is not None and run is not None:
                excess = run["latency_ms"]["mean"] / best["latency_ms"]["mean"] - 1
                worst[name] = max(worst.get(name, (-math.inf, 0.0)), (excess, rate))
    text = ", ".join(f"{name} {100 * excess:+.2f} % (at {rate:,.0f}/s)" for name, (excess, rate) in worst.items())
    return Finding(
        "Waiting or not is what decides.",
        f"Worst excess of the mean over the optimal rule: {text}." if text else "No optimal table at these loads.",
    )
