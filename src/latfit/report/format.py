"""Numbers and names in a reader's words: rounded to what the data carry, safe to draw."""

import math
import re

from latfit.units import MS_PER_UNIT

_UNDRAWABLE = re.compile(r"[^\x20-\x7e\u00a0-\u00ff]")
_NOT_A_FILE_NAME = re.compile(r"[^A-Za-z0-9._-]+")


def number(value: float | None, digits: int = 4) -> str:
    """`digits` significant digits with thousands separators; powers of ten only where that would be long."""
    if value is None or not math.isfinite(value):
        return "unlimited" if value == math.inf else "unknown"
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(value: float | None) -> str:
    """A percentage that is already in percent, two significant digits."""
    if value is None or not math.isfinite(value):
        return "unknown"
    if 0 < abs(value) < 0.01:
        return "under 0.01 %"
    return f"{value:.0f} %" if abs(value) >= 10 else f"{value:.2g} %"


def count(value: float | None) -> str:
    return "unknown" if value is None or not math.isfinite(value) else f"{value:,.0f}"


def counted(n: float, thing: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count(n)} {thing}{'' if n == 1 else 's'}"


def per_second(rate_per_ms: float) -> float:
    return rate_per_ms * MS_PER_UNIT["s"]


def shorthand(value: float) -> str:
    """An axis label: 20,000 as `20k`, 2,500,000 as `2.5M`; 32,768 stays, because shortening would blur it."""
    for size, suffix, unit in ((1e9, "G", 1e9), (1e6, "M", 1e6), (1e4, "k", 1e3)):
        if abs(value) >= size and f"{value / unit:.3g}" == f"{value / unit:.9g}":
            return f"{value / unit:,.3g}{suffix}"
    return f"{value:,.7g}"


def drawable(text: str, most: int = 40) -> str:
    """`text` for a figure: no character without a glyph, no mathematics between dollar signs, not long."""
    plain = _UNDRAWABLE.sub("?", text)
    plain = plain if len(plain) <= most else plain[: most - 3] + "..."
    # Matplotlib leaves out legend entries that start with an underscore.
    return (" " + plain if plain.startswith("_") else plain).replace("$", r"\$")


def file_stem(text: str) -> str:
    """`text` as part of a file name: no separators, no leading dot, never empty."""
    return _NOT_A_FILE_NAME.sub("-", text).strip("-.")[:60] or "path"
