"""The cache of compiled code: where it goes, what it notices, what it survives.

Programs of a few lines run in processes of their own, on a package of two modules that is compiled by a copy of
`latfit.compiled`.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import latfit

SOURCES = Path(latfit.__file__).parent
ASK = "import latfit.outer as o; print(o.outer(1.0))"
OUTER = """
from latfit.compiled import compiled
from latfit.inlined import FACTOR, inlined

@compiled
def outer(x):
    return FACTOR * inlined(x)
"""
INLINED = """
from latfit.compiled import inner

FACTOR = 10.0

@inner
def inlined(x):
    return x + 1.0
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a package latfit of `compiled`, what it imports, and two modules."""
    package = tmp_path / "src" / "latfit"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copy(SOURCES / "errors.py", package)
    text = (SOURCES / "compiled.py").read_text()
    text, replaced = re.subn(r"(?m)^MODULES = .*$", 'MODULES = ("compiled.py", "outer.py", "inlined.py")', text)
    assert replaced == 1
    (package / "compiled.py").write_text(text)
    (package / "outer.py").write_text(OUTER)
    (package / "inlined.py").write_text(INLINED)
    return package


def ask(package: Path, **environment: str) -> tuple[float, str]:
    """(outer(1), what was said on stderr)."""
    own = {key: value for key, value in os.environ.items() if key not in ("HOME", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    done = subprocess.run(
        [sys.executable, "-B", "-c", ASK],
        env={**own, "PYTHONPATH": str(package.parent), **environment},
        cwd=package.parent,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    return float(done.stdout), done.stderr


def no_folder_of_its_own(package: Path) -> None:
    """As in an installation that belongs to root."""
    (package / "__pycache__").write_text("a file")


def test_compiled_once_and_said_so(package: Path, tmp_path: Path) -> None:
    home = str(tmp_path / "home")
    first, second = ask(package, XDG_CACHE_HOME=home), ask(package, XDG_CACHE_HOME=home)
    assert first[0] == second[0] == 20.0
    assert "once for this machine" in first[1]
    assert second[1] == ""
    assert not Path(home).exists()


@pytest.mark.parametrize(
    ("module", "before", "after", "expected"),
    [
        ("inlined", "x + 1.0", "x + 2.0", 30.0),
        pytest.param("inlined", "10.0", "20.0", 40.0, marks=pytest.mark.nightly),
        pytest.param("outer", "FACTOR *", "1 +", 3.0, marks=pytest.mark.nightly),
    ],
)
def test_a_change_in_any_module_is_noticed(
    package: Path, module: str, before: str, after: str, expected: float
) -> None:
    ask(package, XDG_CACHE_HOME="/dev/null")
    source = package / f"{module}.py"
    source.write_text(source.read_text().replace(before, after))
    value, said = ask(package, XDG_CACHE_HOME="/dev/null")
    assert value == expected
    assert "Compiling" in said


def test_a_package_that_cannot_be_written_uses_the_users_cache(package: Path, tmp_path: Path) -> None:
    no_folder_of_its_own(package)
    home = tmp_path / "home"
    assert "once" in ask(package, XDG_CACHE_HOME=str(home))[1]
    assert list((home / "latfit").rglob("*.nbc"))
    assert ask(package, XDG_CACHE_HOME=str(home)) == (20.0, "")


@pytest.mark.nightly
def test_no_folder_at_all_is_no_failure(package: Path) -> None:
    no_folder_of_its_own(package)
    for environment in ({"XDG_CACHE_HOME": "/dev/null"}, {"HOME": "/dev/null"}):
        value, said = ask(package, **environment)
        assert value == 20.0
        assert "XDG_CACHE_HOME" in said


@pytest.mark.nightly
def test_files_that_were_cut_off_are_written_anew(package: Path) -> None:
    ask(package, XDG_CACHE_HOME="/dev/null")
    for path in (package / "__pycache__").rglob("*.nb?"):
        path.write_bytes(path.read_bytes()[:20])
    assert "once" in ask(package, XDG_CACHE_HOME="/dev/null")[1]
    assert ask(package, XDG_CACHE_HOME="/dev/null") == (20.0, "")


def test_every_module_that_takes_part_is_known() -> None:
    from latfit.compiled import MODULES

    hashed = {file for pattern in MODULES for file in SOURCES.glob(pattern)}
    assert {file for file in SOURCES.rglob("*.py") if "from latfit.compiled import" in file.read_text()} <= hashed
