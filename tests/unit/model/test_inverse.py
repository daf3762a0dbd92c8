"""The inverse against enumeration of all integers and published oracle values."""

import numpy as np
import pytest

from latfit.model.saturation import Saturation
from latfit.planning.steps.limits import Range, feasible_ranges
from latfit.stats import FloatArray
from tests.conftest import REFERENCE

MODEL = Saturation()


def tokens(B: int, limit: float, theta: FloatArray = REFERENCE, most: int | None = None) -> list[Range]:
    return feasible_ranges(lambda S: MODEL.latency_ms(theta, {"B": np.full(len(S), float(B)), "S": S}), limit, B, most)


def requests(S: int, limit: float, theta: FloatArray = REFERENCE) -> list[Range]:
    return feasible_ranges(lambda B: MODEL.latency_ms(theta, {"B": B, "S": np.full(len(B), float(S))}), limit, 1, S)


@pytest.mark.parametrize(
    ("B", "limit", "expected"),
    [(8, 30, [Range(8, 971)]), (64, 10, [Range(64, 192)]), (8, 8.5, [])],
)
def test_published_token_ranges(B: int, limit: float, expected: list[Range]) -> None:
    assert tokens(B, limit) == expected


@pytest.mark.parametrize(("S", "limit", "expected"), [(512, 16, [Range(13, 94)]), (512, 20, [Range(7, 294)])])
def test_published_batch_ranges(S: int, limit: float, expected: list[Range]) -> None:
    assert requests(S, limit) == expected


def test_a_latency_that_never_grows_is_unbounded() -> None:
    assert feasible_ranges(lambda S: 5.0 + 1.0 / S, 5.5, 1, None) == [Range(2, None)]


def test_a_plateau_is_searched_to_its_end() -> None:
    assert feasible_ranges(lambda S: 3.0 + np.maximum(S - 100, 0), 3.0, 1, None) == [Range(1, 100)]
