"""The separable solver: never a worse optimum than plain multi-starts, planted parameters back, options that hold."""

import numpy as np
import pytest
from scipy.stats import lognorm

from latfit.fitting.data import rows_of
from latfit.fitting.fit import fit_trace
from latfit.fitting.model_selection import fix_choices
from latfit.fitting.problem import FitOptions, make_problem
from latfit.fitting.solver.solve import solve
from latfit.model.registry import FAMILY
from latfit.trace.table import Trace
from tests.conftest import planted_trace

TRUTH = {
    "context": {
        "tau_0": 5.0, "w_0": 30.0, "w_1": 1.0, "P_max": 60.0, "k_B": 0.15, "k_S": 0.01, "tau_B": 0.05, "tau_S": 0.01,
        "tau_K": 2e-4, "tau_L": 4e-4, "tau_R": 1e-4, "tau_A": 1e-6, "tau_N": 2.0, "tau_M": 1.0, "tau_Y": 0.05,
    },
    "roofline": {
        "tau_0": 2.0, "tau_B": 0.05, "b": 0.06, "tau_S": 0.0, "tau_Q": 0.0, "tau_K": 2e-4, "c": 1e-3, "tau_L": 0.0,
        "tau_A": 0.0, "tau_Y": 0.05, "tau_X": 0.0, "tau_N": 1.0, "tau_M": 0.0, "S_0": 150.0, "P_0": 200.0, "Q_s": 4.0,
        "K_0": 1e4, "p": 4.0, "Q": 0.0, "rho": 0.0,
    },
}  # fmt: skip


def serving_trace(model: str, truth: dict[str, float], noise: float, rows: int = 3000, seed: int = 0) -> Trace:
    """Decode, prefill and mixed steps with varying context, and log-normal noise on a family's latency."""
    rng = np.random.default_rng(seed)
    prefill = rng.random(rows) < 0.6
    decoding = np.where(prefill & (rng.random(rows) < 0.3), 0, rng.integers(1, 129, rows))
    n = np.where(prefill, rng.integers(1, 4, rows), 0)
    tokens = np.where(prefill, n * np.round(2 ** rng.uniform(3, 10, rows)), 0)
    cached = np.where(prefill, n * np.round(2 ** rng.uniform(0, 13, rows)), 0)
    columns = {
        "B": (decoding + n).astype(float),
        "S": decoding + tokens,
        "prefill_requests": n.astype(float),
        "prefill_tokens": tokens,
        "prefill_context_tokens": cached,
        "context_tokens": cached + decoding * np.round(2 ** rng.uniform(4, 11, rows)),
    }
    theta = np.array([truth.get(p.name, p.fixed or float(p.positive)) for p in FAMILY[model].parameters])
    factor = lognorm.rvs(noise, size=rows, random_state=rng) if noise else 1.0
    return Trace({**columns, "T_ms": FAMILY[model].latency_ms(theta, columns) * factor})


class TestPlantedTruth:
    @pytest.mark.parametrize("model", list(TRUTH))
    def test_noise_free_steps_give_the_parameters_back(self, model: str) -> None:
        fit = fit_trace(serving_trace(model, TRUTH[model], 0.0, 1500), FitOptions(model=model))
        for name, truth in TRUTH[model].items():
            if truth > 0 and name != "K_0":
                assert fit.parameters[name].value == pytest.approx(truth, rel=1e-3), name
        assert (fit.metrics.mape_pct or np.nan) < 0.01

    def test_tiles_are_found(self) -> None:
        truth = {**TRUTH["roofline"], "tau_Q": 0.04, "b": 0.03, "Q": 128.0}
        options, _ = fix_choices(rows_of(serving_trace("roofline", truth, 0.02)), FitOptions(model="roofline"))
        assert options.fixed["Q"] == 128
        assert options.fixed["rho"] == 0


class TestOptions:
    def test_tukey_of_a_published_sample(self) -> None:
        """Location of {1, 2, 3, 4, 100} with its scale from the median absolute deviation: the outlier is dropped."""
        B = np.arange(1.0, 6.0)
        trace = Trace({"B": B, "S": B, "T_ms": np.array([1.0, 2, 3, 4, 100])})
        problem = make_problem(rows_of(trace), FitOptions(model="constant", loss="tukey", residuals="absolute"))
        assert problem.theta(solve(problem).z)[0] == pytest.approx(2.5, rel=1e-4)

    @pytest.mark.parametrize("weights", ["segment", "variance"])
    def test_weights_keep_their_total_and_the_truth(self, weights: str) -> None:
        trace = planted_trace(0.02, repeats=20)
        problem = make_problem(rows_of(trace), FitOptions("saturation", weights=weights))
        assert problem.weights.sum() == pytest.approx(len(trace))
        fit = fit_trace(trace, FitOptions("saturation", weights=weights))
        assert fit.parameters["P_max"].value == pytest.approx(60, rel=0.1)
