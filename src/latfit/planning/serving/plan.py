"""`plan_serving`: how many engines, with which settings, keep what requests are promised; what else they would do."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from latfit.fitting import keeps_out
from latfit.model import FitResult
from latfit.planning.engine_settings import serving_flags
from latfit.planning.fit_quality import FitQuality, quality_of
from latfit.planning.serving.apart import MOST_APART, ApartPlan, Pairs, PrefillApart
from latfit.planning.serving.effects import Effect, Trade, bears, effects_of, front
from latfit.planning.serving.evaluate import (
    SAMPLED,
    TOGETHER,
    Evaluator,
    Measured,
    lengths_of,
    requests_for,
)
from latfit.planning.serving.few import FEW_REQUESTS, few_requests
from latfit.planning.serving.schedule import SchedulePlan, day_of, schedule_engines
from latfit.planning.serving.search import Found, Room, Search
from latfit.planning.serving.targets import Reached, Targets
from latfit.planning.wording import MIN_PAUSES_AS_MEASURED, few_pauses, unclear_pauses
from latfit.simulation import EngineSettings, EngineSummary, StepCosts
from latfit.stats import IntArray
from latfit.units import format_ms, format_percent, number
from latfit.validation import outside_warning
from latfit.warning import LatfitWarning
from latfit.workload import ClosedLoad, Load, RecordedLoad

HOUR_S = 3600.0
MILLION = 1e6
FEW_TOKENS = 100
DRAWN = 10_000
"""Requests whose lengths tell those of all."""

PLANNED = ("batching", "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "kv_blocks")
DOUBTS = (FEW_REQUESTS, "window_means", "few_pauses")
"""Warnings that put a promise in doubt: few requests or pauses decide the percentile, or nobody knows how steps
scatter."""

FITS_WARN = ("large_error", "no_better_than_constant", "line_as_good", "drift", "decode_only", "window_means")
"""Warnings of a fit that a plan repeats."""


@dataclass(frozen=True)
class ServingRequest:
    """What is planned. start: the settings that the search begins with, those of `fixed` stay.  kv: where the size of
    the KV cache comes from; empty where it is not known and taken as unlimited.  replicas: that are there, None to
    find their number.  price_per_hour, watts: of one replica.  tensor_parallel: GPUs that a replica takes, where it was
    said.  start_up_ms, window_ms: of a schedule of engines for recorded requests, None for none."""

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


@dataclass(frozen=True)
class Cost:
    """Of the planned engines at the planned load; None where no price, or no power, was given."""

    price_per_hour: float | None = None
    price_per_million_tokens: float | None = None
    kwh_per_million_tokens: float | None = None


@dataclass(frozen=True, eq=False, repr=False)
class ServingPlan:
    """Engines that keep the targets of a load of requests, or why none do.

    what: a request, in words.  rate_per_s: of users in a closed loop what they send.  reached: the figures beside their
    limits; where nothing keeps them those of a request alone, or of the engines that were given.  used: share of the
    most that the engines could serve.  fewer: the same with one engine less, fewer_carry: whether it carries the load.
    usual: engines that the settings need that the search began with.  carries: load up to which these engines keep the
    targets for certain, as a ratio of the planned one; carries_at_most: from which on they miss one.  bears: how much
    longer the steps may take.  tried: configurations simulated.  unsupported: why the data do not support it; empty
    where they do.  schedule: engines that come and go instead, where asked for.  contents: whether recorded contents of
    prompts say what is cached.  apart: engines that prefill and engines that decode instead, where asked for.
    """

    request: ServingRequest
    what: str
    rate_per_s: float
    users: int | None
    feasible: bool
    replicas: int | None
    settings: EngineSettings
    reached: Sequence[Reached]
    summary: EngineSummary | None
    used: float
    fewer: Sequence[Reached]
    fewer_carry: bool
    usual: int | None
    carries: float
    carries_at_most: float
    bears: float
    binding: str
    effects: Sequence[Effect]
    front: Sequence[Trade]
    fits: Sequence[FitQuality]
    cost: Cost
    tried: int
    steps: int
    requests: int
    warnings: Sequence[LatfitWarning] = ()
    unsupported: Sequence[str] = ()
    notes: Sequence[str] = field(default_factory=list)
    schedule: SchedulePlan | None = None
    contents: bool = False
    apart: ApartPlan | None = None

    def __repr__(self) -> str:
        return f"<ServingPlan: {self.replicas} replicas, {'feasible' if self.feasible else 'not feasible'}>"

    @property
    def promise(self) -> str:
        """yes, no or in doubt."""
        if not self.feasible:
            return "no"
        sure = all(each.certain for each in self.reached) and self.bears_the_fit
        sure = sure and not any(each.code in DOUBTS for each in self.warnings)
        return "yes" if sure and not self.unsupported else "in doubt"

    @property
    def bears_the_fit(self) -> bool:
        """Whether the targets are kept with steps that are longer by the error of the fits."""
        return 100 * (self.bears - 1) >= max((each.worst_pct for each in self.fits), default=0.0)

    @property
    def engine(self) -> dict[str, Any]:
        """The settings, by the options of `latfit simulate engine`."""
        return self._options_of(self.settings)

    def _options_of(self, settings: EngineSettings) -> dict[str, Any]:
        found: dict[str, Any] = {name: getattr(settings, name) for name in PLANNED}
        return {
            **found,
            "block_size": settings.block_size,
            "order": settings.order.name,
            "synchronous": not settings.asynchronous,
            # None where recorded contents of prompts say what is cached.
            "prefix_hit_rate": None if self.contents else settings.cached_share,
        }

    @property
    def engines(self) -> Mapping[str, Mapping[str, Any]]:
        """The settings under the names that serving engines use."""
        return serving_flags(self.settings)

    def to_json(self) -> dict[str, Any]:
        """Keys are a contract: see `docs/formats.md`."""
        return {
            "kind": "serving",
            "request": self.what,
            "rate_per_s": self.rate_per_s,
            "users": self.users,
            "feasible": self.feasible,
            "promise": self.promise,
            "binding": self.binding,
            "targets": [each.to_json() for each in self.reached],
            "replicas": {
                "value": self.replicas if self.feasible else None,
                "one_fewer": [each.to_json() for each in self.fewer],
                "one_fewer_overloaded": not self.fewer_carry,
                "with_the_first_settings": self.usual,
            },
            "engine": self.engine if self.feasible else None,
            "engines": self.engines if self.feasible else {},
            "tensor_parallel": self.request.tensor_parallel,
            "route": self.request.route,
            "kv_cache": self.request.kv or None,
            "carries": None if math.isnan(self.carries) else self.carries,
            "highest_rate_per_s": None if math.isnan(self.carries) else self.carries * self.rate_per_s,
            "missed_from_rate_per_s": None if math.isnan(self.carries) else self.carries_at_most * self.rate_per_s,
            "steps_may_be_slower_pct": None if math.isnan(self.bears) else 100 * (self.bears - 1),
            "share_of_throughput_used": self.used,
            "outcome": None if self.summary is None else self.summary.to_json(),
            "effects": [each.to_json() for each in self.effects],
            "pareto": [each.to_json() for each in self.front],
            "fits": [each.to_json() for each in self.fits],
            "cost": vars(self.cost),
            "prefill_apart": None
            if self.apart is None
            else self.apart.to_json(self.rate_per_s, self._options_of(self.apart.settings)),
            "schedule": None if self.schedule is None else self.schedule.to_json(),
            "simulated": {"setups": self.tried, "steps": self.steps, "requests": self.requests},
            "seed": self.request.seed,
            "warnings": [each.to_json() for each in self.warnings],
            "unsupported": list(self.unsupported),
            "notes": list(self.notes),
        }


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
    room = room_of(load, list(fits.values()), request.fixed)
    found = Search(evaluator, request.start, room, replicas=request.replicas).run()
    quality = [quality_of(name, fit) for name, fit in fits.items()]
    shown = found.best or found.alone
    outside = outside_warning(list(fits.values()), shown.first, shown.setup.settings) if fits else None
    unsupported = [text for name, fit in fits.items() for text in _kept_out(name, fit)]
    warnings = _of_fits(list(fits.values())) + _beyond_context(load, list(fits.values()), shown.setup.settings)
    if outside is not None:
        unsupported.append(f"{outside.message}. {outside.remedy}")
    met = found.best is not None and found.best.met
    warnings += few_requests(evaluator, shown, given=request.replicas is not None) if met else []
    return ServingPlan(
        request=request,
        what=what_of(load),
        rate_per_s=_rate(load, shown),
        users=load.users if isinstance(load, ClosedLoad) else None,
        feasible=met,
        replicas=shown.setup.replicas if found.best is not None else None,
        settings=shown.setup.settings,
        reached=shown.reached,
        summary=found.best.summary if found.best is not None else None,
        used=_used(evaluator, shown),
        fewer=found.fewer.reached if found.fewer else (),
        fewer_carry=found.fewer is None or found.fewer.carried,
        usual=found.usual,
        carries=found.carries[0],
        carries_at_most=found.carries[1],
        bears=bears(evaluator, shown) if met else math.nan,
        binding=_binding(found, shown),
        effects=effects_of(evaluator, shown, cache=bool(request.kv), replicas=request.replicas is None) if met else [],
        front=front(evaluator, shown.setup.settings, room) if met else [],
        fits=quality,
        cost=_cost(request, shown),
        tried=evaluator.work.setups,
        steps=evaluator.work.steps,
        requests=len(shown.first.requests),
        warnings=warnings,
        unsupported=unsupported,
        notes=_notes(load, request, room, shown) + _not_apart(apart, shown),
        schedule=_schedule(evaluator, request, shown) if met else None,
        apart=None if apart is None else _apart(evaluator, apart, found, room, request.price_per_hour),
        contents=isinstance(load, RecordedLoad) and load.requests.prefix is not None and request.start.prefix_cache,
    )


def _schedule(evaluator: Evaluator, request: ServingRequest, best: Measured) -> SchedulePlan | None:
    """Engines that come and go, where it was said how long they take to start."""
    if request.start_up_ms is None or not isinstance(evaluator.load, RecordedLoad):
        return None
    day = day_of(evaluator.load, request.window_ms, request.start_up_ms)
    return schedule_engines(evaluator, best, day, request.price_per_hour)


def _apart(
    evaluator: Evaluator, apart: PrefillApart, found: Found, room: Room, price_per_hour: float | None
) -> ApartPlan | None:
    """Engines that prefill for others; None where they would be too many to be looked for."""
    together = found.best.setup.replicas if found.best is not None and found.best.met else None
    if together is not None and together > MOST_APART:
        return None
    other = evaluator.elsewhere(evaluator.load, apart.decode, (apart.prefill, apart.transfer))
    settings = (found.best or found.alone).setup.settings
    best = Pairs(other, room, together).run(settings, apart.transfer)
    if price_per_hour is None or best.summary is None:
        return best
    return replace(best, price_per_million_tokens=_per_million(price_per_hour * best.total, best.summary))


def _not_apart(apart: PrefillApart | None, shown: Measured) -> list[str]:
    many = apart is not None and shown.setup.replicas > MOST_APART
    return [f"Prefill apart is looked for up to {MOST_APART} replicas."] if many else []


def _rate(load: Load, shown: Measured) -> float:
    """Requests per second."""
    return shown.summary.throughput_per_s if isinstance(load, ClosedLoad) else load.rate * 1e3


def _used(evaluator: Evaluator, shown: Measured) -> float:
    """Share of what the engines serve at most that they serve; above 1 where more comes."""
    setup = shown.setup
    return _rate(evaluator.load, shown) / (setup.replicas * evaluator.saturated(setup.settings).requests_per_s)


def room_of(load: Load, fits: Sequence[FitResult], fixed: frozenset[str]) -> Room:
    """Settings that keep steps within what the fits together measured."""
    measured = [fit for fit in fits if not fit.data.nominal]
    most = {name: max((fit.domain[name][1] for fit in measured), default=math.inf) for name in ("B", "S")}
    classes = not isinstance(load, RecordedLoad) and len(load.classes) > 1
    prompt, output = _lengths_drawn(load)
    return Room(fixed, most["B"], most["S"], int(prompt.max()), int((prompt + output).max()), classes)


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


def _kept_out(name: str, fit: FitResult) -> list[str]:
    found = keeps_out(fit)
    return [] if found is None else [f"{name}: {found.message}"]


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


def _of_fits(fits: Sequence[FitResult]) -> list[LatfitWarning]:
    """Those of their warnings that a plan repeats, and what the data do not show of pauses. Where prefill has a fit of
    its own, the other one is of decode steps on purpose."""
    told = [code for code in FITS_WARN if len(fits) < 2 or code != "decode_only"]
    found = [each for fit in fits for each in fit.warnings if each.code in told]
    for fit in fits:
        shortest = float(fit.latency_ms(np.ones(1), np.ones(1))[0])
        for phase, limits in fit.limits.by_phase.items():
            if (noise := limits.ratios) is not None:
                if few := few_pauses(f"{phase} steps", noise, shortest, MIN_PAUSES_AS_MEASURED):
                    found.append(LatfitWarning("few_pauses", f"{few}.", "Measure more steps."))
                else:
                    found += unclear_pauses(f"{phase} steps", noise.pauses)
    return found


def _beyond_context(load: Load, fits: Sequence[FitResult], settings: EngineSettings) -> list[LatfitWarning]:
    """Prompts that are computed in chunks read what is cached of them; whether such steps were measured."""
    longest = int(_lengths_drawn(load)[0].max())
    measured = max((fit.domain.get("prefill_context_tokens", (0.0, 0.0))[1] for fit in fits), default=math.inf)
    if longest - settings.max_num_batched_tokens <= measured or longest <= settings.max_num_batched_tokens:
        return []
    return [
        LatfitWarning(
            "outside_measured",
            f"Prompts of up to {longest:,} tokens are computed in chunks; prefill behind more than {measured:,.0f}"
            " cached tokens was not measured.",
            "Measure such steps, or plan with shorter prompts.",
        )
    ]


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


def _notes(load: Load, request: ServingRequest, room: Room, shown: Measured) -> list[str]:
    unknown = "The size of the KV cache is not known and taken as unlimited: give --kv-blocks, or the log."
    found = [f"KV cache: {request.kv}." if request.kv else unknown]
    if math.isfinite(room.most_requests):
        own = ", and the engine's own" if shown.setup.settings.max_num_seqs > room.most_requests else ""
        found.append(
            f"Settings up to the measured steps were tried: {room.most_requests:,.0f} requests,"
            f" {room.most_tokens:,.0f} tokens{own}."
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
