"""Distributions of request lengths (prompt tokens, output tokens): given, or resampled from recorded requests."""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.random import Generator

from latfit.errors import WrongUsage
from latfit.stats import IntArray

MAX_LOG_TOKENS = 42.0  # keeps exp within 64-bit integers


class LengthDistribution(Protocol):
    def lengths(self, count: int, rng: Generator) -> tuple[IntArray, IntArray]:
        """Return prompt and output tokens, each (count,), 1 or more."""
        ...


@dataclass(frozen=True)
class Constant:
    prompt_tokens: int = 1
    output_tokens: int = 1

    def __post_init__(self) -> None:
        if min(self.prompt_tokens, self.output_tokens) < 1:
            raise WrongUsage("a request has one or more tokens", where="lengths", remedy="Give 1 or more of both.")

    def lengths(self, count: int, rng: Generator) -> tuple[IntArray, IntArray]:
        return np.full(count, self.prompt_tokens), np.full(count, self.output_tokens)


@dataclass(frozen=True)
class Lognormal:
    """Rounded exponentials of independent normal variables; mean, sd: of the logarithms of (prompt, output)."""

    mean: tuple[float, float]
    sd: tuple[float, float]

    def lengths(self, count: int, rng: Generator) -> tuple[IntArray, IntArray]:
        z = rng.standard_normal((2, count))
        prompt, output = (
            np.clip(np.rint(np.exp(np.minimum(m + s * row, MAX_LOG_TOKENS))), 1, 2**31).astype(np.int64)
            for m, s, row in zip(self.mean, self.sd, z, strict=True)
        )
        return prompt, output


@dataclass(frozen=True, eq=False)
class Resampled:
    """Recorded pairs (n,), drawn with replacement: prompt and output of a request stay correlated."""

    prompt_tokens: IntArray
    output_tokens: IntArray

    def lengths(self, count: int, rng: Generator) -> tuple[IntArray, IntArray]:
        rows = rng.integers(0, len(self.prompt_tokens), count)
        return self.prompt_tokens[rows], self.output_tokens[rows]


def parse_lengths(text: str) -> LengthDistribution:
    """Parse `512:128` for all requests, or `512:128:0.8` (lognormal, sd 0.8 of the mean). Raises WrongUsage."""
    prompt, output, *more = text.split(":") if text.count(":") in (1, 2) else ("", "")
    try:
        counts, variation = (int(prompt), int(output)), float(more[0]) if more else 0.0
    except ValueError:
        counts, variation = (0, 0), math.nan
    if min(counts) < 1 or not 0 <= variation < math.inf or (more and not variation):
        remedy = "Write 512:128, or 512:128:0.8."
        raise WrongUsage(f"{text!r} is not a pair of lengths", where="--lengths", remedy=remedy)
    if not variation:
        return Constant(*counts)
    # Of a lognormal variable, mean = exp(m + s^2/2) and (sd/mean)^2 = exp(s^2) - 1.
    s = math.sqrt(math.log1p(variation**2))
    m = [math.log(count) - s**2 / 2 for count in counts]
    return Lognormal((m[0], m[1]), (s, s))
