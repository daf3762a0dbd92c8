"""T_cut in a plan: the published cases, and what vouches for the answer."""

import pytest

from latfit.planning.plan import make_plan
from latfit.planning.request import Objective, PlanOptions
from latfit.planning.result import Cutoff, Plan
from tests.unit.planning.test_plan import line, machine

MACHINE = machine(amx=line(0, 2), gpu=line(12, 0.05))
"""theory G2: the AMX serves 0.5 per ms, GPU steps take 12 + 0.05 b."""


def planned(rate: float, **request: object) -> tuple[Plan, Cutoff]:
    plan = make_plan(MACHINE, 20.0, request=PlanOptions(rate=rate, **request))  # type: ignore[arg-type]
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
    assert set(found.holds) == {"simulated"}
    assert "gpu" in found.binding
    assert plan.engines["triton"]["default_timeout_microseconds"] == pytest.approx(8056, rel=0.01)


def test_an_objective_chooses_among_those_that_meet_the_sla() -> None:
    """The mean rises with T_cut: the least that is tried."""
    _, found = planned(0.1, objective=Objective(p99=0.0, mean=1.0))
    assert found.value == pytest.approx(0.02)


def test_too_much_load_has_no_cutoff_and_says_what_is_the_least() -> None:
    plan, found = planned(0.9)
    assert found.value is None
    assert "no T_cut meets 20 ms" in found.reason
    assert not plan.feasible
    assert "replicas" in plan.remedy
