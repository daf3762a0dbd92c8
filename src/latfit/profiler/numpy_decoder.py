"""One step of a decoder layer stack in float32, through NumPy and its BLAS.

Every layer adds attention and then a gated MLP to the residual stream x (S tokens, hidden): x +=
attend(rotate(norm(x) W_qkv)) W_out and x += (silu(norm(x) W_gate) * (norm(x) W_up)) W_down, with norm(x) = x
/ sqrt(mean(x^2) + eps) * weight and silu(z) = z / (1 + e^-z). The last token of each request then meets the
embedding matrix for its logits. As in a serving engine, all tokens of the step pass each weight matrix in one
product, whatever requests they belong to; only attention looks at requests one kind at a time.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from latfit.profiler.numpy_attention import (
    DecodeAttention,
    Float32,
    KvCache,
    PrefillAttention,
    rotate,
    rotation,
)
from latfit.profiler.numpy_mlp import GatedMlp, project
from latfit.profiler.workload import ModelShape, Part, StepShape

EPS = 1e-6

_BLOCK = (1 << 20) - 3


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer, stored (in, out), the layout that BLAS reads fastest here.

    With experts, gate_up and down have a leading axis of experts, and `router` (hidden, experts) chooses among them.
    """

    attention_norm: Float32
    qkv: Float32
    out: Float32
    mlp_norm: Float32
    gate_up: Float32
    down: Float32
    router: Float32 | None = None


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of a model; `embedding` (vocab, hidden) serves as language-model head too."""

    shape: ModelShape
    layers: tuple[LayerWeights, ...]
    final_norm: Float32
    embedding: Float32


def random_weights(shape: ModelShape, seed: int) -> DecoderWeights:
    """Random weights that keep the residual stream of order one. Raises MemoryError."""
    rng = np.random.default_rng(seed)
    block = rng.standard_normal(_BLOCK, dtype=np.float32)

    def matrix(rows: int, columns: int, experts: int = 0) -> Float32:
        stacked = (experts,) if experts else ()
        weight = filled((*stacked, rows, columns), np.roll(block, int(rng.integers(_BLOCK))))
        weight *= np.float32(rows**-0.5)
        return weight

    def norm() -> Float32:
        return rng.uniform(0.8, 1.2, shape.hidden).astype(np.float32)

    layers = tuple(
        LayerWeights(
            attention_norm=norm(),
            qkv=matrix(shape.hidden, shape.qkv_width),
            out=matrix(shape.query_width, shape.hidden),
            mlp_norm=norm(),
            gate_up=matrix(shape.hidden, 2 * shape.intermediate, shape.experts),
            down=matrix(shape.intermediate, shape.hidden, shape.experts),
            router=matrix(shape.hidden, shape.experts) if shape.experts else None,
        )
        for _ in range(shape.layers)
    )
    return DecoderWeights(shape, layers, norm(), filled((shape.vocab, shape.hidden), block))


def filled(shape: tuple[int, ...], block: Float32) -> Float32:
    """An array of `shape` with `block` repeated: real numbers at the speed of a copy, whatever the size."""
    array = np.empty(shape, np.float32)
    flat = array.reshape(-1)
    for start in range(0, flat.size, block.size):
        part = flat[start : start + block.size]
        part[...] = block[: part.size]
    return array


def rms_norm(x: Float32, weight: Float32, out: Float32) -> None:
    """out (S, hidden) = x scaled to a root mean square of one, times `weight`."""
    mean_square = np.einsum("sh,sh->s", x, x) / np.float32(x.shape[1])
    np.multiply(x, (1 / np.sqrt(mean_square + np.float32(EPS)))[:, None], out=out)
    out *= weight


class DecoderStep:
    """The step of one cell over one set of caches, with every large buffer made beforehand. Raises
    MemoryError."""

    def __init__(self, weights: DecoderWeights, cell: StepShape, cache: KvCache, tokens: NDArray[np.int64]) -> None:
        shape = weights.shape
        self._weights, self._cell, self._cache, self._tokens = weights, cell, cache, tokens
        self._chunks = list(_chunk_rows(cell))
        self._cosine, self._sine = rotation(positions(cell), shape.head_dim)
        self._x = np.empty((cell.S, shape.hidden), np.float32)
        self._normed = np.empty_like(self._x)
        self._qkv = np.empty((cell.S, shape.heads + 2 * shape.kv_heads, shape.head_dim), np.float32)
        self._attended = np.empty((cell.S, shape.query_width), np.float32)
        self._mlp = GatedMlp(shape, cell.S)
        self._mlp_out = np.empty_like(self._x)
        self._logits = np.empty((cell.B, shape.vocab), np.float32)
        self._last_rows = np.r_[np.arange(cell.decode_requests), [rows.stop - 1 for rows in self._chunks]].astype(int)
        group = shape.heads // shape.kv_heads
        self._decode = DecodeAttention(cell.decode_requests, cell.context, shape.kv_heads, group)
        self._prefill = [
            PrefillAttention(n, before, shape.kv_heads, group, shape.head_dim)
            for n, before in zip(cell.prefill, cell.history, strict=True)
        ]

    def run(self) -> Float32:
        """Logits (B, vocab) of each request's last token; decode requests first, then the chunks in order.

        The array is reused by the next run.
        """
        x, normed = self._x, self._normed
        np.take(self._weights.embedding, self._tokens, axis=0, out=x, mode="clip")
        for number, layer in enumerate(self._weights.layers):
            rms_norm(x, layer.attention_norm, out=normed)
            project(normed, layer.qkv, out=self._qkv.reshape(len(x), -1))
            self._attend(number)
            project(self._attended, layer.out, out=normed)
            x += normed
            rms_norm(x, layer.mlp_norm, out=normed)
            self._mlp.run(normed, (layer.gate_up, layer.down), layer.router, out=self._mlp_out)
            x += self._mlp_out
        return self._logits_of(x)

    def part(self, part: Part) -> None:
        """The whole step, or only its products with weights, or only its attention, on what the buffers hold."""
        if part == "step":
            self.run()
            return
        for number, layer in enumerate(self._weights.layers):
            if part == "attention":
                np.copyto(self._qkv, self._filled)  # attention scales its queries in place
                self._attend(number)
                continue
            project(self._normed, layer.qkv, out=self._qkv.reshape(self._cell.S, -1))
            project(self._attended, layer.out, out=self._x)
            self._mlp.run(self._normed, (layer.gate_up, layer.down), layer.router, out=self._mlp_out)

    def fill(self, rng: np.random.Generator) -> None:
        """Numbers of order one in every buffer that a part alone reads."""
        for buffer in (self._normed, self._qkv, self._attended):
            buffer[...] = rng.standard_normal(buffer.shape, dtype=np.float32)
        self._filled = self._qkv.copy()

    def use_tokens(self, tokens: NDArray[np.int64]) -> None:
        """Other input tokens (S,) from the next run on."""
        self._tokens = tokens

    def _logits_of(self, x: Float32) -> Float32:
        last = x[self._last_rows]
        rms_norm(last, self._weights.final_norm, out=last)
        project(last, self._weights.embedding.T, out=self._logits)
        return self._logits

    def _attend(self, layer: int) -> None:
        shape, cache = self._weights.shape, self._cache
        rotate(self._qkv[:, : shape.heads + shape.kv_heads], self._cosine, self._sine)
        self._qkv[:, : shape.heads] *= np.float32(shape.head_dim**-0.5)
        decoding = self._cell.decode_requests
        if decoding:
            keys, values = cache.decode_keys[layer], cache.decode_values[layer]
            self._decode.run(self._qkv[:decoding], keys, values, self._attended[:decoding])
        for rows, attention, (keys, values) in zip(self._chunks, self._prefill, cache.prefill, strict=True):
            attention.run(self._qkv[rows], keys[layer], values[layer], self._attended[rows])


def _chunk_rows(cell: StepShape) -> list[slice]:
    """Rows of the step that belong to each prefill chunk; decode requests come first."""
    stops = np.cumsum([cell.decode_requests, *cell.prefill]).tolist()
    return [slice(start, stop) for start, stop in pairwise(stops)]


def positions(cell: StepShape) -> NDArray[np.int64]:
    """Position of each token (S,) within its request."""
    chunks = [np.arange(before, before + n) for n, before in zip(cell.prefill, cell.history, strict=True)]
    return np.concatenate([np.full(cell.decode_requests, cell.context), *chunks]).astype(np.int64)
