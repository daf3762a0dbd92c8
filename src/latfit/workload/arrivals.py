"""Arrival processes: `times_ms` draws sorted arrival times in ms, at a mean `rate` per ms.

A process that ends draws fewer times. `at_rate` returns the same pattern at another mean rate.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.random import Generator

from latfit.errors import WrongUsage
from latfit.stats import FloatArray
from latfit.units import parse_duration_ms

MAX_RATE = 1e100  # bounds rates per ms and times in ms, and their inverses


@dataclass(frozen=True)
class Gamma:
    """Gaps of mean 1/rate ms and coefficient of variation `cv`."""

    rate: float
    cv: float

    def __post_init__(self) -> None:
        _positive(self.rate, "rate")
        _positive(self.cv, "cv")

    def times_ms(self, count: int, rng: Generator) -> FloatArray:
        gaps = rng.standard_gamma(1 / self.cv**2, count)
        gaps *= self.cv**2 / self.rate
        return np.cumsum(gaps, out=gaps)

    def at_rate(self, rate: float) -> Self:
        return replace(self, rate=rate)


@dataclass(frozen=True)
class Poisson(Gamma):
    cv: float = 1.0


@dataclass(frozen=True)
class Piecewise:
    """Poisson arrivals whose rate per ms is linear between (moments_ms[i], rates[i]); moments rise from 0.

    With `repeats` the rate starts over at the end, else arrivals end.
    """

    moments_ms: Sequence[float]
    rates: Sequence[float]
    repeats: bool = False

    def __post_init__(self) -> None:
        t, load = self._curve()
        if t.ndim != 1 or t.shape != load.shape or len(t) < 2 or t[0] != 0 or not np.all(np.diff(t) > 0):
            raise WrongUsage("moments must start at 0 and rise, with one rate each", where="load", remedy="Sort them.")
        is_bounded = 1 / MAX_RATE < load.max() < MAX_RATE and 1 / MAX_RATE < t[-1] < MAX_RATE
        if not (is_bounded and np.all(load >= 0) and self.rate > 0):
            found = "rates must not be negative, nor all zero, and rates and times not endless"
            raise WrongUsage(found, where="load", remedy="Give rates per ms.")

    def _curve(self) -> tuple[FloatArray, FloatArray]:
        return np.asarray(self.moments_ms, dtype=float), np.asarray(self.rates, dtype=float)

    @property
    def rate(self) -> float:
        t, load = self._curve()
        return float(np.diff(t) @ (load[1:] + load[:-1])) / 2 / float(t[-1])

    def times_ms(self, count: int, rng: Generator) -> FloatArray:
        t, load = self._curve()
        top = float(load.max())
        load = load / top  # squares of it stay within range
        done = np.concatenate([[0.0], np.cumsum(np.diff(t) * (load[1:] + load[:-1]) / 2)])
        work = np.cumsum(rng.standard_exponential(count)) / top
        turns = np.floor(work / done[-1]) if self.repeats else np.zeros(count)
        if not self.repeats:
            work = work[: np.searchsorted(work, done[-1])]
            turns = turns[: len(work)]
        left = np.clip(work - turns * done[-1], 0.0, np.nextafter(done[-1], 0.0))
        piece = np.searchsorted(done, left, side="right") - 1
        more, low = left - done[piece], load[piece]
        rise = np.diff(load)[piece] / np.diff(t)[piece]
        # low s + rise s^2 / 2 = more, solved without a difference of what is nearly equal
        half = low + np.sqrt(np.maximum(low**2 + 2 * rise * more, 0.0))
        within = np.divide(2 * more, half, out=np.zeros_like(more), where=half > 0)
        return np.asarray(turns * t[-1] + np.minimum(t[piece] + within, t[piece + 1]))

    def at_rate(self, rate: float) -> "Piecewise":
        factor = _positive(rate, "rate") / self.rate
        return replace(self, rates=[factor * value for value in self.rates])


@dataclass(frozen=True)
class Modulated:
    """Markov-modulated Poisson arrivals: rates[i] per ms for an exponential time of mean sojourns_ms[i], in order."""

    rates: Sequence[float]
    sojourns_ms: Sequence[float]

    @property
    def rate(self) -> float:
        return float(np.dot(self.rates, self.sojourns_ms) / np.sum(self.sojourns_ms))

    def times_ms(self, count: int, rng: Generator) -> FloatArray:
        levels, sojourns = len(self.rates), np.asarray(self.sojourns_ms, dtype=float)
        # Exponential sojourns have no memory: a random moment is a level drawn by the time it takes.
        first = int(rng.choice(levels, p=sojourns / sojourns.sum()))
        work = np.cumsum(rng.standard_exponential(count))
        moments, done = [np.zeros(1)], [np.zeros(1)]
        while done[-1][-1] < work[-1]:
            rounds = math.ceil(1.1 * (work[-1] - done[-1][-1]) / (self.rate * sojourns.sum())) + 8
            order = (first + np.arange(rounds * levels)) % levels
            lasts = rng.standard_exponential(len(order)) * sojourns[order]
            moments.append(moments[-1][-1] + np.cumsum(lasts))
            done.append(done[-1][-1] + np.cumsum(lasts * np.asarray(self.rates, dtype=float)[order]))
        return np.interp(work, np.concatenate(done), np.concatenate(moments))

    def at_rate(self, rate: float) -> "Modulated":
        """Return bursts of the same length, with more or fewer arrivals in each."""
        factor = _positive(rate, "rate") / self.rate
        return replace(self, rates=[factor * value for value in self.rates])


@dataclass(frozen=True)
class Dealt:
    """Arrivals that `kept` of `dealt` servers receive of a process, round robin (`in_turn`) or at random."""

    whole: "ArrivalProcess"
    kept: int
    dealt: int
    in_turn: bool = True

    @property
    def rate(self) -> float:
        return self.whole.rate * self.kept / self.dealt

    def times_ms(self, count: int, rng: Generator) -> FloatArray:
        if isinstance(self.whole, Poisson) and not self.in_turn:
            return Poisson(self.rate).times_ms(count, rng)
        if isinstance(self.whole, Gamma) and self.in_turn:
            cv2 = self.whole.cv**2
            gaps = np.ones(count)
            gaps[self.kept :: self.kept] = self.dealt - self.kept + 1
            return np.cumsum(rng.standard_gamma(gaps / cv2) * (cv2 / self.whole.rate))
        # By chance a few more are drawn, so that there are nearly always enough.
        spare = 0 if self.in_turn else 5 * math.sqrt(count)
        drawn = self.whole.times_ms(math.ceil((count + spare) * self.dealt / self.kept), rng)
        places = np.arange(len(drawn)) % self.dealt if self.in_turn else rng.integers(0, self.dealt, len(drawn))
        return np.ascontiguousarray(drawn[places < self.kept][:count])

    def at_rate(self, rate: float) -> "Dealt":
        return replace(self, whole=self.whole.at_rate(rate * self.dealt / self.kept))


ArrivalProcess = Gamma | Piecewise | Modulated | Dealt


def bursts(rate: float, times: float, share: float, length_ms: float) -> Modulated:
    """Return arrivals with bursts at `times` the mean rate, `share` of the time, of mean length `length_ms`."""
    if not (times > 1 and 0 < share < 1 and times * share <= 1 and length_ms > 0):
        remedy = "Give times above 1, and times x share of 1 at the most."
        raise WrongUsage(f"bursts of {times:g} times the rate for {share:g} of the time", where="bursts", remedy=remedy)
    calm = _positive(rate, "rate") * (1 - times * share) / (1 - share)
    return Modulated([calm, rate * times], [length_ms * (1 - share) / share, length_ms])


def parse_arrival_process(text: str, rate: float) -> ArrivalProcess:
    """Parse `poisson`, `gamma:CV` or `bursts:TIMES:SHARE:LENGTH`, with a mean rate per ms. Raises WrongUsage."""
    with suppress(WrongUsage, ValueError):
        match text.split(":"):
            case ["poisson"]:
                return Poisson(rate)
            case ["gamma", cv]:
                return Gamma(rate, float(cv))
            case ["bursts", times, share, length]:
                return bursts(rate, float(times), float(share), parse_duration_ms(length))
    remedy = "Write poisson, gamma:2 or bursts:4:0.1:1s, with numbers above zero, and 4 x 0.1 of 1 at the most."
    raise WrongUsage(f"{text!r} is not an arrival process", where="--arrival-process", remedy=remedy)


def _positive(value: float, name: str) -> float:
    if not math.isfinite(value) or value <= 0:
        raise WrongUsage(f"{name} is {value:g}, not above zero", where=name, remedy=f"Give a {name} above zero.")
    return float(value)
