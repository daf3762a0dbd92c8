"""What contributors are given says what is there: versions, make targets, workflows, templates, links."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from latfit._version import __version__
from tests.conftest import ROOT

PAGES = ("CONTRIBUTING.md", "SECURITY.md")
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def document(name: str | Path) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_the_citation_is_of_this_version_and_licence() -> None:
    cited = document("CITATION.cff")
    assert (cited["version"], cited["license"], cited["title"]) == (__version__, PROJECT["license"], PROJECT["name"])


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)", (ROOT / page).read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("page", [*PAGES, ".ci/run", ".github/workflows/checks.yml"])
def test_make_targets_are_there(page: str) -> None:
    named = [name for line in re.findall(r"make ((?:[a-z-]+ ?)+)", (ROOT / page).read_text()) for name in line.split()]
    assert set(re.findall(r"`make ([a-z-]+)", (ROOT / page).read_text())) <= TARGETS
    if page.startswith("."):
        assert named
        assert set(named) <= TARGETS


def test_contributing_names_every_target() -> None:
    named = set(re.findall(r"make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text()))
    assert TARGETS - named <= {"demo", "lint", "types", "clean"}


def test_the_map_names_every_package() -> None:
    listed = set(
        re.findall(r"`([a-z]+)`", (ROOT / "CONTRIBUTING.md").read_text().split("| package |")[1].split("\n\n")[0])
    )
    packages = {each.parent.name for each in (ROOT / "src" / "latfit").glob("*/__init__.py")}
    assert packages <= listed


def test_the_workflow_tries_every_python_that_is_promised() -> None:
    matrix = document(".github/workflows/checks.yml")["jobs"]["tests"]["strategy"]["matrix"]["python"]
    promised = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)]
    assert matrix == promised


def test_the_page_on_installing_names_every_extra() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "index.md").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(PROJECT["optional-dependencies"])
