"""The limits of single steps that a fit holds, by phase, and the one rule by which they are looked up.

A phase has limits of its own: over all steps together a limit can hold and fail in every phase (2 % noise in decode and
15 % in prefill: "95 % of steps" of both together is kept by 76 % of the prefill steps). So a step is judged by the
limits of its phase, and where the fit has none under that name, by those of the phase that holds what it holds:

- a step that computes prefill beside decode (`mixed`), or nothing but prefill (`prefill`): the trace may not have told
  the two apart (`prefill or mixed`), or hold only the other one;
- `prefill or mixed`: the wider of the two, where the trace told them apart;
- anything else: the limits of all steps together.

A limit that the measured steps of the phase cannot tell is None; it is not taken from another phase, nor from a lower
level.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from latfit.model.noise.size_levels import MAX_RATIO
from latfit.model.noise.step_noise import StepNoise, noise_from_json
from latfit.trace import MIXED, PREFILL, UNKNOWN

STANDS_FOR: Mapping[str, tuple[tuple[str, ...], ...]] = {
    MIXED: ((MIXED,), (UNKNOWN,), (PREFILL,)),
    PREFILL: ((PREFILL,), (UNKNOWN,), (MIXED,)),
    UNKNOWN: ((UNKNOWN,), (MIXED, PREFILL), (MIXED,), (PREFILL,)),
}
"""Groups of phases, the first that a fit knows whole: its limits stand for the phase's, the widest of a group."""


@dataclass(frozen=True)
class Limits:
    """Limits of the steps of one phase, or of all: factors on the typical latency by level in (0, 1).

    upper: a new step stays below with that probability.  lower: stays above with it.  None where the steps cannot tell;
    reason: why not, with what could.  ratios: the law of observed over typical, None where the fit keeps none.
    """

    upper: Mapping[float, float | None] = field(default_factory=dict)
    lower: Mapping[float, float | None] = field(default_factory=dict)
    ratios: StepNoise | None = None
    reason: str = ""


@dataclass(frozen=True, repr=False)
class PredictionIntervals:
    """Limits of all steps together and by phase. levels: those that were asked of the steps."""

    levels: tuple[float, ...] = ()
    all: Limits = field(default_factory=Limits)
    by_phase: Mapping[str, Limits] = field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            f"PredictionIntervals at {', '.join(f'{level:g}' for level in self.levels)} of {', '.join(self.by_phase)}"
        )

    def phases(self, phase: str) -> tuple[str, ...]:
        """The phases whose limits stand for a phase's; empty for all steps together."""
        groups = STANDS_FOR.get(phase, ((phase,),))
        return next((group for group in groups if all(name in self.by_phase for name in group)), ())

    def of(self, phase: str) -> Limits:
        """The limits that stand for a phase's; of several those with the widest noise."""
        found = [self.by_phase[name] for name in self.phases(phase)]
        return max(found, key=lambda limits: limits.ratios.width if limits.ratios else 0.0, default=self.all)

    def factor(self, phase: str, level: float) -> float | None:
        """What to multiply a typical step of a phase with so that a share `level` of such steps stays below; None where
        the measured steps cannot tell."""
        return self._widest(phase, "upper", level)

    def lower_factor(self, phase: str, level: float) -> float | None:
        """The same for staying above."""
        return self._widest(phase, "lower", level)

    def highest_level(self, phase: str, level: float) -> float | None:
        """The highest level up to `level` at which a phase has an upper limit; None where it has none."""
        known = [known for known in self.levels if known <= level + 1e-12 and self.factor(phase, known) is not None]
        return max(known, default=None)

    def _widest(self, phase: str, side: str, level: float) -> float | None:
        sources = [self.by_phase[name] for name in self.phases(phase)] or [self.all]
        found = [_at(getattr(limits, side), level) for limits in sources]
        if any(factor is None for factor in found):
            return None
        return (max if side == "upper" else min)(factor for factor in found if factor is not None)


def intervals_from_json(document: Mapping[str, Any]) -> PredictionIntervals:
    """The record of the `intervals` of a fit's JSON. Raises ValueError, TypeError, KeyError for what is none."""
    everything = _limits(document)
    by_phase = {str(name): _limits(entry) for name, entry in document.get("by_phase", {}).items()}
    levels = sorted({*everything.upper, *(level for limits in by_phase.values() for level in limits.upper)})
    return PredictionIntervals(tuple(levels), everything, by_phase)


def _limits(entry: Mapping[str, Any]) -> Limits:
    upper, lower = (_factors(entry.get(name, {})) for name in ("ratio_quantiles", "lower_quantiles"))
    return Limits(upper, lower, noise_from_json(entry.get("ratios")), str(entry.get("reason", "")))


def _factors(entry: Mapping[str, Any]) -> dict[float, float | None]:
    found = {float(level): None if factor is None else float(factor) for level, factor in entry.items()}
    if any(factor is not None and not 1 / MAX_RATIO < factor < MAX_RATIO for factor in found.values()):
        raise ValueError("limits are not factors above zero")
    return found


def _at(known: Mapping[float, float | None], level: float) -> float | None:
    return next((factor for name, factor in known.items() if math.isclose(name, level, abs_tol=1e-9)), None)
