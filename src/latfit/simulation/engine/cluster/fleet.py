"""Change the number of replicas by a schedule or an autoscaling rule, in compiled code.

A new replica starts for a fixed time, then receives requests. A removed replica finishes its requests first; replicas
still starting are removed before the youngest one. The rule is Kubernetes' horizontal autoscaler for requests in the
system, waiting requests, or KV usage. Details: docs/theory/simulation.md, "Router and replicas".
"""

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from latfit.compiled import inner, rare
from latfit.errors import WrongUsage, refuse
from latfit.simulation.engine import state as st
from latfit.simulation.engine.prefix_cache import forget
from latfit.simulation.engine.state import Limits, State, one_of
from latfit.stats import FloatArray, IntArray
from latfit.units import parse_duration_ms

METRICS = {"requests": 0, "waiting": 1, "kv": 2}
TOLERANCE = 0.1

ABSENT, STARTING, UP, DRAINING = range(4)  # phases of a place for a replica

ASKED, NEXT, TICK, BORN, LOGGED, TURN, CROWDED = range(7)
"""Counters in `Fleet.i`.

ASKED: replicas that start or serve. NEXT: row of the schedule. TICK: evaluations of the rule. BORN: replicas ever
started. LOGGED: rows of the log. TURN: last place routed to. CROWDED: 1 once no place was free.
"""


@dataclass(frozen=True)
class Schedule:
    """Scheduled replicas: `replicas[i]` from moments_ms[i] on, counted from the first arrival.

    The first entry is present from the start.
    """

    moments_ms: tuple[float, ...]
    replicas: tuple[int, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip((-1.0, *self.moments_ms), self.moments_ms, strict=False))
        wrong = self.moments_ms[:1] != (0.0,) or not rising or len(self.moments_ms) != len(self.replicas)
        remedy = "Give t_s from 0 on, in rising order, and replicas at each."
        refuse(wrong, "the moments do not rise from 0 on", "--set replicas_at", remedy)
        refuse(min(self.replicas) < 1, "a time without any replica", "--set replicas_at", "Give 1 or more.")

    @property
    def most(self) -> int:
        return max(self.replicas)

    def to_json(self) -> dict[str, Any]:
        """Return moments in s, counted from the first arrival."""
        return {"replicas_at": self.steps_s}

    @property
    def steps_s(self) -> list[tuple[float, int]]:
        """Steps of the schedule as (start in s, replicas)."""
        return [(at / 1e3, count) for at, count in zip(self.moments_ms, self.replicas, strict=True)]


@dataclass(frozen=True)
class Autoscaler:
    """Autoscaling rule: keep a metric at `target` per replica, with `least` to `most` replicas."""

    metric: str
    target: float
    most: int
    least: int = 1
    every_ms: float = 15_000.0
    cool_down_ms: float = 300_000.0

    def __post_init__(self) -> None:
        least, most, where = self.least, self.most, "--autoscale"
        wrong = self.metric not in METRICS or not 0 < self.target < math.inf
        refuse(wrong, f"no target of {', '.join(METRICS)}", where, f"Write {EXAMPLES}.")
        refuse(not 1 <= least <= most, f"{least} to {most} replicas", where, "Write 1..8, the least first.")
        wrong = not self.every_ms > 0 or not self.cool_down_ms >= 0
        refuse(wrong, "a time below zero", where, "Write requests:20:1..8:15s:5min.")

    def to_json(self) -> dict[str, Any]:
        """Return the rule as text, as `parse_autoscaler` reads it."""
        times = f"{self.every_ms / 1e3:g}s:{self.cool_down_ms / 1e3:g}s"
        return {"autoscale": f"{self.metric}:{self.target:g}:{self.least}..{self.most}:{times}"}


Scaling = Schedule | Autoscaler

RULE = re.compile(r"(\w+):(\d+(?:\.\d*)?)(%?):(\d+)\.\.(\d+)(?::([^:]+))?(?::([^:]+))?")
EXAMPLES = "requests:20:1..8, waiting:2:1..8 or kv:70%:1..8"


def parse_autoscaler(text: str) -> Autoscaler:
    """Parse `requests:20:1..8`: a metric, its target per replica and the range of replicas. Raises WrongUsage.

    `kv:70%:1..8:15s:5min` adds the interval between evaluations and the window of the highest recommendation.
    """
    found = RULE.fullmatch(text.strip())
    if found is None:
        raise WrongUsage(f"{text!r} is no rule", where="--autoscale", remedy=f"Write {EXAMPLES}.")
    metric, target, percent, least, most, every, cool = found.groups()
    times = {"every_ms": every, "cool_down_ms": cool}
    given = {name: parse_duration_ms(value, option="--autoscale") for name, value in times.items() if value is not None}
    return Autoscaler(metric, float(target) / (100 if percent else 1), int(most), int(least), **given)


class Fleet(NamedTuple):
    """State of the fleet."""

    i: IntArray
    rule: FloatArray  # (5,): metric (-1 for none), target, least, most, ms between evaluations
    start_ms: float  # time from request to service, ms
    moments: FloatArray  # moments, counts: schedule
    counts: IntArray
    recent: IntArray  # last recommendations
    # phase, born, since, ready, ended, paid: by place: phase, number, time of request, of readiness and of
    # removal, paid ms
    phase: IntArray
    born: IntArray
    since: FloatArray
    ready: FloatArray
    ended: FloatArray
    paid: FloatArray
    log: FloatArray  # (3, c): time, replicas serving, replicas requested


def new_fleet(scaling: Scaling | None, start_ms: float, first: int, places: int, span: tuple[float, float]) -> Fleet:
    """Make a fleet of `first` running replicas in `places`; `span` holds the first and the last arrival in ms."""
    rule, looks = np.array([-1.0, 0.0, 0.0, 0.0, np.inf]), 0
    moments, counts, recent = np.empty(0), np.empty(0, dtype=np.int64), 1
    if isinstance(scaling, Schedule):
        moments, counts = np.array(scaling.moments_ms[1:]), np.array(scaling.replicas[1:], dtype=np.int64)
    elif scaling is not None:
        rule = np.array([METRICS[scaling.metric], scaling.target, scaling.least, scaling.most, scaling.every_ms])
        looks = math.ceil(span[1] / scaling.every_ms)
        recent = 1 + math.floor(scaling.cool_down_ms / scaling.every_ms)
    phase, born = np.zeros(places, dtype=np.int64), np.arange(places, dtype=np.int64)
    phase[:first] = UP
    log = np.zeros((3, 2 + 2 * (len(moments) + looks)))
    log[:, 0] = 0.0, first, first
    counters = np.zeros(7, dtype=np.int64)
    counters[[ASKED, BORN, LOGGED, TURN]] = first, first, 1, places - 1
    since = np.full(places, span[0])
    zeros = np.zeros((3, places))
    return Fleet(
        counters, rule, start_ms, moments, counts, np.full(recent, -1, dtype=np.int64),
        phase, born, since, zeros[0], zeros[1], zeros[2], log,
    )  # fmt: skip


@inner
def next_change(f: Fleet) -> float:
    """Return when the fleet changes next; infinity for never."""
    found = (f.i[TICK] + 1) * f.rule[4] if f.rule[0] >= 0 else np.inf
    if f.i[NEXT] < len(f.moments):
        found = min(found, f.moments[f.i[NEXT]])
    for k in range(len(f.phase)):
        if f.phase[k] == STARTING:
            found = min(found, f.ready[k])
    return float(found)


@rare
def change(o: Limits, f: Fleet, states: State, now: float) -> None:
    """Apply the changes at `now`; all engines have advanced to it."""
    asked = f.i[ASKED]
    if f.i[NEXT] < len(f.moments) and f.moments[f.i[NEXT]] <= now:
        asked = f.counts[f.i[NEXT]]
        f.i[NEXT] += 1
    if f.rule[0] >= 0 and (f.i[TICK] + 1) * f.rule[4] <= now:
        asked = _recommended(o, f, states)
        f.i[TICK] += 1
    while f.i[ASKED] > asked:
        _send_away(f, now)
    while f.i[ASKED] < asked and f.i[CROWDED] == 0:
        _start(f, states, now)
    for k in range(len(f.phase)):
        if f.phase[k] == STARTING and f.ready[k] <= now:
            f.phase[k] = UP
    up = 0
    for k in range(len(f.phase)):
        up += f.phase[k] == UP
    at = f.i[LOGGED] - 1
    if f.log[1, at] != up or f.log[2, at] != f.i[ASKED]:
        if f.log[0, at] < now and at + 1 < f.log.shape[1]:
            at += 1
            f.i[LOGGED] += 1
        f.log[0, at], f.log[1, at], f.log[2, at] = now, up, f.i[ASKED]


@inner
def _recommended(o: Limits, f: Fleet, states: State) -> int:
    """Return the replicas that the rule recommends."""
    total, asked = 0.0, f.i[ASKED]
    for k in range(len(f.phase)):
        if f.phase[k] == UP:
            i = states.i[k]
            if f.rule[0] == 2:
                total += (o.blocks - i[st.FREE]) / o.blocks
            else:
                total += i[st.WAITING] + i[st.PUSHED] - i[st.SEEN] + (i[st.COUNT] if f.rule[0] == 0 else 0)
    found = int(np.ceil(total / f.rule[1] - 1e-9))
    if abs(total / (f.rule[1] * asked) - 1.0) <= TOLERANCE:
        found = asked
    found = int(min(max(found, f.rule[2]), f.rule[3]))
    f.recent[f.i[TICK] % len(f.recent)] = found
    if found >= asked:
        return found
    most = found
    for each in f.recent:
        most = max(most, each)
    return int(min(most, asked))


@inner
def _send_away(f: Fleet, now: float) -> None:
    """Remove one replica: one that still starts, else the youngest."""
    chosen = -1
    for k in range(len(f.phase)):
        if f.phase[k] == STARTING or f.phase[k] == UP:
            younger = chosen >= 0 and f.phase[k] == f.phase[chosen] and f.born[k] > f.born[chosen]
            if chosen < 0 or f.phase[k] < f.phase[chosen] or younger:
                chosen = k
    f.i[ASKED] -= 1
    if f.phase[chosen] == STARTING:
        f.phase[chosen] = ABSENT
        f.paid[chosen] += now - f.since[chosen]
        return
    f.phase[chosen] = DRAINING
    f.ended[chosen] = now


@inner
def _start(f: Fleet, states: State, now: float) -> None:
    """Start one replica in a free place."""
    for k in range(len(f.phase)):
        if f.phase[k] == DRAINING and _drained(states, k, now):
            f.phase[k] = ABSENT
            f.paid[k] += max(f.ended[k], states.f[k, st.BUSY_UNTIL]) - f.since[k]
        if f.phase[k] == ABSENT:
            forget(one_of(states, k))
            f.phase[k], f.since[k], f.ready[k] = STARTING, now, now + f.start_ms
            f.born[k] = f.i[BORN]
            f.i[BORN] += 1
            f.i[ASKED] += 1
            return
    f.i[CROWDED] = 1


@inner
def _drained(states: State, k: int, now: float) -> bool:
    i = states.i[k]
    waits = i[st.WAITING] + i[st.COUNT] + i[st.PUSHED] - i[st.SEEN]
    return bool(waits == 0 and states.f[k, st.BUSY_UNTIL] <= now)


@inner
def in_turn(f: Fleet) -> int:
    """Return the next serving place in round-robin order."""
    k = f.i[TURN]
    while True:
        k = k + 1 if k + 1 < len(f.phase) else 0
        if f.phase[k] == UP:
            f.i[TURN] = k
            return int(k)


def paid_ms(fleet: Fleet, states: State, end_ms: float) -> float:
    """Return the paid time of all replicas until the end of a run, in ms."""
    total = fleet.paid.copy()
    for k, phase in enumerate(fleet.phase):
        if phase == DRAINING:
            total[k] += max(fleet.ended[k], states.f[k, st.BUSY_UNTIL]) - fleet.since[k]
        elif phase != ABSENT:
            total[k] += end_ms - fleet.since[k]
    return float(total.sum())
