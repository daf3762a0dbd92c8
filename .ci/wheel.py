"""Builds the sdist and, from it, the wheel; installs the wheel into an environment of its own and runs README's
commands there, in an empty folder outside the checkout. Then: uvx, and whether it can be installed beside vLLM's pins.

    python .ci/wheel.py [--smoke] [PYTHON]

PYTHON is the interpreter of the new environment; default: this one. With --smoke, README's first command alone.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.docs.examples import blocks, commands, unlike  # noqa: E402

VLLM = ("0.19.0", "0.32.0")
"""Versions whose exact pins latfit has to be installed beside; each pins one version of numba and of much else."""

MOST_MB = 900
"""What the environment may weigh, pip included; docs/index.md names it."""

HOME = {name: os.environ[name] for name in os.environ if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("python", nargs="?", default=sys.executable)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="latfit-wheel-") as name:
        folder = Path(name)
        wheel = built(folder / "dist")
        binaries = installed(wheel, folder / "environment", given.python)
        work = folder / "work"
        work.mkdir()
        shutil.copytree(ROOT / "sample_traces", work / "sample_traces")
        if given.smoke:
            examples(binaries, work, most=1)
            return
        examples(binaries, work)
        uvx(wheel, work)
        beside_vllm(wheel, work)


def built(target: Path) -> Path:
    """The wheel, made from the sdist; both hold what they should and nothing else."""
    run([sys.executable, "-m", "build", "--installer", "uv", "--outdir", target, ROOT], cwd=ROOT)
    (wheel,), (sdist,) = target.glob("*.whl"), target.glob("*.tar.gz")
    kept = run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT).split()
    with zipfile.ZipFile(wheel) as archive:
        held = {each for each in archive.namelist() if ".dist-info/" not in each}
    same({f"src/{each}" for each in held}, {each for each in kept if each.startswith("src/")}, wheel.name)
    with tarfile.open(sdist) as archive:
        files = {str(PurePosixPath(*PurePosixPath(each.name).parts[1:])) for each in archive if each.isfile()}
    made = {each for each in files if ".egg-info/" in each} | {"PKG-INFO", "setup.cfg"}
    more = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"}
    same(files - made, {each for each in kept if each.startswith("src/")} | more, sdist.name)
    say(f"{wheel.name} {wheel.stat().st_size / 1e6:.1f} MB, {sdist.name} {sdist.stat().st_size / 1e6:.1f} MB")
    return wheel


def same(found: set[str], expected: set[str], name: str) -> None:
    if found != expected:
        sys.exit(f"{name}: lacks {sorted(expected - found)}, has beside {sorted(found - expected)}")


def installed(wheel: Path, target: Path, python: str) -> Path:
    """The folder of the programs of a new environment with the wheel in it."""
    run([python, "-m", "venv", target])
    start = time.perf_counter()
    run([target / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel])
    seconds = time.perf_counter() - start
    size = sum(each.stat().st_size for each in target.rglob("*") if each.is_file() and not each.is_symlink()) / 1e6
    say(f"installed in {seconds:.0f} s, {size:.0f} MB")
    if size > MOST_MB:
        sys.exit(f"more than {MOST_MB} MB")
    return target / "bin"


def examples(binaries: Path, work: Path, most: int | None = None) -> None:
    """README's commands print what it shows, its Python runs, and the package is that of the environment.

    most: number of commands to run; without it all, and the Python.
    """
    place = run([binaries / "python", "-c", "import latfit; print(latfit.__file__)"], cwd=work)
    if not place.startswith(str(binaries.parent)):
        sys.exit(f"latfit is imported from {place}")
    readme = ROOT / "README.md"
    say(run([binaries / "latfit", "--version"], cwd=work).strip())
    for arguments, shown in commands(readme)[:most]:
        start = time.perf_counter()
        done = subprocess.run([binaries / "latfit", *arguments], cwd=work, env=HOME, capture_output=True, text=True)
        if wrong := unlike(shown, done.stdout, done.stderr):
            sys.exit(f"latfit {' '.join(arguments)}: exit code {done.returncode}, {wrong}\n{done.stdout}{done.stderr}")
        say(f"latfit {' '.join(arguments)} ({time.perf_counter() - start:.1f} s)")
    for block in blocks(readme, "python") if most is None else ():
        run([binaries / "python", "-c", block], cwd=work)


def uvx(wheel: Path, work: Path) -> None:
    """`uvx --from WHEEL latfit doctor` works: no environment to make, no name to install."""
    told = run([sys.executable, "-m", "uv", "tool", "run", "--from", wheel, "latfit", "doctor"], cwd=work)
    say(f"uvx: {told.splitlines()[0]}")


def beside_vllm(wheel: Path, work: Path) -> None:
    """latfit and each vLLM can be installed together, by their metadata; nothing is downloaded whole."""
    for version in VLLM:
        wanted = work / "wanted.in"
        wanted.write_text(f"vllm=={version}\nlatfit @ {wheel.as_uri()}\n")
        found = run([sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--python-version", "3.12", wanted])
        pins = [line for line in found.split() if line.startswith(("numba==", "numpy==", "torch=="))]
        say(f"beside vllm {version}: {', '.join(sorted(pins))}")


def run(command: list[str | Path], cwd: Path | None = None) -> str:
    """What a command prints; the end of it all where it fails."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=HOME, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
