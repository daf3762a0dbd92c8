"""Tables of a hardware profile."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from latfit.hardware import BatchEstimate, ExecutionPath, HardwareProfile, PathLatency, beside_the_fit
from latfit.reporting.format import count, of_share, span
from latfit.reporting.table import Column, Table, make_table
from latfit.units import format_ms, format_rate

MOST_ROWS = 10
SHOWN_LEVELS = (0.9, 0.99)


def paths_table(profile: HardwareProfile, tokens: int = 1, context: float | None = None) -> Table:
    def latency_ms(path: ExecutionPath, place: int) -> float:
        batches = PathLatency(path, tokens, context)
        return batches.estimate((1, len(batches.batches))[place]).typical_ms

    def source(path: ExecutionPath) -> str:
        return (
            f"nominal: {path.nominal.text}" if path.nominal else f"{path.fit.name}, {count(path.fit.metrics.n)} steps"
        )

    return make_table(
        "Execution paths, and the typical latency of the smallest and largest batch",
        profile.paths.values(),
        ("path", "name"),
        ("source", source),
        ("B", lambda path: span(path.fit.domain["B"])),
        ("S", lambda path: span(path.fit.domain["S"])),
        ("smallest", lambda path: latency_ms(path, 0), format_ms),
        ("largest", lambda path: latency_ms(path, 1), format_ms),
        ("price", "price_per_hour", "{:g}/h".format),
        words=("source",),
    )


def estimates(path: ExecutionPath, tokens: int, context: float | None = None) -> list[BatchEstimate]:
    """Return batches of 1, 2, 4, ... requests up to the largest measured."""
    latency = PathLatency(path, tokens, context)
    top = len(latency.batches)
    sizes = sorted({*(1 << i for i in range(top.bit_length())), top})
    return [latency.estimate(B) for B in sizes[:MOST_ROWS]]


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
