"""The vLLM plug-in in a fake engine's loop. test_vllm_real.py has the same against the real package."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from latfit.record.recorder import Buffers
from latfit.record.vllm_plugin import LatfitStatLogger, Settings, settings_from
from latfit.trace.parquet import read_parquet
from latfit.trace.serving_engine import engine_notes, request_times, time_quantile
from latfit.trace.table import Trace
from tests.conftest import ROOT
from tests.unit.record.engine import (
    CAPACITY_TOKENS,
    FinishedRequestStats,
    IterationStats,
    PrefixCacheStats,
    SchedulerStats,
    SpecDecodingStats,
    config,
    engine_loop,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    """Where the plug-in is told to record. vLLM's own logger hands nothing to its parents, so we catch it here."""
    monkeypatch.setenv("LATFIT_TRACE_DIR", str(tmp_path / "traces"))
    log = logging.getLogger("vllm.latfit")
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    monkeypatch.setattr(log, "propagate", False)
    caplog.set_level(logging.INFO, logger=log.name)
    return tmp_path / "traces"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def recorded(folder: Path) -> Trace:
    (file,) = sorted(folder.glob("*.parquet"))
    return read_parquet(file)


def test_percentiles_of_requests_are_within_a_percent(folder: Path) -> None:
    rng = np.random.default_rng(1)
    ttft, tpot = rng.lognormal(-1, 1, 3000), rng.lognormal(-3.5, 0.3, 3000)
    plugin = LatfitStatLogger(config())
    for i, stats in enumerate(engine_loop(300)):
        ended = [FinishedRequestStats(float(each)) for each in tpot[10 * i : 10 * i + 10]]
        plugin.record(stats, IterationStats(0, ttft[10 * i : 10 * i + 10].tolist(), ended))
    plugin.record(None, None)
    plugin.close()
    found = request_times(recorded(folder).provenance)
    for name, values in (("ttft_ms", ttft), ("tpot_ms", tpot)):
        assert found[name].total() == 3000
        for q in (0.5, 0.99):
            assert time_quantile(found[name], q) == pytest.approx(1e3 * np.quantile(values, q), rel=0.01)
    twice = {"parts": {"a": recorded(folder).provenance, "b": recorded(folder).provenance}}
    assert request_times(twice)["ttft_ms"].total() == 3000  # the later file of a run holds all before


class TestSteps:
    def test_every_field_reaches_its_column(self, folder: Path) -> None:
        stats = list(engine_loop(300))
        plugin = LatfitStatLogger(config(), engine_index=4)
        plugin.log_engine_initialized()
        for one in stats:
            plugin.record(one, None, mm_cache_stats=None, engine_idx=4)
            plugin.log()
        plugin.close()
        trace = recorded(folder)
        details = [one.iteration_details for one in stats if one.iteration_details]
        assert trace["step"].tolist() == [d.iteration_index for d in details]
        assert trace["T_ms"].tolist() == [d.elapsed_ms for d in details]
        assert trace["B"].tolist() == [d.num_ctx_requests + d.num_generation_requests for d in details]
        assert trace["S"].tolist() == [d.num_ctx_tokens + d.num_generation_tokens for d in details]
        assert trace["prefill_requests"].tolist() == [d.num_ctx_requests for d in details]
        assert trace["prefill_tokens"].tolist() == [d.num_ctx_tokens for d in details]
        assert trace["phase"].tolist() == ["mixed" if d.num_ctx_requests else "decode" for d in details]
        assert trace["queued_requests"].tolist() == [s.num_waiting_reqs + s.num_skipped_waiting_reqs for s in stats]
        assert trace["kv_usage"].tolist() == [s.kv_cache_usage for s in stats]
        assert trace["context_tokens"] == pytest.approx(trace["kv_usage"] * CAPACITY_TOKENS, abs=0.5)
        labels = {name: set(trace[name].tolist()) for name in ("replica", "path", "model", "tp")}
        assert labels == {"replica": {"4"}, "path": {"gpu"}, "model": {"org/model-8b"}, "tp": {2}}
        assert trace.provenance["max_num_seqs"] == 256

    def test_what_the_engine_did_besides(self, folder: Path) -> None:
        """Preemptions, prompt tokens found in the prefix cache, drafts and those accepted."""
        drafts = SpecDecodingStats(3, num_drafts=4, num_draft_tokens=12, num_accepted_tokens=7)
        (stats,) = engine_loop(1)
        stats.prefix_cache_stats, stats.spec_decoding_stats = PrefixCacheStats(2, 900, 512, 1, 70, 64), drafts
        plugin = LatfitStatLogger(config())
        plugin.record(stats, IterationStats(num_preempted_reqs=2))
        plugin.close()
        trace = recorded(folder)
        names = ("preemptions", "prefix_queries", "prefix_hits", "draft_tokens", "accepted_tokens")
        assert [trace[name].tolist() for name in names] == [[2], [900], [512], [12], [7]]


class TestWhatIsMissing:
    def test_without_a_folder_nothing_is_recorded(self, folder: Path, monkeypatch: Any, caplog: Any) -> None:
        monkeypatch.delenv("LATFIT_TRACE_DIR")
        plugin = LatfitStatLogger(config())
        plugin.log_engine_initialized()
        plugin.record(next(engine_loop(1)))
        plugin.log()
        plugin.close()
        assert plugin.recorder is None
        assert warnings(caplog) == []
        assert "set LATFIT_TRACE_DIR" in caplog.text

    def test_the_missing_flag_is_named_once(self, folder: Path, caplog: Any) -> None:
        plugin = LatfitStatLogger(config(observability_config={"enable_logging_iteration_details": False}))
        for _ in range(3):
            plugin.record(SchedulerStats())
        assert ["--enable-logging-iteration-details" in line for line in warnings(caplog)] == [True]


class TestAsynchronousScheduling:
    """vLLM waits for a step's result only after it has planned the next: its own times are a part of each step."""

    def record(self, folder: Path, monkeypatch: Any, steps: list[tuple[SchedulerStats, float, list[float]]]) -> Trace:
        """Record (statistics, second of arrival, distances of tokens)."""
        plugin = LatfitStatLogger(config(scheduler_config={"async_scheduling": True}))
        for stats, now, distances in steps:
            monkeypatch.setattr("latfit.record.vllm_plugin.monotonic", lambda now=now: now)
            plugin.record(stats, IterationStats(inter_token_latencies_iter=distances))
        plugin.close()
        return recorded(folder)

    def test_a_step_lasts_from_output_to_output(self, folder: Path, monkeypatch: Any, caplog: Any) -> None:
        """The engine waits for half of each step; outputs arrive up to 5 ms late; one request skipped a step."""
        rng = np.random.default_rng(1)
        steps, end_s, planted = [], 100.0, []
        for stats in engine_loop(200):
            details = stats.iteration_details
            assert details is not None
            planted.append(details.elapsed_ms)
            end_s += details.elapsed_ms / 1e3
            distances = [details.elapsed_ms / 1e3] * details.num_generation_requests
            details.elapsed_ms /= 2
            steps.append((stats, end_s + 0.005 * rng.random(), [*distances, 0.2 + details.elapsed_ms]))
        trace = self.record(folder, monkeypatch, steps)
        assert trace["T_ms"][1:] == pytest.approx(planted[1:], rel=1e-9)
        assert trace["period_ms"][1:-1] == pytest.approx(planted[1:-1], abs=5)
        assert trace["wait_ms"][1:] == pytest.approx(np.array(planted[1:]) / 2)
        assert "The engine waited for the device in 50 % of the steps' time." in engine_notes(
            trace.select(np.arange(1, 200))
        )
        assert warnings(caplog) == []


class TestTheFolder:
    def test_it_is_tried_before_the_first_step(self, folder: Path, monkeypatch: Any, caplog: Any) -> None:
        blocked = folder.parent / "file"
        blocked.touch()
        monkeypatch.setenv("LATFIT_TRACE_DIR", str(blocked / "folder"))
        LatfitStatLogger(config())
        (line,) = warnings(caplog)
        assert "cannot write its trace" in line
        assert "set LATFIT_TRACE_DIR" in line
        assert "--out" not in line
        assert "records the steps" not in caplog.text

    def test_drafts_and_servers_stand_in_the_provenance(self, folder: Path, caplog: Any) -> None:
        several = config(parallel_config={"_api_process_count": 3, "_api_process_rank": 1})
        several.speculative_config = SimpleNamespace(num_speculative_tokens=4)
        plugin = LatfitStatLogger(several, engine_index=1)
        plugin.record(next(engine_loop(1)))
        plugin.close()
        origin = recorded(folder).provenance
        told = {name: origin[name] for name in ("num_speculative_tokens", "api_server", "api_servers", "replica")}
        assert told == {"num_speculative_tokens": 4, "api_server": 1, "api_servers": 3, "replica": "1"}
        assert ["API server 2 of 3" in line for line in warnings(caplog)] == [True]

    def test_settings_that_a_version_lacks_are_not_in_the_provenance(self, folder: Path) -> None:
        plugin = LatfitStatLogger(config(model_config={"quantization": None}))
        plugin.record(next(engine_loop(1)))
        plugin.close()
        origin = recorded(folder).provenance
        assert "cache_dtype" not in origin
        assert origin["quantization"] == "None"  # known: not quantised
        assert origin["max_num_seqs"] == 256


class TestTheServerComesFirst:
    def test_a_config_that_is_nothing_like_vllms(self, folder: Path, caplog: Any) -> None:
        plugin = LatfitStatLogger(object())
        plugin.log_engine_initialized()
        plugin.record(next(engine_loop(1)))
        assert plugin.recorder is None
        assert len(warnings(caplog)) == 1

    def test_statistics_of_another_shape_are_counted(self, folder: Path, caplog: Any) -> None:
        plugin = LatfitStatLogger(config())
        for _ in range(5):
            plugin.record(SimpleNamespace(iteration_details=SimpleNamespace(iteration_index=1)))
        plugin.record(next(engine_loop(1)))
        plugin.close()
        assert plugin.recorder is not None
        assert (plugin.recorder.rows_refused, plugin.recorder.rows_written) == (5, 1)
        assert len(warnings(caplog)) == 1


class TestSettings:
    def test_defaults_and_values(self) -> None:
        assert settings_from({}) is None
        assert settings_from({"LATFIT_TRACE_DIR": "  "}) is None
        set_all = settings_from(
            {
                "LATFIT_TRACE_DIR": "/t",
                "LATFIT_TRACE_ROWS": "1000",
                "LATFIT_TRACE_SECONDS": "2.5",
                "LATFIT_TRACE_PENDING": "9",
                "LATFIT_TRACE_PATH": "amx",
            }
        )
        assert set_all == Settings(Path("/t"), Buffers(1000, 9, 2.5), "amx")

    @pytest.mark.parametrize("value", ["many", "-1", "nan", "1e99", "0"])
    def test_nonsense_gives_the_default(self, value: str, folder: Path, caplog: Any) -> None:
        found = settings_from({"LATFIT_TRACE_DIR": "/t", "LATFIT_TRACE_ROWS": value})
        assert found is not None
        assert found.buffers.rows_per_file == 65_536
        assert ["LATFIT_TRACE_ROWS" in line for line in warnings(caplog)] == [True]


class TestImport:
    """What becomes of the base class; in fresh processes, where vLLM is whatever the test lays into the path."""

    PROGRAM = "import latfit.record.vllm_plugin as p; print(p.LatfitStatLogger.__mro__[1])"

    def imported(self, folder: Path) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT / "src")))}
        return subprocess.run(
            [sys.executable, "-c", self.PROGRAM], env=environment, capture_output=True, text=True, check=False
        )

    def test_a_vllm_without_it_is_an_error(self, tmp_path: Path) -> None:
        """With `object` as its base vLLM would stop at the class; an error at import it logs, and goes on."""
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").touch()
        assert "ModuleNotFoundError" in self.imported(tmp_path).stderr
