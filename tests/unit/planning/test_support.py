"""A plan repeats what its fits warn of, and begins with it where it decides."""

import numpy as np
import pytest
from msgspec import structs

from latfit.messages import Message as LatfitWarning
from latfit.model.fit_parts import Diagnostics, Drift, LevelChange
from latfit.model.fit_result import FitResult
from latfit.model.step_noise import noise_of
from latfit.planning.plan import make_plan
from latfit.planning.request import PlanOptions
from latfit.planning.result import Plan
from tests.unit.planning.test_plan import fit_with, line, machine

SIXTY_FOUR = {"B": [1, 64], "S": [1, 4096]}
LAW = {"ratios": noise_of(np.linspace(0.95, 1.05, 1000), np.ones(1000)).to_json()}


def warned(code: str, **parts: object) -> FitResult:
    fit = line(4, 0.1, domain=SIXTY_FOUR, intervals=LAW, warnings=[LatfitWarning(code, f"About {code}.", "Do this.")])
    return structs.replace(fit, **parts)


def plan_for(fit: FitResult, sla: float = 15.0, rate: float | None = 2.0) -> Plan:
    return make_plan(machine(gpu=fit), sla, request=PlanOptions(rate=rate))


@pytest.mark.parametrize("code", ["no_better_than_constant", "large_error", "drift"])
def test_a_warning_is_repeated(code: str) -> None:
    assert f"gpu: About {code}." in [found.message for found in plan_for(warned(code), rate=None).warnings]


def test_limits_on_steps_of_which_the_size_says_nothing_are_not_supported() -> None:
    plan = plan_for(warned("no_better_than_constant"), rate=None)
    assert plan.answer.startswith("Not supported by these data: on gpu a constant predicts as well")
    assert plan.promise == "likely"
    assert plan.unsupported
    grows = fit_with([4.0, 0.1, 0.01], "linear", domain=SIXTY_FOUR, intervals=LAW)
    assert not plan_for(grows, rate=None).unsupported


@pytest.mark.parametrize(
    ("shift", "decides"), [(0.6, True), pytest.param(-0.6, True, marks=pytest.mark.nightly), (0.03, False)]
)
def test_a_drift_decides_where_it_is_more_than_the_margin(shift: float, decides: bool) -> None:
    """At 2 per ms p99 is 10.6 ms of 15: a margin of 29 %."""
    fit = warned("drift", diagnostics=Diagnostics(drift=Drift({"run 1": LevelChange(shift, 0.0, t_s=1.0)})))
    plan = plan_for(fit)
    assert bool(plan.unsupported) is decides
    assert plan.answer.startswith("Not supported") is decides
    assert plan.feasible
    assert plan.promise == ("likely" if decides else "meets")
    assert not plan_for(fit, rate=100.0).unsupported  # far more than the stability limit, whatever the drift
