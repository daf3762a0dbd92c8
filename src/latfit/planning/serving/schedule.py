"""Plan a replica schedule for a recorded day.

Each window gets the fewest engines that meet the targets, started ahead; windows that miss one in a simulation of the
whole recording get one engine more.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from latfit.planning.serving.evaluate import VERIFIED, Evaluator, Measured, Setup
from latfit.planning.serving.result import HoursOfReplicas, SchedulePlan, Window
from latfit.simulation import EngineSettings, Schedule
from latfit.stats import FloatArray
from latfit.threads import map_on_threads
from latfit.workload import RecordedLoad

LEAD = 5.0  # warm-up before a window, in latencies of a request without contention


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
        first, last = self.rows[window], self.rows[window + 1]
        begin = int(np.searchsorted(self.load.requests.arrival_ms, self.edges[window] - lead_ms))
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
            first, last = (bisect.bisect_right(begins, each) for each in (at, at + self.start_up_ms))
            needed.append(max(counts[first - 1 : last]))
        kept = [k for k in range(len(moments)) if k == 0 or needed[k] != needed[k - 1]]
        return Schedule(tuple(moments[k] for k in kept), tuple(needed[k] for k in kept))


def day_of(load: RecordedLoad, window_ms: float, start_up_ms: float) -> Day:
    arrival = load.requests.arrival_ms
    count = max(math.floor(float(arrival[-1] - arrival[0]) / window_ms), 1)
    edges = arrival[0] + window_ms * np.arange(count + 1)
    edges[-1] = max(edges[-1], arrival[-1])
    return Day(load, edges, [*np.searchsorted(arrival, edges[:-1]).tolist(), len(arrival)], start_up_ms)


def schedule_engines(evaluator: Evaluator, best: Measured, day: Day, price_per_hour: float | None) -> SchedulePlan:
    """Plan a schedule with at most the replicas of `best`."""
    settings, most = best.setup.settings, best.setup.replicas
    counts = map_on_threads(lambda k: _least(evaluator, settings, day, k, most), range(day.windows))
    while True:
        schedule = day.asked(counts)
        measured = evaluator.measure(Setup(settings, schedule.replicas[0], schedule, day.start_up_ms))
        rising = [k for k in range(day.windows) if counts[k] < most]
        missed = [k for k in rising if not _is_window_met(evaluator, measured, day, k)]
        if not rising or (measured.met and not missed):
            break
        for k in missed or rising:
            counts[k] += 1
    final = evaluator.measure(measured.setup, replications=VERIFIED)
    spans_s, start = np.diff(day.edges) / 1e3, day.load.requests.arrival_ms[0]
    windows = [
        Window(float((day.edges[k] - start) / 1e3), float((day.rows[k + 1] - day.rows[k]) / spans_s[k]), counts[k])
        for k in range(day.windows)
    ]

    def paid(run: Measured) -> dict[str, Any]:
        hours, tokens = run.summary.replica_hours, float(run.first.requests.output_tokens.sum())
        price = None if price_per_hour is None else 1e6 * price_per_hour * hours / tokens
        attained = run.summary.slo_attainment
        return {"replica_hours": hours, "slo_attainment": attained, "price_per_million_tokens": price}

    return SchedulePlan(
        feasible=final.met,
        window_s=float(spans_s[0]),
        start_up_s=day.start_up_ms / 1e3,
        windows=windows,
        replicas_at=schedule.steps_s,
        targets=list(final.reached),
        fixed=HoursOfReplicas(**paid(best)),
        **paid(final),
    )


def _least(evaluator: Evaluator, settings: EngineSettings, day: Day, window: int, most: int) -> int:
    if day.rows[window + 1] == day.rows[window]:
        return 1
    part, lead = day.part(window, LEAD * evaluator.alone_ms)
    own = replace(evaluator, load=part, lead=lead)
    return bisect.bisect_left(range(most), True, 1, key=lambda count: own.measure(Setup(settings, count)).met)


def _is_window_met(evaluator: Evaluator, found: Measured, day: Day, window: int) -> bool:
    rows, run = slice(day.rows[window], day.rows[window + 1]), found.first
    if rows.start == rows.stop:
        return True
    times = {name: getattr(run, name)[rows] for name in ("start_ms", "seen_ms", "first_ms", "last_ms", "replica")}
    part = replace(run, requests=run.requests.select(rows), **times)
    return all(each.met for each in evaluator.targets.reached([part], 0.0))
