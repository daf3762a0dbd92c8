"""Read the log of a vLLM server.

With `--enable-logging-iteration-details` every step has a line, written by the engine or by its API server:

    (EngineCore_DP0 pid=2010) INFO 12-22 21:44:40 [core.py:349] Iteration(515): 0 context requests, 0 context tokens,
        20 generation requests, 20 generation tokens, iteration elapsed time: 10.99 ms

Without these lines, the statistics logged every ten seconds give one row per window.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latfit.errors import BadInput
from latfit.stats import FloatArray
from latfit.trace.parquet import columns_of
from latfit.trace.readers.source import Options, Reader, Source
from latfit.trace.readers.text import arrow_buffer
from latfit.trace.table import Array, Coded, Trace

BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 20  # a longer line is no log line and is read in pieces
MAX_ENGINES, MAX_RUNS, MAX_RANK = 1024, 1 << 16, 1024
PREFIX_BYTES = 512  # of a line in front of its step, where engine and time are looked for
LABEL_BYTES, NAME_BYTES = 64, 200

DAY_S = 86_400
DAYS_BEFORE_MONTH = (0, 0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334)
NO_TIME = -1
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
    rb"Iteration\((\d{1,15}\): \d{1,15} context requests, \d{1,15} context tokens, \d{1,15} generation requests,"
    rb" \d{1,15} generation tokens, iteration elapsed time: \d{1,15}(?:\.\d{1,15})?) ms( \(dummy\))?"
    rb"(?:, [^,\n]{0,39}? KV cache usage: (\d+\.?\d*)%)?"
)
NUMBERS = ("step", "prefill_requests", "prefill_tokens", "decode_requests", "decode_tokens", "T_ms")
"""Numbers in the first group of STEP, in order."""
TO_COMMAS = bytes.maketrans(b")", b",")
NO_NUMBERS = bytes(set(range(256)) - set(b"0123456789.,)\n"))
"""Translation of the first groups to lines of CSV, and the characters that it leaves out."""
BEGIN = re.compile(rb"Iteration\(\d")

PROCESS = re.compile(rb".*\(([^()]*) pid=(\d{1,18})", re.DOTALL)
ENGINE = re.compile(rb"Engine \d+(?=: \Z)")
RANK = re.compile(rb"Engine(?:.*?\D)?(\d*)", re.DOTALL)
CLOCK = re.compile(
    rb".*(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])[ T]([01]\d|2[0-3]):([0-5]\d):([0-5]\d)", re.DOTALL
)  # greedy: the last time in the text
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
}
"""Start-up lines by a text in them, and the engine settings they report, under the recorder's names."""
MARKS = (*SETTINGS, b" KV cache size: ")

WINDOW = re.compile(
    rb"Avg prompt throughput: (\d{1,12}(?:\.\d{1,6})?) tokens/s, Avg generation throughput: (\d{1,12}(?:\.\d{1,6})?)"
    rb" tokens/s, Running: (\d{1,9}) reqs, Waiting: (\d{1,9}) reqs"
)


class StartLine(NamedTuple):
    """A start-up line: an engine starts (`tokens` = 0), or its KV cache holds `tokens`."""

    row: int  # steps in front of it
    rank: int  # of the engine; -1 if the line names none
    tokens: int


@dataclass
class LogScan:
    """Steps, start-up lines and engines of the lines read so far."""

    numbers: list[bytes] = field(default_factory=list)
    parts: list[dict[str, Array]] = field(default_factory=list)
    rows: int = 0
    lines: int = 0
    cut: int = 0
    starts: list[StartLine] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)
    engines: dict[tuple[bytes, int], int] = field(default_factory=dict)

    def add(self, text: bytes) -> None:
        """Add whole lines."""
        if b"\x1b" in text:
            text = ANSI.sub(b"", text)
        self.lines += text.count(b"\n")
        *fields, rest = STEP.split(text)
        gaps = fields[:: STEP.groups + 1]
        if gaps:
            numbers, dummy, usage = (fields[i :: STEP.groups + 1] for i in range(1, STEP.groups + 1))
            self.numbers.append(b"\n".join(numbers).translate(TO_COMMAS, NO_NUMBERS))
            engine, time, others = self._parse_gaps(gaps)
            others[0] = True  # no step ends in front of it
            columns = {"engine": engine, "time": time, "dummy": np.array(dummy, dtype=object).astype(bool)}
            self.parts.append(columns | {"kv_usage": np.array(usage, dtype=object).astype(np.float64) / 100})
            for row in np.flatnonzero(others).tolist():
                self._add_other_lines(gaps[row], self.rows + row)
            self.rows += len(gaps)
        self._add_other_lines(rest, self.rows)

    def _add_other_lines(self, gap: bytes, row: int) -> None:
        """Keep what start-up lines report, and count torn steps. row: steps in front of the text."""
        self.cut += len(BEGIN.findall(gap))
        for line in gap.split(b"\n") if any(mark in gap for mark in MARKS) else ():
            if settings := settings_in(line):
                self.settings.append(settings)
            size, process = CACHE_SIZE.search(line), PROCESS.match(line)
            tokens = int(size[1].replace(b",", b"")) if size and START not in line else 0
            if START in line or tokens:
                self.starts.append(StartLine(row, rank_of(process[1] if process else b""), tokens))

    def _parse_gaps(self, gaps: Sequence[bytes]) -> Array:
        """Return what `parse_gap` finds (3, n); texts of one process repeat within a second."""
        places = {gap: i for i, gap in enumerate(dict.fromkeys(gaps))}
        table = np.array([self.parse_gap(gap) for gap in places])
        return np.asarray(table[np.fromiter(map(places.__getitem__, gaps), np.intp, len(gaps))].T)

    def parse_gap(self, gap: bytes) -> tuple[int, int, bool]:
        """Return (engine number, time stamp, whether there are other lines) of the text in front of a step.

        Engines that write their own lines differ by process. Lines of API servers name the engine; the process of a
        single server tells one start from the next.
        """
        text = gap[max(gap.rfind(b"\n") + 1, len(gap) - PREFIX_BYTES) :]
        process, engine, clock = PROCESS.match(text), ENGINE.search(text), CLOCK.match(text)
        name, pid = (process[1], int(process[2])) if process else (b"", -1)
        if engine:
            name, pid = engine[0], pid if name == b"APIServer" else -1
        number = self.engines.setdefault((name, pid), min(len(self.engines), MAX_ENGINES))
        others = gap.count(b"\n") > 1 or b"Iteration(" in gap
        return number, NO_TIME if clock is None else _stamp(clock), others


def _stamp(clock: re.Match[bytes]) -> int:
    """Return seconds that grow with the time in a year, with 32 days a month."""
    month, day, hour, minute, second = map(int, clock.groups())
    return (32 * month + day) * DAY_S + 3600 * hour + 60 * minute + second


def _parse_numbers(lines: list[bytes]) -> dict[str, Array]:
    """Return the columns of steps, given as lines of CSV with NUMBERS; empties the list."""
    import pyarrow as pa
    from pyarrow import csv

    buffer = arrow_buffer(b"\n".join(lines))
    lines.clear()
    types = {name: pa.float64() if name == "T_ms" else pa.int64() for name in NUMBERS}
    table = csv.read_csv(
        pa.BufferReader(buffer),
        csv.ReadOptions(use_threads=False, column_names=list(NUMBERS)),
        convert_options=csv.ConvertOptions(column_types=types),
    )
    found = columns_of(table, "the log")
    requests, tokens = found.pop("decode_requests"), found.pop("decode_tokens")
    return {
        "B": found["prefill_requests"] + requests,
        "S": found["prefill_tokens"] + tokens,
        **found,
        "phase": (requests > 0) + 2 * (found["prefill_requests"] > 0),
    }


def settings_in(line: bytes) -> dict[str, Any]:
    """Return the engine settings in a start-up line; empty for any other line."""
    mark = next((mark for mark in SETTINGS if mark in line), None)
    if mark is None:
        return {}
    found: dict[str, Any] = {"arguments_told": True} if mark == ARGUMENTS else {}
    if mark == START and b"speculative_config=None" in line:
        found["num_speculative_tokens"] = 0
    for name, pattern in SETTINGS[mark].items():
        match = re.search(pattern, line)
        if match and 0 < len(match[1]) <= NAME_BYTES:
            found[name] = _setting(match[1])
    return found


def _setting(text: bytes) -> bool | int | str:
    if text in (b"True", b"False"):
        return text == b"True"
    return int(text) if text.isdigit() else text.decode("utf-8", "replace")


def agreed_settings(starts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings on which all starts agree, and the others with all their values under `differing`."""
    values: dict[str, list[Any]] = {}
    for settings in starts:
        for name, value in settings.items():
            if value not in values.setdefault(name, []):
                values[name].append(value)
    found = {name: several[0] for name, several in values.items() if len(several) == 1}
    differing = {name: several for name, several in values.items() if len(several) > 1}
    return {**found, "differing": differing} if differing else found


def rank_of(name: bytes) -> int:
    """Return the number at the end of an engine's name, 0 if it has none; -1 for other processes."""
    match = RANK.fullmatch(name)
    if match is None:
        return -1
    rank = int(match[1] or 0) if len(match[1]) < 10 else MAX_RANK
    return rank if rank < MAX_RANK else -1


def recognises(head: bytes) -> bool:
    return LOG_LINE.search(ANSI.sub(b"", head)) is not None


def read(source: Source, options: Options) -> Trace:
    """Return every step of the log, including empty ones, or its windows. `options` apply to tables only.

    Raises
    ------
    BadInput
        If the log contains no step, or more engines or starts than a deployment has.
    """
    with source.open() as stream:
        scan = scan_log(stream)
    if not scan.rows:
        with source.open() as stream:
            windows = _read_windows(line for text in _whole_lines(stream) for line in text.split(b"\n"))
        if windows is not None:
            return windows.with_provenance(**start_facts(scan))
    return trace_of(scan, source.name)


def start_facts(scan: LogScan) -> dict[str, Any]:
    """Return the engine settings that a log reports.

    `kv_capacity_tokens` is the KV cache size of the last start, the smallest if several workers report one.
    """
    tokens = [line.tokens for line in scan.starts]
    last_start = max((i for i, size in enumerate(tokens[:-1]) if not size and tokens[i + 1]), default=-1)
    sizes = [size for size in tokens[last_start + 1 :] if size]
    capacity = {"kv_capacity_tokens": min(sizes)} if sizes else {}
    return {"format": "vllm", **agreed_settings(scan.settings), **capacity}


def scan_log(stream: BinaryIO, block_bytes: int = BLOCK_BYTES) -> LogScan:
    """Scan all lines of a log."""
    scan = LogScan()
    for text in _whole_lines(stream, block_bytes):
        scan.add(text)
    return scan


def _whole_lines(stream: BinaryIO, size: int = BLOCK_BYTES) -> Iterator[bytes]:
    """Yield the content in blocks that end with a newline, added to the last one if missing."""
    rest = b""
    while block := stream.read(size):
        end = block.rfind(b"\n") + 1
        if end > 0:
            yield rest + block[:end]
            rest = block[end:]
        elif len(rest) + len(block) < MAX_LINE_BYTES:
            rest += block
        else:
            yield rest + block + b"\n"
            rest = b""
    if rest:
        yield rest + b"\n"


def trace_of(scan: LogScan, name: str) -> Trace:
    """Return the scanned steps of the log called `name`. Raises BadInput as `read` does."""
    facts = {"format": "vllm", "lines": scan.lines, "iteration_lines": scan.rows, "cut_lines": scan.cut}
    if not scan.rows:
        torn = f" ({scan.cut} are cut short)" if scan.cut else ""
        raise BadInput(
            f"no line of its {scan.lines} is a whole step{torn}",
            where=name,
            remedy="Record the running server from outside (latfit record URL), or start vLLM with"
            " --enable-logging-iteration-details, and without --disable-log-stats.",
        )
    columns = _parse_numbers(scan.numbers)
    columns |= {name: np.concatenate([part[name] for part in scan.parts]) for name in scan.parts[0]}
    scan.parts.clear()
    engine = columns.pop("engine")
    runs = _split_runs(scan, engine, columns["step"]) if len(scan.engines) <= MAX_ENGINES else []
    if not 0 < len(runs) <= MAX_RUNS:
        reason = "step counters that go back and forth" if runs else f"more than {MAX_ENGINES:,} engines"
        remedy = "Give the log of one deployment, with the names of its engines as vLLM writes them."
        raise BadInput(f"has {reason}", where=name, remedy=remedy)
    names = [process for process, _ in scan.engines]
    engines = [names[engine[rows[0]]] for rows in runs]
    labels = [each[:LABEL_BYTES].decode("utf-8", "replace") for each in engines]
    capacity = _capacities(scan.starts, [int(rows[0]) for rows in runs], [rank_of(each) for each in engines])
    known = {label: tokens for label, tokens in zip(labels, capacity, strict=True) if tokens}
    facts |= agreed_settings(scan.settings)
    facts |= {"engines": len(set(labels)), "runs": len(runs), "kv_capacity_tokens": known}
    return _with_runs(columns, runs, labels, capacity, facts)


def _split_runs(scan: LogScan, engine: Array, step: Array) -> list[NDArray[np.intp]]:
    """Return the rows of each run, in order of their first rows: one start of one engine.

    A run ends where the step counter restarts or a start-up line says so.
    """
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


def _capacities(starts: Sequence[StartLine], first: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Return the KV cache tokens of each run, given its first row and its engine's rank; 0 if unknown.

    They are in the lines since the engine's run before; one line per worker, of which the smallest counts. Lines
    without a rank apply to ranks that have none of their own.
    """
    sizes: dict[int, list[StartLine]] = {}
    for line in starts:
        if line.tokens:
            sizes.setdefault(line.rank, []).append(line)
    before: dict[int, int] = {}
    found = []
    for row, rank in zip(first, ranks, strict=True):
        own = [line for line in sizes.get(rank, sizes.get(-1, ())) if line.row <= row]
        recent = [line.tokens for line in own if line.row > before.get(rank, -1)]
        found.append(min(recent or [line.tokens for line in own[-1:]], default=0))
        before[rank] = row
    return found


def _with_runs(
    columns: dict[str, Array],
    runs: Sequence[Array],
    replicas: Sequence[str],
    capacity: Sequence[int],
    facts: dict[str, Any],
) -> Trace:
    """Name runs and replicas, and leave out the columns that the log has no values for."""
    time, phase = columns.pop("time"), columns.pop("phase")
    run_of_row = np.empty(len(time), dtype=np.int32)
    columns["t_s"] = np.empty(len(time))
    for number, rows in enumerate(runs):
        run_of_row[rows] = number
        columns["t_s"][rows] = seconds_since_start(time[rows])
    codes: dict[str, Coded] = {"phase": (phase, PHASE_NAMES), "run": (run_of_row, _run_names(replicas))}
    if any(replicas):
        number_of = {label: i for i, label in enumerate(dict.fromkeys(replicas))}
        codes["replica"] = np.array([number_of[label] for label in replicas])[run_of_row], list(number_of)
    columns |= {name: np.array(values, dtype=object)[code] for name, (code, values) in codes.items()}
    tokens = np.array([size or np.nan for size in capacity])
    columns["context_tokens"] = columns["kv_usage"] * tokens[run_of_row]
    absent = [name for name in ("t_s", "kv_usage", "context_tokens") if np.isnan(columns[name]).all()]
    absent += [] if columns["dummy"].any() else ["dummy"]
    return Trace({name: column for name, column in columns.items() if name not in absent}, facts, codes)


def _run_names(replicas: Sequence[str]) -> list[str]:
    """Return `EngineCore_DP0/2` for the second run of that engine, `2` for an engine without a name."""
    counts: dict[str, int] = {}
    names = []
    for label in replicas:
        counts[label] = counts.get(label, 0) + 1
        names.append(f"{label}/{counts[label]}" if label else str(counts[label]))
    return names


def seconds_since_start(stamps: Array) -> FloatArray:
    """Return seconds since the first stamp, never decreasing; NaN without a stamp.

    The stamps have no year: a fall by more than half a year is a turn of the year, a smaller one a clock set back, or
    lines slightly out of order.
    """
    seconds = np.full(len(stamps), np.nan)
    known = np.flatnonzero(stamps != NO_TIME)
    if not len(known):
        return seconds
    days, second = np.divmod(stamps[known], DAY_S)
    month, day = np.divmod(days, 32)
    leap = bool(np.any((month == 2) & (day == 29)))
    year_s = (365 + leap) * DAY_S
    clock = (np.array(DAYS_BEFORE_MONTH)[month] + day + (leap & (month > 2))) * DAY_S + second
    change = (np.diff(clock) + year_s // 2) % year_s - year_s // 2
    change[change < -MAX_REORDER_S] = 0
    seconds[known] = np.maximum.accumulate(np.concatenate([[0], np.cumsum(change)]))
    return seconds


def _read_windows(lines: Iterator[bytes]) -> Trace | None:
    """Return one row per window of about ten seconds; None if no line reports one.

    Each running request gets one token per step: with B requests and g generated tokens/s a step takes B/g seconds.
    B is the mean of both ends. Windows whose ends differ too much are counted as `unsteady` and left out; those that
    begin or end without a request are `idle`.
    """
    scan = LogScan()
    reports: list[tuple[float, ...]] = []
    prefixes = []
    for line in lines:
        line = ANSI.sub(b"", line)
        if found := WINDOW.search(line):
            prefixes.append(line[: found.start()])
            reports.append(tuple(map(float, found.groups())))
    if not reports:
        return None
    engines, stamps, _ = np.array([scan.parse_gap(prefix) for prefix in prefixes]).T
    times = seconds_since_start(stamps).tolist()
    names = [str(max(rank_of(name), 0)) for name, _ in scan.engines]
    last: dict[int, tuple[float, float]] = {}
    unsteady = 0
    rows = []
    for engine, now, (prompt, generated, running, waiting) in zip(engines.tolist(), times, reports, strict=True):
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
        S = max(B, (prompt + generated) * T_s)
        rows.append((start, 1e3 * (now - start), B, S, 1e3 * T_s, waiting, not busy, engine))
    if not rows:
        return None
    t_s, window_ms, B_mean, S_mean, T_ms, queued, idle, engine_of_row = np.array(rows).T
    columns = {
        "B": B_mean,
        "S": S_mean,
        "T_ms": T_ms,
        "t_s": t_s - t_s.min(),
        "window_ms": window_ms,
        "window_steps": np.divide(window_ms, T_ms, out=np.zeros_like(T_ms), where=T_ms > 0),
        "queued_requests": queued,
        "idle": idle > 0,
        "run": np.array(names, dtype=object)[engine_of_row.astype(np.intp)],
    }
    return Trace(columns, {"format": "vllm", "windows": len(rows), "unsteady": unsteady})


READER = Reader("vllm", "a vLLM server log with --enable-logging-iteration-details", recognises, read, path="gpu")
