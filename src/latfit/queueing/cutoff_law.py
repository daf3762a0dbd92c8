"""Exact law of the AMX queue behind a GPU with waiting cut off at T_cut (the system of `cutoff`), by matrices.

Within a GPU service of length T(b) nothing overflows for min(T_cut, T(b)) ms, then overflow is Poisson(lambda) for
ON = T(b) - T_cut ms. So the number at the AMX moves as pure death D (rate mu) and then as M/M/1 Q (lambda, mu); if the
GPU is left empty, death goes on for an Exp(lambda) time first. e^(D t) is a Poisson law; e^(Q t) by uniformisation is
sum_j Poisson(j; (lambda + mu) t) U^j with a tridiagonal U, and a mixture over services only mixes those weights.

With i.i.d. batches the number at a completion is one stationary vector u = u sum_b p_b K_b; else it is one vector a
batch size, the eigenvector of the chain to the eigenvalue 1 (Arnoldi). What an overflow request sees is the
average over ON, with int_0^t e^(Q u) du = sum_j P(Poisson((lambda + mu) t) > j) U^j / (lambda + mu); with k before it,
its sojourn is Erlang(k + 1, mu). States are cut where less than 1e-13 is left; N doubles until it is so.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special
from scipy.sparse import linalg as sparse

from latfit.errors import SlaOutOfReach
from latfit.queueing.batch_unlimited import stationary
from latfit.queueing.cutoff import CutoffQueue, overflow_bound
from latfit.queueing.law import ResponseLaw, percentile_of, stable
from latfit.queueing.waits import poisson, poisson_reach
from latfit.stats import FloatArray

IntArray = NDArray[np.int64]

MOST_STATES = 1500
MOST_ENTRIES = 20_000_000
EDGE = 1e-13
NO_OVERFLOW = 1e-12
"""Share below which nobody overflows; the AMX is then empty for whoever would."""


@dataclass(frozen=True)
class CutoffLaw(ResponseLaw):
    """Response over all requests; also `overflow_share` and `seen` (N + 1,), how many are at the AMX before one."""

    overflow_share: float = math.nan
    cutoff_ms: float = math.nan
    amx_rate: float = math.nan
    seen: FloatArray | None = None

    def amx_percentile(self, q: float) -> float:
        """q-quantile in ms of the response, T_cut included, of the requests that the AMX serves."""
        assert self.seen is not None
        return self.cutoff_ms + percentile_of(_Sojourn(self.seen, self.amx_rate).tail, q)


@dataclass(frozen=True)
class _Sojourn:
    seen: FloatArray
    amx_rate: float

    def tail(self, y: float) -> float:
        before = np.arange(1.0, len(self.seen) + 1)
        return float(self.seen @ special.gammaincc(before, self.amx_rate * max(y, 0.0)))

    @property
    def mean_ms(self) -> float:
        return float(self.seen @ np.arange(1.0, len(self.seen) + 1)) / self.amx_rate


def exact_law(queue: CutoffQueue) -> CutoffLaw:
    """The law of the response over all requests. Raises SlaOutOfReach where the AMX would be overloaded."""
    if queue.overflow_rate >= queue.amx_rate:
        stable(queue.overflow_rate, queue.amx_rate, "the AMX queue", "A larger T_cut sends less to the AMX.")
    sojourn = _Sojourn(_seen(queue), queue.amx_rate)
    share = queue.overflow_share
    gpu_mean = queue.served_later.mean_ms + queue.served_idle.mean_ms
    return CutoffLaw(
        mean_ms=gpu_mean + share * (queue.cutoff_ms + sojourn.mean_ms),
        tail=queue.with_amx(sojourn.tail),
        utilisation=queue.overflow_rate / queue.amx_rate,
        rate_limit=math.nan,
        conditions="Poisson arrivals, GPU greedy with a largest batch that does not bind, AMX exponential, both FIFO",
        source="matrix method, exact" + ("" if queue.independent_batches else " (batches as a chain)"),
        overflow_share=share,
        cutoff_ms=queue.cutoff_ms,
        amx_rate=queue.amx_rate,
        seen=sojourn.seen,
    )


def _seen(queue: CutoffQueue) -> FloatArray:
    """Law of the number at the AMX that an overflow request finds."""
    if queue.overflow_share < NO_OVERFLOW:
        return np.ones(1)
    size = _first_size(queue)
    while size <= MOST_STATES:
        amx = _Amx(queue.rate, queue.amx_rate, size)
        seen = _seen_independent(queue, amx) if queue.independent_batches else _seen_chained(queue, amx)
        if float(seen[-2:].sum()) < EDGE:
            return seen
        size = 2 * size
    raise SlaOutOfReach(
        f"overflow keeps the AMX {queue.overflow_rate / queue.amx_rate:.2%} busy: too near its limit for the exact law",
        where="T_cut",
        remedy="Take another T_cut, or the proved bound.",
    )


def _first_size(queue: CutoffQueue) -> int:
    bound = overflow_bound(queue)
    if bound is None:
        return 96
    ratio = -math.log1p(-bound.decay / queue.amx_rate)
    return max(24, math.ceil((math.log(1 / EDGE) + math.log(max(bound.K, 1.0))) / ratio) + 5)


@dataclass(frozen=True)
class _Amx:
    """Number at the AMX, 0..size. Rows of the arrays are starting laws."""

    rate: float
    amx_rate: float
    size: int

    @property
    def clock(self) -> float:
        return self.rate + self.amx_rate

    def death(self, t: float) -> FloatArray:
        """e^(D t) (size + 1, size + 1)."""
        return _descents(poisson(np.arange(self.size + 1.0), np.array([self.amx_rate * t]))[0])

    def idle(self) -> FloatArray:
        """Death over an Exp(rate) time."""
        down = self.amx_rate / self.clock
        return _descents((1 - down) * down ** np.arange(self.size + 1.0))

    def step(self, rows: FloatArray) -> FloatArray:
        """rows @ U, one tick of the uniformised M/M/1 clock; the top state lets nothing in."""
        up, down = self.rate / self.clock, self.amx_rate / self.clock
        moved = np.zeros_like(rows)
        moved[:, 1:] = up * rows[:, :-1]
        moved[:, :-1] += down * rows[:, 1:]
        moved[:, 0] += down * rows[:, 0]
        moved[:, -1] += up * rows[:, -1]
        return moved

    def ticks(self, spans: FloatArray) -> FloatArray:
        """Weights (spans, j) of U^j in e^(Q span)."""
        return poisson(np.arange(float(poisson_reach(self.clock * float(spans.max())))), self.clock * spans)

    def ticks_over(self, spans: FloatArray) -> FloatArray:
        """Weights (spans, j) of U^j in int_0^span e^(Q u) du."""
        j = np.arange(1.0, poisson_reach(self.clock * float(spans.max())) + 1)
        return np.asarray(special.gammainc(j[None, :], self.clock * spans[:, None]) / self.clock)

    def mix(self, rows: FloatArray, weights: FloatArray) -> FloatArray:
        """sum_j weights_j rows U^j; weights (j,), or (j, rows) for a weight of its own for each row, summed."""
        total: FloatArray = weights[0][..., None] * rows
        for weight in weights[1:]:
            rows = self.step(rows)
            total += weight[..., None] * rows
        return total


def _descents(law: FloatArray) -> FloatArray:
    """Transitions i -> max(i - n, 0) with n ~ law."""
    size = len(law)
    i, k = np.indices((size, size))
    moved = np.where(i >= k, law[np.maximum(i - k, 0)], 0.0)
    moved[:, 0] = 1 - moved[:, 1:].sum(axis=1)
    return np.asarray(moved)


def _seen_independent(queue: CutoffQueue, amx: _Amx) -> FloatArray:
    p = queue.chain.p[0]
    on = queue.chain.T - queue.cutoff_ms
    death = amx.death(queue.cutoff_ms)
    after_idle = amx.idle() @ death
    ticks, over = amx.ticks(on), amx.ticks_over(on)
    kernel = amx.mix(death, p[1:] @ ticks) + amx.mix(after_idle, p[0] * ticks[0])
    u = stationary(kernel / kernel.sum(axis=1, keepdims=True))
    seen = amx.mix((u @ death)[None, :], p[1:] @ over) + amx.mix((u @ after_idle)[None, :], p[0] * over[0])
    return np.asarray(seen[0] / seen.sum())


def _seen_chained(queue: CutoffQueue, amx: _Amx) -> FloatArray:
    """One vector a batch size; only sizes that occur."""
    kept = np.flatnonzero(queue.chain.pi > 1e-14).astype(np.int64)
    if len(kept) * (amx.size + 1) ** 2 > MOST_ENTRIES:
        raise SlaOutOfReach(
            "too many batch sizes and AMX states for the exact law",
            where="T_cut",
            remedy="Take a T_cut up to T(1), the proved bound, or a simulation.",
        )
    on = (queue.chain.T - queue.windows)[kept]
    death = np.stack([amx.death(float(window)) for window in queue.windows[kept]])
    ticks = amx.ticks(on)
    kernels = np.stack([amx.mix(d, weights) for d, weights in zip(death, ticks, strict=True)])
    v = _settled(queue, kept, kernels, amx.idle())
    starts = np.einsum("bi,bij->bj", v, death)
    seen = amx.mix(starts, amx.ticks_over(on).T).sum(axis=0)
    return np.asarray(seen / seen.sum())


def _settled(queue: CutoffQueue, kept: IntArray, kernels: FloatArray, idle: FloatArray) -> FloatArray:
    """Vectors (b, N + 1) at the start of services of b: v_b' = sum_b v_b K_b p(b' | b), after idling where b' came
    from none."""
    p = queue.chain.p[kept]
    onward = p[:, queue.chain.batches[kept].astype(np.int64)]
    shape = (len(kept), kernels.shape[1])

    def onwards(flat: FloatArray) -> FloatArray:
        done = np.matmul(flat.reshape(shape)[:, None, :], kernels)[:, 0]
        new: FloatArray = onward.T @ done
        new[0] += (p[:, 0] @ done) @ idle
        return new.ravel()

    first = np.zeros(shape)
    first[:, : shape[1] // 4] = queue.chain.pi[kept][:, None]
    step = sparse.LinearOperator((first.size, first.size), matvec=onwards, dtype=np.float64)
    try:
        _, vectors = sparse.eigs(step, k=1, which="LR", v0=first.ravel(), ncv=min(40, first.size - 1), maxiter=300)
    except sparse.ArpackError as error:
        raise SlaOutOfReach(
            "the chain of batches has not settled: the AMX is too near its limit",
            where="T_cut",
            remedy="Take a T_cut up to T(1), or a simulation.",
        ) from error
    v = np.maximum(np.real(vectors[:, 0] / vectors[:, 0].sum()), 0)
    return np.asarray(v / v.sum()).reshape(shape)
