"""The inverse against enumeration of all integers and published oracle values."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from latfit.model.saturation import Saturation
from latfit.planning.steps.limits import Range, feasible_ranges
from latfit.stats import FloatArray
from tests.conftest import REFERENCE
from tests.unit.model.test_saturation import parameters

MODEL = Saturation()


def tokens(B: int, limit: float, theta: FloatArray = REFERENCE, most: int | None = None) -> list[Range]:
    return feasible_ranges(lambda S: MODEL.latency_ms(theta, {"B": np.full(len(S), float(B)), "S": S}), limit, B, most)


def requests(S: int, limit: float, theta: FloatArray = REFERENCE) -> list[Range]:
    return feasible_ranges(lambda B: MODEL.latency_ms(theta, {"B": B, "S": np.full(len(B), float(S))}), limit, 1, S)


def enumerated(feasible: NDArray[np.int64]) -> list[Range]:
    """The one range of a convex latency."""
    return [Range(int(feasible[0]), int(feasible[-1]))] if len(feasible) else []


@pytest.mark.parametrize(
    ("B", "limit", "expected"),
    [(8, 30, [Range(8, 971)]), (64, 10, [Range(64, 192)]), (8, 8.5, [])],
)
def test_published_token_ranges(B: int, limit: float, expected: list[Range]) -> None:
    assert tokens(B, limit) == expected


@pytest.mark.parametrize(("S", "limit", "expected"), [(512, 16, [Range(13, 94)]), (512, 20, [Range(7, 294)])])
def test_published_batch_ranges(S: int, limit: float, expected: list[Range]) -> None:
    assert requests(S, limit) == expected


@given(parameters, st.integers(1, 40), st.floats(0.5, 200))
def test_tokens_by_enumeration(theta: FloatArray, B: int, limit: float) -> None:
    """Up to 300 tokens, of which the scan's grid holds every one."""
    S = np.arange(B, 301)
    feasible = S[MODEL.latency_ms(theta, {"B": np.full(len(S), float(B)), "S": S.astype(float)}) <= limit]
    assert tokens(B, limit, theta, 300) == enumerated(feasible)


@given(parameters, st.integers(1, 300), st.floats(0.5, 200))
def test_requests_by_enumeration(theta: FloatArray, S: int, limit: float) -> None:
    B = np.arange(1, S + 1)
    feasible = B[MODEL.latency_ms(theta, {"B": B.astype(float), "S": np.full(len(B), float(S))}) <= limit]
    assert requests(S, limit, theta) == enumerated(feasible)


def test_a_latency_that_never_grows_is_unbounded() -> None:
    assert feasible_ranges(lambda S: 5.0 + 1.0 / S, 5.5, 1, None) == [Range(2, None)]


def test_a_plateau_is_searched_to_its_end() -> None:
    assert feasible_ranges(lambda S: 3.0 + np.maximum(S - 100, 0), 3.0, 1, None) == [Range(1, 100)]
