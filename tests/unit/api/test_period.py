"""Fits of the period, and what else goes by it: on an engine whose host takes a known time between steps."""

from pathlib import Path

import numpy as np
import pytest

import latfit
from latfit.api.requests import Clock
from latfit.trace import Trace, write_trace

HOST_MS = 2.0


def recorded(host_ms: float = HOST_MS, steps: int = 800, *, recorder: bool = True) -> Trace:
    """Steps of T = 4 + 0.5 B ms that follow one another after `host_ms`; every hundredth is followed by a pause and a
    prefill step of 5 + 0.05 S ms."""
    rng = np.random.default_rng(3)
    prefill = np.arange(steps) % 100 == 0
    B = np.where(prefill, 1, rng.integers(1, 17, steps))
    S = np.where(prefill, rng.integers(50, 500, steps), B)
    T = np.where(prefill, 5.0 + 0.05 * S, 4.0 + 0.5 * B) * rng.lognormal(0, 0.01, steps)
    gap = np.where(np.arange(steps) % 100 == 99, 700.0, host_ms * rng.uniform(0.9, 1.1, steps))
    t_s = np.concatenate([[0.0], np.cumsum(T + gap)[:-1]]) / 1e3 + 0.0005
    columns = {"B": B, "S": S, "T_ms": T, "t_s": t_s, "step": np.arange(steps), "prefill_requests": prefill.astype(int)}
    columns |= {"prefill_tokens": np.where(prefill, S, 0), "run": np.array(["r"] * steps, dtype=object)}
    return Trace(columns, {"run_started": "2026"} if recorder else {})


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    write_trace(tmp_path / "t.parquet", recorded())
    return tmp_path / "t.parquet"


class TestFit:
    def test_the_period_is_fitted_where_it_is_known(self, trace: Path) -> None:
        found = latfit.fit(trace, model="linear")
        assert found.time == "period"
        # 4 + 0.5 B and the host's 2 ms.
        assert found.predict(8, 8)["T_ms"][0] == pytest.approx(8.0 + HOST_MS, rel=0.02)
        assert found.result.data.dropped is not None
        # Behind every hundredth step a pause, behind the last nothing.
        assert found.result.data.dropped["no_period"] == 8
        assert found.result.data.rows_used == 800 - 8

    def test_it_says_how_much_longer_the_period_is(self, trace: Path) -> None:
        found = latfit.fit(trace, model="linear")
        # Decode: 2 ms on 8.25; prefill: 2 on 19.
        assert "24 % (decode)" in found.time_line
        assert "(prefill)" in found.time_line
        assert "scheduling and output handling" in found.time_line
        assert found.time_line in found.summary()


class TestTheSameTime:
    @pytest.mark.parametrize("time", ["compute", "period"])
    def test_evaluate_scores_what_was_fitted(self, trace: Path, time: Clock) -> None:
        found = latfit.fit(trace, model="linear", time=time)
        assert found.evaluate(trace).scores["metrics"]["median_ape_pct"] < 5
