"""Tables of steps: predicted, evaluated, compared; of a trace's coverage, and of several fits."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

from latfit.fitting import Change, Compared, PhaseChange, RegionChange
from latfit.hardware import BatchEstimate, ExecutionPath, HardwareProfile, PathLatency, beside_the_fit
from latfit.model import FitResult
from latfit.reporting.fit_tables import LINEAR, parameters
from latfit.reporting.table import Column, Table, count, facts_table, make_table, of_share, signed_percent, span
from latfit.trace import PERIOD, Coverage, request_times, time_quantile
from latfit.units import format_ms, format_percent, format_rate, number

MAX_REGIONS = 3  # named in a verdict
VERDICTS = {
    "unclear": "may be slower than",
    "slower": "is slower than",
    "slower within tolerance": "is slower within the tolerance than",
    "faster": "is faster than",
    "as fast": "is as fast as",
}
MIN_HOST_SHARE = 0.05  # of T; below it the host's time is not reported


_precise_ms = partial(format_ms, digits=4)


def coverage_table(found: Coverage) -> Table:
    return facts_table(
        "What the trace covers",
        ("steps", found.rows, count),
        ("cells (B,S)", found.cells, count),
        *((name, ends, span) for name, ends in found.spans.items()),
        *((f"{phase} steps", f"{count(n)} ({of_share(n / found.rows)})", str) for phase, n in found.phases.items()),
        ("steps missing from the counter", found.counter_gaps, count),
    )


def prediction_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    return make_table(
        "Latency of a step",
        rows,
        ("requests B", lambda row: row["B"], number),
        ("tokens S", lambda row: row["S"], count),
        ("typical", lambda row: row["T_ms"], _precise_ms),
        ("from", lambda row: row["low"], _precise_ms),
        ("to", lambda row: row["high"], _precise_ms),
        ("interval", lambda row: row["level"], lambda own: "none" if math.isnan(own) else f"{100 * own:g} %"),
        ("note", lambda row: row["why_outside"]),
        words=("note",),
    )


def evaluation_table(found: Mapping[str, Any]) -> Table:
    return make_table(
        "Errors",
        {"all steps": found["metrics"], **found["by_phase"]}.items(),
        ("steps", lambda each: each[0]),
        ("number", lambda each: each[1]["n"], count),
        ("median error", lambda each: each[1]["median_ape_pct"], format_percent),
        ("MAPE", lambda each: each[1]["mape_pct"], format_percent),
        ("p90 error", lambda each: each[1]["p90_ape_pct"], format_percent),
        ("RMSE", lambda each: each[1]["rmse_ms"], format_ms),
    )


def machine_table(found: Mapping[str, Any]) -> Table:
    rows = [(name, fact["fitted"], fact["found"], fact["agreement"]) for name, fact in found["facts"].items()]
    for phase, shift in found["phases"].items():
        ratio, low, high = (f"{number(shift[name], 3)}×" for name in ("ratio", "low", "high"))
        rows.append((f"latency of {phase} steps", "1", f"{ratio} ({low} to {high}, 99 %)", shift["residuals"]))
    columns = ("", "the fit", "these steps", "agreement")
    return Table("Whether they are of one machine", columns, rows, words=columns[1:])


def sensitivity_table(found: Mapping[str, Any]) -> Table:
    slopes = ("dT_dB", "dT_dS", "elasticity_B", "elasticity_S")
    rows = []
    for (i, B), (j, S) in product(enumerate(found["B"]), enumerate(found["S"])):
        if (T_ms := found["T_ms"][i][j]) is not None:
            values = [found[name][i][j] for name in slopes]
            shown = ["" if value is None else number(value, 3) for value in values]
            rows.append((number(B), count(S), _precise_ms(T_ms), *shown, found["dominant"][i][j]))
    columns = ("B", "S", "typical", "ms a request", "ms a token", "% per % of B", "% per % of S", "largest term")
    caption = "How the latency answers to one request or token more"
    return Table(caption, columns, rows, words=("largest term",)).without_empty()


def regions_table(found: Mapping[str, Any]) -> Table:
    return make_table(
        "Which term is the largest",
        found["regions"].items(),
        ("term", lambda each: each[0]),
        ("share of the grid", lambda each: each[1]["share"], of_share),
        ("at B", lambda each: span(each[1]["B"])),
        ("at S", lambda each: span(each[1]["S"])),
    )


def comparison_table(names: Sequence[str], fits: Sequence[FitResult]) -> Table:
    values = [{row[0]: row[1] for row in parameters(fit).rows} for fit in fits]
    rows = [("model", *(fit.name for fit in fits)), ("steps", *(count(fit.metrics.n) for fit in fits))]
    rows.append(("MAPE", *(format_percent(fit.metrics.mape_pct) for fit in fits)))
    names_of_all = dict.fromkeys(name for column in values for name in column)
    rows += [(name, *(column.get(name, "–") for column in values)) for name in names_of_all]
    return Table("Side by side", ("", *names), rows)


def changes_table(name: str, found: Change, *, brief: bool = False) -> Table:
    """brief: phases, and regions that are slower than the tolerance."""
    regions = [
        (phase, region)
        for phase in found.phases
        for region in phase.tested
        if not brief or region in phase.slower or region is phase
    ]
    return make_table(
        name,
        regions,
        ("phase", lambda each: each[0].phase if each[1] is each[0] else "  region"),
        ("B", lambda each: span(each[1].B)),
        ("S", lambda each: span(each[1].S)),
        ("steps", lambda each: None if brief else count(each[1].steps) if each[0].by == "steps" else "by fits"),
        ("change", lambda each: signed_percent(each[1].change_pct)),
        ("95 % interval", lambda each: _interval(each[1].low_pct, each[1].high_pct)),
        ("verdict", lambda each: _verdict(*each)),
        words=("verdict",),
        note="" if brief else "95 %: of all intervals together, each end alone.",
    )


def _verdict(phase: PhaseChange, region: RegionChange) -> str:
    return (phase.verdict_on_whole if region is phase else region.verdict).replace("slower within", "within")


def _interval(low_pct: float | None, high_pct: float | None) -> str:
    if low_pct is None or high_pct is None:
        return "too few steps"
    return f"{signed_percent(low_pct)} to {signed_percent(high_pct)}"


def fits_table(fits: Sequence[tuple[str, FitResult]]) -> Table:
    return make_table(
        "Fits",
        fits,
        ("system", lambda each: each[0]),
        ("model", lambda each: each[1].name if each[1].status.ok else "not usable"),
        ("steps", lambda each: each[1].metrics.n, count),
        ("median error", lambda each: each[1].metrics.median_ape_pct, format_percent),
        ("CV MAPE", lambda each: each[1].cross_validation.mape_pct, format_percent),
        ("linear baseline", lambda each: each[1].baselines.get("linear", LINEAR).cv.mape_pct, format_percent),
        note="CV MAPE: cross-validated mean absolute percentage error.",
    )


def data_line(facts: Mapping[str, Any]) -> str:
    """`Read 120,431 rows, used 118,002; dropped 1,204 cold_start, 998 zero_time; marked 31 outlier.`"""
    if facts.get("rows_read") is None:
        return "No rows were read."
    parts = [f"Read {facts['rows_read']:,} rows, used {facts['rows_used']:,}"]
    for word in ("dropped", "marked"):
        counts = ", ".join(f"{n:,} {reason}" for reason, n in facts.get(word, {}).items())
        parts += [f"{word} {counts}"] if counts else []
    return "; ".join(parts) + "."


def host_line(facts: Mapping[str, Any]) -> str:
    """Say by how much periods exceed T_ms; empty below MIN_HOST_SHARE."""
    shares = {phase: each["period_ms"] / each["T_ms"] - 1.0 for phase, each in facts.get("host", {}).items()}
    longer = [f"{format_percent(100 * share)} ({phase})" for phase, share in shares.items() if share > MIN_HOST_SHARE]
    if not longer:
        return ""
    fitted = "The period was fitted" if facts.get("time") == PERIOD else "T_ms was fitted all the same"
    return (
        f"The period from one step to the next exceeds T_ms by {', '.join(longer)}: scheduling and output handling,"
        f" which the engine's own time leaves out. {fitted}."
    )


def comparison_sentence(found: Compared) -> str:
    slower = [_place(region, phase) for phase in found.phases for region in phase.slower]
    more = f" and {len(slower) - MAX_REGIONS} more" if len(slower) > MAX_REGIONS else ""
    where = ", ".join(slower[:MAX_REGIONS]) + more
    where = where or ", ".join(each.phase for each in found.phases if each.verdict == "faster")
    if found.one_start_each and found.verdict == "unclear" and where:
        both = f"{found.name} and {found.baseline} are one start each"
        return f"Not separable: {'slower' if slower else 'faster'} in {where}. {both}: the machine may cause it."
    named = f" in {where}" if found.verdict in ("slower", "faster") else ""
    return f"{found.name} {VERDICTS[found.verdict]} {found.baseline}{named}."


def comparison_basis(found: Compared, tolerance_pct: float) -> str:
    by_steps = [phase for phase in found.phases if phase.by == "steps"]
    by_fits = [phase.phase for phase in found.phases if phase.by == "fits"]
    parts = [f"{', '.join(by_fits)} by predictions of the fits"] if by_fits else []
    if by_steps:
        names = ("steps", "baseline_steps", "cells")
        steps, baseline_steps, cells = (sum(getattr(phase, name) for phase in by_steps) for name in names)
        parts.insert(0, f"{steps:,} steps with {baseline_steps:,} in {cells:,} common cells")
    text = f"Compared {'; '.join(parts)}. Tolerance {format_percent(tolerance_pct)}, "
    text += f"{len(found.tested)} phases and regions tested."
    if found.starts is not None and found.start_sd_pct is not None:
        starts = " and ".join(map(str, found.starts))
        text += f" {starts} starts; starts differ by {format_percent(found.start_sd_pct)} (standard deviation)."
    return text + f" Not in both runs: {', '.join(found.only_in_one)}." * bool(found.only_in_one)


def _place(region: RegionChange, phase: PhaseChange) -> str:
    if region is phase:
        return phase.phase
    ends = [("B", region.B, phase.B), ("S", region.S, phase.S)]
    parts = [
        f"{name} {number(low)}" + f" to {number(high)}" * (high > low)
        for name, (low, high), whole in (ends[:1] if region.B == region.S else ends)
        if (low, high) != whole
    ]
    return f"{phase.phase} at {', '.join(parts)}" if parts else f"part of {phase.phase}"


def requests_line(provenance: Mapping[str, Any]) -> str:
    parts = [
        f"{name.removesuffix('_ms').upper()} p50 {format_ms(time_quantile(counts, 0.5))},"
        f" p99 {format_ms(time_quantile(counts, 0.99))} (of {counts.total():,})"
        for name, counts in sorted(request_times(provenance).items(), reverse=True)
    ]
    return f"Requests since the engine's start: {'; '.join(parts)}." if parts else ""


MOST_ROWS = 10
SHOWN_LEVELS = (0.9, 0.99)


def paths_table(profile: HardwareProfile, tokens: int = 1, context: float | None = None) -> Table:
    def latency_ms(path: ExecutionPath, place: int) -> float:
        batches = PathLatency(path, tokens, context)
        return batches.estimate((1, len(batches.batches))[place]).typical_ms

    return make_table(
        "Execution paths, and the typical latency of the smallest and largest batch",
        profile.paths.values(),
        ("path", "name"),
        ("source", "source"),
        ("B", lambda path: span(path.fit.domain["B"])),
        ("S", lambda path: span(path.fit.domain["S"])),
        ("smallest", lambda path: latency_ms(path, 0), format_ms),
        ("largest", lambda path: latency_ms(path, 1), format_ms),
        ("price", "price_per_hour", "{:g}/h".format),
        words=("source",),
    )


def estimates(path: ExecutionPath, tokens: int, context: float | None = None) -> list[BatchEstimate]:
    latency = PathLatency(path, tokens, context)
    top = len(latency.batches)
    sizes = sorted({*(1 << i for i in range(top.bit_length())), top})
    return [latency.estimate(B) for B in sorted({*sizes[: MOST_ROWS - 1], top})]


def estimates_table(label: str, rows: Sequence[BatchEstimate], tokens: int) -> Table:
    def quantile(level: float) -> Column:
        return f"p{100 * level:g}", lambda row: row.quantiles.get(level), format_ms

    return make_table(
        f"Batches on {label}, {'a token' if tokens == 1 else f'{tokens:,} tokens'} a request",
        rows,
        ("requests B", "B", count),
        ("typical", "typical_ms", format_ms),
        ("mean", "mean_ms", format_ms),
        *map(quantile, SHOWN_LEVELS),
        ("note", lambda row: "extrapolated" if row.outside else ""),
        words=("note",),
    )


def ceilings_table(profile: HardwareProfile) -> Table:
    paths = [(name, path) for name, path in profile.paths.items() if path.ceiling.known]
    return make_table(
        "Fitted against the machine's ceiling",
        [(name, beside_the_fit(path.ceiling, path.fit)) for name, path in paths],
        ("path", lambda each: each[0]),
        ("fitted peak tokens", lambda each: 1e3 * each[1].fitted_tokens_per_ms, format_rate),
        ("machine", lambda each: each[1].ceiling_tokens_per_ms and 1e3 * each[1].ceiling_tokens_per_ms, format_rate),
        ("share", lambda each: each[1].peak_share, of_share),
        ("fastest step", lambda each: each[1].fitted_fastest_ms, format_ms),
        ("machine's floor", lambda each: each[1].floor_ms, format_ms),
        ("share of it", lambda each: each[1].floor_share, of_share),
    )


def path_facts(path: ExecutionPath, tokens: int, context: float | None) -> dict[str, Any]:
    return {
        "source": "nominal" if path.nominal else "fitted",
        "nominal": path.nominal.text if path.nominal else None,
        "model": path.fit.name,
        "price_per_hour": path.price_per_hour,
        "ceiling": beside_the_fit(path.ceiling, path.fit).to_json() if path.ceiling.known else None,
        "estimates": [asdict(row) for row in estimates(path, tokens, context)],
    }
