"""The study's verdicts follow from its runs, and the runs from known laws."""

import pytest

from latfit.queueing import linear_times, solve_optimal
from latfit.queueing.sampled import simulate_batches
from latfit.simulation.policies.result import SimResult
from latfit.simulation.policies.run import Options, sweep
from latfit.simulation.policies.service import System, linear_path, table_path
from latfit.simulation.studies import LOADS, ONE_PATH, best_runs, capacity_of, findings, study_points
from tests.unit.simulation.made import made_result

GPU = linear_path("gpu", 8, 0.05, 64)
AMX = table_path("amx", [2.0], exponential=True)


def runs_of(system: System) -> list[SimResult]:
    return sweep(study_points(system, Options(20_000, replications=2), solve_optimal))


def test_two_paths() -> None:
    runs = runs_of(System(GPU, AMX))
    best = {round(rate): run for (name, rate), run in best_runs(runs).items() if name == "gpu-only"}
    limit = 1000 * 64 / (8 + 0.05 * 64)
    law = simulate_batches(LOADS[4] * limit / 1000, linear_times(8, 0.05, 64))
    assert best[round(LOADS[4] * limit)].latency["p99"].value == pytest.approx(law.percentile(0.99), rel=0.02)
    assert round(LOADS[-1] * limit) not in best
    found = findings(runs, 20.0)
    assert len({claim for claim, _ in found}) == 5
    assert float(found[1][1].removesuffix("x")) > 1


def test_one_path() -> None:
    runs = runs_of(System(GPU))
    assert {run.policy for run in runs} == {"gpu-only", "fixed", "window", "marginal-cost", "optimal"}
    assert [found for _, found in findings(runs, 20.0)[:2]] == [ONE_PATH] * 2


def test_the_rate_that_a_limit_allows() -> None:
    def capacity(limit_ms: float, *runs: tuple[float, float, bool]) -> float:
        made = [made_result("window", p99, rate_per_s=rate, stable=stable) for rate, p99, stable in runs]
        return capacity_of(best_runs(made), "window", limit_ms)

    rising = ((100.0, 10.0, True), (200.0, 20.0, True), (300.0, 99.0, False))
    assert [capacity(limit, *rising) for limit in (15, 30, 5)] == [150, 200, 0]
    assert capacity(30, (100.0, 50.0, True), (200.0, 20.0, True), (300.0, 40.0, True)) == 250
