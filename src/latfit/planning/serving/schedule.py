"""Plan a replica schedule for a recorded day and compare it with a fixed replica count.

Each window gets the fewest engines that meet the targets for its requests, started their start-up time ahead. The whole
recording is then simulated, and windows that miss a target get one engine more until all meet them. Details:
docs/theory/planning.md, "Schedules".
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from latfit.planning.serving.evaluate import VERIFIED, Evaluator, Measured, Setup
from latfit.planning.serving.result import HoursOfReplicas, SchedulePlan, Window
from latfit.simulation import EngineRun, EngineSettings, Schedule
from latfit.stats import FloatArray
from latfit.workload import RecordedLoad

LEAD = 5.0
"""Warm-up before a window, in latencies of a request without contention."""


@dataclass(frozen=True, eq=False)
class Day:
    """A recording cut into windows: edges (k + 1,) in ms, and the first request of each (k + 1,)."""

    load: RecordedLoad
    edges: FloatArray
    rows: Sequence[int]
    start_up_ms: float

    @property
    def windows(self) -> int:
        return len(self.rows) - 1

    def part(self, window: int, lead_ms: float) -> tuple[RecordedLoad, float]:
        """Return the requests of a window with their warm-up, and the warm-up's share."""
        arrival = self.load.requests.arrival_ms
        first, last = self.rows[window], self.rows[window + 1]
        begin = int(np.searchsorted(arrival, self.edges[window] - lead_ms))
        # Half a request more, so that rounding the share gives these rows again.
        share = (first - begin + 0.5) / (last - begin) if first > begin else 0.0
        return RecordedLoad(self.load.requests.select(slice(begin, last))), share

    def asked(self, counts: Sequence[int]) -> Schedule:
        """Return the schedule that has each window's count ready at its start."""
        # Engines are there from the beginning, though the first request may come later.
        begins = [0.0, *self.edges[1:-1].tolist()]
        moments = sorted({0.0, *(max(each - self.start_up_ms, 0.0) for each in begins), *begins[1:]})
        needed = []
        for at in moments:
            first = bisect.bisect_right(begins, at) - 1
            last = bisect.bisect_right(begins, at + self.start_up_ms) - 1
            needed.append(max(counts[first : last + 1]))
        kept = [k for k in range(len(moments)) if k == 0 or needed[k] != needed[k - 1]]
        return Schedule(tuple(moments[k] for k in kept), tuple(needed[k] for k in kept))


def day_of(load: RecordedLoad, window_ms: float, start_up_ms: float) -> Day:
    """Cut a recording into windows; the remainder belongs to the last."""
    arrival = load.requests.arrival_ms
    count = max(math.floor(float(arrival[-1] - arrival[0]) / window_ms), 1)
    edges = arrival[0] + window_ms * np.arange(count + 1)
    edges[-1] = max(edges[-1], arrival[-1])
    rows = [*np.searchsorted(arrival, edges[:-1]).tolist(), len(arrival)]
    return Day(load, edges, rows, start_up_ms)


def schedule_engines(evaluator: Evaluator, best: Measured, day: Day, price_per_hour: float | None) -> SchedulePlan:
    """Plan a schedule with at most the fixed replica count of `best`."""
    settings, most = best.setup.settings, best.setup.replicas
    counts = evaluator.side_by_side(lambda k: _least(evaluator, settings, day, k, most), range(day.windows))
    found = _measured(evaluator, settings, day, counts)
    while not _kept(evaluator, found, day, counts, most):
        missed = [k for k in range(day.windows) if counts[k] < most and not _window_met(evaluator, found, day, k)]
        for k in missed or [k for k in range(day.windows) if counts[k] < most]:
            counts[k] += 1
        found = _measured(evaluator, settings, day, counts)
    setup = found.setup
    found = evaluator.measure(setup, replications=VERIFIED)
    arrival = day.load.requests.arrival_ms
    spans = np.diff(day.edges) / 1e3
    windows = [
        Window(float((day.edges[k] - arrival[0]) / 1e3), float((day.rows[k + 1] - day.rows[k]) / spans[k]), counts[k])
        for k in range(day.windows)
    ]

    def paid(run: Measured) -> dict[str, Any]:
        hours = run.summary.replica_hours
        price = None if price_per_hour is None else 1e6 * price_per_hour * hours / _tokens(run)
        attained = run.summary.slo_attainment
        return {"replica_hours": hours, "slo_attainment": attained, "price_per_million_tokens": price}

    return SchedulePlan(
        feasible=found.met,
        window_s=float(spans[0]),
        start_up_s=day.start_up_ms / 1e3,
        windows=windows,
        replicas_at=day.asked(counts).steps_s,
        targets=list(found.reached),
        fixed=HoursOfReplicas(**paid(best)),
        **paid(found),
    )


def _tokens(found: Measured) -> float:
    return float(found.first.requests.output_tokens.sum())


def _least(evaluator: Evaluator, settings: EngineSettings, day: Day, window: int, most: int) -> int:
    """Return the fewest engines that meet the targets for a window; `most` if no fewer do."""
    if day.rows[window + 1] == day.rows[window]:
        return 1
    part, lead = day.part(window, LEAD * evaluator.alone_ms)
    own = replace(evaluator.elsewhere(part, evaluator.costs), lead=lead)
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if own.measure(Setup(settings, middle)).met else (middle, high)
    return high


def _measured(evaluator: Evaluator, settings: EngineSettings, day: Day, counts: Sequence[int]) -> Measured:
    asked = day.asked(counts)
    return evaluator.measure(Setup(settings, asked.replicas[0], asked, day.start_up_ms))


def _kept(evaluator: Evaluator, found: Measured, day: Day, counts: Sequence[int], most: int) -> bool:
    """Whether the targets are met overall, and in every window below `most` engines."""
    if min(counts) >= most:
        return True
    return found.met and all(counts[k] >= most or _window_met(evaluator, found, day, k) for k in range(day.windows))


def _window_met(evaluator: Evaluator, found: Measured, day: Day, window: int) -> bool:
    """Whether a window's requests meet the targets in a run of the whole recording."""
    rows = slice(day.rows[window], day.rows[window + 1])
    if rows.start == rows.stop:
        return True
    return all(each.met for each in evaluator.targets.reached([_part_of(found.first, rows)], 0.0))


def _part_of(run: EngineRun, rows: slice) -> EngineRun:
    """Return a run restricted to these requests."""
    times = {name: getattr(run, name)[rows] for name in ("start_ms", "seen_ms", "first_ms", "last_ms", "replica")}
    return replace(run, requests=run.requests.select(rows), **times)
