"""The architecture holds: imports point down, rooms import one another by their faces only, folders and functions stay
small enough to be found and read, and nothing heavy is loaded before it is needed."""

import ast
import importlib
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import ROOT

SOURCE = ROOT / "src" / "latfit"

LAYER = {
    "_version": 0, "_face": 0, "errors": 0, "units": 0, "stats": 0, "histogram": 0, "files": 0, "provenance": 0,
    "warning": 0, "dask_cluster": 0, "compiled": 0, "inputs": 0, "memory": 0, "threads": 0,
    "trace": 1, "workload": 1, "metrics": 1,
    "model": 2,
    "policies": 3, "hardware": 3,
    "fitting": 4, "queueing": 4, "simulation": 4, "profiling": 4,
    "planning": 5, "exporting": 5, "live": 5, "record": 5, "validation": 5,
    "reporting": 6,
    "api": 7,
    "cli": 8,
}  # fmt: skip

SIBLINGS = {"fitting", "queueing", "simulation", "profiling"}
"""Rooms of one layer that do not import one another."""

HEAVY = ("numpy", "scipy", "pandas", "matplotlib", "pyarrow", "numba", "statsmodels", "torch", "rich", "jinja2")

MODULES_A_FOLDER = 15
LINES_A_FUNCTION = 60
PARAMETERS = 6


def source_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def module(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(file): file for file in source_files()}


def room(dotted: str) -> str:
    return dotted.split(".")[1] if "." in dotted else "_version"


def imported(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """(module, name, line) of every import of latfit, at any depth; type-checking blocks included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "latfit":
            yield from ((node.module, alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "", node.lineno) for alias in node.names if alias.name.startswith("latfit."))


def of_files(*parts: str) -> pytest.MarkDecorator:
    files = sorted(SOURCE.joinpath(*parts).rglob("*.py"))
    return pytest.mark.parametrize("file", files, ids=lambda file: str(file.relative_to(SOURCE)))


@of_files()
def test_imports_point_down(file: Path) -> None:
    here = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    if here in ("__init__", "__main__"):
        return
    for dotted, name, line in imported(ast.parse(file.read_text())):
        there = room(dotted if dotted != "latfit" else f"latfit.{name}")
        assert LAYER[there] <= LAYER[here], f"{file.name}:{line} imports upwards: {dotted}"
        assert here == there or not {here, there} <= SIBLINGS, f"{file.name}:{line}: sibling {dotted}"


@of_files()
def test_other_rooms_are_imported_by_their_faces(file: Path) -> None:
    here = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    for dotted, name, line in imported(ast.parse(file.read_text())):
        there = dotted.split(".")[1] if "." in dotted else name
        package = f"latfit.{there}"
        if there == here or not (SOURCE / there).is_dir() or here == "__main__":
            continue
        assert dotted == package, f"{file.name}:{line} reaches into {dotted}: import {name} from {package}"
        assert name in importlib.import_module(package).__all__, f"{file.name}:{line}: {name} is not public"


def test_what_a_face_shows_is_there_and_is_asked_for() -> None:
    asked = {(dotted, name) for file in source_files() for dotted, name, _ in imported(ast.parse(file.read_text()))}
    for face in {module(file) for file in SOURCE.glob("*/__init__.py")}:
        package = importlib.import_module(face)
        for name in getattr(package, "__all__", ()):
            shown = getattr(package, name)
            assert shown is not None
            # a module of that name would take the place of what the face shows as soon as it is imported
            if f"{face}.{name}" in MODULES:
                assert getattr(shown, "__name__", "") == f"{face}.{name}", f"{face}.{name} is two things"
    public = {name for dotted, name in asked if dotted.count(".") == 1}
    assert public, "no room imports from a face"


def test_no_module_needs_itself_to_be_imported() -> None:
    needs: dict[str, set[str]] = {}
    for name, file in MODULES.items():
        body = ast.parse(file.read_text()).body
        top: list[ast.stmt] = [node for node in body if isinstance(node, ast.ImportFrom | ast.Import)]
        found = {f"{m}.{n}" if f"{m}.{n}" in MODULES else m for m, n, _ in imported(ast.Module(top, []))}
        needs[name] = {other for other in found if other in MODULES and other != name}
    try:
        list(TopologicalSorter(needs).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_a_folder_can_be_taken_in_at_a_glance() -> None:
    count = Counter(file.parent for file in source_files() if file.name != "__init__.py")
    many = {str(folder.relative_to(SOURCE)): n for folder, n in count.items() if n > MODULES_A_FOLDER}
    assert set(many) <= {"cli"}  # one file a verb


@of_files()
def test_functions_can_be_read(file: Path) -> None:
    here = file.relative_to(SOURCE).parts[0]
    if here == "cli":  # Typer wants every option as a parameter
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # every option of a verb of the library is a keyword, and a line
            options = [each.arg for each in node.args.kwonlyargs] if here == "api" else []
            lines = (node.end_lineno or 0) - node.lineno + 1 - len(options)
            assert lines <= LINES_A_FUNCTION, f"{node.name} has {lines} lines"
            given = [
                *node.args.posonlyargs,
                *node.args.args,
                *(a for a in node.args.kwonlyargs if a.arg not in options),
            ]
            parameters = [each.arg for each in given if each.arg not in ("self", "cls")]
            assert len(parameters) <= PARAMETERS, f"{node.name} has {len(parameters)} parameters"


@of_files("cli")
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


@pytest.mark.parametrize("file", source_files(), ids=module)
def test_processes_of_ours_import_nothing_from_the_current_folder(file: Path) -> None:
    """`-P`: the folder may hold a `json.py` of somebody else."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
            assert ast.unparse(node.elts[1]) == "'-P'", f"{file.name}:{node.lineno}"
