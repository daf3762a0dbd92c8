"""Streams of arrivals at any rate: Poisson, or the gaps of a recording. Time in ms."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from latfit.stats import FloatArray

SEED = 20_240_601
GROWING_DISPERSION = 4.0  # growth over the last eightfold time span; the variance of 20 sums leaves a third of it open
PIECES = 40  # of a recording, for the bootstrap
MIN_SUMS = 20  # sums of gaps that a variance is computed from


@dataclass(frozen=True, eq=False)
class Arrivals:
    """A stationary stream. gaps: (n,) of a recording, which repeats, with mean 1; None for a Poisson stream."""

    gaps: FloatArray | None = None
    label: str = "Poisson arrivals"  # for messages

    @property
    def poisson(self) -> bool:
        return self.gaps is None

    @cached_property
    def dispersion(self) -> float:
        """Index of dispersion of counts, the largest over time spans up to a twentieth of the recording."""
        return 1.0 if self.gaps is None else max((value for _, value in dispersions(self.gaps)), default=1.0)

    @property
    def grows(self) -> bool:
        values = [] if self.gaps is None else [value for _, value in dispersions(self.gaps)]
        return len(values) > 4 and values[-1] > GROWING_DISPERSION * values[-4]

    def split(self, replicas: int) -> "Arrivals":
        if self.gaps is None or replicas == 1:
            return self
        rng = np.random.default_rng(SEED)
        ends = np.cumsum(np.tile(self.gaps, replicas))[rng.random(replicas * len(self.gaps)) < 1 / replicas]
        return self._of(np.diff(ends, prepend=0.0))

    def drawn(self, rng: np.random.Generator) -> "Arrivals":
        if self.gaps is None:
            return self
        n = len(self.gaps)
        length = -(-n // PIECES)
        places = rng.integers(0, n, PIECES)
        return self._of(self.gaps[(places[:, None] + np.arange(length)).ravel()[:n] % n])

    def _of(self, gaps: FloatArray) -> "Arrivals":
        return replace(self, gaps=gaps / gaps.mean())


def dispersions(gaps: FloatArray) -> list[tuple[int, float]]:
    """Return (m, variance of a sum of m gaps / (m mean²)) for m = 1, 2, 4, ...; 1 for a Poisson stream."""
    found, m, square = [], 1, float(gaps.mean()) ** 2
    while len(gaps) // m >= MIN_SUMS:
        sums = gaps[: len(gaps) // m * m].reshape(-1, m).sum(axis=1)
        found.append((m, float(np.var(sums, ddof=1)) / (m * square)))
        m *= 2
    return found


POISSON = Arrivals()
