"""Requests that wait for a live router, in the order in which the simulated ones wait (`simulation.policies`).

Each class is first come, first served. Between classes, the least of class - age / ageing is next, so that waiting
makes up for a lower class. A request that its sender gave up is only marked; it is skipped, and not counted, wherever
it stands.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any


class State(Enum):
    """Where a request is. Each ends once: ENDED, whatever came of it."""

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


class Request:
    """One request on its way. arrived_ms, started_ms, ended_ms: on the router's clock.  path: who ran it, in a batch of
    so many.  served: whether it ended with an output.  is_uncounted: it failed, and its sender sends it again."""

    __slots__ = (
        "arrived_ms",
        "batch",
        "class_id",
        "ended_ms",
        "future",
        "input",
        "is_resent",
        "is_uncounted",
        "path",
        "served",
        "started_ms",
        "state",
    )

    def __init__(self, input: Any, class_id: int, arrived_ms: float, future: "asyncio.Future[Any]") -> None:
        self.input, self.class_id, self.arrived_ms, self.future = input, class_id, arrived_ms, future
        self.is_resent: Callable[[BaseException], bool] | None = None
        self.state = State.WAITING
        self.started_ms = self.ended_ms = math.nan
        self.path, self.batch, self.served, self.is_uncounted = "", 0, False, False


class WaitingRoom:
    """deadlines_ms: of each class after arrival, infinite for none.  ageing_ms: waiting worth one class."""

    def __init__(self, deadlines_ms: Sequence[float], ageing_ms: float) -> None:
        self._lines: list[deque[Request]] = [deque() for _ in deadlines_ms]
        self._deadlines = tuple(deadlines_ms)
        self.ageing_ms = ageing_ms
        self.waiting = 0

    def add(self, request: Request) -> None:
        self._lines[request.class_id].append(request)
        self.waiting += 1

    def give_up(self, request: Request) -> None:
        """Count a request no more that waits here."""
        if request.state is State.WAITING:
            self.waiting -= 1
        request.state = State.ENDED

    def oldest_and_due_ms(self) -> tuple[float, float]:
        """Arrival of the oldest, and the earliest deadline; infinite where nobody waits."""
        oldest = due = math.inf
        for line, deadline in zip(self._lines, self._deadlines, strict=True):
            while line and line[0].state is not State.WAITING:
                line.popleft()
            if line:
                arrived = line[0].arrived_ms
                oldest, due = min(oldest, arrived), min(due, arrived + deadline)
        return oldest, due

    def aged(self, now_ms: float, cutoff_ms: float, most: int) -> int:
        """How many requests have waited for `cutoff_ms`, up to `most`."""
        found = 0
        for line in self._lines:
            for request in line:
                if found == most or request.arrived_ms + cutoff_ms > now_ms:
                    break
                found += request.state is State.WAITING
        return found

    def take(self, count: int, now_ms: float, passed: int = 0) -> list[Request]:
        """The next `count` requests behind the first `passed`, or as many as wait there."""
        found: list[Request] = []
        while len(found) < passed + count and self.waiting:
            lines = self._heads()
            line = lines[0] if len(lines) == 1 else min(lines, key=lambda line: self._rank(line[0], now_ms))
            found.append(line.popleft())
            self.waiting -= 1
        for request in reversed(found[:passed]):
            self._lines[request.class_id].appendleft(request)
            self.waiting += 1
        return found[passed:]

    def _rank(self, request: Request, now_ms: float) -> float:
        return request.class_id - (now_ms - request.arrived_ms) / self.ageing_ms

    def _heads(self) -> list[deque[Request]]:
        """Lines in which somebody waits, with somebody who does at their heads."""
        for line in self._lines:
            while line and line[0].state is not State.WAITING:
                line.popleft()
        return [line for line in self._lines if line]
