"""The `torch-cuda` device: whole decoder steps on a GPU, timed by CUDA events, with and without CUDA graphs.

Without graphs a step's time holds the launching of its kernels by the CPU, as in an engine that runs eagerly; with
graphs the whole step is recorded once a cell and replayed. A mixture of experts decides on the CPU which experts run,
so its steps cannot be recorded and run eagerly.

The device decides, and asks a `CudaRuntime` for what only a GPU can do; `TorchCuda` answers with PyTorch, tests put
another answer in its place.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

from latfit.profiling.devices.cache_flush import TIMES_THE_CACHE, USUAL
from latfit.profiling.devices.protocol import DeviceOutOfMemory, DeviceSettings
from latfit.profiling.devices.torch_step import Tensor, TorchStep, random_cache, random_torch_weights
from latfit.profiling.shapes import GIB, ModelShape, StepShape, check_fits, step_bytes


class CudaRuntime(Protocol):
    """A GPU: where tensors lie, its memory, its clock, and recorded graphs."""

    @property
    def place(self) -> str:
        """PyTorch's name of the device, such as `cuda:0`."""
        ...

    @property
    def out_of_memory(self) -> type[Exception]: ...

    def facts(self) -> dict[str, Any]: ...

    def free_bytes(self) -> int:
        """Memory that can still be taken, what PyTorch keeps in reserve included."""
        ...

    def time_ms(self, run: Callable[[], object]) -> float:
        """Time between two events around `run`, on the GPU's clock, once the GPU has done all of it."""
        ...

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        """`run` recorded as a CUDA graph after warm-up runs; the answer replays it."""
        ...

    def pinned(self, size: int) -> Any:
        """A buffer of `size` bytes in host memory that the GPU can read by itself."""
        ...

    def release(self) -> None:
        """Give memory in reserve back."""
        ...


class TorchCuda:
    """The real thing, on one GPU."""

    def __init__(self, index: int = 0) -> None:
        import torch

        self._torch = torch
        self._index = index

    @property
    def place(self) -> str:
        return f"cuda:{self._index}"

    @property
    def out_of_memory(self) -> type[Exception]:
        found: type[Exception] = self._torch.cuda.OutOfMemoryError
        return found

    def facts(self) -> dict[str, Any]:
        torch = self._torch
        found = torch.cuda.get_device_properties(self._index)
        return {
            "gpu": found.name,
            "compute_capability": f"{found.major}.{found.minor}",
            "gpu_memory_bytes": int(found.total_memory),
            "multiprocessors": int(found.multi_processor_count),
            "l2_bytes": int(getattr(found, "L2_cache_size", 0)) or None,
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
        }

    def free_bytes(self) -> int:
        cuda = self._torch.cuda
        free, _ = cuda.mem_get_info(self._index)
        return int(free + cuda.memory_reserved(self._index) - cuda.memory_allocated(self._index))

    def time_ms(self, run: Callable[[], object]) -> float:
        cuda = self._torch.cuda
        first, last = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda.synchronize(self._index)
        first.record()
        run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last))

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        cuda = self._torch.cuda
        side = cuda.Stream(self._index)
        side.wait_stream(cuda.current_stream(self._index))
        with cuda.stream(
            side
        ):  # libraries choose kernels and take workspace in the first runs; a graph must not see it
            for _ in range(3):
                run()
        cuda.current_stream(self._index).wait_stream(side)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            run()
        replay: Callable[[], None] = graph.replay
        return replay

    def pinned(self, size: int) -> Any:
        return self._torch.empty(size, dtype=self._torch.uint8, pin_memory=True)

    def release(self) -> None:
        self._torch.cuda.synchronize(self._index)
        self._torch.cuda.empty_cache()


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
