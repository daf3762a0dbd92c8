"""Row filters: their meaning against NumPy, and errors that point at the place."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from latfit.errors import LatfitError, WrongUsage
from latfit.trace.table import Trace, matching_rows

TRACE = Trace(
    {
        "B": np.array([1.0, 2.0, 4.0, 8.0]),
        "tp": np.array([4, 8, 8, 4]),
        "hardware": np.array(["h100", "h100", "a100", "it's"], dtype=object),
    }
)


@pytest.mark.parametrize(
    ("expression", "rows"),
    [
        ("tp == 8", [1, 2]),
        ("tp = 8", [1, 2]),
        ("tp != 8 and B > 1", [3]),
        ("hardware == 'h100' or B >= 8", [0, 1, 3]),
        ('hardware == "it\'s"', [3]),
        ("not hardware == 'h100'", [2, 3]),
        ("not (tp == 8 or B == 1)", [3]),
        ("tp == 4 or tp == 8 and B < 4", [0, 1, 3]),
        ("hardware in ('h100', 'a100') and tp in (8)", [1, 2]),
        ("hardware not in ('h100')", [2, 3]),
        ("NOT tp == 8 AND B < 2", [0]),
        ("B < 2.5e0", [0, 1]),
    ],
)
def test_meaning(expression: str, rows: list[int]) -> None:
    assert np.flatnonzero(matching_rows(TRACE, expression)).tolist() == rows


@pytest.mark.parametrize(
    ("expression", "hint"),
    [
        ("", "not a filter"),
        ("tp", "comparison is missing"),
        ("tp ==", "not a filter"),
        ("tp == 'x'", "does not compare"),
        ("hardware == 3", "does not compare"),
        ("nothing == 3", "no column 'nothing'"),
        ("(tp == 8", "never closed"),
        ("tp == 8 hardware", "not a filter"),
        ("tp == 8; import os", "not a filter"),
        ("__import__('os') == 1", "no column"),
        ("tp == (8, 4)", "a number or a quoted text"),
        ("tp == hardware", "number or a quoted text"),
        ("[B for B in (1,)] == 1", "no column"),
        ("(lambda: B)() == 1", "no column"),
    ],
)
def test_mistakes_are_pointed_at(expression: str, hint: str) -> None:
    with pytest.raises(WrongUsage, match="character") as caught:
        matching_rows(TRACE, expression)
    assert hint in caught.value.found


@given(st.text(max_size=40))
def test_any_text_is_a_filter_or_an_error_of_ours(expression: str) -> None:
    try:
        assert matching_rows(TRACE, expression).shape == (4,)
    except LatfitError as error:
        assert error.exit_code == 2
