"""Imports point down, packages import one another by their public names only, folders and functions stay small, and the
command line imports nothing heavy at start."""

import ast
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import ROOT

SOURCE = ROOT / "src" / "latfit"

LAYER = {
    "_version": 0, "_face": 0, "errors": 0, "units": 0, "stats": 0, "histogram": 0, "files": 0, "provenance": 0,
    "warning": 0, "dask_cluster": 0, "compiled": 0, "inputs": 0, "memory": 0, "threads": 0, "records": 0,
    "engines": 0, "messages": 0,
    "trace": 1, "workload": 1, "metrics": 1,
    "model": 2,
    "catalogue": 3,
    "policies": 3, "hardware": 3,
    "fitting": 4, "queueing": 4, "simulation": 4, "profiling": 4,
    "planning": 5, "exporting": 5, "live": 5, "record": 5, "validation": 5,
    "tuning": 5,
    "reporting": 6,
    "api": 7,
    "cli": 8,
}  # fmt: skip

SIBLINGS = {"fitting", "queueing", "simulation", "profiling"}
"""Packages of one layer that do not import one another."""

HEAVY = (
    "numpy",
    "scipy",
    "pandas",
    "matplotlib",
    "pyarrow",
    "numba",
    "statsmodels",
    "torch",
    "rich",
    "jinja2",
    "msgspec",
)

MODULES_A_FOLDER = 15


def module(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = sorted(SOURCE.rglob("*.py"))
MODULES = {module(file): file for file in FILES}

AT_MOST = {"lines": 49_240, "modules": 292, "functions and classes": 3_722, "module docstrings over 100 words": 0}

LIGHT_API = ("latfit.api.request", "latfit.api.requests", "latfit.api.quantities")
"""What the command line is made from: these import nothing heavy."""


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def package_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """(module, name, line) of every import of latfit, at any depth; type-checking blocks included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "latfit":
            yield from ((node.module, alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "", node.lineno) for alias in node.names if alias.name.startswith("latfit."))


def test_imports_point_down() -> None:
    wrong = []
    for file in FILES:
        here = package_of(file)
        if here in ("__init__", "__main__"):
            continue
        for dotted, name, line in imported(parsed(file)):
            there = dotted.split(".")[1] if "." in dotted else name if name in LAYER else "_version"
            if LAYER[there] > LAYER[here]:
                wrong.append(f"{file}:{line} imports upwards: {dotted}")
            if here != there and {here, there} <= SIBLINGS:
                wrong.append(f"{file}:{line} imports the sibling {dotted}")
    assert wrong == []


def test_packages_are_imported_by_their_public_names() -> None:
    wrong = []
    for file in FILES:
        here = package_of(file)
        for dotted, name, line in imported(parsed(file)):
            there = dotted.split(".")[1] if "." in dotted else name
            package = f"latfit.{there}"
            if (here, there) == ("cli", "api"):  # commands are made from the requests of the library's verbs
                continue
            if dotted == "latfit" or there == here or not (SOURCE / there).is_dir() or here == "__main__":
                continue
            if dotted != package or name not in importlib.import_module(package).__all__:
                wrong.append(f"{file}:{line} imports {name} from {dotted}: {package} has to export it")
    assert wrong == []


def test_public_names_exist_once() -> None:
    for package in {module(file) for file in SOURCE.glob("*/__init__.py")}:
        public = importlib.import_module(package)
        for name in getattr(public, "__all__", ()):
            shown = getattr(public, name)
            assert shown is not None
            # a module of that name would take the place of what the package exports as soon as it is imported
            if f"{package}.{name}" in MODULES:
                assert getattr(shown, "__name__", "") == f"{package}.{name}", f"{package}.{name} is two things"


def test_names_that_pages_use_are_exported_explicitly() -> None:
    """Strict type checkers ask for `A as A` in a package that is typed."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    text = "\n".join(page.read_text() for page in pages)
    used = re.findall(r"from latfit\.(\w+) import (\([^)]*\)|[^\n]*)", text) + re.findall(r"latfit\.(\w+)\.(\w+)", text)
    wrong = set()
    for package, names in used:
        if (SOURCE / package).is_dir():
            imports = [
                node for node in ast.walk(parsed(SOURCE / package / "__init__.py")) if isinstance(node, ast.ImportFrom)
            ]
            implicit = {alias.name for node in imports for alias in node.names if alias.asname is None}
            wrong |= {f"latfit.{package}.{name}" for name in implicit & set(re.findall(r"\w+", names))}
    assert wrong == set()


def test_no_module_needs_itself_to_be_imported() -> None:
    needs: dict[str, set[str]] = {}
    for name, file in MODULES.items():
        top: list[ast.stmt] = [node for node in parsed(file).body if isinstance(node, ast.ImportFrom | ast.Import)]
        found = {f"{m}.{n}" if f"{m}.{n}" in MODULES else m for m, n, _ in imported(ast.Module(top, []))}
        needs[name] = {other for other in found if other in MODULES and other != name}
    try:
        list(TopologicalSorter(needs).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_folders_stay_small() -> None:
    count = Counter(file.parent for file in FILES if file.name != "__init__.py")
    many = {str(folder.relative_to(SOURCE)): n for folder, n in count.items() if n > MODULES_A_FOLDER}
    assert set(many) <= {"cli", "api", "."}  # one file a verb; what every package uses


def test_the_source_does_not_grow() -> None:
    """A change may lower these figures, and then lowers them here."""
    words = [len((ast.get_docstring(parsed(file)) or "").split()) for file in FILES]
    found = {
        "lines": sum(file.read_text().count("\n") for file in FILES),
        "modules": len(FILES),
        "functions and classes": sum(
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            for file in FILES
            for node in ast.walk(parsed(file))
        ),
        "module docstrings over 100 words": sum(count > 100 for count in words),
    }
    assert {name: value for name, value in found.items() if value > AT_MOST[name]} == {}


def test_the_command_line_imports_nothing_heavy_at_start() -> None:
    light = ("latfit._version", "latfit.errors", "latfit.units", "latfit.cli", *LIGHT_API)
    for file in (SOURCE / "cli").rglob("*.py"):
        for node in parsed(file).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in names:
                assert name.split(".")[0] not in HEAVY, f"{file.name}:{node.lineno} imports {name} at start"
                assert not name.startswith("latfit.") or name.startswith(light), f"{file.name}:{node.lineno}: {name}"


def test_processes_of_ours_import_nothing_from_the_current_folder() -> None:
    """`-P`: the folder may hold a `json.py` of somebody else."""
    wrong = []
    for file in FILES:
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.List) and [ast.unparse(each) for each in node.elts[:1]] == ["sys.executable"]:
                wrong += [f"{file}:{node.lineno}"] if ast.unparse(node.elts[1]) != "'-P'" else []
    assert wrong == []
