"""One step of a decoder layer stack as an OpenVINO graph; the arithmetic is that of `numpy_decoder`.

One graph with open sizes serves every cell, so that weights are packed once: decode requests and prefill chunks are two
groups, either of which may be empty, and all chunks of a cell have one length and one history. A query attends to its
cache and to the tokens of this step by two products whose scores meet in one softmax,
softmax([q K_cache', q k_new']) [V_cache; v_new], so that the cache is read where it lies and never copied; the new keys
and values leave the graph as results.

With experts, the rows that chose an expert are found at run time, gathered, sent through its gated MLP and scattered
back, so that experts nobody chose do no work.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from latfit.profiler.numpy_decoder import EPS, DecoderWeights, LayerWeights
from latfit.profiler.workload import ModelShape, Part

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
