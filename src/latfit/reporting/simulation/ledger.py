"""A ledger of promises as a table."""

import math
from pathlib import Path

from latfit.reporting.table import Table, make_table
from latfit.units import count_text, format_ms, format_percent
from latfit.validation import Ledger

SHOWN_ENTRIES = 8  # newest runs on a terminal

NOMINAL_PCT = 95.0  # coverage that the intervals of plans state


def with_interval(value: float | None, ends: tuple[float, float] | None) -> str:
    """Return `36 ms (32 ms to 40 ms)`, or `36 ms (32 ms or more)` if the upper end is open; infinite: not answered."""
    if value is None or not math.isfinite(value):
        return "-" if value is None else "no answer"
    if ends is None:
        return format_ms(value)
    upper = f"to {format_ms(ends[1])}" if math.isfinite(ends[1]) else "or more"
    return f"{format_ms(value)} ({format_ms(ends[0])} {upper})"


def ledger_table(ledger: Ledger, *, brief: bool = False) -> Table:
    """Show a row a percentile, the newest run last; brief: of the newest runs."""
    entries = ledger.entries[-SHOWN_ENTRIES:] if brief else ledger.entries
    return make_table(
        "",
        [(entry, each) for entry in entries for each in entry.figures],
        ("added", lambda row: row[0].added[:10]),
        ("run", lambda row: None if brief else Path(row[0].run).name),
        ("promise", lambda row: f"{row[1].name} {format_ms(row[1].limit_ms)}"),
        ("planned", lambda row: with_interval(row[1].planned_ms, row[1].planned_interval_ms)),
        ("measured", lambda row: with_interval(row[1].measured_ms, row[1].interval_ms)),
        ("error", lambda row: row[1].error_pct, lambda error: format_percent(error, signed=True)),
        ("verdict", lambda row: "another load" if not row[0].comparable else "kept" if row[1].kept else "broken"),
        words=("run", "promise", "verdict"),
    )


def ledger_lines(ledger: Ledger) -> list[str]:
    found, coverage = [], ledger.coverage_pct
    if coverage is not None:
        share, (low, high) = coverage
        found.append(
            f"Stated intervals cover {format_percent(share)} of the testable percentiles (95 %:"
            f" {format_percent(low)} to {format_percent(high)}), {format_percent(NOMINAL_PCT)} stated."
        )
    if other := len(ledger.entries) - len(ledger.counted):
        found.append(f"Not counted, because of another load than planned: {count_text(other, 'run')}.")
    if failed := sum(entry.failed for entry in ledger.counted):
        found.append(f"{count_text(failed, 'request')} without an answer count as slower than any limit.")
    return found
