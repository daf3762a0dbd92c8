"""How long requests are: distributions of (prompt tokens, output tokens), given or fitted from recorded requests.

Prompt and output of a request are correlated: long prompts may come with short answers. Resampling keeps the pairs; the
lognormal distribution keeps the correlation of their logarithms; the empirical one takes the two as independent.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.random import Generator

from latfit.errors import WrongUsage
from latfit.stats import FloatArray, IntArray
from latfit.workload.requests import Requests

QUANTILES = 1001
"""Points that the empirical distribution keeps of each column."""


class LengthDistribution(Protocol):
    """Draws lengths."""

    def lengths(self, count: int, rng: Generator) -> tuple[IntArray, IntArray]:
        """(prompt tokens, output tokens), each (count,), 1 or more."""
        ...


@dataclass(frozen=True)
class Constant:
    """The same lengths for all."""

    prompt_tokens: int = 1
    output_tokens: int = 1

    def __post_init__(self) -> None:
        if min(self.prompt_tokens, self.output_tokens) < 1:
            raise WrongUsage("a request has one or more tokens", where="lengths", remedy="Give 1 or more of both.")

    def lengths(self, count: int, rng: Generator) -> tuple[IntArray, IntArray]:
        return np.full(count, self.prompt_tokens), np.full(count, self.output_tokens)


@dataclass(frozen=True)
class Lognormal:
    """exp of a normal pair, rounded; lengths above the largest recorded one are cut to it.

    mean, sd: of the logarithms of (prompt, output).  correlation: between them.  most: largest lengths.
    """

    mean: tuple[float, float]
    sd: tuple[float, float]
    correlation: float = 0.0
    most: tuple[int, int] = (2**31, 2**31)

    def lengths(self, count: int, rng: Generator) -> tuple[IntArray, IntArray]:
        z = rng.standard_normal((2, count))
        z[1] = self.correlation * z[0] + math.sqrt(1 - self.correlation**2) * z[1]
        drawn = [
            np.clip(np.rint(np.exp(np.minimum(m + s * row, 42.0))), 1, top).astype(np.int64)
            for m, s, row, top in zip(self.mean, self.sd, z, self.most, strict=True)
        ]
        return drawn[0], drawn[1]


@dataclass(frozen=True, eq=False)
class Empirical:
    """Prompt and output drawn apart from their recorded quantiles (k,), interpolated linearly."""

    prompt_quantiles: FloatArray
    output_quantiles: FloatArray

    def lengths(self, count: int, rng: Generator) -> tuple[IntArray, IntArray]:
        u = rng.random((2, count))
        prompt, output = (
            np.rint(np.interp(row, np.linspace(0, 1, len(table)), table)).astype(np.int64)
            for row, table in zip(u, (self.prompt_quantiles, self.output_quantiles), strict=True)
        )
        return np.maximum(prompt, 1), np.maximum(output, 1)


@dataclass(frozen=True, eq=False)
class Resampled:
    """Recorded pairs (n,), drawn with replacement."""

    prompt_tokens: IntArray
    output_tokens: IntArray

    def lengths(self, count: int, rng: Generator) -> tuple[IntArray, IntArray]:
        rows = rng.integers(0, len(self.prompt_tokens), count)
        return self.prompt_tokens[rows], self.output_tokens[rows]


def fit_lengths(requests: Requests, kind: str = "resampled") -> LengthDistribution:
    """The distribution called `lognormal`, `empirical` or `resampled`, from recorded requests."""
    prompt, output = requests.prompt_tokens, requests.output_tokens
    if kind == "resampled":
        return Resampled(prompt, output)
    if kind == "empirical":
        grid = np.linspace(0, 1, QUANTILES)
        return Empirical(np.quantile(prompt, grid), np.quantile(output, grid))
    if kind == "lognormal":
        logs = np.log(np.stack([prompt, output]).astype(np.float64))
        spread = logs.std(axis=1)
        known = len(requests) > 1 and bool(np.all(spread > 0))
        correlation = float(np.corrcoef(logs)[0, 1]) if known else 0.0
        mean, sd = logs.mean(axis=1).tolist(), spread.tolist()
        return Lognormal((mean[0], mean[1]), (sd[0], sd[1]), correlation, (int(prompt.max()), int(output.max())))
    raise WrongUsage(
        f"{kind!r} is not a length distribution", where="lengths", remedy="Take lognormal, empirical or resampled."
    )
