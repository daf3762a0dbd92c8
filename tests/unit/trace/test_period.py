"""The period of a step, on engines whose pauses and gaps are planted."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from latfit.trace import Trace, ingest, period_ms, write_trace
from tests.conftest import ROOT

MEASURED = Path(os.environ.get("LATFIT_DATA", ROOT.parent / "shared" / "data")) / "vllm_cpu"
SERVER = "metrics_rec1.txt"
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Engine:
    """What an engine did: its steps, when each ended, the host's time behind each, and where it paused."""

    columns: dict[str, Any]
    ends_ms: Floats
    host_ms: Floats
    paused: NDArray[np.bool_]

    def noticed(self, late_ms: Floats) -> Trace:
        """As a recorder has it that hears of each step's end so late."""
        t_s = (self.ends_ms + late_ms - self.columns["T_ms"]) / 1e3
        return Trace({**self.columns, "t_s": t_s}, {"run_started": "2026"})

    def stamped(self) -> Trace:
        """As a log has it: the whole second of each step's end."""
        return Trace({**self.columns, "t_s": np.floor(self.ends_ms / 1e3)}, {"format": "vllm"})

    @property
    def truth(self) -> Floats:
        return np.asarray(np.where(self.paused, np.nan, self.columns["T_ms"] + self.host_ms), dtype=np.float64)


def engine(steps: int = 20_000, rate_per_s: float = 3.0, tokens: int = 40, host_ms: float = 2.0) -> Engine:
    """Requests come at random, are prefilled in the next step and decode `tokens` steps; after each step the host works
    for a gamma-distributed time, and where no request is left the engine waits for the next."""
    rng = np.random.default_rng(5)
    arrivals = np.cumsum(rng.exponential(1e3 / rate_per_s, steps)).tolist()
    now, coming = 0.0, 0
    left: list[int] = []
    rows: list[tuple[int, int, int, float]] = []
    ends, hosts, paused = [], [], []
    for _ in range(steps):
        pause = not left and arrivals[coming] > now
        if pause:
            now = arrivals[coming]
        if rows:
            paused.append(pause)
        new = 0
        while arrivals[coming] <= now:
            coming, new = coming + 1, new + 1
        T = (8.0 + 0.5 * len(left) + 30.0 * new) * rng.lognormal(0, 0.1)
        rows.append((len(left) + new, len(left) + 100 * new, new, T))
        left = [one - 1 for one in left if one > 1] + [tokens] * new
        ends.append(now + T)
        hosts.append(host_ms * rng.gamma(4.0, 0.25))
        now += T + hosts[-1]
    B, S, prefill, took = map(np.array, zip(*rows, strict=True))
    columns = {"B": B, "S": S, "T_ms": took, "prefill_requests": prefill, "step": np.arange(steps)}
    return Engine(columns, np.array(ends), np.array(hosts), np.array([*paused, True]))


@pytest.fixture(scope="module")
def truth() -> Engine:
    return engine()


class TestFromMoments:
    def test_moments_on_time_give_every_period_and_no_pause(self, truth: Engine) -> None:
        found = period_ms(truth.noticed(np.zeros(len(truth.ends_ms))))
        going = ~truth.paused
        assert found[going] == pytest.approx(truth.truth[going], abs=1e-6)
        # A pause shorter than most gaps looks like one of them.
        assert np.mean(np.isnan(found[truth.paused])) > 0.97

    def test_late_moments_keep_the_mean_and_no_period_is_below_its_time(self, truth: Engine) -> None:
        rng = np.random.default_rng(1)
        late = rng.exponential(3.0, len(truth.ends_ms)) + 200 * (rng.random(len(truth.ends_ms)) < 0.001)
        trace = truth.noticed(late)
        found, going = period_ms(trace), ~truth.paused
        both = going & np.isfinite(found)
        assert np.mean(both[going]) > 0.99
        assert np.all(found[both] >= trace["T_ms"][both])
        assert found[both].mean() == pytest.approx(truth.truth[both].mean(), rel=0.01)

    def test_dummies_and_runs_end_a_stretch(self) -> None:
        n = 6
        columns = {"B": np.ones(n), "S": np.ones(n), "T_ms": np.full(n, 5.0), "t_s": 0.0061 * np.arange(n) + 0.001}
        dummy = np.array([0, 0, 1, 0, 0, 0], dtype=bool)
        run = np.array(["a"] * 4 + ["b"] * 2, dtype=object)
        found = period_ms(Trace({**columns, "dummy": dummy, "run": run}))
        assert np.isfinite(found).tolist() == [True, False, False, False, True, False]


class TestFromWholeSeconds:
    def test_the_mean_gap_of_busy_seconds(self, truth: Engine) -> None:
        trace = truth.stamped()
        found = period_ms(trace) - trace["T_ms"]
        assert found == pytest.approx(np.full(len(trace), found[0]))
        # Stretches as many as pauses: the standard error is sqrt(pauses / 6) s over all steps.
        error = 1e3 * np.sqrt(truth.paused.sum() / 6) / len(trace)
        assert abs(found[0] - truth.host_ms.mean()) < 4 * error


class TestWhere:
    def test_it_is_found_when_files_are_read(self, truth: Engine, tmp_path: Path) -> None:
        trace = truth.noticed(np.zeros(len(truth.ends_ms)))
        write_trace(tmp_path / "t.parquet", trace)
        assert np.array_equal(ingest(tmp_path / "t.parquet").everything["period_ms"], period_ms(trace), equal_nan=True)


@pytest.mark.skipif(not MEASURED.exists(), reason="needs the measured run of a vLLM server")
def test_a_recorded_trace_and_the_log_of_the_same_run_agree() -> None:
    recorded = ingest(sorted(MEASURED.glob("*.parquet"))).trace
    logged = ingest(MEASURED / "server_rec1.log.gz").trace
    gaps = recorded.floats("period_ms") - recorded["T_ms"]
    mean = float(np.mean(logged.floats("period_ms") - logged["T_ms"]))
    # Whole seconds at the ends of some 50 stretches over 5,300 steps: 0.54 ms.
    assert mean == pytest.approx(float(np.nanmean(gaps)), abs=3 * 0.54)


@pytest.mark.skipif(not MEASURED.exists(), reason="needs the measured run of a vLLM server")
def test_periods_are_the_latencies_between_tokens_that_the_server_counted() -> None:
    counted = dict(re.findall(r"inter_token_latency_seconds_(sum|count){.*} (.*)", (MEASURED / SERVER).read_text()))
    trace = ingest(sorted(MEASURED.glob("*.parquet"))).everything
    T, period = trace.floats("T_ms"), trace.floats("period_ms")
    # Between two tokens of a request lie the gap behind one step and the next step.
    decodes = (trace.floats("B") - trace.floats("prefill_requests"))[1:]
    between = np.nan_to_num((period - T)[:-1]) + T[1:]
    server_ms = 1e3 * float(counted["sum"]) / float(counted["count"])
    assert float(np.average(between, weights=decodes)) == pytest.approx(server_ms, rel=0.002)
    assert float(np.average(T[1:], weights=decodes)) < 0.9 * server_ms
