"""The plug-in in the real vLLM: its base class, its dataclasses, its loader, its adapter, beside its own log line."""

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latfit.record.vllm_plugin import LatfitStatLogger
from latfit.trace.parquet import read_parquet
from latfit.trace.readers import vllm as log_reader
from latfit.trace.readers.source import Options, open_source
from tests.unit.record.engine import engine_loop

WAY = (
    "the `vllm` package does not import. It needs no GPU for this: `pip install --no-deps vllm`, a torch for the CPU, "
    "and what `python -c 'import vllm.v1.metrics.loggers'` then asks for"
)
loggers: Any = pytest.importorskip("vllm.v1.metrics.loggers", reason=WAY, exc_type=ImportError)
stats_module: Any = pytest.importorskip("vllm.v1.metrics.stats", reason=WAY, exc_type=ImportError)
config_module: Any = pytest.importorskip("vllm.config", reason=WAY, exc_type=ImportError)

# What torch and vLLM say about a machine without a GPU is not what is tested here.
pytestmark = pytest.mark.filterwarnings("default")


def vllm_config() -> Any:
    """A real one, for the device that every machine has; made up where only a loaded model would tell."""
    made = config_module.VllmConfig(
        device_config=config_module.DeviceConfig(device="cpu"),
        observability_config=config_module.ObservabilityConfig(enable_logging_iteration_details=True),
    )
    made.cache_config.kv_cache_size_tokens = 50_000
    return made


def real_stats(steps: int) -> list[Any]:
    """The fake loop's steps in vLLM's own dataclasses."""
    found = []
    for one in engine_loop(steps):
        assert one.iteration_details is not None
        details = stats_module.SchedulerIterationDetails(**vars(one.iteration_details))
        found.append(stats_module.SchedulerStats(**{**vars(one), "iteration_details": details}))
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LATFIT_TRACE_DIR", str(tmp_path / "traces"))
    return tmp_path / "traces"


def test_it_is_a_stat_logger_with_nothing_abstract_left() -> None:
    assert issubclass(LatfitStatLogger, loggers.StatLoggerBase)
    assert not getattr(LatfitStatLogger, "__abstractmethods__", None)


def test_vllm_loads_it_from_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "plugin-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    target = f"{LatfitStatLogger.__module__}:{LatfitStatLogger.__qualname__}"
    (installed / "entry_points.txt").write_text(f"[vllm.stat_logger_plugins]\nplugin = {target}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("VLLM_PLUGINS", "plugin")
    assert loggers.load_stat_logger_plugin_factories() == [LatfitStatLogger]


def test_it_says_the_same_as_vllms_own_log(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two ways into latfit for one run: the plug-in, and the reader of the lines that vLLM prints of the same steps."""
    caplog.set_level(logging.INFO, logger=loggers.logger.name)
    lines = tmp_path / "server.log"
    to_file = logging.FileHandler(lines)
    to_file.setFormatter(logging.Formatter("(APIServer pid=1) INFO 12-22 21:44:40 [loggers.py:199] %(message)s"))
    loggers.logger.addHandler(to_file)
    theirs, ours = loggers.LoggingStatLogger(vllm_config()), LatfitStatLogger(vllm_config())
    try:
        for stats in real_stats(200):
            theirs.record(stats, None)
            ours.record(stats, None)
    finally:
        loggers.logger.removeHandler(to_file)
        to_file.close()
    ours.close()
    printed = log_reader.READER.read(open_source(lines), Options())
    recorded = read_parquet(next(folder.glob("*.parquet")))
    assert len(recorded) == 200
    for name in ("B", "S", "step", "prefill_requests", "prefill_tokens", "phase"):
        assert printed[name].tolist() == recorded[name].tolist(), name
    # The line has two decimals of a millisecond and one of a percent.
    assert np.abs(printed["T_ms"] - recorded["T_ms"]).max() <= 0.005 + 1e-9
    assert np.abs(printed["kv_usage"] - recorded["kv_usage"]).max() <= 0.0005 + 1e-9
