"""One step of a decoder-only transformer, written once for NumPy, PyTorch and OpenVINO.

All tokens of a step pass each weight matrix in one product. docs/how-to/profile.md describes the arithmetic.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latfit.profiling.shapes import ModelShape, Part, StepShape

EPS = 1e-6  # of the norms
ROTARY_BASE = 10000.0

Array = Any  # a tensor of the back-end: NumPy array, PyTorch tensor, or OpenVINO node
Matrix = Any  # weights (in, out) in the form that the back-end multiplies by


@dataclass(frozen=True)
class Layer:
    """Weights of one layer. mlps: gate_up and down of each expert, or of one dense MLP (router None)."""

    attention_norm: Array
    qkv: Matrix
    out: Matrix
    mlp_norm: Array
    mlps: Sequence[tuple[Matrix, Matrix]]
    router: Matrix | None


@dataclass(frozen=True)
class Weights:
    """`embedding` is (vocab, hidden); `head` multiplies by its transpose."""

    shape: ModelShape
    layers: Sequence[Layer]
    final_norm: Array
    embedding: Array
    head: Matrix


def build_weights(
    shape: ModelShape,
    matrix: Callable[[int, int], Matrix],
    norm: Callable[[int], Array],
    embedding: tuple[Array, Matrix],
) -> Weights:
    layers = [
        Layer(
            norm(shape.hidden),
            matrix(shape.hidden, shape.qkv_width),
            matrix(shape.query_width, shape.hidden),
            norm(shape.hidden),
            [
                (matrix(shape.hidden, 2 * shape.intermediate), matrix(shape.intermediate, shape.hidden))
                for _ in range(shape.experts or 1)
            ],
            matrix(shape.hidden, shape.experts) if shape.experts else None,
        )
        for _ in range(shape.layers)
    ]
    return Weights(shape, layers, norm(shape.hidden), *embedding)


class Group(NamedTuple):
    """Requests with equally many new and cached tokens, which go through attention together."""

    requests: int
    tokens: int  # of each request
    cached: int  # before them


def groups_of(cell: StepShape) -> list[Group]:
    """Return the decode requests as one group, then the prefill chunks, equal neighbours together."""
    decode = [Group(cell.decode_requests, 1, cell.context)] if cell.decode_requests else []
    chunks = groupby(zip(cell.prefill, cell.history, strict=True))
    return decode + [Group(len(list(equal)), tokens, cached) for (tokens, cached), equal in chunks]


KvCache = Sequence[tuple[Array, Array]]
"""Keys and values of each group: (layers, requests, kv_heads, cached + tokens, head_dim)."""


def make_cache(shape: ModelShape, cell: StepShape, make: Callable[[tuple[int, ...]], Array]) -> KvCache:
    sizes = [
        (shape.layers, group.requests, shape.kv_heads, group.cached + group.tokens, shape.head_dim)
        for group in groups_of(cell)
    ]
    return [(make(size), make(size)) for size in sizes]


class DecoderStep(ABC):
    """A step of one cell. Rows of activations (S, hidden): the decode requests, then the chunks."""

    def __init__(self, weights: Weights, cell: StepShape) -> None:
        self.weights, self.shape, self.cell, self.groups = weights, weights.shape, cell, groups_of(cell)

    def run(self, tokens: Array) -> Array:
        """Return the logits (B, vocab) of each request's last token."""
        weights = self.weights
        x = self.embed(tokens)
        for number, layer in enumerate(weights.layers):
            heads = self.product(self.norm(x, layer.attention_norm), layer.qkv)
            x = x + self.product(self.attend(number, heads), layer.out)
            x = x + self.mlp(self.norm(x, layer.mlp_norm), layer)
        return self.product(self.norm(self.last(x), weights.final_norm), weights.head)

    def outputs(self, part: Part, tokens: Array) -> Iterator[Array]:
        """Compute the whole step, or each layer's weight products or attention on random input."""
        if part == "step":
            yield self.run(tokens)
            return
        for number, layer in enumerate(self.weights.layers):
            if part == "attention":
                yield self.attend(number, self.filled("heads", self.shape.qkv_width))
            else:
                x = self.filled("x", self.shape.hidden)
                yield self.product(x, layer.qkv)
                yield self.product(self.filled("attended", self.shape.query_width), layer.out)
                yield self.mlp(x, layer)

    def mlp(self, x: Array, layer: Layer) -> Array:
        return self.gated(x, *layer.mlps[0]) if layer.router is None else self.mixture(x, layer)

    def gated(self, x: Array, gate_up: Matrix, down: Matrix) -> Array:
        """Return (silu(x W_gate) * (x W_up)) W_down."""
        return self.product(self.swiglu(self.product(x, gate_up)), down)

    @abstractmethod
    def filled(self, name: str, width: int) -> Array: ...

    @abstractmethod
    def embed(self, tokens: Array) -> Array: ...

    @abstractmethod
    def last(self, x: Array) -> Array: ...

    @abstractmethod
    def norm(self, x: Array, weight: Array) -> Array: ...

    @abstractmethod
    def product(self, x: Array, matrix: Matrix) -> Array: ...

    @abstractmethod
    def swiglu(self, gate_up: Array) -> Array:
        """Return silu(gate) * up of (S, 2n), the gate first."""

    @abstractmethod
    def attend(self, layer: int, heads: Array) -> Array:
        """Return attention (S, query_width) of queries, keys and values (S, qkv_width); fill the cache."""

    @abstractmethod
    def mixture(self, x: Array, layer: Layer) -> Array:
        """Return each token's experts, weighted by the softmax of their scores."""


class EagerStep(DecoderStep):
    xp: Any
    cosine: Array
    sine: Array
    cache: KvCache

    def __init__(self, weights: Weights, cell: StepShape) -> None:
        super().__init__(weights, cell)
        self._filled: dict[str, Array] = {}

    def filled(self, name: str, width: int) -> Array:
        if name not in self._filled:
            self._filled[name] = self.random(width)
        return self._filled[name]

    def attend(self, layer: int, heads: Array) -> Array:
        shape, turning = self.shape, self.shape.heads + self.shape.kv_heads  # values are not rotated
        split = heads.reshape(len(heads), turning + shape.kv_heads, shape.head_dim)
        first, second = split[:, :turning, : shape.head_dim // 2], split[:, :turning, shape.head_dim // 2 :]
        turned = self.xp.concatenate(
            (first * self.cosine - second * self.sine, second * self.cosine + first * self.sine), -1
        )
        parts, start = [], 0
        for number, (requests, tokens, cached) in enumerate(self.groups):
            rows, start = slice(start, start + requests * tokens), start + requests * tokens
            seen = []
            for half, new in zip(self.cache[number], (turned[rows, shape.heads :], split[rows, turning:]), strict=True):
                half[layer][:, :, cached:] = new.reshape(requests, tokens, shape.kv_heads, -1).swapaxes(1, 2)
                seen.append(half[layer])
            queries = turned[rows, : shape.heads].reshape(requests, tokens, shape.heads, shape.head_dim)
            parts.append(self.attention(number, queries, *seen).reshape(-1, shape.query_width))
        return parts[0] if len(parts) == 1 else self.xp.concatenate(parts)

    def mixture(self, x: Array, layer: Layer) -> Array:
        assert layer.router is not None
        chosen, shares = self.route(self.product(x, layer.router))
        out = self.xp.zeros_like(x)
        for expert in self.xp.unique(chosen).tolist():
            rows, slot = self.xp.where(chosen == expert)
            out[rows] += self.gated(x[rows], *layer.mlps[expert]) * shares[rows, slot][:, None]
        return out

    @abstractmethod
    def random(self, width: int) -> Array: ...

    @abstractmethod
    def route(self, scores: Array) -> tuple[Array, Array]:
        """Return each token's best experts (S, active), and their shares."""

    @abstractmethod
    def attention(self, group: int, queries: Array, keys: Array, values: Array) -> Array:
        """Attend to keys (requests, kv_heads, seen, head_dim); queries and result are (requests, tokens, heads,
        head_dim).
        """


def last_rows(cell: StepShape) -> NDArray[np.int64]:
    return np.cumsum([1] * cell.decode_requests + list(cell.prefill), dtype=np.int64) - 1


def rotation(cell: StepShape, head_dim: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return cosine and sine (S, 1, head_dim/2) of the rotary embedding."""
    each = [np.tile(np.arange(cached, cached + tokens), requests) for requests, tokens, cached in groups_of(cell)]
    positions = np.concatenate(each)
    angle = positions[:, None, None] * ROTARY_BASE ** (-np.arange(0, head_dim, 2) / head_dim)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
