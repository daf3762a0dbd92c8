"""Exact law of the response with waiting cut off at T_cut (the system of `cutoff`): the AMX queue by the chain of
`cutoff_cycle`.

A request that finds k at the AMX stays there for Erlang(k + 1, mu). Where u_k ~ r^k beyond N, so is what it finds, and
its stay Erlang(N + 1, mu) + Exp(mu (1 - r)).
"""

import math
from dataclasses import dataclass, field

import numpy as np
from scipy import special

from latfit.errors import SlaOutOfReach
from latfit.queueing.cutoff import CutoffQueue
from latfit.queueing.cutoff_cycle import (
    EDGE,
    FEWEST,
    LOG_NEGLIGIBLE,
    cycle_of,
    decay,
    ends,
    phases_of,
    seen_by_overflow,
)
from latfit.queueing.law import OverflowLaw, percentile_of, stable
from latfit.stats import FloatArray

MOST_STATES = 2000
DEVIATIONS = 14.0
GROWTH = 2
NO_OVERFLOW = 1e-12
"""Share below which nobody overflows; the AMX is then empty for whoever would."""


@dataclass(frozen=True)
class Sojourn:
    """At the AMX, of a request that finds k there with chance seen[k], k = 0..N, and seen[N] ratio^(k - N) beyond."""

    seen: FloatArray
    ratio: float
    amx_rate: float

    @property
    def beyond(self) -> float:
        return float(self.seen[-1]) * self.ratio / (1 - self.ratio)

    def tail(self, y: float) -> float:
        N, y = len(self.seen), max(y, 0.0)
        late = float(self.seen @ special.gammaincc(np.arange(1.0, N + 1), self.amx_rate * y))
        if self.beyond > EDGE:
            done = float(special.gammainc(N, self.amx_rate * self.ratio * y)) * self.ratio**-N
            slow = math.exp(-self.amx_rate * (1 - self.ratio) * y)
            late += self.beyond * (float(special.gammaincc(N, self.amx_rate * y)) + slow * done)
        return late

    @property
    def mean_ms(self) -> float:
        N = len(self.seen)
        inside = float(self.seen @ np.arange(1.0, N + 1))
        return (inside + self.beyond * (N + 1 / (1 - self.ratio))) / self.amx_rate


@dataclass(frozen=True)
class CutoffLaw(OverflowLaw):
    """Response over all requests; also that of those that overflow, from their move to the AMX."""

    cutoff_ms: float = math.nan
    sojourn: Sojourn = field(default_factory=lambda: Sojourn(np.ones(1), 0.0, math.nan))

    def amx_percentile(self, q: float) -> float:
        """q-quantile in ms of the response, T_cut included, of the requests that the AMX serves."""
        return self.cutoff_ms + percentile_of(self.sojourn.tail, q)


def exact_law(queue: CutoffQueue) -> CutoffLaw:
    """The law of the response over all requests. Raises SlaOutOfReach where the AMX would be overloaded."""
    if queue.overflow_rate >= queue.amx_rate:
        stable(queue.overflow_rate, queue.amx_rate, "the AMX queue", "A larger T_cut sends less to the AMX.")
    sojourn = _sojourn(queue)
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
        sojourn=sojourn,
    )


def _sojourn(queue: CutoffQueue) -> Sojourn:
    """What overflow meets at the AMX."""
    if queue.overflow_share < NO_OVERFLOW:
        return Sojourn(np.ones(1), 0.0, queue.amx_rate)
    phases = phases_of(queue)
    log_z, deviation = decay(phases, queue.overflow_rate / queue.amx_rate)
    ratio = math.exp(-log_z)
    size = min(math.ceil(LOG_NEGLIGIBLE / log_z), math.ceil(DEVIATIONS * deviation)) + FEWEST
    while size <= MOST_STATES:
        cycle = cycle_of(phases, size)
        u = ends(cycle, ratio)
        if u is not None:
            return Sojourn(seen_by_overflow(cycle, u, ratio), ratio, queue.amx_rate)
        size = math.ceil(GROWTH * size)
    raise SlaOutOfReach(
        f"{size:,} states of the AMX are needed for the exact law, above {MOST_STATES:,}",
        where="T_cut",
        remedy="Take another T_cut, the proved bound, or a simulation.",
    )
