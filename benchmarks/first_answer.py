"""What a newcomer waits for: processor time of whole commands, start-up included, first and second run.

The first run has an empty cache of compiled code, as after an installation; the second has what the first left.
`python -m benchmarks.first_answer [--smoke]`
"""

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

SAMPLE = Path(__file__).parent.parent / "sample_traces" / "cpu_numpy_tiny.parquet"
GPU = "hardware add gpu --nominal launch=12ms,slope=0.05ms"
COMMANDS = {
    f"fit {SAMPLE} --path cpu --force": 2.0,
    f"fit {SAMPLE} --path cpu --force --model saturation": 1.2,
    "predict cpu_numpy_tiny.fit.json -B 8 -S 64": 0.7,
    "hardware show": 0.7,
    "plan --sla 20ms": 0.7,
    "plan --sla 20ms --rate 500/s": 2.0,
    "plan --sla 20ms --rate 2400/s": 2.0,
}
"""Command: aim of the second run in seconds. Later ones read what earlier ones wrote."""


def processor_seconds(command: str, folder: Path, cache: str) -> float:
    """User and system time of a command with a cache of compiled code; bytecode is kept, as an installation does."""
    known = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    own = {"NUMBA_CACHE_DIR": str(folder / cache), "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [sys.executable, "-m", "latfit", *command.split()]
    environment = {**known, **own, "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run(words, env=environment, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(smoke: bool = False) -> None:
    """Print a line a command."""
    print("first answer: processor time of the whole command")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        processor_seconds(GPU, folder, "unused")
        for number, (command, aim) in enumerate(COMMANDS.items()):
            if smoke and number not in (0, 4):
                continue
            first = processor_seconds(command, folder, f"cache-{number}")
            second = min(processor_seconds(command, folder, f"cache-{number}") for _ in range(1 if smoke else 3))
            shown = command.replace(f"{SAMPLE.parent}/", "")
            print(
                f"  {shown}: first {first:.2f} s, second {second:.2f} s"
                f" (aim {aim:g}{'' if second <= aim else ', missed'})",
                flush=True,
            )


if __name__ == "__main__":
    main("--smoke" in sys.argv[1:])
