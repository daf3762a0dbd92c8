"""Measure a machine's speed relative to when a fit was made.

The speed factor of a phase is the ratio estimate of measured over fitted step time, with a standard error from batch
means. Formula: docs/theory/planning.md, "Machine speed".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from latfit.fitting import mean_ms, typical_ms
from latfit.metrics import Interval
from latfit.model import FitResult
from latfit.records import to_builtins
from latfit.simulation import EngineSettings, StepCosts, scaled_costs
from latfit.stats import FloatArray
from latfit.trace import DECODE, Trace, phases
from latfit.units import format_percent
from latfit.validation.compare import NAMES, Validation, ValidationOptions, validate
from latfit.validation.measured import Measured

MAX_BLOCKS = 20
MIN_CHANGE = 0.1  # smallest relative change that counts, about the error of most fits
SIGNIFICANT_ERRORS = 2.0  # standard errors beyond which a change is significant
WINDOW_COLUMNS = ("B", "S", "prefill_requests", "context_tokens")
OF_DECODE, WITH_PREFILL, ALL_STEPS = "decode", "prefill", "all"
PHASE_NAMES = {OF_DECODE: "decode steps", WITH_PREFILL: "steps with prefill", ALL_STEPS: "all steps"}


@dataclass(frozen=True)
class PhaseSpeed:
    """Speed factor of `steps` steps, above 1 for a slower machine. error: NaN for few."""

    phase: str
    steps: int
    factor: float
    error: float

    @property
    def has_changed(self) -> bool:
        error = self.error if math.isfinite(self.error) else 0.0
        return abs(self.factor - 1) > max(MIN_CHANGE, SIGNIFICANT_ERRORS * error)

    @property
    def times(self) -> str:
        """`1.33 times as long as when the fit was made (± 2 %)`."""
        error = f" (± {format_percent(100 * self.error / self.factor)})" if math.isfinite(self.error) else ""
        return f"{f'{self.factor:.2f} times ' if self.has_changed else ''}as long as when the fit was made{error}"

    @property
    def change(self) -> str:
        """`+33 % (± 2 %)`."""
        error = f" (± {format_percent(100 * self.error)})" if math.isfinite(self.error) else ""
        return f"{format_percent(100 * (self.factor - 1), signed=True)}{error}"

    @property
    def sentence(self) -> str:
        return f"Steps take {self.times}."


def window_speed(windows: Sequence[Interval], fits: Sequence[FitResult]) -> PhaseSpeed | None:
    """Return the speed factor of all steps in successive windows, or None. fits: decode first, prefill last."""
    found = []
    for window in windows:
        step, gaps = window.mean_step(), window.histogram("itl")
        if step is None:
            continue
        if gaps is not None and gaps.count > 0:
            found.append((gaps.mean, _expected_ms(step, fits), gaps.count))
        elif window.was_busy and not window.of_executions:
            found.append((step["T_ms"], _expected_ms(step, fits), window.steps))
    return _weighted_speed(*np.array(found).T) if found else None


def recorded_window_speed(trace: Trace, fits: Sequence[FitResult]) -> PhaseSpeed | None:
    """Return the speed factor of all steps in the busy windows that `latfit record` wrote, or None."""
    busy = trace.select(~trace["idle"].astype(bool)) if "idle" in trace else trace
    if not len(busy) or not {"window_steps", "prefill_tokens"} <= busy.columns.keys():
        return None
    columns = {name: busy.floats(name) for name in WINDOW_COLUMNS if name in busy}
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    expected = np.array([_expected_ms(row, fits) for row in rows])
    return _weighted_speed(busy.floats("T_ms"), expected, busy.floats("window_steps"))


def _weighted_speed(T_ms: FloatArray, expected_ms: FloatArray, steps: FloatArray) -> PhaseSpeed:
    return replace(phase_speed(ALL_STEPS, T_ms * steps, expected_ms * steps), steps=round(float(steps.sum())))


def _expected_ms(step: Mapping[str, float], fits: Sequence[FitResult]) -> float:
    def time_ms(fit: FitResult, B: float, S: float, prefill: float = 0.0) -> float:
        columns = {"B": np.array([B]), "S": np.array([S]), "prefill_tokens": np.array([prefill])}
        if math.isfinite(step.get("context_tokens", math.nan)):
            columns["context_tokens"] = np.array([step["context_tokens"]])
        return float(mean_ms(fit, Trace(columns))[0])

    B, S, prompts = step["B"], step["S"], step.get("prefill_requests", math.nan)
    if not math.isfinite(prompts):  # the engine counts no first tokens: the mean step stands for all
        return time_ms(fits[0], B, S)
    share, decoding = min(prompts, 1.0), max(B - prompts, 1.0)
    expected = (1 - share) * time_ms(fits[0], decoding, decoding)
    if share > 0:
        tokens = max(S - (B - prompts), prompts) / share
        expected += share * time_ms(fits[-1], B - prompts + prompts / share, B - prompts + tokens, tokens)
    return expected


def phase_speed(phase: str, T_ms: FloatArray, mean_ms: FloatArray) -> PhaseSpeed:
    """Estimate the speed factor of a phase's steps in order of time: measured and fitted times, (n,) ms."""
    n = len(T_ms)
    if not n:
        return PhaseSpeed(phase, 0, 1.0, np.nan)
    factor = float(T_ms.sum() / mean_ms.sum())
    starts = np.unique(np.linspace(0, n, min(MAX_BLOCKS, n), endpoint=False).astype(np.int64))
    off = np.add.reduceat(T_ms - factor * mean_ms, starts)
    k = len(starts)
    error = float(np.sqrt(k / (k - 1) * np.sum(off**2)) / mean_ms.sum()) if k > 1 else np.nan
    return PhaseSpeed(phase, n, factor, error)


@dataclass(frozen=True, eq=False)
class RunSpeed:
    whole: PhaseSpeed
    speeds: Sequence[PhaseSpeed]
    at_speed: Validation

    @property
    def sentence(self) -> str:
        phases = [f"{PHASE_NAMES[each.phase]} {each.change}" for each in self.speeds if each.steps]
        by_phase = f": {' and '.join(phases)}" if phases else ""
        errors = self.at_speed.mean_errors.items()
        means = ", ".join(f"{NAMES[name]} {format_percent(error, signed=True)}" for name, error in errors)
        at_speed = f"Simulated at that speed, the means are off by {means}."
        return f"During the run steps took {self.whole.times}{by_phase}. {at_speed}"

    def to_json(self) -> dict[str, Any]:
        speeds = (self.whole, *self.speeds)
        found = self.at_speed
        at_speed = {"agrees": found.agrees, "metrics": found.metrics, "server": found.clocks or None}
        by_phase = {each.phase: {"steps": each.steps, "factor": each.factor, "error": each.error} for each in speeds}
        return {**by_phase, "at_speed": to_builtins(at_speed)}


def run_speed(
    measured: Measured,
    costs: StepCosts,
    settings: EngineSettings,
    how: ValidationOptions,
    speeds: tuple[PhaseSpeed, Sequence[PhaseSpeed]],
) -> RunSpeed:
    """Simulate the run again at the speed of decode and prefill steps, or else of all steps."""
    whole, phases = speeds
    factors = {each.phase: each.factor for each in phases}
    decode, prefill = (factors.get(phase, whole.factor) for phase in (OF_DECODE, WITH_PREFILL))
    return RunSpeed(whole, phases, validate(measured, scaled_costs(costs, decode, prefill), settings, how))


def phase_speeds(
    trace: Trace, decode_fit: FitResult, prefill_fit: FitResult | None, *, scatter: bool
) -> tuple[PhaseSpeed, list[PhaseSpeed]]:
    """Return the speed of all recorded steps, and of each phase. scatter: compare with means, not typical times."""
    order = np.argsort(trace.floats("t_s"), kind="stable") if "t_s" in trace else np.arange(len(trace))
    trace, found = trace.select(order), []
    decode, expected_ms = phases(trace) == DECODE, np.zeros(len(trace))
    for phase, fit, rows in ((OF_DECODE, decode_fit, decode), (WITH_PREFILL, prefill_fit or decode_fit, ~decode)):
        steps = trace.select(rows)
        expected_ms[rows] = (mean_ms if scatter else typical_ms)(fit, steps)
        found.append(phase_speed(phase, steps.floats("T_ms"), expected_ms[rows]))
    return phase_speed(ALL_STEPS, trace.floats("T_ms"), expected_ms), found
