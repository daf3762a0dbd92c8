"""How long a batch takes, as the queues see it: T(b) in ms for b = 1, 2, ... up to a largest batch, or without end.

The mean T need not be a straight line and may fall at small b. What decides stability is the rate b/T(b): a greedy
server with at most Bmax requests in a batch is stable exactly below Bmax/T(Bmax) (Foster's drift); without a limit,
below one over the slope of T at large b.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from latfit.errors import WrongUsage
from latfit.model import StepNoise, noise_of
from latfit.stats import FloatArray

FAR = 2**20
"""Where the slope of T at large batches is read."""


@dataclass(frozen=True)
class ServiceTimes:
    """How long batches take: typical times with noise, and a fixed time on top.

    Parameters
    ----------
    at
        Typical T in ms (n,) of batches (n,), called with whole numbers >= 1.
    max_batch
        Largest batch; None for no limit.
    noise
        Of single services; None where each takes T(b).
    fixed_ms
        Added to every service, without noise, such as a transfer.
    """

    at: Callable[[FloatArray], FloatArray]
    max_batch: int | None = None
    noise: StepNoise | None = None
    fixed_ms: float = 0.0

    def __call__(self, b: int) -> float:
        """Mean time of a batch of b in ms."""
        return float(self._means(np.array([float(b)]))[0])

    def _means(self, b: FloatArray) -> FloatArray:
        T = np.asarray(self.at(b), dtype=np.float64)
        return self.fixed_ms + (T if self.noise is None else self.noise.mean_ms(T, b))

    def table(self, low: int, high: int, step: int = 1) -> FloatArray:
        """Mean times of low, low + step, ..., up to `high`. Raises WrongUsage for a time that is not above zero."""
        b = np.arange(float(low), high + 1, step)
        T = self._means(b)
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

    def cv(self, largest: int) -> FloatArray:
        """Coefficient of variation of a service, for b = 1, ..., largest."""
        if self.noise is None:
            return np.zeros(largest)
        b = np.arange(1.0, largest + 1)
        T = np.asarray(self.at(b), dtype=np.float64)
        step = self.noise.mean_ms(T, b)
        return np.asarray(self.noise.cv(T, b) * step / (step + self.fixed_ms))

    def steady(self) -> "ServiceTimes":
        """The same mean times without noise."""
        return ServiceTimes(self._means, self.max_batch)

    def alone(self) -> "ServiceTimes":
        """One request at a time, exponential where its noise is not known."""
        return replace(self, max_batch=1, noise=self.noise or exponential_noise())

    def best_batch(self) -> int:
        """The batch with the highest rate b/T(b), the cap to choose where a larger batch is slower per request."""
        if self.max_batch is None:
            raise WrongUsage("no largest batch", where="max_batch", remedy="Give a max_batch.")
        return int(np.argmax(np.arange(1, self.max_batch + 1) / self.table(1, self.max_batch))) + 1


def linear_times(tau_ms: float, alpha_ms: float, max_batch: int | None = None) -> ServiceTimes:
    """T(b) = tau + alpha b."""
    return _checked(ServiceTimes(lambda b: tau_ms + alpha_ms * b, max_batch))


def measured_times(times_ms: FloatArray, noise: StepNoise | None = None, fixed_ms: float = 0.0) -> ServiceTimes:
    """Typical T of batches 1, 2, ..., len(times_ms), the largest batch there is."""
    times = np.array(times_ms, dtype=np.float64)
    return _checked(ServiceTimes(lambda b: times[np.asarray(b, dtype=np.int64) - 1], len(times), noise, fixed_ms))


@cache
def exponential_noise(points: int = 20_000) -> StepNoise:
    """An exponential distribution of mean 1 as points, for a service that nobody measured."""
    values = -np.log1p(-(np.arange(points) + 0.5) / points)
    return noise_of(values / values.mean(), np.ones(points))


def _checked(times: ServiceTimes) -> ServiceTimes:
    if times.max_batch is not None and times.max_batch < 1:
        raise WrongUsage(
            f"largest batch is {times.max_batch}", where="max_batch", remedy="Give a largest batch of 1 or more."
        )
    times.table(1, min(times.max_batch or 64, 65_536))
    return times
