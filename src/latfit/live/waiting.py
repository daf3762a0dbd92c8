"""Requests that wait for a path, in the order of the simulated queue.

Each class is first come, first served. Across classes the least of class - age / ageing is next. A request that its
sender gave up stays in place, marked, and is skipped.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any


class State(Enum):
    """State of a request. Every request reaches ENDED once."""

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """One request. Moments are on the router's clock."""

    input: Any
    class_id: int
    arrived_ms: float
    future: "asyncio.Future[Any]"
    retry: Callable[[BaseException], bool] | None = None  # whether an error puts the request back into the queue
    state: State = State.WAITING
    started_ms: float = math.nan
    ended_ms: float = math.nan
    path: str = ""  # that ran it
    batch: int = 0  # size of its batch
    served: bool = False  # it ended with an output


class RequestQueue:
    """One queue for each class. deadlines: ms after arrival.  ageing: ms of waiting worth a class."""

    def __init__(self, deadlines_ms: Sequence[float], ageing_ms: float) -> None:
        self._classes: list[deque[Request]] = [deque() for _ in deadlines_ms]
        self._deadlines = tuple(deadlines_ms)
        self.ageing_ms = ageing_ms
        self.waiting = 0

    def add(self, request: Request) -> None:
        self._classes[request.class_id].append(request)
        self.waiting += 1

    def put_back(self, request: Request) -> None:
        request.state = State.WAITING
        self._classes[request.class_id].appendleft(request)
        self.waiting += 1

    def give_up(self, request: Request) -> None:
        self.waiting -= request.state is State.WAITING
        request.state = State.ENDED

    def oldest_and_due_ms(self) -> tuple[float, float]:
        oldest = due = math.inf
        self._drop_ended()
        for queue, deadline in zip(self._classes, self._deadlines, strict=True):
            if queue:
                arrived = queue[0].arrived_ms
                oldest, due = min(oldest, arrived), min(due, arrived + deadline)
        return oldest, due

    def count_aged(self, now_ms: float, cutoff_ms: float, most: int) -> int:
        found = 0
        for queue in self._classes:
            for request in queue:
                if found == most or request.arrived_ms + cutoff_ms > now_ms:
                    break
                found += request.state is State.WAITING
        return found

    def take(self, count: int, now_ms: float, skip: int = 0) -> list[Request]:
        """Remove and return the next requests behind the first `skip`, at most `count`."""
        found: list[Request] = []
        while len(found) < skip + count and self.waiting:
            self._drop_ended()
            queues = [queue for queue in self._classes if queue]
            first = queues[0] if len(queues) == 1 else min(queues, key=lambda queue: self._rank(queue[0], now_ms))
            found.append(first.popleft())
            self.waiting -= 1
        for request in reversed(found[:skip]):
            self.put_back(request)
        return found[skip:]

    def _rank(self, request: Request, now_ms: float) -> float:
        return request.class_id - (now_ms - request.arrived_ms) / self.ageing_ms

    def _drop_ended(self) -> None:
        for queue in self._classes:
            while queue and queue[0].state is not State.WAITING:
                queue.popleft()
