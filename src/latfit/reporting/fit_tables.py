"""Tables of a fit: errors, parameters, the rows that it used."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from latfit.hardware import ExecutionPath
from latfit.model import Baseline, Estimate, FitResult, fitted_identity
from latfit.reporting.table import KeyNumber, Table, count, make_table, span
from latfit.trace import Trace, identity_of
from latfit.units import count_text, format_ms, format_percent, number

NOT_IDENTIFIED = "not identified"
LINEAR = Baseline()  # of a fit without a linear baseline
MAX_FACT = 600  # letters

_BASELINE_NAMES: Mapping[str, str] = {"linear": "linear baseline", "constant": "constant"}


def held_out_number(path: ExecutionPath) -> KeyNumber | None:
    own, line = path.fit.cross_validation.mape_pct, _baseline(path.fit, "linear").cv.mape_pct
    if own is None:
        return None
    baseline = "" if line is None else f"; linear baseline {format_percent(line)}"
    return KeyNumber("Held-out error", format_percent(own), f"{path.name}{baseline}")


def _baseline(fit: FitResult, name: str) -> Baseline:
    return fit.baselines.get(name, LINEAR)


def _errors_by_phase(fit: FitResult) -> dict[str, tuple[float, float | None]]:
    """Return the held-out MAPE of the fit and of the baseline; empty for one phase."""
    own, line = (each.errors for each in (fit.cross_validation, _baseline(fit, "linear").cv))
    other = (line.by_phase if line else None) or {}
    return {name: (error, other.get(name)) for name, error in ((own.by_phase if own else None) or {}).items()}


def lost_phases(fit: FitResult) -> list[str]:
    """Return the phases in which the linear baseline is better."""
    return [name for name, (own, line) in _errors_by_phase(fit).items() if line is not None and own > line]


def trust_sentence(fit: FitResult) -> str:
    if fit.data.nominal:
        return f"Nominal numbers, not measured: {fit.data.nominal}. Their error is not known."
    if not fit.status.ok:
        return f"Not usable: {fit.status.sentence}"
    held_out = fit.cross_validation.mape_pct
    if held_out is None:
        return f"Median error {format_percent(fit.metrics.median_ape_pct)} on the {count(fit.metrics.n)} fitted steps."
    others = [
        f"{title} {format_percent(error)}"
        for name, title in _BASELINE_NAMES.items()
        if (error := _baseline(fit, name).cv.mape_pct) is not None
    ]
    against = f"; {', '.join(others)}" if others else ""
    lost = lost_phases(fit)
    worse = f" Worse than the linear baseline for {' and '.join(lost)} steps." if lost else ""
    return f"Held-out error {format_percent(held_out)} ({count(fit.metrics.n)} steps){against}.{worse}"


def phases(fit: FitResult) -> Table:
    steps = {name: count(errors.n) for name, errors in (fit.diagnostics.regimes or {}).items()}
    return make_table(
        "Held-out error by phase",
        _errors_by_phase(fit).items(),
        ("phase", lambda each: each[0]),
        ("steps", lambda each: steps.get(each[0], "–")),
        (fit.name, lambda each: each[1][0], format_percent),
        ("linear baseline", lambda each: each[1][1], format_percent),
    )


def parameters(fit: FitResult) -> Table:
    rows = [(p, fit.parameters[p.name]) for p in fit.structure.parameters if p.name in fit.parameters]
    unknown = [p.name for p, estimate in rows if _value(estimate) == NOT_IDENTIFIED]
    resampled = fit.bootstrap.get("parameters", {})
    return make_table(
        "Parameters",
        [row for row in rows if row[0].name not in unknown],
        ("name", lambda row: row[0].name),
        ("value", lambda row: _value(row[1])),
        ("95 % interval", lambda row: _interval(row[1])),
        ("of resampled fits", lambda row: resampled.get(row[0].name), span),
        ("unit", lambda row: row[1].unit),
        ("meaning", lambda row: row[0].meaning),
        words=("unit", "meaning"),
        note=f"Not identified by these steps: {', '.join(unknown)}." if unknown else "",
    )


def _value(estimate: Estimate) -> str:
    if estimate.fixed:
        return f"{number(estimate.value)} (fixed)"
    return number(estimate.value) if estimate.identified and math.isfinite(estimate.value) else NOT_IDENTIFIED


def _interval(estimate: Estimate) -> str:
    if estimate.fixed:
        return "–"
    return "none" if estimate.low is None or estimate.high is None else span((estimate.low, estimate.high))


def errors(fit: FitResult) -> Table:
    validation = fit.cross_validation
    harder = {
        "later steps": validation.expanding_window,
        "a region of B and S": validation.by_region,
        "more tokens": validation.extrapolation_S,
        "more requests": validation.extrapolation_B,
    }
    rows = [
        (fit.name, fit.metrics, validation.mape_pct),
        *((f"  {phase} steps", each, None) for phase, each in (fit.diagnostics.regimes or {}).items()),
        *((_BASELINE_NAMES.get(name, name), plain, plain.cv.mape_pct) for name, plain in fit.baselines.items()),
        *((f"held out: {name}", each, None) for name, each in harder.items() if each is not None),
    ]

    def error(name: str) -> Any:
        return lambda row: getattr(row[1], name, None)

    return make_table(
        "Errors",
        rows,
        ("model", lambda row: row[0]),
        ("steps", error("n"), count),
        ("median error", error("median_ape_pct"), format_percent),
        ("MAPE", error("mape_pct"), format_percent),
        ("p90 error", error("p90_ape_pct"), format_percent),
        ("CV MAPE", lambda row: row[2], format_percent),
        ("R²", error("r2"), "{:.4f}".format),
        ("RMSE", error("rmse_ms"), format_ms),
        note=f"CV MAPE: cross-validated, {validation.errors.folds} folds, {validation.scheme}."
        if validation.errors
        else "",
    )


def rows_used(fit: FitResult) -> Table:
    facts = fit.data
    box = [f"{name} {span(fit.domain[name])}" for name in ("B", "S") if len(fit.domain.get(name, ())) == 2]
    rows = [("read", count(facts.rows_read), "")] if facts.rows_read is not None else []
    rows += [(f"dropped: {why}", count(n), "") for why, n in (facts.dropped or {}).items()]
    rows.append(("used", count(fit.metrics.n if facts.rows_used is None else facts.rows_used), ", ".join(box)))
    return Table("Rows", ("rows", "number", "measured"), rows, words=("measured",)).without_empty()


def provenance(facts: Mapping[str, Any]) -> Table:
    return Table("Where it comes from", ("fact", "value"), list(_flatten(facts)), words=("value",))


def _flatten(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        elif value not in (None, "", [], ()):
            text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            yield f"{prefix}{name}", text if len(text) <= MAX_FACT else text[: MAX_FACT - 1] + "…"


def what_is_known(paths: Iterable[ExecutionPath], traces: Mapping[str, Trace] = {}) -> str:
    """Return `tiny on AMD EPYC`; empty where nothing names it."""
    facts = [_identity(path, traces.get(path.name)) for path in paths]
    models, machines = (
        ", ".join(dict.fromkeys(each[name] for each in facts if name in each)) for name in ("model", "hardware")
    )
    return " ".join(filter(None, (models, machines and f"on {machines}")))


def describe_path(path: ExecutionPath, rows: Trace | None) -> str:
    """Return `AMD EPYC, tiny, numpy float32 on 2 threads, fit of 732 steps`."""
    if path.nominal is not None:
        return f"nominal numbers, not measured: {path.nominal.text}"
    facts, steps = _identity(path, rows), path.fit.metrics.n
    device = " ".join(facts[name] for name in ("device", "dtype") if name in facts)
    if "threads" in facts:
        device += f" on {facts['threads']} thread{'s' * (facts['threads'] != '1')}"
    measured = "" if steps is None else f"fit of {count_text(int(steps), 'step')}"
    parts = (facts.get("hardware"), facts.get("model"), device, measured, path.fit.data.more.get("time"))
    return ", ".join(str(each) for each in parts if each)


def _identity(path: ExecutionPath, rows: Trace | None) -> dict[str, str]:
    if path.nominal is not None:
        return {}
    return {**fitted_identity(path.fit), **(identity_of(rows) if rows is not None else {})}
