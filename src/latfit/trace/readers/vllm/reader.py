"""Logs of a vLLM server that was started with `--enable-logging-iteration-details`: a line a step.

Older versions print it from the engine's process, newer ones from the API server, which adds the use of the KV cache:

    (EngineCore_DP0 pid=2010) INFO 12-22 21:44:40 [core.py:349] Iteration(515): 0 context requests, 0 context tokens,
        20 generation requests, 20 generation tokens, iteration elapsed time: 10.99 ms
    (APIServer pid=1) INFO 12-22 21:44:40 [loggers.py:199] Engine 000: Iteration(12): … time: 25.10 ms (dummy),
        GPU KV cache usage: 41.2%, encoder inputs: 4, encoder output embeddings: 3520

A step is what has all of it up to ` ms`, wherever it stands in its line. Where no line tells of a step, those of every
ten seconds are read (see `windows`).
"""

import os
import pickle
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, BinaryIO

import numpy as np

from latfit.errors import BadInput
from latfit.trace.readers.reader import Options, Reader
from latfit.trace.readers.source import Source
from latfit.trace.readers.vllm.runs import Run, runs_of, seconds_of
from latfit.trace.readers.vllm.start_up import agreed
from latfit.trace.readers.vllm.steps import LABEL_BYTES, MOST_ENGINES, NO_TIME, Block, Engines, rank_of, read_block
from latfit.trace.readers.vllm.windows import windows_of_log
from latfit.trace.table import Array, Coded, Trace

BLOCK_BYTES = 1 << 20
"""Small enough that what is computed from a block stays in the processor's cache."""

LONGEST_LINE = 1 << 20
"""What is longer without a newline is read in pieces: it is no log."""

SHARED_BYTES = 1 << 27
"""A file from this size on is read by two processes, which are there in a fifth of a second."""

SECOND_HALF = "import sys; from latfit.trace.readers.vllm.reader import write_blocks; write_blocks(*sys.argv[1:])"

MOST_RUNS = 1 << 16

PHASE_NAMES = np.array(("", "decode", "prefill", "mixed"), dtype=object)
"""The first is that of an empty step."""

ABSENT = {"kv_usage": np.nan, "dummy": False, "encoder_inputs": 0, "encoder_embeddings": 0}
"""Columns that a log may lack, and their value for a step that has none."""

_ANSI = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")
_SHAPE = re.compile(
    rb"Iteration\(\d+\): \d+ context requests, "
    rb"|\b(?:INFO|WARNING|DEBUG|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]\n]*\.py: ?\d+\] "
    rb"|\((?:EngineCore\w*|APIServer|ApiServer_\d+) pid=\d+\) "
)


def recognises(head: bytes) -> bool:
    """A step's line, or the beginning of lines as vLLM's logger writes them."""
    return _SHAPE.search(_ANSI.sub(b"", head)) is not None


def read(source: Source, options: Options) -> Trace:
    """Every step of the log, also empty ones, or its windows. `options` are for tables, and change nothing here.

    Raises BadInput where there is no step, and where there are more engines than any deployment has.
    """
    engines = Engines()
    with source.open() as stream:
        cut = _middle(source)
        if cut is None:
            blocks = blocks_of(stream, engines)
        else:
            command = [sys.executable, "-P", "-c", SECOND_HALF, str(source.path), str(cut)]
            with Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL) as process:
                blocks = blocks_of(stream, engines, most=cut)
                blocks += _fetched(process, engines) or blocks_of(stream, engines)
    if not any(len(block.columns["B"]) for block in blocks):
        with source.open() as stream:
            windows = windows_of_log(
                _ANSI.sub(b"", line) for text in _whole_lines(stream, BLOCK_BYTES) for line in text.split(b"\n")
            )
        if windows is not None:
            return windows.with_provenance(**_of_starts(blocks))
    return trace_of(blocks, engines, source.name)


def start_facts(source: Source) -> dict[str, Any]:
    """What a log says of its engine's start, by the names of a recorder's provenance, also where it holds no step.

    `kv_capacity_tokens`: tokens of the KV cache of the last start that says so, the smallest where several workers do.
    """
    with source.open() as stream:
        return _of_starts(blocks_of(stream, Engines()))


def _of_starts(blocks: Sequence[Block]) -> dict[str, Any]:
    sizes: list[int] = []
    started = False
    for note in (note for block in blocks for note in block.notes):
        if note.tokens and started:
            sizes = []
        started = note.tokens == 0
        sizes += [note.tokens] if note.tokens else []
    capacity = {"kv_capacity_tokens": min(sizes)} if sizes else {}
    return {"format": "vllm", **agreed([facts for block in blocks for facts in block.starts]), **capacity}


def _middle(source: Source) -> int | None:
    """The beginning of a line about in the middle of a log that two processes share; None where one reads it."""
    size = source.path.stat().st_size
    alone = os.cpu_count() in (None, 1) or not sys.executable
    if alone or source.compression is not None or size < SHARED_BYTES:
        return None
    with source.path.open("rb") as stream:
        stream.seek(size // 2)
        ended = stream.readline(LONGEST_LINE).endswith(b"\n")
        return stream.tell() if ended else None


def write_blocks(path: str, begin: str) -> None:
    """Write what `blocks_of` finds behind a place of a file to standard output, for the process that reads the rest."""
    engines = Engines()
    with Path(path).open("rb") as stream:
        stream.seek(int(begin))
        blocks = blocks_of(stream, engines)
    pickle.dump((list(engines.numbers), blocks), sys.stdout.buffer, protocol=5)


def _fetched(process: "Popen[bytes]", engines: Engines) -> list[Block]:
    """What another process found, with the engines' numbers of this one; nothing where it failed."""
    assert process.stdout is not None
    try:
        others, blocks = pickle.load(process.stdout)
    except (EOFError, pickle.UnpicklingError):
        return []
    numbers = np.array([engines.number(engine) for engine in others], dtype=np.int16)
    for block in blocks:
        block.columns["engine"] = numbers[block.columns["engine"]]
    return list(blocks)


def blocks_of(stream: BinaryIO, engines: Engines, size: int = BLOCK_BYTES, most: int | None = None) -> list[Block]:
    """What stands in a log, or in its next `most` bytes, in blocks of `size` bytes."""
    return [
        read_block(_ANSI.sub(b"", text) if b"\x1b" in text else text, engines)
        for text in _whole_lines(stream, size, sys.maxsize if most is None else most)
    ]


def trace_of(blocks: Sequence[Block], engines: Engines, name: str) -> Trace:
    """The steps of all blocks of the log called `name`."""
    if len(engines.numbers) > MOST_ENGINES:
        raise _mixed_up(name, f"more than {MOST_ENGINES:,} engines")
    before = np.cumsum([0, *(len(block.columns["B"]) for block in blocks)]).tolist()
    notes = [
        replace(note, rows=note.rows + rows)
        for block, rows in zip(blocks, before, strict=False)
        for note in block.notes
    ]
    rows = before[-1]
    facts = {
        "format": "vllm",
        "lines": sum(block.lines for block in blocks),
        "iteration_lines": rows,
        "cut_lines": sum(block.cut for block in blocks),
        **agreed([facts for block in blocks for facts in block.starts]),
    }
    if rows == 0:
        torn = f" ({facts['cut_lines']} are cut short)" if facts["cut_lines"] else ""
        raise BadInput(
            f"no line of its {facts['lines']} is a whole step{torn}",
            where=name,
            remedy="Record the running server from outside (latfit record URL), or start vLLM with"
            " --enable-logging-iteration-details, and without --disable-log-stats.",
        )
    columns = _joined(blocks)
    names = [process for process, _ in engines.numbers]
    runs = runs_of(columns.pop("engine"), columns["step"], [rank_of(process) for process in names], notes)
    if len(runs) > MOST_RUNS:
        raise _mixed_up(name, "step counters that go back and forth")
    return _trace(columns, runs, [process[:LABEL_BYTES].decode("utf-8", "replace") for process in names], facts)


def _mixed_up(name: str, what: str) -> BadInput:
    return BadInput(
        f"has {what}",
        where=name,
        remedy="Give the log of one deployment, with the names of its engines as vLLM writes them.",
    )


def _whole_lines(stream: BinaryIO, size: int, most: int = sys.maxsize) -> Iterator[bytes]:
    """The next `most` bytes in pieces that end with a newline, which the last of them may lack and gets."""
    kept = b""
    while got := stream.read(min(size, most)):
        most -= len(got)
        end = got.rfind(b"\n") + 1
        if end > 0:
            yield kept + got[:end]
            kept = got[end:]
        elif len(kept) + len(got) < LONGEST_LINE:
            kept += got
        else:
            yield kept + got + b"\n"
            kept = b""
    if kept:
        yield kept + b"\n"


def _joined(blocks: Sequence[Block]) -> dict[str, Array]:
    """The columns of all blocks, which are emptied on the way: one column at a time is held twice."""
    columns: dict[str, Array] = {}
    lengths = [len(block.columns["engine"]) for block in blocks]
    names = dict.fromkeys(name for block in blocks for name in block.columns)
    for name in sorted(names, key=lambda name: list(ABSENT).index(name) if name in ABSENT else -1):
        kind = next(block.columns[name].dtype for block in blocks if name in block.columns)
        absent = ABSENT.get(name)
        columns[name] = np.concatenate(
            [
                block.columns.pop(name) if name in block.columns else np.full(length, absent, dtype=kind)
                for block, length in zip(blocks, lengths, strict=True)
            ]
        )
    return columns


def _trace(columns: dict[str, Array], runs: Sequence[Run], labels: Sequence[str], facts: dict[str, Any]) -> Trace:
    """The columns that the log has something for, under latfit's names."""
    replica = np.array([labels[run.engine] for run in runs], dtype=object)
    capacity = np.array([run.capacity for run in runs], dtype=np.float64)
    run_of = np.empty(len(columns["B"]), dtype=np.int32)
    time = columns.pop("time")
    if (time != NO_TIME).any():
        columns["t_s"] = np.empty(len(time))
    for number, run in enumerate(runs):
        run_of[run.rows] = number
        if "t_s" in columns:
            columns["t_s"][run.rows] = seconds_of(time[run.rows])
    run_names = _run_names(replica)
    codes: dict[str, Coded] = {"phase": (columns["phase"], PHASE_NAMES.tolist()), "run": (run_of, run_names.tolist())}
    columns["phase"] = PHASE_NAMES[columns["phase"]]
    columns["run"] = run_names[run_of]
    if any(labels):
        names = list(dict.fromkeys(labels))
        codes["replica"] = np.array([names.index(label) for label in replica])[run_of], names
        columns["replica"] = replica[run_of]
    if "kv_usage" in columns and capacity.any():
        columns["context_tokens"] = columns["kv_usage"] * np.where(capacity > 0, capacity, np.nan)[run_of]
    capacities = {label: run.capacity for label, run in zip(replica, runs, strict=True) if run.capacity}
    more = {"engines": len(set(labels)), "runs": len(runs), "kv_capacity_tokens": capacities}
    return Trace(columns, {**facts, **more}, codes)


def _run_names(replica: Array) -> Array:
    """`EngineCore_DP0/2` for the second run of that engine, `1` where engines have no names."""
    counts: dict[str, int] = {}
    names = []
    for label in replica:
        counts[label] = counts.get(label, 0) + 1
        names.append(f"{label}/{counts[label]}" if label else str(counts[label]))
    return np.array(names, dtype=object)


READER = Reader("vllm", "a vLLM server log with --enable-logging-iteration-details", recognises, read, path="gpu")
