"""`kill -9` of commands that write, at random moments: every file is whole afterwards, the old one or the new.

`python -m benchmarks.soak.kills --n 300`. A third of the kills come at a moment drawn evenly over the run of a command,
the others a little after one of its temporary files appears, which is where writing can be caught. After each, every
file that was there is there and can be read, the hardware profile holds every path it held, and a profile that was cut
off goes on with --resume. In the end the temporaries that the kills left are removed by the next command that writes.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import numpy as np

from latfit.files import TEMPORARY
from latfit.hardware import HardwareProfile
from latfit.model import FitResult
from latfit.trace.parquet import read_parquet

PROFILE = "profile --device numpy --grid B=1,2;S=1,4 --budget 1s --precision 0.001 --processes 1 --out profiled.parquet"
COMMANDS = {
    "fit": "fit steps.csv --model linear --out steps.fit.json",
    "hardware add": "hardware add new{i} --nominal launch=1ms,slope=0.02ms",
    "hardware remove": "hardware remove gone",
    "ingest": "ingest steps.csv --out ingested.parquet",
    "profile": PROFILE,
    "report": "report --out pages",
}
LATFIT = str(Path(sys.executable).with_name("latfit"))
EVENLY = 1 / 3
SAID_EVERY = 25
AFTER_S = 0.005
"""Longest time from a temporary file to the kill."""


@dataclass(frozen=True)
class Killed:
    """What became of a command: whether it ended before the kill, and what a check found lost."""

    ended: bool
    changed: bool
    losses: tuple[str, ...]


def started(place: Path, command: str, **more: Any) -> subprocess.Popen[bytes]:
    """A command at work in a folder. more: as subprocess takes them."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **more.pop("env", {})}
    return subprocess.Popen([LATFIT, *command.split()], cwd=place, stdout=DEVNULL, stderr=PIPE, env=environment, **more)


def losses_in(files: Iterable[Path]) -> list[str]:
    """What is wrong with files of latfit's."""
    found = []
    for file in files:
        check = next((check for ending, check in CHECKS.items() if file.name.endswith(ending)), None)
        try:
            if check:
                check(file)
        except Exception as error:  # noqa: BLE001  whatever is wrong with a file is a loss
            found.append(f"{file.name}: {error}")
    return found


class Folder:
    """A folder with results of every command."""

    def __init__(self, place: Path) -> None:
        self.place = place
        rng = np.random.default_rng(0)
        B = rng.integers(1, 65, 300)
        T = (4 + 0.05 * B) * rng.lognormal(0, 0.02, 300)
        rows = "".join(f"{b},{b},{t:.4f}\n" for b, t in zip(B, T, strict=True))
        (place / "steps.csv").write_text(f"B,S,T_ms\n{rows}")
        self.took_s = {}
        for name in ("fit", "hardware add", "ingest", "profile", "report"):
            began = time.monotonic()
            self.finish(COMMANDS[name].format(i=""))
            self.took_s[name] = time.monotonic() - began
        self.took_s["hardware remove"] = self.took_s["hardware add"]

    def finish(self, command: str) -> str:
        """What is wrong with a command that nobody kills; empty where nothing is."""
        process = started(self.place, command)
        _, told = process.communicate()
        return f"{command}: exit {process.returncode}: {told.decode()[:300]}" if process.returncode else ""

    def files(self) -> dict[Path, str]:
        """Digest by file, without those that are no results."""
        found = {}
        for file in self.place.rglob("*"):
            if file.is_file() and not file.name.startswith(".latfit") and not file.name.endswith(".journal"):
                found[file] = sha256(file.read_bytes()).hexdigest()
        return found

    def temporaries(self) -> list[Path]:
        return list(self.place.rglob("*".join(TEMPORARY)))


CHECKS: dict[str, Callable[[Path], object]] = {
    ".fit.json": FitResult.read,
    "hardware.json": HardwareProfile.read,
    ".parquet": read_parquet,
    ".json": lambda file: json.loads(file.read_text()),
    ".html": lambda file: _ends_with(file, b"</html>\n"),
    ".png": lambda file: _ends_with(file, b"IEND\xaeB`\x82"),
    ".svg": lambda file: _ends_with(file, b"</svg>\n"),
}


def _ends_with(file: Path, end: bytes) -> None:
    if not file.read_bytes().strip().endswith(end.strip()):
        raise ValueError("is cut short")


def kill(folder: Folder, name: str, i: int, rng: random.Random) -> Killed:
    """Run a command and kill it; what was lost."""
    if name == "hardware remove":
        folder.finish("hardware add gone --nominal p50=2ms")
    before, paths = folder.files(), set(HardwareProfile.read(folder.place / "hardware.json").paths)
    process = started(folder.place, COMMANDS[name].format(i=i))
    _wait_for_the_moment(folder, process, folder.took_s[name], rng)
    ended = process.poll() is not None
    if not ended:
        process.send_signal(signal.SIGKILL)
    process.communicate()
    after = folder.files()
    losses = [f"{file.name} is gone" for file in before.keys() - after.keys()]
    losses += losses_in(after)
    gone = paths - set(HardwareProfile.read(folder.place / "hardware.json").paths) - {"gone"}
    losses += [f"path {path} is gone" for path in gone]
    if (folder.place / "profiled.parquet.journal").exists():
        told = folder.finish(f"{PROFILE} --resume")
        losses += [told] if told else []
    return Killed(ended, after != before, tuple(losses))


def _wait_for_the_moment(folder: Folder, process: "subprocess.Popen[bytes]", took_s: float, rng: random.Random) -> None:
    begun = time.monotonic()
    if rng.random() < EVENLY:
        moment_s = rng.uniform(0, 1.1 * took_s)
        while process.poll() is None and time.monotonic() - begun < moment_s:
            time.sleep(0.001)
        return
    known = set(folder.temporaries())
    which = rng.randint(1, 3)
    while process.poll() is None and which:
        now = set(folder.temporaries())
        which -= bool(now - known)
        known |= now
        time.sleep(0.001)
    time.sleep(rng.uniform(0, AFTER_S))


def main(n: int, seed: int = 0) -> int:
    """Number of losses, which are printed."""
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    losses: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Folder(Path(place))
        for i in range(n):
            if i and i % SAID_EVERY == 0:
                print(f"{i} of {n} kills: {len(losses)} losses", flush=True)
            name = rng.choice(list(COMMANDS))
            found = kill(folder, name, i, rng)
            losses += [f"{name}: {loss}" for loss in found.losses]
            when = "ended before the kill" if found.ended else "killed"
            outcomes[f"{name}: {when}, {'new' if found.changed else 'old'} content"] += 1
        left = folder.temporaries()
        for command in (COMMANDS["fit"], COMMANDS["report"]):
            losses += [told] if (told := folder.finish(command)) else []
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:5d}  {outcome}")
    print(f"{n} kills: {len(losses)} losses; {len(left)} temporaries left.")
    for loss in losses:
        print(f"  {loss}")
    return len(losses)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=300, help="kills")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.exit(main(given.n, given.seed) > 0)
