"""The `openvino` device: decoder steps on the CPU through OpenVINO and oneDNN.

One graph with dynamic sizes serves every cell, so weights are packed once; chunks of a cell share length and history.
Cached and new keys are scored apart, so the cache is never copied.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from latfit.errors import WrongUsage
from latfit.memory import free_memory_bytes
from latfit.profiling.devices.decoder import EPS, DecoderStep, Layer, last_rows, rotation
from latfit.profiling.devices.device import (
    INPUT_SETS,
    DeviceOutOfMemory,
    DeviceSettings,
    LocalDevice,
    cpu_facts,
    memory_errors,
    time_ms,
)
from latfit.profiling.devices.numpy_device import random_weights, repeat_block
from latfit.profiling.host.machine import sensible_threads
from latfit.profiling.shapes import ModelShape, Part, StepShape, check_fits

Node = Any

INT8_GROUP = 32  # with 8-bit weights, activations are quantised in groups of so many
CACHE_TYPE = {"bf16": "bf16", "fp32": "f32", "int8": "bf16"}  # of products, too
BUILD_BYTES = {"bf16": 8, "fp32": 12, "int8": 7}
"""Peak bytes per weight: as generated, as a constant, and packed for the kernels."""


class OpenVinoStep(DecoderStep):
    def __init__(self, shape: ModelShape, precision: str, seed: int) -> None:
        from openvino import opset14

        self.op: Any = opset14
        self.precision, self.cache_type = precision, CACHE_TYPE[precision]
        self.inputs: dict[str, Node] = {}
        self.results: list[Node] = []
        super().__init__(random_weights(shape, seed, self.matrix), StepShape(1))

    def model(self, part: Part) -> Any:
        import openvino as ov

        outputs = list(self.outputs(part, self.input("tokens", [-1], "i64") if part == "step" else None))
        if part == "gemm":  # small sums keep the products from being dropped
            outputs = [self.op.reduce_sum(node, self.op.constant([1]), False) for node in outputs]
        return ov.Model(
            [self.op.result(node) for node in [*outputs, *self.results]], list(self.inputs.values()), "step"
        )

    def input(self, name: str, size: Sequence[int], kind: str) -> Node:
        import openvino as ov

        if name not in self.inputs:
            self.inputs[name] = self.op.parameter(list(size), getattr(ov.Type, kind), name=name)
        return self.inputs[name]

    def filled(self, name: str, width: int) -> Node:
        return self.input(name, [-1, width], "f32")

    def embed(self, tokens: Node) -> Node:
        table = self.op.convert(self.op.constant(stored(self.weights.embedding, self.cache_type)), "f32")
        return self.op.gather(table, tokens, self.op.constant(0))

    def last(self, x: Node) -> Node:
        return self.op.gather(x, self.input("last_rows", [-1], "i64"), self.op.constant(0))

    def norm(self, x: Node, weight: Any) -> Node:
        op = self.op
        mean_square = op.reduce_mean(x * x, op.constant([-1]), True)
        return x / op.sqrt(mean_square + op.constant(np.float32(EPS))) * op.constant(weight)

    def matrix(self, array: Any) -> Node:
        """Return weights (out, in), stored in their precision, as an f32 matrix."""
        op = self.op
        if self.precision == "fp32":
            return op.constant(stored(array, "f32"))
        if self.precision == "bf16":
            return op.convert(op.constant(stored(array, "bf16")), "f32")
        scales = np.abs(array).max(axis=1, keepdims=True) / np.float32(127)
        rounded = op.constant(np.round(array / scales).astype(np.int8))
        return op.convert(rounded, "f32") * op.constant(scales.astype(np.float32))

    def product(self, x: Node, matrix: Node) -> Node:
        return self.op.matmul(x, matrix, False, True)

    def swiglu(self, gate_up: Node) -> Node:
        gate, up = self.op.split(gate_up, self.op.constant(1), 2).outputs()
        return self.op.multiply(self.op.swish(gate), up)

    def mixture(self, x: Node, layer: Layer) -> Node:
        op = self.op
        active = op.constant(self.shape.active_experts)
        scores = op.topk(self.product(x, layer.router), active, -1, "max", "value", "i64")
        shares, chosen = op.softmax(scores.output(0), -1), scores.output(1)
        out = x * op.constant(np.float32(0))
        for expert, mlp in enumerate(layer.mlps):
            hits = op.convert(op.equal(chosen, op.constant(np.int64(expert))), "f32")
            share = op.reduce_sum(hits * shares, op.constant([1]), True)
            rows = op.squeeze(op.non_zero(op.reduce_sum(hits, op.constant([1]), False), "i64"), op.constant(0))
            found = self.gated(op.gather(x, rows, op.constant(0)), *mlp) * op.gather(share, rows, op.constant(0))
            places = op.broadcast(op.unsqueeze(rows, op.constant(1)), op.shape_of(found))
            out = op.scatter_elements_update(out, places, found, op.constant(0), "sum", True)
        return out

    def attend(self, layer: int, heads: Node) -> Node:
        op, shape = self.op, self.shape
        split = op.reshape(heads, op.constant([0, shape.heads + 2 * shape.kv_heads, shape.head_dim]), True)
        turned, values = self._split(split, 1, op.constant([shape.heads + shape.kv_heads, shape.kv_heads]))
        queries, keys = self._split(self._rotated(turned), 1, op.constant([shape.heads, shape.kv_heads]))
        rows = self.input("rows", [2], "i64")
        groups = zip(*(self._split(node, 0, rows) for node in (queries, keys, values)), strict=True)
        decode, prefill = groups
        return op.concat([self._decode(layer, *decode), self._prefill(layer, *prefill)], 0)

    def _split(self, node: Node, axis: int, sizes: Node) -> list[Node]:
        return list(self.op.variadic_split(node, self.op.constant(axis), sizes).outputs())

    def _rotated(self, heads: Node) -> Node:
        half = self.shape.head_dim // 2
        cosine, sine = (self.input(name, [-1, 1, half], "f32") for name in ("cosine", "sine"))
        first, second = self.op.split(heads, self.op.constant(2), 2).outputs()
        times = self.op.multiply
        turned = times(first, cosine) - times(second, sine), times(second, cosine) + times(first, sine)
        return self.op.concat(list(turned), 2)

    def _decode(self, layer: int, queries: Node, keys: Node, values: Node) -> Node:
        op, shape = self.op, self.shape
        grouped = op.reshape(queries, op.constant([0, shape.kv_heads, -1, shape.head_dim]), True)
        keys, values = (op.unsqueeze(node, op.constant(2)) for node in (keys, values))
        attended = self._softmax_over(grouped, f"decode_{{}}_{layer}", keys, values, None)
        return op.reshape(attended, op.constant([0, shape.query_width]), True)

    def _prefill(self, layer: int, queries: Node, keys: Node, values: Node) -> Node:
        op, shape = self.op, self.shape
        group, chunk = shape.heads // shape.kv_heads, self.input("chunk", [2], "i64")

        def shaped(node: Node, *sizes: Any) -> Node:
            parts = [op.constant(np.array([size], np.int64)) if isinstance(size, int) else size for size in sizes]
            return op.reshape(node, op.concat(parts, 0), False)

        by_head = op.transpose(
            shaped(queries, chunk, shape.kv_heads, group, shape.head_dim), op.constant([0, 2, 3, 1, 4])
        )
        keys, values = (
            op.transpose(shaped(node, chunk, shape.kv_heads, shape.head_dim), op.constant([0, 2, 1, 3]))
            for node in (keys, values)
        )
        stacked = op.reshape(by_head, op.constant([0, 0, -1, shape.head_dim]), True)
        mask = op.tile(self.input("mask", [-1, -1], "f32"), op.constant([group, 1]))
        attended = self._softmax_over(stacked, f"prefill_{{}}_{layer}", keys, values, mask)
        count, tokens = op.split(chunk, op.constant(0), 2).outputs()
        by_token = op.transpose(
            shaped(attended, count, shape.kv_heads, group, tokens, shape.head_dim), op.constant([0, 3, 1, 2, 4])
        )
        rows = op.slice(self.input("rows", [2], "i64"), *(op.constant([at]) for at in (1, 2, 1)))
        return shaped(by_token, rows, shape.query_width)

    def _softmax_over(self, queries: Node, cache: str, keys: Node, values: Node, mask: Node | None) -> Node:
        """Attend to cached and new keys; the new keys and values become results."""
        op, shape = self.op, self.shape
        self.results += [keys, values]
        size = [-1, shape.kv_heads, -1, shape.head_dim]
        old_keys, old_values = (
            op.convert(self.input(cache.format(half), size, self.cache_type), "f32") for half in ("keys", "values")
        )
        scaled = queries * op.constant(np.float32(shape.head_dim**-0.5))
        old_scores, new_scores = (op.matmul(scaled, each, False, True) for each in (old_keys, keys))
        new_scores = new_scores if mask is None else new_scores + mask
        shares = op.softmax(op.concat([old_scores, new_scores], 3), -1)
        lengths = [op.gather(op.shape_of(each), op.constant([2]), op.constant(0)) for each in (old_keys, keys)]
        old, new = self._split(shares, 3, op.concat(lengths, 0))
        return op.matmul(old, old_values, False, False) + op.matmul(new, values, False, False)


def stored(array: Any, kind: str) -> Any:
    """Return a float32 array as a tensor of `kind` (bf16 or f32), rounded to nearest even."""
    import openvino as ov

    array = np.ascontiguousarray(array, np.float32)
    tensor = ov.Tensor(getattr(ov.Type, kind), list(array.shape))
    if array.size and kind == "bf16":
        bits = array.view(np.uint32)
        tensor.data.view(np.uint16)[...] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    elif array.size:
        tensor.data[...] = array
    return tensor


class OpenVinoDevice(LocalDevice):
    """A compiled model, and the prepared step. counted: enable execution counters."""

    name = "openvino"

    def __init__(self, shape: ModelShape, settings: DeviceSettings, *, counted: bool = False) -> None:
        import openvino as ov

        check_fits(replace(shape, dtype_bytes=BUILD_BYTES[settings.precision]), free_memory_bytes())
        self.path = settings.cpu_path
        self._shape, self._settings, self._ov = shape, settings, ov
        self._threads = settings.threads or sensible_threads()
        self._rng = np.random.default_rng(settings.seed)
        core = ov.Core()
        if settings.precision == "bf16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            found = "OpenVINO has no bfloat16 kernels for this CPU"
            raise WrongUsage(found, where="--dtype bf16", remedy="Measure --dtype fp32.")
        options = {
            "INFERENCE_PRECISION_HINT": CACHE_TYPE[settings.precision],
            "INFERENCE_NUM_THREADS": self._threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(INT8_GROUP if settings.precision == "int8" else 0),
            "PERF_COUNT": counted,
        }
        model = OpenVinoStep(shape, settings.precision, settings.seed).model(settings.part)
        self._compiled = core.compile_model(model, "CPU", options)
        self._request: Any = None
        self._inputs: list[Any] = []

    def facts(self) -> dict[str, Any]:
        return {**cpu_facts(self.name, self._settings, self._threads), "openvino": self._ov.__version__}

    def prepare(self, cell: StepShape) -> None:
        self._request = None  # its caches are given back first, so that old and new never add up
        if len(set(zip(cell.prefill, cell.history, strict=True))) > 1:
            raise DeviceOutOfMemory("OpenVINO's graph takes chunks of one length and one history only")
        self.check_room(self._shape, cell)
        request = self._compiled.create_infer_request()
        wanted = {port.any_name for port in self._compiled.inputs}
        history = cell.history[0] if cell.history else 0
        groups = {"decode": (cell.decode_requests, cell.context), "prefill": (len(cell.prefill), history)}
        with memory_errors():
            for name, value in self._arrays(cell).items():
                if name in wanted:
                    request.set_tensor(name, self._tensor(value))
            for group, sizes in groups.items():
                cache = self._cache(*sizes)
                for name in sorted(each for each in wanted if each.startswith(f"{group}_")):
                    tensor = self._ov.Tensor(cache.element_type, cache.shape)
                    if tensor.size:
                        cache.copy_to(tensor)
                    request.set_tensor(name, tensor)
        tokens_of = [self._rng.integers(0, self._shape.vocab, cell.S) for _ in range(INPUT_SETS)]
        self._inputs = [self._tensor(each) for each in tokens_of] if "tokens" in wanted else []
        self._request = request

    def step_ms(self) -> float:
        if self._inputs:
            self._inputs.append(self._inputs.pop(0))
            self._request.set_tensor("tokens", self._inputs[0])
        with memory_errors():
            return time_ms(self._request.infer)

    def output(self) -> Any:
        """Return logits (B, vocab) of a whole step."""
        return self._request.get_output_tensor(0).data.copy()

    def execution_types(self) -> list[str]:
        kinds = ("FullyConnected", "MatMul", "Subgraph")
        return sorted({entry.exec_type for entry in self._request.profiling_info if entry.node_type.startswith(kinds)})

    def close(self) -> None:
        self._request = self._compiled = None

    def _tensor(self, array: Any) -> Any:
        tensor = self._ov.Tensor(self._ov.Type(array.dtype), list(array.shape))
        if array.size:
            tensor.data[...] = array
        return tensor

    def _cache(self, requests: int, tokens: int) -> Any:
        block = self._rng.standard_normal(1 << 18, dtype=np.float32)
        size = (requests, self._shape.kv_heads, tokens, self._shape.head_dim)
        return stored(repeat_block(size, block), CACHE_TYPE[self._settings.precision])

    def _arrays(self, cell: StepShape) -> dict[str, Any]:
        cosine, sine = rotation(cell, self._shape.head_dim)
        chunk = cell.prefill[0] if cell.prefill else 1
        widths = {"x": self._shape.hidden, "heads": self._shape.qkv_width, "attended": self._shape.query_width}
        return {
            "tokens": self._rng.integers(0, self._shape.vocab, cell.S),
            **{name: self._rng.standard_normal((cell.S, width), dtype=np.float32) for name, width in widths.items()},
            "cosine": cosine,
            "sine": sine,
            "last_rows": last_rows(cell),
            "rows": np.array([cell.decode_requests, cell.prefill_tokens], np.int64),
            "chunk": np.array([len(cell.prefill), chunk], np.int64),
            "mask": np.triu(np.full((chunk, chunk), -np.inf, np.float32), 1),
        }
