"""The architecture holds: imports point down only, those inside functions too; exports and docs match the code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

SOURCE = ROOT / "src" / "latfit"

LAYER = {
    "errors": 0, "units": 0, "stats": 0, "pooled": 0, "files": 0, "provenance": 0, "_version": 0,
    "trace": 1, "workload": 1,
    "model": 2,
    "scheduling": 3, "hardware": 3,
    "fit": 4, "queueing": 4, "sim": 4, "profiler": 4,
    "plan": 5, "record": 5, "export": 5, "live": 5, "validation": 5,
    "report": 6,
    "cli": 7,
}  # fmt: skip

SIBLINGS = {
    ("fit", "queueing"),
    ("fit", "sim"),
    ("fit", "profiler"),
    ("queueing", "sim"),
    ("queueing", "profiler"),
    ("sim", "profiler"),
}

HEAVY = ("numpy", "scipy", "pandas", "matplotlib", "pyarrow", "numba", "statsmodels", "torch", "rich", "jinja2")


def imports(file: Path) -> Iterator[tuple[str, int]]:
    """(dotted module, line) of every import of latfit in a file, at any depth; type-checking blocks included."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "latfit":
            if node.module == "latfit":
                yield from ((f"latfit.{alias.name}", node.lineno) for alias in node.names)
            yield node.module, node.lineno
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name.startswith("latfit."))


def room(dotted: str) -> str:
    return dotted.split(".")[1] if "." in dotted else "_version"


def source_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("file", source_files(), ids=lambda f: str(f.relative_to(SOURCE)))
def test_imports_point_down(file: Path) -> None:
    here = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    if here in ("__init__", "__main__"):
        return
    for dotted, line in imports(file):
        there = room(dotted)
        assert LAYER[there] <= LAYER[here], f"{file.name}:{line} imports upwards: {dotted}"
        pair = tuple(sorted((here, there)))
        assert here == there or pair not in {tuple(sorted(p)) for p in SIBLINGS}, (
            f"{file.name}:{line}: sibling {dotted}"
        )


@pytest.mark.parametrize("file", sorted((SOURCE / "cli").glob("*.py")), ids=lambda f: f.name)
def test_the_command_line_imports_nothing_heavy_at_start(file: Path) -> None:
    for node in ast.parse(file.read_text()).body:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            assert name.split(".")[0] not in HEAVY, f"{file.name}:{node.lineno} imports {name} at start"
            light = ("latfit._version", "latfit.errors", "latfit.units", "latfit.cli")
            assert not name.startswith("latfit.") or name.startswith(light), f"{file.name}:{node.lineno}: {name}"


def test_exports_exist() -> None:
    import importlib

    for file in SOURCE.rglob("__init__.py"):
        package = importlib.import_module(".".join(("latfit", *file.parent.relative_to(SOURCE).parts)))
        for name in getattr(package, "__all__", []):
            assert hasattr(package, name)


def test_no_file_has_outgrown_one_idea() -> None:
    assert [f.name for f in source_files() if len(f.read_text().splitlines()) > 400] == []
