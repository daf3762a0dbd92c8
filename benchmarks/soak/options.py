"""Command lines that nobody would type, through `main`: the exit code is one of the documented ones, no traceback, no
end that waits.

Each command is one of the contracts' with one to four more options, whose values are valid, broken, huge, or not text
at all; it runs in a process of its own (forked, so that nothing is loaded twice) with limits of CPU time and memory.

    python -m benchmarks.soak.options 10000 --seed 0
"""

import argparse
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.contracts.commands import COMMANDS, outputs
from tests.docs.reference import commands

CPU_S = 60
WALL_S = 600
BYTES = 8 << 30
DOCUMENTED = frozenset({0, 2, 3, 4, 5, 6, 7, 8})
VERBS = dict(commands())
SAID_EVERY = 250
HOSTILE = (
    "", " ", "0", "-1", "1", "2", "1e309", "-0.0", "nan", "inf", "9223372036854775808", "-9223372036854775809", "1e18",
    "99999999999999999999999999999999", "0.1", "1e-320", "ms", "-5ms", "0ms", "1e300ms", "20ms", "1e-300ms", "5/s",
    "1e300/s", "0/s", "1e-12/s", "500/h", "%", "150%", "-1%", "a" * 300, "a/" * 200, "/", ".", "..", "/dev/null",
    "/proc/self/mem", "nope.json", "hardware.json", "gpu.fit.json", "gpu.parquet", "two.parquet", "measured.csv", "-",
    "ünïcödé", "数", "\U0001f600", "a\nb", "a\tb", "\x1b[31m", "{hardware}-tp{tp}", "{", "{0}", "%s", "'", '"',
    "B=1,2;S=4,8", "B=;S=", "k=1:2", "tau_0=nan:nan", "tau_0=1e308", "gpu:p50=1ms", "amx=1ms", "x:1:1ms", "=", ":", ",",
    "not " * 3000 + "B = 1", "(" * 3000, "B in (" + "1," * 2000 + "1)", "--sla", "-h", "True", "null", "[]", "1,2,4",
    "auto", "linear", "saturation", "gamma:0", "gamma:1e9", "bursts:1:1:1s", "1:1", "1e9:1", "0:0", "t-cut=1ms,2ms",
    "rate=1/s,2/s", "rate=", "p99=1", "p99=-1", "p=nan",
)  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    error: str
    seconds: float

    @property
    def kind(self) -> str:
        if self.code == -9:
            return "out of time"
        if self.code < 0:
            return f"signal {-self.code}"
        if "Traceback" in self.error:
            return "traceback"
        if "defect of latfit" in self.error:
            return "defect"
        return f"exit {self.code}" if self.code in DOCUMENTED else f"undocumented exit {self.code}"

    @property
    def failed(self) -> bool:
        return not self.kind.startswith("exit")


def command(rng: random.Random) -> list[str]:
    """A random command line."""
    arguments = rng.choice(list(COMMANDS.values())).split()
    verb = next(name for name in (" ".join(arguments[:2]), arguments[0]) if name in VERBS)
    options = [each for each in VERBS[verb].params if each.param_type_name == "option" and each.name != "help"]
    for option in rng.sample(options, rng.randint(1, min(4, len(options)))):
        name = max(option.opts, key=len)
        if option.is_flag:
            arguments.append(name)
        else:
            arguments += [name, rng.choice(("2", "20ms")) if rng.random() < 0.5 else rng.choice(HOSTILE)]
    if rng.random() < 0.1:
        arguments.insert(rng.randrange(len(arguments)), rng.choice(HOSTILE))
    if rng.random() < 0.1:
        del arguments[rng.randrange(len(arguments))]
    return arguments


def ended(arguments: list[str], inputs: Path) -> Ended:
    """One command in a copy of the inputs, in a process of its own."""
    folder = Path(tempfile.mkdtemp(prefix="latfit-soak-"))
    error = folder.with_suffix(".err")
    shutil.copytree(inputs, folder, symlinks=True, dirs_exist_ok=True)
    began = time.monotonic()
    try:
        child = os.fork()
        if child == 0:
            _run(arguments, folder, error)
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            if time.monotonic() - began > WALL_S:
                os.kill(child, 9)
            time.sleep(0.005)
        code = os.waitstatus_to_exitcode(status)
        return Ended(code, error.read_text(errors="replace"), time.monotonic() - began)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        error.unlink(missing_ok=True)


def _run(arguments: list[str], folder: Path, error: Path) -> None:
    """In the child: never returns."""
    code = 99
    try:
        os.chdir(folder)
        nowhere = os.open(os.devnull, os.O_RDWR)
        told = os.open(error, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream, target in ((0, nowhere), (1, nowhere), (2, told)):
            os.dup2(target, stream)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.argv = ["latfit", *arguments]
        from latfit.__main__ import main

        main()
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    except BaseException:  # noqa: BLE001  what got through is what is looked for
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Run so many commands, print the count of each outcome, and exit with 1 where one failed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("count", type=int, nargs="?", default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    inputs = Path(tempfile.mkdtemp(prefix="latfit-inputs-"))
    outputs(inputs)  # writes what commands read; what is loaded and compiled here is there in every child
    shutil.rmtree(inputs / "pages")
    rng = random.Random(asked.seed)
    lines = [command(rng) for _ in range(asked.count)]
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(asked.workers) as pool:
        for line, found in zip(lines, pool.map(lambda each: ended(each, inputs), lines), strict=True):
            if counts and counts.total() % SAID_EVERY == 0:
                print(f"{counts.total():,} of {len(lines):,} commands: {_told(counts)}", flush=True)
            counts[found.kind] += 1
            if found.failed:
                shown = " ".join(repr(each[:60]) if not each.isprintable() or not each else each[:60] for each in line)
                print(
                    f"{found.kind} ({found.seconds:.0f} s): latfit {shown}\n    {found.error.strip()[-300:]}",
                    flush=True,
                )
    shutil.rmtree(inputs, ignore_errors=True)
    print(f"{asked.count:,} commands: {_told(counts)}")
    sys.exit(any(not kind.startswith("exit") for kind in counts))


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{n:,} {kind}" for kind, n in sorted(counts.items()))


if __name__ == "__main__":
    main()
