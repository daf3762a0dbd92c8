"""How long a batch takes: T(b) in ms for b = 1, 2, ... up to the largest batch; it may fall at small b."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from latfit.errors import refuse
from latfit.model import StepNoise, noise_of
from latfit.stats import FloatArray

EXPONENTIAL_POINTS = 20_000


@dataclass(frozen=True)
class ServiceTimes:
    """How long batches take. at: typical T in ms (n,). noise: None where each takes T(b). fixed_ms: added to it."""

    at: Callable[[FloatArray], FloatArray]
    max_batch: int
    noise: StepNoise | None = None
    fixed_ms: float = 0.0

    def __call__(self, b: int) -> float:
        return float(self._means(np.array([float(b)]))[0])

    def _means(self, b: FloatArray) -> FloatArray:
        T = np.asarray(self.at(b), dtype=np.float64)
        return self.fixed_ms + (T if self.noise is None else self.noise.mean_ms(T, b))

    def table(self, low: int, high: int) -> FloatArray:
        """Return the mean times of low, ..., high. Raises WrongUsage for a time that is not above zero."""
        T = self._means(np.arange(float(low), high + 1))
        found = f"T(b) is not a finite time above zero for every batch from {low} to {high}"
        remedy = "Give T in ms for each batch, or limit the batch to where it is known."
        refuse(len(T) != high - low + 1 or not np.all(np.isfinite(T) & (T > 0)), found, "service times", remedy)
        return T

    def rate_limit(self) -> float:
        """Return the arrivals per ms below which a greedy server is stable (Foster's drift)."""
        return self.max_batch / self(self.max_batch)

    def cv(self, largest: int) -> FloatArray:
        """Return the coefficient of variation of a service, for b = 1, ..., largest."""
        if self.noise is None:
            return np.zeros(largest)
        b = np.arange(1.0, largest + 1)
        T = np.asarray(self.at(b), dtype=np.float64)
        step = self.noise.mean_ms(T, b)
        return np.asarray(self.noise.cv(T, b) * step / (step + self.fixed_ms))

    def alone(self) -> "ServiceTimes":
        """Return the service of one request at a time, exponential where its noise is not known."""
        return replace(self, max_batch=1, noise=self.noise or exponential_noise())

    def best_batch(self) -> int:
        return int(np.argmax(np.arange(1, self.max_batch + 1) / self.table(1, self.max_batch))) + 1


def linear_times(tau_ms: float, alpha_ms: float, max_batch: int) -> ServiceTimes:
    """Return T(b) = tau + alpha b."""
    return measured_times(tau_ms + alpha_ms * np.arange(1.0, max_batch + 1))


def measured_times(times_ms: FloatArray, noise: StepNoise | None = None, fixed_ms: float = 0.0) -> ServiceTimes:
    """Return typical T of batches 1, 2, ..., len(times_ms), the largest batch. Raises WrongUsage."""
    times = np.array(times_ms, dtype=np.float64)
    refuse(not len(times), "largest batch is 0", "max_batch", "Give a largest batch of 1 or more.")
    made = ServiceTimes(lambda b: times[np.asarray(b, dtype=np.int64) - 1], len(times), noise, fixed_ms)
    made.table(1, len(times))
    return made


@cache
def exponential_noise() -> StepNoise:
    """Return an exponential distribution of mean 1 as points."""
    values = -np.log1p(-(np.arange(EXPONENTIAL_POINTS) + 0.5) / EXPONENTIAL_POINTS)
    return noise_of(values / values.mean(), np.ones(EXPONENTIAL_POINTS))
