"""Numbers and names as text: rounded to what the data carry, safe to draw."""

import math
import re
from collections.abc import Sequence

from latfit.units import format_percent, number

_UNDRAWABLE = re.compile(r"[^\x20-\x7e\u00a0-\u00ff]")
_NOT_A_FILE_NAME = re.compile(r"[^A-Za-z0-9._-]+")


def count(value: float | None) -> str:
    return "unknown" if value is None or not math.isfinite(value) else f"{value:,.0f}"


def span(ends: Sequence[float]) -> str:
    low, high = map(number, ends)
    return low if low == high else f"{low} to {high}"


def signed_percent(value_pct: float) -> str:
    return format_percent(value_pct, signed=True)


def of_share(share: float) -> str:
    return format_percent(100 * share)


def shorthand(value: float) -> str:
    """Return an axis label: 20,000 as `20k`; 32,768 stays."""
    for size, suffix, unit in ((1e9, "G", 1e9), (1e6, "M", 1e6), (1e4, "k", 1e3)):
        if abs(value) >= size and f"{value / unit:.3g}" == f"{value / unit:.9g}":
            return f"{value / unit:,.3g}{suffix}"
    return f"{value:,.7g}"


def drawable(text: str, most: int = 40) -> str:
    """Return text for a figure: no character without a glyph, no mathematics, not long."""
    plain = _UNDRAWABLE.sub("?", text)
    plain = plain if len(plain) <= most else plain[: most - 3] + "..."
    # Matplotlib leaves out legend entries that start with an underscore.
    return (" " + plain if plain.startswith("_") else plain).replace("$", r"\$")


def file_stem(text: str) -> str:
    """Return text as part of a file name: no separators, no leading dot, never empty."""
    return _NOT_A_FILE_NAME.sub("-", text).strip("-.")[:60] or "path"
