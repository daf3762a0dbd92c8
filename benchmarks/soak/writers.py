"""Two processes enter paths into one hardware profile at once: none may be lost.

`python -m benchmarks.soak.writers --n 100`: one writer uses the library, the other the command line; a reader looks at
the file all the while. Before writers took turns, 113 of 200 paths were kept.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from latfit.api import Hardware
from latfit.cli.app import run
from latfit.hardware import HardwareProfile

NUMBERS = "launch=1ms,slope=0.02ms"


def by_library(file: Path, n: int) -> None:
    for i in range(n):
        known = Hardware(file) if file.exists() else Hardware()
        known.add(f"library{i}", nominal=NUMBERS).save(file)


def by_command(file: Path, n: int) -> None:
    for i in range(n):
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            code = run(["hardware", "add", f"command{i}", "--nominal", NUMBERS, "--hardware", str(file)])
        if code:
            raise SystemExit(code)


def looked_at(file: Path, over: Event, counts: Any) -> None:
    """Read the file until it is over: counts[0] whole profiles, counts[1] others, or fewer paths than before."""
    seen = 0
    while not over.is_set():
        if file.exists():
            try:
                paths = len(HardwareProfile.read(file).paths)
            except Exception as error:  # noqa: BLE001  whatever a reader meets is counted
                print(f"a reader met {error!r}")
                paths = -1
            counts[0 if paths >= seen else 1] += 1
            seen = max(seen, paths)
        time.sleep(0.001)


def main(n: int) -> int:
    """Number of losses, which are printed."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "hardware.json"
        over, counts = context.Event(), context.Array("i", 2)
        reader = context.Process(target=looked_at, args=(file, over, counts))
        writers = [context.Process(target=each, args=(file, n)) for each in (by_library, by_command)]
        for process in (reader, *writers):
            process.start()
        for process in writers:
            process.join()
        over.set()
        reader.join()
        kept = len(HardwareProfile.read(file).paths)
        left = sorted(each.name for each in file.parent.iterdir() if each != file)
    failed = sum(process.exitcode != 0 for process in (reader, *writers))
    print(f"Two writers of {n} paths each: {kept} of {2 * n} kept; {failed} processes failed.")
    print(f"A reader beside them: {counts[0]:,} whole profiles, {counts[1]} broken or with a path gone.")
    print(f"Files left beside it: {', '.join(left) or 'none'}.")
    broken: int = counts[1]
    return 2 * n - kept + failed + broken + len(left)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=100, help="paths of each writer")
    sys.exit(main(parser.parse_args().n) > 0)
