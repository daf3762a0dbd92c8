"""The thin layer between the `torch-cuda` device and CUDA: everything that only a GPU can do, and no decision.

`CudaRuntime` is what the device asks for; `TorchCuda` answers with PyTorch. Tests put another answer in its place.
"""

from collections.abc import Callable
from typing import Any, Protocol


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
