"""Records that are their own JSON: Python object, file format and `--json` answer.

Field types and `__post_init__` say what is valid; a violation is a BadInput that names the place.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar

import msgspec

from latfit.errors import BadInput, LatfitError
from latfit.files import write_json
from latfit.inputs import read_json

T = TypeVar("T")

if TYPE_CHECKING:
    Number = float
else:

    class Number(float):
        """A float that JSON holds as null where it is not finite."""

        __slots__ = ()


MAX_COUNT = 2**31 - 1  # the largest integer that serving engines accept

Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Seconds = NotNegative


class Record(msgspec.Struct, frozen=True, dict=True):
    """Base of all records; a subclass repeats `frozen=True`, for type checkers.

    `tag_field="schema", tag="latfit.fit/1"` writes and checks the schema, `omit_defaults=True` leaves out defaults.
    """

    what: ClassVar[str] = "record"  # what errors call the document
    made_by: ClassVar[str] = ""  # the command that makes it
    not_in_json: ClassVar[Sequence[str]] = ()  # fields that the JSON leaves out

    def to_json(self) -> dict[str, Any]:
        left_out = dict.fromkeys(self.not_in_json)
        found: dict[str, Any] = to_builtins(msgspec.structs.replace(self, **left_out) if left_out else self)
        return {name: value for name, value in found.items() if name not in left_out}

    @classmethod
    def upgrade(cls, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a document of an older version in today's form."""
        return document

    def checked_values(self) -> Self:
        """Return the record. Raises ValueError for values that a file must not have."""
        return self

    @classmethod
    def from_json(cls, document: Any, where: str = "the document") -> Self:
        """Return the record in a decoded document; keys without a field are ignored. Raises BadInput for a field."""
        config = cls.__struct_config__
        schema = None if config.tag is None else (config.tag_field, config.tag)
        return decode(
            document,
            lambda found: convert(cls.upgrade(found), cls).checked_values(),
            schema,
            where,
            cls.what,
            cls.made_by,
        )

    @classmethod
    def read(cls, source: Path) -> Self:
        """Return the record in a JSON file. Raises BadInput."""
        return cls.from_json(read_json(source, what=cls.what, made_by=cls.made_by), str(source))

    def write(self, target: Path) -> None:
        """Write the record as JSON. Raises TargetNotWritable."""
        write_json(target, self.to_json())


class OpenRecord(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A record that holds further keys of its document in `more`."""

    more: Mapping[str, Any] = msgspec.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        found = super().to_json()
        more: dict[str, Any] = found.pop("more", {})
        return {**found, **more}

    @classmethod
    def upgrade(cls, document: Mapping[str, Any]) -> Mapping[str, Any]:
        own = set(cls.__struct_fields__)
        return {**document, "more": {name: value for name, value in document.items() if name not in own}}


def to_builtins(value: Any) -> Any:
    """Return a record, dataclass or container as dicts, lists, numbers and text."""
    return _with_lists(msgspec.to_builtins(value, enc_hook=_encode, str_keys=True))


def _with_lists(value: Any) -> Any:
    """Turn tuples into lists."""
    if isinstance(value, dict):
        return {name: _with_lists(each) for name, each in value.items()}
    return [_with_lists(each) for each in value] if isinstance(value, list | tuple) else value


def convert(document: Any, kind: type[T]) -> T:
    """Return a record or dataclass from builtins. Raises ValueError that names the field."""
    return msgspec.convert(document, kind, dec_hook=_decode, str_keys=True)


def decode(
    document: Any, make: Callable[[Mapping[str, Any]], T], schema: Any, where: str, what: str, made_by: str = ""
) -> T:
    """Check the schema, call `make`, and turn errors into BadInput."""
    remedy = f"Make one with `{made_by}`." if made_by else "Check how it was made."
    try:
        if not isinstance(document, Mapping):
            raise ValueError(f"it is no object but {type(document).__name__}")
        name, wanted = schema if isinstance(schema, tuple) else ("schema", schema)
        stated = document.get(name)
        if stated != wanted:
            if str(stated).partition("/")[0] == str(wanted).partition("/")[0]:
                remedy = f"It comes from another version of latfit: update latfit. {remedy}"
            raise ValueError(f"{name} is {stated!r}" + (f", not {wanted!r}" if wanted else ""))
        return make(document)
    except LatfitError as error:  # of a part
        raise BadInput(error.found, where=f"{where}, {error.where}", remedy=error.remedy) from None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        text = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        found, _, place = text.partition(" - at `$.")
        reason = f"{place.rstrip('`')}: {found}" if place else found
        raise BadInput(f"not a latfit {what} ({reason})", where=where, remedy=remedy) from None


def _encode(value: Any) -> Any:
    if isinstance(value, float):
        return float(value)
    if hasattr(value, "to_json"):
        return value.to_json()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise NotImplementedError(f"{type(value).__name__} has no form in JSON")


def _decode(kind: Any, value: Any) -> Any:
    """Make a field of a type that JSON does not have."""
    if kind is Number:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"Expected a number or null, got {str(value)[:40]!r}")
        return Number(math.nan if value is None else value)
    if hasattr(kind, "from_json"):
        return kind.from_json(value)
    import numpy as np

    return np.array(value, dtype=np.float64)  # None becomes NaN
