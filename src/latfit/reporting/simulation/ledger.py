"""A ledger of promises as a table, a figure and a page."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from latfit.reporting import layout, style
from latfit.reporting.fit.tables import KeyNumber, Table
from latfit.reporting.simulation.brief import State, Verdict
from latfit.reporting.simulation.page import Making, render_page
from latfit.units import format_ms, format_percent
from latfit.validation import Ledger, PromisedFigure

SHOWN_ENTRIES = 8  # newest runs on a terminal


def with_interval(value: float | None, ends: tuple[float, float] | None) -> str:
    """`36 ms (32 ms to 40 ms)`, or `36 ms (32 ms or more)` if the upper end is open."""
    if value is None:
        return "-"
    if ends is None:
        return format_ms(value)
    upper = f"to {format_ms(ends[1])}" if math.isfinite(ends[1]) else "or more"
    return f"{format_ms(value)} ({format_ms(ends[0])} {upper})"


def ledger_table(found: Ledger, *, brief: bool = False) -> Table:
    """One row a promised percentile, the newest run last; brief: of the newest runs."""
    entries = found.entries[-SHOWN_ENTRIES:] if brief else found.entries
    rows = []
    for entry in entries:
        for each in entry.figures:
            state = "another load" if not entry.comparable else "kept" if each.kept else "broken"
            error = "" if each.error_pct is None else format_percent(each.error_pct, signed=True)
            row = [
                entry.added[:10],
                Path(entry.run).name,
                f"{each.name} {format_ms(each.limit_ms)}",
                with_interval(each.planned_ms, each.planned_interval_ms),
                with_interval(each.measured_ms, each.interval_ms),
                error,
                state,
            ]
            rows.append(row if not brief else [row[0], *row[2:]])
    names = ["added", "run", "promise", "planned", "measured", "error", "verdict"]
    if brief:
        names.remove("run")
    return Table("", names, rows, words=["added", "run", "promise", "verdict"])


def ledger_figure(found: Ledger) -> Figure:
    """Measured over planned percentiles with the interval of each, in the order of the runs."""
    figure = style.new_figure((12.0, 4.2))
    axes = figure.subplots()
    known = [each for each in found.figures if each.planned_ms]
    for which, name in enumerate(dict.fromkeys(each.name for each in known)):
        rows = [(place, each) for place, each in enumerate(known) if each.name == name]
        ratios, below, above = zip(*(_ratio(each) for _, each in rows), strict=True)
        colour = style.LINE_COLOURS[which % len(style.LINE_COLOURS)]
        places = [place for place, _ in rows]
        axes.errorbar(places, ratios, yerr=(below, above), fmt="o", color=colour, label=name, capsize=3)
    axes.axhline(1.0, color="0.5", linewidth=1)
    style.dress(axes, "Measured over planned, with the interval of the measurement", "promise", "ratio")
    axes.set_ylim(bottom=0)
    style.legend(axes, "upper right")
    return figure


def _ratio(each: PromisedFigure) -> tuple[float, float, float]:
    """The ratio of measured to planned, and the lengths of its interval below and above."""
    planned = each.planned_ms or 1.0
    low, high = (end if math.isfinite(end) else each.measured_ms for end in each.interval_ms)
    return each.measured_ms / planned, (each.measured_ms - low) / planned, (high - each.measured_ms) / planned


def ledger_page(found: Ledger, verdict: str, state: State, lines: Sequence[str], made: Making) -> layout.Rendered:
    """The ledger as a page: the verdict, the coverage, every promise."""
    kept, all_ = found.kept
    numbers = [KeyNumber("Kept", f"{kept} of {all_}", "promised percentiles")]
    if found.coverage_pct is not None:
        share, (low, high) = found.coverage_pct
        ends = f"95 %: {format_percent(low)} to {format_percent(high)}"
        numbers.append(KeyNumber("Intervals cover", format_percent(share), ends))
    numbers.append(KeyNumber("Runs", str(len(found.counted)), "with the planned load"))
    alt = "Ratio of measured to planned percentiles by run; 1 is as planned."
    planned = any(each.planned_ms for each in found.figures)
    return render_page(
        made,
        "Ledger of promises",
        Verdict(verdict, state),
        answer={
            "asked": "Promises of plans",
            "verdict": {"good": "all kept", "doubt": "nothing to compare", "bad": "some broken"}[state],
            "beside": lines,
            "numbers": numbers,
        },
        picture=("ledger", "Measured against planned", alt, ledger_figure(found)) if planned else None,
        heading="Promises and measurements",
        broad=True,
        tables=[ledger_table(found)],
    )
