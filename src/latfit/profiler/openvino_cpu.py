"""The `openvino` device: whole decoder steps through OpenVINO and the oneDNN inside it, on the CPU."""

import time
from dataclasses import replace
from typing import Any

import numpy as np

from latfit.errors import WrongUsage
from latfit.profiler.device import DeviceOutOfMemory, DeviceSettings
from latfit.profiler.machine import free_memory_bytes, sensible_threads
from latfit.profiler.numpy_attention import rotation
from latfit.profiler.numpy_decoder import filled, positions, random_weights
from latfit.profiler.openvino_graph import Precision, build, cache_size, stored
from latfit.profiler.workload import GIB, ModelShape, StepShape, check_fits, step_bytes

INPUT_SETS = 4
INT8_GROUP = 32
"""Activations are quantised in groups of so many when weights have 8 bits; without it weights are only stored so."""

_PRECISIONS = {
    "bf16": (Precision("bf16", "bf16"), "bf16"),
    "fp32": (Precision("f32", "f32"), "f32"),
    "int8": (Precision("i8", "bf16"), "bf16"),
}
_BUILD_BYTES = {"bf16": 8, "fp32": 12, "int8": 7}
"""Bytes a weight takes at the peak: as made, as a constant, and packed for the kernels."""


class OpenVinoDevice:
    """A compiled model with random weights of `shape`, and the prepared step.

    counted: keep the counters that tell what was executed, which costs time. Raises WrongUsage where the weights do not
    fit in memory.
    """

    name = "openvino"

    def __init__(self, shape: ModelShape, settings: DeviceSettings, *, counted: bool = False) -> None:
        import openvino as ov

        check_fits(replace(shape, dtype_bytes=_BUILD_BYTES[settings.precision]), free_memory_bytes())
        self.path = "amx" if settings.evidence.get("isa") == "amx" else "cpu"
        self._shape, self._settings, self._ov = shape, settings, ov
        self._precision, hint = _PRECISIONS[settings.precision]
        self._threads = settings.threads or sensible_threads()
        self._rng = np.random.default_rng(settings.seed)
        self._block = self._rng.standard_normal(1 << 18, dtype=np.float32)
        core = ov.Core()
        options = {
            "INFERENCE_PRECISION_HINT": hint,
            "INFERENCE_NUM_THREADS": self._threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(INT8_GROUP if settings.precision == "int8" else 0),
            "PERF_COUNT": counted,
        }
        self._check_precision(core)
        model = build(random_weights(shape, settings.seed), self._precision, settings.part)
        self._compiled = core.compile_model(model, "CPU", options)
        self._request: Any = None
        self._inputs: list[Any] = []

    def facts(self) -> dict[str, Any]:
        return {
            "device": self.name,
            "dtype": self._settings.dtype,
            "threads": self._threads,
            "isa": self._settings.evidence.get("isa"),
            "evidence": dict(self._settings.evidence),
            "part": self._settings.part,
            "openvino": self._ov.__version__,
        }

    def free_bytes(self) -> int | None:
        return free_memory_bytes()

    def prepare(self, cell: StepShape) -> None:
        self._request = None  # its caches are given back first, so that old and new never add up
        if len(set(zip(cell.prefill, cell.history, strict=True))) > 1:
            raise DeviceOutOfMemory("OpenVINO's graph takes chunks of one length and one history only")
        needed, free = step_bytes(self._shape, cell), self.free_bytes()
        if free is not None and needed > free:
            raise DeviceOutOfMemory(f"needs {needed / GIB:.2f} GiB beside the weights, {free / GIB:.2f} GiB are free")
        request = self._compiled.create_infer_request()
        wanted = {port.any_name for port in self._compiled.inputs}
        try:
            for name, value in self._arrays(cell).items():
                if name in wanted:
                    request.set_tensor(name, self._tensor(value))
            for name in sorted(wanted):
                if name.startswith(("decode_", "prefill_")):
                    request.set_tensor(name, self._cache(cell, name))
        except MemoryError as error:
            raise DeviceOutOfMemory(str(error)) from None
        tokens = [self._rng.integers(0, self._shape.vocab, cell.S) for _ in range(INPUT_SETS)]
        self._inputs = [self._tensor(each) for each in tokens] if "tokens" in wanted else []
        self._request = request

    def step_ms(self) -> float:
        if self._request is None:
            raise RuntimeError("no cell is prepared")
        if self._inputs:
            self._inputs.append(self._inputs.pop(0))
            self._request.set_tensor("tokens", self._inputs[0])
        started = time.perf_counter_ns()
        try:
            self._request.infer()
        except RuntimeError as error:
            if "alloc" in str(error).lower() or "memory" in str(error).lower():
                raise DeviceOutOfMemory(str(error).strip().splitlines()[-1]) from None
            raise
        return (time.perf_counter_ns() - started) / 1e6

    def output(self) -> Any:
        """The first result of the last step as an array: logits (B, vocab) of a whole step."""
        return self._request.get_output_tensor(0).data.copy()

    def execution_types(self) -> list[str]:
        """What the products of the last step were executed as; empty without counters."""
        kinds = ("FullyConnected", "MatMul", "Subgraph")
        return sorted({entry.exec_type for entry in self._request.profiling_info if entry.node_type.startswith(kinds)})

    def now_s(self) -> float:
        return time.perf_counter()

    def close(self) -> None:
        self._request = self._compiled = None

    def _check_precision(self, core: Any) -> None:
        if self._settings.precision == "bf16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise WrongUsage(
                "OpenVINO has no bfloat16 kernels for this CPU", where="--dtype bf16", remedy="Measure --dtype fp32."
            )

    def _tensor(self, array: Any) -> Any:
        tensor = self._ov.Tensor(self._ov.Type(array.dtype), list(array.shape))
        if array.size:
            tensor.data[...] = array
        return tensor

    def _arrays(self, cell: StepShape) -> dict[str, Any]:
        """Every input but the caches."""
        cosine, sine = rotation(positions(cell), self._shape.head_dim)
        stops = np.cumsum([cell.decode_requests, *cell.prefill])
        chunk = cell.prefill[0] if cell.prefill else 1
        wide = {"step": 1, "gemm": self._shape.hidden, "attention": self._shape.qkv_width}[self._settings.part]
        return {
            "tokens": self._rng.integers(0, self._shape.vocab, cell.S),
            "x": self._rng.standard_normal((cell.S, wide), dtype=np.float32),
            "attended": self._rng.standard_normal((cell.S, self._shape.query_width), dtype=np.float32),
            "cosine": cosine,
            "sine": sine,
            "last_rows": np.array([*range(cell.decode_requests), *(stops[1:] - 1)], np.int64),
            "rows": np.array([cell.decode_requests, cell.prefill_tokens], np.int64),
            "chunk": np.array([len(cell.prefill), chunk], np.int64),
            "mask": np.triu(np.full((chunk, chunk), -np.inf, np.float32), 1),
        }

    def _cache(self, cell: StepShape, name: str) -> Any:
        history = cell.history[0] if cell.history else 0
        counts = (cell.decode_requests, cell.context) if name.startswith("decode_") else (len(cell.prefill), history)
        size = cache_size(self._shape, *counts)
        return stored(filled(tuple(size), self._block), self._precision.caches)
