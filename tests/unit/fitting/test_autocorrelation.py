"""How many independent steps a run is worth: closed forms of planted noise, and orders that are none of time."""

import math

import numpy as np
import pytest
from scipy.signal import lfilter

from latfit.fitting.checking.autocorrelation import Persistence, by_run, persistence
from latfit.fitting.data import fit_data
from latfit.stats import FloatArray
from latfit.trace.table import Trace


def autoregression(n: int, r: float, rng: np.random.Generator) -> FloatArray:
    """A stationary series (n,) of variance 1 whose neighbours have correlation r."""
    shocks = rng.standard_normal(n) * math.sqrt(1 - r**2)
    shocks[0] = rng.standard_normal()
    return np.asarray(lfilter([1.0], [1.0, -r], shocks))


def of(*runs: FloatArray) -> Persistence:
    return persistence(runs)


class TestWorth:
    @pytest.mark.parametrize("r", [0.5, 0.9, 0.99])
    def test_an_autoregression_is_worth_what_its_correlation_says(self, r: float) -> None:
        """m = n (1-r)/(1+r), less one standard error of about sqrt(m); the mean of 30 is known to sqrt(m/30)."""
        n, rng = 8000, np.random.default_rng(1)
        m = n * (1 - r) / (1 + r)
        found = [n / of(autoregression(n, r, rng)).steps_for_one for _ in range(30)]
        assert abs(np.mean(found) - (m - math.sqrt(m))) < 4 * math.sqrt(m / 30) + 0.02 * m

    def test_slow_noise_under_fast_noise_is_seen(self) -> None:
        """White noise of variance 1 plus an autoregression of variance q and correlation r: L/v = (1 + q (1+r)/(1-r)) /
        (1 + q). Neighbours hardly tell: their correlation is r q/(1 + q) = 0.2."""
        n, q, r, rng = 8000, 0.25, 0.98, np.random.default_rng(2)
        runs = [rng.standard_normal(n) + math.sqrt(q) * autoregression(n, r, rng) for _ in range(20)]
        known = (1 + q * (1 + r) / (1 - r)) / (1 + q)
        found = [of(run) for run in runs]
        assert np.mean([one.lag_one for one in found]) == pytest.approx(r * q / (1 + q), abs=0.03)
        assert 0.6 * known < np.median([one.steps_for_one for one in found]) < 1.5 * known

    def test_runs_are_independent_of_one_another(self) -> None:
        """Ten runs whose levels differ and that hardly move inside are worth ten; the same steps as one run are not."""
        rng = np.random.default_rng(5)
        runs = [level + 0.001 * autoregression(100, 0.999, rng) for level in rng.standard_normal(10)]
        assert 1000 / of(*runs).steps_for_one == pytest.approx(10)
        assert 1000 / of(np.concatenate(runs)).steps_for_one < 10

    @pytest.mark.parametrize("values", [np.zeros(0), np.zeros(1), np.arange(7.0), np.zeros(50), np.arange(50.0)])
    def test_series_that_tell_little_are_worth_one_to_all(self, values: FloatArray) -> None:
        assert 1.0 <= of(values).steps_for_one <= max(len(values), 1)


def test_values_come_in_the_order_of_time() -> None:
    n, rng = 2000, np.random.default_rng(9)
    noise, mixed = autoregression(n, 0.9, rng), rng.permutation(n)
    trace = Trace({"B": np.ones(n), "S": np.ones(n), "T_ms": np.ones(n), "t_s": np.arange(float(n))})
    (series,) = by_run(fit_data(trace.select(mixed)), np.arange(n), noise[mixed])
    np.testing.assert_array_equal(series, noise)
