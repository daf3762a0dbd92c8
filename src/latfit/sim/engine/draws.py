"""Random numbers of the engine's core as a function of what they are for, so that no order of events changes them."""

import numpy as np
from numpy.typing import NDArray

from latfit.sim.engine.state import njit, rare


@njit
def uniform(seed: int, request: int, token: int, place: int) -> float:
    """A number in [0, 1) for one place of one draft (splitmix64's mixing of the three in turn)."""
    x = np.uint64(seed)
    for part in (request, token, place):
        x = _mixed(x + np.uint64(part) + np.uint64(0x9E3779B97F4A7C15))
    return float((x >> np.uint64(11)) * (1.0 / 9007199254740992.0))


@njit
def sequence(stream: NDArray[np.uint64]) -> float:
    """The next number in [0, 1) of a stream (1,) (splitmix64)."""
    stream[0] += np.uint64(0x9E3779B97F4A7C15)
    return float((_mixed(stream[0]) >> np.uint64(11)) * (1.0 / 9007199254740992.0))


@njit
def _mixed(x: np.uint64) -> np.uint64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@rare
def accepted(seed: int, request: int, token: int, drafted: int, rate: float) -> int:
    """Draft tokens that the model accepts in a row, each with probability `rate`."""
    for place in range(drafted):
        if uniform(seed, request, token, place) >= rate:
            return place
    return drafted
