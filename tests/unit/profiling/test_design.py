"""Which cells are measured: the user's own, or as many as the budget carries."""

import pytest
from hypothesis import given, strategies as st

from latfit.errors import WrongUsage
from latfit.profiling.grid import (
    _STEPS_PER_CELL,
    LEVELS,
    StepCost,
    default_cells,
    grid_for_budget,
    parse_grid,
    time_pilot,
)
from latfit.profiling.shapes import PRESETS, StepShape
from tests.unit.profiling.planted import fake

TINY = PRESETS["tiny"]
COST = StepCost(floor_ms=1.5, flops_per_ms=2e8)


class TestDefaultGrid:
    @pytest.mark.parametrize("level", LEVELS)
    def test_has_no_cell_twice_and_stays_within_its_corner(self, level: tuple[int, int, int]) -> None:
        cells = default_cells(*level)
        assert len(set(cells)) == len(cells)
        assert max(cell.B for cell in cells) <= level[0]
        assert max(cell.S for cell in cells) <= level[1]
        assert all(cell.S >= cell.B for cell in cells)

    @pytest.mark.parametrize("budget_s", [1.0, 5.0, 20.0, 60.0])
    def test_a_smaller_budget_gets_a_grid_that_fits_it(self, budget_s: float) -> None:
        cells = grid_for_budget(TINY, COST, budget_s)
        assert sum(COST.step_ms(TINY, cell) for cell in cells) * _STEPS_PER_CELL / 1e3 <= budget_s

    def test_each_context_repeats_only_cells_that_have_one(self) -> None:
        one, two = default_cells(16, 64), default_cells(16, 64, contexts=(128, 512))
        with_context = sum(cell.decode_requests > 0 for cell in one)
        assert len(two) == len(one) + with_context
        assert {cell.context for cell in two if cell.decode_requests} == {128, 512}

    def test_the_pilot_measures_the_device_clock(self) -> None:
        device = fake(noise=0.0)
        cost = time_pilot(device, TINY)
        assert device.now_s() > 0
        guess = cost.step_ms(TINY, StepShape(prefill=(64,)))
        assert guess == pytest.approx(cost.floor_ms + (guess - cost.floor_ms))
        assert cost.floor_ms > 0


class TestWrittenGrid:
    def test_example_of_the_help(self) -> None:
        cells = parse_grid("B=1,2,4,8;S=1,16,64,256")
        assert [(cell.B, cell.S) for cell in cells] == [
            (B, S) for B in (1, 2, 4, 8) for S in (1, 16, 64, 256) if S >= B
        ]

    @given(
        st.sets(st.integers(1, 300), min_size=1, max_size=8),
        st.sets(st.integers(1, 5000), min_size=1, max_size=8),
    )
    def test_keeps_exactly_the_pairs_with_a_token_for_every_request(self, batches: set[int], tokens: set[int]) -> None:
        wanted = {(B, S) for B in batches for S in tokens if S >= B}
        text = f"B={','.join(map(str, batches))}; S={','.join(map(str, tokens))}"
        if not wanted:
            with pytest.raises(WrongUsage):
                parse_grid(text)
            return
        assert {(cell.B, cell.S) for cell in parse_grid(text)} == wanted

    @pytest.mark.parametrize(
        "text",
        ["", "B=1", "S=4", "B=1;S=", "B=1;S=a", "B=0;S=4", "B=8;S=4", "B=1;S=1;B=2", "B=1,2", "B=1;S=-4",
         "B=1.5;S=4", "1,2;3,4", "B=1;S=99999999999", "B=1;S=²"],
    )  # fmt: skip
    def test_anything_else_is_refused_with_an_example(self, text: str) -> None:
        with pytest.raises(WrongUsage, match="--grid") as caught:
            parse_grid(text)
        assert "B=1,2,4,8;S=1,16,64,256" in caught.value.remedy

    def test_a_grid_without_end_is_refused(self) -> None:
        axis = ",".join(map(str, range(1, 200)))
        with pytest.raises(WrongUsage, match="cells, more than"):
            parse_grid(f"B={axis};S={axis}")
