"""`latfit hardware`: measured and nominal paths, ceilings and prices, what a user gets wrong."""

import json
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


def test_a_second_machine_is_left_out_of_an_assumed_profile(in_tmp: Path, capsys: Captured) -> None:
    """Where neither profile nor path is named, the fit is written, and the command that enters it shown."""
    for machine, scale in (("a100", 1.0), ("h100", 0.4)):
        rows = [f"{B},{S},{scale * (5 + 0.1 * B + 0.02 * S):.4f},{machine}" for B in (1, 2, 4, 8) for S in (8, 32, 128)]
        (in_tmp / f"{machine}.csv").write_text("\n".join(["B,S,T_ms,hardware", *rows]))
    assert latfit("fit", "a100.csv", "--model", "linear", "--quiet") == 0
    capsys.readouterr()
    assert latfit("fit", "h100.csv", "--model", "linear", "--quiet") == 0
    told = capsys.readouterr().out
    assert "of another system: hardware a100, not h100" in " ".join(told.split())
    assert "latfit hardware add NAME h100.fit.json" in told
    assert "Next: latfit plan --sla 20ms --hardware h100.fit.json" in told
    assert latfit("fit", "h100.csv", "--model", "linear", "--path", "gpu") == 4
    assert latfit("hardware", "add", "h100", "h100.fit.json", "--quiet") == 0
    paths = json.loads((in_tmp / "hardware.json").read_text())["paths"]
    sources = {name: Path(path["fit"]["data"]["source"]).name for name, path in paths.items()}
    assert sources == {"gpu": "a100.csv", "h100": "h100.csv"}


def test_next_commands_repeat_the_given_profile(folder: Path, capsys: Captured) -> None:
    assert latfit("hardware", "add", "gpu", "gpu.fit.json", "--hardware", "two.json", "--quiet") == 0
    capsys.readouterr()
    assert latfit("hardware", "show", "--hardware", "two.json", "--quiet") == 0
    assert "Next: latfit plan --sla 20ms --hardware two.json" in capsys.readouterr().out
    assert latfit("report", "--hardware", "two.json", "--out", "page", "--quiet") == 0
    page = (folder / "page" / "report.html").read_text().replace('<span class="whole">', "").replace("</span>", "")
    assert "<code>latfit report --hardware two.json --out page --sla 20ms</code>" in page
