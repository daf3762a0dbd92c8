"""`python -m benchmarks.evidence [--quick] [--only NAME]...`: runs what the figures of the pages rest on and writes
docs/evidence.md: what each printed, when, on what machine, with which versions.

A section that is run again replaces itself alone, so that hours of work can be done in parts. With --quick everything
is small, to see that it runs, and goes to another page (`--out`): its figures are not those to be quoted.
"""

import argparse
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from latfit._version import __version__
from latfit.profiling import inventory
from latfit.provenance import runs_on
from latfit.units import number

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "evidence.md"
QUICK = "small, to see that it runs: no figures to be quoted"
NOT_RUN = "not run in full yet."
INTRO = """\
# Evidence

What the figures of these pages rest on: what each benchmark printed, when, on what machine. `make evidence` runs
them all and writes this page; `python -m benchmarks.evidence --only accuracy` one of them. What each measures is in
[benchmarks](benchmarks.md), what counts as a failure of an attack in [reliability](reliability.md). The machine is a
virtual one with neighbours, so ratios against a peer in the same run count, and absolute times drift.
"""


@dataclass(frozen=True)
class Section:
    """A benchmark of the page: what it answers, its full run and its small one as arguments to Python."""

    name: str
    question: str
    full: tuple[str, ...]
    quick: tuple[str, ...]


def _benchmark(name: str, question: str) -> Section:
    def call(smoke: bool) -> tuple[str, ...]:
        return ("-c", f"import benchmarks.{name} as benchmark; benchmark.main({smoke})")

    return Section(name, question, call(False), call(True))


def _attack(name: str, question: str, full: str, quick: str) -> Section:
    module = ("-m", f"benchmarks.soak.{name}")
    return Section(name, question, (*module, *full.split()), (*module, *quick.split()))


SECTIONS = (
    _benchmark("accuracy", "How far off is a step that the fit has not seen?"),
    _benchmark("loads", "... under another load than the one it was fitted to?"),
    _benchmark("coverage", "Do the intervals of parameters hold the truth as often as they say?"),
    _benchmark("planted", "Is there an answer whatever the data are, and how good is it?"),
    _benchmark("promises", "Are plans' promises kept?"),
    _benchmark("plan_edges", "... where engines are nearly full, and tails heavy?"),
    _benchmark("simulated_intervals", "Do the simulator's intervals hold?"),
    _benchmark("gate", "Which slowdowns does `latfit compare` find, and what does it cry wolf at?"),
    _benchmark("start_up", "How soon is help there?"),
    _benchmark("first_answer", "How soon is a first answer there?"),
    _benchmark("fit_speed", "How fast is a fit beside SciPy?"),
    _benchmark("parse_speed", "How fast is a log read beside a plain loop?"),
    _benchmark("sim_speed", "How fast is the batching simulator?"),
    _benchmark("peer_simulators", "... and the engine's beside its peers?"),
    _benchmark("plan_search", "How fast is a plan for requests?"),
    _benchmark("router_overhead", "What does the live router cost a request?"),
    _benchmark("front_overhead", "... and its front?"),
    _benchmark("learning", "Is a path that became slow found out, and at what price?"),
    _benchmark("validated", "Is a measured serving run met by its simulation?"),
    _benchmark("engine_loop", "Is what was planned what a real server then does?"),
    _attack("mutants", "Damaged files", "--n 3000 --seed 1", "--n 40"),
    _attack("options", "Random command lines", "1500 --seed 0", "10"),
    _attack("kills", "`kill -9` of commands that write", "--n 300", "--n 2"),
    _attack("writers", "Two processes write one file", "--n 100", "--n 5"),
    _attack("exits", "Reading Parquet and exiting", "--n 500", "--n 3"),
    _attack("interrupts", "Ctrl-C", "--n 45", "--n 2"),
    _attack("live", "A live router under faults", "--n 1000000", "--n 20000"),
    _attack("front", "Its front under faults", "--n 100000", "--n 300"),
)


def main(only: list[str], quick: bool, out: Path) -> int:
    """Run the sections that are named, or all; 1 where one of them ended with an error."""
    failed = []
    for section in SECTIONS:
        if only and section.name not in only:
            continue
        print(f"{section.name} ...", flush=True)
        code, text = _run(section, quick)
        _write(out, {**read(out), section.name: text})
        failed += [section.name] if code else []
    print(f"Wrote {out}" + (f"; ended with an error: {', '.join(failed)}" if failed else ""))
    return bool(failed)


def read(page: Path) -> dict[str, str]:
    """What a page holds of each section, below its heading."""
    if not page.exists():
        return {}
    parts = re.split(r"^## .*\n\n`([a-z_]+)`: ", page.read_text(), flags=re.MULTILINE)
    return {name: text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def figures(page: Path, name: str) -> str:
    """What the full run of a section printed; empty where there was none."""
    text = read(page).get(name, "")
    found = re.search(r"```text\n(.*?)```", text, re.DOTALL)
    return found[1] if found and QUICK not in text else ""


def _run(section: Section, quick: bool) -> tuple[int, str]:
    """The exit code, and what stands below the section's heading."""
    command = section.quick if quick else section.full
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    machine = inventory().machine
    told = ((done.stdout.strip() and done.stdout) or done.stderr).strip("\n").rstrip()
    facts = [
        datetime.now(UTC).strftime("%-d %B %Y"),
        f"latfit {__version__} of commit {_commit()}",
        f"{machine['cpu']}, {machine['cores']} cores, {platform.system()}",
        runs_on().partition(";")[0],
        f"{number(seconds, 3)} s, exit code {done.returncode}",
        *([QUICK] if quick else []),
    ]
    return done.returncode, f"{'; '.join(facts)}.\n\n```text\n{told}\n```"


def _commit() -> str:
    told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return told.stdout.strip() or "unknown"


def _write(page: Path, found: dict[str, str]) -> None:
    parts = [f"\n## {each.question}\n\n`{each.name}`: {found.get(each.name, NOT_RUN)}\n" for each in SECTIONS]
    page.write_text(INTRO + "".join(parts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="everything small, onto a page beside the real one")
    parser.add_argument("--only", action="append", default=[], choices=[section.name for section in SECTIONS])
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    page = given.out or (ROOT / "build" / "evidence.md" if given.quick else PAGE)
    page.parent.mkdir(parents=True, exist_ok=True)
    sys.exit(main(given.only, given.quick, page))
