"""`latfit hardware`: measured and nominal paths, ceilings and prices, what a user gets wrong."""

import json
from pathlib import Path

import numpy as np
import pytest

from latfit.api import Hardware
from latfit.cli.app import run
from latfit.files import dumps
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


def test_a_fit_and_nominal_numbers(folder: Path, capsys: Captured) -> None:
    assert latfit("hardware", "add", "gpu", "gpu.fit.json", "--price", 2.5) == 0
    assert latfit("hardware", "add", "amx", "--nominal", "p50=2ms") == 0
    assert "Paths: gpu, amx" in capsys.readouterr().out
    assert latfit("hardware", "show", "--json") == 0
    paths = json.loads(capsys.readouterr().out)["paths"]
    assert (paths["gpu"]["source"], paths["amx"]["source"]) == ("fitted", "nominal")
    assert paths["gpu"]["price_per_hour"] == 2.5
    assert paths["amx"]["nominal"] == "p50=2ms"
    first = paths["gpu"]["estimates"][0]
    assert (first["B"], first["typical_ms"]) == (1, pytest.approx(8.05))


def test_nominal_numbers_are_marked_wherever_they_are_used(folder: Path, capsys: Captured) -> None:
    latfit("hardware", "add", "gpu", "gpu.fit.json")
    latfit("hardware", "add", "amx", "--nominal", "p50=2ms")
    capsys.readouterr()
    assert latfit("hardware", "show", "-v") == 0
    assert "amx (nominal)" in capsys.readouterr().out
    assert latfit("plan", "--sla", "20ms", "--rate", "100/s", "-v") == 0
    told = capsys.readouterr().out
    assert "nominal numbers (p50=2ms), not measured" in told
    assert "serves 346.6 req/s, not 500 req/s" in " ".join(told.split())
    assert latfit("plan", "--sla", "20ms", "--json") == 4  # the largest step was not measured
    assert json.loads(capsys.readouterr().out)["nominal"] == {"amx": "p50=2ms"}


def test_ceilings_stand_beside_the_fit(folder: Path, capsys: Captured) -> None:
    latfit("hardware", "add", "gpu", "gpu.fit.json")
    ceiling = ("--flops", "1e15", "--flops-per-token", "1e10", "--bandwidth", "2e12", "--step-bytes", "1e10")
    assert latfit("hardware", "add", "gpu", *ceiling) == 0
    capsys.readouterr()
    assert latfit("hardware", "show", "--json") == 0
    found = json.loads(capsys.readouterr().out)["paths"]["gpu"]["ceiling"]
    assert found["ceiling_tokens_per_ms"] == pytest.approx(100)
    assert found["floor_ms"] == pytest.approx(5)
    assert found["floor_share"] == pytest.approx(5 / 8.05)


def test_the_library_says_what_the_command_says(folder: Path, capsys: Captured) -> None:
    assert latfit("hardware", "add", "gpu", "gpu.fit.json") == 0
    assert latfit("hardware", "add", "amx", "--quoted", "p50=2ms") == 0  # the name it had before
    capsys.readouterr()
    made = Hardware({"gpu": "gpu.fit.json", "amx": "p50=2ms"})
    assert made.to_json() == json.loads((folder / "hardware.json").read_text())
    assert latfit("hardware", "show", "--tokens-per-request", 4, "--json") == 0
    told = json.loads(capsys.readouterr().out)["paths"]
    assert json.loads(dumps(made.described(4))) == told
    rows = made.batches(4)
    assert rows[rows.path == "gpu"].typical_ms.tolist() == [row["typical_ms"] for row in told["gpu"]["estimates"]]


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


def test_fit_says_first_where_its_fit_goes_and_its_next_command_reads_there(folder: Path, capsys: Captured) -> None:
    steps_of("H100", folder / "h100.csv")
    assert latfit("fit", "h100.csv", "--model", "linear", "--hardware", "own.json") == 0
    told = capsys.readouterr()
    assert told.err.startswith("The fit goes into own.json")
    assert "--hardware own.json" in told.out.splitlines()[-1]
    latfit("plan", "--sla", "8ms", "--hardware", "own.json")
    assert "decodes up to 64 requests (the most measured)" in " ".join(capsys.readouterr().out.split())


def test_each_enters_what_it_may(folder: Path, capsys: Captured) -> None:
    for name in ("H100", "A100"):
        steps_of(name, folder / f"{name}.csv")
    both = (folder / "H100.csv").read_text() + "".join((folder / "A100.csv").read_text().splitlines(keepends=True)[1:])
    (folder / "both.csv").write_text(both)
    assert latfit("fit", "H100.csv", "--model", "linear", "--path", "A100") == 0
    assert latfit("fit", "both.csv", "--each", "--path", "{hardware}", "--model", "linear") == 4
    assert "Path A100 holds the measurement of 20" in " ".join(capsys.readouterr().err.split())
    paths = read_hardware(folder / "hardware.json").paths
    assert list(paths) == ["A100", "H100"]
    assert paths["A100"].fit.provenance["identity"]["hardware"] == "H100"


def test_nominal_numbers_replace_a_measurement_only_by_force(folder: Path, capsys: Captured) -> None:
    latfit("hardware", "add", "gpu", "gpu.fit.json")
    assert latfit("hardware", "add", "gpu", "--nominal", "p50=2ms") == 2
    assert "nominal numbers do not replace it" in " ".join(capsys.readouterr().err.split())
    assert latfit("hardware", "add", "gpu", "--nominal", "p50=2ms", "--force") == 0
    assert "Path gpu: replaces the measurement (linear)." in capsys.readouterr().out
    assert latfit("hardware", "add", "gpu", "--nominal", "p50=3ms", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert latfit("hardware", "add", "gpu", "--price", "2", "--force") == 0
    assert "--force has no effect" in capsys.readouterr().err
    assert told["replaced"] == ["Path gpu: replaces the nominal numbers p50=2ms."]


def test_a_path_is_removed(folder: Path, capsys: Captured) -> None:
    latfit("hardware", "add", "gpu", "gpu.fit.json")
    latfit("hardware", "add", "amx", "--nominal", "p50=2ms")
    capsys.readouterr()
    assert latfit("hardware", "remove", "cpu") == 2
    assert "There are: gpu, amx." in capsys.readouterr().err
    assert latfit("hardware", "remove", "gpu", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"hardware": "hardware.json", "removed": "gpu", "paths": ["amx"]}
    assert latfit("hardware", "remove", "amx") == 0
    assert "Paths: none" in capsys.readouterr().out
    assert latfit("hardware", "remove", "amx", "--hardware", "none.json") == 3


def test_a_demo_replaces_no_path_of_others(folder: Path, capsys: Captured) -> None:
    latfit("hardware", "add", "gpu", "gpu.fit.json")
    before = (folder / "hardware.json").read_bytes()
    assert latfit("demo", "--out", ".") == 2
    assert "path gpu in it is not of a demo" in capsys.readouterr().err
    assert (folder / "hardware.json").read_bytes() == before


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
