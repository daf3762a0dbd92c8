"""The figures carry the data they claim, name their units, and survive odd input."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from msgspec import structs

from latfit.model.fit_parts import Estimate
from latfit.model.fit_result import FitResult
from latfit.model.registry import FAMILY
from latfit.reporting import style
from latfit.reporting.fit import figures, figures as combined, figures as latency_map, gallery, plot_data
from latfit.reporting.fit.page import ReportInput, render
from latfit.trace.table import Trace
from tests.unit.reporting.conftest import fit_of, machine, planted_ms, planted_rows, two_paths


def dots(figure: Figure) -> int:
    """Markers drawn on the first axes."""
    clouds = [found for found in figure.axes[0].collections if isinstance(found, PathCollection)]
    return sum(len(np.asarray(cloud.get_offsets())) for cloud in clouds)


class TestPredicted:
    def test_one_dot_a_row_and_a_line_of_equality(self, fit: FitResult, rows: Trace) -> None:
        figure = figures.predicted_figure(plot_data.agreement(fit, rows))
        assert dots(figure) == len(rows)
        line = figure.axes[0].get_lines()[0]
        assert line.get_xdata() == pytest.approx(line.get_ydata())
        assert figure.axes[0].get_xlim() == figure.axes[0].get_ylim()

    def test_every_phase_is_named_with_its_rows(self, fit: FitResult, rows: Trace) -> None:
        axes = figures.predicted_figure(plot_data.agreement(fit, rows)).axes[0]
        named = {text.get_text() for text in axes.get_legend().get_texts()}  # type: ignore[union-attr]
        for phase in ("decode", "prefill", "mixed"):
            assert f"{phase} ({int((rows['phase'] == phase).sum())})" in named

    def test_title_says_how_far_half_and_most_of_the_steps_are_off(self, fit: FitResult) -> None:
        B, S = np.full(5, 8.0), np.full(5, 512.0)
        T = planted_ms(B, S) / np.array([1.02, 1.02, 1.03, 1.04, 1.04])
        title = figures.predicted_title(plot_data.agreement(fit, Trace({"B": B, "S": S, "T_ms": T})))
        assert title == "Median error 3 %, p90 4 % (n = 5)"

    def test_many_rows_are_drawn_as_fewer_dots(self, fit: FitResult) -> None:
        many = planted_rows(repeats=1300, noise=0.3)
        assert len(many) > 50_000
        figure = figures.predicted_figure(plot_data.agreement(fit, many))
        assert dots(figure) < 20_000
        assert len(style.png(figure)) < 400_000


class TestResiduals:
    @pytest.mark.parametrize(
        ("factor", "says"),
        [
            (1.0, "Unbiased: running medians within 3 % of zero"),
            (1.05, "5 % too high"),
            (1 / 1.25, "20 % too low"),
        ],
    )
    def test_title_names_the_lean(self, fit: FitResult, factor: float, says: str) -> None:
        B, S = np.full(90, 8.0), np.geomspace(8, 2000, 90)
        trace = Trace({"B": B, "S": S, "T_ms": planted_ms(B, S) / factor})
        assert says in figures.residual_title(plot_data.agreement(fit, trace))

    def test_a_lean_of_one_phase_is_not_averaged_away(self, fit: FitResult) -> None:
        B, S = np.full(80, 8.0), np.tile([8.0, 512.0], 40)
        T = planted_ms(B, S) / np.where(S > 8, 1.3, 1.0)
        phase = np.where(S > 8, "prefill", "decode").astype(object)
        rows = plot_data.agreement(fit, Trace({"B": B, "S": S, "T_ms": T, "phase": phase}))
        assert figures.residual_title(rows) == "Largest bias: prefill near 18 ms, 30 % too high"

    def test_few_rows_are_judged_together(self, fit: FitResult) -> None:
        B = np.array([8.0, 8.0, 8.0])
        rows = plot_data.agreement(fit, Trace({"B": B, "S": B, "T_ms": planted_ms(B, B) / 1.1}))
        assert figures.residual_title(rows) == "The typical prediction is 10 % too high"

    def test_rows_beyond_the_scale_are_counted(self, fit: FitResult, rows: Trace) -> None:
        T = rows["T_ms"].copy()
        T[5] /= 100
        figure = figures.residual_figure(plot_data.agreement(fit, rows.with_columns(T_ms=T)))
        assert "1 step beyond the scale" in " ".join(text.get_text() for text in figure.axes[0].texts)
        assert figure.axes[0].get_ylim()[1] < 100

    def test_a_single_row(self, fit: FitResult, rows: Trace) -> None:
        assert style.png(figures.residual_figure(plot_data.agreement(fit, rows.select(np.array([0])))))


class TestMap:
    def test_the_sla_line_runs_where_the_latency_is_the_sla(self, fit: FitResult) -> None:
        area = plot_data.surface(fit)
        figure = latency_map.map_figure(area, None, [latency_map.SlaLine("20 ms", 20.0)])
        edges = [c for c in figure.axes[0].collections if c.get_zorder() == 4]
        vertices = np.concatenate([path.vertices for path in edges[0].get_paths()])
        assert len(vertices) > 50
        # Linear interpolation on the grid of 220 points a side is good to a per mille of the latency.
        assert planted_ms(vertices[:, 0], vertices[:, 1]) == pytest.approx(20.0, rel=2e-3)

    @pytest.mark.parametrize(("typical_ms", "says"), [(1.0, "nowhere here"), (1e6, "all of this")])
    def test_an_sla_off_the_map_is_said_in_words(self, fit: FitResult, typical_ms: float, says: str) -> None:
        figure = latency_map.map_figure(plot_data.surface(fit), None, [latency_map.SlaLine("SLA", typical_ms)])
        legend = figure.axes[0].get_legend()
        assert legend is not None
        assert any(says in text.get_text() for text in legend.get_texts())

    @pytest.mark.parametrize("sla_ms", [9.0, 20.0, 60.0, 300.0])
    def test_the_words_stand_where_the_sla_is_met(self, fit: FitResult, sla_ms: float) -> None:
        figure = latency_map.map_figure(plot_data.surface(fit), None, [latency_map.SlaLine("SLA", sla_ms)])
        words = next(text for text in figure.axes[0].texts if text.get_text() == "SLA met")
        B, S = words.get_position()
        assert S >= B
        assert planted_ms(B, S) < sla_ms

    def test_measured_cells_are_dots(self, fit: FitResult, rows: Trace) -> None:
        cells = plot_data.measured_cells(rows)
        assert dots(latency_map.map_figure(plot_data.surface(fit), cells)) == len(cells.B)

    def test_the_line_agrees_with_the_plan(self, one_path: ReportInput) -> None:
        """The largest step of the plan lies on the good side of the line, one token more on the other."""
        plan, path = one_path.plans[0], one_path.profile.paths["cpu"]
        line = gallery.sla_line(path, plan, 99.0)
        assert plan.steps.S_at_B
        for row in plan.steps.S_at_B:
            assert row.S_max is not None
            assert planted_ms(row.B, row.S_max) <= line.typical_ms < planted_ms(row.B, row.S_max + 1)


def test_throughput_title_is_the_best_rate_in_tokens_a_second(fit: FitResult, rows: Trace) -> None:
    curves = plot_data.throughput_curves(fit, plot_data.measured_cells(rows))
    best, decode = 2048 / planted_ms(64, 2048) * 1000, 64 / planted_ms(64, 64) * 1000
    assert best == pytest.approx(46_500, rel=2e-3)
    assert decode == pytest.approx(7_340, rel=2e-3)
    assert figures.throughput_title(curves) == "Up to 46.5k tokens/s (B=64); decode 7,340"


def test_every_axis_has_a_unit_or_counts_something(one_path: ReportInput, fit: FitResult, rows: Trace) -> None:
    cells = plot_data.measured_cells(rows)
    drawn = plot_data.agreement(fit, rows)
    every = [
        figures.predicted_figure(drawn),
        figures.residual_figure(drawn),
        latency_map.map_figure(plot_data.surface(fit), cells),
        figures.throughput_figure(plot_data.throughput_curves(fit, cells)),
        combined.paths_figure(plot_data.batch_latency(list(one_path.profile.paths.values()), {}, 1), 1, None),
    ]
    for figure in every:
        axes = figure.axes[0]
        assert axes.get_title(loc="left")
        for label in (axes.get_xlabel(), axes.get_ylabel()):
            assert "[" in label or label.startswith(("requests", "tokens"))


class TestOverview:
    def test_four_views_with_the_answer_on_top(self, one_path: ReportInput) -> None:
        found = gallery.path_gallery(
            one_path.profile.paths["cpu"], one_path.traces["cpu"], one_path.plans, one_path.percentile
        )
        assert found.overview is not None
        assert found.overview.stem == "overview"
        assert one_path.plans[0].answer in found.overview.alt
        assert [picture.stem for picture in found.pictures] == [
            "latency-map",
            "throughput",
            "measured-vs-predicted",
            "residuals",
        ]

    def test_without_rows_two_views_and_a_reason(self, one_path: ReportInput) -> None:
        found = gallery.path_gallery(one_path.profile.paths["cpu"], None, one_path.plans, 99.0)
        assert [picture.stem for picture in found.pictures] == ["latency-map", "throughput"]
        assert found.overview is not None
        assert "--trace" in found.left_out[0]

    def test_same_input_same_bytes(self, one_path: ReportInput) -> None:
        path, trace = one_path.profile.paths["cpu"], one_path.traces["cpu"]
        first, second = (gallery.path_gallery(path, trace, one_path.plans, 99.0) for _ in range(2))
        assert [picture.png for picture in first.pictures] == [picture.png for picture in second.pictures]


class TestUndrawable:
    def test_a_fit_without_a_domain(self, fit: FitResult, rows: Trace) -> None:
        path = machine(cpu=replace(fit, domain={})).paths["cpu"]
        found = gallery.path_gallery(path, rows, (), 99.0)
        assert not found.pictures
        assert "which B and S" in found.left_out[0]

    def test_a_parameter_without_a_value(self, fit: FitResult, rows: Trace) -> None:
        broken = {**fit.parameters, "tau_0": structs.replace(fit.parameters["tau_0"], value=float("nan"))}
        found = gallery.path_gallery(machine(cpu=replace(fit, parameters=broken)).paths["cpu"], rows, (), 99.0)
        assert "without a value" in found.left_out[0]


class TestContext:
    """A model that reads cached tokens is drawn at the context that was typical of its trace, and the page says so."""

    @pytest.fixture
    def reads_context(self, fit: FitResult) -> FitResult:
        extra = {p.name: Estimate(0.0, None, None, None, p.unit) for p in FAMILY["context"].parameters}
        return replace(
            fit,
            model="context",
            parameters={
                **extra,
                **fit.parameters,
                **{k: structs.replace(extra[k], value=1e-3) for k in ("tau_K", "tau_L")},
            },
            domain={**fit.domain, "context_tokens": [0.0, 32768.0]},
            typical={"context_tokens": 256.0, "prefill_context_tokens": 0.0},
        )

    def test_drawn_at_the_typical_context(self, reads_context: FitResult) -> None:
        """Of B requests one may prefill; the others decode, at 1 µs for each of their 256 cached tokens."""
        area = plot_data.surface(reads_context)
        plain = plot_data.surface(replace(reads_context, model="saturation"))
        dearer = area.T_ms[:, -1] - plain.T_ms[:, -1]
        assert dearer[np.isfinite(dearer)].max() == pytest.approx(1e-3 * 256 * area.B[-1], rel=0.02)
        page = render(ReportInput(machine(cpu=reads_context))).html
        assert "Figures are drawn at the trace" in page
        assert "256 tokens a request" in page

    def test_not_drawn_where_that_is_not_known(self, reads_context: FitResult) -> None:
        found = gallery.path_gallery(machine(cpu=replace(reads_context, typical={})).paths["cpu"], None, (), 99.0)
        assert not found.pictures
        assert "does not say what is typical" in found.left_out[0]


class TestPaths:
    def test_compared_only_where_there_are_several(self, one_path: ReportInput) -> None:
        assert gallery.comparison(one_path.profile, one_path.traces, one_path.plans) is None

    def test_marks_b1_where_the_curves_cross(self) -> None:
        both = two_paths()
        plan = both.plans[0]
        curves = plot_data.batch_latency(list(both.profile.paths.values()), {}, 1)
        figure = combined.paths_figure(curves, 1, plan)
        marked = [line.get_xdata()[0] for line in figure.axes[0].get_lines() if "B1" in str(line.get_label())]  # type: ignore[index]
        amx, gpu = curves
        crossing = amx.B[np.flatnonzero(gpu.T_ms <= amx.T_ms)[0]]
        assert marked == [plan.steps.B1.value]
        # B1 is the first whole batch from the crossing on.
        assert 0 <= marked[0] - crossing < 1.2

    def test_names_with_dollars_and_foreign_letters_are_drawn_plainly(self, rows: Trace, fit: FitResult) -> None:
        names = {"$x_{$": fit, "_路径": fit_of(rows)}
        picture = gallery.comparison(machine(**names), {}, [])
        assert picture is not None
        assert picture.png.startswith(b"\x89PNG")


class TestTicks:
    @pytest.mark.parametrize(("low", "high"), [(9.1, 9.8), (1.0, 3.0), (0.2, 40.0), (1e-3, 1e6), (7.0, 4000.0)])
    def test_some_but_not_many_inside_the_range(self, low: float, high: float) -> None:
        for ticks in (style.decimal_ticks(low, high), style.binary_ticks(low, high)):
            assert 2 <= len(ticks) <= 10
            assert all(low <= tick <= high for tick in ticks)
            assert ticks == sorted(ticks)

    def test_binary_ticks_are_powers_of_two(self) -> None:
        assert style.binary_ticks(1, 128) == [1, 2, 4, 8, 16, 32, 64, 128]


@pytest.mark.parametrize(
    "headline",
    [
        "Not supported by these data: steps on cpu changed by +17 % while they were measured. Within 50 ms for 95 % of "
        "steps, cpu computes up to 125 tokens a step (at B=1).",
        "MMMM WWWW " * 14,
        "i " * 100,
        "short",
    ],
)
def test_no_headline_runs_past_the_picture(headline: str, fit: FitResult) -> None:
    """By the renderer's own measure, of letters narrow and wide."""
    views = figures.Views(plot_data.surface(fit), plot_data.throughput_curves(fit, None))
    figure = figures.overview_figure(views, headline, "trust")
    style.png(figure)
    title = figure._suptitle  # type: ignore[attr-defined]
    assert title.get_window_extent().x1 <= figure.bbox.x1
    assert title.get_text().split() == headline.split()
