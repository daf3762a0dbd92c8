"""The response times of a simulated queue. Time in ms, rates per ms."""

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from latfit.errors import SlaOutOfReach, refuse
from latfit.histogram import Histogram, pooled
from latfit.stats import student_quantile


@dataclass(frozen=True, eq=False)
class ResponseDistribution:
    """Response times of independent runs of a queue, pooled with equal weight for every response."""

    runs: tuple[Histogram, ...] = field(repr=False)
    utilisation: float  # load over the highest stable load; of a T_cut, the busy share of the CPU
    rate_limit: float = math.nan  # the highest stable rate per ms
    settled: bool = True  # whether the runs were as long as the load requires
    mean_batch: float = math.nan
    overflow_share: float = math.nan  # of the second server

    @cached_property
    def pool(self) -> Histogram:
        return pooled(self.runs)

    @property
    def mean_ms(self) -> float:
        return self.pool.mean

    def tail(self, x: float) -> float:
        return self.pool.above(x)

    def percentile(self, q: float) -> float:
        return self.pool.value(q)

    def percentile_interval(self, q: float, level: float = 0.95) -> tuple[float, float]:
        """Return the confidence interval of a percentile in ms; the upper end may be infinite."""
        half = student_quantile(len(self.runs) - 1, 0.5 + level / 2) * self.tail_error(self.percentile(q))
        return self.percentile(max(q - half, 1e-12)), self.percentile(q + half) if q + half < 1 else math.inf

    def tail_error(self, x: float) -> float:
        """Return the standard error of P(response > x) over the runs; infinite for one run."""
        m = len(self.runs)
        if m < 2:
            return math.inf
        number, share = self.pool.share_in_bin(x)
        below = np.array([run.at_most(number, share) for run in self.runs])
        sizes = np.array([run.size for run in self.runs], dtype=np.float64)
        shares, weights = below / sizes, sizes / sizes.sum()
        return math.sqrt(float(weights**2 @ (shares - float(weights @ shares)) ** 2) * m / (m - 1))


def require_stable(rate: float, limit: float) -> None:
    """Raise WrongUsage unless 0 < rate, and SlaOutOfReach unless rate < limit, both per ms."""
    wrong = not math.isfinite(rate) or rate <= 0
    refuse(wrong, f"rate is {rate:g}, not above zero", "rate", "Give a rate per ms above zero.")
    if rate >= limit:
        found = f"the batch queue is unstable at {1e3 * rate:,.6g}/s: it has no bound from {1e3 * limit:,.6g}/s on"
        remedy = f"Keep the rate below {1e3 * limit:,.6g}/s, or add replicas."
        raise SlaOutOfReach(found, where="rate", remedy=remedy)
