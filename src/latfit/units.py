"""Parse quantities with units, and format numbers. Times are ms, rates per ms."""

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

MOST_SEED = 2**32 - 1  # largest seed of a random number generator

BYTES_PER_UNIT: Mapping[str, int] = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}  # `GB` is 10⁹ bytes and `GiB` 2³⁰ (IEC 80000-13); nvidia-smi and engines print MiB and GiB

_NUMBER_AND_UNIT = re.compile(r"(\d) (%|(?:ns|µs|ms|s|min|h|req/s)\b)")
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_QUANTITY = re.compile(rf"\s*({_NUMBER})\s*(/?\s*[a-zA-Zµμ]+)\s*")
_NOTHING = re.compile(rf"\s*0+(?:\.0*)?\s*(?:{'|'.join(MS_PER_UNIT)})?\s*")


def parse_duration_ms(text: str, *, option: str = "duration", zero: bool = False) -> float:
    """Return ms of `20ms`, `1.5s`, `250us`, `2min`. zero: accept `0`. Raises WrongUsage."""
    if zero and _NOTHING.fullmatch(text):
        return 0.0
    return _parse(text, option, "a duration with its unit", "20ms or 1.5s", MS_PER_UNIT)


def parse_rate_per_ms(text: str, *, option: str = "rate") -> float:
    """Return events per ms of `500/s`, `0.5/ms`, `1200/min`. Raises WrongUsage."""
    rates = {f"/{unit}": 1 / ms for unit, ms in MS_PER_UNIT.items()}
    return _parse(text, option, "a rate with its unit", "500/s or 30/min", rates)


def parse_bytes(text: str, *, option: str = "memory") -> float:
    """Return the bytes of `24GiB`, `81559MiB`, `80GB`. Raises WrongUsage."""
    return _parse(text, option, "a size with its unit", "24GiB or 80GB", BYTES_PER_UNIT)


def _parse(text: str, option: str, wanted: str, examples: str, units: Mapping[str, float]) -> float:
    found = _QUANTITY.fullmatch(text)
    unit, remedy = "".join(found[2].split()) if found else "", f"Write it like {examples}."
    if not found or unit not in units:
        raise WrongUsage(f"{text!r} is not {wanted}", where=option, remedy=remedy)
    value = float(found[1])
    if not math.isfinite(value) or value <= 0:
        raise WrongUsage(f"{text!r} is not above zero", where=option, remedy=remedy)
    return value * units[unit]


def whole_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def number(value: float | None, digits: int = 4) -> str:
    """Format with significant digits and thousands separators."""
    if value is None or not math.isfinite(value):
        return "unlimited" if value == math.inf else "unknown"
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def unbroken(text: str) -> str:
    """Return text with no-break spaces between numbers and units."""
    return _NUMBER_AND_UNIT.sub("\\1\xa0\\2", text)


def count_text(count: int, noun: str) -> str:
    return f"1 {noun}" if count == 1 else f"{count:,} {noun}s"


def format_ms(value_ms: float, digits: int = 3) -> str:
    if not math.isfinite(value_ms):
        return "unlimited" if value_ms > 0 else "unknown"
    size = abs(value_ms)
    for unit, name in ((1e3, "s"), (1.0, "ms")):
        if size >= unit:
            return f"{number(value_ms / unit, digits)} {name}"
    return f"{number(value_ms * 1e3, digits)} µs" if size else "0 ms"


def format_bytes(value: float) -> str:
    return f"{number(value / 2**30, 3)} GiB"


def format_percent(value: float | None, *, signed: bool = False) -> str:
    """Format percent: `95 %`, two significant digits below ten; signed: `+95 %`."""
    if signed and value is not None and abs(value) < 0.01:
        return "0 %"
    if signed and value is not None and value > 0:
        return f"+{format_percent(value)}"
    if value is None or not math.isfinite(value):
        return "unknown"
    if 0 < abs(value) < 0.01:
        return "under 0.01 %"
    return f"{value:.0f} %" if abs(value) >= 9.95 else f"{value:.2g} %"


def format_rate(per_s: float, *, down: bool = False, digits: int = 4, planned_per_s: float = 0.0) -> str:
    """Format requests per second: `2,655 req/s`. down: round down, but not below a planned rate that is reached."""
    if not math.isfinite(per_s):
        return number(per_s)
    if down and per_s > 0:
        unit = 10.0 ** (math.floor(math.log10(per_s)) - digits + 1)
        per_s = max(math.floor(per_s / unit * (1 + 1e-12)) * unit, planned_per_s if planned_per_s <= per_s else 0.0)
    return f"{per_s:,.4g} req/s" if per_s < 1e4 else f"{float(f'{per_s:.4g}'):,.0f} req/s"
