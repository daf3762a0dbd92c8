"""How every figure looks. Only matplotlib's object interface: nothing global changes."""

import io
import textwrap
from collections.abc import Mapping
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from latfit.reporting.table import shorthand
from latfit.stats import FloatArray
from latfit.units import unbroken

INK = "#1b2733"
FAINT = "#6b7785"
GRID = "#e3e8ee"
SLA, DECODE = "#c2003d", "#7a1fa2"

PHASE_COLOURS: Mapping[str, str] = {
    "decode": "#0072b2",
    "prefill": "#d55e00",
    "mixed": "#009e73",
    "": "#44688a",
}
PHASE_MARKERS: Mapping[str, str] = {"decode": "o", "prefill": "^", "mixed": "s", "": "o"}

LINE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
LINE_MARKERS = ("o", "^", "s", "D", "v", "P")

SINGLE_INCHES = (6.0, 4.4)
DPI = 160
MAX_TICKS = 8

Place = Literal["best", "upper left", "upper right", "lower left", "lower right"]


def new_figure(inches: tuple[float, float] = SINGLE_INCHES, dpi: int = DPI) -> Figure:
    figure = Figure(figsize=inches, dpi=dpi, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure, dpi: float | None = None) -> bytes:
    """Return the figure as PNG, the same bytes for the same figure."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi or figure.dpi, metadata={"Software": None})
    return stream.getvalue()


def dress(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(textwrap.fill(unbroken(title), 50), loc="left", fontsize=11, fontweight="bold", color=INK, pad=8)
    axes.set_xlabel(x, fontsize=10, color=INK)
    axes.set_ylabel(y, fontsize=10, color=INK)
    axes.tick_params(labelsize=9.5, colors=INK, length=3)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)


def log_axis(axes: Axes, name: Literal["x", "y"], low: float, high: float, base: int = 10) -> None:
    """base: 2 for requests and tokens."""
    axes.set(**{f"{name}scale": "log", f"{name}lim": (low, high)})
    plain_ticks(getattr(axes, f"{name}axis"), log_ticks(low, high, base))


def plain_ticks(axis: Axis, ticks: list[float]) -> None:
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: shorthand(value)))


def log_ticks(low: float, high: float, base: int = 10) -> list[float]:
    """Return powers of the base in [low, high], with multiples if these are few."""
    first, last = np.floor(np.log([low, high]) / np.log(base))
    powers = float(base) ** np.arange(first, last + 2)
    steps = ((1, 2, 5), (1, 3), (1,)) if base == 10 else ((1,),)
    every = [np.sort(np.outer(powers, each).ravel()) for each in steps]
    inside = [ticks[(ticks >= low) & (ticks <= high)] for ticks in every]
    ticks = next((each for each in inside if len(each) <= MAX_TICKS), inside[-1])
    if len(ticks) < 3:
        ticks = np.asarray(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high))
        ticks = ticks[(ticks >= low) & (ticks <= high)]
    return [float(tick) for tick in ticks[:: -(-len(ticks) // MAX_TICKS)]]


def padded_span(values: FloatArray, factor: float = 1.15) -> tuple[float, float]:
    return float(values.min()) / factor, float(values.max()) * factor


def legend(axes: Axes, place: Place = "best") -> None:
    box = axes.legend(loc=place, fontsize=9, framealpha=0.92, handletextpad=0.5, columnspacing=1.2)
    box.get_frame().set_edgecolor(GRID)
    for handle in box.legend_handles:
        if handle is not None:
            handle.set_alpha(1.0)
