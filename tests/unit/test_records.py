"""A record is its own JSON: what is written is read back, and what is not valid is one error that says where."""

import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from latfit.errors import BadInput
from latfit.records import Number, Record
from latfit.stats import FloatArray


class Span(Record, frozen=True, omit_defaults=True):
    low: Number
    high: float | None = None

    def __post_init__(self) -> None:
        if self.high is not None and self.high < self.low:
            raise ValueError("the end lies before the start")


class Curve(Record, frozen=True, tag_field="schema", tag="curve/1"):
    what: ClassVar[str] = "curve"
    made_by: ClassVar[str] = "draw"
    span: Span
    values: FloatArray
    share: Mapping[float, Number] = {}

    @classmethod
    def upgrade(cls, document: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**document, "values": document.get("values", document.get("points"))}


CURVE = Curve(Span(0.5), np.array([1.0, 2.0]), {0.9: 3.0})


def test_a_record_is_read_back_from_its_file(tmp_path: Path) -> None:
    CURVE.write(tmp_path / "curve.json")
    again = Curve.read(tmp_path / "curve.json")
    assert again.to_json() == CURVE.to_json()
    assert CURVE.to_json() == {"schema": "curve/1", "span": {"low": 0.5}, "values": [1.0, 2.0], "share": {"0.9": 3.0}}
    assert pickle.loads(pickle.dumps(CURVE)).to_json() == CURVE.to_json()


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    Span(math.inf).write(tmp_path / "span.json")
    assert '"low": null' in (tmp_path / "span.json").read_text()
    assert math.isnan(Span.read(tmp_path / "span.json").low)


def test_a_document_of_an_older_version_is_read() -> None:
    old = {"schema": "curve/1", "span": {"low": 0.5}, "points": [1, 2], "share": {"0.9": 3}, "unknown": 1}
    assert Curve.from_json(old).to_json() == CURVE.to_json()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "curve/2"}, "schema is 'curve/2', not 'curve/1'"),
        ({"span": {}}, "span: Object missing required field `low`"),
        ({"span": {"low": "1"}}, "span.low: Expected a number or null, got '1'"),
        ({"span": {"low": 2, "high": 1}}, "span: the end lies before the start"),
        ({"share": {"0.9": True}}, "share[...]: Expected a number or null"),
        ({"values": "x"}, "values: could not convert"),
    ],
)
def test_what_is_not_valid_is_one_error_that_says_where(change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=r"a.json: not a latfit curve") as error:
        Curve.from_json({**CURVE.to_json(), **change}, "a.json")
    assert said in str(error.value)
    assert str(error.value).endswith("Make one with `draw`.")


def test_a_list_is_no_record() -> None:
    with pytest.raises(BadInput, match="it is no object but list"):
        Span.from_json([])


def test_a_copy_has_the_changed_field() -> None:
    assert msgspec.structs.replace(Span(1.0), high=2.0) == Span(1.0, 2.0)


@pytest.mark.parametrize(("schema", "updates"), [("curve/2", True), ("span/1", False)])
def test_a_file_of_another_version_says_to_update(schema: str, updates: bool) -> None:
    with pytest.raises(BadInput) as caught:
        Curve.from_json({**CURVE.to_json(), "schema": schema}, "curve.json")
    assert ("update latfit" in caught.value.remedy) is updates
    assert "draw" in caught.value.remedy
