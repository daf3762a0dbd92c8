"""The page on simulation: its way from nothing to a page, and the policies that it tells of."""

import re
import shlex
from pathlib import Path

from latfit.cli.app import run
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "simulation.md").read_text()


def test_from_nothing_to_a_page(in_tmp: Path) -> None:
    (block,) = re.findall(r"\n```\n(latfit fit.*?)```", PAGE, flags=re.DOTALL)
    (in_tmp / "sample_traces").symlink_to(ROOT / "sample_traces")
    for line in block.splitlines():
        assert run([*shlex.split(line)[1:], "--quiet"]) == 0
    assert (in_tmp / "reports" / "simulation.html").exists()


def test_every_policy_is_described() -> None:
    from latfit.policies.policy import POLICIES

    assert [name for name in POLICIES if f"`{name}`" not in PAGE] == []
