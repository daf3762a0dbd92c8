"""`python -m benchmarks.evidence [--quick] [--only NAME]...`: run what the figures of the pages rest on.

Each benchmark's output goes to docs/evidence/NAME.txt, with date, machine and versions in its first lines;
the last table of docs/evidence.md lists them. With --quick everything is small, to see that it runs, and goes to
another folder.
"""

import argparse
import platform
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
DOCS = ROOT / "docs"
QUICK = "small, to see that it runs: no figures to be quoted"
RUNS = """\
## Runs

| question | output | when, by which version |
|---|---|---|
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
    _benchmark("accuracy", "How accurate is a fit on held-out steps?"),
    _benchmark("loads", "And on another load?"),
    _benchmark("coverage", "Do intervals of parameters cover the truth?"),
    _benchmark("planted", "How good is a fit of difficult data?"),
    _benchmark("promises", "Are plans' promises kept?"),
    _benchmark("simulated_intervals", "Do the simulator's intervals cover the truth?"),
    _benchmark("gate", "Which slowdowns does `latfit compare` find, with how many false alarms?"),
    _benchmark("start_up", "How long does `--help` take?"),
    _benchmark("first_answer", "How long does the first answer take?"),
    _benchmark("fit_speed", "How fast is a fit, compared with SciPy?"),
    _benchmark("sim_speed", "How fast is the batching simulator?"),
    _benchmark("peer_simulators", "How fast is the engine simulator, compared with its peers?"),
    _benchmark("plan_search", "How fast is a plan for requests?"),
    _benchmark("router_overhead", "What does the live router cost per request?"),
    _benchmark("front_overhead", "What does `latfit serve` cost per request?"),
    _benchmark("learning", "How soon is a slower path detected?"),
    _benchmark("ledger", "What was promised of measured serving runs, and what was measured?"),
    _benchmark("tune_sweep", "How good are tuned settings, compared with a sweep and the defaults?"),
    _benchmark("validated", "Does a simulation reproduce a measured serving run?"),
    _benchmark("engine_loop", "Does a real server do what was planned?"),
    _attack("mutants", "Damaged files", "--n 3000 --seed 1", "--n 40"),
    _attack("options", "Random command lines", "1500 --seed 0", "10"),
    _attack("kills", "`kill -9` of commands that write", "--n 300", "--n 2"),
    _attack("writers", "Two processes write one file", "--n 100", "--n 5"),
    _attack("exits", "Reading Parquet and exiting", "--n 500", "--n 3"),
    _attack("interrupts", "Ctrl-C", "--n 45", "--n 2"),
    _attack("live", "A live router under faults", "--n 1000000", "--n 20000"),
    _attack("front", "`latfit serve` under faults", "--n 100000", "--n 300"),
)


def main(only: list[str], quick: bool, out: Path) -> int:
    """Run the sections that are named, or all; return 1 if one of them ended with an error."""
    folder, failed = out / "evidence", []
    folder.mkdir(parents=True, exist_ok=True)
    for section in SECTIONS:
        if only and section.name not in only:
            continue
        print(f"{section.name} ...", flush=True)
        code, text = _run(section, quick)
        (folder / f"{section.name}.txt").write_text(text)
        failed += [section.name] if code else []
    page = out / "evidence.md"
    above = page.read_text().partition(RUNS.splitlines()[0])[0] if page.exists() else ""
    page.write_text(above + RUNS + "".join(_row(section, folder) for section in SECTIONS))
    print(f"Wrote {page}" + (f"; ended with an error: {', '.join(failed)}" if failed else ""))
    return bool(failed)


def read(docs: Path, name: str) -> tuple[str, str]:
    """Return what a run of a section was, in a line, and what it printed; two empty texts if it was never run."""
    file = docs / "evidence" / f"{name}.txt"
    facts, _, printed = file.read_text().partition("\n\n") if file.exists() else ("", "", "")
    return facts, printed


def figures(docs: Path, name: str) -> str:
    """Return what the full run of a section printed; empty if there was none."""
    facts, printed = read(docs, name)
    return "" if QUICK in facts else printed


def _run(section: Section, quick: bool) -> tuple[int, str]:
    """Return the exit code, and the text of the section's file."""
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
    return done.returncode, f"{'; '.join(facts)}.\n\n{told}\n"


def _commit() -> str:
    told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return told.stdout.strip() or "unknown"


def _row(section: Section, folder: Path) -> str:
    facts, _ = read(folder.parent, section.name)
    when = "; ".join(facts.split("; ")[:2]) or "not run in full yet"
    output = f"[{section.name}](evidence/{section.name}.txt)" if facts else section.name
    return f"| {section.question} | {output} | {when} |\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="everything small, onto a page beside the real one")
    parser.add_argument("--only", action="append", default=[], choices=[section.name for section in SECTIONS])
    parser.add_argument("--out", type=Path, default=None, help="folder in place of docs")
    given = parser.parse_args()
    sys.exit(main(given.only, given.quick, given.out or (ROOT / "build" if given.quick else DOCS)))
