"""The study's verdicts follow from its runs, and the runs from known laws."""

import pytest

from latfit.policies.policy import DispatchTable
from latfit.queueing.dispatch_mdp import optimal_rule
from latfit.queueing.sampled import simulate_batches
from latfit.queueing.service import linear_times, measured_times
from latfit.simulation.policies.result import SimResult
from latfit.simulation.policies.run import Options
from latfit.simulation.policies.service import System, linear_path, table_path
from latfit.simulation.policies.sweep import sweep
from latfit.simulation.studies import (
    LOADS,
    ONE_PATH,
    SEQUENCES,
    best_run,
    carried_rate,
    findings,
    policy_points,
    serving_study,
)
from latfit.stats import FloatArray
from tests.unit.simulation.made import made_result

GPU = linear_path("gpu", 8, 0.05, 64)
AMX = table_path("amx", [2.0], exponential=True)
OPTIONS = Options(20_000, replications=2)


def solve(rate: float, T_ms: FloatArray) -> DispatchTable:
    return optimal_rule(rate, measured_times(T_ms)).table


def runs_of(system: System) -> list[SimResult]:
    return sweep(policy_points(system, OPTIONS, solve))


def run_at(policy: str, rate: float, p99: float, stable: bool = True) -> SimResult:
    return made_result(policy, p99, rate_per_s=rate, stable=stable)


def test_two_paths() -> None:
    system = System(GPU, AMX)
    runs = runs_of(system)
    limit = 1000 * 64 / (8 + 0.05 * 64)
    greedy = best_run(runs, "gpu-only", LOADS[4] * limit)
    assert greedy is not None
    law = simulate_batches(LOADS[4] * limit / 1000, linear_times(8, 0.05, 64))
    assert greedy.latency["p99"].value == pytest.approx(law.percentile(0.99), rel=0.02)
    assert best_run(runs, "gpu-only", LOADS[-1] * limit) is None
    found = findings(runs, system)
    assert len({each.claim for each in found}) == 5
    assert float(found[1].found.removesuffix("x")) > 1


def test_one_path() -> None:
    runs = runs_of(System(GPU))
    assert {run.policy for run in runs} == {"gpu-only", "fixed", "window", "marginal-cost", "optimal"}
    assert [each.found for each in findings(runs, System(GPU))[:2]] == [ONE_PATH] * 2


def test_the_rate_that_a_limit_allows() -> None:
    runs = [run_at("window", 100, 10), run_at("window", 200, 20), run_at("window", 300, 99, stable=False)]
    assert carried_rate(runs, "window", 15) == 150
    assert carried_rate(runs, "window", 30) == 200
    assert carried_rate(runs, "window", 5) == 0
    slow_at_first = [run_at("fixed", 100, 50), run_at("fixed", 200, 20), run_at("fixed", 300, 40)]
    assert carried_rate(slow_at_first, "fixed", 30) == 250


def test_engines() -> None:
    study = serving_study(GPU)
    runs = {run.name: run for run in study.runs}
    # (100 + 500 + 50)/(3 x 500)
    assert runs["padded example"].summary.useful_share == pytest.approx(650 / 1500)
    # Geometric outputs: of a padded batch of n the useful share of decoding is about 1/H_n.
    share = 1 / sum(1 / k for k in range(1, SEQUENCES + 1))
    assert runs["static batching"].summary.useful_share == pytest.approx(share, rel=0.3)
    assert runs["chunked-prefill batching"].summary.useful_share == pytest.approx(1)
    assert runs["sjf"].summary.latency["mean"].value < runs["fcfs"].summary.latency["mean"].value
    assert runs["slo"].summary.slo_attainment > runs["fcfs"].summary.slo_attainment
    users = {name: run.others_ms for name, run in runs.items() if run.others_ms is not None}
    assert users["fair"] < users["fcfs"]
    assert len(study.findings) == 5
