"""`latfit hardware`: measured and nominal paths, ceilings and prices, what a user gets wrong."""

from pathlib import Path

import pytest

from latfit.cli.app import run
from tests.unit.planning.test_plan import line

Captured = pytest.CaptureFixture[str]


def latfit(*arguments: object) -> int:
    return run([str(argument) for argument in arguments])


@pytest.fixture
def folder(in_tmp: Path) -> Path:
    line(8, 0.05).write(in_tmp / "gpu.fit.json")
    return in_tmp


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
