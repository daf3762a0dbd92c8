"""What a run promises, on a device whose truth is planted and whose clock is virtual."""

from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import binom

from latfit.profiling.devices.device import DeviceFailed
from latfit.profiling.result import ProfileResult
from latfit.profiling.sampler import (
    VISITS_AT_LEAST,
    run_profile,
)
from latfit.profiling.shapes import StepShape
from tests.unit.profiling.fake_device import FakeDevice, FakeFaults
from tests.unit.profiling.planted import CELLS, codes, fake, run_fake, saturation_ms


class TestMeasuring:
    def test_intervals_cover_the_planted_medians(self) -> None:
        """At least the binomial 0.1 % quantile of the 95 % intervals hold the truth; the lognormal's median is T."""
        result = run_fake(fake(noise=0.02), precision=1e-6, budget_s=40.0)
        hits = [
            interval.low <= saturation_ms(cell.B, cell.S) <= interval.high
            for cell, interval in zip(result.cells, result.intervals, strict=True)
        ]
        assert sum(hits) >= binom.ppf(0.001, len(hits), 0.95)

    def test_stops_when_every_cell_is_precise(self) -> None:
        result = run_fake(fake())
        assert result.stop == "precise"
        assert all(result.within_precision)
        assert result.elapsed_s < result.budget_s
        assert result.warnings == ()

    def test_precise_cells_get_no_further_visits_but_the_anchor(self) -> None:
        """A noisy cell goes on; of the others only the quickest is visited more than the fewest times."""
        noisy = StepShape(1, 256)
        rng = np.random.default_rng(0)

        def latency_ms(B: int, S: int) -> float:
            return 1.0 + B if B > 1 else 60.0 * float(np.exp(0.3 * rng.standard_normal()))

        device = FakeDevice(latency_ms, noise=0.0)
        cells = [noisy, *(StepShape(B, 256) for B in range(2, 12))]
        run_profile(device, cells, budget_s=30.0)
        visits = {cell: device.visited.count(cell) for cell in cells}
        again = {cell for cell, count in visits.items() if count > VISITS_AT_LEAST}
        assert again == {noisy, StepShape(2, 256)}


class TestWarmUp:
    def test_slow_first_steps_are_no_samples(self) -> None:
        result = run_fake(fake(noise=0.0, faults=FakeFaults(warmup_steps=3, warmup_factor=4.0)))
        for sample in result.samples:
            cell = result.cells[sample.cell]
            assert sample.warmup == (sample.T_ms > 1.5 * saturation_ms(cell.B, cell.S))


class TestOrder:
    def order(self, result: ProfileResult, visit: int) -> list[int]:
        return list(dict.fromkeys(s.cell for s in result.samples if s.visit == visit))

    def test_each_round_has_its_own_order(self) -> None:
        result = run_fake(fake(noise=0.0))
        rounds = [self.order(result, visit) for visit in range(VISITS_AT_LEAST)]
        assert all(sorted(cells) == list(range(len(CELLS))) for cells in rounds)
        assert all(first != second for first, second in pairwise(rounds))

    def test_the_seed_decides_the_order(self) -> None:
        assert run_fake(fake(), seed=5).samples == run_fake(fake(), seed=5).samples
        assert self.order(run_fake(fake(), seed=5), 0) != self.order(run_fake(fake(), seed=6), 0)


class TestBudget:
    @pytest.mark.parametrize("budget_s", [0.05, 0.5, 2.0, 7.0])
    def test_is_never_exceeded_by_more_than_the_step_in_flight(self, budget_s: float) -> None:
        result = run_fake(fake(noise=0.1), budget_s=budget_s, precision=1e-9)
        assert result.stop == "budget"
        assert result.elapsed_s - result.samples[-1].T_ms / 1e3 <= budget_s


class TestTrouble:
    def test_ctrl_c_keeps_what_was_measured(self) -> None:
        result = run_fake(fake(faults=FakeFaults(interrupt_after=100)))
        assert result.interrupted
        assert len(result.samples) == 99

    def test_out_of_memory_is_a_limit(self) -> None:
        result = run_fake(fake(faults=FakeFaults(memory_tokens=64)))
        assert {limit.cell for limit in result.limits} == {cell for cell in CELLS if cell.S > 64}
        assert result.stop == "precise"
        assert "few_data" not in codes(result)
        assert all(there == (cell.S <= 64) for cell, there in zip(CELLS, result.measured, strict=True))

    def test_a_broken_device_is_one_clear_error_with_the_rest_kept(self) -> None:
        with pytest.raises(DeviceFailed, match="the planted fault") as caught:
            run_fake(fake(faults=FakeFaults(fail_after=50)))
        assert str(caught.value).startswith("device fake: the device broke at B=")
        assert caught.value.partial is not None
        assert len(caught.value.partial.samples) == 49

    @pytest.mark.parametrize("lie", [0.0, -1.0, float("nan"), float("inf")])
    def test_a_clock_that_cannot_be_right_is_an_error(self, lie: float) -> None:
        with pytest.raises(DeviceFailed, match="timed a step at"):
            run_profile(FakeDevice(lambda B, S: lie), CELLS, budget_s=1.0)
