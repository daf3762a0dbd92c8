"""How the steps of a simulated engine scatter: each lasts its cost times the level of its size times a ratio F.

F is drawn anew for each step from the law of observed over typical time that the fit keeps for the step's phase and
batch (see `model.step_ratios`); its mean is the measured one, so the mean step is, too, and its tail is that of the
steps. F is the smallest point whose cumulated share exceeds a uniform number u. A guide (Chen & Asau 1974) names for
each of GUIDE equal parts of [0, 1) the first point that may be it, so that a draw takes one or two comparisons however
many points there are.

The level is that of the steps of S tokens in the trace, whatever context they had, so it counts where a cost is one of
B and S alone. Steps of an engine come with other contexts than those of a trace, and a cost that knows the context is
nearer to them without the level: on the measured run of `docs/engine.md` it is off by 0.3 % in the mean time to the
first token, with the levels by 2.9 %. The level depends on ln S and is smooth; it is kept at the edges of a 128th of an
octave, which a float's leading bits number, straight between them, exact for up to 256 tokens.

The uniform numbers are a sequence of the engine's own (splitmix64), one a step: neither the requests nor anything else
that is drawn depends on it, and two settings of an engine meet the same numbers in their steps.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from latfit.model.result import FitResult
from latfit.model.size_levels import NO_LEVELS
from latfit.model.step_ratios import StepRatios
from latfit.sim.engine.draws import sequence
from latfit.sim.engine.state import IntArray, State, njit
from latfit.stats import FloatArray
from latfit.trace.phases import DECODE, MIXED, PREFILL

CONTEXT = "context_tokens"
OF_DECODE, OF_PREFILL, OF_MIXED = range(3)
"""Rows of `level` and `law`."""

GUIDE = 1024
BATCHES = 1025
SIZE_SHIFT = 45
"""A size is numbered by the bits of its float64 without the last 45."""
SIZE_LOWEST = 1023 << (52 - SIZE_SHIFT)
SIZES = 24 << (52 - SIZE_SHIFT)
"""Up to 2^24 tokens."""
_BELOW = (1 << SIZE_SHIFT) - 1
_OF_BELOW = 1.0 / (1 << SIZE_SHIFT)


class Scatter(NamedTuple):
    """Laws of the steps: level (3, SIZES + 1) of each phase; law (3, BATCHES) of its batches 0 (unused), 1, ..., the
    last for all beyond, a row of values and reached (rows, k) of F and of guide (rows, GUIDE). k = 0 where no step
    scatters."""

    level: FloatArray
    law: IntArray
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
    level, of_batch = np.ones((3, SIZES + 1)), np.zeros((3, BATCHES), dtype=np.int64)
    sizes, batches = _edges(), np.maximum(np.arange(float(BATCHES)), 1.0)
    rows = [(np.ones(1), np.ones(1))]
    for phase, law in enumerate(laws):
        if law is not None:
            level[phase] = law.levels.factors(sizes)
            of_batch[phase] = len(rows) + law.groups.of(batches)
            rows += [(part.values, part.reached) for part in law.parts]
    k = max(len(points) for points, _ in rows)
    values = np.stack([np.pad(points, (0, k - len(points)), "edge") for points, _ in rows])
    reached = np.stack([np.pad(shares, (0, k - len(shares)), "edge") for _, shares in rows])
    ends = np.arange(GUIDE) / GUIDE
    guide = np.stack([np.searchsorted(row, ends, side="right") for row in reached])
    return Scatter(level, of_batch, values, reached, guide.astype(np.int64))


def _edges() -> FloatArray:
    """The sizes (SIZES + 1,) in tokens between which levels are straight."""
    bits = np.arange(SIZES + 1, dtype=np.int64) + SIZE_LOWEST << SIZE_SHIFT
    return np.asarray(bits.view(np.float64))


_NO_ROWS = np.zeros((3, 0), dtype=np.int64)
NONE = Scatter(np.ones((3, 0)), _NO_ROWS, np.ones((3, 0)), np.ones((3, 0)), _NO_ROWS)


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
def law_of(c: Scatter, phase: int, B: float) -> int:
    """The row of the law of steps of B requests."""
    if c.values.shape[1] == 0:
        return 0
    return int(c.law[phase, min(int(B), BATCHES - 1)])


@njit
def ratio(c: Scatter, s: State, law: int) -> float:
    """The next step's F."""
    if c.values.shape[1] == 0:
        return 1.0
    u = sequence(s.stream)
    at = c.guide[law, int(u * GUIDE)]
    while c.reached[law, at] <= u:
        at += 1
    return float(c.values[law, at])
