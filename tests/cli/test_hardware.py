"""`latfit hardware`: measured and nominal paths, ceilings and prices, what a user gets wrong."""

from pathlib import Path

import numpy as np
import pytest

from latfit.cli.app import run
from latfit.hardware import read_hardware
from latfit.model.fit_result import write_fit
from tests.unit.planning.test_plan import line

Captured = pytest.CaptureFixture[str]


def latfit(*arguments: object) -> int:
    return run([str(argument) for argument in arguments])


@pytest.fixture
def folder(in_tmp: Path) -> Path:
    write_fit(in_tmp / "gpu.fit.json", line(8, 0.05))
    return in_tmp


def steps_of(hardware: str, file: Path, slope: float = 0.05) -> None:
    """A trace of 200 decode steps of 4 + slope B ms on a machine."""
    rng = np.random.default_rng(0)
    B = rng.integers(1, 65, 200)
    T = (4 + slope * B) * rng.lognormal(0, 0.01, 200)
    rows = (f"{b},{b},{t:.5f},{hardware},llama-3.1-8b" for b, t in zip(B, T, strict=True))
    file.write_text("\n".join(["B,S,T_ms,hardware,model", *rows]) + "\n")


def test_a_fit_replaces_one_of_its_own_system_only(folder: Path, capsys: Captured) -> None:
    steps_of("H100", folder / "h100.csv")
    steps_of("A100", folder / "a100.csv")
    assert latfit("fit", "h100.csv", "--model", "linear") == 0
    assert "replaces" not in capsys.readouterr().out
    before = (folder / "hardware.json").read_bytes()
    assert latfit("fit", "a100.csv", "--model", "linear") == 4
    told = capsys.readouterr()
    assert "Not entered into hardware.json" in told.out
    assert "of another system: hardware H100, not A100" in told.err
    assert "--force" in told.err
    assert (folder / "a100.fit.json").exists()
    assert (folder / "hardware.json").read_bytes() == before
    assert latfit("hardware", "add", "a100", "a100.fit.json") == 0
    steps_of("H100", folder / "h100.csv", 0.06)
    assert latfit("fit", "h100.csv", "--model", "linear") == 0
    assert "Path gpu: replaces the measurement of 20" in " ".join(capsys.readouterr().out.split())
    assert latfit("fit", "a100.csv", "--model", "linear", "--force") == 0
    assert list(read_hardware(folder / "hardware.json").paths) == ["gpu", "a100"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["add", "gpu"], 2),
        (["add", "gpu", "gpu.fit.json", "--nominal", "p50=2ms"], 2),
        (["add", "gpu", "--nominal", "p50=2"], 2),
        (["add", "gpu", "--nominal", "p50=2ms,launch=1ms"], 2),
        (["add", "gpu", "gpu.fit.json", "--price", "-1"], 2),
        (["add", "gpu", "gpu.fit.json", "--flops", "0"], 2),
        (["add", " ", "gpu.fit.json"], 2),
        (["add", "gpu", "none.fit.json"], 3),
        (["show"], 3),
        (["show", "--hardware", "none.json"], 3),
    ],
)
def test_what_a_user_gets_wrong(arguments: list[str], code: int, folder: Path, capsys: Captured) -> None:
    assert latfit("hardware", *arguments) == code
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert len(told.strip().splitlines()) >= 2
    assert not (folder / "hardware.json").exists()
