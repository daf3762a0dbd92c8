"""The plan for an SLA from a hardware profile: every part asked in turn, and the decision in a sentence.

Without a rate the SLA is one of a step: which steps meet it, from which batch the GPU pays, which settings follow.
With a rate it is one of a response, waiting included: which strategy keeps it, how long a request may wait for the GPU,
how much load fits.
"""

import math
from collections.abc import Mapping
from typing import Any

from latfit.errors import BadInput, WrongUsage
from latfit.hardware import CPU_PATHS, GPU_PATHS, ExecutionPath, HardwareProfile, PathLatency, beside_the_fit
from latfit.messages import Message, message, views
from latfit.planning import wording
from latfit.planning.engine_settings import engine_flags, engine_settings, prices_tokens
from latfit.planning.fit_quality import quality_of_path
from latfit.planning.request import PlanRequest
from latfit.planning.result import (
    FALLS_BACK,
    NEEDS_LOAD,
    NEEDS_RATE,
    Inverse,
    LoadPlan,
    Plan,
    Reach,
    Settings,
    StepPlan,
    Threshold,
    TokenRange,
    Unknown,
)
from latfit.planning.steps.limits import StepLevels, batch_ranges, fastest_step, level_for, levels_for, token_ranges
from latfit.planning.steps.thresholds import amortised_batch, gpu_threshold, knee_batch, prefill_threshold
from latfit.planning.support import above_cliffs, doubtful_steps, how_far, inherited, outside, unsupported
from latfit.planning.verdict import Verdict
from latfit.units import format_ms


def make_plan(
    profile: HardwareProfile,
    sla_ms: float,
    *,
    percentile: float = 99.0,
    tokens_per_request: int = 1,
    request: PlanRequest | None = None,
) -> Plan:
    """Decide for an SLA in ms, met by `percentile` percent of the steps, or of the responses where a rate is given.

    tokens_per_request: tokens that each request adds to a step (1: decode). A plan that nothing can meet comes back
    with feasible=False and what would make it feasible. Raises BadInput, WrongUsage.
    """
    request = request or PlanRequest()
    _check(profile, sla_ms, percentile, tokens_per_request)
    cpu, gpu = (
        None if path is None else PathLatency(path, tokens_per_request, request.context)
        for path in (profile.first_of(CPU_PATHS), profile.first_of(GPU_PATHS))
    )
    levels = {name: levels_for(path, percentile) for name, path in profile.paths.items()}
    steps, answer = _of_steps(profile, levels, (cpu, gpu), sla_ms, percentile, request)
    load = None
    if request.rate_each is not None and steps.feasible:
        from latfit.planning.load.evaluate import load_plan  # brings the compiler, which steps do without

        load = load_plan(profile, sla_ms, percentile, tokens_per_request, request)
        answer = wording.load_answer(load, sla_ms, request.replicas, tokens_per_request)
    every = list(profile.paths.values())
    reasons = unsupported(steps, load, every)
    if reasons:
        answer = f"Not supported by these data: {'; '.join(each.message for each in reasons)}. {answer}"
    messages = [*reasons, *(load.messages if load else ()), *inherited(every)]
    messages += _warnings(profile, levels, percentile, request)
    if load:
        messages += outside(every, tokens_per_request, request.context)
    if steps.doubts:
        points = ", ".join(f"B={d.B} S={d.S:,} on {d.path}" for d in steps.doubts)
        messages.append(message("steps_in_doubt", sla=sla_ms, points=points))
    of_load = [message("assumed", what=each) for each in (request.load.notes if request.load else ())]
    messages = [*_notes(profile), *messages, *of_load]
    serving = PathLatency(_serving_path(profile, load), tokens_per_request, request.context)
    settings = engine_settings(serving.path, sla_ms, percentile, request.serving, request.context)
    if isinstance(settings, Settings):
        chosen = settings.max_num_seqs, settings.max_num_batched_tokens
        messages += above_cliffs([serving.path.fit] if serving.path.nominal is None else [], *chosen)
    factor = level_for(serving.path, percentile, serving.phase).factor
    decides = steps if load is None else load
    promise: Verdict = load.promise if load is not None else "meets" if steps.feasible else "misses"
    T_cut = Unknown(FALLS_BACK if cpu is None or gpu is None else NEEDS_RATE) if load is None else load.T_cut
    quantities = {
        "capacity": Unknown(NEEDS_LOAD) if load is None else load.capacity,
        "B1_at_rate": Unknown(NEEDS_RATE) if load is None else load.B1,
        "settings": settings,
        "T_cut_ms": T_cut,
    }
    unknown = {name: each.reason for name, each in quantities.items() if isinstance(each, Unknown)}
    known: dict[str, Any] = {name: None if name in unknown else each for name, each in quantities.items()}
    return Plan(
        sla_ms=sla_ms,
        percentile=decides.percentile,
        tokens_per_request=tokens_per_request,
        feasible=decides.feasible,
        promise="likely" if reasons and promise == "meets" else promise,
        probability=None if load is None else load.probability,
        answer=answer,
        binding=decides.binding,
        remedy=decides.remedy,
        **views(messages),
        rate_per_s=None if load is None else load.rate_per_s,
        interval_ms=None if load is None else load.interval_ms,
        strategies=() if load is None else load.alternatives,
        capacity=known["capacity"],
        checked=None if load is None else load.checked,
        T_cut=known["T_cut_ms"],
        B1_idle=steps.B1,
        B1_at_rate=known["B1_at_rate"],
        B1_tokens=steps.B1_tokens,
        B2=steps.B2,
        knee=steps.knee,
        rules=() if load is None else load.rules,
        sensitivity=() if load is None else load.sensitivity,
        frontier=() if load is None else load.frontier,
        fastest_ms=steps.fastest_ms,
        inverse=Inverse(steps.S_at_B, steps.B_at_S),
        steps_in_doubt=steps.doubts,
        settings=known["settings"],
        engines=engine_flags(steps, load, settings, serving.largest_within(sla_ms, factor), sla_ms),
        engines_path=serving.path.name,
        fits=[quality_of_path(path) for path in every],
        nominal={name: path.nominal.text for name, path in profile.paths.items() if path.nominal},
        ceilings={
            name: beside_the_fit(path.ceiling, path.fit).to_json()
            for name, path in profile.paths.items()
            if path.ceiling.known
        },
        unknown=unknown,
    )


def _of_steps(
    profile: HardwareProfile,
    levels: Mapping[str, StepLevels],
    paths: tuple[PathLatency | None, PathLatency | None],
    sla_ms: float,
    percentile: float,
    request: PlanRequest,
) -> tuple[StepPlan, str]:
    """Everything that needs no rate, and its answer. paths: of the CPU and of the GPU."""
    every, context = profile.paths, request.context
    S_at_B = [row for name, path in every.items() for row in token_ranges(path, sla_ms, levels[name], context)]
    B_at_S = [row for name, path in every.items() for row in batch_ranges(path, sla_ms, levels[name], context)]
    fastest = {name: fastest_step(path, levels[name], context) for name, path in every.items()}
    best = min(fastest, key=lambda name: fastest[name][0])
    remedy = ""
    if S_at_B or B_at_S:
        answer, binding = _step_answer(sla_ms, S_at_B, levels, profile)
    else:
        ms, B, S = fastest[best]
        binding = f"the fastest step, {format_ms(ms)} at B={B}, S={S} on {best}, is above the SLA"
        answer = f"No step meets {format_ms(sla_ms)}: {binding}."
        remedy = f"Ask for at least {format_ms(ms, 4)}, or plan for a lower --percentile."
    plan = StepPlan(
        percentile=_stated(levels),
        S_at_B=S_at_B,
        B_at_S=B_at_S,
        fastest_ms=fastest[best][0],
        binding=binding,
        remedy=remedy,
        doubts=[row for path in every.values() for row in doubtful_steps(path, sla_ms, percentile)],
        **_thresholds(profile, *paths, request),
    )
    return plan, answer


def _step_answer(
    sla_ms: float, rows: list[TokenRange], levels: Mapping[str, StepLevels], profile: HardwareProfile
) -> tuple[str, str]:
    """Return the largest decode step and the largest step of all in a sentence, and what limits them."""
    largest = max((row for row in rows if row.S_max is not None), key=lambda row: row.S_max or 0, default=None)
    if largest is None:
        return f"Every step meets {format_ms(sla_ms)}.", "nothing: the model has no cost that grows with tokens"
    own, path = levels[largest.path], profile.paths[largest.path]
    level = (own.decode if largest.S_max == largest.B else own.of(largest.B)).percentile
    decode = PathLatency(path, 1).largest_within(sla_ms, own.decode.factor)
    edge = " (the most measured)" if decode == path.fit.largest_batch and not path.nominal else ""
    decodes = "" if decode is None else f" decodes up to {decode:,} requests{edge}, or"
    beyond = ", beyond the measured range" if how_far(path, largest) else ""
    answer = (
        f"Within {format_ms(sla_ms)} for {'the typical step' if level is None else f'{level:g} % of steps'},"
        f" {path.label}{decodes} computes up to {largest.S_max:,} tokens a step (at B={largest.B}{beyond})."
    )
    binding = f"latency of a step on {path.label}: one token more than {largest.S_max:,} at B={largest.B} exceeds it"
    return answer, binding


def _thresholds(
    profile: HardwareProfile, cpu: PathLatency | None, gpu: PathLatency | None, request: PlanRequest
) -> dict[str, Threshold]:
    """B1, B2, the knee and the prefill threshold, as far as the paths allow."""
    missing = Threshold(None, "", reach=Reach.UNKNOWN)
    if cpu is None or gpu is None:
        absent = "gpu" if gpu is None else "amx or cpu"
        here = f"needs two execution paths; this profile has {', '.join(profile.paths)}"
        reason = f"{here}, add {absent} with `latfit fit TRACE --path ...` or `latfit hardware add`"
        missing = Threshold(None, reason, reach=Reach.UNKNOWN)
    widest = gpu or cpu
    extra = request.transfer_ms + (request.wait_ms or 0.0)
    both = (cpu, gpu) if cpu is not None and gpu is not None else None
    return {
        "B1": missing if both is None else gpu_threshold(*both, extra_ms=extra),
        "B1_tokens": missing if both is None else prefill_threshold(both[0].path, both[1].path, extra_ms=extra),
        "B2": missing if gpu is None else amortised_batch(gpu, request.launch_share),
        "knee": missing if widest is None else knee_batch(widest),
    }


def _notes(profile: HardwareProfile) -> list[Message]:
    """What the plan takes the paths for."""
    named = {name: path.nominal.text for name, path in profile.paths.items() if path.nominal}
    found = [message("nominal", path=name, numbers=text) for name, text in named.items()]
    times = {name: str(path.fit.data.more.get("time")) for name, path in profile.paths.items()}
    found += [message(time, path=name) for name, time in times.items() if time in ("period", "compute")]
    if "amx" not in profile.paths and "gpu" in profile.paths and "cpu" in profile.paths:
        found.append(message("cpu_for_amx"))
    return found


def _warnings(
    profile: HardwareProfile, levels: Mapping[str, StepLevels], asked: float, request: PlanRequest
) -> list[Message]:
    """What the fits leave open about steps, and what to do about it."""
    found = []
    for name, level in levels.items():
        path = profile.paths[name]
        if path.nominal is not None:
            pass
        elif level.percentile is None:
            found.append(message("no_intervals", path=name))
        elif level.extrapolated:
            by_kind, rows = level.extrapolated, math.ceil(round(100 / (100 - asked) - 1, 9))
            start = " and ".join(f"p{value:g} of steps {kind}" for kind, value in by_kind.items())
            if len(set(by_kind.values())) == 1:
                start = f"p{next(iter(by_kind.values())):g}"
            found.append(message("too_few_samples", path=name, percentile=asked, start=start, wanted=rows))
        if request.context is None and path.fit.assumed_context:
            found.append(message("assumed_context", path=name, assumed=path.fit.assumed_context))
        if not path.fit.knows_prefill and not path.nominal:
            found.append(message("no_prefill", path=name))
    return found


def _serving_path(profile: HardwareProfile, load: LoadPlan | None) -> ExecutionPath:
    """Return the path whose engine settings are given: the one that the load is served on; without a load the GPU, or
    another that was measured where the GPU's numbers are nominal and name no cost of a token."""
    every, chosen = list(profile.paths.values()), None if load is None else load.chosen
    if chosen is not None:
        return next(path for path in every if path.label == chosen.strategy.paths[0])
    ranked = [path for path in (profile.first_of(GPU_PATHS), profile.first_of(CPU_PATHS), *every) if path is not None]
    return next((path for path in ranked if prices_tokens(path)), ranked[0])


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
