"""Steps that are nothing but prefill, of one request or of many: a table of their own."""

import numpy as np
import pytest

from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions
from latfit.model import FitResult
from latfit.simulation.engine.step_cost import Work, step_costs, step_ms
from latfit.stats import FloatArray
from latfit.trace import Trace

NOISE = 0.02


def steps(n: int, rng: np.random.Generator) -> dict[str, FloatArray]:
    """Two thirds decode 1 to 32 requests, others prefill 1 to 16 of 8 to 256 tokens, few of them beside decoding."""
    prefill = rng.random(n) < 1 / 3
    requests = np.where(prefill, np.floor(2 ** rng.uniform(0, 4, n)), 0.0)
    beside = np.where(prefill & (rng.random(n) < 0.9), 0.0, rng.integers(1, 33, n))
    P = requests * rng.integers(8, 257, n)
    B = beside + requests
    return {"B": B, "S": beside + P, "prefill_requests": requests, "prefill_tokens": P}


def truth(columns: dict[str, FloatArray], bump: float = 0.25) -> FloatArray:
    """A line, and by how many requests are in prefill alone what no formula of latfit has."""
    n, decoding = columns["prefill_requests"], columns["B"] - columns["prefill_requests"]
    T = 5 + 0.1 * columns["B"] + 0.02 * columns["S"]
    return np.asarray(
        T * np.exp(np.where((n > 0) & (decoding == 0), bump * np.tanh(2 * (np.log(n + 1e-9) - 1.4)), 0.0))
    )


def measured(bump: float = 0.25, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    columns = steps(1800, rng)
    return Trace({**columns, "T_ms": truth(columns, bump) * np.exp(rng.normal(0, NOISE, 1800))})


@pytest.fixture(scope="module")
def fit() -> FitResult:
    return fit_trace(measured(), FitOptions("linear+correction"))


def test_follows_how_many_requests_prefill_down_to_the_noise(fit: FitResult) -> None:
    columns = steps(3000, np.random.default_rng(7))
    only = columns["B"] == columns["prefill_requests"]
    T, plain = truth(columns), fit_trace(measured(), FitOptions("linear"))
    before, after = (100 * np.abs(each.latency_ms(**columns) / T - 1)[only].mean() for each in (plain, fit))
    assert before > 7
    assert after < 100 * NOISE
    assert fit.correction is not None
    assert fit.correction.prefill_alone is not None


def test_is_stored_with_the_fit(fit: FitResult) -> None:
    columns = steps(200, np.random.default_rng(9))
    again = FitResult.from_json(fit.to_json(), "here")
    assert again.latency_ms(**columns) == pytest.approx(fit.latency_ms(**columns), rel=1e-4)


def test_an_engine_takes_as_long_as_the_fit_says(fit: FitResult) -> None:
    costs, columns = step_costs(fit, scatter=False), steps(60, np.random.default_rng(3))
    T = fit.latency_ms(**columns)
    for i, (B, S, n, P) in enumerate(zip(*columns.values(), strict=True)):
        work = Work(B=B, S=S, n=n, P=P, KP=0.0, KD=0.0, A=P * P / 2 / max(n, 1.0), L=P / max(n, 1.0))
        assert step_ms(costs, work) == pytest.approx(T[i], rel=1e-9)
