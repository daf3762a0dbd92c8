"""What several tests share: reference parameters, traces with planted truth, and where measured data lie."""

import gc
import os
import signal
import socket
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from latfit.model.formulas import Saturation
from latfit.stats import FloatArray
from latfit.trace.table import Trace

# A shell in the background ignores Ctrl-C, and the commands that tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no reason to fail, so examples have no deadline.
settings.register_profile("nightly", max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("test", settings.get_profile("nightly"), max_examples=20, derandomize=True)
settings.load_profile("test")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="also tests marked nightly, and more Hypothesis examples")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("nightly" if config.getoption("--nightly") else "test")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--nightly"):
        return
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    config.hook.pytest_deselected(items=nightly)
    items[:] = [item for item in items if item not in set(nightly)]


def pytest_collection_finish() -> None:
    """Modules and collected tests live as long as the run: garbage collection need not go through them again."""
    gc.collect()
    gc.freeze()


ROOT = Path(__file__).parent.parent

REFERENCE = np.array([4.0, 30.0, 1.0, 60.0, 0.15, 0.01, 0.02, 0.002])
"""tau_0, w_0, w_1, P_max, k_B, k_S, tau_B, tau_S: the parameters that the published oracle values belong to."""


def rich_design() -> tuple[FloatArray, FloatArray]:
    """B in 1, 2, ..., 256 and S in 1, 4, ..., 4096 with S >= B: 43 cells that determine every parameter."""
    B, S = np.meshgrid(2.0 ** np.arange(9), 4.0 ** np.arange(7))
    kept = S >= B
    return B[kept], S[kept]


def planted_trace(noise: float, repeats: int = 1, seed: int = 0) -> Trace:
    """Steps of the reference model on the rich design with log-normal noise."""
    B, S = (np.repeat(axis, repeats) for axis in rich_design())
    T = Saturation().latency_ms(REFERENCE, {"B": B, "S": S})
    return Trace({"B": B, "S": S, "T_ms": T * np.exp(np.random.default_rng(seed).normal(0, noise, len(B)))})


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def measured_steps() -> Path:
    """Folder of measured step traces beside the checkout; tests that need it skip where it is missing."""
    folder = Path(os.environ.get("LATFIT_DATA", ROOT.parent / "shared" / "data")) / "steps"
    if not folder.is_dir():
        pytest.skip(f"no measured traces at {folder}; set LATFIT_DATA to the folder that holds them")
    return folder


def free_port() -> int:
    """A port of loopback that nothing listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
