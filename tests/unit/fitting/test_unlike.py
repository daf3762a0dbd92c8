"""Steps within the measured ranges but unlike the measured ones: how wide their intervals are, on planted logs."""

import numpy as np
import pytest
from msgspec import structs

from latfit.fitting.fit import fit_trace
from latfit.fitting.prediction import UNTESTED, predict
from latfit.fitting.problem import FitOptions
from latfit.model import FitResult
from latfit.stats import FloatArray
from latfit.trace import Trace

NOISE = 0.03


def truth(B: FloatArray, S: FloatArray) -> FloatArray:
    """What a line is off by where many requests hold few tokens, or few hold many."""
    return np.asarray((5 + 0.1 * B + 0.02 * S) * (B / S) ** 0.15)


def log_of(n: int, seed: int, spread: float) -> Trace:
    """Prefill of 4 to 64 requests with about 30 tokens each."""
    rng = np.random.default_rng(seed)
    B = np.floor(4 * 2 ** rng.uniform(0, 4, n))
    S = np.floor(B * 30 * np.exp(rng.uniform(-spread, spread, n)))
    T = truth(B, S) * np.exp(rng.normal(0, NOISE, n))
    return Trace({"B": B, "S": S, "T_ms": T, "prefill_requests": B, "prefill_tokens": S})


@pytest.fixture(scope="module")
def fit() -> FitResult:
    return fit_trace(log_of(900, 0, 0.4), FitOptions("linear"))


def test_nine_of_ten_steps_unlike_the_measured_ones_are_within_their_intervals(fit: FitResult) -> None:
    new = log_of(3000, 1, 2.0)
    columns = {name: new.floats(name) for name in new.columns if name != "T_ms"}
    box = ~np.any([np.abs(times) > 0 for times in fit.times_outside(**columns).values()], axis=0)
    unlike, T = box & fit.outside_support(**columns), new.floats("T_ms")
    plain = predict(
        structs.replace(fit, cross_validation=structs.replace(fit.cross_validation, outside_support=None)), new
    )
    wider = predict(fit, new)
    held = [float(np.mean((each.low <= T) & (each.high >= T), where=unlike)) for each in (plain, wider)]
    assert unlike.sum() > 500
    assert held[0] < 0.75
    assert held[1] > 0.85
    assert UNTESTED in plain.notes
    assert UNTESTED not in wider.notes
