"""A running server recorded from outside: its `/metrics`, asked for again and again, as means over windows.

The mean step of a window comes from the differences of counters (`latfit.metrics.interval`); nothing in the server is
changed or restarted. A window ends when it holds `FEWEST_STEPS`, since one step more or less at its ends is an error of
1/N, or when nothing runs. It never goes across a moment at which the server did not answer, or started again: then the
counters are below what they were, and a new run begins. Windows in which requests were preempted are left out, since
what these compute again is in no counter.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from latfit.errors import BadInput
from latfit.files import write_bytes
from latfit.metrics import FULL, SLOT_STEPS, Interval, Reading, ServerState, Unanswered, between, limit_shown
from latfit.provenance import utc_now
from latfit.trace import LARGEST_REQUESTS, LARGEST_TOKENS, WATCHED, Trace, write_trace

FEWEST_STEPS = 20
OF_ALL_STEPS = 5e-4
"""Share of all steps so far that a window of llama.cpp holds at least: its mean of busy slots since the start has six
digits, so the difference of two is off by up to 1e-5 of all steps, 2 % of such a window."""
LONGEST_S = 10.0
"""A window ends after this time with the steps there are."""
SAVED_EVERY_S = 60.0
"""A file is written this often, so that what is killed loses no more."""

FEWEST_QUEUED = 10
"""Readings with waiting requests that show a limit."""

KNOWN_AT_ENDS = ("kv_usage", "context_tokens", "queued_requests", "B_sd")
"""Columns that not every server tells."""


@dataclass
class MetricsRecorder:
    """The windows of one server. out: the trace; the first and last text of the last run go beside it.

    polls, failed: readings, and those that were not answered.  restarts: how often the server started again.
    preempted: windows that were left out.  queued: requests that ran in
    each engine whenever others waited though the KV cache had room; most_running: at any reading.
    """

    out: Path
    labels: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    polls: int = 0
    failed: int = 0
    restarts: int = 0
    preempted: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    first: Reading | None = None
    last: Reading | None = None
    queued: list[float] = field(default_factory=list)
    most_running: float = 0.0
    _begun: Reading | None = None
    _saved_s: float = -math.inf
    _started: str = field(default_factory=utc_now)
    _origin_s: float = math.nan

    def take(self, told: "Reading | Unanswered") -> Interval | None:
        """One reading more; what happened since the one before, where both were answered by one server process. Raises
        BadInput where this server's counters tell no steps, TargetNotWritable."""
        self.polls += 1
        if isinstance(told, Unanswered):
            self.failed += 1
            self._begun = None
            return None
        if self.last is None:
            _check(told.state)
            self._origin_s, self._saved_s = told.t_s, told.t_s
        elif told.state.fell_below(self.last.state):
            self.restarts += 1
            self.first = self._begun = None
            self.queued.clear()
        before, self.last = self.last if self._begun is not None else None, told
        self.first = self.first or told
        self._begun = self._begun or told
        self.most_running = max(self.most_running, told.state.running / told.state.engines)
        if told.state.waiting > 0 and told.state.kv_usage < FULL:
            self.queued.append(told.state.running / told.state.engines)
        since = between(self._begun, told)
        if told is not self._begun and self._ends(since):
            self._close(since, self._begun)
            self._begun = told
        if told.t_s - self._saved_s >= SAVED_EVERY_S:
            self._saved_s = told.t_s
            self.write()
        return None if before is None else between(before, told)

    def trace(self) -> Trace:
        """The windows so far."""
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        columns = {name: np.array([row.get(name, math.nan) for row in self.rows]) for name in names}
        unknown = [name for name in KNOWN_AT_ENDS if name in columns and not np.isfinite(columns[name]).any()]
        kept = {name: column for name, column in columns.items() if name not in unknown}
        for name in ("run", *self.labels):
            texts = [row["run"] for row in self.rows] if name == "run" else [self.labels[name]] * len(self.rows)
            kept[name] = np.array(texts, dtype=object)
        return Trace(kept, self._provenance())

    def write(self) -> None:
        """The trace and both texts, each whole or not at all; nothing without a window, so that no texts lie beside
        the trace of another recording. Raises TargetNotWritable."""
        if not self.rows:
            return
        write_trace(self.out, self.trace())
        for place, reading in zip(texts_beside(self.out), (self.first, self.last), strict=True):
            if reading is not None:
                write_bytes(place, reading.text)

    def _ends(self, since: Interval) -> bool:
        if since.of_slots:
            enough = since.steps >= max(FEWEST_STEPS, OF_ALL_STEPS * since.last.counters["steps"])
        else:
            enough = since.steps >= FEWEST_STEPS or since.seconds >= LONGEST_S
        return enough or min(since.first.running, since.last.running) <= 0

    def _close(self, since: Interval, begun: Reading) -> None:
        row = since.mean_step()
        if row is None:
            return
        if math.isfinite(since.arrived):
            row["arrived_requests"] = since.arrived
        preempted = since.count("preemptions")
        if preempted > 0:
            self.preempted += 1
            return
        self.rows.append(
            {**row, "t_s": begun.t_s - self._origin_s, "idle": not since.was_busy, "run": str(self.restarts)}
        )

    def _limit(self) -> dict[str, int]:
        """The sequence limit that the readings show, as a fact; empty where they show none."""
        limit = limit_shown(self.queued) if len(self.queued) >= FEWEST_QUEUED else None
        return {} if limit is None else {"max_num_seqs": round(limit)}

    def _provenance(self) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        if self.last is not None and self.first is not None:
            state = self.last.state
            facts = {"engine": state.engine, "engines": state.engines, **self._limit(), **state.facts}
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
    """Tokens that no step between two readings exceeded, where a histogram tells."""
    seen = between(first, last).histogram("step_tokens")
    edge = math.inf if seen is None else seen.bucket(1.0)[1]
    return edge if math.isfinite(edge) else None


def texts_beside(out: Path) -> tuple[Path, Path]:
    """Where the first and the last text of `/metrics` go."""
    stem = out.with_suffix("")
    return stem.with_name(f"{stem.name}.metrics-before.txt"), stem.with_name(f"{stem.name}.metrics-after.txt")


OTHER_WAYS = {
    "TensorRT-LLM": "Record its iterations instead: latfit ingest reads what enable_iter_perf_stats publishes.",
    "llama.cpp": "Start a llama.cpp that publishes n_busy_slots_per_decode.",
    "SGLang": "Start SGLang of a version that publishes cuda_graph_passes_total and realtime_tokens_total.",
}


def _check(state: ServerState) -> None:
    """Raises BadInput where no window of this server can be told."""
    counted = "step_tokens" in state.histograms or "steps" in state.counters
    if (state.live and counted) or SLOT_STEPS in state.counters:
        return
    why = "does not count its steps" if state.live else "counts tokens when requests end, not as steps are made"
    raise BadInput(
        f"{state.engine} {why}, so windows tell no mean step",
        where="/metrics",
        remedy=OTHER_WAYS.get(state.engine, "Record single steps: latfit.record.StepRecorder, or the engine's log."),
    )
