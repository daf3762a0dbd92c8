"""What the figures draw is what was measured and what the fit says."""

from dataclasses import replace

import numpy as np
import pytest

from latfit.model.fit_result import FitResult
from latfit.reporting.fit.plot_data import Agreement, FitView, measured_cells, thinned
from latfit.trace.table import Trace
from tests.unit.reporting.conftest import planted_ms, planted_rows


def agreement(fit: FitResult, rows: Trace) -> Agreement:
    found = FitView("cpu", fit, rows).agreement
    assert found is not None
    return found


class TestAgreement:
    def test_error_is_signed_and_relative_to_the_measurement(self, fit: FitResult) -> None:
        B, S = np.array([8.0, 8.0]), np.array([512.0, 512.0])
        T = planted_ms(B, S) * np.array([2.0, 0.5])
        assert agreement(fit, Trace({"B": B, "S": S, "T_ms": T})).error_pct == pytest.approx([-50.0, 100.0])

    def test_phase_from_its_column_from_prefill_tokens_or_unknown(self, fit: FitResult) -> None:
        base = {"B": np.array([4.0, 4.0, 4.0]), "S": np.array([4.0, 64.0, 67.0]), "T_ms": np.full(3, 20.0)}
        labelled = Trace({**base, "phase": np.array(["decode", "something else", None], dtype=object)})
        assert agreement(fit, labelled).phase.tolist() == ["decode", "", ""]
        counted = Trace({**base, "prefill_tokens": np.array([0.0, 64.0, 64.0])})
        assert agreement(fit, counted).phase.tolist() == ["decode", "prefill", "mixed"]


def test_medians_by_cell_as_a_loop_finds_them(rows: Trace) -> None:
    shuffled = rows.select(np.random.default_rng(3).permutation(len(rows)))
    cells = measured_cells(*(shuffled.floats(name) for name in ("B", "S", "T_ms")))
    by_hand: dict[tuple[float, float], list[float]] = {}
    for B, S, T in zip(rows["B"], rows["S"], rows["T_ms"], strict=True):
        by_hand.setdefault((B, S), []).append(T)
    found = dict(zip(zip(cells.B, cells.S, strict=True), cells.median_ms, strict=True))
    assert found.keys() == by_hand.keys()
    for cell, times in by_hand.items():
        assert found[cell] == pytest.approx(np.median(times))
    assert cells.rows.sum() == len(rows)


class TestThinning:
    def test_outliers_stay(self) -> None:
        random = np.random.default_rng(0)
        x, y = random.normal(0, 1, 60_000), random.normal(0, 1, 60_000)
        x[17], y[17] = 9.0, -9.0
        kept = thinned(x, y)
        assert len(kept) < 10_000
        assert 17 in kept

    def test_constant_columns(self) -> None:
        assert thinned(np.ones(10), np.ones(10)).tolist() == [0]


class TestSurface:
    def test_is_the_formula_where_a_step_is_possible_and_nowhere_else(self, fit: FitResult) -> None:
        area = FitView("cpu", fit).surface
        B, S = np.meshgrid(area.B, area.S)
        assert np.array_equal(np.isnan(area.T_ms), S < B)
        possible = S >= B
        assert area.T_ms[possible] == pytest.approx(planted_ms(B, S)[possible])

    def test_shows_the_whole_box_and_something_around_it(self, fit: FitResult) -> None:
        area = FitView("cpu", fit).surface
        assert list(area.box) == [1, 64, 1, 2048]
        assert [area.B[0], area.S[0]] == [1, 1]
        assert min(area.B[-1] / 64, area.S[-1] / 2048) > 1

    def test_span_is_that_of_the_measured_box(self, fit: FitResult) -> None:
        B, S = np.meshgrid(np.arange(1.0, 65), np.arange(1.0, 2049))
        times = planted_ms(B, S)[S >= B]
        assert FitView("cpu", fit).surface.span_ms == pytest.approx((times.min(), times.max()), rel=0.02)

    def test_a_single_batch_size(self, fit: FitResult) -> None:
        area = FitView("cpu", replace(fit, domain={"B": [1.0, 1.0], "S": [1.0, 64.0]})).surface
        assert np.isfinite(area.span_ms).all()


class TestThroughput:
    def test_lines_are_tokens_over_latency_within_what_was_measured(self, fit: FitResult, rows: Trace) -> None:
        curves = FitView("cpu", fit, rows).curves
        assert curves[-1].B is None
        assert len(curves) <= 5
        for curve in curves:
            B = curve.S if curve.B is None else curve.B
            assert curve.rate_per_s == pytest.approx(1e3 * curve.S / planted_ms(B, curve.S))
            assert curve.S.max() <= (64 if curve.B is None else 2048) * (1 + 1e-12)
            assert np.all(curve.S >= B * (1 - 1e-12))

    def test_measured_points_lie_on_their_batch(self, fit: FitResult) -> None:
        for curve in FitView("cpu", fit, planted_rows(noise=0.0, repeats=1)).curves:
            tokens = curve.measured_tokens
            assert len(tokens) > 0
            expected = 1e3 * tokens / planted_ms(tokens if curve.B is None else curve.B, tokens)
            assert curve.measured_per_s == pytest.approx(expected)

    def test_without_rows(self, fit: FitResult) -> None:
        curves = FitView("cpu", fit).curves
        assert {1, 64} <= {curve.B for curve in curves}
        assert all(len(curve.measured_per_s) == 0 for curve in curves)
