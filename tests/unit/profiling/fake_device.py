"""A device with planted latencies and a clock of its own, so that a run can be tested without waiting for one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from latfit.profiling.devices.device import DeviceOutOfMemory
from latfit.profiling.shapes import StepShape


@dataclass(frozen=True)
class FakeFaults:
    """What may go wrong on a real machine, planted.

    warmup_steps: slow steps when a cell is prepared for the first time, the first of them `warmup_factor` times as
    slow and the others less and less; each later preparation has one slow step.
    drift_per_s: relative change of all latencies per second of the virtual clock.
    hiccup_rate: probability that a step takes `hiccup_factor` times as long.
    memory_tokens: steps with more tokens than that are out of memory.
    interrupt_after, fail_after: after so many steps the user presses Ctrl-C, or the device breaks.
    """

    warmup_steps: int = 2
    warmup_factor: float = 3.0
    drift_per_s: float = 0.0
    hiccup_rate: float = 0.0
    hiccup_factor: float = 5.0
    memory_tokens: int | None = None
    interrupt_after: int | None = None
    fail_after: int | None = None


class FakeDevice:
    """Executes nothing: a step takes `latency_ms(B, S)` times lognormal noise of relative size `noise`."""

    name = "fake"

    def __init__(
        self,
        latency_ms: Callable[[int, int], float],
        *,
        noise: float = 0.01,
        seed: int = 0,
        faults: FakeFaults | None = None,
        path: str = "cpu",
    ) -> None:
        self.path = path
        self.steps = 0
        self.visited: list[StepShape] = []
        self.closed = False
        self._latency_ms = latency_ms
        self._noise = noise
        self._faults = faults or FakeFaults()
        self._rng = np.random.default_rng(seed)
        self._clock_s = 0.0
        self._slow_left = 0
        self._cell: StepShape | None = None

    def facts(self) -> dict[str, Any]:
        return {"device": self.name, "noise": self._noise}

    def free_bytes(self) -> int | None:
        return None

    def prepare(self, cell: StepShape) -> None:
        room = self._faults.memory_tokens
        if room is not None and room < cell.S:
            raise DeviceOutOfMemory(f"{cell.S} tokens do not fit; at most {room} do")
        self._slow_left = self._faults.warmup_steps if cell not in self.visited else 1
        self.visited.append(cell)
        self._cell = cell

    def step_ms(self) -> float:
        if self._cell is None:
            raise RuntimeError("no cell is prepared")
        self.steps += 1
        if self.steps == self._faults.interrupt_after:
            raise KeyboardInterrupt
        if self.steps == self._faults.fail_after:
            raise RuntimeError("the planted fault")
        elapsed_ms = self._latency_ms(self._cell.B, self._cell.S) * self._disturbance()
        self._clock_s += elapsed_ms / 1e3
        return elapsed_ms

    def now_s(self) -> float:
        return self._clock_s

    def close(self) -> None:
        self.closed = True

    def _disturbance(self) -> float:
        faults = self._faults
        factor = float(np.exp(self._noise * self._rng.standard_normal())) * (1 + faults.drift_per_s * self._clock_s)
        if self._rng.random() < faults.hiccup_rate:
            factor *= faults.hiccup_factor
        if self._slow_left:
            factor *= 1 + (faults.warmup_factor - 1) * self._slow_left / max(1, faults.warmup_steps)
            self._slow_left -= 1
        return factor
