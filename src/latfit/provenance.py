"""What every result remembers of the run that made it."""

import platform
import shlex
import sys
from datetime import UTC, datetime
from typing import Any

from latfit._version import __version__


def command_line() -> str:
    """The command as typed, with the program by its name instead of its place on disk."""
    program = sys.argv[0].rpartition("/")[2]
    return shlex.join(["latfit" if program in ("latfit", "__main__.py") else program, *sys.argv[1:]])


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def run_facts(seed: int) -> dict[str, Any]:
    """Version, command, time, seed and the libraries that decide the numbers."""
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
