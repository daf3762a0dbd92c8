"""What the figures draw is what was measured and what the fit says."""

import numpy as np
import pytest
from msgspec import structs

from latfit.model.fit_result import FitResult
from latfit.reporting.plot_data import Agreement, FitView, gather_cells
from latfit.trace.table import Trace
from tests.unit.reporting.conftest import planted_ms


def agreement(fit: FitResult, rows: Trace) -> Agreement:
    found = FitView(fit, rows).agreement
    assert found is not None
    return found


def test_predictions_stand_beside_their_measurement(fit: FitResult) -> None:
    B, S = np.array([8.0, 8.0]), np.array([512.0, 512.0])
    T = planted_ms(B, S) * np.array([2.0, 0.5])
    found = agreement(fit, Trace({"B": B, "S": S, "T_ms": T}))
    assert found.predicted_ms / found.measured_ms == pytest.approx([0.5, 2.0])


def test_phase_from_its_column_from_prefill_tokens_or_unknown(fit: FitResult) -> None:
    base = {"B": np.array([4.0, 4.0, 4.0]), "S": np.array([4.0, 64.0, 67.0]), "T_ms": np.full(3, 20.0)}
    labelled = Trace({**base, "phase": np.array(["decode", "something else", None], dtype=object)})
    assert agreement(fit, labelled).phase.tolist() == ["decode", "", ""]
    counted = Trace({**base, "prefill_tokens": np.array([0.0, 64.0, 64.0])})
    assert agreement(fit, counted).phase.tolist() == ["decode", "prefill", "mixed"]


def test_medians_by_cell_as_a_loop_finds_them(rows: Trace) -> None:
    shuffled = rows.select(np.random.default_rng(3).permutation(len(rows)))
    cells = gather_cells(*(shuffled.floats(name) for name in ("B", "S", "T_ms")))
    by_hand: dict[tuple[float, float], list[float]] = {}
    for B, S, T in zip(rows["B"], rows["S"], rows["T_ms"], strict=True):
        by_hand.setdefault((B, S), []).append(T)
    found = dict(zip(zip(cells.B, cells.S, strict=True), cells.median_ms, strict=True))
    assert found == pytest.approx({cell: np.median(times) for cell, times in by_hand.items()})
    assert cells.rows.sum() == len(rows)


def test_the_surface_is_the_formula_where_a_step_is_possible_and_nowhere_else(fit: FitResult) -> None:
    view = FitView(fit)
    area = view.surface
    B, S = np.meshgrid(area.B, area.S)
    assert np.array_equal(np.isnan(area.T_ms), S < B)
    assert area.T_ms[S >= B] == pytest.approx(planted_ms(B, S)[S >= B])
    assert list(view.box) == [1, 64, 1, 2048]
    assert min(area.B[-1] / 64, area.S[-1] / 2048) > 1
    grid_B, grid_S = np.meshgrid(np.arange(1.0, 65), np.arange(1.0, 2049))
    times = planted_ms(grid_B, grid_S)[grid_S >= grid_B]
    assert view.span_ms == pytest.approx((times.min(), times.max()), rel=0.02)
    assert np.isfinite(FitView(structs.replace(fit, domain={"B": [1.0, 1.0], "S": [1.0, 64.0]})).span_ms).all()
