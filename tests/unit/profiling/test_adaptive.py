"""The adaptive design: its formulas against direct computation, and its promise on a planted device."""

import math
from dataclasses import replace

import numpy as np
import pytest

from latfit.api.measuring import refit
from latfit.model.registry import model_named
from latfit.profiling.adaptive import (
    AdaptiveDesign,
    Knowledge,
    Surface,
    _median_warmup,
    first_cells,
    knowledge,
    rows_to_fit,
    weight,
)
from latfit.profiling.grid import LEVELS, StepCost, default_cells
from latfit.profiling.quality import find_warnings
from latfit.profiling.result import ProfileResult, cell_columns
from latfit.profiling.sampler import Visits, run_profile
from latfit.profiling.shapes import PRESETS
from latfit.stats import FloatArray
from latfit.trace.table import Trace
from tests.unit.profiling.fake_device import FakeDevice, FakeFaults
from tests.unit.profiling.planted import codes, fake, run_fake, saturation_ms

CELLS = default_cells(*LEVELS[1])
GUESS = [StepCost(1.0, 2e8).step_ms(PRESETS["tiny"], cell) for cell in CELLS]
TRUTH = np.array([saturation_ms(cell.B, cell.S) for cell in CELLS])
THETA = np.array([0.8, 3.0, 1.0, 12.0, 0.4, 0.05, 0.02, 0.001])
SURFACE = Surface(model_named("saturation"), THETA, [0, 1, 3, 4, 5, 6, 7])


def adaptive(precision: float = 0.03, budget_s: float = 120.0, **device: float) -> tuple[ProfileResult, AdaptiveDesign]:
    design = AdaptiveDesign(refit, GUESS)
    result = run_profile(fake(**device), CELLS, budget_s=budget_s, precision=precision, design=design)  # type: ignore[arg-type]
    return result, design


def error_at(result: ProfileResult, time_s: float) -> float:
    """Root mean square of the relative errors over all cells, of a fit to what was measured until then."""
    times: list[list[float]] = [[] for _ in CELLS]
    for sample in result.samples:
        if not sample.warmup and sample.t_s <= time_s:
            times[sample.cell].append(sample.T_ms)
    table = cell_columns(CELLS)
    first = refit(rows_to_fit(table, times))
    assert first is not None
    found = refit(rows_to_fit(table, times, knowledge(first, table, times, 0.03).misfit))
    assert found is not None
    return float(np.sqrt(np.mean(np.expm1(found.log_ms(table) - np.log(TRUTH)) ** 2)))


class TestInformation:
    def known(self, seed: int = 0) -> tuple[Knowledge, FloatArray]:
        rng = np.random.default_rng(seed)
        times = [list(T * np.exp(0.02 * rng.standard_normal(4))) if i % 2 else [] for i, T in enumerate(TRUTH)]
        return knowledge(SURFACE, cell_columns(CELLS), times, 1e-4), np.array([float(len(each)) for each in times])

    def information(self, known: Knowledge, counts: FloatArray) -> FloatArray:
        weights = weight(counts, known.noise, known.misfit)
        return np.asarray((known.slopes * weights[:, None]).T @ known.slopes)

    def summed_variance(self, known: Knowledge, counts: FloatArray) -> float:
        inverse = np.linalg.inv(self.information(known, counts))
        return sum(float(J @ inverse @ J) for J in known.slopes)

    def test_gain_is_the_fall_of_the_summed_variance(self) -> None:
        known, counts = self.known()
        for samples in (4, 16):
            gains = known.gain(counts, samples)
            for cell in range(0, len(CELLS), 5):
                more = counts.copy()
                more[cell] += samples
                fall = self.summed_variance(known, counts) - self.summed_variance(known, more)
                assert gains[cell] == pytest.approx(fall, rel=1e-3, abs=1e-9)

    def test_a_cell_that_is_known_well_enough_counts_for_less(self) -> None:
        rng = np.random.default_rng(0)
        times = [list(T * np.exp(0.02 * rng.standard_normal(4))) for T in TRUTH]
        known = knowledge(SURFACE, cell_columns(CELLS), times, 0.03)
        inside = known.half_widths < 0.03
        assert np.any(inside)
        np.testing.assert_allclose(known.importance[inside], (known.half_widths[inside] / 0.03) ** 2)
        assert np.all(known.importance[~inside] == 1.0)

    def test_a_further_visit_updates_the_inverse(self) -> None:
        known, counts = self.known()
        more = counts.copy()
        more[7] += 4
        wanted = np.linalg.inv(self.information(known, more))
        np.testing.assert_allclose(known.after(7, counts[7], 4).covariance, wanted, rtol=1e-4, atol=1e-9)

    def test_slopes_are_those_of_the_log_latency(self) -> None:
        table, step = cell_columns(CELLS), 1e-6
        slopes = SURFACE.slopes(table)
        for column, parameter in enumerate(SURFACE.free):
            theta = THETA.copy()
            theta[parameter] *= 1 + step
            moved = Surface(SURFACE.model, theta, SURFACE.free).log_ms(table) - SURFACE.log_ms(table)
            np.testing.assert_allclose(slopes[:, column], moved / np.linalg.norm(moved), atol=1e-4)

    def test_repeating_a_cell_stops_paying(self) -> None:
        known, _ = self.known()
        gains = [known.gain(np.full(len(CELLS), float(n)), 4)[3] for n in (0, 4, 40, 400)]
        assert gains == sorted(gains, reverse=True)
        assert gains[-1] < 0.01 * gains[0]

    def test_intervals_cover_the_truth(self) -> None:
        """Predictions of fits to 30 noisy designs: 95 % intervals hold the planted truth at least nine times in ten."""
        hits = []
        rng = np.random.default_rng(1)
        table = cell_columns(CELLS)
        for _ in range(30):
            times = [list(T * np.exp(0.03 * rng.standard_normal(4))) if i % 2 else [] for i, T in enumerate(TRUTH)]
            measured = [i for i, each in enumerate(times) if each]
            rows = table.select(np.array(measured)).with_columns(T_ms=np.array([np.median(times[i]) for i in measured]))
            found = saturation_refit(rows)
            known = knowledge(found, table, times, 0.03)
            hits.append(np.mean(np.abs(found.log_ms(table) - np.log(TRUTH)) <= known.half_widths))
        assert np.mean(hits) >= 0.9

    def test_cells_are_fitted_by_what_their_samples_are_worth(self) -> None:
        """Two cells with noise of 2 %, one sampled 4 times and one 64 times, misfit of 1 %."""
        rng = np.random.default_rng(2)
        times: list[list[float]] = [[] for _ in CELLS]
        for cell, samples in ((2, 4), (9, 64)):
            times[cell] = list(TRUTH[cell] * np.exp(0.02 * rng.standard_normal(samples)))
        noise = knowledge(SURFACE, cell_columns(CELLS), times, 0.03).noise
        rows = rows_to_fit(cell_columns(CELLS), times, 0.01)
        variances = [0.01**2 + np.pi / 2 * noise**2 / samples for samples in (4, 64)]
        weights = rows.floats("cell_rows")
        assert weights[1] / weights[0] == pytest.approx(variances[0] / variances[1])
        assert weights.sum() == pytest.approx(2.0)
        assert rows.floats("S").tolist() == [CELLS[2].S, CELLS[9].S]

    @pytest.mark.parametrize("misfit", [0.01, 0.05])
    def test_finds_what_the_model_misses_beside_the_noise(self, misfit: float) -> None:
        """Noise of 3 % and deviations of known size; their estimate from n - p = 23 has a relative standard error of
        1/sqrt(46), the noise of the medians of 16 samples is as large as the smaller misfit."""
        found = []
        for seed in range(20):
            rng = np.random.default_rng(seed)
            real = np.exp(SURFACE.log_ms(cell_columns(CELLS)) + misfit * rng.standard_normal(len(CELLS)))
            times = [list(T * np.exp(0.03 * rng.standard_normal(16))) for T in real]
            known = knowledge(SURFACE, cell_columns(CELLS), times, 0.03)
            freedom = len(CELLS) - known.slopes.shape[1]
            found.append(known.misfit**2 * freedom / len(CELLS))
        assert np.mean(found) == pytest.approx(misfit**2, rel=0.35)


def saturation_refit(rows: Trace) -> Surface:
    from latfit.fitting.data import rows_of
    from latfit.fitting.problem import FitOptions, make_problem
    from latfit.fitting.solver.solve import solve

    problem = make_problem(rows_of(rows), FitOptions("saturation"))
    return Surface(problem.model, problem.theta(solve(problem).z), problem.free)


class TestFirstCells:
    def test_are_different_and_span_the_grid(self) -> None:
        chosen = [CELLS[index] for index in first_cells(CELLS, np.array(GUESS))]
        assert len(set(chosen)) == len(chosen) < len(CELLS) / 2
        assert {cell.phase for cell in chosen} == {"decode", "prefill", "mixed"}
        assert min(cell.S for cell in chosen) == 1
        assert max(cell.S for cell in chosen) >= 100

    def test_a_grid_smaller_than_the_design_is_taken_whole(self) -> None:
        assert sorted(first_cells(CELLS[:3], np.ones(3))) == [0, 1, 2]


class TestRun:
    def test_within_a_percent_everywhere_in_a_fifth_of_the_full_grids_time(self) -> None:
        """On planted truth with noise of 1 %: the worst error of the fit over all cells, measured or not, is
        within 1 % on average over five runs."""
        full = run_profile(fake(seed=1), CELLS, budget_s=600.0)
        errors = []
        for seed in range(5):
            result, design = adaptive(seed=seed)
            assert result.stop == "precise"
            assert result.elapsed_s <= full.elapsed_s / 5
            assert design._surface is not None
            errors.append(np.abs(np.expm1(design._surface.log_ms(cell_columns(CELLS)) - np.log(TRUTH))).max())
        assert np.mean(errors) <= 0.01

    def test_the_stated_interval_holds_the_worst_error(self) -> None:
        _, design = adaptive()
        assert design._surface is not None
        error = np.abs(design._surface.log_ms(cell_columns(CELLS)) - np.log(TRUTH)).max()
        assert design.half_width is not None
        assert error <= design.half_width <= 0.03

    @pytest.mark.parametrize(("noise", "bend"), [(0.02, 0.0), (0.02, 0.1)])
    def test_the_stated_error_is_that_of_fits_that_leave_a_cell_out(self, noise: float, bend: float) -> None:
        """The closed form against the real thing: each cell predicted by a fit to all others, with noise alone and
        with a deviation of 10 % that the model lacks."""
        rng = np.random.default_rng(5)
        real = TRUTH * np.exp(bend * rng.standard_normal(len(CELLS)))
        times = [list(T * np.exp(noise * rng.standard_normal(8))) for T in real]
        table, everything = cell_columns(CELLS), list(range(len(CELLS)))
        whole = saturation_refit(rows_to_fit(table, times))
        assert whole is not None
        stated = knowledge(whole, table, times, 0.03).left_out_error
        errors = []
        for out in everything:
            rest = [index for index in everything if index != out]
            found = saturation_refit(rows_to_fit(table.select(np.array(rest)), [times[index] for index in rest]))
            predicted = float(found.log_ms(table.select(np.array([out])))[0])
            errors.append(abs(math.expm1(predicted - float(np.log(np.median(times[out]))))))
        assert stated == pytest.approx(np.mean(errors), rel=0.15)

    def test_too_few_cells_say_so(self) -> None:
        """As many cells as parameters: nothing is left to compare a prediction with."""
        parameters = SURFACE.slopes(cell_columns(CELLS)).shape[1]
        times = [[T] * 4 if index < parameters else [] for index, T in enumerate(TRUTH.tolist())]
        error = knowledge(SURFACE, cell_columns(CELLS), times, 0.03).left_out_error
        result = replace(run_fake(fake(), budget_s=1.0), prediction_error=error)
        assert [warning.code for warning in find_warnings(result)] == ["prediction_wide"]

    def test_a_short_budget_ends_in_time(self) -> None:
        result, _ = adaptive(noise=0.1, budget_s=2.0)
        assert result.stop == "budget"
        assert result.elapsed_s <= 2.0 + max(sample.T_ms for sample in result.samples) / 1e3
        assert "unstable_timing" in codes(result)
        assert not codes(result) & {"too_few_repeats", "not_measured"}

    def test_cells_without_memory_are_left_out(self) -> None:
        device = fake(faults=FakeFaults(memory_tokens=200))
        design = AdaptiveDesign(refit, GUESS)
        result = run_profile(device, CELLS, budget_s=60.0, precision=0.1, design=design)
        assert {limit.cell.S > 200 for limit in result.limits} == {True}
        assert result.stop == "precise"

    def test_drift_shows_though_most_cells_are_visited_once(self) -> None:
        device = fake(faults=FakeFaults(drift_per_s=0.05))
        result = run_profile(device, CELLS, budget_s=30.0, precision=1e-3, design=AdaptiveDesign(refit, GUESS))
        assert any("from start to end" in warning.message for warning in result.warnings)

    def test_a_fit_that_fails_still_measures(self) -> None:
        result = run_profile(fake(), CELLS, budget_s=5.0, design=AdaptiveDesign(lambda _: None, GUESS))
        assert result.stop == "budget"
        assert sum(result.measured) > len(CELLS) / 2
        assert result.prediction_error is None

    def test_half_the_grids_time_is_enough_for_its_error(self) -> None:
        """Noise of 5 %, root mean squares over three seeds: the error over all cells at half of the time is the full
        grid's at its end, but for chance. An estimate from 3 x 5 free directions has a relative standard error of
        1/sqrt(30), the ratio of two one of a fourth."""
        whole = half = 0.0
        for seed in range(3):
            full = run_profile(fake(noise=0.05, seed=2 * seed), CELLS, budget_s=600.0)
            result, _ = adaptive(1e-4, full.elapsed_s / 2, noise=0.05, seed=2 * seed + 1)
            whole += error_at(full, full.elapsed_s) ** 2
            half += error_at(result, full.elapsed_s / 2) ** 2
        assert half**0.5 <= 1.5 * whole**0.5

    def test_parameters_left_at_zero_are_taken_as_known(self) -> None:
        theta = np.where(np.arange(len(THETA)) == 6, 0.0, THETA)
        assert list(Surface(SURFACE.model, theta, SURFACE.free).moving().free) == [0, 1, 3, 4, 5, 7]

    def test_what_the_model_lacks_is_seen(self) -> None:
        """A cell of middle cost is half as slow again, for no reason a model knows: it is measured all the same."""
        later = sorted(set(range(len(CELLS))) - set(first_cells(CELLS, np.array(GUESS))), key=lambda i: TRUTH[i])
        odd = later[len(later) // 2]

        def planted(B: int, S: int) -> float:
            return saturation_ms(B, S) * (1.5 if (CELLS[odd].B, CELLS[odd].S) == (B, S) else 1.0)

        result = run_profile(
            FakeDevice(planted, noise=0.01), CELLS, budget_s=60.0, precision=1e-4, design=AdaptiveDesign(refit, GUESS)
        )
        assert result.measured[odd]

    def test_the_cost_of_warming_up_is_that_of_the_visits_before(self) -> None:
        """A new cell's first steps take 3 and 2 times its time; later the first takes twice."""
        run = Visits([fake(noise=0.0)], CELLS, 60.0, 0.03)
        for cell in (0, 5, 9, 0, 5):
            run.visit(cell)
        assert _median_warmup(run) == pytest.approx(np.median([5.0, 5.0, 5.0, 2.0, 2.0]))

    def test_what_fits_take_is_counted(self) -> None:
        """Each fit takes a second of the clock: no more than a fourth of the time goes to them, but for the first."""
        device = fake()

        def slow(rows: Trace) -> Surface | None:
            device._clock_s += 1.0
            return refit(rows)

        design = AdaptiveDesign(slow, GUESS)
        result = run_profile(device, CELLS, budget_s=40.0, precision=1e-4, design=design)
        assert 3 <= design.fits <= 1 + result.elapsed_s / 4
