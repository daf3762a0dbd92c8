"""The figures show the data that they claim, name their units, and survive odd input."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from msgspec import structs

from latfit.model.fit_parts import Estimate
from latfit.model.fit_result import FitResult
from latfit.model.registry import FAMILY
from latfit.planning import PlanOptions, latency_lines
from latfit.reporting import style
from latfit.reporting.fit_figures import PANELS, fit_figure, fit_pictures
from latfit.reporting.page import ReportInput, render, sla_line
from latfit.reporting.plan_figures import latency_figure, plan_pictures
from latfit.reporting.plot_data import FitView, SlaLine
from latfit.trace.table import Trace
from tests.unit.reporting.conftest import fit_of, machine, planted_ms, planted_rows, two_paths


def drawn(panel: str, fit: FitResult, rows: Trace | None = None, *lines: SlaLine) -> Figure:
    figure = style.new_figure()
    PANELS[panel][0](figure.subplots(), FitView(fit, rows, lines))
    return figure


def dots(figure: Figure) -> int:
    """Markers on the first axes."""
    lines = [line for line in figure.axes[0].get_lines() if line.get_marker() not in ("None", "")]
    return sum(len(np.asarray(line.get_xdata())) for line in lines)


def legend(figure: Figure) -> set[str]:
    return {text.get_text() for text in figure.axes[0].get_legend().get_texts()}  # type: ignore[union-attr]


class TestPredicted:
    def test_one_dot_a_row_and_a_line_of_equality(self, fit: FitResult, rows: Trace) -> None:
        figure = drawn("measured-vs-predicted", fit, rows)
        assert dots(figure) == len(rows)
        line = figure.axes[0].get_lines()[0]
        assert line.get_xdata() == pytest.approx(line.get_ydata())
        assert figure.axes[0].get_xlim() == figure.axes[0].get_ylim()

    def test_the_title_has_the_errors_and_the_legend_the_bias_of_each_phase(self, fit: FitResult) -> None:
        B, S = np.full(80, 8.0), np.tile([8.0, 512.0], 40)
        T = planted_ms(B, S) / np.where(S > 8, 1.3, 1.0)
        phase = np.where(S > 8, "prefill", "decode").astype(object)
        figure = drawn("measured-vs-predicted", fit, Trace({"B": B, "S": S, "T_ms": T, "phase": phase}))
        assert " ".join(figure.axes[0].get_title(loc="left").split()).endswith(", p90 30 %")
        assert {"decode (40), bias 0 %", "prefill (40), bias +30 %"} <= legend(figure)

    def test_the_picture_of_many_rows_stays_small(self, fit: FitResult) -> None:
        many = planted_rows(repeats=1300, noise=0.3)
        assert len(many) > 50_000
        assert len(style.png(drawn("measured-vs-predicted", fit, many))) < 400_000


class TestMap:
    def test_the_sla_line_runs_where_the_latency_is_the_sla(self, fit: FitResult) -> None:
        figure = drawn("latency-map", fit, None, SlaLine("20 ms", 20.0))
        edges = [c for c in figure.axes[0].collections if c.get_zorder() == 4]
        vertices = np.concatenate([path.vertices for path in edges[0].get_paths()])
        assert len(vertices) > 50
        # Linear interpolation on the grid of 220 points a side is good to a per mille of the latency.
        assert planted_ms(vertices[:, 0], vertices[:, 1]) == pytest.approx(20.0, rel=2e-3)

    @pytest.mark.parametrize(("typical_ms", "says"), [(1.0, "nowhere here"), (1e6, "all of this")])
    def test_an_sla_off_the_map_is_said_in_words(self, fit: FitResult, typical_ms: float, says: str) -> None:
        assert any(says in text for text in legend(drawn("latency-map", fit, None, SlaLine("SLA", typical_ms))))

    def test_measured_cells_are_dots(self, fit: FitResult, rows: Trace) -> None:
        cells = FitView(fit, rows).cells
        assert cells is not None
        assert dots(drawn("latency-map", fit, rows)) == len(cells.B)

    def test_the_line_agrees_with_the_plan(self, one_path: ReportInput) -> None:
        """The largest step of the plan lies on the good side of the line, one token more on the other."""
        plan, path = one_path.plan, one_path.profile.paths["cpu"]
        assert plan is not None
        line = sla_line(path, plan, 99.0)
        assert plan.S_at_B
        for row in plan.S_at_B:
            assert row.S_max is not None
            assert planted_ms(row.B, row.S_max) <= line.typical_ms < planted_ms(row.B, row.S_max + 1)


@pytest.mark.parametrize("panel", PANELS)
def test_every_axis_has_a_unit_or_counts_something(panel: str, fit: FitResult, rows: Trace) -> None:
    axes = drawn(panel, fit, rows).axes[0]
    assert axes.get_title(loc="left")
    for label in (axes.get_xlabel(), axes.get_ylabel()):
        assert "[" in label or label.startswith(("requests", "tokens"))


def test_same_input_same_pictures_and_one_less_without_rows(fit: FitResult, rows: Trace) -> None:
    first, second = (fit_pictures(FitView(fit, rows)) for _ in range(2))
    assert [picture.png for picture in first] == [picture.png for picture in second]
    assert [each.stem for each in first] == list(PANELS)
    assert [each.stem for each in fit_pictures(FitView(fit))] == ["latency-map"]
    for trace, panels in ((rows, 2), (None, 1)):
        figure = fit_figure("cpu", fit, trace)
        assert sum(bool(axes.get_title(loc="left")) for axes in figure.axes) == panels


class TestContext:
    """A model that reads cached tokens is drawn at the context that was typical of its trace, and the page says so."""

    @pytest.fixture
    def reads_context(self, fit: FitResult) -> FitResult:
        extra = {p.name: Estimate(0.0, None, None, None, p.unit) for p in FAMILY["context"].parameters}
        costs = {name: structs.replace(extra[name], value=1e-3) for name in ("tau_K", "tau_L")}
        return structs.replace(
            fit,
            model="context",
            parameters={**extra, **fit.parameters, **costs},
            domain={**fit.domain, "context_tokens": [0.0, 32768.0]},
            typical={"context_tokens": 256.0, "prefill_context_tokens": 0.0},
        )

    def test_drawn_at_the_typical_context(self, reads_context: FitResult) -> None:
        """Of B requests one may prefill; the others decode, at 1 µs for each of their 256 cached tokens."""
        area = FitView(reads_context).surface
        plain = FitView(structs.replace(reads_context, model="saturation")).surface
        dearer = area.T_ms[:, -1] - plain.T_ms[:, -1]
        assert dearer[np.isfinite(dearer)].max() == pytest.approx(1e-3 * 256 * area.B[-1], rel=0.02)
        page = render(ReportInput(machine(cpu=reads_context))).html
        assert "Figures are drawn at the trace" in page
        assert "256 tokens a request" in page


class TestPaths:
    def test_b1_is_marked_where_the_curves_cross(self) -> None:
        both = two_paths()
        plan = both.plan
        assert plan is not None
        lines = latency_lines(both.profile, 1)
        figure = latency_figure(plan, lines)
        marked = [line.get_xdata()[0] for line in figure.axes[0].get_lines() if "B1" in str(line.get_label())]  # type: ignore[index]
        assert marked == [plan.B1_idle.value]
        amx, gpu = (np.interp(marked[0], line.x, line.y) for line in lines)
        assert gpu <= amx * 1.02

    def test_names_with_dollars_and_foreign_letters_are_drawn_plainly(self, rows: Trace, fit: FitResult) -> None:
        (picture,) = plan_pictures(None, machine(**{"$x_{$": fit, "_路径": fit_of(rows)}), PlanOptions())
        assert picture.png.startswith(b"\x89PNG")


@pytest.mark.parametrize(("low", "high"), [(9.1, 9.8), (1.0, 3.0), (0.2, 40.0), (1e-3, 1e6), (7.0, 4000.0)])
def test_some_but_not_many_ticks_inside_the_range(low: float, high: float) -> None:
    for ticks in (style.log_ticks(low, high), style.log_ticks(low, high, 2)):
        assert 2 <= len(ticks) <= 10
        assert all(low <= tick <= high for tick in ticks)
        assert ticks == sorted(ticks)
