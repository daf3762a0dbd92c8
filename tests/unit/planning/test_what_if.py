"""Changed settings of an engine: what moves in enough replications, by how much, and whether it helps."""

import math
from typing import Any

import numpy as np
import pytest

from latfit.planning.what_if import Outcome

TEN = np.ones(10)
NOW: dict[str, Any] = {
    "ttft_p99_ms": 500 * TEN,
    "tpot_p99_ms": 100 * TEN,
    "tokens_per_s": 1000 * TEN,
    "meets": math.nan * TEN,
    "carried": TEN.astype(bool),
}


@pytest.mark.parametrize(
    ("changed", "effect"),
    [
        ({"ttft_p99_ms": 450 * TEN}, "helps"),
        ({"ttft_p99_ms": 495 * TEN, "tpot_p99_ms": 101 * TEN}, "nothing"),  # 1 % of each
        ({"ttft_p99_ms": 450 * TEN, "tpot_p99_ms": 110 * TEN}, "trades"),
        ({"tpot_p99_ms": 110 * TEN}, "hurts"),
        ({"tpot_p99_ms": np.where(np.arange(10) < 7, 110, 100)}, "nothing"),  # in 70 % of the replications
        ({"tokens_per_s": 2000 * TEN}, "nothing"),  # a load that is carried has its own speed
        ({"tokens_per_s": 900 * TEN, "carried": TEN < 0}, "hurts"),
    ],
)
def test_effects(changed: dict[str, Any], effect: str) -> None:
    assert Outcome("max_num_seqs", 64, NOW | changed).effect(Outcome("", 0, NOW)) == effect


@pytest.mark.parametrize(("before", "after", "effect"), [(0.80, 0.90, "helps"), (0.80, 0.70, "hurts")])
def test_a_share_within_the_slo_decides(before: float, after: float, effect: str) -> None:
    now = Outcome("", 0, NOW | {"meets": before * TEN})
    assert Outcome("kv_blocks", 9, NOW | {"meets": after * TEN, "ttft_p99_ms": 490 * TEN}).effect(now) == effect


def test_ranges_span_nine_of_ten_replications() -> None:
    runs = {"ttft_ms": np.arange(101.0), "tpot_ms": np.arange(101.0)[::-1], "carried": np.arange(101) < 60}
    assert Outcome("", 0, runs).range("tpot_ms") == (5.0, 95.0)
    assert Outcome("", 0, runs).range("ttft_ms") == (5.0, math.inf)  # four in ten grow without end
    none = Outcome("", 0, {"tpot_ms": np.full(5, math.nan), "carried": np.ones(5, dtype=bool)})
    assert np.isnan(none.range("tpot_ms")).all()
