"""Fits of the period, and what else goes by it: on an engine whose host takes a known time between steps."""

from pathlib import Path

import numpy as np
import pytest

import latfit
from latfit.api.requests import Time
from latfit.errors import BadInput
from latfit.hardware import ExecutionPath
from latfit.planning.support import inherited
from latfit.trace import Trace, read_again, write_trace

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

    def test_its_own_time_where_that_is_asked_for(self, trace: Path) -> None:
        found = latfit.fit(trace, model="linear", time="compute")
        assert found.time == "compute"
        assert found.predict(8, 8)["T_ms"][0] == pytest.approx(8.0, rel=0.02)
        assert found.result.data.rows_used == 800

    def test_it_says_how_much_longer_the_period_is(self, trace: Path) -> None:
        found = latfit.fit(trace, model="linear")
        # Decode: 2 ms on 8.25; prefill: 2 on 19.
        assert "24 % (decode)" in found.time_line
        assert "(prefill)" in found.time_line
        assert "scheduling and output handling" in found.time_line
        assert found.time_line in found.summary()

    def test_it_says_nothing_of_a_host_that_takes_next_to_no_time(self, tmp_path: Path) -> None:
        write_trace(tmp_path / "t.parquet", recorded(host_ms=0.05))
        assert latfit.fit(tmp_path / "t.parquet", model="linear").time_line == ""

    def test_other_tables_have_none(self, tmp_path: Path) -> None:
        write_trace(tmp_path / "t.parquet", recorded(recorder=False))
        found = latfit.fit(tmp_path / "t.parquet", model="linear")
        assert found.time == "compute"
        assert "time" not in found.result.data.more
        with pytest.raises(BadInput, match="when the next one began"):
            latfit.fit(tmp_path / "t.parquet", time="period")

    def test_a_column_that_a_table_brings_along_is_taken(self) -> None:
        found = latfit.fit(recorded(recorder=False).with_columns(period_ms=np.full(800, 7.0)), model="constant")
        assert found.predict(3, 3)["T_ms"][0] == pytest.approx(7.0)


class TestTheSameTime:
    def test_the_rows_are_found_again(self, trace: Path) -> None:
        found = latfit.fit(trace, model="linear")
        assert found.trace is not None
        again = read_again(found.result.data.to_json())
        assert np.array_equal(again["T_ms"], found.trace["T_ms"])

    @pytest.mark.parametrize("time", ["compute", "period"])
    def test_evaluate_scores_what_was_fitted(self, trace: Path, time: Time) -> None:
        found = latfit.fit(trace, model="linear", time=time)
        assert found.evaluate(trace).scores["metrics"]["median_ape_pct"] < 5

    def test_compare_takes_the_time_of_the_fit_that_is_there(self, trace: Path) -> None:
        first = latfit.fit(trace, model="linear", time="compute")
        assert [fit.time for fit in latfit.compare(first, trace).fits] == ["compute", "compute"]

    @pytest.mark.nightly
    def test_compare_takes_what_both_know(self, trace: Path, tmp_path: Path) -> None:
        write_trace(tmp_path / "plain.parquet", recorded(recorder=False))
        assert {fit.time for fit in latfit.compare(trace, tmp_path / "plain.parquet").fits} == {"compute"}

    def test_two_fits_of_different_times_are_not_compared(self, trace: Path) -> None:
        fits = [latfit.fit(trace, model="linear", time=time) for time in ("compute", "period")]
        with pytest.raises(BadInput, match="the period"):
            latfit.compare(*fits)

    def test_a_prediction_says_what_its_latency_is(self, trace: Path) -> None:
        assert "Latency is the period" in " ".join(latfit.fit(trace, model="linear").predict(8, 8).attrs["notes"])


def test_a_plan_from_sums_of_kernels_names_the_host_as_a_doubt(tmp_path: Path) -> None:
    plain = recorded(recorder=False)
    kernels = Trace({name: plain[name] for name in ("B", "S", "T_ms")}, {"format": "vidur", "host_time": "none"})
    write_trace(tmp_path / "k.parquet", kernels)
    found = latfit.fit(tmp_path / "k.parquet", model="linear")
    assert found.result.data.more["host_time"] == "none"
    told = [each for each in inherited([ExecutionPath("gpu", found.result)]) if each.code == "no_host_time"]
    assert [each.message.partition(":")[0] for each in told] == ["gpu"]
