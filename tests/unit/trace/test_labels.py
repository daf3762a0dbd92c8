"""Labels of systems as parts of file names: unique, to be read back, and of bounded length."""

from itertools import combinations
from urllib.parse import unquote

import pytest

from latfit.trace.metadata import MAX_LABEL_BYTES, system_label, system_labels

HOSTILE = [
    *("a/b", "a-b", "a.b", "a,b", "a~b", "a%b", "a%2Fb", "a b", "a\\b", "a:b", "..", ".", "-", "", "unnamed", "nan"),
    *("CON", "é", "e\u0301", "模型", "\0", "\n", "\ud800", "x" * 300, "x" * 299 + "y", "/" * 300),
    *("Llama", "LLAMA", "llama"),
]


def test_no_two_systems_share_a_name_even_where_case_is_the_same() -> None:
    labels = system_labels([{"model": value} for value in HOSTILE])
    assert len({label.lower() for label in labels}) == len(HOSTILE)
    for label in labels:
        assert set(label) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-%,~")
        assert 0 < len(label) <= MAX_LABEL_BYTES + 13


def test_values_of_several_columns_do_not_run_together() -> None:
    systems = [{"model": a, "tp": b} for a in HOSTILE for b in ("", "8", "a/b", "LLAMA")]
    labels = system_labels(systems)
    assert len({label.lower() for label in labels}) == len(systems)


@pytest.mark.parametrize(("one", "other"), list(combinations(["h100", "a/b", "a-b", "llama-3.1", "1,2", "", "~"], 2)))
def test_a_label_says_its_values(one: str, other: str) -> None:
    label = system_label({"hardware": one, "model": other})
    assert [unquote(value) for value in label.split(",")] == [one, other]


def test_plain_values_stay_as_they_are() -> None:
    assert system_label({"hardware": "H100", "model": "llama-3.1", "tp": "8"}) == "H100,llama-3.1,8"
    assert system_label({"model": "meta/llama"}) == "meta%2Fllama"
    assert system_label({}) == ""
