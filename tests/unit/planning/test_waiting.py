"""T_cut in a plan: the published cases, what vouches for the answer, and what the textbook formula would have done."""

import numpy as np
import pytest

from latfit.planning.plan import make_plan
from latfit.planning.request import Objective, PlanRequest
from latfit.planning.result import Cutoff, Plan
from latfit.queueing.overflow import cutoff_queue, exact_distribution
from latfit.queueing.service import linear_times
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
    """theory G2 at 0.1 per ms: textbook up to 10.6136, exact up to 8.056, proved up to 7.93732."""
    plan, found = light
    largest = {method: spans[-1][1] for method, spans in found.ranges.items()}
    assert largest == pytest.approx({"poisson": 10.6136, "exact": 8.056, "rigorous": 7.93732}, rel=2e-4)
    assert found.value == pytest.approx(7.93732, rel=2e-4)
    assert found.bound == "rigorous"
    assert plan.feasible


def test_the_textbook_formula_would_have_misled(light: tuple[Plan, Cutoff]) -> None:
    """It promises 20 ms at 10.61 ms; the exact law there gives 22.6 (simulated 22.57)."""
    plan, found = light
    assert found.misled
    assert any("textbook formula would admit T_cut up to 10.6 ms" in note for note in plan.notes)
    admitted = found.ranges["poisson"][-1][1]
    law = exact_distribution(cutoff_queue(0.1, admitted, linear_times(12, 0.05, 256), 0.5))
    assert law.percentile(0.99) == pytest.approx(22.57, abs=0.1)


def test_every_method_is_told_and_the_valid_ones_are_marked(light: tuple[Plan, Cutoff]) -> None:
    _, found = light
    assert set(found.bounds_ms) >= {"poisson", "rigorous", "exact"}
    assert set(found.holds) == {"rigorous", "exact"}
    exact, proved = found.bounds_ms["exact"], found.bounds_ms["rigorous"]
    assert exact is not None
    assert proved is not None
    assert exact <= proved <= 20.0 * (1 + 1e-6)
    assert "gpu" in found.binding


def test_a_case_that_the_textbook_formula_refuses() -> None:
    """theory G2 at 0.4 per ms: no T_cut by the formula, [6.028, 7.792] by the exact law."""
    plan, found = planned(0.4)
    assert list(found.ranges["poisson"]) == []
    assert found.ranges["exact"][0] == pytest.approx((6.028, 7.792), rel=2e-3)
    assert found.bound == "exact"
    assert found.value == pytest.approx(7.792, rel=2e-3)
    chosen = next(row for row in plan.strategies if row.chosen)
    assert chosen.name.startswith("gpu + amx")
    assert chosen.sustainable_per_s is not None
    assert chosen.sustainable_per_s >= 400
    assert found.misled


def test_an_objective_chooses_among_those_that_meet_the_sla() -> None:
    plan, found = planned(0.1, objective=Objective(p99=0.0, mean=1.0))
    assert found.value is not None
    times = linear_times(12, 0.05, 256)
    means = {
        cutoff: exact_distribution(cutoff_queue(0.1, cutoff, times, 0.5)).mean_ms for cutoff in np.linspace(0.1, 8, 24)
    }
    assert found.mean_ms <= min(means.values()) * 1.002
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
