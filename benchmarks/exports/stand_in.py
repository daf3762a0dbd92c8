"""Triton's Python backend in the place of a GPU's or a CPU's model: a step of b requests takes launch + slope b ms, or
is exponential; the answer says how many it held."""

import random
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """parameters of the model: launch_ms, slope_ms, exponential (0 or 1)."""

    def initialize(self, args: dict[str, str]) -> None:
        import json

        given = json.loads(args["model_config"])["parameters"]
        self.launch, self.slope, self.drawn = (
            float(given[name]["string_value"]) for name in ("launch_ms", "slope_ms", "exponential")
        )
        self.draw = random.Random(1)

    def execute(self, requests: list[Any]) -> list[Any]:
        begun = time.perf_counter()
        sizes = [pb_utils.get_input_tensor_by_name(each, "INPUT").as_numpy().shape[0] for each in requests]
        count = sum(sizes)
        took_ms = self.launch + self.slope * count
        took_ms = self.draw.expovariate(1 / took_ms) if self.drawn else took_ms
        answers = [
            pb_utils.InferenceResponse([pb_utils.Tensor("BATCH", np.full((size, 1), count, np.int32))])
            for size in sizes
        ]
        time.sleep(max(took_ms / 1e3 - (time.perf_counter() - begun), 0.0))
        return answers
