"""Claims of the literature on batching policies: docs/theory/simulation.md, "Settings of the study"."""

import math
from collections.abc import Sequence
from dataclasses import replace

from latfit.policies import POLICIES, Solve, default_cutoff_ms
from latfit.simulation.policies.result import SimResult
from latfit.simulation.policies.run import Options, Point, points_of
from latfit.simulation.policies.service import System, path_times
from latfit.workload import OpenLoad, Poisson

STUDIED = ("gpu-only", "fixed", "window", "marginal-cost", "three-stage", "cutoff", "split", "optimal")
LOADS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.05)  # arrival rates as shares of the main path's capacity

SLA_FACTOR = 2.5
ONE_PATH = "needs a second path, which this machine does not have"


def study_points(system: System, options: Options, solve: Solve) -> list[Point]:
    """Return all policies at all loads; policies with a T_cut also at half and twice the default."""
    names = [name for name in STUDIED if system.side is not None or not POLICIES[name].needs_side]
    if math.isinf(options.sla_ms):
        options = replace(options, sla_ms=SLA_FACTOR * float(system.main.typical_ms[1]))
    points = []
    for share in LOADS:
        rate = share * system.main.rate_limit(system.main.largest)
        cutoff, load = default_cutoff_ms(rate, path_times(system)), OpenLoad(Poisson(rate))
        for name in names:
            varied = {"t_cut_ms": (cutoff / 2, cutoff, 2 * cutoff)} if "t_cut_ms" in POLICIES[name].settings else {}
            # Near and above capacity no optimal table exists: skip these points.
            points += points_of([name], system, load, options, varied=varied, solve=solve, skipped=[])
    return points


def findings(runs: Sequence[SimResult], limit_ms: float) -> list[tuple[str, str]]:
    best = best_runs(runs)
    names = list(dict.fromkeys(run.policy for run in runs))
    capacity = {name: capacity_of(best, name, limit_ms) for name in names}
    most, alone, both = max(names, key=lambda name: capacity[name]), capacity["gpu-only"], capacity.get("three-stage")

    def ratios(slow: str, fast: str, statistic: str = "p99") -> list[float]:
        """Return a statistic of `slow` over that of `fast` at each rate at which both are stable."""
        pairs = [(run, best[fast, rate]) for (name, rate), run in best.items() if name == slow and (fast, rate) in best]
        return [a.latency[statistic].value / b.latency[statistic].value for a, b in pairs]

    tails = {slow: ratios(slow, "three-stage") for slow in ("fixed", "gpu-only")}
    excess = ratios("gpu-only", "optimal", "mean")
    p99 = [run.latency["p99"].value for (name, _), run in sorted(best.items()) if name == "gpu-only"]
    return [
        (
            "three-stage lowers p99 2.5x",
            ", ".join(f"{min(r):.2f} to {max(r):.2f}x vs {slow}" for slow, r in tails.items() if r) or ONE_PATH,
        ),
        (
            "three-stage raises throughput 1.4x",
            ONE_PATH if both is None else f"{both / alone:.2f}x" if alone > 0 else "gpu-only carries none",
        ),
        (
            "gpu-only tails explode under load",
            f"p99 {p99[0]:.3g} to {p99[-1]:.3g} ms" if p99 else "stable at no rate",
        ),
        (
            "waiting or not decides",
            f"gpu-only {100 * (max(excess) - 1):+.2g} % over optimal" if excess else "no optimal table at these loads",
        ),
        ("both paths carry the most load within the SLA", f"most: {most}, {capacity[most]:,.0f}/s"),
    ]


def best_runs(runs: Sequence[SimResult]) -> dict[tuple[str, float], SimResult]:
    found: dict[tuple[str, float], SimResult] = {}
    for run in runs:
        key = (run.policy, run.rate_per_s)
        if run.stable and (key not in found or run.latency["p99"].value < found[key].latency["p99"].value):
            found[key] = run
    return found


def capacity_of(best: dict[tuple[str, float], SimResult], policy: str, limit_ms: float) -> float:
    """Return the highest rate per second whose p99 is within a limit, interpolated between runs; 0 for none."""
    capacity, p99 = 0.0, math.nan
    for (name, rate), run in sorted(best.items()):
        tail = run.latency["p99"].value
        if name != policy or (tail > limit_ms and not capacity):
            continue  # p99 may be too long at low load only: a fixed batch waits to fill
        if tail > limit_ms:
            return capacity + (rate - capacity) * (limit_ms - p99) / (tail - p99)
        capacity, p99 = rate, tail
    return capacity
