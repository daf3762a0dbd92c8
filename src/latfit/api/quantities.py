"""Quantities as users write them: strings with units, as on the command line, or numbers whose parameter says the unit.

    sla="20ms"   sla_ms=20   rate="2000/s"   rate_per_s=2000   percentile=99   percentile="95%"   timedelta(seconds=2)

A plain number where its unit would be a guess is refused. Errors name options as the command line does (`--sla`); in a
program they name the parameter (`sla`), which `library_verb` sees to.

A parameter that would do nothing is refused. What each of a verb's needs is a table beside the verb (`only_with`); the
command line looks into the same tables.
"""

import functools
import inspect
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

from latfit.errors import LatfitError, WrongUsage, on_command_line
from latfit.units import MOST_SEED, parse_duration_ms, parse_rate_per_ms, whole_number

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


@dataclass(frozen=True)
class Needs:
    """What a parameter needs in order to do anything: `holds` of all values, a namespace by parameter. why: what is so
    where it does not hold.  remedy: what to add; it may always be left out instead."""

    name: str
    holds: Callable[[Any], object]
    why: str
    remedy: str = ""


class _Values(SimpleNamespace):
    """Values by parameter; None for what a caller does not have, as the command line has no `rate_per_s`."""

    def __getattr__(self, name: str) -> None:
        return None


def _said(value: Any) -> Any:
    """The value, True for arrays and tables, which are neither true nor false: they were given."""
    plain = value is None or isinstance(value, str | bytes | int | float | Sequence | Mapping | Path)
    return True if not plain and hasattr(value, "__len__") else value


def refuse_idle(needs: Sequence[Needs], given: Collection[str], values: Mapping[str, Any]) -> None:
    """Raises WrongUsage for the first of the `given` parameters that would do nothing beside the others."""
    found = _Values(**{name: _said(value) for name, value in values.items()})
    for each in needs:
        if each.name in given and not each.holds(found):
            option = f"--{each.name.replace('_', '-')}" if len(each.name) > 1 else f"-{each.name}"
            remedy = f"{each.remedy}, or leave {option} out." if each.remedy else f"Leave {option} out."
            raise WrongUsage(f"has no effect: {each.why}", where=option, remedy=remedy)


def values_of(sweep: str | Sequence[str] | None) -> dict[str, list[str]]:
    """Names with their values from `replicas=1..4; rate=10/s,20/s`, or from several of these. Raises WrongUsage."""
    found: dict[str, list[str]] = {}
    pieces = (sweep if isinstance(sweep, str) else ";".join(sweep or ())).split(";")
    for piece in (each for each in pieces if each.strip()):
        name, _, texts = (part.strip() for part in piece.partition("="))
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
SETTINGS = ("settings", "engine")
"""Parameters that are mappings of further ones."""


def only_with(*needs: Needs) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a verb that refuses parameters without what they need. One that has its default is not given; settings
    count as the verb's own. Where options were typed the command line has looked."""

    def add(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*given: P.args, **named: P.kwargs) -> R:
            if not on_command_line.get():
                refuse_idle(needs, *_given(signature, given, named))
            return function(*given, **named)

        checked.needs = needs  # type: ignore[attr-defined]
        return checked

    return add


def _given(
    signature: inspect.Signature, given: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[set[str], dict[str, Any]]:
    """Names of parameters that differ from their defaults, and the values of all. Raises TypeError as a call does."""
    bound = signature.bind(*given, **named).arguments
    values: dict[str, Any] = {name: each.default for name, each in signature.parameters.items()} | bound
    asked = {name for name, value in bound.items() if _differs(value, signature.parameters[name].default)}
    for inner in [
        value for name, value in bound.items() if isinstance(value, Mapping) and _holds_more(signature, name)
    ]:
        more = {name.replace("-", "_"): value for name, value in inner.items() if value not in (None, False, (), [])}
        asked, values = asked | set(more), more | values
    return asked, values


def _holds_more(signature: inspect.Signature, name: str) -> bool:
    return name in SETTINGS or signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD


def _differs(value: Any, default: Any) -> bool:
    if isinstance(value, str | int | float | list | tuple | dict):
        return bool(value != default) and value not in ([], (), {})
    return value is not default


def library_verb(function: Callable[P, R]) -> Callable[P, R]:
    """A verb whose errors name parameters (`tokens_per_request`) rather than options, where a program calls it."""

    @functools.wraps(function)
    def verb(*given: P.args, **named: P.kwargs) -> R:
        try:
            _check_seed(named.get("seed"))
            return function(*given, **named)
        except LatfitError as error:
            if not on_command_line.get():
                error.found, error.remedy = _as_parameters(error.found), _as_parameters(error.remedy)
                error.where = None if error.where is None else _as_parameters(error.where)
            raise

    return verb


def _check_seed(seed: object) -> None:
    try:
        fits = seed is None or 0 <= operator.index(seed) <= MOST_SEED  # type: ignore[arg-type]
    except TypeError:
        fits = False
    if not fits:
        raise WrongUsage(f"{seed!r} is no seed", where="--seed", remedy=f"Give a whole number from 0 to {MOST_SEED}.")


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
