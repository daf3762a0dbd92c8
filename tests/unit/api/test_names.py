"""What `import latfit` shows: few names, each loaded when it is used, none of them that of a package."""

import importlib
import subprocess
import sys
from pathlib import Path

import latfit

HEAVY = {
    "numpy",
    "scipy",
    "pandas",
    "matplotlib",
    "pyarrow",
    "numba",
    "statsmodels",
    "rich",
    "typer",
    "jinja2",
    "msgspec",
}


def test_a_verb_outlives_the_import_of_every_package() -> None:
    """Importing a package binds its name in latfit, and would hide a verb of that name."""
    for room in Path(latfit.__file__).parent.iterdir():
        if (room / "__init__.py").exists():
            importlib.import_module(f"latfit.{room.name}")
            assert room.name not in latfit.__all__


def test_import_loads_nothing_heavy() -> None:
    told = subprocess.run(
        [sys.executable, "-c", "import latfit, sys; print(*sorted(m.partition('.')[0] for m in sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not HEAVY & set(told.stdout.split())
