"""Units at the edges. Inside, time is milliseconds and rates are per millisecond, both float64."""

import math
import re
from collections.abc import Mapping

from latfit.errors import WrongUsage

MS_PER_UNIT: Mapping[str, float] = {
    "ns": 1e-6,
    "us": 1e-3,
    "µs": 1e-3,
    "μs": 1e-3,
    "ms": 1.0,
    "s": 1e3,
    "min": 6e4,
    "h": 3.6e6,
}

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_DURATION = re.compile(rf"\s*({_NUMBER})\s*([a-zµμ]+)\s*")
_RATE = re.compile(rf"\s*({_NUMBER})\s*/\s*([a-zµμ]+)\s*")


def parse_duration_ms(text: str, *, option: str = "duration") -> float:
    """Milliseconds from `20ms`, `1.5s`, `250us`, `2min`. A number without a unit is refused: it could mean either."""
    value, unit_ms = _parse(_DURATION, text, option, "a duration with its unit, such as 20ms or 1.5s")
    return value * unit_ms


def parse_rate_per_ms(text: str, *, option: str = "rate") -> float:
    """Events per millisecond from `500/s`, `0.5/ms`, `1200/min`."""
    value, unit_ms = _parse(_RATE, text, option, "a rate with its unit, such as 500/s or 30/min")
    return value / unit_ms


def _parse(pattern: re.Pattern[str], text: str, option: str, wanted: str) -> tuple[float, float]:
    """The number, and what its unit is in ms."""
    found = pattern.fullmatch(text)
    unit = found.group(2) if found else ""
    if not found or unit not in MS_PER_UNIT:
        raise WrongUsage(f"{text!r} is not {wanted}", where=option, remedy=f"Write {wanted}.")
    value = float(found.group(1))
    if not math.isfinite(value) or value <= 0:
        raise WrongUsage(f"{text!r} is not above zero", where=option, remedy=f"Write {wanted}, above zero.")
    return value, MS_PER_UNIT[unit]


def format_ms(value_ms: float, digits: int = 3) -> str:
    """A duration for people: the unit that keeps the number between 1 and 1000, up to `digits` significant digits."""
    if not math.isfinite(value_ms):
        return "unlimited" if value_ms > 0 else "unknown"
    size = abs(value_ms)
    if size >= 1e3:
        return f"{_significant(value_ms / 1e3, digits)} s"
    if size >= 1 or size == 0:
        return f"{_significant(value_ms, digits)} ms"
    return f"{_significant(value_ms * 1e3, digits)} µs"


def _significant(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
