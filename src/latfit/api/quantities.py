"""Quantities as users write them: "20ms", "2000/s", "95%". A number without a unit is refused."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from latfit.errors import WrongUsage
from latfit.units import parse_duration_ms, parse_rate_per_ms, whole_number

MAX_RANGE_VALUES = 10_000


def duration(value: Any, option: str, *, zero: bool = False) -> float:
    """Return milliseconds of "20ms" or a timedelta. zero: accept 0."""
    if isinstance(value, timedelta):
        value = f"{value.total_seconds()}s"
    return parse_duration_ms(_with_unit(value, option, "20ms"), option=option, zero=zero)


def limit(value: Any, option: str) -> float:
    """Return a limit in ms, infinite if none is given."""
    return math.inf if value is None else duration(value, option)


def rate(value: Any, option: str = "--rate") -> float:
    return parse_rate_per_ms(_with_unit(value, option, "500/s"), option=option)


def _with_unit(value: Any, option: str, example: str) -> str:
    if not isinstance(value, str):
        found = "nothing is given" if value is None else f"{value!r} has no unit"
        raise WrongUsage(found, where=option, remedy=f'Write "{example}".')
    return value


def rates(values: Any, option: str = "--rate") -> list[float]:
    return [rate(each, option) for each in several(values)]


def transfer(value: str, option: str = "--transfer") -> tuple[float, float]:
    """Return (ms a request, ms a token) of "2ms", "2ms+1us" or "0+1us"."""
    fixed, plus, each = value.partition("+")
    return duration(fixed, option, zero=True), duration(each, option, zero=True) if plus else 0.0


def percent(value: Any, option: str = "--percentile") -> float:
    """Return percent of 95 or "95%"."""
    try:
        return float(value.strip().removesuffix("%").strip().removeprefix("p") if isinstance(value, str) else value)
    except (TypeError, ValueError):
        raise WrongUsage(f"{value!r} is not a percentage", where=option, remedy='Write 95 or "95%".') from None


def values_of(sweep: Mapping[str, Iterable[Any]] | str | Sequence[str] | None) -> dict[str, list[Any]]:
    """Return the values of each name in `replicas=1..4; rate=10/s,20/s`, or of a mapping."""
    if isinstance(sweep, Mapping):
        return {name.replace("-", "_"): list(values) for name, values in sweep.items()}
    pieces = (sweep if isinstance(sweep, str) else ";".join(sweep or ())).split(";")
    texts = by_name([each for each in pieces if each.strip()], "--sweep", "'replicas=1..4; rate=10/s,20/s'")
    return {
        name.replace("-", "_"): [value for part in text.split(",") for value in _range(part.strip())]
        for name, text in texts.items()
    }


def _range(text: str) -> list[str]:
    low, high = (whole_number(end) for end in (text.partition("..")[::2]))
    if low is None or high is None:
        return [text]
    if not 0 <= high - low < MAX_RANGE_VALUES:
        raise WrongUsage(f"{text!r} is no range", where="--sweep", remedy="Write the lower end first: 1..4.")
    return [str(value) for value in range(low, high + 1)]


def several(values: Any) -> list[Any]:
    if values is None:
        return []
    return list(values) if isinstance(values, Iterable) and not isinstance(values, str) else [values]


def by_name(
    values: Mapping[str, Any] | str | Iterable[str] | None, option: str, example: str, separator: str = "="
) -> dict[str, Any]:
    """Return values by name, of a mapping or of texts such as `gpu=800ms`."""
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
    found = whole_number(str(value))
    if not found:
        raise WrongUsage(f"{value!r} is no count", where=option, remedy=f"Write {example}.")
    return found
