"""The plan for an SLA from a hardware profile: every part asked in turn, and the decision in a sentence.

Without a rate the SLA is one of a step: which steps meet it, from which batch the GPU pays, which settings follow.
With a rate it is one of a response, waiting included: which way to run the load keeps it, how long a request may wait
for the GPU, how much load fits.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from latfit.errors import BadInput, WrongUsage
from latfit.hardware import CPU_PATHS, GPU_PATHS, ExecutionPath, HardwareProfile, beside_the_fit
from latfit.planning import wording
from latfit.planning.engine_settings import engine_flags, engine_settings, largest_batch
from latfit.planning.load.evaluate import with_load
from latfit.planning.request import Wishes
from latfit.planning.result import Doubt, Plan, Settings, Threshold, Unknown
from latfit.planning.steps.limits import StepLevels, batch_ranges, fastest_step, levels_for, token_ranges
from latfit.planning.steps.thresholds import amortised_batch, gpu_threshold, knee_batch, prefill_threshold
from latfit.planning.support import doubtful_steps, inherited, unsupported
from latfit.units import format_ms


@dataclass(frozen=True)
class _Paths:
    cpu: ExecutionPath | None
    gpu: ExecutionPath | None
    missing: str


def make_plan(
    profile: HardwareProfile,
    sla_ms: float,
    *,
    percentile: float = 99.0,
    tokens_per_request: int = 1,
    wishes: Wishes | None = None,
) -> Plan:
    """Decide for an SLA in ms, met by `percentile` percent of the steps, or of the responses where a rate is given.

    tokens_per_request: tokens that each request adds to a step (1: decode). A plan that nothing can meet comes back
    with feasible=False and what would make it feasible. Raises BadInput, WrongUsage.
    """
    wishes = wishes or Wishes()
    _check(profile, sla_ms, percentile, tokens_per_request)
    plan = _of_steps(profile, sla_ms, percentile, tokens_per_request, wishes)
    if wishes.rate_each is not None and plan.feasible:
        plan = with_load(plan, profile, percentile, wishes)
    path = _serving(_parts(profile), profile)
    largest = largest_batch(path, sla_ms, percentile, tokens_per_request, wishes.context)
    return _supported(replace(plan, engines=engine_flags(plan, largest)), profile)


def _supported(plan: Plan, profile: HardwareProfile) -> Plan:
    """The plan with what the fits warn of, and with a first word where that decides."""
    paths = list(profile.paths.values())
    reasons = unsupported(plan, paths)
    plan = replace(plan, notes=[*plan.notes, *inherited(paths)], unsupported=reasons)
    if not reasons:
        return plan
    promise = "in doubt" if plan.promise == "yes" else plan.promise
    return replace(plan, promise=promise, answer=f"Not supported by these data: {'; '.join(reasons)}. {plan.answer}")


def _of_steps(profile: HardwareProfile, sla_ms: float, percentile: float, tokens: int, wishes: Wishes) -> Plan:
    """Everything that needs no rate."""
    paths, context = profile.paths, wishes.context
    levels = {name: levels_for(path, percentile) for name, path in paths.items()}
    S_at_B = [row for name, path in paths.items() for row in token_ranges(path, sla_ms, levels[name], context)]
    B_at_S = [row for name, path in paths.items() for row in batch_ranges(path, sla_ms, levels[name], context)]
    fastest = {name: fastest_step(path, levels[name], context) for name, path in paths.items()}
    best = min(fastest, key=lambda name: fastest[name][0])
    fastest_ms = fastest[best][0]
    feasible = bool(S_at_B or B_at_S)
    remedy = ""
    if feasible:
        answer, binding = wording.step_answer(sla_ms, S_at_B, levels, profile)
    else:
        _, B, S = fastest[best]
        binding = f"the fastest step, {format_ms(fastest_ms)} at B={B}, S={S} on {best}, is above the SLA"
        answer = f"No step meets {format_ms(sla_ms)}: {binding}."
        remedy = f"Ask for at least {format_ms(fastest_ms, 4)}, or plan for a lower --percentile."
    parts = _parts(profile)
    doubts = [row for path in profile.paths.values() for row in doubtful_steps(path, sla_ms, percentile)]
    plan = Plan(
        sla_ms=sla_ms,
        percentile=_stated(levels),
        tokens_per_request=tokens,
        B1=Threshold(None, parts.missing),
        B2=Threshold(None, parts.missing),
        T_cut=_waiting(profile),
        S_at_B=S_at_B,
        B_at_S=B_at_S,
        feasible=feasible,
        binding=binding,
        answer=answer,
        fastest_ms=fastest_ms,
        notes=[*wording.notes(profile, levels, percentile, wishes), *_doubted(doubts, sla_ms)],
        settings=_settings(parts, profile, sla_ms, percentile, wishes),
        capacity=Unknown("needs an arrival rate: --rate, or a recorded load: --arrivals"),
        remedy=remedy,
        doubts=doubts,
        quoted={name: path.quote.text for name, path in profile.paths.items() if path.quote},
        ceilings=_ceilings(profile),
    )
    return _with_thresholds(plan, parts, wishes)


def _with_thresholds(plan: Plan, paths: _Paths, wishes: Wishes) -> Plan:
    """B1, B2, the knee and the prefill threshold, as far as the paths allow."""
    tokens = plan.tokens_per_request
    widest = paths.gpu or paths.cpu
    if widest is not None:
        plan = replace(plan, knee=knee_batch(widest, tokens, wishes.context))
    if paths.gpu is not None:
        plan = replace(plan, B2=amortised_batch(paths.gpu, tokens, wishes.launch_share, wishes.context))
    if paths.cpu is None or paths.gpu is None:
        return plan
    extra = wishes.transfer_ms + (wishes.wait_ms or 0.0)
    return replace(
        plan,
        B1=gpu_threshold(paths.cpu, paths.gpu, tokens, extra_ms=extra, context=wishes.context),
        B1_tokens=prefill_threshold(paths.cpu, paths.gpu, extra_ms=extra),
    )


def _check(profile: HardwareProfile, sla_ms: float, percentile: float, tokens: int) -> None:
    if not profile.paths:
        raise BadInput("the hardware profile has no execution path", remedy="Add one with `latfit fit trace.parquet`.")
    for path in profile.paths.values():
        if not path.fit.status.ok or not {"B", "S"} <= set(path.fit.domain):
            raise BadInput(
                f"the fit of path {path.name!r} is not usable ({path.fit.status.sentence})",
                remedy="Fit it again with `latfit fit`.",
            )
    if 0 < percentile < 1:
        meant = f"{100 * percentile:g}"
        raise WrongUsage(
            f"{percentile:g} % of them, next to none", where="--percentile", remedy=f"Was --percentile {meant} meant?"
        )
    if not 0 < percentile < 100:
        raise WrongUsage(
            f"{percentile:g} is not a percentile", where="--percentile", remedy="Give one above 0, below 100."
        )
    if not (math.isfinite(sla_ms) and sla_ms > 0):
        raise WrongUsage(f"an SLA of {sla_ms:g} ms", where="--sla", remedy="Give one above zero.")
    if tokens < 1:
        raise WrongUsage("a request has at least one token", where="--tokens-per-request", remedy="Give 1 or more.")
    outside = {
        name: path.fit.domain["S"][1] for name, path in profile.paths.items() if tokens > path.fit.domain["S"][1]
    }
    if outside:
        known = ", ".join(f"{name} up to {int(top):,}" for name, top in outside.items())
        raise BadInput(
            f"requests of {tokens:,} tokens are outside what was measured ({known} tokens a step)",
            where="--tokens-per-request",
            remedy="Measure steps of that size and fit them, or plan for fewer tokens.",
        )


def _stated(levels: Mapping[str, StepLevels]) -> float | None:
    """The percentile that every path can give; None where one only knows its typical step."""
    known = [level.percentile for level in levels.values()]
    return None if None in known else min(p for p in known if p is not None)


def _parts(profile: HardwareProfile) -> _Paths:
    cpu, gpu = profile.first_of(CPU_PATHS), profile.first_of(GPU_PATHS)
    if cpu is not None and gpu is not None:
        return _Paths(cpu, gpu, "")
    here = ", ".join(profile.paths)
    absent = "gpu" if gpu is None else "amx or cpu"
    reason = (
        f"needs two execution paths; this profile has {here}, add {absent} with `latfit fit TRACE --path ...` or"
        " `latfit hardware add`"
    )
    return _Paths(cpu, gpu, reason)


def _waiting(profile: HardwareProfile) -> Unknown:
    if profile.first_of(CPU_PATHS) is None or profile.first_of(GPU_PATHS) is None:
        return Unknown("needs two execution paths: a request that waits too long falls back from the GPU to the CPU")
    return Unknown("needs an arrival rate: --rate")


def _settings(
    paths: _Paths, profile: HardwareProfile, sla_ms: float, percentile: float, wishes: Wishes
) -> Unknown | Settings:
    """Settings of the path that serves."""
    return engine_settings(_serving(paths, profile), sla_ms, percentile, wishes.serving, wishes.context)


def _serving(paths: _Paths, profile: HardwareProfile) -> ExecutionPath:
    """The path whose settings are given: the GPU where there is one."""
    return paths.gpu or paths.cpu or next(iter(profile.paths.values()))


def _ceilings(profile: HardwareProfile) -> dict[str, dict[str, float | None]]:
    return {
        name: beside_the_fit(path.ceiling, path.fit).to_json()
        for name, path in profile.paths.items()
        if path.ceiling.known
    }


def _doubted(doubts: list[Doubt], sla_ms: float) -> list[str]:
    if not doubts:
        return []
    points = ", ".join(f"B={d.B} S={d.S:,} on {d.path}" for d in doubts)
    return [f"Cannot promise {format_ms(sla_ms)} near the boundary; measure these points: {points}."]
