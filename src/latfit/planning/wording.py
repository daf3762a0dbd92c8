"""The plan's sentences: what to do under a step's SLA, and what could not be kept to."""

import math
from collections.abc import Mapping, Sequence

from latfit.hardware import HardwareProfile
from latfit.planning.request import Wishes
from latfit.planning.result import TokenRange
from latfit.planning.steps.limits import StepLevels
from latfit.units import format_ms


def step_answer(
    sla_ms: float, tokens: Sequence[TokenRange], levels: Mapping[str, StepLevels], profile: HardwareProfile
) -> tuple[str, str]:
    """The plan of steps in a sentence, the largest step there is, and what limits it."""
    finite = [row for row in tokens if row.S_max is not None]
    if not finite:
        return f"Every step meets {format_ms(sla_ms)}.", "nothing: the model has no cost that grows with tokens"
    largest = max(finite, key=lambda row: row.S_max or 0)
    label = profile.paths[largest.path].label
    own = levels[largest.path]
    level = (own.decode if largest.S_max == largest.B else own.of(largest.B)).percentile
    met_by = "the typical step" if level is None else f"{level:g} % of steps"
    extra = " (beyond the measured range)" if largest.extrapolated else ""
    answer = (
        f"Within {format_ms(sla_ms)} for {met_by}, {label} computes up to {largest.S_max:,} tokens a step"
        f" (at B={largest.B}){extra}."
    )
    return (
        answer,
        f"latency of a step on {label}: one token more than {largest.S_max:,} at B={largest.B} exceeds it",
    )


def rows_needed(percentile: float) -> int:
    """Rows from which a conformal limit exists at that percentile: n >= 1/(1 - level) - 1."""
    return math.ceil(round(100 / (100 - percentile) - 1, 9))


def notes(profile: HardwareProfile, levels: Mapping[str, StepLevels], asked: float, wishes: Wishes) -> list[str]:
    """What a reader must know of the paths before trusting the plan."""
    found = []
    for name, level in levels.items():
        path = profile.paths[name]
        if path.quote is not None:
            found.append(f"{name}: quoted ({path.quote.text}), not measured; without any spread.")
        elif level.percentile is None:
            found.append(f"{name}: the fit has no intervals, so the plan is for the typical step; half are slower.")
        elif level.percentile < asked:
            found.append(
                f"{name}: the measured steps cannot tell the {asked:g}th percentile, so the plan for steps is for"
                f" {_by_phase(level)}; {rows_needed(asked):,} or more that do not depend on each other (cells of B and"
                " S) could."
            )
        if wishes.context is None and path.fit.assumed_context:
            found.append(f"{name}: planned {path.fit.assumed_context}; --context changes that.")
        if not path.fit.knows_prefill and not path.quote:
            found.append(f"{name}: the fit has seen no prefill, so steps with more tokens than requests are guesses.")
    if "amx" not in profile.paths and "gpu" in profile.paths and "cpu" in profile.paths:
        found.append("cpu plays the part of amx.")
    return found


def _by_phase(levels: StepLevels) -> str:
    """`the 95th`, or by phase where these differ."""
    named = {"that decode": levels.decode, "of one prompt alone": levels.alone, "with prefill": levels.prefill}
    told = {what: level.percentile for what, level in named.items() if level.percentile is not None}
    if len(set(told.values())) == 1:
        return f"the {next(iter(told.values())):g}th"
    if told.get("of one prompt alone") == told.get("with prefill"):
        del told["of one prompt alone"]
    return " and ".join(f"the {percentile:g}th of steps {what}" for what, percentile in told.items())


def rate_text(per_s: float) -> str:
    """Requests a second: four significant digits, never as a power of ten below a million million."""
    return f"{per_s:,.4g}/s" if per_s < 1e4 else f"{float(f'{per_s:.4g}'):,.0f}/s"
