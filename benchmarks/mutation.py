"""Which mutants of the source do the tests kill? A sample drawn by a seed, made by cosmic-ray's operators.

    pip install cosmic-ray
    pytest -n auto --cov --cov-context=test --cov-branch --junitxml=times.xml
    python -m benchmarks.mutation --times times.xml --n 300 --seed 0 --out mutants.jsonl

Each mutant meets the tests that reach its line, as coverage recorded, the fastest first, until one fails or `--seconds`
of tests have passed: the share killed is a lower bound. Coverage sees no line of what numba compiles, so modules with
compiled functions have mutants in the lines that tests reach alone; compiled code is taken from the checkout's cache.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
SOURCE = Path("src", "latfit")
CACHE = SOURCE / "__pycache__" / "compiled"  # what numba compiled
PACKAGES = ("model", "fitting", "queueing", "policies", "simulation/engine", "planning", "trace")
PYTEST = (sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-p", "no:randomly")
TIMEOUT = 8  # a mutant counts as killed after this many times the recorded time of its tests, and a minute


class Mutant(NamedTuple):
    """One change of the source: where, by which operator of cosmic-ray, and which of its occurrences in the file."""

    file: str
    line: int
    operator: str
    occurrence: int

    @property
    def package(self) -> str:
        return next(each for each in PACKAGES if self.file.startswith(f"{SOURCE / each}/"))


class Reach:
    """Tests that reach a line, fastest first.

    Parameters
    ----------
    coverage
        Coverage's data file, with one context per test.
    times
        JUnit XML of the same run.
    """

    def __init__(self, coverage: Path, times: Path) -> None:
        from coverage import CoverageData

        self.data = CoverageData(str(coverage))
        self.data.read()
        self.seconds: dict[str, float] = {}
        for case in ElementTree.parse(times).iter("testcase"):
            name = f"{case.get('classname', '')}.{case.get('name', '')}"
            self.seconds[name] = float(case.get("time", 0))

    def by_line(self, mutant: Mutant, whole: bool = False) -> set[str]:
        """Tests that run the mutant's line, or any of its file."""
        lines = self.lines(mutant.file)
        reached = lines.values() if whole else [lines.get(mutant.line, [])]
        return {each.split("|")[0] for contexts in reached for each in contexts} - {""}

    @cache  # noqa: B019  one object, one run
    def lines(self, file: str) -> dict[int, list[str]]:
        return self.data.contexts_by_lineno(str(ROOT / file))

    def tests(self, mutant: Mutant, budget_s: float) -> tuple[list[str], float]:
        """Tests that run the mutant's line within a budget; those of its file for a line run at import."""
        found = self.by_line(mutant) or self.by_line(mutant, whole=True)
        chosen, total = list[str](), 0.0
        for test in sorted(found, key=lambda each: (self.time_of(each), each)):
            total += self.time_of(test)
            if total > budget_s and chosen:
                return chosen, total - self.time_of(test)
            chosen.append(test)
        return chosen, total

    def time_of(self, test: str) -> float:
        path, _, name = test.partition("::")
        return self.seconds.get(f"{path.removesuffix('.py').replace('/', '.')}.{name.replace('::', '.')}", 1.0)


def mutants_of(file: Path) -> list[list[Mutant]]:
    """Mutants of a module, position by position; without those of `|`, which stands in annotations of types, and of
    the exceptions of `except`, at which cosmic-ray fails where there are several."""
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.plugins import get_operator, operator_names

    nodes = list(ast_nodes(get_ast_from_path(file)))
    found: dict[tuple[int, int], list[Mutant]] = defaultdict(list)
    for name in operator_names():
        operator = get_operator(name)
        if operator.arguments() or "BitOr" in name or "Exception" in name:
            continue
        positions = (begin for node in nodes for begin, _ in operator().mutation_positions(node))
        for occurrence, begin in enumerate(positions):
            found[begin].append(Mutant(str(file.relative_to(ROOT)), begin[0], name, occurrence))
    return list(found.values())


def draw(count: int, seed: int, reach: Reach) -> list[Mutant]:
    """A random position of the source, then a random operator there, `count` times."""
    from latfit.compiled import MODULES

    compiled = {file for pattern in MODULES for file in (ROOT / SOURCE).glob(pattern)}
    files = sorted(file for each in PACKAGES for file in (ROOT / SOURCE / each).rglob("*.py"))
    positions = [each for file in files for each in mutants_of(file) if file not in compiled or reach.by_line(each[0])]
    rng = random.Random(seed)
    return [rng.choice(each) for each in rng.sample(positions, min(count, len(positions)))]


def killer(mutant: Mutant, copy: Path, reach: Reach, budget_s: float) -> str | None:
    """The first test that fails with the mutant in a copy of the checkout; None if all pass."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    tests, seconds = reach.tests(mutant, budget_s)
    if not tests:
        return None
    file = copy / mutant.file
    source = file.read_text()
    file.write_text(str(mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence)))
    try:
        return first_failure(tests, copy, 60 + TIMEOUT * seconds)
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        file.write_text(source)


def first_failure(tests: list[str], copy: Path, timeout_s: float) -> str | None:
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "OPENBLAS_NUM_THREADS": "1"}
    given = copy / "tests.txt"
    given.write_text("\n".join(tests))
    done = subprocess.run(
        [*PYTEST, f"@{given}"], cwd=copy, env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"exit code {done.returncode}" if done.returncode else None


def outcomes(mutants: list[Mutant], reach: Reach, budget_s: float, jobs: int) -> Iterator[dict[str, Any]]:
    copies: SimpleQueue[Path] = SimpleQueue()

    def tried(mutant: Mutant) -> dict[str, Any]:
        copy = copies.get()
        try:
            return {**mutant._asdict(), "package": mutant.package, "killed_by": killer(mutant, copy, reach, budget_s)}
        finally:
            copies.put(copy)

    from latfit.compiled import sources

    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="latfit-mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        for i in range(jobs):
            copy = Path(folder, str(i))
            copy.mkdir()
            subprocess.run(["tar", "-x"], cwd=copy, input=archive, check=True)
            if (ROOT / CACHE).exists():
                shutil.copytree(ROOT / CACHE, copy / CACHE)
                module = copy / SOURCE / "compiled.py"
                module.write_text(f"{module.read_text()}\n\ndef sources():\n    return {sources()!r}\n")
            copies.put(copy)
        yield from pool.map(tried, mutants)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60, help="of tests that a mutant meets")
    parser.add_argument("--coverage", type=Path, default=ROOT / ".coverage")
    parser.add_argument("--times", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    reach = Reach(given.coverage, given.times)
    drawn, killed, killers = Counter[str](), Counter[str](), set[str]()
    with given.out.open("w") as out:
        for found in outcomes(draw(given.n, given.seed, reach), reach, given.seconds, given.jobs):
            drawn[found["package"]] += 1
            killed[found["package"]] += found["killed_by"] is not None
            killers |= {found["killed_by"]} if "::" in (found["killed_by"] or "") else set()
            out.write(json.dumps(found) + "\n")
            out.flush()
            where = f"{found['file']}:{found['line']} {found['operator']}"
            print(f"{where}: {found['killed_by'] or 'SURVIVED'}", flush=True)
    for package, count in sorted(drawn.items()):
        print(f"{package:18} {killed[package]:4} of {count:4} killed")
    print(f"{'all':18} {killed.total():4} of {drawn.total():4} killed")
    if failed := first_failure(sorted(killers), ROOT, 3600):
        sys.exit(f"{failed} fails without a mutant")


if __name__ == "__main__":
    main()
