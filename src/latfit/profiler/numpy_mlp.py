"""The gated MLP of a layer in NumPy, dense or as a mixture of experts.

An expert computes (silu(x W_gate) * (x W_up)) W_down. With experts, a token passes the `active_experts` that the
router x W_router scores highest, and their results are added with the softmax of those scores as weights. Tokens are
gathered by expert, so that each expert that any token chose reads its weights once, as in a serving engine.
"""

import numpy as np
from numpy.typing import NDArray

from latfit.profiler.workload import ModelShape

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
