"""What a newcomer waits for: processor time of the whole `latfit fit`, start-up included, first and second run, beside
SciPy's bare least-squares fit of the same rows in a process of its own.

The first run has an empty cache of compiled code, as after an installation; the second has what the first left. The
peer reads the rows, starts from the textbook guess and runs `scipy.optimize.least_squares` (trf, soft-L1) on the
saturation form: no intervals, no cross-validation, no choice of a model. Of 15,000 rows on they have context and times.

Then what is asked of a fit, and plans at loads up to nine tenths of what the sample's machine carries.

`python -m benchmarks.first_answer [--smoke]`
"""

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from latfit.model.saturation import Saturation

THETA = np.array([4.0, 30.0, 1.0, 60.0, 0.15, 0.01, 0.02, 0.002])
SAMPLE = Path(__file__).parent.parent / "sample_traces" / "cpu_numpy_tiny.parquet"
AIMS = {
    ("987", "auto"): 2.0,
    ("987", "saturation"): 1.2,
    ("200", "auto"): 1.5,
    ("15,000", "auto"): 5.0,
    ("50,000", "auto"): 8.0,
    ("1,000,000", "saturation"): 4.0,
    ("1,000,000", "auto"): 15.0,
}
"""Seconds of the second run, by rows and model."""

PEER = """
import sys, numpy as np, pyarrow.parquet as pq
from scipy.optimize import least_squares
table = pq.read_table(sys.argv[1], columns=["B", "S", "T_ms"])
B, S, T = (table[name].to_numpy().astype(float) for name in ("B", "S", "T_ms"))
def residuals(z):
    tau_0, w_0, P, k_B, k_S, tau_B, tau_S = np.exp(z)
    f = tau_0 + (w_0 + S) / (P * -np.expm1(-k_B * B) * -np.expm1(-k_S * S)) + tau_B * B + tau_S * S
    return np.log(f / T)
start = np.log([np.quantile(T, 0.05) / 2, 1, np.quantile(S / T, 0.95), 0.1, 0.01, 0.01, 0.001])
print(least_squares(residuals, start, loss="soft_l1", f_scale=0.1).cost)
"""


def rows_of(n: int, target: Path) -> None:
    """Rows of a machine that saturates: a grid where they are few, else a log with context."""
    rng = np.random.default_rng(n)
    if n < 1000:
        B = 2.0 ** rng.integers(0, 7, n)
        columns = {"B": B, "S": B * 2.0 ** rng.integers(0, 9, n)}
    else:
        B = rng.integers(1, 65, n).astype(np.float64)
        columns = {"B": B, "S": np.where(rng.random(n) < 0.2, B + rng.integers(1, 2048, n), B)}
    T = Saturation().latency_ms(THETA, columns)
    if 1000 <= n < 1_000_000:
        columns["context_tokens"] = B * rng.integers(100, 4000, n)
        T = T + 2e-5 * columns["context_tokens"]
    T = np.round(T * np.exp(rng.normal(0, 0.1, n)), 4)
    columns |= {"T_ms": T} | ({"t_s": np.cumsum(T) / 1e3} if n >= 1000 else {})
    pq.write_table(pa.table(columns), target)


def processor_seconds(command: list[str], cache: str) -> float:
    """User and system time of a command with a cache of compiled code; bytecode is kept, as an installation does."""
    known = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    bytecode = str(Path(cache).parent / "bytecode")
    environment = {**known, "NUMBA_CACHE_DIR": cache, "PYTHONPYCACHEPREFIX": bytecode, "OPENBLAS_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare(rows: str, trace: Path, folder: Path, models: list[str], runs: int) -> None:
    """Print a line a model."""
    peer = min(processor_seconds([sys.executable, "-c", PEER, str(trace)], str(folder)) for _ in range(runs))
    for model in models:
        out = ["--out", str(folder / "x.fit.json"), "--hardware", str(folder / "hardware.json")]
        command = [sys.executable, "-m", "latfit", "fit", str(trace), "--model", model, "--quiet", *out]
        cache = str(folder / f"cache-{rows}-{model}")
        processor_seconds([*command[:4], str(SAMPLE), *command[5:]], str(folder / "unused"))
        first = processor_seconds(command, cache)
        second = min(processor_seconds(command, cache) for _ in range(runs))
        aim = AIMS.get((rows, model))
        wanted = "" if aim is None else f" (aim {aim:g}{'' if second <= aim else ', missed'})"
        print(
            f"  {rows} rows, {model}: first {first:.2f} s, second {second:.2f} s{wanted}; SciPy alone {peer:.2f} s,"
            f" ratio {second / peer:.2f}"
        )


def plans(folder: Path, rates: list[str], runs: int) -> None:
    """Print a line a command that asks the fit of the sample beside a GPU of nominal numbers."""
    latfit, hardware = [sys.executable, "-m", "latfit"], str(folder / "plan.hardware.json")
    cache, file = str(folder / "cache-plan"), str(folder / "plan.fit.json")
    processor_seconds([*latfit, "fit", str(SAMPLE), "--path", "cpu", "--out", file, "--hardware", hardware], cache)
    gpu = ["add", "gpu", "--nominal", "launch=12ms,slope=0.05ms", "--hardware", hardware]
    processor_seconds([*latfit, "hardware", *gpu], cache)
    plan = ["plan", "--sla", "20ms", "--hardware", hardware]
    asked = [["predict", file, "-B", "8", "-S", "64"], ["hardware", "show", "--hardware", hardware], plan]
    for command in [*asked, *([*plan, "--rate", rate] for rate in rates)]:
        first = processor_seconds([*latfit, *command], cache)
        second = min(processor_seconds([*latfit, *command], cache) for _ in range(runs))
        loaded = "--rate" in command
        name, aim = (f"plan --rate {command[-1]}", 2.0) if loaded else (command[0], 0.7)
        print(
            f"  {name}: first {first:.2f} s, second {second:.2f} s (aim {aim:g}{'' if second <= aim else ', missed'})"
        )


def main(smoke: bool = False) -> None:
    """Print the table."""
    print("first answer: processor time of the whole command")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        compare("987", SAMPLE, folder, ["auto"] if smoke else ["saturation", "auto"], 1 if smoke else 3)
        for rows in (200,) if smoke else (200, 15_000, 50_000, 1_000_000):
            trace = folder / f"rows-{rows}.parquet"
            rows_of(rows, trace)
            models = ["saturation", "auto"] if rows == 1_000_000 else ["auto"]
            compare(f"{rows:,}", trace, folder, models, 1 if smoke else 3)
        plans(folder, ["500/s"] if smoke else ["100/s", "500/s", "1000/s", "2400/s"], 1 if smoke else 3)


if __name__ == "__main__":
    main("--smoke" in sys.argv[1:])
