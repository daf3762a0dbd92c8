"""Step costs of the engine against `FitResult.latency_ms`, for every family."""

from typing import Any

import numpy as np
import pytest

from latfit.errors import FitNotUsable, WrongUsage
from latfit.model.fit_parts import Estimate
from latfit.model.fit_result import FitResult, FitStatus
from latfit.model.formulas import Saturation
from latfit.model.registry import FAMILY
from latfit.simulation.engine.step_cost import Work, linear_costs, scaled_costs, step_costs, step_ms
from latfit.stats import FloatArray
from tests.unit.model.test_families import random_steps, random_theta


def a_fit(name: str, theta: FloatArray, status: FitStatus = FitStatus.CONVERGED) -> FitResult:
    values = zip(FAMILY[name].parameters, theta.tolist(), strict=True)
    return FitResult(name, status, {p.name: Estimate(value, None, None, None, p.unit) for p, value in values})


def of_one_prefill(steps: dict[str, FloatArray]) -> dict[str, FloatArray]:
    """The same steps with one prefill request where there were several: only then are averages the truth."""
    several = np.maximum(steps["prefill_requests"] - 1, 0)
    return steps | {
        "B": steps["B"] - several,
        "prefill_requests": np.minimum(steps["prefill_requests"], 1.0),
    }


def work_of(steps: dict[str, FloatArray], row: int) -> Work:
    B, S, n, P, KP, K = (
        float(steps[name][row])
        for name in ("B", "S", "prefill_requests", "prefill_tokens", "prefill_context_tokens", "context_tokens")
    )
    return Work(B, S, n, P, KP, K - KP, P * (KP + P / 2), KP + P)


@pytest.mark.parametrize("name", FAMILY)
def test_a_step_costs_what_the_fit_says(name: str) -> None:
    rng = np.random.default_rng(7)
    for _ in range(10):
        steps = of_one_prefill(random_steps(rng, 9))
        fit = a_fit(name, random_theta(rng, FAMILY[name]))
        expected = fit.latency_ms(**steps)
        costs = step_costs(fit)
        made = [step_ms(costs, work_of(steps, row)) for row in range(9)]
        np.testing.assert_allclose(made, expected, rtol=1e-12)


def test_two_fits_share_the_steps_by_phase() -> None:
    decode, mixed = (a_fit("linear", np.array(theta)) for theta in ([1.0, 2.0, 0.0], [10.0, 0.0, 3.0]))
    costs = step_costs(decode, mixed)
    assert step_ms(costs, Work(4.0, 4.0, 0.0, 0.0, 0.0, 100.0, 0.0, 0.0)) == 9.0
    assert step_ms(costs, Work(4.0, 9.0, 1.0, 6.0, 0.0, 100.0, 18.0, 6.0)) == 37.0


def test_host_time_comes_on_top_of_factors() -> None:
    costs = scaled_costs(linear_costs(8.0, 0.02, 0.05), 1.5, 2.0, 0.5)
    assert step_ms(costs, Work(10.0, 100.0, 1.0, 91.0, 0.0, 0.0, 0.0, 91.0)) == pytest.approx(
        2 * (8.0 + 0.2 + 5.0) + 0.5
    )
    assert step_ms(costs, Work(10.0, 10.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)) == pytest.approx(
        1.5 * (8.0 + 0.2 + 0.5) + 0.5
    )


def test_a_fit_without_values_is_refused() -> None:
    fit = a_fit("linear", np.full(3, np.nan), FitStatus.TOO_FEW_ROWS)
    with pytest.raises(FitNotUsable):
        step_costs(fit)


def test_a_family_that_is_not_known_is_refused() -> None:
    parameters: Any = {"zeta": Estimate(1.0, None, None, None, "ms")}
    with pytest.raises(WrongUsage, match="zeta"):
        step_costs(FitResult(Saturation().name, FitStatus.CONVERGED, parameters))
