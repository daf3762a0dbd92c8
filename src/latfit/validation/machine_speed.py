"""How fast a machine was during a measured run, beside how fast a fit has it.

Machines do not keep their speed: clocks, heat and neighbours make the same steps take another time an hour later, and a
simulation is off by that without an error of its own. Where steps of the run itself were recorded, both are told apart.
A phase was slower by

    r = sum T_i / sum m_i

over its recorded steps, T_i the time of each and m_i the mean that the fit gives a step like it. Steps that follow each
other are disturbed alike, so the error of r is that of batch means: the steps in order of time, cut into BLOCKS parts
with sums T_j and m_j, give r a variance of k/(k - 1) sum (T_j - r m_j)^2 / (sum m_j)^2 (that of a ratio estimate,
Cochran 1977, section 6.4). The run is simulated once more with costs times r: what is off then is the simulation's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from latfit.simulation import EngineSettings, StepCosts, scaled_costs
from latfit.stats import FloatArray
from latfit.units import format_percent
from latfit.validation.compare import JUDGED, NAMES, Asked, Validation, validate
from latfit.validation.measured import Measured

BLOCKS = 20
OF_DECODE, WITH_PREFILL = "decode", "prefill"
"""Steps that decode only, and those that contain prefill."""
SAID: Mapping[str, str] = {OF_DECODE: "decode steps", WITH_PREFILL: "steps with prefill"}


@dataclass(frozen=True)
class PhaseSpeed:
    """Of so many recorded steps: their time over the fit's of the same ones, and its standard error (NaN for fewer
    than two). Without steps the factor is 1."""

    phase: str
    steps: int
    factor: float
    error: float

    @property
    def said(self) -> str:
        """As part of a sentence."""
        error = f" (± {format_percent(100 * self.error)})" if np.isfinite(self.error) else ""
        return f"{SAID[self.phase]} {format_percent(100 * (self.factor - 1), signed=True)}{error}"


def phase_speed(phase: str, T_ms: FloatArray, mean_ms: FloatArray) -> PhaseSpeed:
    """The speed of a phase's steps, in order of time: what they took and what a fit has for each, (n,) ms."""
    n = len(T_ms)
    if not n:
        return PhaseSpeed(phase, 0, 1.0, np.nan)
    factor = float(T_ms.sum() / mean_ms.sum())
    starts = np.unique(np.linspace(0, n, min(BLOCKS, n), endpoint=False).astype(np.int64))
    off = np.add.reduceat(T_ms - factor * mean_ms, starts)
    k = len(starts)
    error = float(np.sqrt(k / (k - 1) * np.sum(off**2)) / mean_ms.sum()) if k > 1 else np.nan
    return PhaseSpeed(phase, n, factor, error)


@dataclass(frozen=True, eq=False)
class RunSpeed:
    """The speeds of decode steps and of steps with prefill during a run, and the comparison at these speeds."""

    speeds: Sequence[PhaseSpeed]
    at_speed: Validation

    @property
    def sentence(self) -> str:
        """The answer: how fast the machine was, and what is off then."""
        errors = [f"{NAMES[name]} {format_percent(off, signed=True)}" for name, off in self._means.items()]
        speeds = " and ".join(each.said for each in self.speeds if each.steps)
        return (
            f"During the run steps took, beside the fit of the same ones: {speeds}; simulated at that speed, the means"
            f" are off by {', '.join(errors)}."
        )

    @property
    def _means(self) -> dict[str, float]:
        found = self.at_speed
        if found.clocks:
            return {each.metric: each.error_pct for each in found.clocks}
        return {
            each.metric: each.error_pct for each in found.figures if each.statistic == "mean" and each.metric in JUDGED
        }

    def to_json(self) -> dict[str, Any]:
        by_phase = {
            each.phase: {"steps": each.steps, "factor": each.factor, "error": each.error} for each in self.speeds
        }
        document = self.at_speed.to_json()
        server = document["server"]
        return {
            **by_phase,
            "at_speed": {
                "agrees": self.at_speed.agrees,
                "metrics": document["metrics"],
                "server": None if server is None else server["metrics"],
            },
        }


def run_speed(
    measured: Measured, costs: StepCosts, settings: EngineSettings, how: Asked, speeds: Sequence[PhaseSpeed]
) -> RunSpeed:
    """The run simulated at the speeds of its decode steps and of its steps with prefill; errors as of `validate`."""
    factors = {each.phase: each.factor for each in speeds}
    return RunSpeed(
        speeds, validate(measured, scaled_costs(costs, factors[OF_DECODE], factors[WITH_PREFILL]), settings, how)
    )
