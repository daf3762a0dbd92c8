"""Functions for executors from models of OpenVINO and torch.

A request is a row: one array, or arrays by input name. A row whose shapes differ from the first good batch fails alone:
a copy of another row takes its place.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.live.executor import Run

Array = NDArray[Any]

UNNAMED = ""
"""The name of an only input or output that was given none."""


class RowStack:
    """Stack the rows of batches, and split outputs by row."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}  # shape and type of a row's arrays, by name

    def stack(self, inputs: list[Any]) -> tuple[dict[str, Array] | None, list[Any]]:
        """Return the arrays of a batch (None without a usable row), and each row's error."""
        rows = [
            {name: np.asarray(value) for name, value in (row if isinstance(row, Mapping) else {UNNAMED: row}).items()}
            for row in inputs
        ]
        errors = [self._mismatch(row) for row in rows]
        stand_in = next((row for row, error in zip(rows, errors, strict=True) if error is None), None)
        if stand_in is None:
            return None, errors
        usable = [row if error is None else stand_in for row, error in zip(rows, errors, strict=True)]
        kinds = {name: array.dtype for name, array in stand_in.items()}
        kinds |= {name: kind for name, (_, kind) in self._kinds.items()}
        return {name: np.stack([row[name] for row in usable], dtype=kind) for name, kind in kinds.items()}, errors

    def split(self, outputs: Mapping[str, Array], stacked: Mapping[str, Array], errors: list[Any]) -> list[Any]:
        """Return the output of each row, or its error; later rows must be like those of `stacked`."""
        count = len(errors)
        for name, array in outputs.items():
            if array.shape[:1] != (count,):
                raise ValueError(f"output {name or 0} has shape {array.shape} for {count} requests")
        self._kinds = {name: (array.shape[1:], array.dtype) for name, array in stacked.items()}
        rows: Any = [{name: array[k] for name, array in outputs.items()} for k in range(count)]
        if len(outputs) == 1:
            (rows,) = outputs.values()
        return [row if error is None else error for row, error in zip(rows, errors, strict=True)]

    def _mismatch(self, row: Mapping[str, Array]) -> ValueError | None:
        if self._kinds and set(row) != set(self._kinds):
            return ValueError(f"inputs {sorted(row)}, not {sorted(self._kinds)}")
        for name, (shape, kind) in self._kinds.items():
            if row[name].shape != shape or not np.can_cast(row[name].dtype, kind, "same_kind"):
                given = f"{row[name].dtype} of shape {row[name].shape}"
                return ValueError(f"{given}{name and f' for {name}'}, not {kind} of shape {shape}")
        return None


class ByRows(RowStack):
    """A function of stacked arrays {name: (b, ...)} as a function of requests."""

    def __init__(self, compute: Callable[[dict[str, Array]], Mapping[str, Array]]) -> None:
        super().__init__()
        self._compute = compute

    def __call__(self, inputs: list[Any]) -> list[Any]:
        stacked, errors = self.stack(inputs)
        return errors if stacked is None else self.split(self._compute(stacked), stacked, errors)


def openvino_run(model: Any, *, threads: int = 0, servers: int = 1, bf16: bool = False) -> Run:
    """Run batches through OpenVINO on the CPU.

    Parameters
    ----------
    model
        Path of an .xml or .onnx file, an openvino.Model, or a compiled one, whose settings stay.
    threads
        In all; 0 for OpenVINO's default.
    servers
        Those of the executor.
    bf16
        Products in bfloat16 (AMX) instead of float32.
    """
    import openvino as ov

    if not isinstance(model, ov.CompiledModel):
        precision = "bf16" if bf16 else "f32"
        options = {"NUM_STREAMS": servers, "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision}
        model = ov.Core().compile_model(model, "CPU", options)
    names = [min(port.names, default=str(place)) for place, port in enumerate(model.outputs)]
    of_thread = threading.local()  # an infer request runs one batch at a time

    def compute(arrays: dict[str, Array]) -> dict[str, Array]:
        if not hasattr(of_thread, "request"):
            of_thread.request = model.create_infer_request()
        given = {name or 0: array for name, array in arrays.items()}
        found = of_thread.request.infer(given, share_inputs=True)  # outputs are copies: the request is used again
        return {name: found[place] for place, name in enumerate(names)}

    return ByRows(compute)


def torch_run(module: Callable[..., Any], *, device: str = "cpu", bf16: bool = False, threads: int = 0) -> Run:
    """Run batches through a torch module, or a function of tensors, without gradients.

    Arrays by name are keyword arguments. Outputs are a tensor, a sequence or a mapping of them.

    Parameters
    ----------
    device
        To which a module is moved.
    bf16
        Products in bfloat16 (AMX).
    threads
        Of torch in this process; 0 to leave them.
    """
    import torch

    where = torch.device(device)
    if isinstance(module, torch.nn.Module):
        module.eval().to(where)
    if threads:
        torch.set_num_threads(threads)
    of_thread = threading.local()

    def forward(tensors: dict[str, Any]) -> dict[str, Any]:
        outputs = module(tensors[UNNAMED]) if UNNAMED in tensors else module(**tensors)
        if isinstance(outputs, torch.Tensor):
            return {UNNAMED: outputs}
        pairs = outputs.items() if isinstance(outputs, Mapping) else ((str(k), each) for k, each in enumerate(outputs))
        return {name: each for name, each in pairs if isinstance(each, torch.Tensor)}

    def forward_on_cuda(tensors: dict[str, Any]) -> dict[str, Any]:
        if not hasattr(of_thread, "stream"):
            of_thread.stream = torch.cuda.Stream(where)
        with torch.cuda.stream(of_thread.stream):
            outputs = forward({name: each.pin_memory().to(where, non_blocking=True) for name, each in tensors.items()})
            host = {name: torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for name, each in outputs.items()}
            for name, each in outputs.items():
                host[name].copy_(each, non_blocking=True)
            of_thread.stream.synchronize()
        return host

    if where.type == "cuda":
        torch.cuda.synchronize(where)  # weights are there before another stream reads them

    def compute(arrays: dict[str, Array]) -> dict[str, Array]:
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        with torch.inference_mode(), torch.autocast(where.type, torch.bfloat16, enabled=bf16):
            outputs = forward_on_cuda(tensors) if where.type == "cuda" else forward(tensors)
        return {
            name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
            for name, tensor in outputs.items()
        }

    return ByRows(compute)
