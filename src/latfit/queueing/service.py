"""How long a batch takes: T(b) in ms for b = 1, 2, ... up to the largest batch; it may fall at small b."""

from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from latfit.errors import refuse
from latfit.model import StepNoise, noise_of
from latfit.stats import FloatArray

EXPONENTIAL_POINTS = 20_000


@dataclass(frozen=True, eq=False)
class ServiceTimes:
    """Typical times in ms (n,) of batches of 1 to n. noise: None where each takes that. fixed_ms: added to it."""

    typical_ms: FloatArray
    noise: StepNoise | None = None
    fixed_ms: float = 0.0

    def __post_init__(self) -> None:
        refuse(not len(self.typical_ms), "largest batch is 0", "max_batch", "Give a largest batch of 1 or more.")
        found = f"T(b) is not a finite time above zero for every batch from 1 to {self.max_batch}"
        remedy = "Give T in ms for each batch, or limit the batch to where it is known."
        refuse(not np.all(np.isfinite(self.mean_ms) & (self.mean_ms > 0)), found, "service times", remedy)

    @property
    def max_batch(self) -> int:
        return len(self.typical_ms)

    @cached_property
    def mean_ms(self) -> FloatArray:
        return self.fixed_ms + self._step_ms

    @cached_property
    def cv(self) -> FloatArray:
        """Coefficient of variation (n,) of a service."""
        if self.noise is None:
            return np.zeros(self.max_batch)
        return np.asarray(self.noise.cv(self.typical_ms, self._batches) * self._step_ms / self.mean_ms)

    @property
    def _batches(self) -> FloatArray:
        return np.arange(1.0, self.max_batch + 1)

    @cached_property
    def _step_ms(self) -> FloatArray:
        return self.typical_ms if self.noise is None else self.noise.mean_ms(self.typical_ms, self._batches)

    def rate_limit(self) -> float:
        """Return the arrivals per ms below which a greedy server is stable (Foster's drift)."""
        return self.max_batch / float(self.mean_ms[-1])

    def up_to(self, largest: int) -> "ServiceTimes":
        return replace(self, typical_ms=self.typical_ms[:largest])

    def alone(self) -> "ServiceTimes":
        """Return the service of one request at a time, exponential where its noise is not known."""
        return replace(self.up_to(1), noise=self.noise or exponential_noise())

    def up_to_best(self) -> "ServiceTimes":
        """Return the times up to the batch with the highest rate."""
        return self.up_to(int(np.argmax(self._batches / self.mean_ms)) + 1)


def linear_times(tau_ms: float, alpha_ms: float, max_batch: int) -> ServiceTimes:
    """Return T(b) = tau + alpha b."""
    return ServiceTimes(tau_ms + alpha_ms * np.arange(1.0, max_batch + 1))


@cache
def exponential_noise() -> StepNoise:
    """Return an exponential distribution of mean 1 as points."""
    values = -np.log1p(-(np.arange(EXPONENTIAL_POINTS) + 0.5) / EXPONENTIAL_POINTS)
    return noise_of(values / values.mean(), np.ones(EXPONENTIAL_POINTS))
