"""What the README and the pages show works: their Python runs, their commands print what is shown, their links lead
somewhere."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from importlib import import_module
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import latfit
from latfit.cli.app import run
from latfit.exporting import TARGETS
from latfit.model import FAMILY
from latfit.policies import POLICIES
from latfit.trace.readers import READERS
from tests.conftest import ROOT
from tests.docs.examples import all_blocks, blocks, commands, commands_of, pages, same, typed, unlike
from tests.docs.reference import SHARED, commands as known_commands

COMMANDS = dict(known_commands())
Captured = pytest.CaptureFixture[str]


def named(found: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", found, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.fixture
def folder(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder with the samples, from which modules can be imported; what these add to latfit goes with it."""
    (in_tmp / "sample_traces").symlink_to(ROOT / "sample_traces")
    monkeypatch.syspath_prepend(in_tmp)
    modules, readers = set(sys.modules), list(READERS)
    registries: list[dict[str, Any]] = [FAMILY, POLICIES, TARGETS]
    before = [dict(each) for each in registries]
    yield in_tmp
    READERS[:] = readers
    for registry, kept in zip(registries, before, strict=True):
        registry.clear()
        registry.update(kept)
    for name in {each.removesuffix(".py") for each in os.listdir(in_tmp)} - modules:
        sys.modules.pop(name, None)


FIRST_FIT = ["fit", "sample_traces/rtx4090_llama-3.1-8b.parquet"]


@pytest.fixture(scope="session")
def first_fit(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and output of the example that several pages begin with, run once because it takes 10 s."""
    made = tmp_path_factory.mktemp("first_fit")
    (made / "sample_traces").symlink_to(ROOT / "sample_traces")
    with chdir(made), redirect_stdout(StringIO()) as out:
        assert run(FIRST_FIT) == 0
    return made, out.getvalue()


SAYS = {"README": "Simulation agrees", "simulation": "ms to the first token"}
"""What the Python of a page prints; that of other pages asserts what it shows."""

RUN = ("console", "python")
OLD_RICH = int(version("rich").partition(".")[0]) < 14
"""What pages show is printed by a newer Rich, which wraps tables otherwise."""

COMMANDS_SHOWN = {"how-to/export": 8, "concepts/simulation": 1, "index": 3, "../README": 3}
BLOCKS_SHOWN = {
    **dict.fromkeys(("../README", "how-to/export", "how-to/record", "concepts/simulation", "concepts/uncertainty"), 1),
    "theory/planning": 2,
}
"""At least so many examples: a page whose blocks are no longer found would pass without one."""


NIGHTLY = {"cpu-or-gpu", "export", "gate", "index", "size-deployment", "validate"}
"""Pages whose examples take seconds and whose commands other pages run as well."""

RUNNABLE = [
    pytest.param(page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.nightly] if page.stem in NIGHTLY else [])
    for page in pages()
    if any(block.language in RUN for block in all_blocks(page))
]


def test_the_examples_are_found() -> None:
    for page, least in COMMANDS_SHOWN.items():
        assert len(commands(ROOT / f"docs/{page}.md")) >= least, page
    for page, least in BLOCKS_SHOWN.items():
        assert len(blocks(ROOT / f"docs/{page}.md", "python")) >= least, page


@pytest.mark.parametrize("page", RUNNABLE)
def test_a_page_works_from_top_to_bottom(
    page: Path, folder: Path, capsys: Captured, request: pytest.FixtureRequest
) -> None:
    """Files are written, Python runs, commands print what is shown, each after what stands before it on the page."""
    names: dict[str, object] = {}
    said = ""
    for block in all_blocks(page):
        if block.title:
            Path(block.title).write_text(block.text)
            if block.language == "python":
                import_module(Path(block.title).stem)
        elif block.language == "python":
            exec(compile(block.text, page.name, "exec"), names)
            said += capsys.readouterr().out
        elif block.language == "console":
            for arguments, shown in commands_of(block.text):
                if arguments == FIRST_FIT:
                    made, out = request.getfixturevalue("first_fit")
                    shutil.copytree(made, folder, dirs_exist_ok=True, ignore=lambda *_: {"sample_traces"})
                    err = ""
                else:
                    run(arguments)
                    out, err = capsys.readouterr()
                assert OLD_RICH or unlike(shown, out, err) == "", arguments
    checked = page.stem in SAYS or any("assert" in block for block in blocks(page, "python"))
    assert checked or all_blocks(page)[-1].language != "python", "nothing says what its Python has to do"
    assert SAYS.get(page.stem, "") in said


TYPED = {line for page in pages() for kind in ("sh", "yaml") for block in blocks(page, kind) for line in typed(block)}


@pytest.mark.parametrize("line", sorted(TYPED))
def test_commands_that_are_not_run_have_options_that_exist(line: str) -> None:
    words = shlex.split(line.split(" -- ")[0], comments=True)[1:]
    name = next((name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS), "")
    known = {option for each in COMMANDS[name].params for option in each.opts} | SHARED if name else {"--version"}
    assert {word for word in words if word.startswith("-")} <= known


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


def test_the_page_on_the_library_has_every_public_name() -> None:
    listed = re.findall(r"^::: latfit\.\w+\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(set(latfit.__all__) - {"__version__"})


def test_every_page_is_in_the_navigation() -> None:
    shown = re.findall(r": ([\w/-]+\.md)$|- ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    found = {str(page.relative_to(ROOT / "docs")) for page in pages() if page.parent != ROOT}
    assert {a or b for a, b in shown} == found
