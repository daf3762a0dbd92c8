"""A trace too long for memory: rows/s and peak memory of the pass that makes cells of it, and what a fit on cells
takes and loses, beside pandas' groupby of the same rows.

`python -m benchmarks.scale` writes 4 million rows; `--full` 100 million (about 2 GB in the temporary folder).
"""

import multiprocessing
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from latfit.api.fits import fit_each
from latfit.cli.app import run
from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions
from latfit.model.fit_result import FitResult
from latfit.model.saturation import Saturation
from latfit.trace.cells import compress
from latfit.trace.table import Trace

THETA = np.array([4.0, 30.0, 1.0, 60.0, 0.15, 0.01, 0.02, 0.002])
FILE_ROWS = 1_000_000
BYTES_A_ROW = 25
PEER_ROWS = 4_000_000
FIT_ROWS = 500_000


@dataclass(frozen=True)
class Measured:
    """What a process of its own returned, how long that took, and the most memory it had."""

    result: Any
    seconds: float
    peak_mib: float


def write_rows(folder: str, rows: int) -> None:
    """Files of a serving log: decode at every B, one step in five with a chunk of prefill, 10 % log-normal noise."""
    for i in range(0, rows, FILE_ROWS):
        n = min(FILE_ROWS, rows - i)
        rng = np.random.default_rng(i)
        B = rng.integers(1, 65, n)
        S = np.where(rng.random(n) < 0.2, B + rng.integers(1, 2048, n), B)
        T = Saturation().latency_ms(THETA, {"B": B.astype(float), "S": S.astype(float)})
        T = np.round(T * np.exp(rng.normal(0, 0.1, n)), 3)
        columns = {
            "B": B.astype(np.int32),
            "S": S,
            "T_ms": T,
            "context_tokens": B * rng.integers(100, 4000, n),
            "phase": pa.array(np.where(S > B, "mixed", "decode")).dictionary_encode(),
            "t_s": np.cumsum(T) / 1e3,
        }
        pq.write_table(pa.table(columns), f"{folder}/rows-{i // FILE_ROWS:04}.parquet", compression="zstd")


def to_cells(folder: str, backend: str) -> dict[str, Any]:
    return dict(compress(folder, backend=backend).facts)


def with_pandas(folder: str, rows: int) -> int:
    """Count, mean, variance, range and quantiles by B, S and context bin; how many groups there are."""
    columns = ["B", "S", "T_ms", "context_tokens"]
    files = sorted(Path(folder).glob("*.parquet"))[: max(1, rows // FILE_ROWS)]
    table = pd.concat([pd.read_parquet(file, columns=columns) for file in files])
    table["context"] = np.floor(8 * np.log2(table.pop("context_tokens") + 1)).astype(np.int32)
    groups = table.groupby(["B", "S", "context"])["T_ms"]
    groups.quantile([0.1, 0.5, 0.9, 0.99])
    return len(groups.agg(["count", "mean", "var", "min", "max"]))


def in_one_file(folder: str) -> str:
    """The rows that peers read too, in one file."""
    parts = sorted(Path(folder).glob("rows-*.parquet"))[: max(1, PEER_ROWS // FILE_ROWS)]
    pq.write_table(pa.concat_tables(map(pq.read_table, parts)), f"{folder}/_all.parquet", compression="zstd")
    return f"{folder}/_all.parquet"


def ingested(file: str) -> None:
    """The rows of a file as `latfit ingest` reads, cleans and writes them."""
    with redirect_stdout(StringIO()):
        code = run(["ingest", file, "--out", f"{file}.clean", "--quiet"])
    if code:
        raise SystemExit(f"ingest ended with {code}")


def copied(file: str) -> None:
    """The same rows read and written by pyarrow, which looks at none of them."""
    pq.write_table(pq.read_table(file), f"{file}.copy", compression="zstd")


def systems_fitted(systems: int) -> int:
    """Fits of `systems` systems of 200 rows each, by `fit_each`; how many can be used."""
    rng = np.random.default_rng(0)
    rows = 200 * systems
    B = rng.integers(1, 65, rows)
    S = np.where(rng.random(rows) < 0.2, B + rng.integers(1, 2048, rows), B)
    T = Saturation().latency_ms(THETA, {"B": B.astype(float), "S": S.astype(float)})
    T = T * np.exp(rng.normal(0, 0.05, rows))
    names = np.array([f"model-{i}" for i in range(systems)], dtype=object)[np.arange(rows) % systems]
    return sum(found.ok for found in fit_each({"B": B, "S": S, "T_ms": T, "model": names}).values())


def fit_of_rows(folder: str, rows: int) -> FitResult:
    table = pq.read_table(sorted(Path(folder).glob("*.parquet"))[0], columns=["B", "S", "T_ms"]).slice(0, rows)
    return fit_trace(
        Trace({name: table[name].to_numpy().astype(float) for name in table.column_names}), FitOptions("saturation")
    )


def fit_of_cells(folder: str, rows: int) -> FitResult:
    first = sorted(Path(folder).glob("*.parquet"))[0]
    part = Path(folder) / "_part"
    part.mkdir(exist_ok=True)
    pq.write_table(pq.read_table(first).slice(0, rows), part / "rows.parquet")
    return fit_trace(compress(part).trace, FitOptions("saturation"))


def fit_of_all_cells(folder: str) -> FitResult:
    return fit_trace(compress(folder).trace, FitOptions("saturation"))


def apart(function: Callable[..., Any], *arguments: object) -> Measured:
    """Run in a fresh process, so that its peak memory is its own."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_measured, (function, arguments))


def _measured(function: Callable[..., Any], arguments: tuple[object, ...]) -> Measured:
    started = time.perf_counter()
    result = function(*arguments)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Measured(result, time.perf_counter() - started, peak / (2**20 if sys.platform == "darwin" else 2**10))


def furthest(one: FitResult, other: FitResult) -> str:
    """The estimate that differs most, in standard errors."""
    differences = {
        name: abs(other.parameters[name].value - estimate.value) / estimate.std_error
        for name, estimate in one.parameters.items()
        if estimate.std_error
    }
    name = max(differences, key=lambda name: differences[name])
    return f"{differences[name]:.3f} standard errors ({name})"


def main(smoke: bool = False, full: bool = False) -> None:
    """Print the figures."""
    rows = 20_000 if smoke else 100_000_000 if full else 4_000_000
    with tempfile.TemporaryDirectory() as folder:
        free = shutil.disk_usage(folder).free
        if free < 2 * rows * BYTES_A_ROW:
            print(f"scale: {rows:,} rows need {2 * rows * BYTES_A_ROW / 1e9:.0f} GB in {folder}")
            return
        write_rows(folder, rows)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        print(f"scale: {rows:,} rows in Parquet files of {size / 1e6:,.0f} MB")
        cells = apart(to_cells, folder, "local")
        facts = cells.result
        print(
            f"  to {facts['cells']:,} cells, {facts['counters']:,} counters (level {facts['resolution']['level']}): "
            f"{rows / cells.seconds / 1e6:.2f} million rows/s, {cells.seconds:.1f} s, peak {cells.peak_mib:,.0f} MiB"
        )
        first = min(rows, PEER_ROWS)
        peer = apart(with_pandas, folder, first)
        per_second = first / peer.seconds / 1e6
        print(f"  pandas groupby, {first:,} of them: {per_second:.2f} million rows/s, peak {peer.peak_mib:,.0f} MiB")
        file = in_one_file(folder)
        own, plain = apart(ingested, file), apart(copied, file)
        ratio = own.seconds / plain.seconds
        print(f"  ingest of {min(rows, PEER_ROWS):,} rows: {own.seconds:.1f} s, peak {own.peak_mib:,.0f} MiB")
        print(
            f"  pyarrow reads and writes them in {plain.seconds:.1f} s ({ratio:.1f} times), {plain.peak_mib:,.0f} MiB"
        )
        systems = 12 if smoke else 200
        each = apart(systems_fitted, systems)
        print(f"  {each.result} of {systems} systems of 200 rows: {each.seconds / systems:.2f} s each")
        some = min(rows, FIT_ROWS)
        by_row, by_cell = apart(fit_of_rows, folder, some), apart(fit_of_cells, folder, some)
        print(f"  fit on {some:,} rows: {by_row.seconds:.1f} s; on their cells, pass included: {by_cell.seconds:.1f} s")
        print(f"  they differ by at most {furthest(by_row.result, by_cell.result)}")
        everything = apart(fit_of_all_cells, folder)
        print(f"  pass and fit of all {rows:,} rows: {everything.seconds:.1f} s, peak {everything.peak_mib:,.0f} MiB")


if __name__ == "__main__":
    main("--smoke" in sys.argv[1:], "--full" in sys.argv[1:])
