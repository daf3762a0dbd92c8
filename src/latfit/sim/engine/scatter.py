"""How the steps of a simulated engine scatter: each lasts its cost times the level of its size times a ratio F.

F is drawn anew for each step from the law of observed over typical time that the fit keeps for the step's phase (see
`model.step_ratios`); its mean is the measured one, so the mean step is, too, and its tail is that of the steps. F is
the smallest point whose cumulated share exceeds a uniform number u. A guide (Chen & Asau 1974) names for each of GUIDE
equal parts of [0, 1) the first point that may be it, so that a draw takes one or two comparisons however many points
there are.

The level is that of the steps of S tokens in the trace, whatever context they had, so it counts where a cost is one of
B and S alone. Steps of an engine come with other contexts than those of a trace, and a cost that knows the context is
nearer to them without the level: on the measured run of `docs/engine.md` it is off by 0.7 % in the mean time to the
first token, with the levels by 3.2 %. The level depends on ln S and is smooth; it is kept at the edges of a 128th of an
octave, which a float's leading bits number, straight between them, exact for up to 256 tokens.

The uniform numbers are a sequence of the engine's own (splitmix64), one a step: neither the requests nor anything else
that is drawn depends on it, and two settings of an engine meet the same numbers in their steps.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from latfit.model.result import FitResult
from latfit.model.step_ratios import NO_LEVELS, StepRatios
from latfit.sim.engine.draws import sequence
from latfit.sim.engine.state import IntArray, State, njit
from latfit.stats import FloatArray
from latfit.trace.phases import DECODE, MIXED, PREFILL

CONTEXT = "context_tokens"
OF_DECODE, OF_PREFILL, OF_MIXED = range(3)
"""Rows of the tables below."""

GUIDE = 1024
SIZE_SHIFT = 45
"""A size is numbered by the bits of its float64 without the last 45."""
SIZE_LOWEST = 1023 << (52 - SIZE_SHIFT)
SIZES = 24 << (52 - SIZE_SHIFT)
"""Up to 2^24 tokens."""
_BELOW = (1 << SIZE_SHIFT) - 1
_OF_BELOW = 1.0 / (1 << SIZE_SHIFT)


class Scatter(NamedTuple):
    """Laws of the steps of each phase, in rows: level (3, SIZES + 1), values and reached (3, k) of F, guide (3, GUIDE).
    k = 0 where no step scatters."""

    level: FloatArray
    values: FloatArray
    reached: FloatArray
    guide: IntArray


def scatter_of(decode: FitResult, with_prefill: FitResult) -> Scatter:
    """The laws that the fits keep; a phase without one lasts its cost."""
    return scatter_from(_law(decode, DECODE), _law(with_prefill, PREFILL), _law(with_prefill, MIXED))


def _law(fit: FitResult, phase: str) -> StepRatios | None:
    law = fit.limits.of(phase).ratios
    return replace(law, levels=NO_LEVELS) if law is not None and CONTEXT in fit.structure.columns else law


def scatter_from(decode: StepRatios | None, prefill: StepRatios | None, mixed: StepRatios | None) -> Scatter:
    """Laws by phase, None for a phase that lasts its cost."""
    laws = (decode, prefill, mixed)
    if all(law is None for law in laws):
        return NONE
    k = max(len(law.values) for law in laws if law is not None)
    level, values, reached = np.ones((3, SIZES + 1)), np.ones((3, k)), np.ones((3, k))
    sizes = _edges()
    for row, law in enumerate(laws):
        if law is None:
            continue
        n = len(law.values)
        level[row] = law.levels.factors(sizes)
        values[row, :n], values[row, n:] = law.values, law.values[-1]
        reached[row, :n] = law.reached
    parts = np.arange(GUIDE) / GUIDE
    guide = np.stack([np.searchsorted(row, parts, side="right") for row in reached])
    return Scatter(level, values, reached, guide.astype(np.int64))


def _edges() -> FloatArray:
    """The sizes (SIZES + 1,) in tokens between which levels are straight."""
    bits = np.arange(SIZES + 1, dtype=np.int64) + SIZE_LOWEST << SIZE_SHIFT
    return np.asarray(bits.view(np.float64))


NONE = Scatter(np.ones((3, 0)), np.ones((3, 0)), np.ones((3, 0)), np.zeros((3, 0), dtype=np.int64))


@njit
def phase_row(P: float, S: float) -> int:
    """The row of a step of S tokens, P of them of prefill."""
    return OF_DECODE if P <= 0.0 else OF_PREFILL if P >= S else OF_MIXED


@njit
def level_of(c: Scatter, phase: int, S: float) -> float:
    """The measured level of steps of S >= 1 tokens over their cost."""
    if c.values.shape[1] == 0:
        return 1.0
    bits = np.float64(S).view(np.int64)
    place = (bits >> SIZE_SHIFT) - SIZE_LOWEST
    if place >= SIZES:
        return float(c.level[phase, SIZES])
    low = c.level[phase, place]
    return float(low + (bits & _BELOW) * _OF_BELOW * (c.level[phase, place + 1] - low))


@njit
def ratio(c: Scatter, s: State, phase: int) -> float:
    """The next step's F."""
    if c.values.shape[1] == 0:
        return 1.0
    u = sequence(s.stream)
    at = c.guide[phase, int(u * GUIDE)]
    while c.reached[phase, at] <= u:
        at += 1
    return float(c.values[phase, at])
