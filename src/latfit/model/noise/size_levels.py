"""Level of the measured steps of each size over the fitted curve: a curve misses the steps of a size every time.

Levels are shrunk towards the curve by empirical Bayes (Efron & Morris 1973).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latfit.stats import FloatArray, by_group, distinct, mad_sigma, weighted_quantiles

SIZES_PER_OCTAVE = 8  # sizes closer than this count as one
CLIP_SIGMA = 3.0  # of log ratios about the median of their size: pauses do not move a level
LEAST_VARIANCE = 1e-12  # between sizes; less does not matter
MAX_RATIO = 1e60  # of observed over typical time, and one over the least; its square is still a number


@dataclass(frozen=True, eq=False)
class SizeLevels:
    """sizes (m,) of steps in tokens, rising; log_level (m,) over the curve there, and its standard error (m,)."""

    sizes: FloatArray
    log_level: FloatArray
    error: FloatArray

    def __post_init__(self) -> None:
        usable = (np.diff(self.sizes, prepend=0.0) > 0) & (self.error >= 0)
        if not np.all(usable & (np.abs(self.log_level) + self.error < np.log(MAX_RATIO))):
            raise ValueError("levels of ratios are not rising sizes with a level and an error each")

    def factors(self, S: FloatArray) -> FloatArray:
        """Return level over curve at S tokens: linear in ln S, constant beyond the measured sizes."""
        return np.asarray(np.exp(np.interp(np.log(S), np.log(self.sizes), self.log_level)))

    def drawn_factors(self, S: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Return factors (n,) of levels that the steps allow; between two sizes a level steps at an unknown place."""
        level = self.log_level + self.error * rng.standard_normal(len(self.sizes))
        place = np.interp(np.log(S), np.log(self.sizes), np.arange(len(self.sizes)))
        return np.asarray(np.exp(level[np.floor(place + rng.random() * (1 - 1e-9)).astype(np.intp)]))


NO_LEVELS = SizeLevels(np.ones(1), np.zeros(1), np.zeros(1))


def by_size(sizes: FloatArray) -> NDArray[np.intp]:
    """Return the number (n,) of each size in rising order, without gaps."""
    return distinct(np.round(SIZES_PER_OCTAVE * np.log2(sizes)))[1]


def size_levels(S: FloatArray, ratio: FloatArray, weights: FloatArray, steps_for_one: float = 1.0) -> SizeLevels:
    """Estimate the levels of steps of S tokens (n,) with ratios to the curve (n,).

    weights: steps (n,) of each row, of which steps_for_one are worth an independent one.
    """
    number = by_size(S)
    count = np.bincount(number, weights=weights)
    order = np.argsort(number, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(number))[:-1])
    logs = np.log(ratio)
    middle = np.array([weighted_quantiles(logs[rows], (0.5,), weights[rows])[0] for rows in parts])
    off = logs - middle[number]
    reach = CLIP_SIGMA * mad_sigma(off, weights)
    found = by_group(np.clip(off, -reach, reach), number, weights)
    if len(count) < 2 or found.freedom < len(count):
        return NO_LEVELS
    error = np.sqrt(found.within * steps_for_one / count)
    level = middle + found.mean
    # F takes up what all sizes share.
    level -= np.average(level, weights=count)
    between = max(float(np.average(level**2 - error**2, weights=count)), LEAST_VARIANCE)
    trust = between / (between + error**2)
    return SizeLevels(np.bincount(number, weights=weights * S) / count, trust * level, np.sqrt(trust) * error)
