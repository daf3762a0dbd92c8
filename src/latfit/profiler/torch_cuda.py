"""The `torch-cuda` device: whole decoder steps on a GPU, timed by CUDA events, with and without CUDA graphs.

Without graphs a step's time holds the launching of its kernels by the CPU, as in an engine that runs eagerly; with
graphs the whole step is recorded once a cell and replayed. A mixture of experts decides on the CPU which experts run,
so its steps cannot be recorded and run eagerly.
"""

import time
from typing import Any

from latfit.profiler.cold import TIMES_THE_CACHE, USUAL
from latfit.profiler.cuda_runtime import CudaRuntime
from latfit.profiler.device import DeviceOutOfMemory, DeviceSettings
from latfit.profiler.torch_decoder import TorchStep, random_cache
from latfit.profiler.torch_weights import Tensor, random_torch_weights
from latfit.profiler.workload import GIB, ModelShape, StepShape, check_fits, step_bytes

INPUT_SETS = 4
TRANSFER_TOKENS = (16, 64, 256, 1024, 4096)
TRANSFER_REPEATS = 7


class TorchCudaDevice:
    """Random weights of `shape` on the GPU, and the prepared step. Raises WrongUsage where the weights do not fit."""

    name = "torch-cuda"
    path = "gpu"

    def __init__(self, shape: ModelShape, settings: DeviceSettings, runtime: CudaRuntime) -> None:
        import torch

        check_fits(shape, runtime.free_bytes())
        self._shape, self._settings, self._runtime = shape, settings, runtime
        self.graphs = settings.graphs and not shape.experts
        with torch.inference_mode():
            self._weights = random_torch_weights(shape, runtime.place, settings.precision, settings.seed)
        self._generator = torch.Generator(runtime.place).manual_seed(settings.seed)
        self._inputs: list[Tensor] = []
        self._tokens: Tensor = None
        self._run: Any = None
        self._flush: Tensor = None
        if settings.cold:
            size = TIMES_THE_CACHE * int(runtime.facts().get("l2_bytes") or USUAL)
            self._flush = torch.empty(size, dtype=torch.uint8, device=runtime.place)

    def facts(self) -> dict[str, Any]:
        return {
            "device": self.name,
            "dtype": self._settings.dtype,
            "cuda_graphs": self.graphs,
            "part": self._settings.part,
            "flushed_bytes": 0 if self._flush is None else self._flush.numel(),
            **self._runtime.facts(),
        }

    def free_bytes(self) -> int | None:
        return self._runtime.free_bytes()

    def prepare(self, cell: StepShape) -> None:
        import torch

        self._run = self._tokens = None  # given back first, so that old and new never add up
        self._inputs = []
        needed, free = step_bytes(self._shape, cell), self._runtime.free_bytes()
        if needed > free:
            raise DeviceOutOfMemory(f"needs {needed / GIB:.2f} GiB beside the weights, {free / GIB:.2f} GiB are free")
        place = {"device": self._runtime.place, "generator": self._generator}
        try:
            with torch.inference_mode():
                self._inputs = [torch.randint(self._shape.vocab, (cell.S,), **place) for _ in range(INPUT_SETS)]
                self._tokens = self._inputs[0].clone()
                cache = random_cache(self._shape, cell, self._weights.dtype, self._runtime.place)
                step = TorchStep(self._weights, cell, cache, self._tokens)
                eager = lambda: step.part(self._settings.part)  # noqa: E731
                self._run = self._runtime.record(eager) if self.graphs else eager
        except self._runtime.out_of_memory as error:
            self._give_back()
            raise DeviceOutOfMemory(_first_line(error)) from None

    def step_ms(self) -> float:
        import torch

        if self._run is None:
            raise RuntimeError("no cell is prepared")
        self._inputs.append(self._inputs.pop(0))
        try:
            with torch.inference_mode():
                self._tokens.copy_(self._inputs[0])
                if self._flush is not None:
                    self._flush.zero_()  # drives the last step out of the GPU's cache
                return self._runtime.time_ms(self._run)
        except self._runtime.out_of_memory as error:
            self._give_back()
            raise DeviceOutOfMemory(_first_line(error)) from None

    def now_s(self) -> float:
        return time.perf_counter()

    def close(self) -> None:
        self._weights = None  # type: ignore[assignment]
        self._give_back()

    def kv_transfer(self) -> list[dict[str, float]]:
        """Medians of copying the cache of so many tokens from the host's pinned memory to the GPU: what a prefill on
        the CPU costs in addition, before the GPU can decode. As many sizes as the memory takes."""
        import torch

        found = []
        for tokens in TRANSFER_TOKENS:
            size = self._shape.cache_bytes(tokens)
            if 2 * size > self._runtime.free_bytes():
                break
            host = self._runtime.pinned(size)
            target = torch.empty(size, dtype=torch.uint8, device=self._runtime.place)
            times = sorted(
                self._runtime.time_ms(lambda: target.copy_(host, non_blocking=True))  # noqa: B023 - run at once
                for _ in range(TRANSFER_REPEATS)
            )
            found.append({"tokens": float(tokens), "bytes": float(size), "T_ms": times[len(times) // 2]})
        return found

    def _give_back(self) -> None:
        self._run = self._tokens = None
        self._inputs = []
        self._runtime.release()


def _first_line(error: Exception) -> str:
    return (str(error) or "out of memory").splitlines()[0]
