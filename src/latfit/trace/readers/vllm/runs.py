"""Whose steps they are: engine starts ("runs") told apart, their clocks without a year, and their KV caches.

A run ends where the engine's counter starts again, or where a start-up line says so. That can only be where the counter
falls, stands at zero, or behind such a line: between these places, everything is computed for all steps at once. So it
is with the clock, between the places where its second changes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from latfit.trace.readers.vllm.steps import DAY_S, NO_TIME, Note
from latfit.trace.table import Array

DAYS_BEFORE = (0, 0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334)
FEBRUARY_29 = 32 * 2 + 29
HALF_YEAR_S = 182 * DAY_S
REORDERED_S = 60  # several API servers write into one log, a little out of order; a clock that is set back goes further
REORDERED_STEPS = 16


@dataclass(frozen=True)
class Run:
    """One start of an engine: its rows in their order, the engine's number, and the tokens that its KV cache holds (0
    where the log does not say)."""

    rows: Array
    engine: int
    capacity: int


def runs_of(engine: Array, step: Array, ranks: Sequence[int], notes: Sequence[Note]) -> list[Run]:
    """All runs, in the order of their first steps. engine: number of each row's (n,), whose rank is in `ranks`."""
    order = np.argsort(engine, kind="stable")
    bounds = np.cumsum(np.bincount(engine, minlength=len(ranks)))[:-1]
    parts: list[tuple[int, int, Array]] = []
    for number, rows in enumerate(np.split(order, bounds)):
        starts = [note.rows for note in notes if note.tokens == 0 and note.rank in (-1, ranks[number])]
        parts += [(int(part[0]), number, part) for part in np.split(rows, _run_starts(rows, step[rows], starts))]
    parts.sort(key=lambda part: part[0])
    capacities = _capacities([(first, ranks[number]) for first, number, _ in parts], notes)
    return [Run(rows, number, tokens) for (_, number, rows), tokens in zip(parts, capacities, strict=True)]


def _run_starts(rows: Array, step: Array, starts: Sequence[int]) -> list[int]:
    """The places in an engine's `rows` where its second and later runs begin. starts: rows of the log before which the
    engine started."""
    restarted = np.zeros(len(rows) + 1, dtype=bool)
    restarted[np.searchsorted(rows, starts)] = True
    places = np.flatnonzero((step[1:] < step[:-1]) | (step[1:] == 0) | restarted[1:-1]) + 1
    until = np.concatenate([[0], places])
    tops = np.maximum.reduceat(step, until).tolist()
    highest, seen_zero, found = tops[0], bool(step[0] == 0), []
    for place, now, top in zip(places.tolist(), step[places].tolist(), tops[1:], strict=True):
        again = now < highest - REORDERED_STEPS or (now == 0 and seen_zero and highest > 0)
        if again or restarted[place]:
            found.append(place)
            highest, seen_zero = now, False
        highest, seen_zero = max(highest, top), seen_zero or now == 0
    return found


def _capacities(runs: Sequence[tuple[int, int]], notes: Sequence[Note]) -> Iterator[int]:
    """Tokens of each run's KV cache, from (first row, rank) of the runs in their order.

    A line without a rank holds for all that have none of their own. Of several lines of a start (one a worker) the
    engine goes by the smallest; the first after a run began is of the next start.
    """
    said = iter([note for note in notes if note.tokens > 0])
    note = next(said, None)
    tokens: dict[int, int] = {}
    used: set[int] = set()
    for first, rank in runs:
        while note is not None and note.rows <= first:
            before = tokens.get(note.rank, note.tokens)
            tokens[note.rank] = note.tokens if note.rank in used else min(before, note.tokens)
            used.discard(note.rank)
            note = next(said, None)
        known = rank if rank in tokens else -1
        used.add(known)
        yield tokens.get(known, 0)


def seconds_of(time: Array) -> Array:
    """Seconds (n,) from a run's first step, never decreasing, though the clock (n,) has no year; NaN without a time."""
    seconds = np.full(len(time), np.nan)
    rows = np.flatnonzero(time != NO_TIME)
    if len(rows):
        changes = np.flatnonzero(np.diff(time[rows], prepend=NO_TIME))
        latest = np.array(list(_latest(time[rows][changes].tolist())), dtype=np.float64)
        seconds[rows] = np.repeat(latest - latest[0], np.diff(changes, append=len(rows)))
    return seconds


def _latest(times: list[int]) -> Iterator[int]:
    """The latest time up to each, in seconds of the first one's year."""
    leap, shift, latest = False, 0, None
    for time in times:
        days, second = divmod(time, DAY_S)
        month, day = divmod(days, 32)
        leap |= days == FEBRUARY_29
        now = (DAYS_BEFORE[month] + day + (leap and month > 2)) * DAY_S + second + shift
        latest = now if latest is None else latest
        behind = latest - now
        if behind > HALF_YEAR_S:  # a new year
            year = (365 + leap) * DAY_S
            now, shift, leap = now + year, shift + year, False
        elif behind > REORDERED_S:  # the clock was set back
            shift += behind
        if behind >= -HALF_YEAR_S:  # else a line of last year, out of order
            latest = max(latest, now)
        yield latest
