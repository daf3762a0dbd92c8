"""Find the steps (B, S) that one path finishes within an SLA: docs/theory/planning.md, "Steps within an SLA"."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from latfit.errors import WrongUsage
from latfit.hardware import ExecutionPath, step_columns
from latfit.model import FitResult, step_draws
from latfit.planning.result import BatchRange, TokenRange
from latfit.stats import FloatArray
from latfit.trace import DECODE, PREFILL, UNKNOWN

SCANNED, BETWEEN = 400, 62  # grid points of the scan, and of each search of an end
SURE = 0.975  # of the fit's draws keep S_promised
UNBOUNDED = 1 << 40  # above this the search for an upper end stops and the range counts as unbounded

Curve = Callable[[FloatArray], FloatArray]
"""Integers (n,) -> latency in ms (n,)."""


class Range(NamedTuple):
    """Integers from `low` to `high`, both included; None: the limit is never reached."""

    low: int
    high: int | None


@dataclass(frozen=True)
class Level:
    """Percentile of a phase (None: typical), and the percentile that its factors are extrapolated from, if any.

    factors: upper factors (n,) for 1 to n requests, the last for all larger batches.
    """

    percentile: float | None
    factors: FloatArray
    measured: float | None = None

    def at(self, B: float | FloatArray) -> FloatArray:
        return np.asarray(self.factors[np.minimum(np.asarray(B, dtype=np.intp), len(self.factors)) - 1])


@dataclass(frozen=True)
class StepLevels:
    """Levels of decode steps, of single-prompt prefills, of other steps with prefill. fit: None if nominal."""

    decode: Level
    alone: Level
    prefill: Level
    fit: FitResult | None = None

    def wider(self, B: FloatArray, S: FloatArray) -> FloatArray:
        """Return the factor (n,) for larger errors beyond the measured B and S; 1 where it is unknown."""
        if self.fit is None or self.percentile is None:
            return np.ones(np.shape(S))
        wider = self.fit.widening(B, S)
        return np.where(np.isnan(wider), 1.0, wider)

    @property
    def percentile(self) -> float | None:
        """The lowest percentile of all phases; None if a phase has only its typical step."""
        levels = [each.percentile for each in (self.decode, self.alone, self.prefill) if each.percentile is not None]
        return min(levels) if len(levels) == 3 else None

    @property
    def measured(self) -> float | None:
        """The lowest percentile that a factor is extrapolated from; None if none is."""
        levels = (self.decode.measured, self.alone.measured, self.prefill.measured)
        return min((each for each in levels if each is not None), default=None)

    def of(self, B: float) -> Level:
        return self.alone if B == 1 else self.prefill

    def factors(self, B: FloatArray, S: FloatArray) -> FloatArray:
        """Return the upper factor (n,) of each step; S = B is decode."""
        prefill = np.where(B == 1, self.alone.at(1), self.prefill.at(B))
        return np.asarray(np.where(S == B, self.decode.at(B), prefill))


def level_for(path: ExecutionPath, percentile: float, phase: str) -> Level:
    """Return the upper factors of a phase's steps at a percentile; a phase without limits gets the typical step.

    With too few steps the highest known factor is extrapolated by the tail of all steps, scaled to the phase. Above the
    highest level of all steps ln factor grows as an exponential tail, ln 1/(1 - share). Medians show no spread.
    """
    limits, share = path.fit.limits, percentile / 100
    B = np.arange(1.0, path.fit.largest_batch + 1)
    for level in limits.levels:
        if level >= share - 1e-12 and (factors := limits.factors(phase, level, B)) is not None:
            return Level(percentile, factors)
    known = limits.highest_level(phase, share)
    pooled = {each: math.log(factor) for each, factor in limits.all.upper.items() if factor and each > 0.5}
    if known is None or (highest := limits.factors(phase, known, B)) is None or not pooled:
        return Level(None, np.ones(1))
    reached = min((level for level in pooled if level >= share - 1e-12), default=max(pooled))
    tail = pooled[reached] * max(math.log(1 - share) / math.log(1 - reached), 1.0)
    own = np.log(np.maximum(highest, 1.0))
    scale = np.maximum(own / pooled[known], 1.0) if pooled.get(known, 0.0) > 0 else np.ones(len(B))
    return Level(percentile, np.exp(np.maximum(tail * scale, own)), round(100 * known, 6))


def levels_for(path: ExecutionPath, percentile: float) -> StepLevels:
    """Return the levels of all phases. Raises WrongUsage for a percentile below 1, or of 100 or more."""
    if not 1 <= percentile < 100:
        found, remedy = f"{percentile:g} is not a percentile", "Give one from 1 on, below 100."
        raise WrongUsage(found, where="--percentile", remedy=remedy)
    phases = (DECODE, PREFILL, UNKNOWN) if path.fit.knows_prefill else (DECODE, DECODE, DECODE)
    decode, alone, prefill = (level_for(path, percentile, phase) for phase in phases)
    return StepLevels(decode, alone, prefill, None if path.nominal is not None else path.fit)


def token_ranges(
    path: ExecutionPath, sla_ms: float, levels: StepLevels, context: float | None = None
) -> list[TokenRange]:
    """Return S_min..S_max for B = 1, 2, 4, ... up to the largest measured B, a row for each range."""
    found = []
    for B in _doubling(path, "B"):

        def typical(S: FloatArray, B: int = B) -> FloatArray:
            return path.fit.latency_ms(**step_columns(np.full(len(S), float(B)), S, context))

        def slow(S: FloatArray, B: int = B) -> FloatArray:
            drawn = step_draws(path.fit, step_columns(np.full(len(S), float(B)), S, context))
            return typical(S) if drawn is None else np.asarray(np.quantile(drawn, SURE, axis=0))

        for span in tokens_within(typical, B, sla_ms, levels):
            known = path.fit.draws and span.high is not None
            sure = tokens_within(slow, B, sla_ms, levels, top=span.high) if known else []
            promised = [each.high for each in sure if each.high is not None and each.high >= span.low]
            beyond = _beyond(path, "S", span) or _beyond(path, "B", Range(B, B))
            found.append(TokenRange(path.name, B, span.low, span.high, beyond, promised[-1] if promised else None))
    return found


def tokens_within(at: Curve, B: int, sla_ms: float, levels: StepLevels, *, top: int | None = None) -> list[Range]:
    """Return the ranges of S from B up to `top` whose steps meet the SLA; S = B is a decode step."""

    def widened(S: FloatArray) -> FloatArray:
        return at(S) * levels.wider(np.full(len(S), float(B)), S)

    limit = sla_ms / float(levels.of(B).at(B))
    spans = feasible_ranges(widened, limit, B + 1, top) if top is None or top > B else []
    if _one(widened, B) > sla_ms / levels.decode.at(B):
        return spans
    if spans and spans[0].low == B + 1:
        return [Range(B, spans[0].high), *spans[1:]]
    return [Range(B, B), *spans]


def batch_ranges(
    path: ExecutionPath, sla_ms: float, levels: StepLevels, context: float | None = None
) -> list[BatchRange]:
    """Return B_min..B_max for S = 1, 2, 4, ... up to the largest measured S, with B <= S."""
    found = []
    for S in _doubling(path, "S"):

        def at(B: FloatArray, S: int = S) -> FloatArray:
            tokens = np.full(len(B), float(S))
            slower = levels.factors(B, tokens) * levels.wider(B, tokens)
            return np.asarray(slower * path.fit.latency_ms(**step_columns(B, tokens, context)))

        spans = feasible_ranges(at, sla_ms, 1, S - 1) if S > 1 else []
        if _one(at, S) <= sla_ms:
            joins = bool(spans) and spans[-1].high == S - 1
            spans = [*spans[:-1], Range(spans[-1].low, S)] if joins else [*spans, Range(S, S)]
        beyond = _beyond(path, "S", Range(S, S))
        found += [BatchRange(path.name, S, *span, beyond or _beyond(path, "B", span)) for span in spans]
    return found


def feasible_ranges(at: Curve, limit_ms: float, low: int, high: int | None) -> list[Range]:
    """Return all integer ranges in [low, high] with at(x) <= limit_ms; a last end of None is unbounded."""
    top = high if high is not None else _find_beyond(at, limit_ms, low)
    grid = np.unique(np.round(np.geomspace(low, max(top, low), SCANNED))).astype(np.int64)
    inside = at(grid.astype(np.float64)) <= limit_ms
    edges = np.flatnonzero(np.diff(np.concatenate([[False], inside, [False]]).astype(int)))
    found = []
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        start = low if first == 0 else _edge(at, limit_ms, int(grid[first - 1]), int(grid[first]), enters=True)
        ends = high if last == len(grid) else _edge(at, limit_ms, int(grid[last - 1]), int(grid[last]), enters=False)
        found.append(Range(start, ends))
    return found


def fastest_step(path: ExecutionPath, levels: StepLevels, context: float | None = None) -> tuple[float, int, int]:
    B_top, S_top = (int(path.fit.domain[name][1]) for name in ("B", "S"))
    B = np.unique(np.geomspace(1, B_top, 200).astype(int))
    S = np.unique(np.concatenate([np.geomspace(1, max(S_top, B_top), 400).astype(int), B]))
    grid_B, grid_S = (axis.ravel().astype(float) for axis in np.meshgrid(B, S))
    rows = grid_S >= grid_B
    grid_B, grid_S = grid_B[rows], grid_S[rows]
    factors = levels.factors(grid_B, grid_S) * levels.wider(grid_B, grid_S)
    times = factors * path.fit.latency_ms(**step_columns(grid_B, grid_S, context))
    best = int(np.argmin(times))
    return float(times[best]), int(grid_B[best]), int(grid_S[best])


def _one(at: Curve, x: int) -> float:
    return float(at(np.array([float(x)]))[0])


def _find_beyond(at: Curve, limit_ms: float, low: int) -> int:
    doubles = np.asarray(low * 2.0 ** np.arange(1.0, 41.0), dtype=np.float64)
    doubles = doubles[doubles <= UNBOUNDED]
    within = np.flatnonzero(at(doubles) <= limit_ms)
    if not len(within):
        return int(doubles[min(20, len(doubles) - 1)])
    return int(doubles[within[-1] + 1]) if within[-1] + 1 < len(doubles) else UNBOUNDED


def _edge(at: Curve, limit_ms: float, low: int, high: int, *, enters: bool) -> int:
    """Return the first number within the limit in (low, high] (enters), else the last in [low, high)."""
    while high - low > 1:
        between = np.unique(np.linspace(low, high, BETWEEN + 2).round()[1:-1])
        changed = np.flatnonzero((at(between) <= limit_ms) == enters)
        first = int(changed[0]) if len(changed) else len(between)
        low, high = ([low, *between.astype(int).tolist(), high][place] for place in (first, first + 1))
    return high if enters else low


def _doubling(path: ExecutionPath, column: str) -> list[int]:
    top = max(1, int(path.fit.domain[column][1]))
    return sorted({*(1 << i for i in range(top.bit_length())), top})


def _beyond(path: ExecutionPath, column: str, span: Range) -> bool:
    low, high = path.fit.domain[column]
    return span.high is None or span.high > high or span.low < low
