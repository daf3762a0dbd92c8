"""Real work for a replay on any machine: decode steps of a transformer in NumPy, one request a row of the batch."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from latfit.live.executor import Run


@dataclass(frozen=True)
class DecodeSteps:
    """Makes, in a process of its own, the function that runs a decode step for each batch of up to `largest` requests,
    each on `context` cached tokens, with one thread.

    launch_ms: how long every batch waits before its step, as a device does that work must be handed to.
    """

    model: str = "tiny"
    context: int = 256
    largest: int = 32
    launch_ms: float = 0.0

    def __call__(self) -> Run:
        from latfit.profiling import NumpyDevice, StepShape, model_shape

        device = NumpyDevice(model_shape(self.model), threads=1)
        steps = {}
        for batch in range(self.largest, 0, -1):  # the largest first: the others fit into its memory
            device.prepare(StepShape(batch, self.context))
            steps[batch] = device.bind_step()

        def run(inputs: list[Any]) -> Sequence[Any]:
            if self.launch_ms:
                time.sleep(self.launch_ms / 1000)
            steps[len(inputs)]()
            return inputs

        return run
