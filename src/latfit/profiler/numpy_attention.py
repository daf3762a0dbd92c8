"""Attention of a step over a real key and value cache, in NumPy.

Each query head attends to the keys of its group's key head: weights = softmax(q . k / sqrt(head_dim)) over
the request's cached tokens and, in a prefill chunk, over the chunk's own tokens up to itself. The softmax
subtracts the row's maximum, and divides by the row's sum after the product with the values, where fewer
numbers are left to divide. Decode requests have one query each and one context length, so all of them go
through one stacked product. A prefill chunk is cut into blocks of query rows, which keeps the matrix of
scores within the caches and skips the part of the causal triangle that is zero.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]

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
