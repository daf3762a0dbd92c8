"""The `numpy` device: decoder steps in float32 through NumPy's BLAS."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.errors import WrongUsage
from latfit.memory import free_memory_bytes
from latfit.profiling.devices.decoder import (
    EPS,
    EagerStep,
    KvCache,
    Weights,
    build_weights,
    last_rows,
    make_cache,
    rotation,
)
from latfit.profiling.devices.device import INPUT_SETS, LocalDevice, loading, memory_errors, time_ms
from latfit.profiling.host.blas import blas_facts, blas_threads, set_blas_threads
from latfit.profiling.host.machine import sensible_threads
from latfit.profiling.shapes import ModelShape, Part, StepShape, check_fits

Float32 = NDArray[np.float32]

# OpenBLAS repacks the whole weight matrix at every matrix-matrix product but not at a matrix-vector product: up to this
# many tokens, one vector product a token is faster (measured: 1.2 ms each against 3.3 ms for two tokens together).
VECTOR_ROWS = 2
QUERY_ROWS = 64  # query rows of a prefill chunk at a time: scores stay in the caches, zeros of the mask are skipped
_BLOCK = (1 << 20) - 3  # random numbers that fill weights and caches, repeated: filling costs no more than a copy


class NumpyStep(EagerStep):
    xp = np

    def __init__(self, weights: Weights, cell: StepShape, cache: KvCache) -> None:
        super().__init__(weights, cell)
        self.cache = cache
        self.cosine, self.sine = rotation(cell, self.shape.head_dim)
        self._last = last_rows(cell)
        self._mask = np.triu(np.full((QUERY_ROWS, QUERY_ROWS), -np.inf, np.float32), 1)

    def random(self, width: int) -> Float32:
        return np.random.default_rng(0).standard_normal((self.cell.S, width), np.float32)

    def embed(self, tokens: Any) -> Float32:
        return np.asarray(self.weights.embedding[tokens])

    def last(self, x: Float32) -> Float32:
        return np.asarray(x[self._last])

    def norm(self, x: Float32, weight: Float32) -> Float32:
        mean_square = np.einsum("sh,sh->s", x, x) / np.float32(x.shape[1])
        return np.asarray(x * (1 / np.sqrt(mean_square + np.float32(EPS)))[:, None] * weight)

    def product(self, x: Float32, matrix: Float32) -> Float32:
        if len(x) > VECTOR_ROWS:
            return np.asarray(x @ matrix)
        return np.array([row @ matrix for row in x], np.float32)

    def swiglu(self, gate_up: Float32) -> Float32:
        gate, up = np.split(gate_up, 2, axis=1)
        out = np.negative(gate)
        with np.errstate(over="ignore"):  # e^-z beyond float32 is infinite, and z over infinity is zero
            np.exp(out, out=out)
        out += 1
        np.divide(gate, out, out=out)
        out *= up
        return out

    def route(self, scores: Float32) -> tuple[NDArray[np.int64], Float32]:
        active = self.shape.active_experts
        chosen = np.argpartition(-scores, active - 1, axis=1)[:, :active]
        best = np.take_along_axis(scores, chosen, axis=1)
        best = np.exp(best - best.max(axis=1, keepdims=True))
        return chosen, np.asarray(best / best.sum(axis=1, keepdims=True), np.float32)

    def attention(self, group: int, queries: Float32, keys: Float32, values: Float32) -> Float32:
        requests, tokens, heads, width = queries.shape
        kv_heads, cached = keys.shape[1], keys.shape[2] - tokens
        grouped = (queries * np.float32(width**-0.5)).reshape(requests, tokens, kv_heads, -1, width)
        grouped = grouped.transpose(0, 2, 3, 1, 4)  # heads that share a key head stand together
        out = np.empty((requests, tokens, kv_heads, heads // kv_heads, width), np.float32)
        for start in range(0, tokens, QUERY_ROWS):
            rows = slice(start, min(start + QUERY_ROWS, tokens))
            n, seen = rows.stop - start, cached + rows.stop
            scores = grouped[:, :, :, rows].reshape(requests, kv_heads, -1, width) @ keys[:, :, :seen].swapaxes(2, 3)
            if n > 1:
                scores.reshape(requests, kv_heads, -1, n, seen)[..., -n:] += self._mask[:n, :n]
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            attended = scores @ values[:, :, :seen]
            attended /= scores.sum(axis=-1, keepdims=True)  # after the product there are fewer numbers to divide
            out[:, rows] = attended.reshape(requests, kv_heads, -1, n, width).transpose(0, 3, 1, 2, 4)
        return out


def random_weights(shape: ModelShape, seed: int, convert: Callable[[Float32], Any] | None = None) -> Weights:
    """Make random weights (in, out). convert: makes another back-end's matrix of (out, in)."""
    rng = np.random.default_rng(seed)
    block = rng.standard_normal(_BLOCK, dtype=np.float32)

    def matrix(rows: int, columns: int) -> Any:
        weight = repeat_block((rows, columns), np.roll(block, int(rng.integers(_BLOCK))))
        weight *= np.float32(rows**-0.5)
        return convert(weight.T) if convert else weight

    def norm(size: int) -> Float32:
        return rng.uniform(0.8, 1.2, size).astype(np.float32)

    embedding = repeat_block((shape.vocab, shape.hidden), block)
    return build_weights(shape, matrix, norm, (embedding, convert(embedding) if convert else embedding.T))


def repeat_block(size: tuple[int, ...], block: Float32) -> Float32:
    return np.resize(block, size) if np.prod(size) else np.empty(size, np.float32)


class NumpyDevice(LocalDevice):
    name = "numpy"
    path = "cpu"

    def __init__(self, shape: ModelShape, *, threads: int | None = None, seed: int = 0, part: Part = "step") -> None:
        check_fits(shape, free_memory_bytes())
        self._shape, self._part = shape, part
        self._threads_before = blas_threads()
        if not set_blas_threads(threads or sensible_threads()) and threads is not None:
            remedy = "Set it in the environment instead, such as OMP_NUM_THREADS or MKL_NUM_THREADS."
            raise WrongUsage("this NumPy's BLAS takes no number of threads", where="--threads", remedy=remedy)
        with loading(shape):
            self._weights = random_weights(shape, seed)
        self._rng = np.random.default_rng(seed)
        self._pool = np.empty(0, np.float32)
        self._inputs: list[NDArray[np.int64]] = []
        self._step: NumpyStep | None = None

    def facts(self) -> dict[str, Any]:
        blas = blas_facts()
        return {
            "device": self.name,
            "dtype": "float32",
            "threads": blas["threads"],
            "isa": blas["isa"],
            "blas": blas,
            "numpy": np.__version__,
        }

    def free_bytes(self) -> int | None:
        free = free_memory_bytes()
        return None if free is None else free + self._pool.nbytes

    def prepare(self, cell: StepShape) -> None:
        self._step = None
        self.check_room(self._shape, cell)
        self._inputs = [self._rng.integers(0, self._shape.vocab, cell.S) for _ in range(INPUT_SETS)]
        with memory_errors():
            self._step = NumpyStep(self._weights, cell, self._cache(cell))

    def bind_step(self) -> Callable[[], None]:
        """Return a function that runs the prepared step, also after another cell is prepared."""
        assert self._step is not None
        self._inputs.append(self._inputs.pop(0))
        step, tokens, part = self._step, self._inputs[0], self._part

        def run() -> None:
            for _ in step.outputs(part, tokens):
                pass

        return run

    def step_ms(self) -> float:
        run = self.bind_step()
        with memory_errors():
            return time_ms(run)

    def close(self) -> None:
        self._step, self._pool = None, self._pool[:0]
        if self._threads_before:
            set_blas_threads(self._threads_before)

    def _cache(self, cell: StepShape) -> KvCache:
        shape = self._shape
        needed = 2 * cell.cache_tokens * shape.layers * shape.kv_heads * shape.head_dim
        if needed > self._pool.size:
            self._pool = self._pool[:0]  # given back first, so that old and new never add up
            self._pool = repeat_block((needed,), self._rng.standard_normal(_BLOCK, dtype=np.float32))
        taken = 0

        def cut(size: tuple[int, ...]) -> Float32:
            nonlocal taken
            start, taken = taken, taken + int(np.prod(size))
            return self._pool[start:taken].reshape(size)

        return make_cache(shape, cell, cut)
