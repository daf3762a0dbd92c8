"""`plan_engine`: how many serving engines, with which settings, keep what requests are promised."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from latfit import reporting
from latfit.api.answer import Planned, data_frame
from latfit.api.engines import (
    UNNAMED,
    USUAL,
    EngineSetup,
    check_one_engine,
    engine_costs,
    engine_settings_of,
    named_settings,
    scatters,
    with_settings,
)
from latfit.api.fits import as_fit
from latfit.api.hardware import profile_of
from latfit.api.loads import make_load, notes_of, recording_of
from latfit.api.quantities import duration, percent, rates, transfer as transfers
from latfit.api.request import verb
from latfit.api.requests import EnginePlanRequest
from latfit.errors import BadInput, WrongUsage
from latfit.model import FitResult
from latfit.planning import (
    USUAL_PERCENT,
    Goodput,
    KvCache,
    PrefillApart,
    RequestTarget,
    ServingPlan,
    ServingRequest,
    Targets,
    kv_cache_of,
    model_config as config_in,
    parse_target,
    plan_serving,
    scaled as scaled_load,
    trace_name,
)
from latfit.simulation import FEWEST, EngineSettings, Order, Promise, StepCosts, Transfer, scaled_costs, step_costs
from latfit.units import format_ms, format_percent, format_rate, number, parse_bytes
from latfit.workload import (
    ARRIVALS,
    ClosedLoad,
    Load,
    RecordedLoad,
    Streams,
    fit_lengths,
    parse_lengths,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


HALF_HOUR_MS = 1_800_000.0
RATE_FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0)
LIMIT_FACTORS = (0.6, 1.0, 1.5)
UNLIMITED = 50_000_000  # KV blocks of an engine whose cache is taken as unlimited


@dataclass(frozen=True, repr=False, eq=False)
class EnginePlan(Planned):
    """Serving engines for a load of requests. Print it for the answer; `.frame` has the front of throughput against
    speed, `.plot()` draws it; `.engine` holds the settings, as `simulate_engine` takes them.

    result: the record (`latfit.planning.ServingPlan`).  subject: model and machine, where they are known.  request:
    that it answers.
    """

    result: ServingPlan
    subject: str = ""
    request: EnginePlanRequest | None = None

    @property
    def replicas(self) -> int | None:
        """Replicas that the load needs; None where no number serves it."""
        return self.result.replicas.value

    @property
    def engine(self) -> dict[str, Any]:
        """Settings of a replica, by the options of `latfit simulate engine`; empty where nothing keeps the targets."""
        return {} if self.result.engine is None else self.result.engine.to_json()

    @property
    def schedule(self) -> "DataFrame":
        """Replicas from when on (t_s, replicas), as `simulate_engine(replicas_at=...)` takes them; empty where no
        schedule was asked for."""
        from pandas import DataFrame

        found = self.result.schedule
        rows = [] if found is None else found.replicas_at
        return DataFrame(rows, columns=["t_s", "replicas"])

    @cached_property
    def _summary(self) -> "reporting.PlanSummary":
        return reporting.serving_summary(self.result)

    @property
    def lines(self) -> list[str]:
        return [*self._summary.lines, *self._summary.others]

    @property
    def details(self) -> list[str]:
        return []

    @cached_property
    def frame(self) -> Any:
        """Settings of which no other is better in both: max_num_seqs, max_num_batched_tokens, speed_per_s (tokens of a
        user), throughput_per_s (tokens of a replica), best (the planned ones)."""
        return data_frame(structs.asdict(each) for each in self.result.pareto)

    def tables(self, *, brief: bool = False) -> "list[reporting.Table]":
        return reporting.serving_tables(self.result, brief=brief)

    def plot(self) -> "Figure":
        if not self.feasible:
            raise WrongUsage(
                "there is nothing to draw: the targets cannot be met", where="--figure", remedy="Leave it out."
            )
        return reporting.serving_figure(self.result)

    def page(self, made: "reporting.Making") -> "reporting.Rendered":
        return reporting.serving_page(self.result, replace(made, subject=self.subject), nearby=self.nearby())

    def nearby(self) -> dict[str, dict[str, ServingPlan]]:
        """Plan again at rates, and at limits of TPOT, around this plan's, by slider and place; empty without a rate."""
        request, rate_per_s = self.request, self.result.rate_per_s
        if request is None or (request.rate is None and request.rate_per_s is None):
            return {}

        def again(**changes: Any) -> ServingPlan:
            return plan_engine.of(replace(request, **changes)).result

        rates = {factor: float(f"{factor * rate_per_s:.3g}") for factor in RATE_FACTORS}
        found = {
            "rate": {
                format_rate(rate): self.result if factor == 1 else again(rate=None, rate_per_s=rate, growth=None)
                for factor, rate in rates.items()
            }
        }
        for target in self.result.targets:
            if target.metric == "tpot" and target.percentile is not None:
                limits = {factor: float(f"{factor * target.limit:.3g}") for factor in LIMIT_FACTORS}
                found["TPOT"] = {
                    format_ms(limit): self.result if factor == 1 else again(tpot=f"p{target.percentile:g}:{limit:g}ms")
                    for factor, limit in limits.items()
                }
        return found


@verb(EnginePlanRequest)
def plan_engine(request: EnginePlanRequest) -> EnginePlan:
    """Find the least serving engines, and their settings, that keep what requests are promised, by simulation.

    Settings that are given stay as they are; the search chooses among others up to what the fit measured. A plan that
    nothing can meet comes back with feasible=False. Raises BadInput, FitNotUsable, WrongUsage.
    """
    as_given, request = request, with_settings(request)
    fit, prefill_fit, scatter = request.fit, request.prefill_fit, scatters(request.service)
    if not request.force:
        check_one_engine(fit, prefill_fit)
    costs, unmeasured, subject, measured = engine_costs(fit, prefill_fit, None, request.hardware, scatter=scatter)
    factor = 1.0 if request.steps_slower is None else 1 + percent(request.steps_slower, "--set steps_slower") / 100
    if not 0 < factor < math.inf:
        raise WrongUsage("no time is left for a step", where="--set steps_slower", remedy="Write 20%.")
    costs = scaled_costs(costs, factor, factor)
    load = _load(request)
    memory = _kv_cache(request)
    setup, kv = _setup(measured, memory, request)
    path = None if measured or fit is not None else profile_of(request.hardware).first_of(("gpu",))
    nominal = [] if path is None else [path.fit]
    start = _within_measured(setup, measured or nominal)
    asked = ServingRequest(
        nominal=nominal,
        targets=_targets(load, request),
        start=start if request.order is None else replace(start, order=Order(request.order)),
        fixed=frozenset(name for name in FIXED if getattr(request, name) is not None),
        kv=kv,
        replicas=request.replicas,
        route=request.route,
        seed=request.seed,
        price_per_hour=request.price_per_hour,
        watts=request.watts,
        tensor_parallel=None if memory is None else request.tensor_parallel,
        **_schedule(load, request),
    )
    names = [trace_name(each) for each in measured]
    if len(set(names)) < len(names):
        names = [f"{name} ({kind})" for name, kind in zip(names, ("decode", "prefill"), strict=False)]
    progress = request.progress
    found = plan_serving(
        load,
        costs,
        dict(zip(names, measured, strict=True)),
        asked,
        lambda done: progress(done, 0) if progress else None,
        _apart(load, request, costs, factor, scatter=scatter),
    )
    slower = [] if factor == 1 else [f"Steps take {format_percent(100 * (factor - 1))} longer than fitted."]
    # The search chooses the sequences, so what an engine would take by default does not matter.
    of_setup = [note.sentence for note in setup.notes if note.setting != "max_num_seqs"]
    notes = [*slower, *unmeasured, *notes_of(load), *of_setup, *found.notes]
    return EnginePlan(structs.replace(found, notes=notes), subject, as_given)


FIXED = ("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "batching", "order")
"""Settings that the search leaves alone where they are given."""


def _apart(
    load: Load, request: EnginePlanRequest, costs: StepCosts, factor: float, *, scatter: bool
) -> PrefillApart | None:
    """Return step costs of engines that prefill and of those that decode, if there is a transfer. Raises WrongUsage."""
    if request.transfer is None:
        return None
    if isinstance(load, RecordedLoad) and int(load.requests.output_tokens.max()) == 1:
        raise WrongUsage("no request has a second token", where="--transfer", remedy="Leave it out.")
    moved = Transfer(*transfers(request.transfer))
    if request.prefill_fit is None or request.fit is None:
        return PrefillApart(costs, costs, moved)
    prefill, decode = (
        scaled_costs(step_costs(as_fit(each).result, scatter=scatter), factor, factor)
        for each in (request.prefill_fit, request.fit)
    )
    return PrefillApart(prefill, decode, moved)


def _schedule(load: Load, request: EnginePlanRequest) -> dict[str, float]:
    """Return start-up time and window of a schedule of replicas. Raises WrongUsage."""
    if request.start_up is None or not isinstance(load, RecordedLoad):
        return {}
    window = request.arrivals_window
    window_ms = HALF_HOUR_MS if window is None else duration(window, "--arrivals-window")
    span_ms = float(load.requests.arrival_ms[-1] - load.requests.arrival_ms[0])
    if not 2 * window_ms <= span_ms:
        raise WrongUsage(
            f"the recording lasts {format_ms(span_ms)}, less than two windows of {format_ms(window_ms)}",
            where="--arrivals-window",
            remedy="Give a shorter one, such as 5min.",
        )
    return {"start_up_ms": duration(request.start_up, "--start-up", zero=True), "window_ms": window_ms}


def _growth(growth: float | str | None) -> float:
    """Return the multiple of the load. Raises WrongUsage."""
    try:
        found = 1.0 if growth is None else float(str(growth).strip().lower().removesuffix("x"))
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise WrongUsage(f"{growth!r} is no growth", where="--set growth", remedy="Write 2x, or 1.3x.")
    return found


def _load(request: EnginePlanRequest) -> Load:
    """Return the load with its lengths, at its rate times the growth. Raises WrongUsage, BadInput."""
    offered = rates(request.rate, per_s=request.rate_per_s)
    growth, lengths = _growth(request.growth), request.lengths
    load = make_load(request, offered)
    if not isinstance(load, RecordedLoad):
        if lengths is None:
            where = "--users" if isinstance(load, ClosedLoad) else "--rate"
            raise WrongUsage("requests have no lengths", where=where, remedy="Give --lengths 2000:300, or a file.")
        text = isinstance(lengths, str) and (":" in lengths or not (Path(lengths).suffix or Path(lengths).exists()))
        made = parse_lengths(lengths) if text else fit_lengths(recording_of(lengths).requests)
        load = replace(load, lengths=made)
    if isinstance(load, ClosedLoad):
        return scaled_load(load, growth)
    if isinstance(load, RecordedLoad) and not (load.rate > 0 and len(load.requests) >= FEWEST):
        raise BadInput(
            "the requests have no rate: there is one, or all come at once"
            if not load.rate > 0
            else f"{len(load.requests)} recorded requests are too few to plan for",
            where="--arrivals",
            remedy=f"Give a recording of {FEWEST} or more, at different times, or plan at --rate with --lengths.",
        )
    rate = (offered[0] if offered else load.rate) * growth
    if not offered and growth == 1.0:
        return load
    if request.start_up is None or not isinstance(load, RecordedLoad):
        return load.at_rate(rate)
    # A recording with a schedule keeps its length, so that it gets more requests or fewer.
    times = rate / load.rate
    moments = ", again at random moments before the next one" if times > 1 else ""
    note = f"The recorded day keeps its length: each request comes {number(times, 3)} times in the mean{moments}."
    requests = load.requests.repeated(times, Streams(request.seed).generator(ARRIVALS))
    return replace(load, requests=requests, notes=(*load.notes, note))


def _targets(load: Load, request: EnginePlanRequest) -> Targets:
    """Return the targets. Raises WrongUsage for none, or for percentiles beside goodput."""
    limits = {"ttft": ("--ttft", request.ttft), "tpot": ("--tpot", request.tpot), "latency": ("--e2e", request.e2e)}
    share = None if request.goodput is None else percent(request.goodput, "--goodput")
    if share is not None and not 0 < share < 100:
        raise WrongUsage(f"{share:g} % of requests", where="--goodput", remedy="Give more than 0 and less than 100 %.")
    found = [
        parse_target(value, name, option) if isinstance(value, str) else RequestTarget(name, duration(value, option))
        for name, (option, value) in limits.items()
        if value is not None
    ]
    own = None
    if isinstance(load, RecordedLoad):
        times = (load.requests.ttft_slo_ms, load.requests.tpot_slo_ms, load.requests.deadline_ms)
        own = Goodput(USUAL_PERCENT, Promise()) if any(np.isfinite(each).any() for each in times) else None
    else:
        found += [
            RequestTarget(name, limit, group=number, group_name=each.name or f"class {number}")
            for number, each in enumerate(load.classes)
            for name, limit in (("ttft", each.ttft_slo_ms), ("tpot", each.tpot_slo_ms), ("latency", each.deadline_ms))
            if math.isfinite(limit)
        ]
    if not found and own is None:
        raise WrongUsage(
            "there is no limit to keep",
            where="--ttft, --tpot, --e2e",
            remedy="Give --ttft 500ms, --tpot 50ms or --e2e 10s.",
        )
    if not found:
        return Targets((), own if share is None else Goodput(share, Promise()))
    if share is None:
        return Targets(tuple(found), own=own)
    if any(isinstance(value, str) and ":" in value for _, value in limits.values()):
        raise WrongUsage(
            "percentiles are given beside it", where="--goodput", remedy="Give limits alone: --ttft 500ms."
        )
    of_all = {each.metric: each.limit_ms for each in found if each.group is None}
    return Targets(tuple(found), Goodput(share, Promise(*(of_all.get(name, math.inf) for name in limits))))


def _kv_cache(request: EnginePlanRequest) -> KvCache | None:
    """Return the cache computed from a model and memory; None without a model."""
    source, kv = request.model_config, request.kv_memory
    if source is None:
        return None
    gpu_memory = request.gpu_memory
    try:
        return kv_cache_of(
            source if isinstance(source, Mapping) else config_in(Path(source)),
            gpu_memory=None if gpu_memory is None else parse_bytes(gpu_memory, option="--gpu-memory"),
            utilisation=request.gpu_memory_utilization,
            kv_memory=None if kv is None else parse_bytes(kv, option="--set kv_memory"),
            kv_dtype=request.kv_dtype,
            tensor_parallel=request.tensor_parallel,
        )
    except BadInput as error:
        raise BadInput(error.found, where=str(source)[:200], remedy=error.remedy) from None


def _setup(fits: list[FitResult], memory: KvCache | None, request: EnginePlanRequest) -> tuple[EngineSetup, str]:
    """Return the settings that a search begins with, and the origin of the size of the KV cache."""
    given = named_settings(request)
    if memory is not None:
        given |= {"block_size": memory.block_size, "kv_blocks": memory.blocks}
    batching = request.batching or "chunked-prefill"
    setup = engine_settings_of(fits, usual={**USUAL, "kv_blocks": UNLIMITED}, batching=batching, **given)
    if memory is not None:
        return setup, memory.how
    origin = setup.origin.get("kv_blocks")
    return setup, f"{setup.settings[0].kv_blocks:,} blocks ({origin})" if origin else ""


def _within_measured(setup: EngineSetup, fits: list[FitResult]) -> EngineSettings:
    """Return the settings that a search begins with; defaults no larger than the measured steps."""
    start = setup.settings[0]

    def is_default(name: str) -> bool:
        return setup.origin.get(name, UNNAMED[0]) in UNNAMED

    def within(default: int, column: str) -> int:
        most = max((fit.domain[column][1] for fit in fits), default=math.inf)
        return default if default <= most else int(2 ** math.floor(math.log2(max(most, 1))))

    sequences, tokens = start.max_num_seqs, start.max_num_batched_tokens
    if is_default("max_num_seqs"):
        sequences = within(sequences, "B")
    if is_default("max_num_batched_tokens"):
        tokens = max(within(tokens, "S"), sequences)
    return replace(start, max_num_seqs=sequences, max_num_batched_tokens=tokens)
