"""`plan_serving`: the fewest engines and settings that meet the targets, and what else they would do."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs

from latfit.fitting import keeps_out
from latfit.messages import Message, Severity, message, note, views
from latfit.model import FitResult
from latfit.planning.fit_quality import quality_of
from latfit.planning.serving.apart import MOST_APART, Pairs, PrefillApart
from latfit.planning.serving.effects import effects_of, front, max_step_slowdown
from latfit.planning.serving.evaluate import (
    SAMPLED,
    TOGETHER,
    Evaluator,
    Lengths,
    Measured,
    draw_lengths,
    requests_for,
)
from latfit.planning.serving.few import warn_of_few_requests
from latfit.planning.serving.result import (
    ApartPlan,
    Cost,
    OperatingStates,
    ReplicaCount,
    ServingPlan,
    Work,
    probability_of,
    settings_of,
)
from latfit.planning.serving.schedule import day_of, schedule_engines
from latfit.planning.serving.search import Found, Search, SearchSpace
from latfit.planning.serving.stalls import stalls_of
from latfit.planning.serving.states import operating_states
from latfit.planning.serving.targets import Targets
from latfit.planning.support import above_cliffs
from latfit.planning.verdict import verdict_of
from latfit.planning.wording import MIN_PAUSES_AS_MEASURED, few_pauses, unclear_pauses
from latfit.simulation import EngineSettings, EngineSummary, StepCosts
from latfit.stats import IntArray
from latfit.units import count_text, format_ms, format_percent, format_rate, number
from latfit.validation import far_context_warning, outside_warning
from latfit.workload import ClosedLoad, Load, RecordedLoad

HOUR_S = 3600.0
MILLION = 1e6
FEW_TOKENS = 100

FITS_WARN = (
    "from_catalog",
    "large_error",
    "no_better_than_constant",
    "line_as_good",
    "drift",
    "no_prefill",
    "window_means",
)
"""Warnings of a fit that a plan repeats."""


@dataclass(frozen=True)
class ServingRequest:
    """What is planned.

    start, fixed: settings that the search begins with, and names of those that stay. kv: source of the size of the KV
    cache; empty: unlimited. start_up_ms: of a schedule of engines. nominal: fits of nominal numbers.
    """

    targets: Targets
    start: EngineSettings
    fixed: frozenset[str] = frozenset()
    kv: str = ""
    replicas: int | None = None
    route: str = "round-robin"
    seed: int = 0
    price_per_hour: float | None = None
    watts: float | None = None
    tensor_parallel: int | None = None
    start_up_ms: float | None = None
    window_ms: float = 1_800_000.0
    nominal: Sequence[FitResult] = ()


def plan_serving(
    load: Load,
    costs: StepCosts,
    fits: Mapping[str, FitResult],
    request: ServingRequest,
    tick: Callable[[int], None] = lambda count: None,
    apart: PrefillApart | None = None,
) -> ServingPlan:
    """Search for the fewest engines and their settings.

    fits: what the step costs are made of, by name. apart: costs of engines that prefill for others, if tried. Raises
    BadInput for a request that is larger than the KV cache.
    """
    evaluator = Evaluator(load, costs, request.targets, request.route, request.seed, tick)
    evaluator.alone_ms = evaluator.alone(request.start).summary.latency["mean"].value
    evaluator.requests = requests_for(load, evaluator.alone_ms)
    every, lengths = list(fits.values()), draw_lengths(load)
    space = search_space(load, every or request.nominal, request.fixed)
    found = Search(evaluator, request.start, space, replicas=request.replicas).run()
    shown = found.best or found.alone
    setup, settings, met = shown.setup, shown.setup.settings, found.best is not None and found.best.met
    states = operating_states(evaluator, settings, setup.replicas, every)
    messages = [*_fit_messages(fits, shown, lengths[0]), *_two_states(states)]
    if every and space.most_requests <= 1 and "max_num_seqs" not in request.fixed:
        remedy = "Measure steps of several requests, or plan with --set max_num_seqs=1."
        messages.append(message("outside_domain", what="All measured steps hold one request", remedy=remedy))
    messages += above_cliffs(every, settings.max_num_seqs, settings.max_num_batched_tokens)
    messages += _load_messages(evaluator, shown) if met else []
    messages += [note(each) for each in _notes(load, request, space, shown)]
    contents = isinstance(load, RecordedLoad) and load.requests.prefix is not None and request.start.prefix_cache
    rate = shown.summary.throughput_per_s if isinstance(load, ClosedLoad) else load.rate * 1e3
    quality = [quality_of(name, fit) for name, fit in fits.items()]
    slower_pct, stalls, schedule = None, None, None
    if met:
        slower_pct = 100 * (max_step_slowdown(evaluator, shown, found.capacity) - 1)
        stalls = stalls_of(
            costs,
            settings,
            lengths,
            shown.summary.batch_size["p99"],
            space.most_tokens,
            lambda each: evaluator.saturated(each).output_tokens_per_s,
            every[-1] if every else None,
        )
        if request.start_up_ms is not None and isinstance(load, RecordedLoad):
            day = day_of(load, request.window_ms, request.start_up_ms)
            schedule = schedule_engines(evaluator, shown, day, request.price_per_hour)
    probability = probability_of(shown.reached, slower_pct, quality)
    # Means of windows do not show the noise of steps.
    doubted = any(
        each.severity in (Severity.UNSUPPORTED, Severity.DOUBT) or each.code == "window_means" for each in messages
    )
    by_severity = views(messages)
    throughput_per_s = setup.replicas * evaluator.saturated(settings).requests_per_s
    loads = (found.carries, found.capacity, found.missed_from)
    carries, capacity, missed_from = (None if math.isnan(each) else each * rate for each in loads)
    return ServingPlan(
        request=describe_request(load, lengths),
        rate_per_s=rate,
        users=load.users if isinstance(load, ClosedLoad) else None,
        feasible=met,
        promise=verdict_of(met=met, probability=probability, doubted=doubted),
        probability=probability if met else None,
        binding=_binding(found, shown),
        targets=list(shown.reached),
        replicas=ReplicaCount(
            setup.replicas if met else None,
            setup.replicas if found.best is not None else None,
            list(found.fewer.reached) if found.fewer else [],
            found.fewer is not None and not found.fewer.carried,
            found.usual,
        ),
        tensor_parallel=request.tensor_parallel,
        route=request.route,
        kv_cache=request.kv or None,
        carries=None if carries is None else found.carries,
        highest_rate_per_s=carries,
        missed_from_rate_per_s=missed_from,
        capacity_per_s=capacity,
        capacity_interval_per_s=None if carries is None or missed_from is None else (carries, missed_from),
        steps_may_be_slower_pct=slower_pct,
        share_of_throughput_used=rate / throughput_per_s,
        outcome=found.best.summary if found.best is not None else None,
        distributions_ms=found.best.distributions_ms if found.best is not None else {},
        effects=effects_of(evaluator, shown, cache=bool(request.kv), replicas=request.replicas is None) if met else [],
        pareto=front(evaluator, settings, space) if met else [],
        states=states,
        stalls=stalls,
        fits=quality,
        cost=_cost(request, shown),
        prefill_apart=None
        if apart is None
        else _plan_apart(evaluator, apart, found, space, request, contents=contents),
        schedule=schedule,
        simulated=Work(evaluator.work["setups"], evaluator.work["steps"], len(shown.first.requests)),
        seed=request.seed,
        warnings=[each for each in messages if each.severity in (Severity.DOUBT, Severity.WARNING)],
        unsupported=by_severity["unsupported"],
        notes=by_severity["notes"],
        **(settings_of(settings, contents=contents) if met else {"engine": None}),
    )


def _plan_apart(
    evaluator: Evaluator,
    apart: PrefillApart,
    found: Found,
    space: SearchSpace,
    request: ServingRequest,
    *,
    contents: bool,
) -> ApartPlan | None:
    together = found.best.setup.replicas if found.best is not None and found.best.met else None
    if (together or 0) > MOST_APART:
        return None
    other = replace(evaluator, costs=apart.decode, apart=(apart.prefill, apart.transfer))
    starts = ((found.best or found.alone).setup.settings, request.start)
    best = Pairs(other, space, together, contents).run(starts, apart.transfer)
    if request.price_per_hour is None or best.outcome is None:
        return best
    price = _per_million(request.price_per_hour * best.total, best.outcome)
    return structs.replace(best, price_per_million_tokens=price)


def search_space(load: Load, fits: Sequence[FitResult], fixed: frozenset[str]) -> SearchSpace:
    most = {name: max((fit.domain[name][1] for fit in fits), default=math.inf) for name in ("B", "S")}
    classes = not isinstance(load, RecordedLoad) and len(load.classes) > 1
    prompt, output = draw_lengths(load)
    return SearchSpace(fixed, most["B"], most["S"], int(prompt.max()), int((prompt + output).max()), classes)


def describe_request(load: Load, lengths: Lengths) -> str:
    means = [float(each.mean()) for each in lengths]
    prompt, output = (number(mean, 3) if mean < FEW_TOKENS else f"{mean:,.0f}" for mean in means)
    if isinstance(load, RecordedLoad):
        return f"{len(load.requests):,} recorded requests, mean {prompt} prompt and {output} output tokens"
    mean = "" if all(int(each.min()) == int(each.max()) for each in lengths) else "mean "
    return f"a request is {mean}{prompt} prompt and {output} output tokens"


def _binding(found: Found, shown: Measured) -> str:
    if found.best is None:
        alone = f"a request alone has {shown.tightest.outcome}"
        return "no number of engines meets the targets" if found.alone.met else alone
    if not shown.carried:
        return "the load is more than the engines serve"
    return ", ".join(each.outcome for each in shown.reached if not each.met) or shown.tightest.name


def _fit_messages(named: Mapping[str, FitResult], shown: Measured, prompts: IntArray) -> list[Message]:
    fits, settings = list(named.values()), shown.setup.settings
    found = [message("kept_out", fit=name, why=why.message) for name, fit in named.items() if (why := keeps_out(fit))]
    if fits and (outside := outside_warning(fits, shown.first, settings)) is not None:
        found.append(message("outside_domain", what=outside.message, remedy=outside.remedy))
    if (far := far_context_warning(fits, shown.first)) is not None:
        found.append(far)
    # Where prefill has a fit of its own, the other one is of decode steps on purpose.
    codes = [code for code in FITS_WARN if len(fits) < 2 or code != "no_prefill"]
    found += [each for fit in fits for each in fit.warnings if each.code in codes]
    for fit in fits:
        shortest = float(fit.latency_ms(np.ones(1), np.ones(1))[0])
        for phase, limits in fit.limits.by_phase.items():
            if limits.ratios is None:
                continue
            if few := few_pauses(f"{phase} steps", limits.ratios, shortest, MIN_PAUSES_AS_MEASURED):
                found.append(message("few_pauses", what=few))
            else:
                found += unclear_pauses(f"{phase} steps", limits.ratios.pauses)
    longest = int(prompts.max())
    measured = max((fit.domain.get("prefill_context_tokens", (0.0, 0.0))[1] for fit in fits), default=math.inf)
    if longest - settings.max_num_batched_tokens > max(measured, 0):
        first = f"first {measured:,.0f} tokens" if measured > 0 else "first one"
        found.append(message("long_prompts", longest=longest, chunks=f"chunks after the {first}"))
    return found


def _load_messages(evaluator: Evaluator, best: Measured) -> list[Message]:
    found = warn_of_few_requests(evaluator, best)
    if (wide := next((each for each in best.reached if not each.precise), None)) is not None:
        ends = f"{wide.name} is {format_ms(wide.low)} to {format_ms(wide.high)}"
        found.append(message("wide_interval", widest=ends, runs=best.summary.replications))
    return found


def _two_states(states: OperatingStates | None) -> list[Message]:
    if states is None or not states.confirmed:
        return []
    stable = [each for each in states.points if each.stable]
    fast, slow = (
        f"{count_text(round(each.batch), 'request')} at once at {format_ms(each.tpot_ms)} a token"
        for each in (stable[0], stable[-1])
    )
    slow += ", with a queue that grows" if stable[-1].overloaded else ""
    rate = format_rate(states.from_rate_per_s or 0.0)
    return [message("two_states", fast=fast, slow=slow, rate=rate, limit=states.max_num_seqs)]


def _cost(request: ServingRequest, shown: Measured) -> Cost:
    count, watts = shown.setup.replicas, request.watts
    price = None if request.price_per_hour is None else request.price_per_hour * count
    return Cost(
        price,
        None if price is None else _per_million(price, shown.summary),
        None if watts is None else _per_million(watts * count / 1e3, shown.summary),
    )


def _per_million(per_hour: float, summary: EngineSummary) -> float:
    return MILLION * per_hour / (summary.output_tokens_per_s * HOUR_S)


def _notes(load: Load, request: ServingRequest, space: SearchSpace, shown: Measured) -> list[str]:
    found = [f"KV cache: {request.kv}."] if request.kv else []
    settings, batch = shown.setup.settings, shown.summary.batch_size["p99"]
    limits = [
        ("max_num_seqs", space.most_requests, "request", batch),
        ("max_num_batched_tokens", space.most_tokens, "token", settings.max_num_batched_tokens),
    ]
    limits = [each for each in limits if each[0] not in space.fixed and math.isfinite(each[1])]
    if limits:
        steps = "nominal" if request.nominal else "measured"
        most = ", ".join(count_text(round(top), unit) for _, top, unit, _ in limits)
        near = [(name, "limited by" if used <= top else "above") for name, top, _, used in limits if used > top / 2]
        edge = "".join(f" {name} is {how} them." for name, how in near)
        found.append(f"Settings up to the {steps} steps were tried: {most}.{edge}")
    if settings.batching == "continuous" and "batching" not in request.fixed:
        most = f"{settings.max_num_batched_tokens:,} tokens"
        found.append(f"Engines carry more here without chunked prefill; a request may have up to {most}.")
    if isinstance(load, RecordedLoad):
        found.append("Recorded arrivals are one course of events: intervals are those of the steps' noise.")
        if load.requests.prefix is not None and request.start.prefix_cache:
            hits = format_percent(100 * shown.summary.prefix_hit_rate)
            found.append(f"Prefix caches are empty at the start; {hits} of prompt tokens were found in them.")
    elif shown.setup.replicas > TOGETHER:
        count = SAMPLED if request.route == "round-robin" else TOGETHER
        found.append(f"{count} of the replicas are simulated, with the requests that they get.")
    return found
