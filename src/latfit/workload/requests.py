"""Requests as columns: arrival, lengths, class, user, deadline, SLOs, prefix blocks; and distributions of lengths."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from latfit.errors import BadInput, WrongUsage
from latfit.stats import FloatArray, IntArray

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


SmallIntArray = NDArray[np.int32]

MAX_TOKENS = 2**31 - 1  # of a request, as of a step


@dataclass(frozen=True, eq=False)
class PrefixBlocks:
    """Contents of prompts in blocks of `tokens` tokens: ids[starts[r]:starts[r + 1]] are those of request r in order.

    Equal ids mean equal contents, of the block and of all before it.
    """

    tokens: int
    starts: IntArray
    ids: IntArray

    def select(self, rows: NDArray[Any] | slice) -> "PrefixBlocks":
        kept = np.arange(len(self.starts) - 1)[rows]
        counts = np.diff(self.starts)[kept]
        starts = np.concatenate([[0], np.cumsum(counts)])
        places = np.arange(starts[-1]) + np.repeat(self.starts[kept] - starts[:-1], counts)
        return PrefixBlocks(self.tokens, starts, self.ids[places])

    def apart(self, kinds: IntArray) -> "PrefixBlocks":
        """Return the blocks with distinct contents for each kind of request (n,)."""
        other = int(self.ids.max(initial=0)) + 1
        return replace(self, ids=self.ids + np.repeat(kinds, np.diff(self.starts)) * other)

    def repeated(self, times: int) -> "PrefixBlocks":
        count = len(self.starts) - 1
        return self.select(np.tile(np.arange(count), times)).apart(np.repeat(np.arange(times), count))


@dataclass(frozen=True, eq=False, repr=False)
class Requests:
    """Contiguous columns (n,) in order of arrival, made and checked by `make_requests`.

    deadline_ms (from arrival), ttft_slo_ms and tpot_slo_ms are infinite for none; class 0 is the most urgent.
    """

    arrival_ms: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    class_id: SmallIntArray
    user_id: SmallIntArray
    deadline_ms: FloatArray
    ttft_slo_ms: FloatArray
    tpot_slo_ms: FloatArray
    prefix: PrefixBlocks | None = None

    def __len__(self) -> int:
        return len(self.arrival_ms)

    def __repr__(self) -> str:
        prompt, output = float(self.prompt_tokens.mean()), float(self.output_tokens.mean())
        return f"Requests({len(self):,} at {1e3 * self.rate:.4g} req/s, mean {prompt:.4g} + {output:.4g} tokens)"

    @property
    def rate(self) -> float:
        span = float(self.arrival_ms[-1] - self.arrival_ms[0]) if len(self) > 1 else 0.0
        return (len(self) - 1) / span if span > 0 else math.nan

    def select(self, rows: NDArray[Any] | slice) -> "Requests":
        columns: dict[str, Any] = {name: np.ascontiguousarray(vars(self)[name][rows]) for name in COLUMNS}
        return Requests(**columns, prefix=None if self.prefix is None else self.prefix.select(rows))

    def busiest(self, span_ms: float) -> "Requests":
        """Return the most requests that arrive within a span; the first of them arrives at 0."""
        ends = np.searchsorted(self.arrival_ms, self.arrival_ms + span_ms, side="right")
        first = int(np.argmax(ends - np.arange(len(self))))
        found = self.select(slice(first, int(ends[first])))
        return replace(found, arrival_ms=found.arrival_ms - found.arrival_ms[0])

    def at_rate(self, rate: float) -> "Requests":
        """Return the same requests at another mean rate per ms."""
        if not self.rate > 0:
            raise BadInput(
                "the requests have no rate: they all arrive at once", remedy="Give two or more, at different times."
            )
        _check_factor(rate)
        start = self.arrival_ms[:1]
        return replace(self, arrival_ms=start + (self.arrival_ms - start) / (rate / self.rate))

    def repeated(self, times: float, rng: np.random.Generator) -> "Requests":
        """Return `times` as many requests over the same time, copies from other users and with other contents."""
        _check_factor(times)
        copies = math.floor(times) + (rng.random(len(self)) < times - math.floor(times))
        rows = np.repeat(np.arange(len(self)), copies)
        again = np.arange(len(rows)) - np.repeat(np.cumsum(copies) - copies, copies)
        until_next = np.diff(self.arrival_ms, append=self.arrival_ms[-1:])
        arrival_ms = self.arrival_ms[rows] + np.where(again > 0, rng.random(len(rows)), 0.0) * until_next[rows]
        order = np.argsort(arrival_ms, kind="stable")
        found, again = self.select(rows[order]), again[order]
        users = found.user_id + again.astype(np.int32) * (int(self.user_id.max(initial=0)) + 1)
        prefix = None if found.prefix is None else found.prefix.apart(again)
        return replace(found, arrival_ms=np.ascontiguousarray(arrival_ms[order]), user_id=users, prefix=prefix)


COLUMNS = tuple(field.name for field in fields(Requests) if field.name != "prefix")


KINDS: Mapping[str, Any] = {
    **dict.fromkeys(("prompt_tokens", "output_tokens"), np.int64),
    **dict.fromkeys(("class_id", "user_id"), np.int32),
    "deadline_ms": np.float64,
}


def make_requests(
    arrival_ms: FloatArray | Sequence[float],
    prompt_tokens: Any = 1,
    output_tokens: Any = 1,
    *,
    class_id: Any = 0,
    user_id: Any = 0,
    deadline_ms: Any = math.inf,
) -> Requests:
    """Return checked requests; each column but the first may be one number for all. Raises BadInput."""
    arrivals = np.ascontiguousarray(arrival_ms, dtype=np.float64)
    n = len(arrivals)
    given = (prompt_tokens, output_tokens, class_id, user_id, deadline_ms)
    columns: dict[str, Any] = {name: _column(each, n, name) for name, each in zip(KINDS, given, strict=True)}
    columns |= {name: np.full(n, math.inf) for name in ("ttft_slo_ms", "tpot_slo_ms")}
    if n == 0:
        raise BadInput("there is no request", remedy="Give at least one.")
    prompt, output = columns["prompt_tokens"], columns["output_tokens"]
    checks = [
        (~np.isfinite(arrivals), "has no arrival time", "Correct or drop it."),
        (np.diff(arrivals, prepend=arrivals[:1]) < 0, "arrives before the one above it", "Sort them by arrival."),
        ((prompt < 1) | (prompt > MAX_TOKENS), f"needs prompt_tokens from 1 to {MAX_TOKENS:,}", "Drop it."),
        ((output < 1) | (output > MAX_TOKENS), f"needs output_tokens from 1 to {MAX_TOKENS:,}", "Drop it."),
        (columns["class_id"] < 0, "has a class below zero", "Number classes 0, 1, ..., the most urgent first."),
        (~(columns["deadline_ms"] > 0), "has no deadline above zero", "Give ms after the arrival, or inf."),
    ]
    for wrong, found, remedy in checks:
        if wrong.any():
            raise BadInput(f"request {int(np.argmax(wrong)) + 1} {found}", remedy=remedy)
    return Requests(arrivals, **columns)


def _column(values: Any, n: int, name: str) -> NDArray[Any]:
    column, kind = np.asarray(values), KINDS[name]
    if column.ndim == 0:
        return np.full(n, column, dtype=kind)
    if len(column) != n:
        raise BadInput(f"{name} has {len(column)} rows, arrivals have {n}", remedy="Give one of each per request.")
    is_number = column.dtype.kind in "iuf"
    if is_number and kind != np.float64 and (broken := np.flatnonzero(~(np.abs(column) < np.iinfo(kind).max))).size:
        found = f"request {broken[0] + 1} has {column[broken[0]]:.3g} as {name}"
        raise BadInput(found, remedy="Give a whole number, or drop it.")
    return np.ascontiguousarray(column, dtype=kind)


def _check_factor(factor: float) -> None:
    if not math.isfinite(factor) or factor <= 0:
        raise WrongUsage(f"a rate cannot be scaled by {factor:g}", where="rate", remedy="Give a factor above zero.")
