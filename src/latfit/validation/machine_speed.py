"""Measure a machine's speed relative to when a fit was made.

The speed factor of a phase is the ratio estimate of measured over fitted step time, with a standard error from batch
means. Steps come from a trace or from windows of a running server. Formula: docs/theory/planning.md, "Machine speed".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from latfit.fitting import mean_ms
from latfit.metrics import Interval
from latfit.model import FitResult
from latfit.simulation import EngineSettings, StepCosts, scaled_costs
from latfit.stats import FloatArray
from latfit.trace import Trace
from latfit.units import format_percent
from latfit.validation.compare import NAMES, Asked, Validation, validate
from latfit.validation.measured import Measured

BLOCKS = 20
CHANGED = 0.1
"""Smallest relative change that counts, about the error of most fits."""
WINDOW_COLUMNS = ("B", "S", "prefill_requests", "context_tokens")
SURE = 2.0
"""Standard errors beyond which a change is significant."""
OF_DECODE, WITH_PREFILL, ALL_STEPS = "decode", "prefill", "all"
"""Decode steps, and steps that contain prefill."""
SAID: Mapping[str, str] = {OF_DECODE: "decode steps", WITH_PREFILL: "steps with prefill", ALL_STEPS: "all steps"}


@dataclass(frozen=True)
class PhaseSpeed:
    """Speed factor of `steps` steps: measured over fitted time, above 1 for a slower machine.

    error: standard error of the factor, NaN for fewer than two steps. Without steps the factor is 1.
    """

    phase: str
    steps: int
    factor: float
    error: float

    @property
    def has_changed(self) -> bool:
        """Whether the factor differs from 1 beyond the errors of fit and measurement."""
        error = self.error if math.isfinite(self.error) else 0.0
        return abs(self.factor - 1) > max(CHANGED, SURE * error)

    @property
    def sentence(self) -> str:
        """The speed as a sentence."""
        return f"Steps take {self.times}."

    @property
    def times(self) -> str:
        """`1.33 times as long as when the fit was made (± 2 %)`."""
        error = f" (± {format_percent(100 * self.error / self.factor)})" if math.isfinite(self.error) else ""
        if not self.has_changed:
            return f"as long as when the fit was made{error}"
        return f"{self.factor:.2f} times as long as when the fit was made{error}"

    @property
    def said(self) -> str:
        """The speed as part of a sentence."""
        error = f" (± {format_percent(100 * self.error)})" if np.isfinite(self.error) else ""
        return f"{SAID[self.phase]} {format_percent(100 * (self.factor - 1), signed=True)}{error}"


def window_speed(windows: Sequence[Interval], fits: Sequence[FitResult]) -> PhaseSpeed | None:
    """Return the speed factor of all steps in windows of a server; None if no window shows step times.

    Parameters
    ----------
    windows
        Windows in order of time, a second or so each.
    fits
        The fit of decode steps first, that of steps with prefill last; one fit for both.
    """
    found = [each for window in windows if (each := _window_times(window, fits)) is not None]
    if not found:
        return None
    T_ms, expected_ms, weight = np.array(found).T
    return replace(phase_speed(ALL_STEPS, T_ms * weight, expected_ms * weight), steps=round(weight.sum()))


def _window_times(window: Interval, fits: Sequence[FitResult]) -> tuple[float, float, float] | None:
    """Return (measured ms of a step, the fit's ms, weight) of a window; None if it shows no step times."""
    step, gaps = window.mean_step(), window.histogram("itl")
    if step is None:
        return None
    if gaps is not None and gaps.count > 0:
        return gaps.mean, _expected_ms(step, fits), gaps.count
    if window.was_busy and not window.of_executions:
        return step["T_ms"], _expected_ms(step, fits), window.steps
    return None


def recorded_window_speed(trace: Trace, fits: Sequence[FitResult]) -> PhaseSpeed | None:
    """Return the speed factor of all steps in the busy windows that `latfit record` wrote; None without one."""
    busy = trace.select(~trace["idle"].astype(bool)) if "idle" in trace else trace
    if not len(busy) or not {"window_steps", "prefill_tokens"} <= busy.columns.keys():
        return None
    columns = {name: busy.floats(name) for name in WINDOW_COLUMNS if name in busy}
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    steps, expected = busy.floats("window_steps"), np.array([_expected_ms(row, fits) for row in rows])
    found = phase_speed(ALL_STEPS, busy.floats("T_ms") * steps, expected * steps)
    return replace(found, steps=round(float(steps.sum())))


def _expected_ms(step: Mapping[str, float], fits: Sequence[FitResult]) -> float:
    """Return the fit's mean step time for a window's mean step, as a mix of decode and prefill steps."""
    B, S, prompts = step["B"], step["S"], step.get("prefill_requests", math.nan)
    if not math.isfinite(prompts):  # the engine counts no first tokens: the mean step stands for all
        return float(mean_ms(fits[0], _steps(step, [B], [S]))[0])
    share, decoding = min(prompts, 1.0), max(B - prompts, 1.0)
    expected = (1 - share) * float(mean_ms(fits[0], _steps(step, [decoding], [decoding]))[0])
    if share > 0:
        tokens = max(S - (B - prompts), prompts) / share
        held = B - prompts, prompts / share
        expected += share * float(mean_ms(fits[-1], _steps(step, [sum(held)], [held[0] + tokens], tokens))[0])
    return expected


def _steps(step: Mapping[str, float], B: Sequence[float], S: Sequence[float], prefill: float = 0.0) -> Trace:
    """Return one step as the columns of a fit."""
    columns = {"B": np.array(B), "S": np.array(S), "prefill_tokens": np.array([prefill])}
    if math.isfinite(step.get("context_tokens", math.nan)):
        columns["context_tokens"] = np.array([step["context_tokens"]])
    return Trace(columns)


def phase_speed(phase: str, T_ms: FloatArray, mean_ms: FloatArray) -> PhaseSpeed:
    """Estimate the speed factor of a phase's steps in order of time: measured and fitted times, (n,) ms."""
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
    """Machine speed during a run, and the comparison at this speed.

    whole: of all steps.  speeds: of decode steps and of steps with prefill, if single steps are known.
    """

    whole: PhaseSpeed
    speeds: Sequence[PhaseSpeed]
    at_speed: Validation

    @property
    def sentence(self) -> str:
        """The machine's speed, and the errors of the means at this speed."""
        phases = " and ".join(each.said for each in self.speeds if each.steps)
        by_phase = f": {phases}" if phases else ""
        errors = [
            f"{NAMES[name]} {format_percent(off, signed=True)}" for name, off in self.at_speed.mean_errors.items()
        ]
        return (
            f"During the run steps took {self.whole.times}{by_phase}. Simulated at that speed, the means are off by"
            f" {', '.join(errors)}."
        )

    def to_json(self) -> dict[str, Any]:
        by_phase = {
            each.phase: {"steps": each.steps, "factor": each.factor, "error": each.error}
            for each in (self.whole, *self.speeds)
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
    measured: Measured,
    costs: StepCosts,
    settings: EngineSettings,
    how: Asked,
    speeds: tuple[PhaseSpeed, Sequence[PhaseSpeed]],
) -> RunSpeed:
    """Simulate the run again at the speed of decode and prefill steps, or else of all steps."""
    whole, phases = speeds
    factors = {each.phase: each.factor for each in phases}
    decode, prefill = (factors.get(phase, whole.factor) for phase in (OF_DECODE, WITH_PREFILL))
    return RunSpeed(whole, phases, validate(measured, scaled_costs(costs, decode, prefill), settings, how))
