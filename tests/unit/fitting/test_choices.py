"""What is settled before a fit: long steps, large batches, second tiles, and the work before the first token."""

import numpy as np
import pytest

from latfit.fitting.data import rows_of
from latfit.fitting.model_selection import settled
from latfit.fitting.problem import FitOptions, make_problem
from latfit.fitting.solver.solve import solve
from latfit.trace.table import Trace
from tests.unit.fitting.test_separable import TRUTH, serving_trace

ROOFLINE = FitOptions(model="roofline")


def values(trace: Trace, options: FitOptions) -> dict[str, float]:
    problem = make_problem(rows_of(trace), settled(rows_of(trace), options))
    theta = problem.theta(solve(problem).z)
    return dict(zip([p.name for p in problem.model.parameters], theta.tolist(), strict=True))


def test_a_long_step_and_a_large_batch_are_found() -> None:
    truth = {**TRUTH["roofline"], "tau_H": 0.03, "S_1": 900.0, "tau_C": 0.4, "B_1": 70.0}
    found = values(serving_trace("roofline", truth, 0.01, 1000), ROOFLINE)
    assert found["tau_H"] == pytest.approx(0.03, rel=0.1)
    assert found["S_1"] == pytest.approx(900, rel=0.1)
    assert found["tau_C"] == pytest.approx(0.4, rel=0.1)
    assert found["B_1"] == pytest.approx(70, rel=0.1)


def test_a_second_tile_is_found() -> None:
    rng = np.random.default_rng(0)
    S = np.unique(np.round(2 ** rng.uniform(0, 12, 400)))
    T = 4 + 0.02 * 128 * np.ceil(S / 128) + 0.015 * 576 * np.ceil(S / 576)
    trace = Trace({"B": np.ones_like(S), "S": S, "T_ms": T * np.exp(rng.normal(0, 0.01, len(S)))})
    fixed = settled(rows_of(trace), ROOFLINE).fixed
    assert {fixed["Q"], fixed["V"]} == {128, 576}


def test_attention_may_be_sharper_than_the_matrix_products() -> None:
    truth = {**TRUTH["roofline"], "p": 8.0, "p_A": 2.0}
    fixed = settled(rows_of(serving_trace("roofline", truth, 0.01, 800)), ROOFLINE).fixed
    assert (fixed["p"], fixed["p_A"]) == (8, 2)
