"""Decode steps of a transformer in NumPy as the work of a replay, one request a row of the batch."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from latfit.live.executor import Run

CONTEXT = 256  # cached tokens of each request


@dataclass(frozen=True)
class DecodeSteps:
    """Make, in a process, the function that runs a decode step of up to `largest` requests."""

    model: str
    largest: int
    launch_ms: float = 0.0

    def __call__(self) -> Run:
        from latfit.profiling import NumpyDevice, StepShape, model_shape

        device = NumpyDevice(model_shape(self.model), threads=1)
        steps = {}
        for batch in range(self.largest, 0, -1):  # the largest first: the others fit into its memory
            device.prepare(StepShape(batch, CONTEXT))
            steps[batch] = device.bind_step()

        def run(inputs: list[Any]) -> Sequence[Any]:
            if self.launch_ms:
                time.sleep(self.launch_ms / 1000)
            steps[len(inputs)]()
            return inputs

        return run
