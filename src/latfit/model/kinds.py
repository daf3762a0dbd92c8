"""Whether the values of a record are of the kinds that its fields say, for records that come from files.

A number may be missing (None) wherever there can be one: JSON has no other word for one that is not finite.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


@cache
def _hints(kind: Hashable) -> dict[str, Any]:
    return get_type_hints(kind)


def check_kinds(record: Any) -> None:
    """Raise TypeError that names the first field of another kind, looking into records within the record."""
    hints = _hints(type(record))  # type: ignore[arg-type]
    for each in fields(record):
        _check(getattr(record, each.name), hints[each.name], each.name)


def _check(value: Any, kind: Any, name: str) -> None:
    if not _is_of(value, kind, name):
        raise TypeError(f"{name} is {str(value)[:40]!r}")


def _is_of(value: Any, kind: Any, name: str) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, UnionType):
        return any(_is_of(value, one, name) for one in sorted(inner, key=lambda one: one is not NoneType))
    if origin is None:
        if kind in (int, float):
            return value is None or isinstance(value, int | float)
        if is_dataclass(value):
            check_kinds(value)
        return isinstance(value, kind)
    if issubclass(origin, Mapping):
        if isinstance(value, Mapping):
            for key, item in value.items():
                _check(item, inner[1], f"{name}.{key}")
        return isinstance(value, Mapping)
    if isinstance(value, str) or not isinstance(value, Sequence):
        return False
    for item in value:
        _check(item, inner[0], name)
    return True
