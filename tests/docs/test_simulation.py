"""What the page on simulation shows works: its Python runs, its command runs and prints that table."""

import re
import shlex
from pathlib import Path

import pytest

from latfit.cli.app import run
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "simulation.md").read_text()


def test_python_examples() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, {})


def test_the_command(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = re.findall(r"```console\n\$ (.*?)\n(.*?)```", PAGE, flags=re.DOTALL)
    assert run([*shlex.split(shown[0])[1:], "--quiet"]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == [line.rstrip() for line in shown[1].splitlines()]


def test_from_nothing_to_a_page(in_tmp: Path) -> None:
    (block,) = re.findall(r"\n```\n(latfit fit.*?)```", PAGE, flags=re.DOTALL)
    (in_tmp / "sample_traces").symlink_to(ROOT / "sample_traces")
    for line in block.splitlines():
        assert run([*shlex.split(line)[1:], "--quiet"]) == 0
    assert (in_tmp / "reports" / "simulation.html").exists()


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", PAGE))))
def test_links(link: str) -> None:
    assert (ROOT / "docs" / link).exists()


def test_every_policy_is_described() -> None:
    from latfit.policies.defaults import NAMES

    assert [name for name in NAMES if f"`{name}`" not in PAGE] == []
