"""The `openvino` device: whole decoder steps through OpenVINO and the oneDNN inside it, on the CPU. The arithmetic is
that of `numpy_step`.

One graph with open sizes serves every cell, so that weights are packed once: decode requests and prefill chunks are two
groups, either of which may be empty, and all chunks of a cell have one length and one history. A query attends to its
cache and to the tokens of this step by two products whose scores meet in one softmax,
softmax([q K_cache', q k_new']) [V_cache; v_new], so that the cache is read where it lies and never copied; the new keys
and values leave the graph as results.

With experts, the rows that chose an expert are found at run time, gathered, sent through its gated MLP and scattered
back, so that experts nobody chose do no work.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from latfit.errors import WrongUsage
from latfit.memory import free_memory_bytes
from latfit.profiling.devices.numpy_step import (
    EPS,
    DecoderWeights,
    LayerWeights,
    filled,
    positions,
    random_weights,
    rotation,
)
from latfit.profiling.devices.protocol import DeviceOutOfMemory, DeviceSettings
from latfit.profiling.host.machine import sensible_threads
from latfit.profiling.shapes import GIB, ModelShape, Part, StepShape, check_fits, step_bytes

Node = Any
GROUPS = ("decode", "prefill")


@dataclass(frozen=True)
class Precision:
    """How numbers are kept. weights: bf16, f32 or i8; caches: bf16 or f32."""

    weights: str
    caches: str


def build(weights: DecoderWeights, precision: Precision, part: Part = "step") -> Any:
    """The graph as an `openvino.Model`. Inputs: `tokens`, `cosine`, `sine`, `last_rows`, `rows` (rows of each group),
    `chunk` (chunks and tokens of each), `mask`, and `GROUP_keys_LAYER`, `GROUP_values_LAYER`.

    A part alone takes `x` in place of tokens: (S, hidden) for gemm, (S, qkv_width) for attention.
    """
    import openvino as ov

    graph = _Graph(weights, precision)
    outputs = {"step": graph.step, "gemm": graph.products, "attention": graph.attention}[part]()
    return ov.Model([graph.op.result(node) for node in outputs], graph.used_inputs(outputs), "step")


class _Graph:
    """Nodes under construction. Shapes: S tokens, D decode requests, N chunks of n tokens, h cached ones."""

    def __init__(self, weights: DecoderWeights, precision: Precision) -> None:
        from openvino import opset14

        self.op: Any = opset14
        self.weights, self.precision, self.shape = weights, precision, weights.shape
        self.inputs: dict[str, Node] = {}

    def step(self) -> list[Node]:
        op, shape = self.op, self.shape
        tokens = self._input("tokens", [-1], "i64")
        x = op.gather(self._table(self.weights.embedding), tokens, op.constant(0))
        written: list[Node] = []
        for number, layer in enumerate(self.weights.layers):
            heads = self._product(self._norm(x, layer.attention_norm), layer.qkv)
            attended, new = self._attend(number, heads)
            written += new
            x = op.add(x, self._product(attended, layer.out))
            x = op.add(x, self._mlp(self._norm(x, layer.mlp_norm), layer))
        last = op.gather(x, self._input("last_rows", [-1], "i64"), op.constant(0))
        logits = op.matmul(self._norm(last, self.weights.final_norm), self._matrix(self.weights.embedding), False, True)
        logits.set_friendly_name(f"head_{shape.vocab}")
        return [logits, *written]

    def products(self) -> list[Node]:
        """Every product of a layer with its weights, on the same input; small sums keep them from being dropped."""
        x = self._input("x", [-1, self.shape.hidden], "f32")
        attended = self._input("attended", [-1, self.shape.query_width], "f32")
        found = []
        for layer in self.weights.layers:
            found += [self._product(x, layer.qkv), self._product(attended, layer.out), self._mlp(x, layer)]
        return [self.op.reduce_sum(node, self.op.constant([1]), False) for node in found]

    def attention(self) -> list[Node]:
        heads = self._input("x", [-1, self.shape.qkv_width], "f32")
        found = []
        for number in range(self.shape.layers):
            attended, new = self._attend(number, heads)
            found += [attended, *new]
        return found

    def used_inputs(self, outputs: list[Node]) -> list[Node]:
        return list(self.inputs.values())

    def _input(self, name: str, shape: list[int], kind: str) -> Node:
        import openvino as ov

        if name not in self.inputs:
            self.inputs[name] = self.op.parameter(shape, getattr(ov.Type, kind), name=name)
        return self.inputs[name]

    def _norm(self, x: Node, weight: Any) -> Node:
        op = self.op
        mean_square = op.reduce_mean(op.multiply(x, x), op.constant([-1]), True)
        return op.multiply(
            op.divide(x, op.sqrt(op.add(mean_square, op.constant(np.float32(EPS))))), op.constant(weight)
        )

    def _product(self, x: Node, weight: Any) -> Node:
        """x (S, in) times a weight (in, out)."""
        return self.op.matmul(x, self._matrix(weight.T), False, True)

    def _table(self, array: Any) -> Node:
        return self.op.convert(self.op.constant(stored(array, self.precision.caches)), "f32")

    def _matrix(self, array: Any) -> Node:
        """A constant (out, in) in the precision of weights, as the f32 matrix that it stands for."""
        op, kind = self.op, self.precision.weights
        if kind != "i8":
            constant = op.constant(stored(array, kind))
            return constant if kind == "f32" else op.convert(constant, "f32")
        scales = np.abs(array).max(axis=1, keepdims=True) / np.float32(127)
        rounded = op.constant(np.round(array / scales).astype(np.int8))
        return op.multiply(op.convert(rounded, "f32"), op.constant(scales.astype(np.float32)))

    def _mlp(self, x: Node, layer: LayerWeights) -> Node:
        if layer.router is None:
            return self._gated(x, layer.gate_up, layer.down)
        op = self.op
        scores = op.topk(
            self._product(x, layer.router), op.constant(self.shape.active_experts), -1, "max", "value", "i64"
        )
        shares, chosen = op.softmax(scores.output(0), -1), scores.output(1)
        out = op.multiply(x, op.constant(np.float32(0)))
        for expert in range(self.shape.experts):
            hits = op.convert(op.equal(chosen, op.constant(np.int64(expert))), "f32")
            share = op.reduce_sum(op.multiply(hits, shares), op.constant([1]), True)
            rows = op.squeeze(op.non_zero(op.reduce_sum(hits, op.constant([1]), False), "i64"), op.constant(0))
            picked = op.gather(x, rows, op.constant(0))
            found = op.multiply(
                self._gated(picked, layer.gate_up[expert], layer.down[expert]), op.gather(share, rows, op.constant(0))
            )
            places = op.broadcast(op.unsqueeze(rows, op.constant(1)), op.shape_of(found))
            out = op.scatter_elements_update(out, places, found, op.constant(0), "sum", True)
        return out

    def _gated(self, x: Node, gate_up: Any, down: Any) -> Node:
        op, width = self.op, self.shape.intermediate
        gate = self._product(x, gate_up[:, :width])
        return self._product(op.multiply(op.swish(gate), self._product(x, gate_up[:, width:])), down)

    def _attend(self, layer: int, heads: Node) -> tuple[Node, list[Node]]:
        """(attended (S, query_width), the new keys and values of both groups)."""
        op, shape = self.op, self.shape
        split = op.reshape(heads, op.constant([0, shape.heads + 2 * shape.kv_heads, shape.head_dim]), True)
        sizes = op.constant([shape.heads + shape.kv_heads, shape.kv_heads])
        turned, values = op.variadic_split(split, op.constant(1), sizes).outputs()
        turned = op.variadic_split(
            self._rotated(turned), op.constant(1), op.constant([shape.heads, shape.kv_heads])
        ).outputs()
        rows = self._input("rows", [2], "i64")
        queries, keys, values = (op.variadic_split(node, op.constant(0), rows).outputs() for node in (*turned, values))
        decoded, decode_new = self._decode(layer, queries[0], keys[0], values[0])
        prefilled, prefill_new = self._prefill(layer, queries[1], keys[1], values[1])
        return op.concat([decoded, prefilled], 0), [*decode_new, *prefill_new]

    def _rotated(self, heads: Node) -> Node:
        op, half = self.op, self.shape.head_dim // 2
        cosine, sine = (self._input(name, [-1, 1, half], "f32") for name in ("cosine", "sine"))
        first, second = op.split(heads, op.constant(2), 2).outputs()
        turned = op.subtract(op.multiply(first, cosine), op.multiply(second, sine))
        return op.concat([turned, op.add(op.multiply(second, cosine), op.multiply(first, sine))], 2)

    def _cache(self, group: str, layer: int) -> tuple[Node, Node]:
        shape = self.shape
        size = [-1, shape.kv_heads, -1, shape.head_dim]
        pair = [self._input(f"{group}_{kind}_{layer}", size, self.precision.caches) for kind in ("keys", "values")]
        keys, values = (self.op.convert(node, "f32") for node in pair)
        return keys, values

    def _decode(self, layer: int, queries: Node, keys: Node, values: Node) -> tuple[Node, list[Node]]:
        op, shape = self.op, self.shape
        group = shape.heads // shape.kv_heads
        grouped = op.reshape(queries, op.constant([0, shape.kv_heads, group, shape.head_dim]), True)
        new = [op.unsqueeze(node, op.constant(2)) for node in (keys, values)]
        attended = self._softmax_over(grouped, self._cache("decode", layer), (new[0], new[1]), None)
        return op.reshape(attended, op.constant([0, shape.query_width]), True), new

    def _prefill(self, layer: int, queries: Node, keys: Node, values: Node) -> tuple[Node, list[Node]]:
        """Queries (N n, heads, head_dim): grouped by key head into (N, kv_heads, group n, head_dim)."""
        op, shape = self.op, self.shape
        group, chunk = shape.heads // shape.kv_heads, self._input("chunk", [2], "i64")
        by_head = self._reshaped(queries, chunk, [shape.kv_heads, group, shape.head_dim])
        by_head = op.transpose(by_head, op.constant([0, 2, 3, 1, 4]))
        new = [
            op.transpose(self._reshaped(node, chunk, [shape.kv_heads, shape.head_dim]), op.constant([0, 2, 1, 3]))
            for node in (keys, values)
        ]
        stacked = op.reshape(by_head, op.constant([0, 0, -1, shape.head_dim]), True)
        mask = op.tile(self._input("mask", [-1, -1], "f32"), op.constant([group, 1]))
        attended = self._softmax_over(stacked, self._cache("prefill", layer), (new[0], new[1]), mask)
        count, tokens = op.split(chunk, op.constant(0), 2).outputs()
        sizes = [count, op.constant([shape.kv_heads]), op.constant([group]), tokens, op.constant([shape.head_dim])]
        split = op.reshape(attended, op.concat([_as_i64(op, size) for size in sizes], 0), False)
        by_token = op.transpose(split, op.constant([0, 3, 1, 2, 4]))
        rows = op.slice(self._input("rows", [2], "i64"), *(op.constant([at]) for at in (1, 2, 1)))
        width = op.constant(np.array([shape.query_width], np.int64))
        return op.reshape(by_token, op.concat([rows, width], 0), False), new

    def _reshaped(self, node: Node, chunk: Node, rest: list[int]) -> Node:
        op = self.op
        return op.reshape(node, op.concat([chunk, op.constant(np.array(rest, np.int64))], 0), False)

    def _softmax_over(
        self, queries: Node, cached: tuple[Node, Node], new: tuple[Node, Node], mask: Node | None
    ) -> Node:
        op = self.op
        scaled = op.multiply(queries, op.constant(np.float32(self.shape.head_dim**-0.5)))
        old_scores = op.matmul(scaled, cached[0], False, True)
        new_scores = op.matmul(scaled, new[0], False, True)
        if mask is not None:
            new_scores = op.add(new_scores, mask)
        shares = op.softmax(op.concat([old_scores, new_scores], 3), -1)
        lengths = op.concat([_length(op, cached[0]), _length(op, new[0])], 0)
        old_shares, new_shares = op.variadic_split(shares, op.constant(3), lengths).outputs()
        return op.add(op.matmul(old_shares, cached[1], False, False), op.matmul(new_shares, new[1], False, False))


def _length(op: Any, keys: Node) -> Node:
    return op.gather(op.shape_of(keys), op.constant([2]), op.constant(0))


def _as_i64(op: Any, node: Node) -> Node:
    return op.convert(node, "i64")


def stored(array: Any, kind: str) -> Any:
    """A float32 array as an OpenVINO tensor of `kind` (bf16 or f32); rounded to nearest, ties to even."""
    import openvino as ov

    array = np.ascontiguousarray(array, np.float32)
    tensor = ov.Tensor(getattr(ov.Type, kind), list(array.shape))
    if not array.size:
        return tensor
    if kind == "bf16":
        bits = array.view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        tensor.data.view(np.uint16)[...] = rounded
    else:
        tensor.data[...] = array
    return tensor


def cache_size(shape: ModelShape, requests: int, tokens: int) -> list[int]:
    """Shape of one layer's keys of a group."""
    return [requests, shape.kv_heads, tokens, shape.head_dim]


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
