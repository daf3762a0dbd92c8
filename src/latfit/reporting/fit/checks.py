"""What was checked of a fit, as tables: what the error consists of, errors on harder held-out rows,
what is known of parameters together, and the cells that the fit hangs on."""

from collections.abc import Iterator

from latfit.model import Cliffs, FitResult
from latfit.reporting.fit.tables import Table
from latfit.reporting.format import count
from latfit.units import format_ms, format_percent, number

MOST_CELLS = 5


def check_tables(fit: FitResult) -> Iterator[Table]:
    """Every table that has rows."""
    of_errors = (contradicting(fit), cliffs(fit), error_parts(fit), held_out(fit))
    of_parameters = (together(fit), to_measure(fit), influential(fit))
    return (table for table in (*of_errors, *of_parameters) if table.rows)


_PARTS = {
    "model_structure": ("lack of fit (model misspecification)", "another model or another column"),
    "measurement_noise": ("noise of the measurement", "nothing: no model removes it"),
    "parameter_uncertainty": ("uncertainty of the parameters", "more measurements"),
    "structure_and_noise": ("lack of fit and noise together", "measuring cells more than once tells them apart"),
}


def error_parts(fit: FitResult) -> Table:
    """Shares of the squared error on held-out rows."""
    found = fit.diagnostics.error_parts or {}
    rows = [
        (part, format_percent(100 * found[name]), remedy) for name, (part, remedy) in _PARTS.items() if name in found
    ]
    rms = f" (RMS {format_percent(found['rms_pct'])})" if "rms_pct" in found else ""
    floor = (fit.diagnostics.lack_of_fit or {}).get("floor_mape_pct")
    note = "" if floor is None else f"Repeats of one cell differ by {format_percent(floor)} on average (MAPE)."
    caption = f"What the squared error on held-out steps consists of{rms}"
    return Table(caption, ("part", "share", "what reduces it"), rows, words=("what reduces it",), note=note)


def held_out(fit: FitResult) -> Table:
    """Errors on rows left out by every scheme that the rows allow."""
    found = fit.cross_validation
    schemes = [
        (found.scheme or "folds", found.errors),
        ("later steps than those that trained", found.expanding_window),
        ("a region of B and S that did not train", found.by_region),
    ]
    if found.extrapolation_S is not None:
        trained = count(found.extrapolation_S.trained_up_to_S)
        schemes.append((f"more tokens than trained ({trained} at most)", found.extrapolation_S))
    if found.extrapolation_B is not None:
        trained = count(found.extrapolation_B.trained_up_to_B)
        schemes.append((f"more requests than trained ({trained} at most)", found.extrapolation_B))
    rows = [
        (
            name,
            format_percent(errors.median_ape_pct),
            format_percent(errors.mape_pct),
            format_percent(errors.p90_ape_pct),
            format_ms(errors.rmse_ms),
        )
        for name, errors in schemes
        if errors is not None
    ]
    return Table("Errors on held-out steps", ("held out", "median error", "MAPE", "p90 error", "RMSE"), rows)


def together(fit: FitResult) -> Table:
    """What is known of parameters that are not separately identifiable."""
    rows = [
        (each.expression, number(each.value), f"{number(each.low)} to {number(each.high)}", each.unit)
        for each in fit.identifiability.combinations
    ]
    groups = [", ".join(group) for group in fit.identifiability.unidentified if len(group) > 1]
    note = f"Not separately identifiable: {'; '.join(groups)}." if groups and rows else ""
    columns = ("combination", "value", "95 % interval", "unit")
    return Table("Identified only in combination", columns, rows, words=("unit",), note=note)


def to_measure(fit: FitResult) -> Table:
    """Where more steps would tell most of the parameters."""
    rows = [
        (
            ", ".join(each.parameters),
            *(number(low) if low == high else f"{number(low)} to {number(high)}" for low, high in (each.B, each.S)),
            *(format_percent(100 * error) for error in (each.before, each.after)),
        )
        for each in fit.identifiability.measure
    ]
    columns = ("parameters", "measure B", "S", "standard error now", "then")
    return Table("What to measure", columns, rows)


def influential(fit: FitResult) -> Table:
    """The cells without which predictions would change most."""
    rows = [
        (
            f"B={number(cell['B'])},\u00a0S={count(cell['S'])}",
            count(cell["rows"]),
            format_ms(cell["T_ms"]),
            format_ms(cell["expected_ms"]),
            format_percent(100 * cell["change_without"]),
        )
        for cell in (fit.diagnostics.influence or {}).get("cells", [])[:MOST_CELLS]
    ]
    columns = ("cell", "steps", "measured", "neighbours suggest", "change without it")
    note = "Change: the largest of any prediction where the cell is left out of the fit."
    return Table("Most influential cells", columns, rows, note=note)


def contradicting(fit: FitResult) -> Table:
    """The steps that lie ten times from those beside them, and what became of them."""
    found = fit.diagnostics.contradictions or {}
    facts = ("T_ms", "expected_ms", "left_out")
    rows = [
        (
            ", ".join(f"{name}={number(value)}" for name, value in step.items() if name not in facts),
            format_ms(step["T_ms"]),
            format_ms(step["expected_ms"]),
            "left out of the fit" if step["left_out"] else "kept, as a slow step",
        )
        for step in found.get("steps", [])[:MOST_CELLS]
    ]
    more = found.get("left_out", 0) + found.get("kept", 0) - len(rows)
    note = f"And {count(more)} more." if more > 0 else ""
    columns = ("step", "measured", "those beside suggest", "judged")
    return Table("Steps that contradict those beside them", columns, rows, words=("judged",), note=note)


def cliffs(fit: FitResult) -> Table:
    """The sizes beyond which steps take abruptly longer, and what one above them costs."""
    found = fit.diagnostics.cliffs or Cliffs()
    rows = [
        (
            "decode" if each.axis == "B" else "with prefill",
            f"{each.axis} = {count(each.size)}",
            count(each.above),
            "{} ({} to {})".format(*(format_percent(value) for value in (each.step_pct, *each.interval_pct))),
            format_percent(each.cost_pct),
        )
        for each in found.found
    ]
    columns = ("steps", "cliff above", "next size", "longer by (95 %)", "throughput lost one above")
    note = f"At {count(found.tested)} tested sizes; a smooth machine shows none in {1 - found.level:.0%} of traces."
    return Table("Cliffs", columns, rows, note=note)
