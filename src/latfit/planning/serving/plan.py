"""`plan_serving`: how many engines, with which settings, keep what requests are promised; what else they would do."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from latfit.fitting import keeps_out
from latfit.messages import Message, Severity, message, views
from latfit.model import FitResult
from latfit.planning.fit_quality import quality_of
from latfit.planning.serving.apart import MOST_APART, Pairs, PrefillApart
from latfit.planning.serving.effects import bears, effects_of, front
from latfit.planning.serving.evaluate import (
    SAMPLED,
    TOGETHER,
    Evaluator,
    Measured,
    lengths_of,
    requests_for,
)
from latfit.planning.serving.few import few_requests
from latfit.planning.serving.result import (
    ApartPlan,
    Cost,
    OperatingStates,
    Reached,
    ReplicaCount,
    SchedulePlan,
    ServingPlan,
    Stalls,
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
from latfit.validation import outside_warning
from latfit.workload import ClosedLoad, Load, RecordedLoad

HOUR_S = 3600.0
MILLION = 1e6
FEW_TOKENS = 100
DRAWN = 10_000
"""Requests whose lengths tell those of all."""

FITS_WARN = (
    "from_catalog",
    "large_error",
    "no_better_than_constant",
    "line_as_good",
    "drift",
    "decode_only",
    "window_means",
)
"""Warnings of a fit that a plan repeats."""


@dataclass(frozen=True)
class ServingRequest:
    """What is planned. start: the settings that the search begins with, those of `fixed` stay.  kv: where the size of
    the KV cache comes from; empty where it is not known and taken as unlimited.  replicas: that are there, None to
    find their number.  price_per_hour, watts: of one replica.  tensor_parallel: GPUs that a replica takes, where it was
    said.  start_up_ms, window_ms: of a schedule of engines for recorded requests, None for none.  nominal: numbers that
    the step costs are from, where nothing was measured."""

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
    """Search for the least engines and their settings. fits: what the step costs are made of, by name.  apart: what
    engines that prefill for others cost, where such are to be tried.

    Raises BadInput for a request that is larger than the KV cache.
    """
    evaluator = Evaluator(load, costs, request.targets, request.route, request.seed, tick)
    alone = evaluator.alone(request.start)
    evaluator.alone_ms = alone.summary.latency["mean"].value
    evaluator.requests = requests_for(load, evaluator.alone_ms)
    space = search_space(load, list(fits.values()) or request.nominal, request.fixed)
    found = Search(evaluator, request.start, space, replicas=request.replicas).run()
    quality = [quality_of(name, fit) for name, fit in fits.items()]
    shown = found.best or found.alone
    outside = outside_warning(list(fits.values()), shown.first, shown.setup.settings) if fits else None
    kept_out = {name: why.message for name, fit in fits.items() if (why := keeps_out(fit)) is not None}
    messages = [message("kept_out", fit=name, why=why) for name, why in kept_out.items()]
    if outside is not None:
        messages.append(message("outside_domain", what=outside.message, remedy=outside.remedy))
    messages += _of_fits(list(fits.values())) + _beyond_context(load, list(fits.values()), shown.setup.settings)
    met = found.best is not None and found.best.met
    messages += few_requests(evaluator, shown, given=request.replicas is not None) if met else []
    messages += [message("assumed", what=each) for each in _notes(load, request, space, shown)]
    if apart is not None and shown.setup.replicas > MOST_APART:
        messages.append(message("assumed", what=f"Prefill apart is looked for up to {MOST_APART} replicas."))
    if met and not shown.precise:
        each = next(each for each in shown.reached if not each.precise)
        ends = f"{each.name} is {format_ms(each.low)} to {format_ms(each.high)}"
        messages.append(message("wide_interval", widest=ends, runs=shown.summary.replications))
    states = operating_states(evaluator, shown.setup.settings, shown.setup.replicas, list(fits.values()))
    settings = shown.setup.settings
    messages += [
        *_two_states(states),
        *above_cliffs(fits.values(), settings.max_num_seqs, settings.max_num_batched_tokens),
    ]
    slower_pct = 100 * (bears(evaluator, shown) - 1) if met else None
    contents = isinstance(load, RecordedLoad) and load.requests.prefix is not None and request.start.prefix_cache
    rate, (carries, missed_from) = _rate(load, shown), found.carries
    probability = probability_of(shown.reached, slower_pct, quality)
    # With windows in place of steps nobody knows how steps scatter.
    doubts = [each for each in messages if each.severity is Severity.DOUBT or each.code == "window_means"]
    by_severity = views(messages)
    replicas = shown.setup.replicas if found.best is not None else None
    return ServingPlan(
        request=what_of(load),
        rate_per_s=rate,
        users=load.users if isinstance(load, ClosedLoad) else None,
        feasible=met,
        promise=verdict_of(met=met, probability=probability, doubted=bool(doubts or by_severity["unsupported"])),
        probability=probability if met else None,
        binding=_binding(found, shown),
        targets=list(shown.reached),
        replicas=ReplicaCount(
            replicas if met else None,
            replicas,
            list(found.fewer.reached) if found.fewer else [],
            found.fewer is not None and not found.fewer.carried,
            found.usual,
        ),
        tensor_parallel=request.tensor_parallel,
        route=request.route,
        kv_cache=request.kv or None,
        carries=None if math.isnan(carries) else carries,
        highest_rate_per_s=None if math.isnan(carries) else carries * rate,
        missed_from_rate_per_s=None if math.isnan(carries) else missed_from * rate,
        capacity_per_s=None if math.isnan(found.capacity) else found.capacity * rate,
        capacity_interval_per_s=None if math.isnan(carries) else (carries * rate, missed_from * rate),
        steps_may_be_slower_pct=slower_pct,
        share_of_throughput_used=_used(evaluator, shown),
        outcome=found.best.summary if found.best is not None else None,
        effects=effects_of(evaluator, shown, cache=bool(request.kv), replicas=request.replicas is None) if met else [],
        pareto=front(evaluator, shown.setup.settings, space) if met else [],
        states=states,
        stalls=_stalls(evaluator, shown, space, list(fits.values())) if met else None,
        fits=quality,
        cost=_cost(request, shown),
        prefill_apart=None if apart is None else _apart(evaluator, apart, found, (space, contents), request),
        schedule=_schedule(evaluator, request, shown) if met else None,
        simulated=Work(evaluator.work.setups, evaluator.work.steps, len(shown.first.requests)),
        seed=request.seed,
        warnings=[each for each in messages if each.severity in (Severity.DOUBT, Severity.WARNING)],
        unsupported=by_severity["unsupported"],
        notes=by_severity["notes"],
        **settings_of(shown.setup.settings, feasible=met, contents=contents),
    )


def _stalls(evaluator: Evaluator, shown: Measured, space: SearchSpace, fits: Sequence[FitResult]) -> Stalls | None:
    """Stalls beside the p99 batch of the planned load."""
    return stalls_of(
        evaluator.costs,
        shown.setup.settings,
        _lengths_drawn(evaluator.load),
        shown.summary.batch_size["p99"],
        space.most_tokens,
        lambda settings: evaluator.saturated(settings).output_tokens_per_s,
        fits[-1] if fits else None,
    )


def _two_states(states: OperatingStates | None) -> list[Message]:
    """The warning on an engine that a burst leaves in a slower state."""
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


def _schedule(evaluator: Evaluator, request: ServingRequest, best: Measured) -> SchedulePlan | None:
    """Engines that come and go, where it was said how long they take to start."""
    if request.start_up_ms is None or not isinstance(evaluator.load, RecordedLoad):
        return None
    day = day_of(evaluator.load, request.window_ms, request.start_up_ms)
    return schedule_engines(evaluator, best, day, request.price_per_hour)


def _apart(
    evaluator: Evaluator, apart: PrefillApart, found: Found, about: tuple[SearchSpace, bool], request: ServingRequest
) -> ApartPlan | None:
    """Engines that prefill for others; None where they would be too many to be looked for. about: what may be tried,
    and whether recorded contents of prompts say what is cached."""
    together = found.best.setup.replicas if found.best is not None and found.best.met else None
    if together is not None and together > MOST_APART:
        return None
    other = evaluator.elsewhere(evaluator.load, apart.decode, (apart.prefill, apart.transfer))
    starts = ((found.best or found.alone).setup.settings, request.start)
    best = Pairs(other, about[0], together, about[1]).run(starts, apart.transfer)
    if request.price_per_hour is None or best.outcome is None:
        return best
    price = _per_million(request.price_per_hour * best.total, best.outcome)
    return structs.replace(best, price_per_million_tokens=price)


def _rate(load: Load, shown: Measured) -> float:
    """Requests per second."""
    return shown.summary.throughput_per_s if isinstance(load, ClosedLoad) else load.rate * 1e3


def _used(evaluator: Evaluator, shown: Measured) -> float:
    """Share of what the engines serve at most that they serve; above 1 where more comes."""
    setup = shown.setup
    return _rate(evaluator.load, shown) / (setup.replicas * evaluator.saturated(setup.settings).requests_per_s)


def search_space(load: Load, fits: Sequence[FitResult], fixed: frozenset[str]) -> SearchSpace:
    """Settings that keep steps within what the fits together measured, or the nominal numbers hold for."""
    most = {name: max((fit.domain[name][1] for fit in fits), default=math.inf) for name in ("B", "S")}
    classes = not isinstance(load, RecordedLoad) and len(load.classes) > 1
    prompt, output = _lengths_drawn(load)
    return SearchSpace(fixed, most["B"], most["S"], int(prompt.max()), int((prompt + output).max()), classes)


def _lengths_drawn(load: Load) -> tuple[IntArray, IntArray]:
    """Prompt and output tokens of many requests."""
    if isinstance(load, RecordedLoad):
        return load.requests.prompt_tokens, load.requests.output_tokens
    return lengths_of(load).lengths(DRAWN, np.random.default_rng(0))


def what_of(load: Load) -> str:
    """A request of the load in words."""
    drawn = _lengths_drawn(load)
    means = [float(each.mean()) for each in drawn]
    prompt, output = (number(mean, 3) if mean < FEW_TOKENS else f"{mean:,.0f}" for mean in means)
    if isinstance(load, RecordedLoad):
        return f"{len(load.requests):,} recorded requests, mean {prompt} prompt and {output} output tokens"
    mean = "" if all(int(each.min()) == int(each.max()) for each in drawn) else "mean "
    return f"a request is {mean}{prompt} prompt and {output} output tokens"


def _binding(found: Found, shown: Measured) -> str:
    """What keeps fewer engines from doing, or any number."""
    if found.best is None:
        if not found.alone.met:
            return f"a request alone has {figure_text(shown.tightest)}"
        return "no number of engines keeps the targets"
    if not shown.carried:
        return "the load is more than the engines serve"
    if not shown.met:
        return ", ".join(figure_text(each) for each in shown.reached if not each.met)
    return shown.tightest.name


def figure_text(each: Reached) -> str:
    """A figure beside its limit."""
    if each.unit == "pct":
        return f"{format_percent(each.value)} of {each.name}, {format_percent(each.limit)} allowed"
    return f"a {each.name} of {format_ms(each.value)}, {format_ms(each.limit)} asked"


def _of_fits(fits: Sequence[FitResult]) -> list[Message]:
    """Those of their warnings that a plan repeats, and what the data do not show of pauses. Where prefill has a fit of
    its own, the other one is of decode steps on purpose."""
    told = [code for code in FITS_WARN if len(fits) < 2 or code != "decode_only"]
    found = [each for fit in fits for each in fit.warnings if each.code in told]
    for fit in fits:
        shortest = float(fit.latency_ms(np.ones(1), np.ones(1))[0])
        for phase, limits in fit.limits.by_phase.items():
            if (noise := limits.ratios) is not None:
                if few := few_pauses(f"{phase} steps", noise, shortest, MIN_PAUSES_AS_MEASURED):
                    found.append(message("few_pauses", what=few))
                else:
                    found += unclear_pauses(f"{phase} steps", noise.pauses)
    return found


def _beyond_context(load: Load, fits: Sequence[FitResult], settings: EngineSettings) -> list[Message]:
    """Prompts that are computed in chunks read what is cached of them; whether such steps were measured."""
    longest = int(_lengths_drawn(load)[0].max())
    measured = max((fit.domain.get("prefill_context_tokens", (0.0, 0.0))[1] for fit in fits), default=math.inf)
    if longest - settings.max_num_batched_tokens <= measured or longest <= settings.max_num_batched_tokens:
        return []
    return [message("long_prompts", longest=longest, measured=measured)]


def _cost(request: ServingRequest, shown: Measured) -> Cost:
    count = shown.setup.replicas
    price = None if request.price_per_hour is None else request.price_per_hour * count
    return Cost(
        price,
        None if price is None else _per_million(price, shown.summary),
        None if request.watts is None else _per_million(request.watts * count / 1e3, shown.summary),
    )


def _per_million(per_hour: float, summary: EngineSummary) -> float:
    """What an hour takes, by a million output tokens."""
    return MILLION * per_hour / (summary.output_tokens_per_s * HOUR_S)


def _notes(load: Load, request: ServingRequest, space: SearchSpace, shown: Measured) -> list[str]:
    unknown = "The size of the KV cache is not known and taken as unlimited: give --kv-blocks, or the log."
    found = [f"KV cache: {request.kv}." if request.kv else unknown]
    if math.isfinite(space.most_requests):
        own = ", and the engine's own" if shown.setup.settings.max_num_seqs > space.most_requests else ""
        steps = "nominal" if request.nominal else "measured"
        found.append(
            f"Settings up to the {steps} steps were tried: {space.most_requests:,.0f} requests,"
            f" {space.most_tokens:,.0f} tokens{own}."
        )
    if isinstance(load, RecordedLoad):
        found.append("Recorded arrivals are one course of events: intervals are those of the steps' noise.")
        if load.requests.prefix is not None and request.start.prefix_cache:
            hits = format_percent(100 * shown.summary.prefix_hit_rate)
            found.append(f"Prefix caches are empty at the start; {hits} of prompt tokens were found in them.")
    elif shown.setup.replicas > TOGETHER:
        part = f"{SAMPLED} of the replicas are simulated, with the requests that they get"
        routers = f"routers that look at their replicas stand each before {TOGETHER} of them"
        found.append(f"{(part if request.route == 'round-robin' else routers).capitalize()}.")
    return found
