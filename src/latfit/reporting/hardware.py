"""Tables of a hardware profile: where each path's numbers come from, how long its batches take, what is left."""

from collections.abc import Sequence

from latfit.hardware import BatchEstimate, ExecutionPath, HardwareProfile, PathLatency, beside_the_fit
from latfit.reporting.fit.tables import Table
from latfit.reporting.format import count
from latfit.units import format_ms, format_percent, format_rate, number

MOST_ROWS = 10
SHOWN_LEVELS = (0.9, 0.99)


def paths_table(profile: HardwareProfile, tokens: int = 1, context: float | None = None) -> Table:
    """Every path: its source, measured range, typical latency of its smallest and largest batch, and price. Raises
    WrongUsage."""
    rows = []
    for path in profile.paths.values():
        source = (
            f"nominal: {path.nominal.text}" if path.nominal else f"{path.fit.name}, {count(path.fit.metrics.n)} steps"
        )
        spans = [f"{number(low)} to {number(high)}" for low, high in (path.fit.domain[name] for name in ("B", "S"))]
        batches = PathLatency(path, tokens, context)
        first, last = (batches.estimate(B) for B in (1, len(batches.batches)))
        price = "" if path.price_per_hour is None else f"{path.price_per_hour:g}/h"
        rows.append((path.name, source, *spans, format_ms(first.typical_ms), format_ms(last.typical_ms), price))
    columns = ("path", "source", "B", "S", "smallest", "largest", "price")
    return Table(
        "Execution paths, and the typical latency of the smallest and largest batch", columns, rows, words=("source",)
    ).without_empty()


def estimates(path: ExecutionPath, tokens: int, context: float | None = None) -> list[BatchEstimate]:
    """Batches of 1, 2, 4, ... requests up to the largest measured, and that one."""
    latency = PathLatency(path, tokens, context)
    top = len(latency.batches)
    sizes = sorted({*(1 << i for i in range(top.bit_length())), top})
    return [latency.estimate(B) for B in sizes[:MOST_ROWS]]


def estimates_table(label: str, rows: Sequence[BatchEstimate], tokens: int) -> Table:
    """Typical and mean latency of batches, and the quantiles that the fit knows."""
    levels = [level for level in SHOWN_LEVELS if any(level in row.quantiles for row in rows)]
    cells = [
        (
            count(row.B),
            format_ms(row.typical_ms),
            format_ms(row.mean_ms),
            *(format_ms(row.quantiles[level]) if level in row.quantiles else "unknown" for level in levels),
            "extrapolated" if row.outside else "",
        )
        for row in rows
    ]
    each = "a token" if tokens == 1 else f"{tokens:,} tokens"
    columns = ("requests B", "typical", "mean", *(f"p{100 * level:g}" for level in levels), "note")
    return Table(f"Batches on {label}, {each} a request", columns, cells, words=("note",)).without_empty()


def ceilings_table(profile: HardwareProfile) -> Table:
    """The fitted peak and the fastest step beside what the machine could do."""
    rows = []
    for name, path in profile.paths.items():
        if not path.ceiling.known:
            continue
        found = beside_the_fit(path.ceiling, path.fit)
        rows.append(
            (
                name,
                format_rate(found.fitted_tokens_per_ms * 1e3),
                "" if found.ceiling_tokens_per_ms is None else format_rate(found.ceiling_tokens_per_ms * 1e3),
                _share(found.peak_share),
                format_ms(found.fitted_fastest_ms),
                "" if found.floor_ms is None else format_ms(found.floor_ms),
                _share(found.floor_share),
            )
        )
    columns = ("path", "fitted peak tokens", "machine", "share", "fastest step", "machine's floor", "share of it")
    return Table("Fitted against the machine's ceiling", columns, rows).without_empty()


def _share(value: float | None) -> str:
    if value is None:
        return ""
    return format_percent(100 * value) + (" (above the ceiling: a number is wrong)" if value > 1 else "")
