"""A path of the live router: its executor, its servers, and whether batches may go there.

A circuit breaker opens after MAX_FAILURES failed batches in a row, or one that was lost; after a cool-down, doubled
each time, one batch tries the path. MAX_MISSES missed probes in a row take the path down until a probe is answered or a
batch succeeds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from latfit.live.executor import Executor
from latfit.stats import FloatArray

MAX_FAILURES, MAX_MISSES = 3, 2
COOL_DOWN_MS, MAX_COOL_DOWN_MS = 500.0, 30_000.0
MAX_DOUBLINGS = 16  # keeps 2**n finite
MIN_REMAINING_MS = 1e-3  # earliest time at which a busy server is expected to be free
TIMEOUT_FACTOR, MIN_TIMEOUT_MS = 20.0, 1000.0  # time limit of a batch: TIMEOUT_FACTOR T(b), at least MIN_TIMEOUT_MS


@dataclass(slots=True, eq=False)
class Server:
    """A slot of an executor. free_ms: when it is expected to be free; infinite until a lost one has recovered."""

    is_busy: bool = False
    free_ms: float = -math.inf


class LivePath:
    """A path and its state. times_ms: typical T(b) for b = 0 (unused), 1, ..., (largest + 1,)."""

    def __init__(self, executor: Executor, times_ms: FloatArray, timeout_ms: float | None) -> None:
        self.executor, self.name, self.times_ms = executor, executor.name, times_ms
        self._timeout_ms = timeout_ms
        self._failures = self._openings = 0  # in a row
        self.open_until_ms = -math.inf  # end of the cool-down; -inf if the breaker is closed
        self.free_servers()
        self._misses = MAX_MISSES - 1  # one miss is enough before the first answer
        self.batches = self.failed_batches = 0  # that began; that ended with an error
        self.busy_ms = 0.0  # of the batches that have ended

    def free_servers(self) -> None:
        """Start over with idle servers, for a router that has dropped its batches."""
        self._is_tried = False  # by one batch, after a cool-down
        self._servers = [Server() for _ in range(self.executor.servers)]

    def timeout_ms(self, batch: int) -> float:
        if self._timeout_ms is not None:
            return self._timeout_ms
        return max(TIMEOUT_FACTOR * float(self.times_ms[batch]), MIN_TIMEOUT_MS)

    def up(self, now: float) -> bool:
        """Return whether a batch may be sent, now or when a server is free."""
        if now < self.open_until_ms or self._is_tried or self._misses >= MAX_MISSES:
            return False
        # The first server is checked apart: a generator would cost a tenth of a decision.
        return self._servers[0].free_ms < math.inf or any(server.free_ms < math.inf for server in self._servers)

    @property
    def idle(self) -> bool:
        return not all(server.is_busy for server in self._servers)

    def write_free_ms(self, view: FloatArray, first: int, now: float) -> None:
        """Write when each server should be free into `view`; a late one takes as long again."""
        for place, server in enumerate(self._servers, first):
            free = server.free_ms
            if server.is_busy and free <= now:
                free = max(2 * now - free, now + MIN_REMAINING_MS)
            view[place] = free

    def occupy(self, now: float, batch: int) -> Server:
        """Begin a batch on the server that has been idle longest."""
        idle = (server for server in self._servers if not server.is_busy)
        server = self._servers[0] if len(self._servers) == 1 else min(idle, key=lambda each: each.free_ms)
        server.is_busy, server.free_ms = True, now + float(self.times_ms[batch])
        self._is_tried = self._openings > 0
        self.batches += 1
        return server

    def release(self, server: Server, now: float) -> None:
        server.is_busy, server.free_ms = False, now

    def record_probe(self, answered: bool) -> None:
        self._misses = 0 if answered else self._misses + 1

    def record_success(self) -> None:
        self._failures = self._openings = self._misses = 0
        self._is_tried = False
        self.open_until_ms = -math.inf

    def record_abandoned(self) -> None:
        self._is_tried = False

    def record_failure(self, now: float, *, is_lost: bool) -> None:
        """Note a batch that failed. is_lost: the next one would wait in vain."""
        self.failed_batches += 1
        self._is_tried = False
        if now < self.open_until_ms:  # it ran while another one opened the breaker
            return
        self._failures += 1
        if is_lost and self.executor.is_probed:
            self._misses = MAX_MISSES
        if is_lost or self._openings or self._failures >= MAX_FAILURES:
            self.rest(now)

    def rest(self, now: float) -> None:
        self.open_until_ms = now + min(COOL_DOWN_MS * 2**self._openings, MAX_COOL_DOWN_MS)
        self._openings = min(self._openings + 1, MAX_DOUBLINGS)
        self._failures = 0


def times_table(paths: Sequence[LivePath]) -> FloatArray:
    """Return T(b) of both paths, shape (2, largest + 1), ms; infinite beyond a largest batch."""
    table = np.full((2, max(len(path.times_ms) for path in paths)), np.inf)
    for row, path in zip(table, paths, strict=False):
        row[: len(path.times_ms)] = path.times_ms
    return table
