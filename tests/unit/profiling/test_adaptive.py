"""The adaptive design: cells in the order of what they tell a fit for their cost, and the error that a run states."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from latfit.api.measuring import refit
from latfit.model.registry import model_named
from latfit.profiling.adaptive import Surface, left_out_error, order_by_information
from latfit.profiling.grid import LEVELS, StepCost, default_cells
from latfit.profiling.quality import find_warnings
from latfit.profiling.result import ProfileResult, Sample, cell_columns
from latfit.profiling.sampler import Hooks, Rounds, run_profile
from latfit.profiling.shapes import PRESETS
from latfit.stats import FloatArray
from latfit.trace.table import Trace
from tests.unit.profiling.fake_device import FakeFaults
from tests.unit.profiling.planted import codes, fake, run_fake, saturation_ms

CELLS = tuple(default_cells(*LEVELS[1]))
GUESS = [StepCost(1.0, 2e8).step_ms(PRESETS["tiny"], cell) for cell in CELLS]
ORDER = order_by_information(CELLS, GUESS)
TRUTH = np.array([saturation_ms(cell.B, cell.S) for cell in CELLS])


def measured(times: list[list[float]]) -> ProfileResult:
    """A run with these samples of each cell."""
    samples = tuple(Sample(cell, 0, 0.0, T, False) for cell, each in enumerate(times) for T in each)
    return replace(run_fake(fake(), CELLS, budget_s=0.0), samples=samples)


def saturation_refit(rows: Trace) -> Surface:
    from latfit.fitting.data import rows_of
    from latfit.fitting.problem import FitOptions, make_problem
    from latfit.fitting.solver.solve import solve

    problem = make_problem(rows_of(rows), FitOptions("saturation"))
    return Surface(problem.model, problem.theta(solve(problem).z), problem.free)


class TestOrder:
    def test_names_every_cell_once_and_spans_the_grid_at_once(self) -> None:
        assert sorted(ORDER) == list(range(len(CELLS)))
        first = [CELLS[index] for index in ORDER[:12]]
        assert {cell.phase for cell in first} == {"decode", "prefill", "mixed"}
        assert min(cell.S for cell in first) == 1
        assert max(cell.S for cell in first) >= 100

    def test_each_cell_tells_most_for_its_cost(self) -> None:
        """Of three cells on one line, after one end the other end tells more than the middle, at the same cost."""
        cells = default_cells(4, 1)[:3]
        order = order_by_information(cells, [1.0, 1.0, 1.0])
        assert cells[order[-1]].B == 2

    def test_a_fifth_of_the_grids_time_determines_a_fit(self) -> None:
        """Noise of 1 %: mean error over all cells of a fit to what a run measured in a fifth of the full grid's time,
        against rounds in shuffled order for as long."""

        def error(seed: int, rounds: Rounds) -> float:
            result = run_profile(fake(seed=seed), CELLS, budget_s=full_s / 5, precision=1e-6, rounds=rounds)
            there = np.flatnonzero(result.measured)
            medians = np.array([np.median(result.times_ms[index]) for index in there])
            found = refit(cell_columns(CELLS).select(there).with_columns(T_ms=medians))
            if found is None:
                return 1.0
            return float(np.mean(np.abs(np.expm1(found.log_ms(cell_columns(CELLS)) - np.log(TRUTH)))))

        full_s = run_profile(fake(), CELLS, budget_s=600.0).elapsed_s
        ordered, shuffled = (np.mean([error(seed, Rounds(seed, first)) for seed in range(4)]) for first in (ORDER, ()))
        assert ordered <= 0.8 * shuffled
        assert ordered <= 0.01


class TestRun:
    def test_drift_shows_though_most_cells_are_visited_once(self) -> None:
        cells = default_cells(*LEVELS[0])
        order = order_by_information(cells, [saturation_ms(cell.B, cell.S) for cell in cells])
        device = fake(faults=FakeFaults(drift_per_s=0.05))
        result = run_profile(device, cells, budget_s=12.0, precision=1e-3, rounds=Rounds(0, order))
        visits = Counter(sample.cell for sample in result.samples if sample.visit == 1)
        assert len(visits) < 3
        assert any("from start to end" in warning.message for warning in result.warnings)

    def test_it_ends_in_time_and_asks_for_no_repeats(self) -> None:
        hooks = Hooks(predict=lambda result: left_out_error(result, refit))
        result = run_profile(fake(noise=0.1), CELLS, budget_s=2.0, rounds=Rounds(0, ORDER), hooks=hooks)
        assert result.stop == "budget"
        assert result.elapsed_s <= 2.0 + max(sample.T_ms for sample in result.samples) / 1e3
        assert result.prediction_error is not None
        assert "unstable_timing" in codes(result)
        assert not codes(result) & {"too_few_repeats", "not_measured"}

    def test_without_a_fit_nothing_is_predicted(self) -> None:
        assert left_out_error(run_fake(fake(), CELLS, budget_s=2.0), lambda _: None) == 1.0


class TestStatedError:
    def test_slopes_are_those_of_the_log_latency(self) -> None:
        theta = np.array([0.8, 3.0, 1.0, 12.0, 0.4, 0.05, 0.02, 0.001])
        table, step, surface = (
            cell_columns(CELLS),
            1e-6,
            Surface(model_named("saturation"), theta, [0, 1, 3, 4, 5, 6, 7]),
        )
        slopes = surface.slopes(table)
        for column, parameter in enumerate(surface.free):
            moved_theta = theta.copy()
            moved_theta[parameter] *= 1 + step
            moved: FloatArray = replace(surface, theta=moved_theta).log_ms(table) - surface.log_ms(table)
            np.testing.assert_allclose(slopes[:, column], moved / np.linalg.norm(moved), atol=1e-4)

    @pytest.mark.parametrize("bend", [0.0, 0.1])
    def test_is_that_of_fits_that_leave_a_cell_out(self, bend: float) -> None:
        """The closed form against the real thing: each cell predicted by a fit to all others, with noise alone and
        with a deviation of 10 % that the model lacks."""
        rng = np.random.default_rng(5)
        real = TRUTH * np.exp(bend * rng.standard_normal(len(CELLS)))
        times = [list(T * np.exp(0.02 * rng.standard_normal(8))) for T in real]
        stated = left_out_error(measured(times), saturation_refit)
        table, everything = cell_columns(CELLS), list(range(len(CELLS)))
        medians = np.array([np.median(each) for each in times])
        errors = []
        for out in everything:
            rest = np.array([index for index in everything if index != out])
            found = saturation_refit(table.select(rest).with_columns(T_ms=medians[rest]))
            predicted = float(found.log_ms(table.select(np.array([out])))[0])
            errors.append(abs(math.expm1(predicted - float(np.log(medians[out])))))
        assert stated == pytest.approx(np.mean(errors), rel=0.15)

    def test_too_few_cells_say_so(self) -> None:
        """Fewer cells than parameters: nothing is left to compare a prediction with."""
        result = measured([[T] * 4 if index < 4 else [] for index, T in enumerate(TRUTH.tolist())])
        error = left_out_error(result, saturation_refit)
        assert error == 1.0
        warnings = find_warnings(replace(result, prediction_error=error))
        assert "prediction_wide" in {warning.code for warning in warnings}
