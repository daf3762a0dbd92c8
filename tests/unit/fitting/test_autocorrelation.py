"""How many independent steps a run is worth: closed forms of planted noise, and orders that are none of time."""

import math

import numpy as np
import pytest
from scipy.signal import lfilter

from latfit.fitting.checking.autocorrelation import Persistence, Series, TimeOrder, persistence
from latfit.fitting.data import fit_data
from latfit.stats import FloatArray
from latfit.trace.table import Trace


def autoregression(n: int, r: float, rng: np.random.Generator) -> FloatArray:
    """A stationary series (n,) of variance 1 whose neighbours have correlation r."""
    shocks = rng.standard_normal(n) * math.sqrt(1 - r**2)
    shocks[0] = rng.standard_normal()
    return np.asarray(lfilter([1.0], [1.0, -r], shocks))


def of(*runs: FloatArray) -> Persistence:
    return persistence(Series([np.arange(len(run)) for run in runs], runs))


def found_in(trace: Trace, values: FloatArray) -> Persistence:
    return persistence(TimeOrder.of(fit_data(trace)).series(np.arange(len(trace)), values))


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

    @pytest.mark.parametrize("n", [20, 200, 2000])
    def test_of_white_noise_every_step_counts(self, n: int) -> None:
        """Order 0 is chosen where no lag gains more than ln(n)/2 of likelihood: 4 % of normal samples of 20 exceed that
        at a single lag and with a positive sign, fewer of longer ones; a few lags are tried."""
        rng = np.random.default_rng(3)
        counted = [of(rng.standard_normal(n)).steps_for_one == 1.0 for _ in range(200)]
        assert np.mean(counted) > 0.9

    def test_pauses_do_not_hide_what_the_other_steps_share(self) -> None:
        rng = np.random.default_rng(4)
        noise = 0.05 * autoregression(4000, 0.9, rng)
        paused = np.where(rng.random(4000) < 0.006, 4.0, noise)
        assert of(paused).steps_for_one == pytest.approx(of(noise).steps_for_one, rel=0.3)

    def test_runs_are_independent_of_one_another(self) -> None:
        """Ten runs whose levels differ and that hardly move inside are worth ten; the same steps as one run are not."""
        rng = np.random.default_rng(5)
        runs = [level + 0.001 * autoregression(100, 0.999, rng) for level in rng.standard_normal(10)]
        assert 1000 / of(*runs).steps_for_one == pytest.approx(10)
        assert 1000 / of(np.concatenate(runs)).steps_for_one < 10

    @pytest.mark.parametrize("values", [np.zeros(0), np.zeros(1), np.arange(7.0), np.zeros(50), np.arange(50.0)])
    def test_series_that_tell_little_are_worth_one_to_all(self, values: FloatArray) -> None:
        assert 1.0 <= of(values).steps_for_one <= max(len(values), 1)


def sizes(cells: int) -> FloatArray:
    return np.asarray(2.0 ** (np.arange(cells) / 4))


def table(S: FloatArray, **more: FloatArray) -> Trace:
    return Trace({"B": np.ones(len(S)), "S": S, "T_ms": np.ones(len(S)), **more})


class TestOrder:
    def test_a_table_sorted_by_size_is_not_taken_for_one_in_time(self) -> None:
        """Repeats of a cell beside one another, or cells measured once, share what the model misses there."""
        misfit = np.sin(np.arange(60) / 8)
        for repeats in (1, 5):
            S, shared = np.repeat(sizes(60), repeats), np.repeat(misfit, repeats)
            assert found_in(table(S), shared) == Persistence()
            assert found_in(table(S[::-1]), shared[::-1]) == Persistence()
            assert found_in(table(S, rep=np.tile(np.arange(repeats), 60).astype(float)), shared) == Persistence()

    def test_loops_over_two_sizes_are_not_in_time_either(self) -> None:
        B, S = (axis.ravel() for axis in np.meshgrid(np.arange(1.0, 13), 16 * np.arange(1.0, 9), indexing="ij"))
        trace = Trace({"B": B, "S": B + S, "T_ms": np.ones(len(B))})
        assert found_in(trace, np.sin(B / 3)) == Persistence()

    def test_rounds_over_all_cells_show_time_and_not_the_lack_of_fit(self) -> None:
        """20 rounds of 60 cells in order of size. The misfit alone has nothing in time. Noise of correlation 0.9 is
        worth 1200 x 0.1/1.9 = 63 less 8 steps, as without the misfit."""
        rng = np.random.default_rng(6)
        S, misfit = np.tile(sizes(60), 20), np.tile(np.sin(np.arange(60) / 8), 20)
        assert found_in(table(S), misfit + 0.1 * rng.standard_normal(1200)).steps_for_one == 1.0
        counted = [
            1200 / found_in(table(S), misfit + 0.1 * autoregression(1200, 0.9, rng)).steps_for_one for _ in range(20)
        ]
        assert np.mean(counted) == pytest.approx(63 - 8, abs=4 * math.sqrt(63 / 20) + 4)

    def test_pairs_of_a_cell_far_apart_tell_it_as_well(self) -> None:
        """Two steps a cell, in an order drawn at random: each deviates from the mean of both by half of its own."""
        n, rng = 4000, np.random.default_rng(7)
        m = n * 0.1 / 1.9
        counted = []
        for _ in range(15):
            S = rng.permutation(np.repeat(np.arange(1.0, n / 2 + 1), 2))
            counted.append(n / found_in(table(S), autoregression(n, 0.9, rng)).steps_for_one)
        assert np.mean(counted) == pytest.approx(m - math.sqrt(m), rel=0.2)

    def test_cells_that_are_never_repeated_tell_it_in_random_order(self) -> None:
        n, rng = 4000, np.random.default_rng(8)
        noise = autoregression(n, 0.9, rng)
        assert found_in(table(rng.permutation(np.arange(1.0, n + 1))), noise) == of(noise)

    def test_times_decide_where_there_are_any(self) -> None:
        n, rng = 2000, np.random.default_rng(9)
        noise, mixed = autoregression(n, 0.9, rng), rng.permutation(n)
        trace = table(np.sort(rng.integers(1, 500, n)).astype(float), t_s=np.arange(float(n)))
        assert found_in(trace, noise) == of(noise)
        assert found_in(trace.select(mixed), noise[mixed]) == of(noise)

    def test_cells_as_statistics_have_no_order_of_time(self) -> None:
        noise = autoregression(500, 0.9, np.random.default_rng(10))
        assert found_in(table(np.tile(sizes(50), 10), cell_rows=np.ones(500)), noise) == Persistence()
