"""The pictures of a report: which can be drawn from what is known, and why the others cannot."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from latfit.hardware import ExecutionPath, HardwareProfile
from latfit.model import FitResult
from latfit.planning import Plan, levels_for
from latfit.reporting import style
from latfit.reporting.fit.figures import (
    SlaLine,
    Views,
    map_figure,
    map_title,
    overview_figure,
    paths_figure,
    paths_title,
    predicted_figure,
    predicted_title,
    residual_figure,
    residual_title,
    throughput_figure,
    throughput_title,
)
from latfit.reporting.fit.plot_data import (
    Agreement,
    Cells,
    agreement,
    batch_latency,
    measured_cells,
    step_readings,
    surface,
    throughput_curves,
)
from latfit.reporting.fit.tables import trust_sentence
from latfit.reporting.format import count, counted
from latfit.reporting.layout import Picture
from latfit.trace import Trace
from latfit.units import format_ms


@dataclass(frozen=True)
class Gallery:
    """Pictures of one path, the overview apart, and a sentence for each that could not be drawn."""

    pictures: Sequence[Picture] = ()
    overview: Picture | None = None
    left_out: Sequence[str] = ()

    @property
    def shown_first(self) -> Sequence[Picture]:
        """The latency map, and measured against predicted."""
        return self.pictures[::2]


def path_gallery(
    path: ExecutionPath, trace: Trace | None, plans: Sequence[Plan], percentile: float, prefix: str = ""
) -> Gallery:
    """Every picture of one path. percentile: what the plans were asked for."""
    if reason := _why_not(path.fit):
        return Gallery(left_out=[f"No figures: {reason}."])
    left_out: list[str] = []
    rows, cells = _rows_and_cells(path.fit, trace, left_out)
    views = Views(
        surface(path.fit),
        throughput_curves(path.fit, cells),
        rows,
        cells,
        [sla_line(path, plan, percentile) for plan in plans],
        _finding(path, plans),
    )
    headline = plans[0].answer if plans else f"{path.name}. {map_title(views.area)}."
    trust = trust_sentence(path.fit)
    overview = _picture(
        f"{prefix}overview",
        headline,
        f"Overview of path {path.name}. {headline} {trust}",
        lambda: overview_figure(views, headline, trust),
    )
    return Gallery(_single_pictures(path, views, prefix), overview, left_out)


def comparison(profile: HardwareProfile, traces: Mapping[str, Trace], plans: Sequence[Plan]) -> Picture | None:
    """Latency against the batch on every path that can be drawn, where there are several."""
    paths = [path for path in profile.paths.values() if _why_not(path.fit) is None]
    if len(paths) < 2:
        return None
    tokens = plans[0].tokens_per_request if plans else 1
    plan = plans[0] if plans else None
    cells = {name: measured_cells(trace) for name, trace in traces.items()}
    curves = batch_latency(paths, cells, tokens)
    title = paths_title(curves, plan)
    return _picture(
        "paths", title, f"Latency of a step over its requests. {title}.", lambda: paths_figure(curves, tokens, plan)
    )


def _single_pictures(path: ExecutionPath, views: Views, prefix: str) -> list[Picture]:
    area, cells = views.area, views.cells
    found = views.finding or map_title(area)
    fastest, slowest = map(format_ms, area.span_ms)
    title = throughput_title(views.curves)
    drawn = map_figure(area, cells, views.lines, views.finding)
    pictures = [
        Picture(
            f"{prefix}latency-map",
            found,
            f"Map of the latency of a step over requests B and tokens S, from {fastest} to {slowest}. {found}.",
            style.png(drawn),
            _readings(path.fit, views, drawn),
        ),
        _picture(
            f"{prefix}throughput",
            title,
            f"Tokens per second over the tokens of a step, for several batches and for decode. {title}.",
            lambda: throughput_figure(views.curves),
        ),
    ]
    if (rows := views.rows) is None:
        return pictures
    return [*pictures, *_row_pictures(rows, path.name, prefix)]


def _readings(fit: FitResult, views: Views, drawn: Figure) -> str:
    """Where the axes of the drawn map are, as shares of the figure, and what can be read on them."""
    area = views.area
    box = [float(each) for each in drawn.axes[0].get_position().bounds]
    ends = {name: [float(axis[0]), float(axis[-1])] for name, axis in (("B", area.B), ("S", area.S))}
    return json.dumps({"box": box, **ends, "steps": step_readings(fit, area, views.cells)}, separators=(",", ":"))


def _row_pictures(rows: Agreement, path: str, prefix: str) -> list[Picture]:
    good, lean = predicted_title(rows), residual_title(rows)
    steps = counted(len(rows), "step")
    return [
        _picture(
            f"{prefix}measured-vs-predicted",
            good,
            f"Measured against predicted latency of {steps} on {path}. {good}.",
            lambda: predicted_figure(rows),
        ),
        _picture(
            f"{prefix}residuals",
            lean,
            f"Relative error over predicted latency of {steps} on {path}. {lean}.",
            lambda: residual_figure(rows),
        ),
    ]


def _picture(stem: str, title: str, alt: str, draw: Callable[[], Figure]) -> Picture:
    return Picture(stem, title, alt, style.png(draw()))


def _why_not(fit: FitResult) -> str | None:
    """Why the fit cannot be drawn over B and S, if it cannot."""
    if not fit.status.ok or not all(p.name in fit.parameters for p in fit.structure.parameters):
        return f"the fit is not usable ({fit.status.sentence.rstrip('.')})"
    if not np.all(np.isfinite(fit.theta)):
        return "the fit has parameters without a value"
    if not all(len(fit.domain.get(name, ())) == 2 for name in ("B", "S")):
        return "the fit does not say which B and S it was made from"
    others = [name for name in fit.columns if name not in ("B", "S") and name in fit.domain]
    if others and not (fit.reads_context and fit.typical):
        return f"the model also needs {', '.join(others)}, and the fit does not say what is typical of them"
    return None


def _rows_and_cells(fit: FitResult, trace: Trace | None, left_out: list[str]) -> tuple[Agreement | None, Cells | None]:
    """The rows against the fit, where a trace is at hand; otherwise why not is added to `left_out`."""
    if trace is None or len(trace) == 0:
        left_out.append(
            "Measured against predicted, and the residuals, need the measured steps, which are not at hand:"
            " add them with --trace."
        )
        return None, None
    rows = agreement(fit, trace)
    if not np.all(rows.predicted_ms > 0):
        left_out.append(
            "Measured against predicted, and the residuals: the fit predicts a latency of zero for some steps."
        )
        return None, measured_cells(trace)
    return rows, measured_cells(trace)


def sla_line(path: ExecutionPath, plan: Plan, percentile: float) -> SlaLine:
    """Where the typical step may lie so that the promised share of steps on this path meets the SLA."""
    level = levels_for(path, percentile).prefill
    share = "typical step" if level.percentile is None else f"{level.percentile:g} % of steps"
    return SlaLine(f"{format_ms(plan.sla_ms)} for {share}", plan.sla_ms / level.factor)


def _finding(path: ExecutionPath, plans: Sequence[Plan]) -> str | None:
    """What the map shows of the first plan."""
    if not plans:
        return None
    sla = format_ms(plans[0].sla_ms)
    steps = [row for row in plans[0].S_at_B if row.path == path.name]
    if not steps:
        return f"No step meets {sla}"
    largest = max(steps, key=lambda row: math.inf if row.S_max is None else row.S_max)
    if largest.S_max is None:
        return f"Every step meets {sla} at B={count(largest.B)}"
    return f"{sla}: up to {count(largest.S_max)} tokens a step (B={count(largest.B)})"


def fit_figure(name: str, fit: FitResult, trace: Trace | None) -> Figure:
    """The overview of one fit alone; without its rows the two views that need none."""
    rows, cells = _rows_and_cells(fit, trace, [])
    views = Views(surface(fit), throughput_curves(fit, cells), rows, cells)
    return overview_figure(views, f"{name}. {map_title(views.area)}.", trust_sentence(fit))
