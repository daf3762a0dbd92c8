"""Which mutants of the source do the tests kill? A sample drawn by a seed, made by cosmic-ray's operators.

    pip install cosmic-ray
    python -m benchmarks.mutation --n 300 --seed 0 --out mutants.jsonl

Each mutant runs in a copy of the checkout, against the test files of its module: its namesake, those of its package,
then others that import it, until a test fails that passes without the mutant. Modules that numba compiles take
`--compiled`: a minute for each mutant.
"""

import argparse
import ast
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
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
SOURCE = Path("src", "latfit")
CACHE = SOURCE / "__pycache__" / "compiled"  # what numba compiled
PACKAGES = ("model", "fitting", "queueing", "policies", "simulation/engine", "planning", "trace")
PYTEST = (sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-p", "no:randomly")


class Mutant(NamedTuple):
    """One change of the source: where, by which operator of cosmic-ray, and which of its occurrences in the file."""

    file: str
    line: int
    operator: str
    occurrence: int

    @property
    def package(self) -> str:
        return next(each for each in PACKAGES if self.file.startswith(f"{SOURCE / each}/"))


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


def draw(count: int, seed: int, compiled: bool) -> list[Mutant]:
    """A random position of the source, then a random operator there, `count` times."""
    from latfit.compiled import MODULES

    numba = {ROOT / SOURCE / f"{name}.py" for name in MODULES}
    files = sorted(file for each in PACKAGES for file in (ROOT / SOURCE / each).rglob("*.py"))
    positions = [each for file in files if (file in numba) == compiled for each in mutants_of(file)]
    rng = random.Random(seed)
    return [rng.choice(each) for each in rng.sample(positions, min(count, len(positions)))]


def tests_of(mutant: Mutant, root: Path) -> list[str]:
    """Test files, the most specific first."""
    path = Path(mutant.file).relative_to("src")
    dotted = ".".join(path.with_suffix("").parts)
    defined = {getattr(node, "name", "") for node in ast.parse((root / mutant.file).read_text()).body}
    folder = root / "tests" / "unit" / mutant.package

    def imports(node: ast.AST) -> bool:
        """Whether a node imports the module, or what it defines from a package above it."""
        if not isinstance(node, ast.ImportFrom) or not node.module:
            return False
        above = dotted.startswith(f"{node.module}.") and not defined.isdisjoint(each.name for each in node.names)
        return node.module == dotted or above

    def distance(file: Path) -> int:
        near = any(map(imports, ast.walk(ast.parse(file.read_text()))))
        if folder not in file.parents:
            return 3 if near else 4
        return 0 if file.stem == f"test_{path.stem}" else 1 if near else 2

    files = {file: distance(file) for file in sorted((root / "tests").rglob("test_*.py"))}
    return [str(file.relative_to(root)) for file in sorted(files, key=files.__getitem__) if files[file] < 4]


def killer(mutant: Mutant, copy: Path, timeout_s: float) -> str | None:
    """The first test that fails with the mutant in a copy of the checkout; None if all pass."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    tests = tests_of(mutant, copy)
    file = copy / mutant.file
    source = file.read_text()
    file.write_text(str(mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence)))
    try:
        failed = first_failure(tests, copy, timeout_s)
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        file.write_text(source)
    if failed and "::" in failed and first_failure([failed], copy, timeout_s):
        raise RuntimeError(f"{failed} fails without a mutant")
    return failed


def first_failure(tests: list[str], copy: Path, timeout_s: float) -> str | None:
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [*PYTEST, *tests], cwd=copy, env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"exit code {done.returncode}" if done.returncode else None


def outcomes(mutants: list[Mutant], jobs: int, timeout_s: float) -> Iterator[dict[str, Any]]:
    copies: SimpleQueue[Path] = SimpleQueue()

    def tried(mutant: Mutant) -> dict[str, Any]:
        copy = copies.get()
        try:
            return {**mutant._asdict(), "package": mutant.package, "killed_by": killer(mutant, copy, timeout_s)}
        finally:
            copies.put(copy)

    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="latfit-mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        for i in range(jobs):
            copy = Path(folder, str(i))
            copy.mkdir()
            subprocess.run(["tar", "-x"], cwd=copy, input=archive, check=True)
            if (ROOT / CACHE).exists():
                shutil.copytree(ROOT / CACHE, copy / CACHE)
            copies.put(copy)
        yield from pool.map(tried, mutants)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=900, help="seconds after which a mutant counts as killed")
    parser.add_argument("--compiled", action="store_true", help="mutants of the modules that numba compiles")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    drawn, killed = Counter[str](), Counter[str]()
    with given.out.open("w") as out:
        for found in outcomes(draw(given.n, given.seed, given.compiled), given.jobs, given.timeout):
            drawn[found["package"]] += 1
            killed[found["package"]] += found["killed_by"] is not None
            out.write(json.dumps(found) + "\n")
            out.flush()
            print(
                f"{found['file']}:{found['line']} {found['operator']}: {found['killed_by'] or 'SURVIVED'}", flush=True
            )
    for package, count in sorted(drawn.items()):
        print(f"{package:18} {killed[package]:4} of {count:4} killed")
    print(f"{'all':18} {killed.total():4} of {drawn.total():4} killed")


if __name__ == "__main__":
    main()
