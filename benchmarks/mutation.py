"""Which mutants of the source do the tests kill? A sample drawn by a seed, made by cosmic-ray's operators.

    pip install cosmic-ray
    python -m pytest -n auto --cov=latfit --cov-branch --cov-context=test    # writes .coverage
    python -m benchmarks.mutation --n 300 --seed 0 --out mutants.jsonl
    python -m benchmarks.mutation --survivors-of mutants.jsonl --tests REVISION --coverage FILE --out before.jsonl

Each mutant runs in a copy of the checkout, against the tests that reach its line: those that touch the fewest files
first, until one fails. A mutant that no test reaches survives. Constants of a module are reached by every test that
reaches a function of the module. `--tests` takes the tests of another revision. Modules that numba compiles are left
out unless `--compiled` is given: coverage does not see their lines, and each mutant compiles for most of a minute.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGES = ("model", "fitting", "queueing", "policies", "simulation/engine", "planning", "trace")
TEST_PATHS = ("tests", "benchmarks", "docs")  # what the tests of a revision are made of and read
FIRST_TESTS = 30  # most mutants die by one of these; the others are collected only if none fails
MAX_TESTS = 400  # nearest tests of a line that are run before its mutant counts as survivor
TIMEOUT_S = 900  # of one run of tests; a mutant that makes them hang is killed


@dataclass(frozen=True)
class Mutant:
    """One change of the source: where, by which operator of cosmic-ray, and which of its occurrences in the file."""

    file: str
    line: int
    operator: str
    occurrence: int

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.operator.rpartition('/')[2]} #{self.occurrence}"


def all_mutants(file: Path) -> dict[tuple[int, int], list[Mutant]]:
    """Mutants of a module by position; without those of `|`, which stands in annotations of types."""
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.plugins import get_operator, operator_names

    nodes = list(ast_nodes(get_ast_from_path(file)))
    found: dict[tuple[int, int], list[Mutant]] = defaultdict(list)
    for name in operator_names():
        operator = get_operator(name)
        if operator.arguments() or "BitOr" in name:
            continue
        positions = (begin for node in nodes for begin, _ in operator().mutation_positions(node))
        for occurrence, begin in enumerate(positions):
            found[begin].append(Mutant(str(file.relative_to(ROOT)), begin[0], name, occurrence))
    return found


def draw(count: int, seed: int, compiled: bool) -> list[Mutant]:
    """A random position of the source, then a random operator there, `count` times."""
    from latfit.compiled import MODULES

    numba = {f"src/latfit/{name}.py" for name in MODULES}
    files = sorted(file for each in PACKAGES for file in (ROOT / "src" / "latfit" / each).rglob("*.py"))
    chosen = [file for file in files if (str(file.relative_to(ROOT)) in numba) == compiled]
    by_position = [mutants for file in chosen for mutants in all_mutants(file).values()]
    rng = random.Random(seed)
    return [rng.choice(each) for each in rng.sample(by_position, min(count, len(by_position)))]


class Reach:
    """Tests by the lines they execute, from a coverage file with a context for each test."""

    def __init__(self, file: Path) -> None:
        from coverage import CoverageData

        self.data = CoverageData(basename=str(file))
        self.data.read()
        self.paths = {each.partition("/src/latfit/")[2]: each for each in self.data.measured_files()}
        self.files_touched: Counter[str] = Counter()
        for path in self.paths.values():
            lines = self.data.contexts_by_lineno(path)
            self.files_touched.update({_test(each) for contexts in lines.values() for each in contexts})

    def tests(self, mutant: Mutant) -> list[str]:
        """Those that execute the line, the most specific first; all of the module for a line run at import."""
        by_line = self.data.contexts_by_lineno(self.paths.get(mutant.file.removeprefix("src/latfit/"), ""))
        found = {_test(each) for each in by_line.get(mutant.line, [])}
        if "" in found:
            found |= {_test(each) for contexts in by_line.values() for each in contexts}
        return sorted(found - {""}, key=lambda each: (self.files_touched[each], each))


def _test(context: str) -> str:
    return context.rpartition("|")[0]


class Copy:
    """A copy of the checkout in which the source is changed, with the tests of a revision."""

    def __init__(self, folder: Path, revision: str | None) -> None:
        self.root = folder / "checkout"
        self.root.mkdir()
        self._extract("HEAD")
        if revision:
            for each in TEST_PATHS:
                shutil.rmtree(self.root / each)
            self._extract(revision, *TEST_PATHS)
        cache = Path("src", "latfit", "__pycache__", "compiled")
        if (ROOT / cache).exists():
            shutil.copytree(ROOT / cache, self.root / cache)
        data = ROOT.parent / "shared" / "data"
        self.environment = {
            "LATFIT_DATA": str(data),
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self.root / "src"), os.environ.get("PYTHONPATH", "")]),
            "OPENBLAS_NUM_THREADS": "1",
        }
        listed = self._pytest("--collect-only", "tests").stdout.splitlines()
        self.known = {line for line in listed if line.startswith("tests/")}

    def _extract(self, revision: str, *paths: str) -> None:
        archive = subprocess.run(["git", "archive", revision, *paths], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x"], cwd=self.root, input=archive.stdout, check=True)

    def killer(self, mutant: Mutant, tests: list[str]) -> str | None:
        """The first test that fails with the mutant; None if all pass."""
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator

        file = self.root / mutant.file
        source = file.read_text()
        changed = mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence)
        if changed is None:
            raise RuntimeError(f"{mutant.name}: no such mutant; draw again")
        file.write_text(changed)
        try:
            for part in (tests[:FIRST_TESTS], tests[FIRST_TESTS:MAX_TESTS]):
                if part and (failed := self.first_failure(part)):
                    return failed
            return None
        finally:
            file.write_text(source)

    def _pytest(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:randomly"]
        return subprocess.run(
            [sys.executable, "-m", "pytest", *options, *arguments],
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )

    def first_failure(self, tests: list[str]) -> str | None:
        there = [each for each in tests if each in self.known]
        if not there:
            return None
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
            listed.write("\n".join(there))
            listed.flush()
            try:
                done = self._pytest("-x", "--timeout", "300", "-rfE", f"@{listed.name}")
            except subprocess.TimeoutExpired:
                return "timeout"
        if done.returncode == 0:
            return None
        lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return lines[0].split(" - ")[0].partition(" ")[2] if lines else f"exit code {done.returncode}"


def outcomes(mutants: list[Mutant], reach: Reach, copy: Copy) -> Iterator[dict[str, Any]]:
    for mutant in mutants:
        tests = reach.tests(mutant)
        yield {**asdict(mutant), "reached_by": len(tests), "killed_by": copy.killer(mutant, tests)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compiled", action="store_true", help="mutants of the modules that numba compiles")
    parser.add_argument("--survivors-of", type=Path, help="only the mutants that survived in this file")
    parser.add_argument("--tests", help="take the tests of this revision of git")
    parser.add_argument("--coverage", type=Path, default=ROOT / ".coverage")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.survivors_of:
        lines = [json.loads(line) for line in given.survivors_of.read_text().splitlines()]
        names = Mutant.__dataclass_fields__
        mutants = [Mutant(**{name: each[name] for name in names}) for each in lines if each["killed_by"] is None]
    else:
        mutants = draw(given.n, given.seed, given.compiled)
    killed = 0
    with tempfile.TemporaryDirectory(prefix="latfit-mutants-") as folder, given.out.open("a") as out:
        copy = Copy(Path(folder), given.tests)
        for count, found in enumerate(outcomes(mutants, Reach(given.coverage), copy), start=1):
            killed += found["killed_by"] is not None
            out.write(json.dumps(found) + "\n")
            out.flush()
            print(
                f"{count}/{len(mutants)}, {killed} killed: {mutants[count - 1].name}: {found['killed_by']}", flush=True
            )


if __name__ == "__main__":
    main()
