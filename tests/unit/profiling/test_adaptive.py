"""The adaptive design: cells in the order of what they tell a fit for their cost."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from latfit.fitting.data import rows_of
from latfit.fitting.problem import FitOptions, make_problem
from latfit.fitting.solver.solve import solve
from latfit.profiling.grid import LEVELS, ProfileRequest, StepCost, default_cells, order_by_information
from latfit.profiling.quality import find_symptoms
from latfit.profiling.result import cell_columns
from latfit.profiling.run import measure
from latfit.profiling.sampler import run_profile
from latfit.profiling.shapes import PRESETS
from tests.unit.profiling.fake_device import FakeFaults
from tests.unit.profiling.planted import codes, fake, saturation_ms

CELLS = tuple(default_cells(*LEVELS[1]))
GUESS = [StepCost(1.0, 2e8).step_ms(PRESETS["tiny"], cell) for cell in CELLS]
ORDER = order_by_information(CELLS, GUESS)
TRUTH = np.array([saturation_ms(cell.B, cell.S) for cell in CELLS])


class TestOrder:
    def test_names_every_cell_once_and_spans_the_grid_at_once(self) -> None:
        assert sorted(ORDER) == list(range(len(CELLS)))
        first = [CELLS[index] for index in ORDER[:12]]
        assert {cell.phase for cell in first} == {"decode", "prefill", "mixed"}
        assert min(cell.S for cell in first) == 1
        assert max(cell.S for cell in first) >= 100

    def test_a_fifth_of_the_grids_time_determines_a_fit(self) -> None:
        """Noise of 1 %: mean error over all cells of a fit to what a run measured in a fifth of the full grid's time,
        against rounds in shuffled order for as long."""

        def error(seed: int, first: Sequence[int]) -> float:
            result = run_profile(fake(seed=seed), CELLS, budget_s=full_s / 5, precision=1e-6, seed=seed, first=first)
            there = np.flatnonzero(result.measured)
            medians = np.array([np.median(result.times_ms[index]) for index in there])
            table = cell_columns(CELLS)
            problem = make_problem(rows_of(table.select(there).with_columns(T_ms=medians)), FitOptions("context"))
            if len(there) < len(problem.free):
                return 1.0
            columns = {name: table.floats(name) for name in table.columns if name != "phase"}
            T = problem.model.latency_ms(problem.theta(solve(problem).z), columns)
            return float(np.mean(np.abs(T / TRUTH - 1)))

        full_s = run_profile(fake(), CELLS, budget_s=600.0).elapsed_s
        ordered, shuffled = (np.mean([error(seed, first) for seed in range(4)]) for first in (ORDER, []))
        assert ordered <= 0.8 * shuffled
        assert ordered <= 0.01


class TestRun:
    def test_drift_shows_though_most_cells_are_visited_once(self) -> None:
        cells = default_cells(*LEVELS[0])
        order = order_by_information(cells, [saturation_ms(cell.B, cell.S) for cell in cells])
        device = fake(faults=FakeFaults(drift_per_s=0.05))
        result = run_profile(device, cells, budget_s=12.0, precision=1e-3, first=order)
        visits = Counter(sample.cell for sample in result.samples if sample.visit == 1)
        assert len(visits) < 3
        assert "from start to end" in str(find_symptoms(result))

    def test_it_ends_in_time_and_asks_for_no_repeats(self) -> None:
        device = fake(noise=0.1)
        _, (outcome,) = measure(ProfileRequest(design="adaptive", budget_ms=2000.0), device=device)
        result = outcome.result
        assert result.stop == "budget"
        assert result.elapsed_s <= 2.0 + max(sample.T_ms for sample in result.samples) / 1e3
        assert "busy_machine" in codes(result)
        assert "few_data" not in codes(result)
