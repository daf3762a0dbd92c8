"""The picture of a trace: drawn with and without time, for one row and for many."""

import numpy as np
import pytest

from latfit.reporting.fit_figures import coverage_figure
from latfit.reporting.style import png
from latfit.trace.table import Trace
from tests.conftest import planted_trace
from tests.unit.trace.test_clean import serving_log


@pytest.mark.parametrize(("trace", "panels"), [(planted_trace(0.02), 1), (serving_log(), 2)])
def test_time_is_drawn_where_it_is_known(trace: Trace, panels: int) -> None:
    assert len(coverage_figure(trace).axes) == panels


def test_every_cell_is_a_dot() -> None:
    trace = planted_trace(0.02, repeats=3)
    dots = coverage_figure(trace).axes[0].collections
    offsets = np.concatenate([np.atleast_2d(np.asarray(group.get_offsets())) for group in dots])
    assert {tuple(cell) for cell in offsets.tolist()} >= set(zip(trace["B"], trace["S"], strict=True))


def test_a_single_row_and_hostile_names() -> None:
    row = {"B": np.ones(1), "S": np.ones(1), "T_ms": np.ones(1), "t_s": np.zeros(1)}
    names = {"run": np.array(["$<script>_"], dtype=object), "phase": np.array(["_$x$"], dtype=object)}
    assert png(coverage_figure(Trace({**row, **names}))).startswith(b"\x89PNG")
