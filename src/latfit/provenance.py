"""Provenance of results: version, command, time, seed, libraries."""

import platform
import shlex
import sys
from datetime import UTC, datetime
from typing import Any

from latfit._version import __version__

COMPUTE = ("numpy", "scipy", "pandas", "pyarrow", "numba")  # libraries whose versions may change a number


def command_line() -> str:
    """Return the command as typed, without the program's folder."""
    program = sys.argv[0].rpartition("/")[2]
    return shlex.join(["latfit" if program in ("latfit", "__main__.py") else program, *sys.argv[1:]])


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def runs_on() -> str:
    """Return Python and libraries in one line, without importing the libraries."""
    from importlib.metadata import PackageNotFoundError, version

    found = [f"Python {platform.python_version()}"]
    for library in COMPUTE:
        try:
            found.append(f"{library} {version(library)}")
        except PackageNotFoundError:
            found.append(f"{library} missing")
    return f"{', '.join(found)}; {platform.system()} {platform.release()} {platform.machine()}"


def run_facts(seed: int) -> dict[str, Any]:
    import numpy as np
    import scipy

    return {
        "latfit": __version__,
        "command": command_line(),
        "created": utc_now(),
        "seed": seed,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
    }
