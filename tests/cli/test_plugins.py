"""What docs/how-to/extend.md adds in one file each works on the command line too: LATFIT_PLUGINS names the files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.docs.examples import all_blocks

PAGE = ROOT / "docs" / "how-to" / "extend.md"
FILES = {block.title: block.text for block in all_blocks(PAGE) if block.title}
MODULES = [name.removesuffix(".py") for name in FILES]


@pytest.fixture
def folder(in_tmp: Path) -> Path:
    for name, text in FILES.items():
        (in_tmp / name).write_text(text)
    steps = [(b, b + p) for b in (1, 2, 4, 8, 16, 32) for p in (0, 30, 60, 90, 150, 300, 700, 1500)]
    lines = [f"step b={b} s={s} t={(2 + 0.1 * b + 0.5 * -(-s // 64)) * 1000:.1f}us\n" for b, s in steps]
    (in_tmp / "engine.txt").write_text("".join(lines))
    return in_tmp


def latfit(*arguments: str, plugins: str = ",".join(MODULES)) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "LATFIT_PLUGINS": plugins, "PYTHONPATH": os.getcwd(), "COLUMNS": "80"}
    command = [sys.executable, "-m", "latfit", *arguments]
    return subprocess.run(command, env=given, capture_output=True, text=True)


def test_a_reader_and_a_model(folder: Path) -> None:
    done = latfit("fit", "engine.txt", "--model", "tiles", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["parameters"]["tau_T"]["value"] == pytest.approx(0.5, rel=1e-3)
    read = latfit("predict", "engine.fit.json", "-B", "4", "-S", "128", "--json")
    assert json.loads(read.stdout)["rows"][0]["T_ms"] == pytest.approx(2 + 0.4 + 1.0, rel=1e-3)
