"""How fast a vLLM log becomes a trace: the whole command beside a plain Python `re` loop, and its reading alone beside
that loop, reading the file, and Polars and DuckDB on two threads, where they are installed. All of them take the same
from a line, and must find the same rows.

The log is that of three servers that one file was appended to: an older vLLM with coloured names of processes, one
without colours, and a newer one that logs from the API server; two engines each, start-up lines, and lines of requests.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.log_loop import CLOCK, NAMES, PATTERN, WHOLE, read_re
from benchmarks.timing import paired
from latfit.trace.readers import vllm as reader
from latfit.trace.readers.source import Options, open_source
from latfit.trace.table import Trace

THREADS = 2
SINGLE = {
    "process": r"\((\w+) pid=",
    **{name: r"INFO " + r"\d\d." * k + r"(\d\d)" for k, name in enumerate(CLOCK)},
    "engine": r"(Engine \d+): I",
    "step": r"Iteration\((\d+)\)",
    "requests": r"(\d+) context requests",
    "tokens": r"(\d+) context tokens",
    "decodes": r"(\d+) generation requests",
    "decoded": r"(\d+) generation tokens",
    "ms": r"elapsed time: (\d+\.\d+) ms",
    "dummy": r" ms( \(dummy\))",
    "usage": r"KV cache usage: (\d+\.\d+)%",
}


def log_lines(lines: int, seed: int = 0) -> Iterator[str]:
    """A synthetic log of about so many lines."""
    rng = np.random.default_rng(seed)
    for server in range(3):
        coloured, new = server == 0, server == 2
        before, after = ("\x1b[0;36m", "\x1b[0;0m") if coloured else ("", "")
        names = [f"{before}(EngineCore_DP{rank} pid={2010410 + 100 * server + rank}){after}" for rank in range(2)]
        for name in names:
            yield f"{name} INFO 12-30 21:44:00 [core.py:97] Initializing a V1 LLM engine (v0.12.0) with config: m=1\n"
            yield f"{name} INFO 12-30 21:44:10 [kv_cache_utils.py:1286] GPU KV cache size: 1,234,567 tokens\n"
        yield from _served(lines // 3, names, new, rng)


def _served(lines: int, names: list[str], new: bool, rng: np.random.Generator) -> Iterator[str]:
    steps, seconds = [0, 0], 0.0
    ranks = rng.integers(0, 2, lines)
    prefill = np.where(rng.random(lines) < 0.1, rng.integers(1, 2048, lines), 0)
    decode = rng.integers(1, 200, lines)
    ms, usage, other = rng.gamma(4, 6, lines), 100 * rng.random(lines), rng.random(lines)
    for rank, p, d, t, u, o in zip(*(x.tolist() for x in (ranks, prefill, decode, ms, usage, other)), strict=True):
        seconds += t / 2e3
        second = int(seconds)
        clock = f"12-{30 + second // 86400 % 2} {second // 3600 % 24:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
        if o < 0.02:
            yield f'(APIServer pid=77) INFO:     127.0.0.1:{40000 + d} - "POST /v1/completions HTTP/1.1" 200 OK\n'
            continue
        step = (
            f"Iteration({steps[rank]}): {int(p > 0)} context requests, {p} context tokens, {d} generation requests, "
            f"{d} generation tokens, iteration elapsed time: {t:.2f} ms"
        )
        steps[rank] += 1
        if not new:
            yield f"{names[rank]} INFO {clock} [core.py:349] {step}\n"
        else:
            dummy = " (dummy)" if o < 0.03 else ""
            step = f"{step}{dummy}, GPU KV cache usage: {u:.1f}%"
            yield f"(APIServer pid=77) INFO {clock} [loggers.py:199] Engine {rank:03d}: {step}\n"


def read_raw(path: Path) -> int:
    """Bytes of the file, read through one buffer."""
    buffer, size = bytearray(1 << 20), 0
    with path.open("rb", buffering=0) as stream:
        while got := stream.readinto(buffer):
            size += got
    return size


def read_latfit(path: Path) -> Trace:
    """What is measured."""
    return reader.read(open_source(path), Options())


def read_polars(path: Path) -> Any:
    """`str.extract`, one value at a time, over the lines that have a step."""
    pl: Any = import_module("polars")

    lines = pl.scan_csv(
        path, has_header=False, separator="\x01", quote_char=None, new_columns=["line"], encoding="utf8-lossy"
    ).filter(pl.col("line").str.contains("Iteration(", literal=True))
    kinds: dict[str, Any] = dict.fromkeys(WHOLE, pl.Int64) | {"ms": pl.Float64, "usage": pl.Float64}
    extracted = [
        pl.col("line").str.extract(SINGLE[name], 1).cast(kinds.get(name, pl.String)).alias(name) for name in NAMES
    ]
    return lines.select(extracted).collect()


def read_duckdb(path: Path) -> Any:
    """`regexp_extract` with the names of all groups."""
    duckdb: Any = import_module("duckdb")

    names = ", ".join(f"'{name}'" for name in NAMES)
    casts = ", ".join(
        f"row.{name}::{'BIGINT' if name in WHOLE else 'DOUBLE'} AS {name}"
        if name in WHOLE or name == "ms"
        else f"nullif(row.{name}, '')::{'DOUBLE' if name == 'usage' else 'VARCHAR'} AS {name}"
        for name in NAMES
    )
    with duckdb.connect(config={"threads": THREADS}) as connection:
        return connection.sql(
            f"SELECT {casts} FROM (SELECT regexp_extract(line, '{PATTERN}', [{names}]) AS row FROM read_csv("
            f"'{path}', columns={{'line': 'VARCHAR'}}, delim='\x01', quote='', escape='', header=false) "
            "WHERE contains(line, 'Iteration('))"
        ).to_arrow_table()


def _frame(found: Any) -> pd.DataFrame:
    """What a peer found, as a table; made outside the measured time."""
    if not isinstance(found, list):
        return pd.DataFrame(found.to_pandas())
    frame = pd.DataFrame(found, columns=NAMES)
    return frame.assign(**{name: frame[name].str.decode("ascii") for name in ("process", "engine")})


def check(trace: Trace, found: Any) -> None:
    """Raise AssertionError unless both have the same rows."""
    theirs = _frame(found)
    seconds = ((theirs.day * 24 + theirs.hour) * 60 + theirs.minute) * 60 + theirs.second
    start = seconds.groupby(trace["run"]).transform("first")
    for ours, values in {
        "B": theirs.requests + theirs.decodes,
        "S": theirs.tokens + theirs.decoded,
        "T_ms": theirs.ms,
        "step": theirs.step,
        "prefill_requests": theirs.requests,
        "prefill_tokens": theirs.tokens,
        "t_s": (seconds - start).astype(float),
        "kv_usage": theirs.usage / 100,
    }.items():
        np.testing.assert_array_equal(trace[ours], values.to_numpy(), err_msg=ours)
    dummy = theirs.dummy.isin([True, " (dummy)"])
    np.testing.assert_array_equal(trace["dummy"], dummy)
    assert (trace["replica"] == theirs.engine.where(theirs.engine.notna(), theirs.process)).all()


@dataclass(frozen=True)
class Used:
    """What a command took: seconds of all its processors, seconds on the clock, and the most memory in MB."""

    processor_s: float
    wall_s: float
    peak_mb: float

    def __str__(self) -> str:
        return f"{self.processor_s:.2f} s of processor time, {self.wall_s:.2f} s, {self.peak_mb:.0f} MB"


def used_by(*arguments: str) -> Used:
    """Run Python with these arguments."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return Used(usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss / 1024)


def whole_commands(path: Path, folder: Path, pairs: int) -> None:
    """Print what `latfit ingest` takes, start-up and the written trace included, beside the loop as a command."""
    ours, theirs = [], []
    for _ in range(pairs):
        theirs.append(used_by(str(Path(__file__).with_name("log_loop.py")), str(path)))
        ours.append(used_by("-m", "latfit", "ingest", str(path), "--out", str(folder / "trace.parquet")))
    loop, first = (min(runs, key=lambda run: run.processor_s) for runs in (theirs, ours))
    ratio, wall = first.processor_s / loop.processor_s, first.wall_s / loop.wall_s
    print(f"whole command, {path.stat().st_size / 1e6:.0f} MB: latfit ingest takes {first}; a re loop {loop}")
    print(f"  ratio {ratio:.2f} of processor time, {wall:.2f} on the clock; first run here {ours[0].processor_s:.2f} s")


def main(smoke: bool = False) -> None:
    """Print lines and bytes a second, how many times faster than each peer, and what the whole command takes."""
    os.environ["POLARS_MAX_THREADS"] = str(THREADS)  # Polars looks when it is imported
    sizes, pairs = ((20_000,), 1) if smoke else ((300_000, 2_000_000), 3)
    with tempfile.TemporaryDirectory(prefix="latfit-") as folder:
        path = Path(folder) / "server.log"
        for size in sizes:
            with path.open("w") as stream:
                stream.writelines(log_lines(size))
            whole_commands(path, Path(folder), pairs)
        in_process(path, pairs)


def in_process(path: Path, pairs: int) -> None:
    """Print how fast the log is read, beside all peers."""
    trace = read_latfit(path)
    lines, size = int(trace.provenance["lines"]), path.stat().st_size
    print(f"vLLM log: {lines:,} lines, {size / 1e6:.0f} MB, {len(trace):,} steps, {trace.provenance['runs']} runs")
    seconds = [_seconds(read_latfit, path) for _ in range(pairs)]
    raw = min(_seconds(read_raw, path) for _ in range(pairs))
    for name, best in (("latfit, one thread", min(seconds)), ("reading the file", raw)):
        print(f"  {name}: {lines / best / 1e6:.2f} million lines/s, {size / best / 1e6:,.0f} MB/s")
    for name, peer in {"re loop": read_re, "Polars": read_polars, "DuckDB": read_duckdb}.items():
        _compare(name, peer, path, trace, pairs)


def _compare(name: str, peer: Callable[[Path], Any], path: Path, trace: Trace, pairs: int) -> None:
    try:
        check(trace, peer(path))
    except ImportError:
        print(f"  {name} is not installed: skipped")
        return
    times = paired(lambda: peer(path), lambda: read_latfit(path), pairs)
    speed = trace.provenance["lines"] / times.ours_s / 1e6
    print(
        f"  {name}: {speed:.2f} million lines/s, same rows; latfit is {times.ratio:.1f} times faster "
        f"({times.lowest:.1f} to {times.highest:.1f})"
    )


def _seconds(call: Callable[[Path], object], path: Path) -> float:
    start = time.perf_counter()
    call(path)
    return time.perf_counter() - start


if __name__ == "__main__":
    main("--smoke" in sys.argv[1:])
