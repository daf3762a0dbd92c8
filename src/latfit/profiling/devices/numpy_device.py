"""The `numpy` device: whole decoder steps in float32 through NumPy's BLAS, on the CPU. Present on every
machine.
"""

import math
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.errors import WrongUsage
from latfit.memory import free_memory_bytes
from latfit.profiling.devices.numpy_step import DecoderStep, DecoderWeights, Float32, KvCache, filled, random_weights
from latfit.profiling.devices.protocol import DeviceOutOfMemory
from latfit.profiling.host.blas import blas_facts, find_openblas
from latfit.profiling.host.machine import sensible_threads
from latfit.profiling.shapes import GIB, ModelShape, Part, StepShape, check_fits, step_bytes

INPUT_SETS = 4
"""Sets of input tokens that steps take in turn, so that no step finds the embeddings of the one before in the cache."""


class NumpyDevice:
    """Random weights of `shape`, one pool of cache memory that grows with the largest cell, and the prepared
    step.

    threads: BLAS threads; by default as many as can run at a time. Raises WrongUsage where the weights do not
    fit in memory, or the threads were asked for and this BLAS cannot be told.
    """

    name = "numpy"
    path = "cpu"

    def __init__(self, shape: ModelShape, *, threads: int | None = None, seed: int = 0, part: Part = "step") -> None:
        check_fits(shape, free_memory_bytes())
        self._part = part
        self._inputs: list[NDArray[np.int64]] = []
        self._blas = find_openblas()
        self._threads_before = self._blas.threads if self._blas else None
        self._set_threads(threads)
        self._weights = self._load(shape, seed)
        self._rng = np.random.default_rng(seed)
        self._block = self._rng.standard_normal(1 << 18, dtype=np.float32)
        self._pool: tuple[Float32, Float32] = (np.empty(0, np.float32), np.empty(0, np.float32))
        self._step: DecoderStep | None = None

    @property
    def threads(self) -> int | None:
        """BLAS threads in use; None where this BLAS does not tell."""
        return self._blas.threads if self._blas else None

    def facts(self) -> dict[str, Any]:
        return {
            "device": self.name,
            "dtype": "float32",
            "threads": self.threads,
            "isa": blas_facts()["isa"],
            "blas": blas_facts(),
            "numpy": np.__version__,
        }

    def free_bytes(self) -> int | None:
        free = free_memory_bytes()
        return None if free is None else free + sum(half.nbytes for half in self._pool)

    def prepare(self, cell: StepShape) -> None:
        self._step = None
        shape, free = self._weights.shape, self.free_bytes()
        needed = step_bytes(shape, cell)
        if free is not None and needed > free:
            raise DeviceOutOfMemory(f"needs {needed / GIB:.2f} GiB beside the weights, {free / GIB:.2f} GiB are free")
        self._inputs = [self._rng.integers(0, shape.vocab, cell.S) for _ in range(INPUT_SETS)]
        try:
            self._step = DecoderStep(self._weights, cell, self._cache(cell), self._inputs[0])
            self._step.fill(self._rng)
        except MemoryError as error:
            raise DeviceOutOfMemory(str(error)) from None

    @property
    def step(self) -> DecoderStep:
        """The step that was prepared last, which stays what it is when another is prepared."""
        if self._step is None:
            raise RuntimeError("no cell is prepared")
        return self._step

    def step_ms(self) -> float:
        if self._step is None:
            raise RuntimeError("no cell is prepared")
        self._inputs.append(self._inputs.pop(0))
        self._step.use_tokens(self._inputs[0])
        started = time.perf_counter_ns()
        try:
            self._step.part(self._part)
        except MemoryError as error:
            raise DeviceOutOfMemory(str(error)) from None
        return (time.perf_counter_ns() - started) / 1e6

    def now_s(self) -> float:
        return time.perf_counter()

    def close(self) -> None:
        self._step = None
        self._pool = (np.empty(0, np.float32), np.empty(0, np.float32))
        if self._blas and self._threads_before:
            self._blas.set_threads(self._threads_before)

    def _load(self, shape: ModelShape, seed: int) -> DecoderWeights:
        try:
            return random_weights(shape, seed)
        except MemoryError:
            raise WrongUsage(
                f"there is no memory for its weights ({shape.weight_bytes / GIB:.1f} GiB)",
                where=f"model {shape.name}",
                remedy="Choose a smaller --model, or fewer --layers.",
            ) from None

    def _set_threads(self, threads: int | None) -> None:
        if threads is not None and threads < 1:
            raise WrongUsage(f"{threads} threads is too few", where="--threads", remedy="Ask for 1 or more.")
        told = self._blas is not None and self._blas.set_threads(threads or sensible_threads())
        if threads is not None and not told:
            raise WrongUsage(
                "the BLAS of this NumPy does not take a number of threads",
                where="--threads",
                remedy="Set it in the environment instead, such as OMP_NUM_THREADS or MKL_NUM_THREADS.",
            )

    def _cache(self, cell: StepShape) -> KvCache:
        """Views of the pool, one after the other; the pool grows where they need more. Raises MemoryError."""
        shape = self._weights.shape
        token = shape.layers * shape.kv_heads * shape.head_dim
        if cell.cache_tokens * token > self._pool[0].size:
            self._pool = (
                self._block[:0],
                self._block[:0],
            )  # given back first, so that old and new never add up
            size = (cell.cache_tokens * token,)
            self._pool = (filled(size, self._block), filled(size, self._block))
        cursor = _Cursor(self._pool)
        decode = cursor.take(shape.layers, cell.decode_requests, shape.kv_heads, cell.context + 1, shape.head_dim)
        chunks = [
            cursor.take(shape.layers, shape.kv_heads, before + n, shape.head_dim)
            for n, before in zip(cell.prefill, cell.history, strict=True)
        ]
        return KvCache(*decode, prefill=tuple(chunks))


class _Cursor:
    """Cuts arrays off the front of a pair of flat pools."""

    def __init__(self, pool: tuple[Float32, Float32]) -> None:
        self._pool = pool
        self._taken = 0

    def take(self, *size: int) -> tuple[Float32, Float32]:
        start, self._taken = self._taken, self._taken + math.prod(size)
        keys, values = (half[start : self._taken].reshape(size) for half in self._pool)
        return keys, values
