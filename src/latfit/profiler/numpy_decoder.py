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
from latfit.profiler.workload import ModelShape, StepShape

EPS = 1e-6

# OpenBLAS repacks the whole weight matrix at every matrix-matrix product but not at a matrix-vector product:
# up to this many tokens, a vector product a token is faster (measured: 1.2 ms each against 3.3 ms for two
# tokens together).
VECTOR_ROWS = 2

_BLOCK = (1 << 20) - 3


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer, stored (in, out), the layout that BLAS reads fastest here."""

    attention_norm: Float32
    qkv: Float32
    out: Float32
    mlp_norm: Float32
    gate_up: Float32
    down: Float32


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

    def matrix(rows: int, columns: int) -> Float32:
        weight = filled((rows, columns), np.roll(block, int(rng.integers(_BLOCK))))
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
            gate_up=matrix(shape.hidden, 2 * shape.intermediate),
            down=matrix(shape.intermediate, shape.hidden),
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


def project(x: Float32, weight: Float32, out: Float32) -> None:
    """out (S, columns) = x (S, rows) weight (rows, columns), by the faster of the two BLAS products."""
    if len(x) > VECTOR_ROWS:
        np.matmul(x, weight, out=out)
        return
    for row, result in zip(x, out, strict=True):
        np.matmul(row, weight, out=result)


def rms_norm(x: Float32, weight: Float32, out: Float32) -> None:
    """out (S, hidden) = x scaled to a root mean square of one, times `weight`."""
    mean_square = np.einsum("sh,sh->s", x, x) / np.float32(x.shape[1])
    np.multiply(x, (1 / np.sqrt(mean_square + np.float32(EPS)))[:, None], out=out)
    out *= weight


def gated(gate_up: Float32, out: Float32) -> None:
    """out (S, n) = silu(gate) * up for gate_up (S, 2n) with gate first."""
    width = out.shape[1]
    gate = gate_up[:, :width]
    np.negative(gate, out=out)
    with np.errstate(over="ignore"):  # e^-z beyond float32 is infinite, and z over infinity is the zero it should be
        np.exp(out, out=out)
    out += 1
    np.divide(gate, out, out=out)
    out *= gate_up[:, width:]


class DecoderStep:
    """The step of one cell over one set of caches, with every large buffer made beforehand. Raises
    MemoryError."""

    def __init__(self, weights: DecoderWeights, cell: StepShape, cache: KvCache, tokens: NDArray[np.int64]) -> None:
        shape = weights.shape
        self._weights, self._cell, self._cache, self._tokens = weights, cell, cache, tokens
        self._chunks = list(_chunk_rows(cell))
        self._cosine, self._sine = rotation(_positions(cell), shape.head_dim)
        self._x = np.empty((cell.S, shape.hidden), np.float32)
        self._normed = np.empty_like(self._x)
        self._qkv = np.empty((cell.S, shape.heads + 2 * shape.kv_heads, shape.head_dim), np.float32)
        self._attended = np.empty((cell.S, shape.query_width), np.float32)
        self._gate_up = np.empty((cell.S, 2 * shape.intermediate), np.float32)
        self._gated = np.empty((cell.S, shape.intermediate), np.float32)
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
            project(normed, layer.gate_up, out=self._gate_up)
            gated(self._gate_up, out=self._gated)
            project(self._gated, layer.down, out=normed)
            x += normed
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


def _positions(cell: StepShape) -> NDArray[np.int64]:
    """Position of each token (S,) within its request."""
    chunks = [np.arange(before, before + n) for n, before in zip(cell.prefill, cell.history, strict=True)]
    return np.concatenate([np.full(cell.decode_requests, cell.context), *chunks]).astype(np.int64)
