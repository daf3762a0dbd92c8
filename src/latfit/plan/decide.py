"""The plan for an SLA from a hardware profile: inverse solutions on each path, thresholds between two of them."""

import math

from latfit.errors import BadInput, WrongUsage
from latfit.hardware.profile import CPU_PATHS, GPU_PATHS, HardwareProfile
from latfit.plan.limits import Level, batch_ranges, fastest_step, level_for, token_ranges
from latfit.plan.result import Plan, Threshold, TokenRange, Unknown
from latfit.plan.thresholds import amortised_batch, gpu_threshold
from latfit.units import format_ms


def make_plan(
    profile: HardwareProfile, sla_ms: float, *, percentile: float = 99.0, tokens_per_request: int = 1
) -> Plan:
    """Decide for an SLA in ms on the latency of a step, met by `percentile` percent of the steps.

    tokens_per_request: tokens that each request adds to a step (1: decode), for B1 and B2.
    A plan that no step can meet comes back with feasible=False. Raises BadInput, WrongUsage.
    """
    _check(profile, percentile, tokens_per_request)
    levels = {name: level_for(path, percentile) for name, path in profile.paths.items()}
    tokens = [row for path in profile.paths.values() for row in token_ranges(path, sla_ms / levels[path.name].factor)]
    batches = [row for path in profile.paths.values() for row in batch_ranges(path, sla_ms / levels[path.name].factor)]
    fastest = {name: fastest_step(path) for name, path in profile.paths.items()}
    best = min(fastest, key=lambda name: fastest[name][0] * levels[name].factor)
    fastest_ms = fastest[best][0] * levels[best].factor
    feasible = bool(tokens or batches)
    known = [level.percentile for level in levels.values()]
    stated = min((p for p in known if p is not None), default=None) if None not in known else None
    b1, b2 = _thresholds(profile, tokens_per_request)
    if feasible:
        answer, binding = _answer(sla_ms, tokens, levels)
    else:
        _, B, S = fastest[best]
        binding = f"the fastest step, {format_ms(fastest_ms)} at B={B}, S={S} on {best}, is above the SLA"
        answer = f"No step meets {format_ms(sla_ms)}: {binding}."
    return Plan(
        sla_ms=sla_ms,
        percentile=stated,
        tokens_per_request=tokens_per_request,
        B1=b1,
        B2=b2,
        T_cut=_waiting_limit(profile),
        S_at_B=tokens,
        B_at_S=batches,
        feasible=feasible,
        binding=binding,
        answer=answer,
        fastest_ms=fastest_ms,
        notes=_notes(profile, levels, percentile),
        settings=Unknown("engine settings are not derived yet; take S_at_B as the token budget of a step"),
        capacity=Unknown("needs an arrival rate and a queueing model, which this plan does not have"),
    )


def _check(profile: HardwareProfile, percentile: float, tokens_per_request: int) -> None:
    if not profile.paths:
        raise BadInput("the hardware profile has no execution path", remedy="Add one with `latfit fit trace.parquet`.")
    for path in profile.paths.values():
        if not path.fit.status.ok or not {"B", "S"} <= set(path.fit.domain):
            raise BadInput(
                f"the fit of path {path.name!r} is not usable ({path.fit.status.sentence})",
                remedy="Fit it again with `latfit fit`.",
            )
    if not 0 < percentile < 100:
        raise WrongUsage(
            f"{percentile:g} is not a percentile", where="--percentile", remedy="Give one above 0, below 100."
        )
    if tokens_per_request < 1:
        raise WrongUsage("a request has at least one token", where="--tokens-per-request", remedy="Give 1 or more.")


def _thresholds(profile: HardwareProfile, tokens_per_request: int) -> tuple[Threshold, Threshold]:
    cpu, gpu = profile.first_of(CPU_PATHS), profile.first_of(GPU_PATHS)
    if cpu is None or gpu is None:
        here = ", ".join(profile.paths)
        missing = "gpu" if gpu is None else "amx or cpu"
        reason = f"needs two execution paths; this profile has {here}, add {missing} with `latfit fit TRACE --path ...`"
        return Threshold(None, reason), Threshold(None, reason)
    return gpu_threshold(cpu, gpu, tokens_per_request), amortised_batch(gpu, tokens_per_request)


def _waiting_limit(profile: HardwareProfile) -> Unknown:
    if len(profile.paths) < 2:
        return Unknown("needs two execution paths: a request that waits too long falls back from one to the other")
    return Unknown("needs an arrival rate and a queueing model, which this plan does not have")


def _answer(sla_ms: float, tokens: list[TokenRange], levels: dict[str, Level]) -> tuple[str, str]:
    """The plan in a sentence: the largest step, and the largest decode batch if there is one."""
    finite = [row for row in tokens if row.S_max is not None]
    if not finite:
        return f"Every step meets {format_ms(sla_ms)}.", "nothing: the model has no cost that grows with tokens"
    largest = max(finite, key=lambda row: row.S_max or 0)
    level = levels[largest.path].percentile
    met_by = "the typical step" if level is None else f"{level:g} % of steps"
    extra = " (beyond the measured range)" if largest.extrapolated else ""
    answer = (
        f"Within {format_ms(sla_ms)} for {met_by}, {largest.path} computes up to {largest.S_max:,} tokens a step"
        f" (at B={largest.B}){extra}."
    )
    return (
        answer,
        f"latency of a step on {largest.path}: one token more than {largest.S_max:,} at B={largest.B} exceeds it",
    )


def rows_needed(percentile: float) -> int:
    """Rows from which a conformal limit exists at that percentile: n >= 1/(1 - level) - 1."""
    return math.ceil(round(100 / (100 - percentile) - 1, 9))


def _notes(profile: HardwareProfile, levels: dict[str, Level], asked: float) -> list[str]:
    notes = []
    for name, level in levels.items():
        if level.percentile is None:
            notes.append(f"{name}: the fit has no intervals, so the plan is for the typical step; half are slower.")
        elif level.percentile < asked:
            n = profile.paths[name].fit.metrics.get("n", 0)
            notes.append(
                f"{name}: {n:g} rows cannot tell the {asked:g}th percentile, so the plan is for the"
                f" {level.percentile:g}th; {rows_needed(asked):,} rows or more could."
            )
    return notes
