"""One step of a decoder layer stack in float32, through NumPy and its BLAS.

Every layer adds attention and then a gated MLP to the residual stream x (S tokens, hidden):
x += attend(rotate(norm(x) W_qkv)) W_out and x += (silu(norm(x) W_gate) * (norm(x) W_up)) W_down, with
norm(x) = x / sqrt(mean(x^2) + eps) * weight and silu(z) = z / (1 + e^-z). The last token of each request then meets the
embedding matrix for its logits. As in a serving engine, all tokens of the step pass each weight matrix in one product,
whatever requests they belong to; only attention looks at requests one kind at a time.

Attention runs over a real key and value cache. Each query head attends to the keys of its group's key head:
weights = softmax(q . k / sqrt(head_dim)) over the request's cached tokens and, in a prefill chunk, over the chunk's own
tokens up to itself. The softmax subtracts the row's maximum, and divides by the row's sum after the product with the
values, where fewer numbers are left to divide. Decode requests have one query each and one context length, so all of
them go through one stacked product. A prefill chunk is cut into blocks of query rows, which keeps the matrix of scores
within the caches and skips the part of the causal triangle that is zero.

In a mixture of experts each expert is such a gated MLP. A token passes the `active_experts` that the router x W_router
scores highest, and their results are added with the softmax of those scores as weights. Tokens are gathered by expert,
so that each expert that any token chose reads its weights once, as in a serving engine.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from latfit.profiling.shapes import ModelShape, Part, StepShape

Float32 = NDArray[np.float32]

# OpenBLAS repacks the whole weight matrix at every matrix-matrix product but not at a matrix-vector product:
# up to this many tokens, a vector product a token is faster (measured: 1.2 ms each against 3.3 ms for two
# tokens together).
VECTOR_ROWS = 2


def project(x: Float32, weight: Float32, out: Float32) -> None:
    """out (S, columns) = x (S, rows) weight (rows, columns), by the faster of the two BLAS products."""
    if len(x) > VECTOR_ROWS:
        np.matmul(x, weight, out=out)
        return
    for row, result in zip(x, out, strict=True):
        np.matmul(row, weight, out=result)


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


def route(scores: Float32, active: int) -> tuple[NDArray[np.int64], Float32]:
    """Experts (S, active) that each token passes, and their weights, from scores (S, experts)."""
    chosen = np.argpartition(-scores, active - 1, axis=1)[:, :active]
    kept = np.take_along_axis(scores, chosen, axis=1)
    kept = np.exp(kept - kept.max(axis=1, keepdims=True))
    return chosen, np.asarray(kept / kept.sum(axis=1, keepdims=True), dtype=np.float32)


class GatedMlp:
    """Buffers for up to `tokens` tokens through one expert (or the one dense MLP). Raises MemoryError."""

    def __init__(self, shape: ModelShape, tokens: int) -> None:
        self._active = shape.active_experts
        self._gate_up = np.empty((tokens, 2 * shape.intermediate), np.float32)
        self._gated = np.empty((tokens, shape.intermediate), np.float32)
        self._down = np.empty((tokens, shape.hidden if shape.experts else 0), np.float32)

    def run(self, x: Float32, weights: tuple[Float32, Float32], router: Float32 | None, out: Float32) -> None:
        """out (S, hidden) = MLP of x (S, hidden); out is another array than x.

        weights: gate_up and down, each with a leading axis of experts where there is a router.
        """
        gate_up, down = weights
        if router is None:
            self._expert(x, gate_up, down, out)
            return
        chosen, shares = route(x @ router, self._active)
        out[...] = 0
        for expert in np.unique(chosen).tolist():
            rows, slot = np.nonzero(chosen == expert)
            result = self._down[: len(rows)]
            self._expert(x[rows], gate_up[expert], down[expert], result)
            out[rows] += result * shares[rows, slot][:, None]

    def _expert(self, x: Float32, gate_up: Float32, down: Float32, out: Float32) -> None:
        both, hidden = self._gate_up[: len(x)], self._gated[: len(x)]
        project(x, gate_up, out=both)
        gated(both, out=hidden)
        project(hidden, down, out=out)


QUERY_ROWS = 64


@dataclass(frozen=True)
class KvCache:
    """Keys and values: of decode requests (layers, requests, kv_heads, room, head_dim), and a pair of
    (layers, kv_heads, room, head_dim) for each prefill request."""

    decode_keys: Float32
    decode_values: Float32
    prefill: tuple[tuple[Float32, Float32], ...] = ()


def rotation(positions: NDArray[np.int64], head_dim: int) -> tuple[Float32, Float32]:
    """Cosine and sine (tokens, 1, head_dim/2) of the rotary embedding at `positions`, base 10000."""
    frequency = 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    angle = positions[:, None, None] * frequency
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rotate(heads: Float32, cosine: Float32, sine: Float32) -> None:
    """Rotate `heads` (tokens, heads, head_dim) in place; the two halves of a head are the two coordinates."""
    half = heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    turned = first * cosine
    turned -= second * sine
    second *= cosine
    second += first * sine
    first[...] = turned


def softmax_unscaled(scores: Float32) -> Float32:
    """Exponentials of `scores` (…, keys) in place, and their sums (…, 1), which the caller divides by."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    sums: Float32 = scores.sum(axis=-1, keepdims=True)
    return sums


class DecodeAttention:
    """One query a request, all requests with the same context. Buffers are made once a cell."""

    def __init__(self, requests: int, context: int, kv_heads: int, group: int) -> None:
        self._context = context
        self._scores = np.empty((requests, kv_heads, group, context + 1), np.float32)

    def run(self, qkv: Float32, keys: Float32, values: Float32, out: Float32) -> None:
        """qkv (requests, heads + 2 kv_heads, head_dim), scaled and rotated; keys and values (requests,
        kv_heads, room, head_dim) take the new token at `context`; out (requests, heads x head_dim)."""
        requests, kv_heads, group, seen = self._scores.shape
        heads, width = kv_heads * group, qkv.shape[-1]
        keys[:, :, self._context] = qkv[:, heads : heads + kv_heads]
        values[:, :, self._context] = qkv[:, heads + kv_heads :]
        queries = qkv[:, :heads].reshape(requests, kv_heads, group, width)
        np.matmul(queries, keys[:, :, :seen].swapaxes(-1, -2), out=self._scores)
        sums = softmax_unscaled(self._scores)
        attended = out.reshape(requests, kv_heads, group, width)
        np.matmul(self._scores, values[:, :, :seen], out=attended)
        attended /= sums


class PrefillAttention:
    """A chunk of `tokens` prompt tokens after `history` cached ones, in blocks of query rows."""

    def __init__(self, tokens: int, history: int, kv_heads: int, group: int, head_dim: int) -> None:
        self._tokens, self._history = tokens, history
        self._kv_heads, self._group, self._width = kv_heads, group, head_dim
        rows = min(QUERY_ROWS, tokens)
        self._queries = np.empty(kv_heads * group * rows * head_dim, np.float32)
        self._attended = np.empty_like(self._queries)
        self._scores = np.empty(kv_heads * group * rows * (history + tokens), np.float32)
        self._mask = np.triu(np.full((rows, rows), -np.inf, np.float32), 1)

    def run(self, qkv: Float32, keys: Float32, values: Float32, out: Float32) -> None:
        """qkv (tokens, heads + 2 kv_heads, head_dim), scaled and rotated; keys and values (kv_heads, room,
        head_dim) take the chunk after `history`; out (tokens, heads x head_dim)."""
        heads = self._kv_heads * self._group
        written = slice(self._history, self._history + self._tokens)
        keys[:, written] = qkv[:, heads : heads + self._kv_heads].swapaxes(0, 1)
        values[:, written] = qkv[:, heads + self._kv_heads :].swapaxes(0, 1)
        for start in range(0, self._tokens, QUERY_ROWS):
            stop = min(start + QUERY_ROWS, self._tokens)
            self._block(qkv[start:stop, :heads], keys, values, self._history + stop, out[start:stop])

    def _block(self, queries: Float32, keys: Float32, values: Float32, seen: int, out: Float32) -> None:
        """Queries (rows, heads, head_dim), the last of which is token number `seen` of its request."""
        rows = len(queries)
        split = (rows, self._kv_heads, self._group, self._width)
        stacked = (self._kv_heads, self._group * rows, self._width)
        gathered = self._queries[: queries.size].reshape(self._kv_heads, self._group, rows, self._width)
        gathered[...] = queries.reshape(split).transpose(1, 2, 0, 3)
        scores = self._scores[: self._kv_heads * self._group * rows * seen].reshape(*stacked[:2], seen)
        np.matmul(gathered.reshape(stacked), keys[:, :seen].swapaxes(-1, -2), out=scores)
        by_row = scores.reshape(self._kv_heads, self._group, rows, seen)
        by_row[..., seen - rows :] += self._mask[:rows, :rows]
        sums = softmax_unscaled(scores)
        attended = self._attended[: queries.size].reshape(stacked)
        np.matmul(scores, values[:, :seen], out=attended)
        attended /= sums
        out.reshape(split)[...] = attended.reshape(self._kv_heads, self._group, rows, self._width).transpose(2, 0, 1, 3)


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
