"""`record`, `doctor` and `watch` as typed, against a server on this machine."""

import json
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from threading import Event

import pytest

from latfit.cli.app import run
from tests.conftest import free_port
from tests.stand_in import live, one_after_another, serving, steady

STEPS = steady(300.0, 8, 0.018, waiting=12)


def test_record_says_what_fit_and_validate_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = [STEPS.text(5.0 + i) for i in range(40)]
    with serving(one_after_another(texts)) as url:
        assert run(["record", url, "--duration", "2s", "--every", "100ms", "--path", "cpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["engine"] == "vLLM"
    assert Path(told["metrics_before"]).read_text() == texts[0]
    assert run(["fit", "trace.parquet", "--out", "by_hand.fit.json", "--force", "--json"]) == 0
    fitted = json.loads(capsys.readouterr().out)
    assert fitted["warnings"][0]["code"] == "window_means"
    for name in ("parameters", "metrics", "warnings", "domain", "cross_validation"):
        assert told["fit"][name] == fitted[name]
    assert run(["validate", "by_hand.fit.json", "trace.parquet", "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert told["validation"] == compared
    assert compared["server"]["requests"] > 100


def test_ctrl_c_keeps_what_was_recorded(tmp_path: Path) -> None:
    asked = Event()
    answer = live(STEPS)
    readings = count(1)

    def counted(path: str) -> tuple[int, bytes]:
        if path == "/metrics" and next(readings) == 8:
            asked.set()
        return answer(path)

    with serving(counted) as url:
        command = [sys.executable, "-m", "latfit", "record", url, "--every", "500ms", "--out", "t.parquet"]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert asked.wait(120)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "What was recorded until then is kept in t.parquet" in err
    assert "windows of vLLM" in out
    assert (tmp_path / "t.parquet").exists()


def test_doctor_finds_the_engine_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first line says what binds, what was measured, and what to do."""
    with serving(live(STEPS)) as url:
        monkeypatch.setattr("latfit.metrics.server.LOCAL_PORTS", (free_port(), int(url.rpartition(":")[2])))
        assert run(["doctor", "--duration", "1s"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert told.startswith(f"vLLM at {url} is limited by max_num_seqs; 8")
    assert "requests at once at 18 ms TPOT; raise max_num_seqs." in told
