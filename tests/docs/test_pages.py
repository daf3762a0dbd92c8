"""What the README and the pages show works: their Python runs, their commands print what is shown, their links lead
somewhere."""

import re
from pathlib import Path

import pytest

from latfit.cli.app import run
from tests.conftest import ROOT
from tests.docs.examples import blocks, commands, missing, pages, same

Captured = pytest.CaptureFixture[str]


def named(found: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", found, ids=lambda page: page.stem)


@pytest.fixture
def folder(in_tmp: Path) -> Path:
    (in_tmp / "sample_traces").symlink_to(ROOT / "sample_traces")
    return in_tmp


@named([page for page in pages() if blocks(page, "python")])
def test_python_runs(page: Path, folder: Path) -> None:
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), names)


@named([page for page in pages() if commands(page)])
def test_commands_print_what_is_shown(page: Path, folder: Path, capsys: Captured) -> None:
    for arguments, shown in commands(page):
        run(arguments)
        told = capsys.readouterr()
        assert missing(shown, (told.out + told.err).splitlines()) == [], arguments


@named(pages())
def test_links_lead_somewhere(page: Path) -> None:
    links = set(re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()))
    assert [link for link in sorted(links) if not (page.parent / link).exists()] == []


def test_numbers_are_compared_as_precisely_as_they_are_printed() -> None:
    assert same("p99 12.3 ms of 987 rows", "p99  12.4 ms of 987 rows")
    assert same("carries 2,758/s", "carries 2,757/s")
    assert not same("p99 12.3 ms", "p99 12.5 ms")
    assert not same("B1 = 47", "B1 = 48")
    assert not same("p99 12.3 ms", "p95 12.3 ms")
    assert not same("carries 2,758/s", "carries 2,700/s")
