"""Logs of a vLLM server that was started with `--enable-logging-iteration-details`: a line a step.

Older versions print it from the engine's process, newer ones from the API server, which adds the use of the KV cache:

    (EngineCore_DP0 pid=2010) INFO 12-22 21:44:40 [core.py:349] Iteration(515): 0 context requests, 0 context tokens,
        20 generation requests, 20 generation tokens, iteration elapsed time: 10.99 ms
    (APIServer pid=1) INFO 12-22 21:44:40 [loggers.py:199] Engine 000: Iteration(12): … time: 25.10 ms (dummy),
        GPU KV cache usage: 41.2%, encoder inputs: 4, encoder output embeddings: 3520

A step is what has all of it up to ` ms`, wherever it stands in its line.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

from latfit.errors import BadInput
from latfit.trace.readers.reader import Options, Reader
from latfit.trace.readers.source import Source
from latfit.trace.readers.vllm.state import MOST_STREAMS, PHASE_NAMES, ROW, SLACK_BYTES, TOO_MANY_STREAMS, new_state
from latfit.trace.table import Array, Trace

READ_BYTES = 1 << 20
"""Small enough to stay in the processor's cache between reading and scanning."""

LONGEST_LINE = 1 << 20
"""What is longer without a newline is read in pieces: it is no log."""

SHORTEST_STEP, TYPICAL_STEP = 100, 150
"""Bytes of a step's line: fewer than any has, and than most have."""

MOST_GUESSED = 1 << 26

OPTIONAL = {
    "t_s": ("with_time", np.nan),
    "kv_usage": ("with_usage", np.nan),
    "dummy": ("dummies", False),
    "encoder_inputs": ("with_encoders", 0),
    "encoder_embeddings": ("with_encoders", 0),
}
"""Columns that a log may lack: what counts the steps that have them, and their value for a step that has not."""

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
    """Every step of the log, also empty ones. `options` are for tables, and change nothing here.

    Raises BadInput where there is no step, and where there are more engines than any deployment has.
    """
    guess = source.path.stat().st_size // TYPICAL_STEP if source.compression is None else 0
    with source.open() as stream:
        columns, (state,) = _scanned(stream, source.name, READ_BYTES, min(guess, MOST_GUESSED))
    if state["steps"] == 0:
        torn = f" ({state['cut']} are cut short)" if state["cut"] else ""
        raise BadInput(
            f"no line of its {state['lines']} is a whole step{torn}",
            where=source.name,
            remedy="Start vLLM with --enable-logging-iteration-details, and without --disable-log-stats.",
        )
    return _trace(columns, state)


def _scanned(stream: BinaryIO, name: str, block: int, guess: int) -> tuple[dict[str, Array], Array]:
    """The columns of all steps, and the state of the scan at the end; read in blocks of `block` bytes, with room for
    `guess` steps at first: memory that is never written to takes no room.
    """
    from latfit.trace.readers.vllm.scan import scan

    state, filled = new_state(), 0
    names = ROW.names or ()
    columns = {column: np.empty(guess, dtype=ROW[column]) for column in names if column not in OPTIONAL}
    rows = np.empty(0, dtype=ROW)
    for text, size in _whole_lines(stream, block):
        most = size // SHORTEST_STEP + 1
        if most > len(rows):
            rows = np.empty(most, dtype=ROW)
        address = np.frombuffer(text, dtype=np.uint8).ctypes.data
        written = scan(address, address + size, text.find(b"\x1b", 0, size) >= 0, state, rows)
        if written < 0:
            raise _mixed_up(name, written)
        for column, (counter, absent) in OPTIONAL.items():
            if column not in columns and state[0][counter] > 0:
                columns[column] = np.empty(max(guess, filled), dtype=ROW[column])
                columns[column][:filled] = absent
        for column, values in columns.items():
            if filled + written > len(values):
                columns[column] = values = _grown(values, filled, filled + written)
            values[filled : filled + written] = rows[column][:written]
        filled += written
    return {column: columns[column][:filled] for column in names if column in columns}, state


def _grown(values: Array, filled: int, wanted: int) -> Array:
    grown = np.empty(max(2 * filled, wanted), dtype=values.dtype)
    grown[:filled] = values[:filled]
    return grown


def _mixed_up(name: str, written: int) -> BadInput:
    what = (
        f"more than {MOST_STREAMS:,} engines" if written == TOO_MANY_STREAMS else "step counters that go back and forth"
    )
    return BadInput(
        f"has {what}",
        where=name,
        remedy="Give the log of one deployment, with the names of its engines as vLLM writes them.",
    )


def _whole_lines(stream: BinaryIO, block: int) -> Iterator[tuple[bytearray, int]]:
    """(buffer, end of the whole lines in it): the same buffer again and again, which holds `SLACK_BYTES` more.

    The last line of all gets the newline that it may lack.
    """
    buffer, kept = bytearray(block + SLACK_BYTES), 0
    while True:
        if kept > (len(buffer) - SLACK_BYTES) // 2:
            buffer = buffer + bytes(len(buffer))
        with memoryview(buffer) as view:
            got = stream.readinto(view[kept : len(buffer) - SLACK_BYTES])  # type: ignore[attr-defined]
        if not got:
            break
        filled = kept + got
        end = buffer.rfind(b"\n", kept, filled) + 1
        if end == 0 and filled >= LONGEST_LINE:
            buffer[filled] = ord("\n")
            yield buffer, filled + 1
            kept = 0
            continue
        if end > 0:
            yield buffer, end
            buffer[: filled - end] = buffer[end:filled]
        kept = filled - end
    if kept:
        buffer[kept] = ord("\n")
        yield buffer, kept + 1


def _trace(columns: dict[str, Array], state: Any) -> Trace:
    """The columns that the log has something for, under latfit's names."""
    runs = state["runs"][: state["runs_seen"]]
    sizes = state["streams"]["label_bytes"][: state["streams_seen"]]
    labels = [
        bytes(label[:size]).decode("utf-8", "replace") for label, size in zip(state["labels"], sizes, strict=False)
    ]
    run = columns.pop("run")
    replica = np.array([labels[stream] for stream in runs["stream"]], dtype=object)
    columns["phase"] = np.array(PHASE_NAMES, dtype=object)[columns["phase"]]
    columns["run"] = _run_names(replica)[run]
    if any(labels):
        columns["replica"] = replica[run]
    capacity = runs["capacity"].astype(np.float64)
    if "kv_usage" in columns and capacity.any():
        columns["context_tokens"] = columns["kv_usage"] * np.where(capacity > 0, capacity, np.nan)[run]
    return Trace(columns, _provenance(state, labels, replica))


def _run_names(replica: Array) -> Array:
    """`EngineCore_DP0/2` for the second run of that engine, `1` where engines have no names."""
    counts: dict[str, int] = {}
    names = []
    for label in replica:
        counts[label] = counts.get(label, 0) + 1
        names.append(f"{label}/{counts[label]}" if label else str(counts[label]))
    return np.array(names, dtype=object)


def _provenance(state: Any, labels: list[str], replica: Array) -> Mapping[str, Any]:
    capacities = state["runs"]["capacity"][: state["runs_seen"]]
    return {
        "format": "vllm",
        "lines": int(state["lines"]),
        "iteration_lines": int(state["steps"]),
        "cut_lines": int(state["cut"]),
        "engines": len(set(labels)),
        "runs": int(state["runs_seen"]),
        "kv_capacity_tokens": {label: int(tokens) for label, tokens in zip(replica, capacities, strict=True) if tokens},
    }


READER = Reader("vllm", "a vLLM server log with --enable-logging-iteration-details", recognises, read, path="gpu")
