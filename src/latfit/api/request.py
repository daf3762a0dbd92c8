"""How a verb declares what it takes: one frozen dataclass, its request. Imports nothing heavy.

A field is a keyword argument of the library. An `option` is also an option of the command and a row of docs/cli.md; a
`setting` is for programs and `--set`.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, ParamSpec, Protocol, TypeVar, Union, get_args, get_origin

from latfit.errors import LatfitError, WrongUsage, refuse, tell

P = ParamSpec("P")
K = TypeVar("K")
Q = TypeVar("Q", contravariant=True)
R = TypeVar("R", covariant=True)


@dataclass(frozen=True)
class Option:
    """How a field is given on the command line."""

    help: str
    names: str = ""  # separated by blanks; the help shows the first
    kind: Any = None  # type that the command line reads
    panel: str = ""  # heading in the help
    argument: str = ""  # name of a positional argument
    min: float | None = None
    max: float | None = None
    metavar: str | None = None
    expert: bool = False  # shown by --help-all alone

    def all_names(self, field: str) -> list[str]:
        return self.names.split() or [f"--{field.replace('_', '-')}"]


def option(help: str, default: Any = None, **details: Any) -> Any:
    """Declare a field that is an option; details as of `Option`."""
    return field(default=default, metadata={"": Option(help, **details)})


def setting(text: str, default: Any = None) -> Any:
    """Declare a field for programs and `--set`."""
    return field(default=default, metadata={"": text})


@dataclass(frozen=True)
class Request:
    """Base of what verbs take."""

    PANEL: ClassVar[str] = ""  # heading of its options
    SHOWN: ClassVar[str] = ""  # fields that the help shows, the others are for experts; empty: all
    LACKS: ClassVar[str] = ""  # fields without an option here, although a base has one
    EXCLUDES: ClassVar[str] = ""  # fields that contradict each other: `rate arrivals; fit hardware`
    NEEDS: ClassVar[str] = ""  # fields without effect unless others are given: `think: users`

    @classmethod
    def exclusive(cls) -> list[list[str]]:
        return [group.split() for group in cls._rows("EXCLUDES")]

    @classmethod
    def needed(cls) -> dict[str, list[str]]:
        """Return the fields that each needs one of."""
        rows = [row.split(":") for row in cls._rows("NEEDS")]
        return {name: others.split() for names, others in rows for name in names.split()}

    @classmethod
    def _rows(cls, name: str) -> list[str]:
        texts = [vars(group).get(name, "") for group in reversed(cls.__mro__)]
        return list(dict.fromkeys(row.strip() for text in texts for row in text.split(";") if row.strip()))


@dataclass(frozen=True)
class Declared:
    """A field of a request. option: None where the command line lacks it."""

    field: "Field[Any]"
    type: Any
    text: str
    option: Option | None
    panel: str

    @property
    def name(self) -> str:
        return self.field.name

    @property
    def kinds(self) -> list[Any]:
        several = get_args(self.type) if get_origin(self.type) in (Union, UnionType) else (self.type,)
        return [kind for kind in several if kind is not type(None)]

    @property
    def is_settable(self) -> bool:
        """Whether `--set` takes the field."""
        origins = {get_origin(kind) or kind for kind in self.kinds}
        return self.option is None and bool(origins & {bool, int, float, str, Path, Any, Literal, Sequence})

    def parse(self, text: str, where: str) -> Any:
        """Return the value of a text. Raises WrongUsage."""
        try:
            return self._value_of(text)
        except (ValueError, KeyError):
            raise WrongUsage(f"{text!r} is no value of {self.name}", where=where, remedy=self.text) from None

    def _value_of(self, text: str) -> Any:
        choices = [choice for kind in self.kinds if get_origin(kind) is Literal for choice in get_args(kind)]
        if choices:
            return choices[choices.index(text)]
        if bool in self.kinds:
            return {"yes": True, "true": True, "no": False, "false": False}[text.lower()]
        if {str, Path, Any} & set(self.kinds):
            return text
        if any(get_origin(kind) is Sequence for kind in self.kinds):
            return [text]
        return int(text) if int in self.kinds else float(text)


def declared(request: Any) -> Iterator[Declared]:
    """Yield the fields of a request, its own first."""
    known = {each.name: each for each in fields(request)}
    for group in request.__mro__:
        for name, hint in inspect.get_annotations(group).items():
            if (found := known.pop(name, None)) is None:
                continue
            meaning = found.metadata.get("", "")
            if hasattr(hint, "__metadata__"):
                hint, meaning = hint.__origin__, hint.__metadata__[0]
            text = meaning.help if isinstance(meaning, Option) else str(meaning)
            shown = meaning if isinstance(meaning, Option) and name not in request.LACKS.split() else None
            panel = shown.panel if shown and shown.panel else getattr(group, "PANEL", "")
            yield Declared(found, hint, text, shown, panel)


class Verb(Protocol[P, Q, R]):
    """A function of a request's fields; `of` takes the request itself."""

    def __call__(self, *given: P.args, **named: P.kwargs) -> R: ...

    def of(self, request: Q) -> R: ...


def verb(request: Callable[P, Q]) -> Callable[[Callable[[Q], R]], Verb[P, Q, R]]:
    """Decorate a function of a request: it takes the request's fields by keyword."""

    def add(function: Callable[[Q], R]) -> Verb[P, Q, R]:
        def of(whole: Q) -> R:
            check(whole)
            return function(with_units(whole))

        @functools.wraps(function)
        def call(*given: P.args, **named: P.kwargs) -> R:
            try:
                return of(request(*given, **named))
            except LatfitError as error:
                names = {option_of(request, name): name for name in found}
                error.where = error.where and ", ".join(names.get(each, each) for each in error.where.split(", "))
                raise

        found = {each.name: each for each in declared(request)}
        signature = inspect.signature(request)
        parameters = "\n".join(f"{name}\n    {found[name].text}" for name in signature.parameters if found[name].text)
        made: Any = call
        made.of = of
        made.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nParameters\n----------\n{parameters}\n"
        made.__signature__ = signature.replace(
            parameters=[each.replace(annotation=found[each.name].type) for each in signature.parameters.values()],
            return_annotation=inspect.get_annotations(function).get("return", signature.empty),
        )
        return made  # type: ignore[no-any-return]

    return add


def given_in(request: Any) -> set[str]:
    """Return the fields that differ from their defaults."""
    return {each.name for each in fields(request) if _differs(getattr(request, each.name), each.default)}


def check(request: Any) -> None:
    """Refuse contradictions; note fields without an effect. Raises WrongUsage."""
    given = given_in(request)
    for group in request.exclusive():
        if len(both := [name for name in group if name in given]) > 1:
            where = ", ".join(option_of(type(request), name) for name in both)
            raise WrongUsage("these contradict each other", where=where, remedy="Give one of them.")
    for name, needed in request.needed().items():
        if name in given and not given & set(needed):
            any_of = " or ".join(option_of(type(request), each) for each in needed)
            ignored(option_of(type(request), name), f"there is no {any_of}")
    for each in declared(type(request)):
        value = getattr(request, each.name)
        if each.option is None or not isinstance(value, int | float):
            continue
        least, most, where = each.option.min, each.option.max, each.option.all_names(each.name)[0]
        if least is not None and value < least:
            raise WrongUsage(f"{value} is too small", where=where, remedy=f"Give {least:g} or more.")
        if most is not None and value > most:
            raise WrongUsage(f"{value} is too large", where=where, remedy=f"Give {most:g} or less.")


TWINS = {"sla_ms": ("sla", "ms"), "rate_per_s": ("rate", "/s")}
"""Numbers whose parameter says the unit: the field of the same quantity as text, and the unit."""


def with_units(request: K) -> K:
    """Return the request with `sla_ms=20` as `sla="20ms"`, and `rate_per_s=500` as `rate="500/s"`."""
    changes: dict[str, Any] = {}
    for twin, (name, unit) in TWINS.items():
        if (value := getattr(request, twin, None)) is not None:
            where = ", ".join(option_of(type(request), each) for each in (name, twin))
            refuse(getattr(request, name) is not None, "these contradict each other", where, "Give one of them.")
            one = isinstance(value, str) or not isinstance(value, Iterable)
            changes |= {name: f"{value}{unit}" if one else [f"{each}{unit}" for each in value], twin: None}
    return replace(request, **changes) if changes else request  # type: ignore[type-var]


def ignored(option: str, why: str) -> None:
    tell(f"note: {option} has no effect: {why}.")


def option_of(request: Any, name: str) -> str:
    found = next(each for each in declared(request) if each.name == name)
    return found.option.all_names(name)[0] if found.option else f"--set {name}"


def typed(request: Any, *names: str) -> list[str]:
    """Return those of the fields that were given, as on a command line."""
    given = [(name, getattr(request, name)) for name in names if name in given_in(request)]
    plain = [(name, value) for name, value in given if isinstance(value, str | Path | int | float)]
    return [
        text
        for name, value in plain
        for text in (option_of(type(request), name), f"{value:g}" if isinstance(value, float) else str(value))
    ]


def _differs(value: Any, default: Any) -> bool:
    value, default = (str(each) if isinstance(each, Path) else each for each in (value, default))
    if isinstance(value, str | int | float | list | tuple | dict):
        return bool(value != default) and value not in ([], (), {})
    return value is not default


def shared(kind: type[K], request: Any, **changes: Any) -> K:
    """Return a request of another kind, with the fields that both have."""
    there = {each.name for each in fields(request)}
    kept = {each.name: getattr(request, each.name) for each in fields(kind) if each.name in there}  # type: ignore[arg-type]
    return kind(**(kept | changes))
