"""What the README and the pages show works: their Python runs, their commands print what is shown, their links lead
somewhere."""

import re
from pathlib import Path

import pytest

from latfit.cli.app import run
from tests.conftest import ROOT
from tests.docs.examples import blocks, commands, pages, same, unlike

Captured = pytest.CaptureFixture[str]


def named(found: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", found, ids=lambda page: page.stem)


@pytest.fixture
def folder(in_tmp: Path) -> Path:
    (in_tmp / "sample_traces").symlink_to(ROOT / "sample_traces")
    return in_tmp


SAYS = {"README": "p99 response", "engine": "ms to the first token"}
"""What the Python of a page prints; that of other pages asserts what it shows."""

COMMANDS = {"README": 6, "export": 8, "planning": 8, "simulation": 1}
BLOCKS = {"README": 1, "engine": 1, "export": 1, "planning": 1, "queueing": 4, "recording": 1, "simulation": 1}
"""At least so many examples: a page whose blocks are no longer found would pass without one."""


def test_the_examples_are_found() -> None:
    for page in pages():
        assert len(commands(page)) >= COMMANDS.get(page.stem, 0), page
        assert len(blocks(page, "python")) >= BLOCKS.get(page.stem, 0), page


@named([page for page in pages() if blocks(page, "python")])
def test_python_runs(page: Path, folder: Path, capsys: Captured) -> None:
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), names)
    assert page.stem in SAYS or any("assert" in block for block in blocks(page, "python"))
    assert SAYS.get(page.stem, "") in capsys.readouterr().out


@named([page for page in pages() if commands(page)])
def test_commands_print_what_is_shown(page: Path, folder: Path, capsys: Captured) -> None:
    for arguments, shown in commands(page):
        run(arguments)
        told = capsys.readouterr()
        assert unlike(shown, told.out, told.err) == "", arguments


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
