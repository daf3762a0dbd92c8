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


def test_templates_ask_for_what_doctor_says() -> None:
    templates = [each for each in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) if each.stem != "config"]
    assert len(templates) == 3
    for each in templates:
        fields = [field for field in document(each)["body"] if field["id"] == "doctor"]
        assert [field["attributes"]["label"] for field in fields] == ["latfit doctor --json"]


def test_hooks_run_what_is_installed() -> None:
    hooks = document(".pre-commit-config.yaml")["repos"][0]["hooks"]
    assert {hook["id"] for hook in hooks} >= {"ruff-check", "ruff-format", "mypy"}
    assert all(hook["entry"].startswith(".venv/bin/") and hook["language"] == "system" for hook in hooks)


def test_security_tells_the_counts_that_were_measured() -> None:
    told = (ROOT / "SECURITY.md").read_text()
    table = (ROOT / "docs" / "evidence.md").read_text().split("| attack |")[1].split("\n\n")[0]
    rows = [line.split("|") for line in table.splitlines()[2:]]
    files = sum(
        int(row[2].split()[0].replace(",", "")) for row in rows if "mutants" in row[1] and row[4].strip() == "0"
    )
    assert f"{files:,} damaged files" in told
    assert any("`options`, seed 0" in row[1] and row[2].strip() == "1,500 commands" for row in rows)
    assert "1,500 random command lines" in told
    assert any("`kills`" in row[1] and row[2].strip() == "300 kills" for row in rows)
    assert "300 kills" in told


def test_the_page_on_installing_names_every_extra() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "index.md").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(PROJECT["optional-dependencies"])
