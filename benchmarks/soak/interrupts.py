"""Ctrl-C in commands that work on several cores, at random moments: each ends at once with exit code 130, in silence or
with a sentence, leaves no process of its own behind and no file that is cut short.

`python -m benchmarks.soak.interrupts --n 100`. As at a terminal, the signal goes to the process group of the command.
Its processes are known by a variable of their environment. Linux alone: they are looked for in /proc.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.soak.kills import LATFIT, losses_in, started
from latfit.files import TEMPORARY
from latfit.trace import Trace, write_trace

PATHS = "--nominal gpu:launch=8ms,slope=0.05ms --nominal amx:p50=2ms"
COMMANDS = {
    "fit --each": "fit many.parquet --each --path {model}",
    "compare --each": "compare many.parquet many.parquet --each",
    "fit --bootstrap": "fit one.parquet --model saturation --bootstrap 100000",
    "simulate --sweep": f"simulate policies {PATHS} --policy three-stage --policy cutoff --requests 200000"
    " --sweep rate=100/s,200/s,300/s;t-cut=1ms,2ms,3ms,4ms --out sweep.parquet",
    "simulate policies": f"simulate policies {PATHS} --policy three-stage --rate 300/s --precision 0.0005",
    "simulate engine": "simulate engine --fit fitted.fit.json --kv-blocks 5000 --rate 20/s --lengths 256:64"
    " --requests 20000 --replications 8",
    "plan": "plan --hardware one.json --sla 200ms --rate 50/s",
    "ingest": "ingest long.csv --out ingested.parquet",
    "ingest --cells": "ingest long.parquet --cells --out cells.parquet",
}
SLOW_S = 2.0
"""Time to end, beyond which a command did not end at once. An import that is under way is waited for."""
LONGEST_S = 60.0
SAID_EVERY = 20
MARK = "LATFIT_SOAK"
INTERRUPTED = (130, -signal.SIGINT)
"""A process that a signal ended is 130 to a shell too; Python ends so where code in a string was interrupted."""
START_S = 0.15
"""Until then Python starts, which shows a traceback of its own."""


@dataclass(frozen=True)
class Stopped:
    """How a command ended: exit code, seconds after the signal (0 where it had ended before), and what is wrong."""

    code: int
    took_s: float
    wrong: tuple[str, ...]


def prepare(place: Path) -> None:
    """Steps of 40 systems, those of one, its fit and a long table."""
    rng = np.random.default_rng(0)
    for name, systems, each in (("many", 40, 80), ("one", 1, 400)):
        number = np.repeat(np.arange(systems), each)
        B = rng.integers(1, 65, len(number)).astype(np.float64)
        S = np.where(rng.random(len(B)) < 0.5, B, B + rng.integers(0, 2000, len(B)))
        T = (1 + number % 5) * (3 + 0.05 * B + 0.02 * S) * rng.lognormal(0, 0.03, len(B))
        write_trace(place / f"{name}.parquet", Trace({"B": B, "S": S, "T_ms": T, "model": number.astype(str)}))
    columns = {"B": B, "S": S, "T_ms": T}
    rows = "".join(f"{b:g},{s:g},{t:.4f}\n" for b, s, t in zip(B, S, T, strict=True))
    (place / "long.csv").write_text("B,S,T_ms\n" + rows * 6000)
    write_trace(place / "long.parquet", Trace({name: np.tile(column, 6000) for name, column in columns.items()}))
    fitted = "fit one.parquet --model saturation --out fitted.fit.json --hardware one.json --path gpu --force"
    subprocess.run([LATFIT, *fitted.split()], cwd=place, check=True, capture_output=True)


def marked(place: Path, command: str, mark: str) -> subprocess.Popen[bytes]:
    """A command in a process group of its own, with a mark in its environment."""
    return started(place, command, env={MARK: mark}, start_new_session=True, preexec_fn=_as_at_a_terminal)


def stopped(place: Path, name: str, wait_s: float) -> Stopped:
    """Run a command and press Ctrl-C after a time."""
    mark = str(uuid.uuid4())
    process = marked(place, COMMANDS[name], mark)
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
    pressed = time.monotonic()
    try:
        _, told = process.communicate(timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        process.kill()
        _, told = process.communicate()
    took_s = time.monotonic() - pressed
    return Stopped(process.returncode, took_s, tuple(_wrong(place, process.returncode, took_s, told.decode(), mark)))


def _as_at_a_terminal() -> None:
    """A job in the background ignores Ctrl-C and hands that down."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _wrong(place: Path, code: int, took_s: float, told: str, mark: str) -> list[str]:
    found = []
    if code not in (0, *INTERRUPTED):
        found.append(f"exit code {code}: {told[-300:]}")
    if took_s > SLOW_S:
        found.append(f"ended {took_s:.1f} s after")
    if "Traceback" in told or "Error" in told:
        found.append(told[-600:])
    left = processes_of(mark)
    if left:
        found.append(f"{len(left)} processes left")
        for number in left:
            os.kill(number, signal.SIGKILL)
    found += losses_in(file for file in place.rglob("*") if file.name != "sweep.parquet")
    return found + [f"{file.name} is left" for file in place.rglob("*".join(TEMPORARY))]


def processes_of(mark: str) -> list[int]:
    """Numbers of the processes that have the mark in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
        except OSError:  # it has ended, or is not ours
            continue
    return found


def main(n: int, seed: int = 0) -> int:
    """Number of commands that did not end as they should; what came is printed."""
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    slowest = dict.fromkeys(COMMANDS, 0.0)
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        prepare(place)
        names = list(COMMANDS)
        for i in range(n):
            if i and i % SAID_EVERY == 0:
                print(f"{i} of {n}: {len(failures)} failures", flush=True)
            name, wait_s = names[i % len(names)], START_S + rng.uniform(0.0, 1.0) * rng.choice((0.5, 4.0, 8.0))
            found = stopped(place, name, wait_s)
            outcomes[f"{name}: exit {found.code}"] += 1
            slowest[name] = max(slowest[name], found.took_s)
            failures += [f"{name} after {wait_s:.2f} s: {each}" for each in found.wrong]
            if found.wrong:
                print(failures[-1], flush=True)
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:5d}  {outcome}")
    print(f"{n} interrupts: {len(failures)} failures; the slowest end by command:")
    for name, took_s in slowest.items():
        print(f"  {name}: {took_s:.2f} s")
    return len(failures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=100, help="commands")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.exit(main(given.n, given.seed) > 0)
