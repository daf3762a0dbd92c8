"""Prediction limits of single steps stored with a fit, by phase: docs/theory/fitting.md, "Prediction intervals".

A phase without limits uses those of a related phase (STANDS_FOR), else those of all steps. Where the noise
differs by batch size, groups of sizes have their own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from latfit.model.step_noise import MAX_RATIO, StepNoise, edges_between, noise_from_json
from latfit.stats import FloatArray
from latfit.trace import MIXED, PREFILL, UNKNOWN

STANDS_FOR: Mapping[str, tuple[tuple[str, ...], ...]] = {
    MIXED: ((MIXED,), (UNKNOWN,), (PREFILL,)),
    PREFILL: ((PREFILL,), (UNKNOWN,), (MIXED,)),
    UNKNOWN: ((UNKNOWN,), (MIXED, PREFILL), (MIXED,), (PREFILL,)),
}
"""Groups of phases whose limits a phase uses: the first group the fit has in full, its widest limits."""

REFERENCE_MS = 100.0  # a usual step with prefill, on which the noise of phases is compared


@dataclass(frozen=True)
class Limits:
    """Limits of the steps of one phase, or of all steps, by one-sided level in (0, 1)."""

    upper: Mapping[float, float | None] = field(default_factory=dict)  # factors on the typical latency; None: too few
    lower: Mapping[float, float | None] = field(default_factory=dict)
    ratios: StepNoise | None = None  # distribution of observed over typical latency; None if not stored
    reason: str = ""  # why limits are missing and what to measure
    by_batch: tuple["Limits", ...] = ()  # of groups of rising batch sizes
    edges: FloatArray = field(default_factory=lambda: np.empty(0))  # batch sizes between the groups

    def factors(self, level: float, B: FloatArray, side: str) -> FloatArray | None:
        """Return the factors (n,) for steps of B (n,) requests; None with too few samples."""
        found = [_at(getattr(limits, side), level) for limits in self.by_batch or (self,)]
        known = np.array([factor for factor in found if factor is not None])
        return known[np.searchsorted(self.edges, B)] if len(known) == len(found) else None


@dataclass(frozen=True)
class PredictionIntervals:
    """Limits of all steps together and by phase. levels: all one-sided levels that are stored."""

    levels: tuple[float, ...] = ()
    all: Limits = field(default_factory=Limits)
    by_phase: Mapping[str, Limits] = field(default_factory=dict)

    def phases(self, phase: str) -> tuple[str, ...]:
        groups = STANDS_FOR.get(phase, ((phase,),))
        return next((group for group in groups if all(name in self.by_phase for name in group)), ())

    def of(self, phase: str) -> Limits:
        """Return the limits that a phase uses; of several those with the widest noise at any batch size."""
        return max(self._sources(phase), key=lambda limits: _widest_cv(limits.ratios))

    def pooled_factor(self, phase: str, level: float, side: str = "upper") -> float | None:
        """Return the factor, of all batch sizes, that a share `level` of a phase's steps stays below (lower: above)."""
        found = [_at(getattr(limits, side), level) for limits in self._sources(phase)]
        widest = max if side == "upper" else min
        return None if None in found else widest(factor for factor in found if factor is not None)

    def factors(self, phase: str, level: float, B: FloatArray, side: str = "upper") -> FloatArray | None:
        """Return the factors (n,) for steps of B (n,) requests, as `pooled_factor` does; None with too few samples."""
        found = [limits.factors(level, B, side) for limits in self._sources(phase)]
        known = [each for each in found if each is not None]
        widest = np.max if side == "upper" else np.min
        return np.asarray(widest(known, axis=0)) if len(known) == len(found) else None

    def highest_level(self, phase: str, level: float) -> float | None:
        """Return the highest level up to `level` with an upper limit for the phase; None without one."""
        tried = [each for each in self.levels if each <= level + 1e-12]
        return max((each for each in tried if self.pooled_factor(phase, each) is not None), default=None)

    def _sources(self, phase: str) -> list[Limits]:
        return [self.by_phase[name] for name in self.phases(phase)] or [self.all]


def intervals_from_json(document: Mapping[str, Any]) -> PredictionIntervals:
    everything = _limits(document)
    by_phase = {str(name): _limits(entry) for name, entry in document.get("by_phase", {}).items()}
    levels = sorted({*everything.upper, *(level for limits in by_phase.values() for level in limits.upper)})
    return PredictionIntervals(tuple(levels), everything, by_phase)


def _widest_cv(noise: StepNoise | None) -> float:
    if noise is None:
        return 0.0
    batches = np.append(noise.edges, np.inf)  # the last of each group
    return float(np.max(noise.cv(np.full(len(batches), REFERENCE_MS), batches)))


def _limits(entry: Mapping[str, Any]) -> Limits:
    upper, lower = (_factors(entry.get(name, {})) for name in ("ratio_quantiles", "lower_quantiles"))
    groups = entry.get("by_batch", [])
    edges = edges_between(*(np.array([each[end] for each in groups], dtype=np.float64) for end in ("low", "high")))
    reason, noise = str(entry.get("reason", "")), noise_from_json(entry.get("ratios"))
    by_batch = (Limits(_factors(each["ratio_quantiles"]), _factors(each.get("lower_quantiles", {}))) for each in groups)
    return Limits(upper, lower, noise, reason, tuple(by_batch), edges)


def _factors(entry: Mapping[str, Any]) -> dict[float, float | None]:
    found = {float(level): None if factor is None else float(factor) for level, factor in entry.items()}
    if any(factor is not None and not 1 / MAX_RATIO < factor < MAX_RATIO for factor in found.values()):
        raise ValueError("limits are not factors above zero")
    return found


def _at(known: Mapping[float, float | None], level: float) -> float | None:
    return next((factor for name, factor in known.items() if math.isclose(name, level, abs_tol=1e-9)), None)
