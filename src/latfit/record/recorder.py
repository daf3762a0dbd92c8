"""StepRecorder: write steps of a running engine into trace files.

The engine's thread packs each step with one call into C, appends it to a queue, and never waits; a writer thread makes
columns and files. If the queue is full, rows are dropped and counted. No error reaches the engine.
docs/how-to/record.md has the memory and disk that it takes.
"""

import logging
import math
import os
import re
import secrets
import struct
import threading
import weakref
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.util import Finalize
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, get_type_hints

import numpy as np
from numpy.typing import NDArray

from latfit._version import __version__
from latfit.errors import LatfitError
from latfit.files import check_writable, make_folder
from latfit.provenance import utc_now
from latfit.trace import PHASES, REQUEST_TIMES, Array, Trace, period_ms, time_bin, write_trace


class Step(NamedTuple):
    """A step as the engine counts it. From `context_tokens` on, fields need `by_request`."""

    step: int
    T_ms: float
    prefill_requests: int
    prefill_tokens: int
    decode_requests: int
    decode_tokens: int
    queued_requests: int
    kv_usage: float = math.nan
    encoder_inputs: int = 0
    encoder_embeddings: int = 0
    dummy: bool = False
    preemptions: int = 0  # requests that lost their cache
    prefix_queries: int = 0  # prompt tokens of requests that were admitted
    prefix_hits: int = 0  # those of them that are in the prefix cache
    draft_tokens: int = 0  # drafted for requests that decoded
    accepted_tokens: int = 0
    wait_ms: float = math.nan  # part of T_ms in which the engine waited for the device; NaN if unknown
    context_tokens: int = 0  # cached tokens that all requests attend to
    prefill_context_tokens: int = 0  # those of requests in prefill
    prefill_attention: float = 0.0  # sum of p (k + p/2) over chunks of p tokens behind k cached ones
    longest_prefill: int = 0  # largest k + p
    recomputed_tokens: int = 0  # tokens of S that preempted requests compute again, as prefill


Row = Step | tuple[Any, ...]
"""A `Step`, or its values: a plain tuple is made in a third of the time."""

BY_REQUEST = Step._fields[Step._fields.index("context_tokens") :]
NO_COST = (
    *("encoder_inputs", "encoder_embeddings", "preemptions", "prefix_queries", "prefix_hits"),
    *("draft_tokens", "accepted_tokens"),
)
"""Counts of a step that its cost does not depend on."""

_CODES = {int: "q", float: "d", bool: "?"}
_INT32 = (
    *("prefill_requests", "decode_requests", "queued_requests", "encoder_inputs", "preemptions"),
    *("draft_tokens", "accepted_tokens"),
)
_FIELDS = [("t_s", "d")] + [
    (name, "i" if name in _INT32 else _CODES[kind]) for name, kind in get_type_hints(Step).items()
]
ROW = struct.Struct("<" + "".join(code for _, code in _FIELDS))
ROW_TYPE = np.dtype([(name, f"<{code}") for name, code in _FIELDS])
"""The same bytes seen by `struct` and by NumPy: the start of a step, then its fields."""


def columns(
    rows: NDArray[Any], labels: Mapping[str, str | int], kv_capacity_tokens: int | None, by_request: bool = False
) -> dict[str, Array]:
    """Return the trace columns of packed rows. Without `by_request`, cached tokens follow from the cache's usage."""
    prefill, decode = rows["prefill_requests"], rows["decode_requests"]
    # Fixed-width text, because pyarrow converts it without the interpreter's lock, which the engine needs.
    phase = np.array(PHASES)[np.where(prefill == 0, 0, np.where(decode == 0, 1, 2))]
    found: dict[str, Array] = {
        "B": prefill + decode,
        "S": rows["prefill_tokens"] + rows["decode_tokens"],
        "T_ms": rows["T_ms"].copy(),
        "t_s": rows["t_s"].copy(),
        "phase": phase,
        "prefill_requests": prefill.copy(),
        "prefill_tokens": rows["prefill_tokens"].copy(),
    }
    if kv_capacity_tokens is not None:
        whole = np.rint(rows["kv_usage"] * kv_capacity_tokens)
        found["context_tokens"] = whole.astype(np.int64) if np.isfinite(whole).all() else whole
    for name in ("queued_requests", "kv_usage", "step", "dummy", *NO_COST, *(BY_REQUEST if by_request else ())):
        found[name] = rows[name].copy()
    if np.isfinite(rows["wait_ms"]).any():
        found["wait_ms"] = rows["wait_ms"].copy()
    # The last row's is missing: its successor is in the next file.
    found["period_ms"] = period_ms(Trace(found))
    for name, value in labels.items():
        found[name] = np.full(len(rows), value)
    return found


@dataclass(frozen=True)
class Buffers:
    rows_per_file: int = 65_536
    max_pending: int = 4  # files' worth of rows that may wait for the disk
    flush_s: float = 300.0
    first_s: float = 10.0  # of the first file, so that errors show soon
    keep_bytes: float | None = None  # size of recorders' files beyond which the oldest are deleted


CLOSE_S = 10.0
POLL_S = 0.1  # of the writer
RETRY_S = 10.0  # after a file that the disk refused; meanwhile rows wait as for a slow disk
MAX_TIMES = 1_000_000  # times of requests that may wait for the writer, some 100 bytes each
OURS = re.compile(r"trace-\d{8}T\d{6}Z-[0-9a-f]{6}-.*-\d{6,}\.parquet")
"""What recorders call their files; no other is ever deleted."""

_pack = ROW.pack


class StepRecorder:
    """Record one engine's steps into `folder` as `trace-<run>-<replica>-<number>.parquet`.

    `add` is for one thread; `close` and the end of the process write what is pending. A forked child gets its own
    `run`. labels: columns of every row.  facts: provenance of every file.
    """

    def __init__(
        self,
        folder: Path,
        *,
        replica: str = "0",
        labels: Mapping[str, str | int] | None = None,
        facts: Mapping[str, Any] | None = None,
        buffers: Buffers = Buffers(),
        log: logging.Logger | None = None,
    ) -> None:
        self.folder = folder
        self.replica = replica
        self.labels = dict(labels or {})
        self.facts = dict(facts or {})
        self.kv_capacity_tokens: int | None = None
        self.by_request = False
        self._rows_per_file = max(1, buffers.rows_per_file)
        self._buffers = buffers
        self.advice = ""  # logged with a problem of the folder
        self._log = log or logging.getLogger(__name__)
        # Load now what the first file needs, while no engine waits: a fifth of a second that would stall its thread.
        import pyarrow as pa
        import pyarrow.parquet

        pa.table({"": np.array([""])})
        self._begin_run()
        living = weakref.ref(self)

        def begin_run_in_child() -> None:
            if (recorder := living()) is not None:
                recorder._begin_run()

        os.register_at_fork(after_in_child=begin_run_in_child)

    def add(self, step: Row, ended_s: float | None = None) -> None:
        """Add a step that ended now, or at a moment of `time.monotonic`. Never blocks, never raises."""
        try:
            if len(self._rows) >= self._capacity:
                self._dropped += 1
                if self._capacity:
                    text = "latfit drops steps of its trace: %s is slower than the engine, or stands still"
                    self._say_once("drop", text, self.folder)
                return
            end_s = monotonic() if ended_s is None else ended_s
            if self._thread is None:
                self._start()
            self._rows.append(_pack(end_s - self._origin - step[1] * 1e-3, *step))
        except Exception as error:  # noqa: BLE001  the engine must outlive whatever its numbers are
            self.refuse(error)

    def add_time(self, name: str, ms: float) -> None:
        """Add a time of a request, ttft_ms or tpot_ms. Never blocks, never raises for a number."""
        if 0 < ms < math.inf:
            self._times.append((name, time_bin(ms)))

    @property
    def rows_dropped(self) -> int:
        """Rows lost so far: the queue was full, or the disk refused their file."""
        return self._dropped + self._lost

    def refuse(self, error: BaseException) -> None:
        """Count a step that could not be recorded; the first is logged."""
        self.rows_refused += 1
        self._say_once("refused", "latfit could not record a step (%s: %s)", type(error).__name__, error, advice=False)

    def check_folder(self) -> bool:
        """Return whether a file can be made in the folder, which is created; log what is wrong."""
        try:
            make_folder(self.folder)
            check_writable(self._file(0))
        except (LatfitError, OSError) as error:
            self._say_of_folder(error)
            return False
        return True

    def _file(self, number: int) -> Path:
        return self.folder / f"trace-{self.run}-{self.replica}-{number:06d}.parquet"

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write what is pending and stop; give up after `timeout_s`. Never raises."""
        try:
            self._capacity = 0
            if self._thread is None:
                return
            self._stop.set()
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                self._say_once("close", "latfit's trace is incomplete: %s does not answer", self.folder)
            if self._at_exit is not None:
                self._at_exit.cancel()
        except Exception as error:  # noqa: BLE001  it runs while an engine shuts down, which must go on
            text = "latfit could not close its trace (%s: %s)"
            self._say_once("close", text, type(error).__name__, error, advice=False)

    def _begin_run(self) -> None:
        """Begin with fresh state: at the start, and in a forked child, whose parent keeps the rows and the thread."""
        started = datetime.now(UTC)
        # The random part keeps apart processes that start in one second, in containers where each is process 1.
        self.run = f"{started:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
        self.started = started.isoformat(timespec="milliseconds")
        self.rows_written = self.rows_refused = self.files_deleted = 0  # refused: rows that were not numbers
        # One counter a thread: `+=` on a shared one may lose counts.
        self._dropped = self._lost = 0
        self._origin = monotonic()
        # The engine's thread appends, the writer's takes; the oldest go where the disk stands still.
        self._times: deque[tuple[str, int]] = deque(maxlen=MAX_TIMES)
        self._counted: dict[str, Counter[int]] = {}
        self._number = 0
        self._said: set[str] = set()
        self._rows: deque[bytes] = deque()
        self._capacity = self._rows_per_file * (max(0, self._buffers.max_pending) + 1)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._at_exit: Finalize | None = None

    def _start(self) -> None:
        thread = threading.Thread(target=self._write_until_closed, name=f"latfit-trace-{self.replica}", daemon=True)
        thread.start()
        self._thread = thread
        # Not an atexit function: those don't run in the processes that `multiprocessing` forks, finalizers do.
        self._at_exit = Finalize(None, self.close, exitpriority=10)

    def _write_until_closed(self) -> None:
        size, pending, stopping, waits = self._rows_per_file * ROW.size, bytearray(), False, False
        left_s = min(self._buffers.first_s, self._buffers.flush_s)  # until the next file
        while not stopping:
            # The queue is emptied often: a long pass would hold the interpreter's lock, which the engine needs.
            stopping = self._stop.wait(POLL_S)
            left_s -= POLL_S
            is_refused = False
            while not is_refused:
                while self._rows and len(pending) < size:
                    pending += self._rows.popleft()
                is_due = stopping or left_s <= 0 or (len(pending) == size and not waits)
                if not (pending and is_due):
                    break
                is_refused = waits = not self._write_rows(pending)
                left_s = min(RETRY_S, self._buffers.flush_s) if waits else self._buffers.flush_s
                pending = pending if waits else bytearray()
        self._lost += len(pending) // ROW.size + len(self._rows)

    def _write_rows(self, packed: bytearray) -> bool:
        try:
            rows = np.frombuffer(packed, dtype=ROW_TYPE)
            labels = {**self.labels, "run": self.run, "replica": self.replica}
            trace = Trace(columns(rows, labels, self.kv_capacity_tokens, self.by_request), self._provenance())
            make_folder(self.folder)
            write_trace(self._file(self._number), trace)
        except Exception as error:  # noqa: BLE001  a thread that dies would stop the recording for good
            self._say_of_folder(error)
            return False
        self._number += 1
        self.rows_written += len(rows)
        self._delete_oldest()
        return True

    def _delete_oldest(self) -> None:
        keep = self._buffers.keep_bytes
        if keep is None:
            return
        last = self._file(self._number - 1).name
        try:
            files = [entry for entry in os.scandir(self.folder) if OURS.fullmatch(entry.name)]
            sizes = {entry.path: entry.stat().st_size for entry in files}
            excess = sum(sizes.values()) - keep
            for entry in sorted(files, key=lambda entry: (entry.stat().st_mtime_ns, entry.name)):
                if excess <= 0:
                    return
                if entry.name != last:
                    Path(entry.path).unlink(missing_ok=True)
                    self.files_deleted += 1
                    excess -= sizes[entry.path]
        except FileNotFoundError:  # another recorder has deleted it meanwhile: the next one counts anew
            return
        except OSError as error:
            self._say_once("keep", "latfit cannot delete old traces: %s", error)

    def _say_of_folder(self, error: BaseException) -> None:
        found = f"{error.where}: {error.found}" if isinstance(error, LatfitError) else str(error)
        self._say_once("write", "latfit cannot write its trace: %s", found.replace("\n", " "))

    def _provenance(self) -> dict[str, Any]:
        while self._times:  # how many requests so far had which times, by bin
            name, place = self._times.popleft()
            self._counted.setdefault(name, Counter())[place] += 1
        times = {name: {str(place): n for place, n in each.items()} for name, each in self._counted.items()}
        return {
            **self.facts,
            **({REQUEST_TIMES: times} if times else {}),
            "latfit": __version__,
            "created": utc_now(),
            "run": self.run,
            "run_started": self.started,
            "replica": self.replica,
            "file": self._number,
            "kv_capacity_tokens": self.kv_capacity_tokens,
            "rows_dropped_so_far": self.rows_dropped,
            "rows_refused_so_far": self.rows_refused,
            "files_deleted_so_far": self.files_deleted,
        }

    def _say_once(self, about: str, message: str, *values: object, advice: bool = True) -> None:
        if about not in self._said:
            self._said.add(about)
            told = f"; {self.advice}" if advice and self.advice else ""
            self._log.warning(message + "%s (said once; the trace files count)", *values, told)
