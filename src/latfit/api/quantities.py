"""Quantities as users write them: strings with units, as on the command line, or numbers whose parameter says the unit.

    sla="20ms"   sla_ms=20   rate="2000/s"   rate_per_s=2000   percentile=99   percentile="95%"   timedelta(seconds=2)

A plain number where its unit would be a guess is refused. Errors name options as the command line does: `--sla` is
the parameter `sla`.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from latfit.errors import WrongUsage
from latfit.units import parse_duration_ms, parse_rate_per_ms, whole_number

MS_PER_S = 1e3


def duration(value: Any, option: str, ms: float | None = None, *, zero: bool = False) -> float:
    """Milliseconds from "20ms" or a timedelta, or from the number given as `ms`. zero: whether 0 is allowed.
    Raises WrongUsage for a number without a unit, both, none, or what is not above zero."""
    return _one_of(value, ms, option, ("ms", "20ms"), lambda given: _duration(given, option, zero=zero), zero)


def rate(value: Any, option: str = "--rate", per_s: float | None = None) -> float:
    """Requests per ms from "500/s", or from the number of requests a second given as `per_s`. Raises WrongUsage."""
    found = _one_of(value, per_s, option, ("per_s", "500/s"), lambda given: _rate(given, option), zero=False)
    return found / MS_PER_S if value is None else found


def rates(values: Any, option: str = "--rate", per_s: float | Iterable[float] | None = None) -> list[float]:
    """Requests per ms, each as in `rate`: one of them, or several. Raises WrongUsage."""
    if values is None:
        return [rate(None, option, each) for each in several(per_s)]
    if per_s is not None:
        raise _both(option, "per_s")
    return [rate(each, option) for each in several(values)]


def transfer(value: str, option: str = "--transfer") -> tuple[float, float]:
    """(ms a request, ms a token) from "2ms", "2ms+1us" or "0+1us". Raises WrongUsage."""
    fixed, plus, each = value.partition("+")
    return duration(fixed, option, zero=True), duration(each, option, zero=True) if plus else 0.0


def percent(value: Any, option: str = "--percentile") -> float:
    """Percent from 95 or "95%". Raises WrongUsage."""
    if isinstance(value, str):
        text = value.strip().removesuffix("%").strip().removeprefix("p")
        try:
            return float(text)
        except ValueError:
            raise WrongUsage(f"{value!r} is not a percentage", where=option, remedy='Write 95 or "95%".') from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WrongUsage(f"{value!r} is not a percentage", where=option, remedy='Write 95 or "95%".')
    return float(value)


def values_of(sweep: Mapping[str, Iterable[Any]] | str | Sequence[str] | None) -> dict[str, list[Any]]:
    """Names with their values from `replicas=1..4; rate=10/s,20/s`, from several of these, or from a mapping.

    Raises WrongUsage.
    """
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
    """`1..4` as 1, 2, 3, 4; anything else as it is. Raises WrongUsage."""
    low, high = map(whole_number, text.split("..", 1)) if ".." in text else (None, None)
    if low is None or high is None:
        return [text]
    if not 0 <= high - low < MOST_IN_RANGE:
        raise WrongUsage(f"{text!r} is no range", where="--sweep", remedy="Write the lower end first: 1..4.")
    return [str(value) for value in range(low, high + 1)]


MOST_IN_RANGE = 10_000


def several(values: Any) -> list[Any]:
    """Return a list of one value, or of all in a sequence; empty for None."""
    if values is None:
        return []
    return list(values) if isinstance(values, Iterable) and not isinstance(values, str) else [values]


def by_name(
    values: Mapping[str, Any] | str | Iterable[str] | None, option: str, example: str, separator: str = "="
) -> dict[str, str]:
    """Return a mapping as it is; else names and values of texts such as `gpu=800ms`. Raises WrongUsage."""
    if isinstance(values, Mapping):
        return dict(values)
    found: dict[str, str] = {}
    for text in several(values):
        name, value = map(str.strip, [*re.split(f"[{separator}]", text, maxsplit=1), ""][:2])
        if not re.fullmatch(r"[\w-]+", name) or not value or name in found:
            told = f"{name} is given twice" if name in found else f"{text!r} is not a name with its value"
            raise WrongUsage(told, where=option, remedy=f"Write {example}.")
        found[name] = value
    return found


def count(value: Any, option: str, example: str) -> int:
    """Return a whole number above zero. Raises WrongUsage."""
    found = value if isinstance(value, int) else whole_number(value)
    if not found:
        raise WrongUsage(f"{value!r} is no count", where=option, remedy=f"Write {example}.")
    return found


def _one_of(
    value: Any,
    named: float | None,
    option: str,
    unit: tuple[str, str],
    parse: Callable[[Any], float],
    zero: bool,
) -> float:
    """unit: the end of the parameter's name that takes numbers, and an example with a unit."""
    suffix, example = unit
    if value is not None and named is not None:
        raise _both(option, suffix)
    if value is not None:
        return parse(value)
    if isinstance(named, bool) or not isinstance(named, int | float) or not math.isfinite(named):
        raise WrongUsage(f"{named!r} is not a quantity", where=option, remedy=f"Write {example}.")
    if named < 0 or (named == 0 and not zero):
        raise WrongUsage(f"{named:g} is not above zero", where=f"{option}-{suffix}", remedy="Give a number above zero.")
    return float(named)


def _duration(value: Any, option: str, *, zero: bool) -> float:
    if isinstance(value, timedelta):
        ms = value.total_seconds() * MS_PER_S
        if ms > 0 or (zero and ms == 0):
            return ms
        raise WrongUsage(f"{value} is not above zero", where=option, remedy="Give a duration above zero.")
    if not isinstance(value, str):
        raise _no_unit(value, option, "ms")
    return parse_duration_ms(value, option=option, zero=zero)


def _rate(value: Any, option: str) -> float:
    if not isinstance(value, str):
        raise _no_unit(value, option, "/s")
    return parse_rate_per_ms(value, option=option)


def _no_unit(value: Any, option: str, unit: str) -> WrongUsage:
    shown = f"{value:g}" if isinstance(value, int | float) else "20"
    named = "_ms" if unit == "ms" else "_per_s"
    parameter = option.lstrip("-").replace("-", "_") + named
    return WrongUsage(
        f"{value!r} has no unit",
        where=option,
        remedy=f'Write "{shown}{unit}", or give a number as {parameter} where there is one.',
    )


def _both(option: str, suffix: str) -> WrongUsage:
    return WrongUsage(
        "given twice, as a quantity and as a number", where=f"{option}, {option}-{suffix}", remedy="Give one of them."
    )
