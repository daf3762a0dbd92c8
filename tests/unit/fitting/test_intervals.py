"""Conformal limits: ranks, laws and coverage against closed forms, simulation and measured logs."""

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import stats as distributions
from scipy.signal import lfilter

from latfit.fitting.checking.conformal import (
    prediction_intervals,
    upper_limit,
)
from latfit.fitting.checking.crossval import HeldOut
from latfit.fitting.data import FitData, fit_data
from latfit.fitting.fit import fit_trace
from latfit.fitting.prediction import predict
from latfit.fitting.problem import FitOptions
from latfit.stats import FloatArray
from latfit.trace.table import Trace


def held_out_of(scores: FloatArray, parts: int = 5) -> tuple[Trace, HeldOut]:
    """Steps of one phase whose scores are given, in time order."""
    n = len(scores)
    trace = Trace({"B": np.ones(n), "S": np.ones(n), "T_ms": np.exp(scores), "t_s": np.arange(n, dtype=float)})
    return trace, HeldOut(np.arange(n), np.arange(n) * parts // n, scores, np.ones(n))


def data_of(scores: FloatArray) -> tuple[FitData, HeldOut]:
    trace, left_out = held_out_of(scores)
    return fit_data(trace), left_out


class TestRank:
    def test_of_500_scores_the_496th_holds_99_percent(self) -> None:
        """Published oracle: k = 496, mean coverage .990020, its 5 % quantile .981787."""
        assert upper_limit(np.arange(1.0, 501.0), 0.99, np.ones(500)) == 496
        law = distributions.beta(496, 5)
        assert law.mean() == pytest.approx(0.990020, abs=5e-7)
        assert law.ppf(0.05) == pytest.approx(0.981787, abs=5e-7)

    def test_99_scores_are_the_fewest_that_tell_99_percent(self) -> None:
        assert upper_limit(np.arange(1.0, 100.0), 0.99, np.ones(99)) == 99
        assert upper_limit(np.arange(1.0, 99.0), 0.99, np.ones(98)) is None


class TestPrediction:
    def test_exchangeable_steps_are_covered_and_do_not_drift(self) -> None:
        trace, left_out = held_out_of(np.random.default_rng(3).standard_t(4, 6000) * 0.1)
        found = prediction_intervals(fit_data(trace), left_out, ordered=True)
        phase = found["by_phase"]["decode"]
        low, high = phase["lower_quantiles"]["0.95"], phase["ratio_quantiles"]["0.95"]
        fresh = np.exp(np.random.default_rng(13).standard_t(4, 6000) * 0.1)
        assert abs(np.mean((fresh >= low) & (fresh <= high)) - 0.9) < 0.03
        assert not phase["drift"]
        assert found["drift"] == ""
        assert phase["lower_quantiles"]["0.95"] < 1 < phase["ratio_quantiles"]["0.95"]

    @pytest.mark.parametrize("ends", [0.2, -0.2])
    def test_a_drift_is_flagged(self, ends: float) -> None:
        scores = np.random.default_rng(4).normal(0, 0.1, 4000) + np.linspace(0, ends, 4000)
        found = prediction_intervals(*data_of(scores), ordered=True)
        assert found["by_phase"]["decode"]["drift"]
        assert "decode" in found["drift"]

    @given(st.lists(st.floats(-5, 5), min_size=1, max_size=80), st.booleans())
    def test_any_scores_give_an_answer_without_a_warning(self, scores: list[float], ordered: bool) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = prediction_intervals(*data_of(np.array(scores)), ordered=ordered)
        assert set(found["ratio_quantiles"]) == {"0.5", "0.9", "0.95", "0.99"}


def lasting_noise(rng: np.random.Generator, rows: int, share: float) -> FloatArray:
    """Standard normal, neighbours correlated by a share."""
    fresh = rng.normal(0, 1, rows)
    fresh[1:] *= math.sqrt(1 - share**2)
    return np.asarray(lfilter([1.0], [1.0, -share], fresh))


def single_user_log(
    seed: int, rows: int = 2000, level: float = 14.6, sd: float = 0.15, share: float = 0.0, rise: float = 0.0
) -> Trace:
    """Decode steps of a level in ms and some of prefill, by a clock of whole ms. share: correlation of neighbours.
    rise: of the later half, in ms."""
    rng = np.random.default_rng(seed)
    prefill = rng.random(rows) < 0.06
    P = np.where(prefill, rng.integers(20, 400, rows), 0.0)
    T = np.where(prefill, 12 + 0.06 * P, level) + sd * lasting_noise(rng, rows, share)
    T += rise * (np.arange(rows) >= rows // 2)
    columns = {"prefill_requests": prefill.astype(float), "prefill_tokens": P, "t_s": np.arange(rows) * 0.02}
    return Trace({"B": np.ones(rows), "S": np.where(prefill, P, 1.0), "T_ms": np.round(T), **columns})


@pytest.mark.parametrize("seed", range(4))
def test_a_clock_of_whole_ms_leaves_no_time_out_by_a_thousandth(seed: int) -> None:
    """Three steps of four take 15 ms by it: an interval of 90 % that ends at 14.99 held a quarter of them."""
    fit, fresh = fit_trace(single_user_log(seed), FitOptions("hinge")), single_user_log(seed + 100)
    told, T = predict(fit, fresh), fresh.floats("T_ms")
    decode = (fresh.floats("prefill_tokens") == 0) & np.isfinite(told.low)
    assert decode.sum() > 1000
    assert np.mean((told.low <= T) & (told.high >= T), where=decode) > 0.9


def test_stalls_of_a_fixed_time_are_promised_at_each_batch_size() -> None:
    """One step in twelve waits until 40 ms have passed, four times a step of one request, 1.2 times one of 33."""
    rng = np.random.default_rng(5)

    def run(rows: int) -> Trace:
        B = np.round(np.exp(rng.uniform(0, math.log(64), rows)))
        T = (10 + 0.7 * B) * np.exp(rng.normal(0, 0.02, rows))
        T = np.where(rng.random(rows) < 1 / 12, np.maximum(T, 40 * np.exp(rng.normal(0, 0.02, rows))), T)
        return Trace({"B": B, "S": B, "T_ms": T, "t_s": np.arange(rows) * 0.05})

    fit, fresh = fit_trace(run(8000), FitOptions("linear")), run(20_000)
    told, T, B = predict(fit, fresh, 0.98), fresh.floats("T_ms"), fresh.floats("B")
    for low, high in ((1, 3), (4, 12), (13, 32), (33, 64)):
        rows = (low <= B) & (high >= B)
        assert np.mean(told.high >= T, where=rows) > 0.975
        assert np.mean(told.high, where=rows) < 1.4 * np.quantile(T[rows], 0.99)


class TestCoarseClock:
    """What is said of time by a clock of whole ms: where most steps have one time, the others are no outliers, and how
    fits of folds differ is no noise of the machine."""

    @pytest.mark.parametrize("level", [14.0, 14.2, 14.4, 14.6])
    @pytest.mark.parametrize("seed", range(3))
    def test_independent_steps_are_counted_and_do_not_drift(self, seed: int, level: float) -> None:
        found = fit_trace(single_user_log(seed, level=level), FitOptions("hinge")).intervals["by_phase"]["decode"]
        assert not found["drift"]
        assert found["independent_share"] > 0.5
        assert found["ratio_quantiles"]["0.99"] is not None
