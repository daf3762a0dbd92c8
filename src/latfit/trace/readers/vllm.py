"""Read the log of a vLLM server.

With `--enable-logging-iteration-details` every step has a line, written by the engine or by its API server:

    (EngineCore_DP0 pid=2010) INFO 12-22 21:44:40 [core.py:349] Iteration(515): 0 context requests, 0 context tokens,
        20 generation requests, 20 generation tokens, iteration elapsed time: 10.99 ms

Without these lines, the statistics logged every ten seconds give one row per window.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from latfit.errors import BadInput
from latfit.stats import FloatArray, IntArray
from latfit.trace.parquet import columns_of
from latfit.trace.readers.source import Options, Reader, Source
from latfit.trace.table import Array, Trace

BLOCK_BYTES = 1 << 22  # a longer line is no log line and is read in pieces
MAX_RANK = 1024
PREFIX_BYTES = 512  # of a line in front of its step, where engine and time are looked for
LABEL_BYTES, NAME_BYTES = 64, 200

YEAR_S = 366 * 86_400  # times without a year are taken to be of a leap year
MAX_REORDER_S = 60  # API servers write into one log slightly out of order; a clock set back falls further
MAX_REORDER_STEPS = 16  # likewise of the step counter; a restarted engine falls further, or to 0

MAX_WINDOW_S = 120.0  # lines further apart do not bound one window
MAX_LOAD_CHANGE = 1 / 3  # of the running requests within a window, relative to their mean

ANSI = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")
LOG_LINE = re.compile(
    rb"Iteration\(\d+\): \d+ context requests, "
    rb"|\b(?:INFO|WARNING|DEBUG|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]\n]*\.py: ?\d+\] "
    rb"|\((?:EngineCore\w*|APIServer|ApiServer_\d+) pid=\d+\) "
)
STEP = re.compile(
    rb"Iteration\((\d{1,15}+\): \d{1,15}+ context requests, \d{1,15}+ context tokens, \d{1,15}+ generation requests,"
    rb" \d{1,15}+ generation tokens, iteration elapsed time: \d{1,15}+(?:\.\d{1,15}+)?+) ms"
    rb"((?: \(dummy\))?+(?:, [^\n%(]*+%)?+)"
)  # numbers, and what may follow
USAGE = re.compile(rb" KV cache usage: (\d+\.?\d*)%")
NUMBERS = ("step", "prefill_requests", "prefill_tokens", "decode_requests", "decode_tokens", "T_ms")
"""Numbers in the first group of STEP, in order."""
TO_COMMAS, NO_NUMBERS = bytes.maketrans(b")", b","), bytes(set(range(256)) - set(b"0123456789.,)\n"))
"""Translation of first groups to delimited numbers."""
BEGIN = re.compile(rb"Iteration\(\d")

PROCESS = re.compile(rb".*\(([^()]*) pid=(\d{1,18})", re.DOTALL)
ENGINE = re.compile(rb"Engine \d+(?=: \Z)")
RANK = re.compile(rb"Engine(?:.*?\D)?(\d{0,9})", re.DOTALL)
CLOCK = re.compile(rb".*(\d\d-\d\d)[ T](\d\d:\d\d:\d\d)", re.DOTALL)  # greedy: the last time in the text
PHASE_NAMES = ["", "decode", "prefill", "mixed"]

CACHE_SIZE = re.compile(rb" KV cache size: (\d[\d,]{0,20}) tokens")
START, ARGUMENTS = b"Initializing a V1 LLM engine", b"non-default args: "
SETTINGS: Mapping[bytes, Mapping[str, bytes]] = {
    START: {
        "max_model_len": rb"\bmax_seq_len=(\d{1,9})\b",
        "tp": rb"\btensor_parallel_size=(\d{1,6})\b",
        "pipeline_parallel_size": rb"\bpipeline_parallel_size=(\d{1,6})\b",
        "data_parallel_size": rb"\bdata_parallel_size=(\d{1,6})\b",
        "num_speculative_tokens": rb"speculative_config=SpeculativeConfig\([^)]{0,1000}num_spec_tokens=(\d{1,3})\)",
        "enable_prefix_caching": rb"\benable_prefix_caching=(True|False)\b",
        "enable_chunked_prefill": rb"\benable_chunked_prefill=(True|False)\b",
        "vllm": rb"V1 LLM engine \(v([^)\s]+)\)",
        "model": rb"\bmodel='([^']*)'",
        "dtype": rb"\bdtype=(?:torch\.)?(\w+)",
        "quantization": rb"\bquantization=(\w+)",
        "cache_dtype": rb"\bkv_cache_dtype=(\w+)",
        "device_type": rb"\bdevice_config=(\w+)",
        # The last end of the compiled ranges is the token budget.
        "max_num_batched_tokens": rb"'compile_ranges_(?:endpoints|split_points)': \[(?:[\d, ]{0,200}\D)?(\d{1,9})\]",
    },
    ARGUMENTS: {
        "max_num_seqs": rb"'max_num_seqs': (\d{1,9})\b",
        "max_num_batched_tokens": rb"'max_num_batched_tokens': (\d{1,9})\b",
        "block_size": rb"'block_size': (\d{1,9})\b",
        "long_prefill_token_threshold": rb"'long_prefill_token_threshold': (\d{1,9})\b",
        "num_speculative_tokens": rb"'num_speculative_tokens': (\d{1,3})\b",
        "async_scheduling": rb"'async_scheduling': (True|False)\b",
    },
    b"Chunked prefill is enabled": {"max_num_batched_tokens": rb"max_num_batched_tokens=(\d{1,9})\b"},
    b" blocks: ": {"num_gpu_blocks": rb"# (?:GPU|CUDA|cuda) blocks: (\d{1,9})\b"},
}  # start-up lines by a text in them, and the engine settings they report, under the recorder's names
MARKS = (*SETTINGS, b" KV cache size: ", b"Avg prompt throughput: ")

WINDOW = re.compile(
    rb"Avg prompt throughput: (\d{1,12}(?:\.\d{1,6})?) tokens/s, Avg generation throughput:"
    rb" (\d{1,12}(?:\.\d{1,6})?) tokens/s, Running: (\d{1,9}) reqs, Waiting: (\d{1,9}) reqs"
)


class StartLine(NamedTuple):
    """A start-up line: an engine starts (`tokens` = 0), or its KV cache holds `tokens`."""

    row: int  # steps in front of it
    rank: int  # of the engine; -1 if the line names none
    tokens: int


@dataclass
class LogScan:
    numbers: list[bytes] = field(default_factory=list)  # of steps, a line each
    facts: list[FloatArray] = field(default_factory=list)  # engine, stamp, dummy, usage of steps (4, n)
    rows: int = 0
    lines: int = 0
    cut: int = 0
    windows: list[tuple[float, ...]] = field(default_factory=list)
    starts: list[StartLine] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)
    engines: dict[tuple[bytes, int], int] = field(default_factory=dict)

    def add(self, text: bytes) -> None:
        if b"\x1b" in text:
            text = ANSI.sub(b"", text)
        self.lines += text.count(b"\n") + (not text.endswith(b"\n"))
        *fields, rest = STEP.split(text)
        if fields:
            gaps, numbers, tails = (fields[i :: STEP.groups + 1] for i in range(STEP.groups + 1))
            self.numbers.append(b"\n".join(numbers).translate(TO_COMMAS, NO_NUMBERS))
            engine, stamp, other = parse_distinct(gaps, self.place_of)
            self.facts.append(np.stack([engine, stamp, *parse_distinct(tails, parse_tail)]))
            other[0] = True
            for row in np.flatnonzero(other).tolist():
                self._add_other_lines(gaps[row], self.rows + row)
            self.rows += len(gaps)
        self._add_other_lines(rest, self.rows)

    def _add_other_lines(self, gap: bytes, row: int) -> None:
        """Keep what start-up lines and windows report, and count torn steps. row: steps in front of the text."""
        self.cut += len(BEGIN.findall(gap))
        for line in gap.split(b"\n") if any(mark in gap for mark in MARKS) else ():
            if not row and (window := WINDOW.search(line)):
                self.windows.append((*self.place_of(line[: window.start()])[:2], *map(float, window.groups())))
            if settings := settings_in(line):
                self.settings.append(settings)
            size, process = CACHE_SIZE.search(line), PROCESS.match(line)
            tokens = int(size[1].replace(b",", b"")) if size and START not in line else 0
            if START in line or tokens:
                self.starts.append(StartLine(row, rank_of(process[1] if process else b""), tokens))

    def place_of(self, gap: bytes) -> tuple[int, float, bool]:
        """Return (engine number, seconds of the year, whether there are other lines) of the text in front of a step."""
        text = gap[max(gap.rfind(b"\n") + 1, len(gap) - PREFIX_BYTES) :]
        process, engine = PROCESS.match(text), ENGINE.search(text)
        name, pid = (process[1], int(process[2])) if process else (b"", -1)
        if engine:
            name, pid = engine[0], pid if name == b"APIServer" else -1
        number = self.engines.setdefault((name, pid), len(self.engines))
        return number, second_of_year(text), gap.count(b"\n") > 1 or b"Iteration(" in gap


def read_numbers(text: bytes) -> dict[str, Array]:
    from pyarrow import BufferReader, csv

    kinds = {name: "float64" if name == "T_ms" else "int64" for name in NUMBERS}
    options = csv.ReadOptions(column_names=NUMBERS, use_threads=False)
    table = csv.read_csv(BufferReader(text), options, convert_options=csv.ConvertOptions(column_types=kinds))
    return columns_of(table, "the log")


def parse_distinct(texts: list[bytes], parse: Callable[[bytes], tuple[float, ...]]) -> FloatArray:
    """Return the numbers in each text (k, n); equal texts are parsed once, because lines repeat within a second."""
    places: defaultdict[bytes, int] = defaultdict(count().__next__)
    place = np.fromiter(map(places.__getitem__, texts), np.intp, len(texts))
    return np.array(list(map(parse, places)), dtype=np.float64).T[:, place]


def parse_tail(tail: bytes) -> tuple[float, float]:
    """Return whether a step is a dummy, and the share of the KV cache in use."""
    usage = USAGE.search(tail)
    return b"(dummy)" in tail, float(usage[1]) / 100 if usage else np.nan


def second_of_year(text: bytes) -> float:
    """Return the seconds from the start of a leap year to the last time in a text; NaN without one."""
    with suppress(ValueError):
        if clock := CLOCK.match(text):
            moment = datetime.fromisoformat(f"2024-{clock[1].decode()}T{clock[2].decode()}")
            return (moment - datetime(2024, 1, 1)).total_seconds()
    return np.nan


def seconds_since_start(seconds: FloatArray) -> FloatArray:
    """Return seconds since the first of the times (n,), never decreasing, over turns of the year."""
    since = np.full(len(seconds), np.nan)
    clock = seconds[np.isfinite(seconds)]
    change = (np.diff(clock, prepend=clock[:1]) + YEAR_S // 2) % YEAR_S - YEAR_S // 2
    change[change < -MAX_REORDER_S] = 0
    since[np.isfinite(seconds)] = np.maximum.accumulate(np.cumsum(change))
    return since


def settings_in(line: bytes) -> dict[str, Any]:
    mark = next((mark for mark in SETTINGS if mark in line), None)
    settings: dict[str, Any] = {}
    if mark == START and b"speculative_config=None" in line:
        settings["num_speculative_tokens"] = 0
    for name, pattern in SETTINGS[mark].items() if mark else ():
        match = re.search(pattern, line)
        if match and 0 < len(match[1]) <= NAME_BYTES:
            text = match[1].decode("utf-8", "replace")
            settings[name] = text == "True" if text in ("True", "False") else int(text) if text.isdecimal() else text
    return settings


def agreed_settings(starts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings on which all starts agree, and the others with all their values under `differing`."""
    values: dict[str, list[Any]] = {}
    for name, value in [item for settings in starts for item in settings.items()]:
        if value not in values.setdefault(name, []):
            values[name].append(value)
    agreed: dict[str, Any] = {name: several[0] for name, several in values.items() if len(several) == 1}
    differing = {name: several for name, several in values.items() if len(several) > 1}
    return agreed | ({"differing": differing} if differing else {})


def rank_of(name: bytes) -> int:
    """Return the number at the end of an engine's name, 0 if it has none; -1 for other processes."""
    match = RANK.fullmatch(name)
    rank = int(match[1] or 0) if match else -1
    return rank if rank < MAX_RANK else -1


def recognises(head: bytes) -> bool:
    return LOG_LINE.search(ANSI.sub(b"", head)) is not None


def read(source: Source, options: Options) -> Trace:
    """Return every step of the log, including empty ones, or its windows. Raises BadInput if it contains neither."""
    with source.open() as stream:
        return trace_of(scan_log(stream), source.name)


def scan_log(stream: BinaryIO, block_bytes: int = BLOCK_BYTES) -> LogScan:
    """Scan all lines of a log, in blocks that end with a line."""
    scan = LogScan()
    while block := stream.read(block_bytes):
        scan.add(block + stream.readline(BLOCK_BYTES))
    return scan


def trace_of(scan: LogScan, name: str) -> Trace:
    """Return the scanned steps of the log called `name`, else its windows. Raises BadInput as `read` does."""
    if not scan.rows:
        return _windows(scan, name)
    counts = read_numbers(b"\n".join(scan.numbers))
    T_ms = counts.pop("T_ms")
    place, stamp, dummy, usage = np.concatenate(scan.facts, axis=1)
    engine = place.astype(np.intp)
    runs = _split_runs(scan, engine, counts["step"])
    requests, tokens = counts.pop("decode_requests"), counts.pop("decode_tokens")
    run, t_s = np.empty(len(stamp), dtype=np.int32), np.empty(len(stamp))
    names, replicas, capacity = [], [], []
    number: dict[str, int] = {}
    before: dict[bytes, int] = {}
    processes = [process for process, _ in scan.engines]
    for i, rows in enumerate(runs):
        process = processes[engine[rows[0]]]
        replica = process[:LABEL_BYTES].decode("utf-8", "replace")
        number[replica] = number.get(replica, 0) + 1
        run[rows], t_s[rows] = i, seconds_since_start(stamp[rows])
        replicas.append(replica)
        names.append(f"{replica}/{number[replica]}" if replica else str(number[replica]))
        capacity.append(_capacity(scan.starts, int(rows[0]), rank_of(process), before.get(process, -1)))
        before[process] = int(rows[0])
    labels = {name: i for i, name in enumerate(dict.fromkeys(replicas))}
    codes = {
        "phase": ((requests > 0) + 2 * (counts["prefill_requests"] > 0), PHASE_NAMES),
        "run": (run, names),
        "replica": (np.array([labels[name] for name in replicas])[run], list(labels)),
    }
    columns: dict[str, Array] = {
        "B": counts["prefill_requests"] + requests,
        "S": counts["prefill_tokens"] + tokens,
        "T_ms": T_ms,
        "dummy": dummy > 0,
        "kv_usage": usage,
        **counts,
        **{name: np.array(texts, dtype=object)[code] for name, (code, texts) in codes.items()},
        "t_s": t_s,
        "context_tokens": usage * np.array([size or np.nan for size in capacity])[run],
    }
    absent = [name for name in ("t_s", "kv_usage", "context_tokens") if np.isnan(columns[name]).all()]
    absent += [name for name in ("dummy", "replica") if not columns[name].any()]
    facts = {"format": "vllm", "lines": scan.lines, "iteration_lines": scan.rows, "cut_lines": scan.cut}
    facts |= agreed_settings(scan.settings)
    facts |= {"engines": len(labels), "runs": len(runs)}
    if np.isfinite(stamp).any():
        facts["log_clock_s"] = [float(np.nanmin(stamp)), float(np.nanmax(stamp))]
    facts["kv_capacity_tokens"] = {name: size for name, size in zip(replicas, capacity, strict=True) if size}
    columns = {name: column for name, column in columns.items() if name not in absent}
    return Trace(columns, facts, {name: coded for name, coded in codes.items() if name in columns})


def _split_runs(scan: LogScan, engine: Array, step: Array) -> list[IntArray]:
    """Return the rows of each run: a counter that restarts, or a start-up line, ends a run."""
    by_engine = np.split(np.argsort(engine, kind="stable"), np.cumsum(np.bincount(engine))[:-1])
    runs = []
    for (name, _), rows in zip(scan.engines, by_engine, strict=False):
        counter = step[rows]
        fall = counter[:-1] - counter[1:]
        restart = (fall > MAX_REORDER_STEPS) | ((counter[1:] == 0) & (fall > 0))
        started = [line.row for line in scan.starts if not line.tokens and line.rank in (-1, rank_of(name))]
        places = {*(np.flatnonzero(restart) + 1).tolist(), *np.searchsorted(rows, started).tolist()} - {0, len(rows)}
        runs += np.split(rows, sorted(places))
    return sorted((rows for rows in runs if len(rows)), key=lambda rows: int(rows[0]))


def _capacity(starts: Sequence[StartLine], row: int, rank: int, before: int) -> int:
    """Return the KV cache tokens of the run that begins at a row: the least of its workers; 0 if unknown."""
    sizes = [line for line in starts if line.tokens and line.row <= row]
    of_rank = [line for line in sizes if line.rank == rank] or [line for line in sizes if line.rank == -1]
    recent = [line.tokens for line in of_rank if line.row > before] or [line.tokens for line in of_rank[-1:]]
    return min(recent, default=0)


def _windows(scan: LogScan, name: str) -> Trace:
    """Return one row per window of about ten seconds. Raises BadInput if no line reports one.

    With B requests and g generated tokens/s a step takes B/g seconds. Windows whose ends differ too much are
    `unsteady`; those that begin or end without a request are `idle`.
    """
    times = seconds_since_start(np.array([second for _, second, *_ in scan.windows])).tolist()
    last: dict[float, tuple[float, float]] = {}
    unsteady = 0
    rows = []
    for (engine, _, prompt, generated, running, waiting), now in zip(scan.windows, times, strict=True):
        start, running_before = last.get(engine, (now, 0.0))
        last[engine] = now, running
        if not 0 < now - start <= MAX_WINDOW_S:
            continue
        B = (running + running_before) / 2
        busy = running > 0 and running_before > 0 and generated > 0
        if busy and abs(running - running_before) > MAX_LOAD_CHANGE * B:
            unsteady += 1
            continue
        T_s = B / generated if busy else 0.0
        steps = (now - start) / T_s if busy else 0.0
        S = max(B, (prompt + generated) * T_s)
        rows.append((start, 1e3 * (now - start), steps, B, S, 1e3 * T_s, waiting, not busy, engine))
    if not rows:
        torn = f" ({scan.cut} are cut short)" if scan.cut else ""
        raise BadInput(
            f"no line of its {scan.lines} is a whole step{torn}",
            where=name,
            remedy="Record the running server from outside (latfit record URL), or start vLLM with"
            " --enable-logging-iteration-details, and without --disable-log-stats.",
        )
    names = ("t_s", "window_ms", "window_steps", "B", "S", "T_ms", "queued_requests", "idle", "engine")
    columns: dict[str, Array] = dict(zip(names, np.array(rows).T, strict=True))
    ranks = np.array([str(max(rank_of(process), 0)) for process, _ in scan.engines], dtype=object)
    columns["run"] = ranks[columns.pop("engine").astype(np.intp)]
    columns |= {"t_s": columns["t_s"] - columns["t_s"].min(), "idle": columns["idle"] > 0}
    sizes = [line.tokens for line in scan.starts if line.tokens]
    capacity = {"kv_capacity_tokens": min(sizes)} if sizes else {}
    facts = {"format": "vllm", "windows": len(rows), "unsteady": unsteady, **agreed_settings(scan.settings), **capacity}
    return Trace(columns, facts)


READER = Reader("vllm", "a vLLM server log with --enable-logging-iteration-details", recognises, read, path="gpu")
