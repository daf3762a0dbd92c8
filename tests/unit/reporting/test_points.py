"""What the figures draw is what was measured and what the fit says."""

from dataclasses import replace

import numpy as np
import pytest

from latfit.hardware.profile import ExecutionPath
from latfit.model.fit_result import FitResult
from latfit.reporting.fit import plot_data
from latfit.stats import error_metrics
from latfit.trace.table import Trace
from tests.unit.reporting.conftest import machine, planted_ms, planted_rows


class TestAgreement:
    def test_error_is_signed_and_relative_to_the_measurement(self, fit: FitResult) -> None:
        B, S = np.array([8.0, 8.0]), np.array([512.0, 512.0])
        T = planted_ms(B, S) * np.array([2.0, 0.5])
        rows = plot_data.agreement(fit, Trace({"B": B, "S": S, "T_ms": T}))
        assert rows.error_pct == pytest.approx([-50.0, 100.0])

    def test_metrics_are_those_of_the_rows_drawn(self, fit: FitResult, rows: Trace) -> None:
        part = rows.select(np.arange(40))
        drawn = plot_data.agreement(fit, part)
        expected = error_metrics(part.floats("T_ms"), planted_ms(part.floats("B"), part.floats("S")))
        assert drawn.metrics == pytest.approx(expected)

    def test_phase_from_its_column_from_prefill_tokens_or_unknown(self, fit: FitResult) -> None:
        base = {"B": np.array([4.0, 4.0, 4.0]), "S": np.array([4.0, 64.0, 67.0]), "T_ms": np.full(3, 20.0)}
        labelled = Trace({**base, "phase": np.array(["decode", "something else", None], dtype=object)})
        assert plot_data.agreement(fit, labelled).phase.tolist() == ["decode", "", ""]
        counted = Trace({**base, "prefill_tokens": np.array([0.0, 64.0, 64.0])})
        assert plot_data.agreement(fit, counted).phase.tolist() == ["decode", "prefill", "mixed"]
        assert plot_data.agreement(fit, Trace(base)).phase.tolist() == ["decode", "", ""]


class TestCells:
    def test_medians_by_cell_as_a_loop_finds_them(self, rows: Trace) -> None:
        shuffled = rows.select(np.random.default_rng(3).permutation(len(rows)))
        cells = plot_data.measured_cells(shuffled)
        by_hand: dict[tuple[float, float], list[float]] = {}
        for B, S, T in zip(rows["B"], rows["S"], rows["T_ms"], strict=True):
            by_hand.setdefault((B, S), []).append(T)
        found = dict(zip(zip(cells.B, cells.S, strict=True), cells.median_ms, strict=True))
        assert found.keys() == by_hand.keys()
        for cell, times in by_hand.items():
            assert found[cell] == pytest.approx(np.median(times))
        assert cells.rows.sum() == len(rows)

    def test_no_rows_no_cells(self) -> None:
        assert len(plot_data.gathered(np.empty(0), np.empty(0), np.empty(0)).B) == 0


class TestThinning:
    def test_every_row_is_stood_for_and_outliers_stay(self) -> None:
        random = np.random.default_rng(0)
        x, y = random.normal(0, 1, 60_000), random.normal(0, 1, 60_000)
        x[17], y[17] = 9.0, -9.0
        kept, counts = plot_data.thinned(x, y)
        assert counts.sum() == 60_000
        assert len(kept) < 10_000
        assert 17 in kept

    def test_constant_columns(self) -> None:
        kept, counts = plot_data.thinned(np.ones(10), np.ones(10))
        assert (kept.tolist(), counts.tolist()) == ([0], [10])


class TestRunningMedian:
    def test_follows_a_line_and_ignores_an_outlier(self) -> None:
        x = np.geomspace(1, 1000, 400)
        y = 2 * x
        y[200] = 1e9
        centres, medians = plot_data.running_median(x, y)
        assert medians == pytest.approx(2 * centres, rel=0.05)

    @pytest.mark.parametrize("x", [np.empty(0), np.ones(3)])
    def test_too_few_rows_give_no_line(self, x: np.ndarray) -> None:
        assert len(plot_data.running_median(x, x)[0]) == 0


class TestSurface:
    def test_is_the_formula_where_a_step_is_possible_and_nowhere_else(self, fit: FitResult) -> None:
        area = plot_data.surface(fit)
        B, S = np.meshgrid(area.B, area.S)
        assert np.array_equal(np.isnan(area.T_ms), S < B)
        possible = S >= B
        assert area.T_ms[possible] == pytest.approx(planted_ms(B, S)[possible])

    def test_shows_the_whole_box_and_something_around_it(self, fit: FitResult) -> None:
        area = plot_data.surface(fit)
        assert list(area.box) == [1, 64, 1, 2048]
        assert [area.B[0], area.S[0]] == [1, 1]
        assert min(area.B[-1] / 64, area.S[-1] / 2048) > 1

    def test_span_is_that_of_the_measured_box(self, fit: FitResult) -> None:
        B, S = np.meshgrid(np.arange(1.0, 65), np.arange(1.0, 2049))
        times = planted_ms(B, S)[S >= B]
        assert plot_data.surface(fit).span_ms == pytest.approx((times.min(), times.max()), rel=0.02)

    def test_a_single_batch_size(self, fit: FitResult) -> None:
        area = plot_data.surface(replace(fit, domain={"B": [1.0, 1.0], "S": [1.0, 64.0]}))
        assert np.isfinite(area.span_ms).all()


class TestThroughput:
    def test_lines_are_tokens_over_latency_within_what_was_measured(self, fit: FitResult, rows: Trace) -> None:
        curves = plot_data.throughput_curves(fit, plot_data.measured_cells(rows))
        assert curves[-1].B is None
        for curve in curves:
            B = curve.S if curve.B is None else curve.B
            assert curve.rate == pytest.approx(curve.S / planted_ms(B, curve.S))
            assert curve.S.max() <= (64 if curve.B is None else 2048) * (1 + 1e-12)
            assert np.all(curve.S >= B * (1 - 1e-12))

    def test_measured_points_lie_on_their_batch(self, fit: FitResult) -> None:
        exact = planted_rows(noise=0.0, repeats=1)
        for curve in plot_data.throughput_curves(fit, plot_data.measured_cells(exact)):
            B = curve.measured_tokens if curve.B is None else curve.B
            assert len(curve.measured_tokens) > 0
            assert curve.measured_rate == pytest.approx(curve.measured_tokens / planted_ms(B, curve.measured_tokens))

    def test_few_batches_even_from_many(self, fit: FitResult) -> None:
        B = np.repeat(np.arange(1.0, 65), 30)
        S = B + np.tile(np.arange(1.0, 31), 64) * 40
        cells = plot_data.gathered(B, S, planted_ms(B, S))
        curves = plot_data.throughput_curves(fit, cells)
        assert [curve.B for curve in curves][:1] == [1]
        assert len(curves) <= 5

    def test_without_rows(self, fit: FitResult) -> None:
        curves = plot_data.throughput_curves(fit, None)
        assert {1, 64} <= {curve.B for curve in curves}
        assert all(len(curve.measured_rate) == 0 for curve in curves)


def test_batch_latency_says_what_lies_beyond_the_measured(fit: FitResult) -> None:
    small = replace(fit, domain={"B": [1, 16], "S": [1, 2048]})
    paths = [*machine(gpu=fit).paths.values(), ExecutionPath("cpu", small)]
    gpu, cpu = plot_data.batch_latency(paths, {"gpu": plot_data.measured_cells(planted_rows(noise=0.0))}, 1)
    assert gpu.T_ms == pytest.approx(planted_ms(gpu.B, gpu.B))
    assert gpu.inside.all()
    assert np.array_equal(cpu.inside, cpu.B <= 16)
    assert gpu.measured_ms == pytest.approx(planted_ms(gpu.measured_batch, gpu.measured_batch))
    assert len(cpu.measured_ms) == 0
