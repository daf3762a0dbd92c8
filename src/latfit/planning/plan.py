"""The plan for an SLA of steps, or with a rate of responses, from a hardware profile."""

import math
from collections.abc import Mapping

from msgspec import structs

from latfit.errors import BadInput, WrongUsage
from latfit.hardware import CPU_PATHS, GPU_PATHS, ExecutionPath, HardwareProfile, PathLatency, beside_the_fit
from latfit.messages import Message, message, note, views
from latfit.planning.engine_settings import engine_flags, engine_settings, prices_tokens
from latfit.planning.fit_quality import quality_of_path
from latfit.planning.request import PlanOptions
from latfit.planning.result import (
    FALLS_BACK,
    NEEDS_LOAD,
    NEEDS_RATE,
    Inverse,
    Plan,
    Reach,
    Settings,
    Threshold,
    TokenRange,
)
from latfit.planning.steps.limits import StepLevels, batch_ranges, fastest_step, level_for, levels_for, token_ranges
from latfit.planning.steps.thresholds import amortised_batch, gpu_threshold, knee_batch, prefill_threshold
from latfit.planning.support import above_cliffs, doubtful_steps, how_far, inherited, why_unsupported
from latfit.units import count_text, format_ms


def make_plan(
    profile: HardwareProfile,
    sla_ms: float,
    *,
    percentile: float = 99.0,
    tokens_per_request: int = 1,
    request: PlanOptions | None = None,
) -> Plan:
    """Decide for an SLA in ms, met by `percentile` percent of the steps, or of the responses.

    tokens_per_request: tokens that a request adds to a step. Raises BadInput, WrongUsage.
    """
    request = request or PlanOptions()
    _check(profile, sla_ms, percentile, tokens_per_request)
    levels = {name: levels_for(path, percentile) for name, path in profile.paths.items()}
    plan = _plan_steps(profile, levels, sla_ms, percentile, tokens_per_request, request)
    messages: list[Message] = []
    if request.rate_each is not None and plan.feasible:
        from latfit.planning.load.evaluate import LoadPlanner  # brings the compiler, which steps do without
        from latfit.planning.load.strategies import Target, machine_of

        target = Target(sla_ms, percentile / 100, tokens_per_request)
        machine = machine_of(profile, tokens_per_request, request)
        plan, messages = LoadPlanner(machine, request.rate_each, target, request).plan(plan)
    every = list(profile.paths.values())
    reasons = [reason for path in every for reason in why_unsupported(plan, path)]
    messages = [*reasons, *messages, *inherited(every), *_path_messages(profile, levels, percentile, request)]
    if plan.rate_per_s is not None:
        latencies = [PathLatency(path, tokens_per_request, request.context) for path in every]
        messages += [message("outside_measured", what=each.outside) for each in latencies if each.outside]
    if plan.steps_in_doubt:
        points = ", ".join(f"B={d.B} S={d.S:,} on {d.path}" for d in plan.steps_in_doubt)
        messages.append(message("steps_in_doubt", sla=sla_ms, points=points))
    messages += [note(each) for each in (request.load.notes if request.load else ())]
    serving = PathLatency(_serving_path(profile, plan), tokens_per_request, request.context)
    max_batch = None if serving.path.name in CPU_PATHS else request.max_batch
    settings = engine_settings(serving.path, sla_ms, percentile, request, max_batch)
    unknown = dict(plan.unknown)
    if isinstance(settings, Settings):
        limits = settings.max_num_seqs, settings.max_num_batched_tokens
        messages += above_cliffs([serving.path.fit] if serving.path.nominal is None else [], *limits)
    else:
        unknown["settings"] = settings.reason
    largest = serving.largest_within(sla_ms, level_for(serving.path, percentile, serving.phase).at(serving.batches))
    why = f"Not supported by these data: {'; '.join(each.message for each in reasons)}. " if reasons else ""
    return structs.replace(
        plan,
        promise="likely" if reasons and plan.promise == "meets" else plan.promise,
        answer=f"{why}{plan.answer}",
        **views(messages),
        settings=settings if isinstance(settings, Settings) else None,
        engines=engine_flags(plan, settings, largest and min(largest, max_batch or largest)),
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


def _plan_steps(
    profile: HardwareProfile,
    levels: Mapping[str, StepLevels],
    sla_ms: float,
    percentile: float,
    tokens: int,
    request: PlanOptions,
) -> Plan:
    every, context = profile.paths, request.context
    cpu, gpu = (
        None if path is None else PathLatency(path, tokens, context)
        for path in (profile.first_of(CPU_PATHS), profile.first_of(GPU_PATHS))
    )
    S_at_B = [row for name, path in every.items() for row in token_ranges(path, sla_ms, levels[name], context)]
    B_at_S = [row for name, path in every.items() for row in batch_ranges(path, sla_ms, levels[name], context)]
    (ms, B, S), best = min((fastest_step(path, levels[name], context), name) for name, path in every.items())
    feasible, remedy = bool(S_at_B or B_at_S), ""
    if feasible:
        answer, binding = _step_answer(sla_ms, S_at_B, levels, profile)
    else:
        binding = f"the fastest step, {format_ms(ms)} at B={B}, S={S} on {best}, is above the SLA"
        answer = f"No step meets {format_ms(sla_ms)}: {binding}."
        remedy = f"Ask for at least {format_ms(ms, 4)}, or plan for a lower --percentile."
    absent, extra_ms = "gpu" if gpu is None else "amx or cpu", request.transfer_ms + (request.wait_ms or 0.0)
    here = f"needs two execution paths; this profile has {', '.join(every)}"
    how = f"add {absent} with `latfit fit TRACE --path ...` or `latfit hardware add`"
    missing = Threshold(None, f"{here}, {how}", reach=Reach.UNKNOWN)
    stated = [level.percentile for level in levels.values()]
    return Plan(
        sla_ms=sla_ms,
        percentile=None if None in stated else min(each for each in stated if each is not None),
        tokens_per_request=tokens,
        feasible=feasible,
        promise="meets" if feasible else "misses",
        answer=answer,
        binding=binding,
        remedy=remedy,
        fastest_ms=ms,
        inverse=Inverse(S_at_B, B_at_S),
        steps_in_doubt=[row for path in every.values() for row in doubtful_steps(path, sla_ms, percentile)],
        unknown={
            "capacity": NEEDS_LOAD,
            "B1_at_rate": NEEDS_RATE,
            "T_cut_ms": FALLS_BACK if cpu is None or gpu is None else NEEDS_RATE,
        },
        B1_idle=gpu_threshold(cpu, gpu, extra_ms=extra_ms) if cpu and gpu else missing,
        B1_tokens=prefill_threshold(cpu.path, gpu.path, extra_ms=extra_ms) if cpu and gpu else missing,
        B2=amortised_batch(gpu) if gpu else missing,
        knee=knee_batch(widest) if (widest := gpu or cpu) else missing,
    )


def _step_answer(
    sla_ms: float, rows: list[TokenRange], levels: Mapping[str, StepLevels], profile: HardwareProfile
) -> tuple[str, str]:
    largest = max((row for row in rows if row.S_max is not None), key=lambda row: row.S_max or 0, default=None)
    if largest is None:
        return f"Every step meets {format_ms(sla_ms)}.", "nothing: the model has no cost that grows with tokens"
    own, path = levels[largest.path], profile.paths[largest.path]
    level = (own.decode if largest.S_max == largest.B else own.of(largest.B)).percentile
    batches = PathLatency(path, 1)
    decode = batches.largest_within(sla_ms, own.decode.at(batches.batches))
    edge = " (the most measured)" if decode == path.fit.largest_batch and not path.nominal else ""
    does = [] if decode is None else [f"decodes up to {count_text(decode, 'request')}{edge}"]
    if not does or largest.S_max != largest.B:
        beyond = ", beyond the measured range" if how_far(path, largest) else ""
        tokens = count_text(largest.S_max or 0, "token")
        does.append(f"computes up to {tokens} a step (at B={largest.B}{beyond})")
    share = "the typical step" if level is None else f"{level:g} % of steps"
    answer = f"Within {format_ms(sla_ms)} for {share}, {path.label} {', or '.join(does)}."
    binding = f"latency of a step on {path.label}: one token more than {largest.S_max:,} at B={largest.B} exceeds it"
    return answer, binding


def _path_messages(
    profile: HardwareProfile, levels: Mapping[str, StepLevels], percentile: float, request: PlanOptions
) -> list[Message]:
    found = []
    for name, path in profile.paths.items():
        level, time = levels[name], str(path.fit.data.more.get("time"))
        if path.nominal:
            found.append(message("nominal", path=name, numbers=path.nominal.text))
        elif level.percentile is None:
            found.append(message("no_intervals", path=name))
        elif level.measured is not None:
            wanted, start = math.ceil(round(100 / (100 - percentile) - 1, 9)), f"p{level.measured:g}"
            found.append(message("too_few_samples", path=name, percentile=percentile, start=start, wanted=wanted))
        if time in ("period", "compute"):
            found.append(message(time, path=name))
        if request.context is None and path.fit.assumed_context:
            found.append(message("assumed_context", path=name, assumed=path.fit.assumed_context))
        if not path.fit.knows_prefill and not path.nominal:
            found.append(message("no_prefill", path=name))
    if "amx" not in profile.paths and {"gpu", "cpu"} <= set(profile.paths):
        found.append(message("cpu_for_amx"))
    return found


def _serving_path(profile: HardwareProfile, plan: Plan) -> ExecutionPath:
    """Return the path that serves the load; without a load the GPU, if its cost per token is known."""
    every = list(profile.paths.values())
    if plan.chosen is not None:
        return next(path for path in every if path.label == plan.chosen.paths[0])
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
    if not (math.isfinite(sla_ms) and sla_ms > 0):
        raise WrongUsage(f"an SLA of {sla_ms:g} ms", where="--sla", remedy="Give one above zero.")
    if tokens < 1:
        raise WrongUsage("a request has at least one token", where="--tokens-per-request", remedy="Give 1 or more.")
    measured = {name: path.fit.domain["S"][1] for name, path in profile.paths.items()}
    if tokens > min(measured.values()):
        tops = ", ".join(f"{name} up to {int(top):,}" for name, top in measured.items() if tokens > top)
        raise BadInput(
            f"requests of {tokens:,} tokens are outside what was measured ({tops} tokens a step)",
            where="--tokens-per-request",
            remedy="Measure steps of that size and fit them, or plan for fewer tokens.",
        )
