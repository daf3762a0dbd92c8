"""T_cut in a plan: the published cases, and what vouches for the answer."""

import pytest

from latfit.planning.load.strategies import Machine, cutoff_strategy, machine_of
from latfit.planning.plan import make_plan
from latfit.planning.request import Objective, PlanRequest
from latfit.planning.result import Cutoff, Plan
from latfit.queueing import Effort
from tests.unit.planning.test_plan import line, machine

MACHINE = machine(amx=line(0, 2), gpu=line(12, 0.05))
"""theory G2: the AMX serves 0.5 per ms, GPU steps take 12 + 0.05 b."""


def planned(rate: float, **request: object) -> tuple[Plan, Cutoff]:
    plan = make_plan(MACHINE, 20.0, request=PlanRequest(rate=rate, **request))  # type: ignore[arg-type]
    assert isinstance(plan.T_cut, Cutoff)
    return plan, plan.T_cut


@pytest.fixture(scope="module")
def light() -> tuple[Plan, Cutoff]:
    return planned(0.1)


def test_published_ranges(light: tuple[Plan, Cutoff]) -> None:
    """0.1 per ms: up to 8.056 by the exact chain of an overflow that stays on the CPU."""
    plan, found = light
    largest = {method: spans[-1][1] for method, spans in found.ranges.items()}
    assert largest == pytest.approx({"simulated": 8.056}, rel=0.01)
    assert len(found.ranges["simulated"]) == 1
    assert (found.value, found.bound) == (largest["simulated"], "simulated")
    assert plan.feasible
    assert set(found.holds) == {"simulated", "rigorous"}
    assert "gpu" in found.binding


def machine_with(tau: float, mu: float) -> Machine:
    return machine_of(machine(amx=line(0, 1 / mu), gpu=line(tau, 0.05)), 1, PlanRequest(rate=0.1))


@pytest.mark.parametrize(
    ("rate", "mu", "cutoff", "p99", "stays"),
    [(2.0, 2.0, 3, 11.3286, True), (0.4, 0.5, 8, 20.2, True), (0.2, 0.5, 2, 12.3, False), (1.0, 0.5, 5, 16.9, False)],
)
def test_published_percentiles(rate: float, mu: float, cutoff: float, p99: float, stays: bool) -> None:
    """T = 8 + 0.05 b: that of an overflow that stays on the CPU where the CPU keeps up (by matrices), else lower."""
    tau = 12.0 if cutoff == 8 else 8.0
    two = machine_with(tau, mu)
    law = two.simulate(cutoff_strategy(two, cutoff), rate, Effort(10, 100_000, 200_000))
    assert law is not None
    assert law.percentile(0.99) == pytest.approx(p99, rel=3e-3 if stays else 1e-2)


def test_more_load_than_one_path_carries() -> None:
    """0.4 per ms: up to 7.792 by the exact chain."""
    plan, found = planned(0.4)
    assert found.value == pytest.approx(7.792, rel=0.02)
    chosen = next(row for row in plan.strategies if row.chosen)
    assert chosen.name.startswith("gpu + amx")
    assert chosen.sustainable_per_s is not None
    assert chosen.sustainable_per_s >= 400


def test_an_objective_chooses_among_those_that_meet_the_sla() -> None:
    """The mean rises with T_cut: the least that is tried."""
    plan, found = planned(0.1, objective=Objective(p99=0.0, mean=1.0))
    assert found.value == pytest.approx(0.02)
    assert any(point.cost is not None for point in plan.frontier)


def test_nothing_on_the_frontier_is_beaten(light: tuple[Plan, Cutoff]) -> None:
    plan, _ = light
    best = [point for point in plan.frontier if point.best]
    assert best
    for point in best:
        for other in plan.frontier:
            assert not (other.percentile_ms < point.percentile_ms and other.mean_ms < point.mean_ms)


def test_too_much_load_has_no_cutoff_and_says_what_is_the_least() -> None:
    plan, found = planned(0.9)
    assert found.value is None
    assert "no T_cut meets 20 ms" in found.reason
    assert not plan.feasible
    assert "replicas" in plan.remedy
