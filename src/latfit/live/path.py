"""A path of the live router: its executor, which of its servers are busy until when, and whether it is up.

Two things decide that. Where the executor can be probed, the path is down after MISSES probes in a row without an
answer, or one after a batch that timed out or was lost, until a probe is answered or a batch succeeds.

The other is a breaker, which is closed while batches succeed. After FAILURES in a row, or one batch that timed out or
lost its worker, it is open: no batch goes there for a while, twice as long each time in a row. Then one batch is let
through; what becomes of it closes or opens the breaker. That batch has the time limit of every batch, so the breaker
cannot stay half open.
"""

import math
from collections.abc import Sequence

import numpy as np

from latfit.live.executor import Executor, Probed
from latfit.stats import FloatArray

FAILURES, MISSES = 3, 2
COOL_DOWN_MS, LONGEST_COOL_DOWN_MS = 500.0, 30_000.0
NEAR_MS = 1e-3
"""A busy server is never taken to be free sooner than this."""

SLOW, LEAST_TIMEOUT_MS = 20.0, 1000.0
"""A batch may take so many times its typical time, and this long at least."""


class LivePath:
    """times_ms (largest + 1,): typical T(b), for b = 0 (unused), 1, ...  timeout_ms: of a batch, None for SLOW times T.
    busy_ms: time of its batches that have ended."""

    def __init__(self, executor: Executor, times_ms: FloatArray, timeout_ms: float | None) -> None:
        self.executor, self.name = executor, executor.name
        self.times_ms = times_ms
        self._timeout_ms = timeout_ms
        self._ends = [-math.inf] * executor.servers
        self._busy = [False] * executor.servers
        self._lost = [False] * executor.servers
        self._failures = self._openings = 0
        self._open_until = -math.inf
        self._trying = self._silent = False
        self._misses = MISSES - 1  # one without an answer is enough before the first that has one
        self.batches = self.failed_batches = 0
        self.busy_ms = 0.0

    def timeout_ms(self, batch: int) -> float:
        if self._timeout_ms is not None:
            return self._timeout_ms
        return max(SLOW * float(self.times_ms[batch]), LEAST_TIMEOUT_MS)

    def up(self, now: float) -> bool:
        """Whether a batch may be sent, now or when a server is free. After the cool-down one may, to try."""
        return now >= self._open_until and not (self._trying or self._silent or all(self._lost))

    def probed(self, answered: bool) -> None:
        """Note whether the executor answered a probe."""
        self._misses = 0 if answered else self._misses + 1
        self._silent = self._misses >= MISSES

    def opens_again_ms(self) -> float:
        """When the breaker lets a batch through; -inf while it is closed."""
        return self._open_until

    @property
    def idle(self) -> bool:
        """Whether a server can begin a batch."""
        return any(not (busy or lost) for busy, lost in zip(self._busy, self._lost, strict=True))

    def write_free_ms(self, view: FloatArray, first: int, now: float) -> None:
        """Write when each server is expected to be free into the places of a view from `first` on.

        One that is late is expected to take as long again as it is late.
        """
        for server, free in enumerate(self._ends):
            if self._lost[server]:
                free = math.inf
            elif free <= now and self._busy[server]:
                free = max(2 * now - free, now + NEAR_MS)
            view[first + server] = free

    def occupy(self, now: float, batch: int) -> int:
        """The number of the server that begins a batch: of those idle, the one idle longest."""
        server = 0
        if len(self._busy) > 1:
            server = min((k for k, busy in enumerate(self._busy) if not busy), key=self._ends.__getitem__)
        self._busy[server], self._ends[server] = True, now + float(self.times_ms[batch])
        self._trying = self._openings > 0
        self.batches += 1
        return server

    def lose(self, server: int) -> None:
        """A server that comes back when its executor has recovered, if it does."""
        self._lost[server] = True

    def release(self, server: int, now: float) -> None:
        self._busy[server], self._lost[server], self._ends[server] = False, False, now

    def succeeded(self) -> None:
        self._failures = self._openings = self._misses = 0
        self._trying = self._silent = False
        self._open_until = -math.inf

    def told_nothing(self) -> None:
        """A batch ended for its senders' sake; if it was the one to try the path, the next one is."""
        self._trying = False

    def failed(self, now: float, *, at_once: bool) -> None:
        """at_once: the batch timed out or its worker died; the next one would wait in vain."""
        self.failed_batches += 1
        if now < self._open_until:  # it ran beside the one that opened the breaker
            return
        self._trying = False
        self._failures += 1
        if at_once and isinstance(self.executor, Probed):
            self._silent, self._misses = True, MISSES
        if at_once or self._openings or self._failures >= FAILURES:
            self.rest(now)

    def rest(self, now: float) -> None:
        """Open the breaker, twice as long as the last time."""
        cool_down = min(COOL_DOWN_MS * 2**self._openings, LONGEST_COOL_DOWN_MS)
        self._openings = min(self._openings + 1, 16)
        self._open_until = now + cool_down
        self._failures = 0


def times_table(paths: Sequence[LivePath]) -> FloatArray:
    """T(b) (2, largest + 1) ms of both paths, as policies see it; infinite beyond a path's largest batch."""
    table = np.full((2, max(len(path.times_ms) for path in paths)), np.inf)
    for row, path in zip(table, paths, strict=False):
        row[: len(path.times_ms)] = path.times_ms
    return table
