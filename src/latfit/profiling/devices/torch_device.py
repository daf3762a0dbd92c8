"""The `torch-cpu` device: whole decoder steps through PyTorch and the oneDNN inside it."""

import time
from typing import Any

from latfit.errors import WrongUsage
from latfit.memory import free_memory_bytes
from latfit.profiling.devices.protocol import DeviceOutOfMemory, DeviceSettings
from latfit.profiling.devices.torch_step import Tensor, TorchStep, random_cache, random_torch_weights
from latfit.profiling.host.machine import sensible_threads
from latfit.profiling.shapes import GIB, ModelShape, StepShape, check_fits, step_bytes

INPUT_SETS = 4


class TorchCpuDevice:
    """Random weights of `shape`, and the prepared step. Raises WrongUsage where the weights do not fit in memory."""

    name = "torch-cpu"

    def __init__(self, shape: ModelShape, settings: DeviceSettings) -> None:
        import torch

        check_fits(shape, free_memory_bytes())
        self.path = "amx" if settings.evidence.get("isa") == "amx" else "cpu"
        self._settings, self._shape = settings, shape
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(settings.threads or sensible_threads())
        with torch.inference_mode():
            try:
                self._weights = random_torch_weights(shape, "cpu", settings.precision, settings.seed)
            except RuntimeError as error:
                raise _no_room(shape, error) from None
        self._generator = torch.Generator().manual_seed(settings.seed)
        self._inputs: list[Tensor] = []
        self._step: TorchStep | None = None

    def facts(self) -> dict[str, Any]:
        import torch

        return {
            "device": self.name,
            "dtype": self._settings.dtype,
            "threads": torch.get_num_threads(),
            "isa": self._settings.evidence.get("isa"),
            "evidence": dict(self._settings.evidence),
            "part": self._settings.part,
            "torch": torch.__version__,
        }

    def free_bytes(self) -> int | None:
        return free_memory_bytes()

    def prepare(self, cell: StepShape) -> None:
        import torch

        self._step = None  # its cache is given back first, so that old and new never add up
        needed, free = step_bytes(self._shape, cell), self.free_bytes()
        if free is not None and needed > free:
            raise DeviceOutOfMemory(f"needs {needed / GIB:.2f} GiB beside the weights, {free / GIB:.2f} GiB are free")
        with torch.inference_mode(), _memory_errors():
            self._inputs = [
                torch.randint(self._shape.vocab, (cell.S,), generator=self._generator) for _ in range(INPUT_SETS)
            ]
            cache = random_cache(self._shape, cell, self._weights.dtype, "cpu")
            self._step = TorchStep(self._weights, cell, cache, self._inputs[0])

    def step_ms(self) -> float:
        import torch

        if self._step is None:
            raise RuntimeError("no cell is prepared")
        self._inputs.append(self._inputs.pop(0))
        self._step.tokens = self._inputs[0]
        with torch.inference_mode(), _memory_errors():
            started = time.perf_counter_ns()
            self._step.part(self._settings.part)
            return (time.perf_counter_ns() - started) / 1e6

    def now_s(self) -> float:
        return time.perf_counter()

    def close(self) -> None:
        import torch

        self._step = None
        torch.set_num_threads(self._threads_before)


class _memory_errors:  # noqa: N801 - read as a statement: `with _memory_errors():`
    """PyTorch's failed allocation on a CPU is a RuntimeError that only its text tells apart."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        text = str(error).lower()
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in text):
            raise DeviceOutOfMemory(str(error).splitlines()[0]) from None


def _no_room(shape: ModelShape, error: Exception) -> Exception:
    if "memory" not in str(error).lower():
        return error
    return WrongUsage(
        f"there is no memory for its weights ({shape.weight_bytes / GIB:.1f} GiB)",
        where=f"model {shape.name}",
        remedy="Choose a smaller --model, or fewer --layers.",
    )
