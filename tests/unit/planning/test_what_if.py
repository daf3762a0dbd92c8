"""Changed settings of an engine: what moves in enough replications, by how much, and whether it helps."""

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from latfit.planning.what_if import Fitted, Outcome, WhatIf
from latfit.simulation import EngineSettings, linear_costs
from latfit.simulation.engine.real_engine import EngineSetup

TEN = np.ones(10)
NOW: dict[str, Any] = {
    "ttft_p99_ms": 500 * TEN,
    "tpot_p99_ms": 100 * TEN,
    "tokens_per_s": 1000 * TEN,
    "meets": 0.8 * TEN,
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
        ({"meets": 0.7 * TEN, "ttft_p99_ms": 450 * TEN}, "hurts"),  # the share within the SLO decides
    ],
)
def test_effects(changed: dict[str, Any], effect: str) -> None:
    assert Outcome("max_num_seqs", 64, NOW | changed).effect(Outcome("", 0, NOW)) == effect


def test_known_limits_are_doubled_and_halved_as_an_engine_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests and three tokens a step: a token for each of four is too many, half the tokens too few."""
    settings = EngineSettings(max_num_seqs=2, max_num_batched_tokens=3, kv_blocks=1000)
    setup = EngineSetup(settings, dict.fromkeys(("max_num_seqs", "max_num_batched_tokens"), "server.log"))

    def outcome(_: WhatIf, name: str, value: int, changed: EngineSettings) -> Outcome:
        assert asdict(changed) == asdict(settings) | {name: value}
        return Outcome(name, value, {})

    monkeypatch.setattr(WhatIf, "_outcome", outcome)
    found = WhatIf(Fitted(linear_costs(1.0, 0.0, 0.0), setup, (), ()), ()).changes
    assert {each.setting: each.value for each in found} == {
        "max_num_seqs": 1, "max_num_batched_tokens": 6, "kv_blocks": 1250,
    }  # fmt: skip


def test_ranges_span_nine_of_ten_replications() -> None:
    runs = {"ttft_ms": np.arange(101.0), "tpot_ms": np.arange(101.0)[::-1], "carried": np.arange(101) < 60}
    assert Outcome("", 0, runs).range("tpot_ms") == (5.0, 95.0)
    assert Outcome("", 0, runs).range("ttft_ms") == (5.0, math.inf)  # four in ten grow without end
    none = Outcome("", 0, {"tpot_ms": np.full(5, math.nan), "carried": np.ones(5, dtype=bool)})
    assert np.isnan(none.range("tpot_ms")).all()
