"""The optimum of every family: no plain start of SciPy's trust region ends clearly lower, at one scale of the loss."""

from pathlib import Path

import numpy as np
import pytest

from latfit.fitting.data import rows_of
from latfit.fitting.problem import FitOptions, make_problem
from latfit.fitting.solver.levenberg_marquardt import Descents
from latfit.fitting.solver.objective import by_cell
from latfit.fitting.solver.solve import solve
from latfit.model.registry import FAMILY
from latfit.trace.read import ingest
from latfit.trace.table import Trace
from tests.oracle.scipy_peer import naive_points, trust_region
from tests.unit.fitting.test_separable import TRUTH, serving_trace

HARD = {
    "ibm_llm_pilot_llama-7b_h100_tp1": ("roofline", "saturation-gamma+moe"),
    "ibm_llm_pilot_starcoder_h100_tp1": ("hinge", "saturation-gamma+moe"),
    "vllm_1s_windows_rtx4090": ("roofline+moe",),
}
"""Measured steps on which families have optima that are hard to find: kinks, flat valleys, terms that look idle."""


def spoilt(noise: float, rows: int, seed: int) -> Trace:
    """Serving steps, one in thirty of them five times as long."""
    trace = serving_trace("roofline", TRUTH["roofline"], noise, rows, seed)
    slow = np.random.default_rng(seed).random(rows) < 1 / 30
    return trace.with_columns(T_ms=np.where(slow, 5 * trace["T_ms"], trace["T_ms"]))


def worst_excess(trace: Trace, model: str, starts: int) -> float:
    """Share by which the solver's cost lies above the lowest of plain starts."""
    options = FitOptions(model=model, fixed={"p": 4.0, "Q": 0.0, "rho": 0.0} if "roofline" in model else {})
    problem = make_problem(rows_of(trace), options)
    found = solve(problem)
    descent = Descents.alike(by_cell(problem), found.f_scale)
    assert descent.cost(found.z) == pytest.approx(found.cost, rel=1e-12)
    return found.cost / min(trust_region(descent, z).cost for z in naive_points(problem, starts)) - 1


@pytest.mark.parametrize("model", [name for name in FAMILY if name != "constant"])
def test_never_worse_on_planted_steps(model: str) -> None:
    assert worst_excess(spoilt(0.05, 250, seed=1), model, starts=3) <= 1e-2


@pytest.mark.nightly
@pytest.mark.parametrize(("source", "model"), [(source, model) for source, models in HARD.items() for model in models])
def test_never_worse_where_it_is_hard(source: str, model: str, measured_steps: Path) -> None:
    _, rows = next(ingest(measured_steps / f"{source}.parquet").trace.systems())
    few = np.sort(np.random.default_rng(0).choice(len(rows), min(len(rows), 500), replace=False))
    assert worst_excess(rows.select(few), model, starts=6) <= 0.1
