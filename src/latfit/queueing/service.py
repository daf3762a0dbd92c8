"""How long a batch takes, as the queues see it: T(b) in ms for b = 1, 2, ... up to a largest batch, or without end.

T need not be a straight line and may fall at small b. What decides stability is the rate b/T(b): a greedy server
with at most Bmax requests in a batch is stable exactly below Bmax/T(Bmax) (Foster's drift); without a limit, below
one over the slope of T at large b.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from latfit.errors import WrongUsage
from latfit.model import StepRatios, ratios_of
from latfit.stats import FloatArray

FAR = 2**20
"""Where the slope of T at large batches is read."""


@dataclass(frozen=True)
class ServiceTimes:
    """`at`: batches (n,) -> mean T in ms (n,), called with whole numbers >= 1.  max_batch: None for no limit.  scatter:
    the distribution of a service's time over T(b), of mean 1 for each b; None where each takes T(b)."""

    at: Callable[[FloatArray], FloatArray]
    max_batch: int | None = None
    scatter: StepRatios | None = None

    def __call__(self, b: int) -> float:
        return float(self.at(np.array([float(b)]))[0])

    def table(self, low: int, high: int, step: int = 1) -> FloatArray:
        """T of low, low + step, ..., up to `high`. Raises WrongUsage for a time that is not above zero."""
        b = np.arange(float(low), high + 1, step)
        T = np.asarray(self.at(b), dtype=np.float64)
        if T.shape != b.shape or not np.all(np.isfinite(T) & (T > 0)):
            raise WrongUsage(
                f"T(b) is not a finite time above zero for every batch from {low} to {high}",
                where="service times",
                remedy="Give T in ms for each batch, or limit the batch to where it is known.",
            )
        return T

    def rate_limit(self) -> float:
        """Arrivals per ms below which a greedy server that may take `max_batch` is stable; may be infinite."""
        if self.max_batch is not None:
            return self.max_batch / self(self.max_batch)
        slope = (self(FAR) - self(FAR // 2)) / (FAR - FAR // 2)
        return 1 / slope if slope > 0 else float("inf")

    def spread(self, largest: int) -> FloatArray:
        """Root of the mean square of a service's time over T(b), for b = 1, ..., largest."""
        b = np.arange(1.0, largest + 1)
        if self.scatter is None:
            return np.ones(largest)
        return np.sqrt(self.scatter.scaled().mean_squares(b))

    def alone(self) -> "ServiceTimes":
        """One request at a time, exponential where its scatter is not known."""
        return replace(self, max_batch=1, scatter=self.scatter or exponential_scatter())

    def best_batch(self) -> int:
        """The batch with the highest rate b/T(b), the cap to choose where a larger batch is slower per request."""
        if self.max_batch is None:
            raise WrongUsage("no largest batch", where="max_batch", remedy="Give a max_batch.")
        return int(np.argmax(np.arange(1, self.max_batch + 1) / self.table(1, self.max_batch))) + 1


def linear_times(tau_ms: float, alpha_ms: float, max_batch: int | None = None) -> ServiceTimes:
    """T(b) = tau + alpha b."""
    return _checked(ServiceTimes(lambda b: tau_ms + alpha_ms * b, max_batch))


def measured_times(times_ms: FloatArray, scatter: StepRatios | None = None) -> ServiceTimes:
    """T of batches 1, 2, ..., len(times_ms), the largest batch there is. scatter: of mean 1."""
    times = np.array(times_ms, dtype=np.float64)
    return _checked(ServiceTimes(lambda b: times[np.asarray(b, dtype=np.int64) - 1], len(times), scatter))


@cache
def exponential_scatter(points: int = 20_000) -> StepRatios:
    """An exponential distribution of mean 1 as points, for a service that nobody measured."""
    shares = (np.arange(points) + 0.5) / points
    return ratios_of(-np.log1p(-shares), np.ones(points)).scaled()


def _checked(times: ServiceTimes) -> ServiceTimes:
    if times.max_batch is not None and times.max_batch < 1:
        raise WrongUsage(
            f"largest batch is {times.max_batch}", where="max_batch", remedy="Give a largest batch of 1 or more."
        )
    times.table(1, min(times.max_batch or 64, 65_536))
    return times
