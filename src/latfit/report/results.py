"""Tables of what `predict`, `evaluate` and `compare` found, as rows of text."""

from collections.abc import Mapping, Sequence
from typing import Any

from latfit.model.result import FitResult
from latfit.report.tables import Table, parameters
from latfit.report.words import count, number, percent
from latfit.units import format_ms


def prediction_table(rows: Sequence[Mapping[str, Any]], level: float) -> Table:
    """Steps with their typical latency, the interval, and whether they lie outside what was measured."""
    shown = [
        (
            number(row["B"]),
            count(row["S"]),
            format_ms(row["T_ms"], 4),
            _or_unknown(row["low"]),
            _or_unknown(row["high"]),
            row["why_outside"],
        )
        for row in rows
    ]
    columns = ("requests B", "tokens S", "typical", f"{100 * level:g} % from", "to", "note")
    return Table("Latency of a step", columns, shown, words=("note",)).without_empty()


def _or_unknown(time_ms: float) -> str:
    return format_ms(time_ms, 4) if time_ms == time_ms else "unknown"


def evaluation_table(found: Mapping[str, Any]) -> Table:
    """Errors over all steps, then by phase."""
    scores = {"all steps": found["metrics"], **found["by_phase"]}
    rows = [
        (
            name,
            count(score["n"]),
            percent(score["median_ape_pct"]),
            percent(score["mape_pct"]),
            percent(score["p90_ape_pct"]),
            format_ms(score["rmse_ms"]),
        )
        for name, score in scores.items()
    ]
    return Table("Errors", ("steps", "number", "median", "mean", "90 % within", "RMSE"), rows)


def bootstrap_table(fit: FitResult) -> Table:
    """Intervals of resampled fits beside those that the fit states, of parameters that the data tell."""
    found = fit.bootstrap
    stated = {row[0]: row[2] for row in parameters(fit).rows}
    rows = [
        (name, stated.get(name, "–"), f"{number(low)} to {number(high)}", fit.parameters[name].unit)
        for name, (low, high) in found["parameters"].items()
        if fit.parameters[name].identified and not fit.parameters[name].fixed
    ]
    caption = f"Bootstrap: {count(found['resamples'])} resamples ({found['scheme']})"
    columns = ("name", "95 % interval stated", f"{100 * found['level']:g} % of resampled fits", "unit")
    return Table(caption, columns, rows, words=("unit",))


def sensitivity_table(found: Mapping[str, Any]) -> Table:
    """Slopes, elasticities and the largest term at each step of a grid (the `sensitivity` of `predict --json`)."""
    rows = [
        (
            number(B),
            count(S),
            format_ms(found["T_ms"][i][j], 4),
            *(_or_nothing(found[name][i][j]) for name in ("dT_dB", "dT_dS", "elasticity_B", "elasticity_S")),
            found["dominant"][i][j],
        )
        for i, B in enumerate(found["B"])
        for j, S in enumerate(found["S"])
        if found["T_ms"][i][j] is not None
    ]
    columns = ("B", "S", "typical", "ms a request", "ms a token", "% per % of B", "% per % of S", "largest term")
    caption = "How the latency answers to one request or token more"
    return Table(caption, columns, rows, words=("largest term",)).without_empty()


def _or_nothing(slope: float | None) -> str:
    return "" if slope is None else number(slope, 3)


def regions_table(found: Mapping[str, Any]) -> Table:
    """Where each term is the largest."""
    rows = [
        (
            name,
            f"{region['share']:.0%}",
            *(f"{number(low)} to {number(high)}" for low, high in (region["B"], region["S"])),
        )
        for name, region in found["regions"].items()
    ]
    return Table("Which term is the largest", ("term", "share of the grid", "at B", "at S"), rows)


def comparison_table(names: Sequence[str], fits: Sequence[FitResult]) -> Table:
    """Parameters and errors of several fits, one column each."""
    values = [{row[0]: row[1] for row in parameters(fit).rows} for fit in fits]
    known = list(dict.fromkeys(name for column in values for name in column))
    rows = [("model", *(fit.model for fit in fits)), ("steps", *(count(fit.metrics.get("n")) for fit in fits))]
    rows.append(("mean error", *(percent(fit.metrics.get("mape_pct")) for fit in fits)))
    rows += [(name, *(column.get(name, "–") for column in values)) for name in known]
    return Table("Side by side", ("", *names), rows)
