"""Quantities as users write them: strings with units, as on the command line, or numbers whose parameter says the unit.

    sla="20ms"   sla_ms=20   rate="2000/s"   rate_per_s=2000   percentile=99   percentile="95%"   timedelta(seconds=2)

A plain number where its unit would be a guess is refused. Errors name options as the command line does (`--sla`); in a
program they name the parameter (`sla`), which `library_verb` sees to.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

from latfit.errors import LatfitError, WrongUsage, on_command_line
from latfit.units import parse_duration_ms, parse_rate_per_ms

Duration = str | timedelta
P = ParamSpec("P")
R = TypeVar("R")

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
        return [rate(None, option, each) for each in _several(per_s)]
    if per_s is not None:
        raise _both(option, "per_s")
    return [rate(each, option) for each in _several(values)]


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


def library_verb(function: Callable[P, R]) -> Callable[P, R]:
    """A verb whose errors name parameters (`tokens_per_request`) rather than options, where a program calls it."""

    @functools.wraps(function)
    def verb(*given: P.args, **named: P.kwargs) -> R:
        try:
            return function(*given, **named)
        except LatfitError as error:
            if not on_command_line.get():
                error.found, error.remedy = _as_parameters(error.found), _as_parameters(error.remedy)
                error.where = None if error.where is None else _as_parameters(error.where)
            raise

    return verb


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
    return 0.0 if zero and value.strip() in ("0", "0ms") else parse_duration_ms(value, option=option)


def _rate(value: Any, option: str) -> float:
    if not isinstance(value, str):
        raise _no_unit(value, option, "/s")
    return parse_rate_per_ms(value, option=option)


def _no_unit(value: Any, option: str, unit: str) -> WrongUsage:
    shown = f"{value:g}" if isinstance(value, int | float) else "20"
    named = "_ms" if unit == "ms" else "_per_s"
    return WrongUsage(
        f"{value!r} has no unit",
        where=option,
        remedy=f'Write "{shown}{unit}", or give a number as {_as_parameters(option)}{named} where there is one.',
    )


def _both(option: str, suffix: str) -> WrongUsage:
    return WrongUsage(
        "given twice, as a quantity and as a number", where=f"{option}, {option}-{suffix}", remedy="Give one of them."
    )


def _several(values: Any) -> list[Any]:
    if values is None:
        return []
    return list(values) if isinstance(values, Iterable) and not isinstance(values, str) else [values]


def _as_parameters(text: str) -> str:
    """`--tokens-per-request` as `tokens_per_request`; commands in backquotes stay."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"--([a-z][a-z0-9-]*)", lambda m: m[1].replace("-", "_"), part)
        for part in parts
    )
