"""Record a running server from outside: its `/metrics`, polled, as means over windows.

A window ends when it holds MIN_STEPS or when nothing runs, and never spans a restart. Windows with preemptions are left
out: no counter has the recomputed tokens.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from latfit.engines import SLOT_STEPS, engine_named
from latfit.errors import BadInput, TargetNotWritable
from latfit.files import write_bytes
from latfit.metrics import FULL, Interval, Reading, ServerState, Unanswered, between, limit_shown
from latfit.provenance import utc_now
from latfit.trace import LARGEST_REQUESTS, LARGEST_TOKENS, WATCHED, Trace, write_trace

MIN_STEPS = 20
MIN_SHARE_OF_STEPS = 5e-4
"""Of all steps, in a window of llama.cpp: its mean of busy slots has six digits, an error of 2 % in such a window."""
LONGEST_S = 10.0  # a window ends after this time with the steps there are
SAVED_EVERY_S = 60.0
MIN_QUEUED = 10  # readings with waiting requests that show a limit
OPTIONAL = ("kv_usage", "context_tokens", "queued_requests", "B_sd")
"""Columns that not every server tells."""


@dataclass
class MetricsRecorder:
    """The windows of one server; its first and last text go beside the trace."""

    out: Path
    labels: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    polls: int = 0
    failed: int = 0  # readings that were not answered
    restarts: int = 0
    preempted: int = 0  # windows that were left out
    rows: list[dict[str, Any]] = field(default_factory=list)
    first: Reading | None = None
    last: Reading | None = None
    queued: list[float] = field(default_factory=list)  # running in each engine while others waited for no cache
    most_running: float = 0.0  # in each engine, at any reading
    keep_rows: int | None = None  # set from another thread: the next reading drops all later rows and begins a window
    _begun: Reading | None = None
    _saved_s: float = -math.inf
    _started: str = field(default_factory=utc_now)
    _origin_s: float = math.nan

    def take(self, reading: "Reading | Unanswered") -> Interval | None:
        """Return what happened since the last reading. Raises BadInput for a server that counts no steps."""
        self.polls += 1
        if self.keep_rows is not None:
            del self.rows[self.keep_rows :]
            self.keep_rows = self._begun = None
        if isinstance(reading, Unanswered):
            self.failed += 1
            self._begun = None
            return None
        state = reading.state
        if self.last is None:
            _check(state)
            self._origin_s = self._saved_s = reading.t_s
        elif state.fell_below(self.last.state):
            self.restarts += 1
            self.first = self._begun = None
            self.queued.clear()
        before, self.last = self.last if self._begun is not None else None, reading
        self.first, self._begun = self.first or reading, self._begun or reading
        running = state.running / state.engines
        self.most_running = max(self.most_running, running)
        if state.waiting > 0 and state.kv_usage < FULL:
            self.queued.append(running)
        window = between(self._begun, reading)
        if reading is not self._begun and self._ends(window):
            self._add(window, self._begun)
            self._begun = reading
        if reading.t_s - self._saved_s >= SAVED_EVERY_S:
            self._saved_s = reading.t_s
            with suppress(TargetNotWritable):  # a full disk may have space again at the next time, or at the end
                self.write()
        return None if before is None else between(before, reading)

    def trace(self) -> Trace:
        names = list(dict.fromkeys(name for row in self.rows for name in row if name != "run"))
        columns = {name: np.array([row.get(name, math.nan) for row in self.rows]) for name in names}
        known = {n: column for n, column in columns.items() if n not in OPTIONAL or np.isfinite(column).any()}
        texts = {"run": [row["run"] for row in self.rows]}
        texts |= {name: [value] * len(self.rows) for name, value in self.labels.items()}
        return Trace(known | {n: np.array(text, dtype=object) for n, text in texts.items()}, self._provenance())

    def write(self) -> None:
        """Write the trace and both texts; nothing without a window. Raises TargetNotWritable."""
        if not self.rows:
            return
        write_trace(self.out, self.trace())
        for place, reading in zip(texts_beside(self.out), (self.first, self.last), strict=True):
            if reading is not None:
                write_bytes(place, reading.text)

    def _ends(self, window: Interval) -> bool:
        if window.of_slots:
            enough = window.steps >= max(MIN_STEPS, MIN_SHARE_OF_STEPS * window.last.counters["steps"])
        else:
            enough = window.steps >= MIN_STEPS or window.seconds >= LONGEST_S
        return enough or min(window.first.running, window.last.running) <= 0

    def _add(self, window: Interval, begun: Reading) -> None:
        row: dict[str, Any] | None = window.mean_step()
        if row is None:
            return
        if window.count("preemptions") > 0:
            self.preempted += 1
            return
        if math.isfinite(window.arrived):
            row["arrived_requests"] = window.arrived
        row |= {"t_s": begun.t_s - self._origin_s, "idle": not window.was_busy, "run": str(self.restarts)}
        self.rows.append(row)

    @property
    def limit(self) -> int | None:
        """Requests that the engine ran at once whenever others waited; None if too few readings show it."""
        shown = limit_shown(self.queued) if len(self.queued) >= MIN_QUEUED else None
        return None if shown is None else round(shown)

    def _provenance(self) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        if self.last is not None and self.first is not None:
            state = self.last.state
            shown = {} if self.limit is None else {"max_num_seqs": self.limit}
            facts = {"engine": state.engine, "engines": state.engines, **shown, **state.facts}
            facts["texts_at_s"] = [each.t_s - self._origin_s for each in (self.first, self.last)]
            facts |= {LARGEST_REQUESTS: self.most_running, LARGEST_TOKENS: largest_step(self.first, self.last)}
        return {
            "source": WATCHED,
            "recorded": self._started,
            **facts,
            **self.settings,
            "windows": len(self.rows),
            "preempted_windows": self.preempted,
            "polls": self.polls,
            "unanswered": self.failed,
            "restarts": self.restarts,
        }


def largest_step(first: Reading, last: Reading) -> float | None:
    """Return the tokens that no step between two readings exceeded; None without a histogram."""
    seen = between(first, last).histogram("step_tokens")
    edge = math.inf if seen is None else seen.bucket(1.0)[1]
    return edge if math.isfinite(edge) else None


def texts_beside(out: Path) -> tuple[Path, Path]:
    stem = out.with_suffix("")
    return stem.with_name(f"{stem.name}.metrics-before.txt"), stem.with_name(f"{stem.name}.metrics-after.txt")


def _check(state: ServerState) -> None:
    """Raise BadInput if this server's counters give no windows."""
    counted = "step_tokens" in state.histograms or "steps" in state.counters
    if (state.live and counted) or SLOT_STEPS in state.counters:
        return
    why = "does not count its steps" if state.live else "counts tokens when requests end, not as steps are made"
    found = f"{state.engine} {why}, so windows have no mean step"
    raise BadInput(found, where="/metrics", remedy=engine_named(state.engine).steps_help)
