"""Quantities as users write them: strings with units, or numbers whose parameter says the unit.

    sla="20ms"   sla_ms=20   rate="2000/s"   rate_per_s=2000   percentile=99   percentile="95%"   timedelta(seconds=2)

A plain number where its unit would be a guess is refused. Errors name options as the command line does.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from latfit.errors import WrongUsage
from latfit.units import parse_duration_ms, parse_rate_per_ms, whole_number

MS_PER_S = 1e3
MOST_IN_RANGE = 10_000


def duration(value: Any, option: str, ms: float | None = None, *, zero: bool = False) -> float:
    """Return milliseconds of "20ms" or a timedelta, else the number `ms`. zero: accept 0. Raises WrongUsage."""
    if isinstance(value, str):
        return parse_duration_ms(value, option=option, zero=zero)
    if isinstance(value, timedelta):
        value, ms = None, value.total_seconds() * MS_PER_S
    return _positive(value, ms, option, "20ms", "ms", zero=zero)


def limit(value: Any, option: str) -> float:
    """Return a latency limit in ms, infinite if none is given. Raises WrongUsage."""
    return math.inf if value is None else duration(value, option)


def rate(value: Any, option: str = "--rate", per_s: float | None = None) -> float:
    """Return requests per ms of "500/s", else of `per_s` requests a second. Raises WrongUsage."""
    if isinstance(value, str):
        return parse_rate_per_ms(value, option=option)
    return _positive(value, per_s, option, "500/s", "per_s") / MS_PER_S


def _positive(value: Any, named: Any, option: str, example: str, suffix: str, *, zero: bool = False) -> float:
    """Return the number that stands in a parameter with its unit. Raises WrongUsage."""
    parameter = f"{option.lstrip('-').replace('-', '_')}_{suffix}"
    if value is not None:
        raise WrongUsage(
            f"{value!r} has no unit",
            where=option,
            remedy=f'Write "{example}", or give a number as {parameter} where there is one.',
        )
    if isinstance(named, bool) or not isinstance(named, int | float) or not math.isfinite(named):
        raise WrongUsage(f"{named!r} is not a quantity", where=option, remedy=f"Write {example}.")
    if named < 0 or (named == 0 and not zero):
        raise WrongUsage(f"{named:g} is not above zero", where=option, remedy="Give a number above zero.")
    return float(named)


def rates(values: Any, option: str = "--rate", per_s: float | Iterable[float] | None = None) -> list[float]:
    """Return requests per ms of one rate or several. Raises WrongUsage."""
    if values is None:
        return [rate(None, option, each) for each in several(per_s)]
    return [rate(each, option) for each in several(values)]


def transfer(value: str, option: str = "--transfer") -> tuple[float, float]:
    """Return (ms a request, ms a token) of "2ms", "2ms+1us" or "0+1us". Raises WrongUsage."""
    fixed, plus, each = value.partition("+")
    return duration(fixed, option, zero=True), duration(each, option, zero=True) if plus else 0.0


def percent(value: Any, option: str = "--percentile") -> float:
    """Return percent of 95 or "95%". Raises WrongUsage."""
    try:
        if isinstance(value, str):
            value = value.strip().removesuffix("%").strip().removeprefix("p")
        elif isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise WrongUsage(f"{value!r} is not a percentage", where=option, remedy='Write 95 or "95%".') from None


def values_of(sweep: Mapping[str, Iterable[Any]] | str | Sequence[str] | None) -> dict[str, list[Any]]:
    """Return the values of each name in `replicas=1..4; rate=10/s,20/s`, or of a mapping. Raises WrongUsage."""
    if isinstance(sweep, Mapping):
        return {name.replace("-", "_"): list(values) for name, values in sweep.items()}
    found: dict[str, list[Any]] = {}
    pieces = (sweep if isinstance(sweep, str) else ";".join(sweep or ())).split(";")
    for piece in (each for each in pieces if each.strip()):
        name, _, texts = (part.strip() for part in piece.partition("="))
        name = name.replace("-", "_")
        values = [value for text in texts.split(",") if text.strip() for value in _range(text.strip())]
        if not values or name in found:
            what = "has no value" if not values else "stands twice"
            raise WrongUsage(f"{name!r} {what}", where="--sweep", remedy="Write 'replicas=1..4; rate=10/s,20/s'.")
        found[name] = values
    return found


def _range(text: str) -> list[str]:
    """Return the whole numbers of `1..4`; any other text alone."""
    low, high = (whole_number(end) for end in (text.partition("..")[::2]))
    if low is None or high is None:
        return [text]
    if not 0 <= high - low < MOST_IN_RANGE:
        raise WrongUsage(f"{text!r} is no range", where="--sweep", remedy="Write the lower end first: 1..4.")
    return [str(value) for value in range(low, high + 1)]


def several(values: Any) -> list[Any]:
    """Return a list of one value, or of all in a sequence; empty for None."""
    if values is None:
        return []
    return list(values) if isinstance(values, Iterable) and not isinstance(values, str) else [values]


def by_name(
    values: Mapping[str, Any] | str | Iterable[str] | None, option: str, example: str, separator: str = "="
) -> dict[str, Any]:
    """Return values by name, of a mapping or of texts such as `gpu=800ms`. Raises WrongUsage."""
    if isinstance(values, Mapping):
        return dict(values)
    found: dict[str, Any] = {}
    for text in several(values):
        name, value = map(str.strip, [*re.split(f"[{separator}]", text, maxsplit=1), ""][:2])
        if not re.fullmatch(r"[\w-]+", name) or not value or name in found:
            what = f"{name} is given twice" if name in found else f"{text!r} is not a name with its value"
            raise WrongUsage(what, where=option, remedy=f"Write {example}.")
        found[name] = value
    return found


def count(value: Any, option: str, example: str) -> int:
    """Return a whole number above zero. Raises WrongUsage."""
    found = value if isinstance(value, int) else whole_number(value)
    if not found:
        raise WrongUsage(f"{value!r} is no count", where=option, remedy=f"Write {example}.")
    return found
