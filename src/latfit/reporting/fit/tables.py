"""The report's tables as rows of text; the page only lays them out.

Tables of what `predict`, `evaluate` and `compare` found, as rows of text.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from latfit.fitting import Change
from latfit.hardware import ExecutionPath, HardwareProfile
from latfit.model import Baseline, CrossValidation, Errors, Estimate, FitResult
from latfit.planning import BatchRange, Plan, TokenRange
from latfit.reporting.format import count
from latfit.trace import Coverage
from latfit.units import format_ms, format_percent, format_rate, number

NOT_IDENTIFIED = "not identified"
A_SCREEN = 12
"""Rows of a table that a reader takes in at once."""
BEYOND = "extrapolated"
ANY_NUMBER = "any number"
AS_MANY = "S"
"""As many requests as tokens: every step of that size."""

_BASELINE_NAMES: Mapping[str, str] = {"linear": "linear baseline", "constant": "constant"}
_DROP_REASONS: Mapping[str, str] = {
    "dummy": "empty step of an idle data-parallel engine",
    "zero_time": "latency of zero",
    "cold_start": "step run to warm up",
    "duplicate": "the same step twice",
    "non_finite": "B, S or T missing or infinite",
    "idle": "idle step",
    "outlier": "outlier",
    "cut_line": "line cut short",
    "bad_value": "negative latency, B below 1, or S below B",
    "max_t": "slower than the limit that was asked for",
}
_LONGEST_FACT = 600
_NAME = re.compile(r"[A-Za-z]\w*")


@dataclass(frozen=True)
class Table:
    """Rows of text under column names; the first column and those in `words` align left, numbers align right."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[str] = ()
    note: str = ""

    def without_empty(self) -> "Table":
        """The table without the columns that have nothing to say."""
        return self.only(*(name for i, name in enumerate(self.columns) if any(row[i] for row in self.rows)))

    def only(self, *names: str) -> "Table":
        """The table with these columns, in their order here."""
        kept = [i for i, name in enumerate(self.columns) if name in names]
        rows = [[row[i] for i in kept] for row in self.rows]
        return replace(self, columns=[self.columns[i] for i in kept], rows=rows)


@dataclass(frozen=True)
class KeyNumber:
    """One number of the answer: what it is, the number, and the condition under which it holds."""

    label: str
    value: str
    detail: str


def step_numbers(plan: Plan) -> list[KeyNumber]:
    """Return the largest step, and how many requests an engine decodes at once."""
    found = []
    steps = [row for row in plan.S_at_B if row.S_max is not None]
    if steps:
        step = max(steps, key=lambda row: row.S_max or 0)
        detail = f"tokens, at B = {count(step.B)} on {step.path}" + f" ({BEYOND})" * step.extrapolated
        found.append(KeyNumber("Largest step", count(step.S_max), detail))
    if plan.settings is not None:
        chunk = plan.settings.chunk_tokens
        detail = f"decode on {plan.settings.path}" + (f", beside {count(chunk)} tokens of prefill" if chunk else "")
        found.append(KeyNumber("Requests at once", count(plan.settings.max_num_seqs), detail))
    return found


def held_out_number(path: ExecutionPath) -> KeyNumber | None:
    """Return the held-out error of a path beside the linear baseline's; None if there is none."""
    own, line = path.fit.cross_validation.mape_pct, _linear(path.fit).cv.mape_pct
    if own is None:
        return None
    beside = "" if line is None else f"; linear baseline {format_percent(line)}"
    return KeyNumber("Held-out error", format_percent(own), f"{path.name}{beside}")


def promise(plan: Plan) -> str:
    """Which steps the SLA speaks of; with a load, which responses. Paths that know different percentiles say which
    where they are answered for."""
    things = "steps" if plan.rate_per_s is None else f"responses at {format_rate(plan.rate_per_s)}"
    return things if plan.percentile is None else f"p{plan.percentile:g} of {things}"


def tokens_at_batch(plan: Plan) -> Table:
    """S at B: the tokens that a step of B requests may hold."""
    found = plan.S_at_B
    rows = _merged([(row.path, count(row.B), count(row.S_min), _upper(row.S_max), _note(row)) for row in found])
    caption = f"Tokens that a step may hold within {format_ms(plan.sla_ms)}"
    return _inverse(caption, ("path", "requests B", "tokens from", "to", "note"), rows)


def batch_at_tokens(plan: Plan) -> Table:
    """B at S: the requests that a step of S tokens may hold; never more than its tokens."""
    found = plan.B_at_S
    rows = _merged(
        [
            (row.path, count(row.S), count(row.B_min), AS_MANY if row.B_max == row.S else _upper(row.B_max), _note(row))
            for row in found
        ]
    )
    caption = f"Requests that a step may hold within {format_ms(plan.sla_ms)}"
    return _inverse(caption, ("path", "tokens S", "requests from", "to", "note"), rows)


def _merged(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows that say the same of one path in a row as one row, over the range of their second column; where each takes
    any number from its own size on, that is said once too."""

    def alike(row: tuple[str, ...]) -> tuple[object, ...]:
        own = row[3] == ANY_NUMBER and row[2] == row[1]
        return (row[0], own or row[2], row[3:])

    merged: list[tuple[str, ...]] = []
    for _, group in groupby(rows, key=alike):
        members = list(group)
        first, last = members[0], members[-1]
        if len(members) == 1:
            merged.append((*first[:3], first[1] if first[3] == AS_MANY else first[3], *first[4:]))
        else:
            start = first[2] if first[2] == last[2] else f"{first[2]} to {last[2]}"
            merged.append((first[0], f"{first[1]} to {last[1]}", start, *first[3:]))
    return merged


def _inverse(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """An inverse table; a single path is named once, in the caption."""
    paths = {row[0] for row in rows}
    if len(paths) == 1:
        caption, columns, rows = f"{caption} on {paths.pop()}", columns[1:], [row[1:] for row in rows]
    return Table(caption, columns, rows, words=("note",)).without_empty()


def _note(row: TokenRange | BatchRange) -> str:
    return BEYOND if row.extrapolated else ""


def _upper(value: int | None) -> str:
    return ANY_NUMBER if value is None else count(value)


def trust(profile: HardwareProfile) -> Table:
    """Every path's error, on its own rows and on rows left out, beside the simplest models."""
    rows = [_trust_row(path) for path in profile.paths.values()]
    return Table(
        "Prediction error",
        ("path", "verdict", "steps", "median error", "cross-validated MAPE", "linear baseline", "constant"),
        rows,
        words=("verdict",),
        note="MAPE: mean absolute percentage error, on steps held out of the fit unless marked as in-sample.",
    )


def _trust_row(path: ExecutionPath) -> tuple[str, ...]:
    fit = path.fit
    if path.nominal is not None:
        return (path.name, verdict(fit), *["–"] * 5)
    return (
        path.name,
        verdict(fit),
        count(fit.metrics.n),
        format_percent(fit.metrics.median_ape_pct),
        _mean_error(fit.metrics, fit.cross_validation),
        *(_mean_error(plain, plain.cv) for plain in _two_baselines(fit)),
    )


def _two_baselines(fit: FitResult) -> Iterator[Baseline]:
    yield from (fit.baselines.get(name, Baseline()) for name in _BASELINE_NAMES)


def _mean_error(in_sample: Errors, held_out: CrossValidation) -> str:
    if held_out.mape_pct is not None:
        return format_percent(held_out.mape_pct)
    return f"{format_percent(in_sample.mape_pct)} (in-sample)" if in_sample.mape_pct is not None else "unknown"


def verdict(fit: FitResult) -> str:
    """Whether the fit can be used, and whether it earns its parameters; whether it is one at all."""
    if fit.data.nominal:
        return "nominal, not measured"
    if not fit.status.ok:
        return "not usable"
    line = fit.baselines.get("linear", Baseline())
    own, simple = fit.cross_validation.mape_pct, line.cv.mape_pct
    if own is None or simple is None:
        own, simple = fit.metrics.mape_pct, line.mape_pct
    if own is None or simple is None or fit.model == "linear":
        return "usable"
    if simple <= own or any(warning.code == "line_as_good" for warning in fit.warnings):
        return "no better than the linear baseline"
    lost = " and ".join(
        name for name, (error, other) in errors_by_phase(fit).items() if other is not None and other < error
    )
    return "better than the linear baseline" + (f", but not for {lost}" if lost else "")


def errors_by_phase(fit: FitResult) -> dict[str, tuple[float, float | None]]:
    """Return the held-out MAPE of each phase, of the fit and of the linear baseline; empty where there is one phase."""
    own, line = (each.errors for each in (fit.cross_validation, fit.baselines.get("linear", Baseline()).cv))
    other = (line.by_phase if line else None) or {}
    return {name: (error, other.get(name)) for name, error in ((own.by_phase if own else None) or {}).items()}


def trust_sentence(fit: FitResult) -> str:
    """Return the held-out error beside those of the baselines, and the phases in which the line is better."""
    if fit.data.nominal:
        return f"Nominal numbers, not measured: {fit.data.nominal}. Their error is not known."
    if not fit.status.ok:
        return f"Not usable: {fit.status.sentence}"
    held_out = fit.cross_validation.mape_pct
    if held_out is None:
        return f"Median error {format_percent(fit.metrics.median_ape_pct)} on the {count(fit.metrics.n)} fitted steps."
    others = [
        f"{_BASELINE_NAMES[name]} {format_percent(plain.cv.mape_pct)}"
        for name, plain in zip(_BASELINE_NAMES, _two_baselines(fit), strict=True)
        if plain.cv.mape_pct is not None
    ]
    against = f"; {', '.join(others)}" if others else ""
    lost = lost_phases(fit)
    worse = f" Worse than the linear baseline for {' and '.join(lost)} steps." if lost else ""
    return f"Held-out error {format_percent(held_out)} ({count(fit.metrics.n)} steps){against}.{worse}"


def lost_phases(fit: FitResult) -> list[str]:
    """Return the phases whose held-out error exceeds that of the linear baseline."""
    return [name for name, (own, line) in errors_by_phase(fit).items() if line is not None and own > line]


def phases(fit: FitResult) -> Table:
    """Return the held-out error of each phase beside the linear baseline's; empty where there is one phase."""
    steps = {name: count(found.n) for name, found in (fit.diagnostics.regimes or {}).items()}
    rows = [
        (name, steps.get(name, "–"), format_percent(own), "" if line is None else format_percent(line))
        for name, (own, line) in errors_by_phase(fit).items()
    ]
    return Table("Held-out error by phase", ("phase", "steps", fit.name, "linear baseline"), rows).without_empty()


_SYMBOLS: Mapping[str, str] = {
    "B": "requests in the step",
    "S": "tokens in the step",
    "m": "1 where the step contains prefill, else 0",
    "n": "requests that prefill",
    "D": "requests that decode",
    "KD": "cached tokens read by decode",
    "KP": "cached tokens read by prefill",
    "A": "attention work of prefill, in pairs of tokens",
    "L": "cached tokens of the longest sequence",
    "W": "attention work per slot of the machine",
    "pmax": "a smooth maximum",
    "tile_Q": "tokens rounded up to whole tiles",
    "tile_V": "the same with longer tiles",
}


def symbols(formula: str) -> str:
    """What the letters of a formula stand for that are no parameters; T is its latency."""
    used = set(_NAME.findall(formula))
    return "; ".join(f"{name}: {meaning}" for name, meaning in _SYMBOLS.items() if name in used)


def parameters(fit: FitResult, *, short: bool = False) -> Table:
    """Values with their 95 % interval; words instead of a number where the data do not determine it. short: of a model
    with many parameters those that are not identified are named together, without a row each."""
    known = [(p, fit.parameters[p.name]) for p in fit.structure.parameters if p.name in fit.parameters]
    rows = [(p.name, _value(found), _interval(found), found.unit, p.meaning) for p, found in known]
    silent = [row[0] for row in rows if row[1] == NOT_IDENTIFIED] if short and len(rows) > A_SCREEN else []
    return Table(
        "Parameters",
        ("name", "value", "95 % interval", "unit", "meaning"),
        [row for row in rows if row[0] not in silent],
        words=("unit", "meaning"),
        note=f"Not identified by these steps: {', '.join(silent)}." if silent else "",
    )


def _value(estimate: Estimate) -> str:
    if estimate.fixed:
        return f"{number(estimate.value)} (fixed)"
    return number(estimate.value) if estimate.identified and math.isfinite(estimate.value) else NOT_IDENTIFIED


def _interval(estimate: Estimate) -> str:
    if estimate.fixed:
        return "–"
    if not estimate.identified or estimate.low is None or estimate.high is None:
        return "none"
    return f"{number(estimate.low)} to {number(estimate.high)}"


def errors(fit: FitResult) -> Table:
    """The model beside the baselines, by every metric, and by phase where it is known."""
    rows = [_error_row(fit.name, fit.metrics, fit.cross_validation)]
    for name, plain in fit.baselines.items():
        rows.append(_error_row(_BASELINE_NAMES.get(name, name), plain, plain.cv))
    for phase, found in (fit.diagnostics.regimes or {}).items():
        rows.append(_error_row(f"{fit.name}, {phase} steps", found, CrossValidation()))
    columns = ("model", "steps", "median error", "MAPE", "p90 error", "CV MAPE", "R²", "RMSE", "MAE")
    held_out = fit.cross_validation
    note = f"CV MAPE: cross-validated, {held_out.errors.folds} folds, {held_out.scheme}." if held_out.errors else ""
    return Table("Errors, and by phase", columns, rows, note=note)


def _error_row(name: str, in_sample: Errors, held_out: CrossValidation) -> tuple[str, ...]:
    return (
        name,
        count(in_sample.n),
        *(
            _or_dash(error)
            for error in (in_sample.median_ape_pct, in_sample.mape_pct, in_sample.p90_ape_pct, held_out.mape_pct)
        ),
        "–" if in_sample.r2 is None or not math.isfinite(in_sample.r2) else f"{in_sample.r2:.4f}",
        *("–" if time is None else format_ms(time) for time in (in_sample.rmse_ms, in_sample.mae_ms)),
    )


def _or_dash(value: float | None) -> str:
    return "–" if value is None else format_percent(value)


def rows_used(fit: FitResult) -> Table:
    """What was read, what was dropped and why, what was used."""
    facts = fit.data
    rows = [("read", count(facts.rows_read), "")] if facts.rows_read is not None else []
    for reason, n in (facts.dropped or {}).items():
        rows.append((f"dropped: {reason}", count(n), _DROP_REASONS.get(reason, "")))
    rows.append(("used", count(fit.metrics.n if facts.rows_used is None else facts.rows_used), _box(fit)))
    return Table("Rows", ("rows", "number", "meaning"), rows, words=("meaning",)).without_empty()


def _box(fit: FitResult) -> str:
    spans = [
        f"{name} {number(fit.domain[name][0])} to {number(fit.domain[name][1])}"
        for name in ("B", "S")
        if len(fit.domain.get(name, ())) == 2
    ]
    return ", ".join(spans)


def coverage_table(found: Coverage) -> Table:
    """What a trace covers, in rows of one fact each."""
    rows = [("steps", count(found.rows)), ("cells (B,S)", count(found.cells))]
    rows += [(name, f"{number(low)} to {number(high)}") for name, (low, high) in found.spans.items()]
    rows += [
        (f"{phase} steps", f"{count(n)} ({format_percent(100 * n / found.rows)})") for phase, n in found.phases.items()
    ]
    if found.counter_gaps is not None:
        rows.append(("steps missing from the counter", count(found.counter_gaps)))
    return Table("What the trace covers", ("", "value"), rows)


def provenance(facts: Mapping[str, Any], caption: str = "Where it comes from") -> Table:
    """Free-form facts, nested ones under dotted names."""
    rows = list(_flat(facts))
    return Table(caption, ("fact", "value"), rows, words=("value",))


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in facts.items():
        label = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{label}.")
        elif value not in (None, "", [], ()):
            text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            yield label, text if len(text) <= _LONGEST_FACT else text[: _LONGEST_FACT - 1] + "…"


def prediction_table(rows: Sequence[Mapping[str, Any]], level: float) -> Table:
    """Steps with their typical latency, the interval, and whether they lie outside what was measured."""
    shown = [
        (
            number(row["B"]),
            count(row["S"]),
            format_ms(row["T_ms"], 4),
            _or_unknown(row["low"]),
            _or_unknown(row["high"]),
            f"{100 * row['level']:g} %" if row["level"] not in (None, level) else "",
            row["why_outside"],
        )
        for row in rows
    ]
    columns = ("requests B", "tokens S", "typical", f"{100 * level:g} % from", "to", "but at", "note")
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
            format_percent(score["median_ape_pct"]),
            format_percent(score["mape_pct"]),
            format_percent(score["p90_ape_pct"]),
            format_ms(score["rmse_ms"]),
        )
        for name, score in scores.items()
    ]
    return Table("Errors", ("steps", "number", "median error", "MAPE", "p90 error", "RMSE"), rows)


def machine_table(found: Mapping[str, Any]) -> Table:
    """What the fit and the steps say of their machine, and how much longer the steps of each phase take."""
    rows = [(name, fact["fitted"], fact["found"], fact["agreement"]) for name, fact in found["facts"].items()]
    rows += [
        (
            f"latency of {phase} steps",
            "1",
            f"{_ratio(shift['ratio'])} ({_ratio(shift['low'])} to {_ratio(shift['high'])}, 99 %)",
            shift["residuals"],
        )
        for phase, shift in found["phases"].items()
    ]
    columns = ("", "the fit", "these steps", "agreement")
    return Table("Whether they are of one machine", columns, rows, words=columns[1:])


def _ratio(value: float) -> str:
    return f"{number(value, 3)}×"


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
            format_percent(100 * region["share"]),
            *(f"{number(low)} to {number(high)}" for low, high in (region["B"], region["S"])),
        )
        for name, region in found["regions"].items()
    ]
    return Table("Which term is the largest", ("term", "share of the grid", "at B", "at S"), rows)


def comparison_table(names: Sequence[str], fits: Sequence[FitResult]) -> Table:
    """Parameters and errors of several fits, one column each."""
    values = [{row[0]: row[1] for row in parameters(fit).rows} for fit in fits]
    known = list(dict.fromkeys(name for column in values for name in column))
    rows = [("model", *(fit.name for fit in fits)), ("steps", *(count(fit.metrics.n) for fit in fits))]
    rows.append(("MAPE", *(format_percent(fit.metrics.mape_pct) for fit in fits)))
    rows += [(name, *(column.get(name, "–") for column in values)) for name in known]
    return Table("Side by side", ("", *names), rows)


def changes_table(name: str, found: Change, tolerance_pct: float, *, brief: bool = False) -> Table:
    """Return how a run differs from the baseline, by phase and region.

    brief: phases alone, with the regions that are slower than the tolerance.
    """
    rows = []
    for phase in found.parts:
        slower = phase.slower(tolerance_pct)
        for region in phase.tested:
            if brief and region not in slower and (region is not phase.whole or phase is found.overall):
                continue
            ends = [f"{number(low)} to {number(high)}" for low, high in (region.B, region.S)]
            interval = (
                "too few steps"
                if region.low_pct is None or region.high_pct is None
                else " to ".join(format_percent(end, signed=True) for end in (region.low_pct, region.high_pct))
            )
            label = phase.phase if region is phase.whole else "  region"
            steps = count(region.steps) if phase.by == "steps" else "by fits"
            change = format_percent(region.change_pct, signed=True)
            verdict = region.verdict(tolerance_pct).replace("slower within", "within")
            rows.append((label, *ends, steps, change, interval, verdict))
    columns = ("phase", "B", "S", "steps", "change", "95 % interval", "verdict")
    note = "95 %: of all intervals together, each end alone."
    table = Table(name, columns, rows, words=("verdict",), note=note)
    return replace(table, note="").only(*(each for each in columns if each != "steps")) if brief else table


def fits_table(fits: Sequence[tuple[str, FitResult]]) -> Table:
    """Fits of many systems, each with what it is called, a row each."""
    rows = [
        (
            name,
            fit.name if fit.status.ok else "not usable",
            count(fit.metrics.n),
            format_percent(fit.metrics.median_ape_pct),
            *(_or_dash(scores.mape_pct) for scores in (fit.cross_validation, _linear(fit).cv)),
        )
        for name, fit in fits
    ]
    columns = ("system", "model", "steps", "median error", "CV MAPE", "linear baseline")
    return Table("Fits", columns, rows, note="CV MAPE: cross-validated mean absolute percentage error.")


def _linear(fit: FitResult) -> Baseline:
    return fit.baselines.get("linear", Baseline())
