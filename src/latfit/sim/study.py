"""The literature's claims on batching over two paths, put to the test on a given machine.

All policies meet the same Poisson arrivals, at rates from a hundredth of what the main path alone serves to above it. A
limit on p99 of SLA_FACTOR times its time for one request says how much load each policy carries. Where there is only
one path the policies that need two are left out, and the study says so.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from latfit.scheduling.named import NEED_SIDE, Solve, default_cutoff_ms
from latfit.sim.grid import Grid, points_of
from latfit.sim.hardware import path_times
from latfit.sim.machine import System
from latfit.sim.simulate import Options
from latfit.sim.sweep import Point
from latfit.workload.arrivals import Poisson
from latfit.workload.load import OpenLoad

Run = Mapping[str, Any]

POLICIES = ("gpu-only", "fixed", "window", "marginal-cost", "three-stage", "cutoff", "split", "optimal")
LOADS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.05)
"""Shares of what the main path alone serves with its largest batch."""

SLA_FACTOR = 2.5

ONE_PATH = "It needs a second path, which this machine does not have."


@dataclass(frozen=True)
class Finding:
    """What is claimed, and what came out here."""

    claim: str
    found: str


def policy_points(system: System, options: Options, solve: Solve) -> list[Point]:
    """Every policy at every load; three-stage and cutoff also with half and twice their T_cut."""
    names = [name for name in POLICIES if system.side is not None or name not in NEED_SIDE]
    limit = system.main.rate_limit(system.main.largest)
    sla_ms = options.sla_ms if math.isfinite(options.sla_ms) else study_sla_ms(system)
    asked = replace(options, sla_ms=sla_ms)
    points = []
    for share in LOADS:
        rate = share * limit
        cutoff = default_cutoff_ms(rate, path_times(system))
        for name in names:
            varied = {"t_cut_ms": (cutoff / 2, cutoff, 2 * cutoff)} if name in NEED_SIDE and name != "split" else {}
            grid, load = Grid((name,), (rate,), varied), OpenLoad(Poisson(rate))
            # Near and above capacity there is no optimal table: every rule is as good, or none is.
            points += points_of(grid, system, load, asked, solve=solve, skipped=[])
    return points


def study_sla_ms(system: System) -> float:
    """The limit on p99 where none is given."""
    return SLA_FACTOR * float(system.main.typical_ms[1])


def findings(runs: Sequence[Run], system: System, sla_ms: float | None = None) -> list[Finding]:
    """The claims of the literature, each with what these runs say."""
    limit_ms = study_sla_ms(system) if sla_ms is None or math.isinf(sla_ms) else sla_ms
    there = {run["policy"] for run in runs}
    carried = {name: carried_rate(runs, name, limit_ms) for name in POLICIES if name in there}
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
    """The rate per second up to which the policy's p99 stays within the limit, on a straight line between the rates of
    the runs; 0 where it never does, the highest stable rate where it always does."""
    carried, tail = 0.0, 0.0
    for rate in _rates(runs):
        run = best_run(runs, policy, rate)
        if run is None:
            break
        p99 = float(run["latency_ms"]["p99"])
        if p99 > limit_ms:
            # Little load may be what is slow: a fixed batch waits to fill.
            if carried:
                return carried + (rate - carried) * (limit_ms - tail) / (p99 - tail)
            continue
        carried, tail = rate, p99
    return carried


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
        "Here it lowers p99 " + "; ".join(parts) + "." if parts else ONE_PATH,
    )


def _throughput(carried: Mapping[str, float], limit_ms: float) -> Finding:
    claim = "Three-stage batching raises throughput 1.4 times."
    if "three-stage" not in carried:
        return Finding(claim, ONE_PATH)
    alone, both = carried["gpu-only"], carried["three-stage"]
    gain = f"{both / alone:.2f} times as much" if alone > 0 else "against none by gpu-only"
    return Finding(
        claim,
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
