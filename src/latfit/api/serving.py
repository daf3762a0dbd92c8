"""`plan_engine`: how many serving engines, with which settings, keep what requests are promised."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from latfit.api.answer import Planned
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
from latfit.api.requests import Duration, EnginePlanRequest
from latfit.errors import BadInput, WrongUsage
from latfit.model import FitResult
from latfit.planning import (
    USUAL_PERCENT,
    Goodput,
    GpuMemory,
    KvCache,
    PrefillApart,
    RequestTarget,
    Served,
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
from latfit.units import format_ms, format_percent, number, parse_bytes
from latfit.workload import (
    ARRIVALS,
    ClosedLoad,
    Load,
    RecordedLoad,
    Requests,
    Streams,
    fit_lengths,
    parse_lengths,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from latfit.reporting import Making, PlanSummary, Rendered, Table
    from latfit.simulation import Progress

HALF_HOUR_MS = 1_800_000.0
UNLIMITED = 50_000_000
"""KV blocks of an engine whose cache is taken as unlimited."""


@dataclass(frozen=True, repr=False, eq=False)
class EnginePlan(Planned):
    """Serving engines for a load of requests. Print it for the answer; `.frame` has the front of throughput against
    speed, `.plot()` draws it; `.engine` holds the settings, as `simulate_engine` takes them.

    result: the record (`latfit.planning.ServingPlan`).  subject: model and machine, where they are known.
    """

    result: ServingPlan
    subject: str = ""

    @property
    def supported(self) -> bool:
        """Whether the data support the answer."""
        return not self.result.unsupported

    @property
    def replicas(self) -> int | None:
        """Replicas that the load needs; None where no number serves it."""
        return self.result.replicas.value

    @property
    def engine(self) -> dict[str, Any]:
        """Settings of a replica, by the options of `latfit simulate engine`; empty where nothing keeps the targets."""
        return {} if self.result.engine is None else self.result.engine.to_json()

    @property
    def highest_rate_per_s(self) -> float | None:
        """The highest rate at which these engines keep the targets; None where nothing does."""
        return self.result.highest_rate_per_s

    @property
    def schedule(self) -> "DataFrame":
        """Replicas from when on (t_s, replicas), as `simulate_engine(replicas_at=...)` takes them; empty where no
        schedule was asked for."""
        from pandas import DataFrame

        found = self.result.schedule
        rows = [] if found is None else found.replicas_at
        return DataFrame(rows, columns=["t_s", "replicas"])

    @cached_property
    def _summary(self) -> "PlanSummary":
        from latfit.reporting import serving_summary

        return serving_summary(self.result)

    @property
    def lines(self) -> list[str]:
        return [*self._summary.lines, *self._summary.others]

    @property
    def details(self) -> list[str]:
        return []

    @cached_property
    def frame(self) -> "DataFrame":
        """Settings of which no other is better in both: max_num_seqs, max_num_batched_tokens, speed_per_s (tokens of a
        user), throughput_per_s (tokens of a replica), best (the planned ones)."""
        from msgspec import structs
        from pandas import DataFrame

        return DataFrame([structs.asdict(each) for each in self.result.pareto])

    def tables(self, *, brief: bool = False) -> "list[Table]":
        """The results as tables of text."""
        from latfit.reporting import serving_tables

        return serving_tables(self.result, brief=brief)

    def plot(self) -> "Figure":
        """Throughput of a replica over the speed of a user. Raises WrongUsage where nothing keeps the targets."""
        from latfit.reporting import serving_figure

        if not self.feasible:
            raise WrongUsage(
                "there is nothing to draw: the targets cannot be met", where="--figure", remedy="Leave it out."
            )
        return serving_figure(self.result)

    def page(self, made: "Making") -> "Rendered":
        """The report page."""
        from latfit.reporting import serving_page

        return serving_page(self.result, replace(made, subject=self.subject))


@verb(EnginePlanRequest)
def plan_engine(request: EnginePlanRequest) -> EnginePlan:
    """Find the least serving engines, and their settings, that keep what requests are promised, by simulation.

    Settings that are given stay as they are; the search chooses among others up to what the fit measured. A plan that
    nothing can meet comes back with feasible=False. Raises BadInput, FitNotUsable, WrongUsage.
    """
    request = with_settings(request)
    fit, prefill_fit, scatter = request.fit, request.prefill_fit, scatters(request.service)
    if not request.force:
        check_one_engine(fit, prefill_fit)
    costs, unmeasured, subject, measured = engine_costs(fit, prefill_fit, None, request.hardware, scatter=scatter)
    factor = _step_factor(request.steps_slower)
    costs = scaled_costs(costs, factor, factor)
    several = rates(request.rate, per_s=request.rate_per_s)
    load = make_load(request, several)
    seed = None if request.start_up is None else request.seed
    load = _at_load(load, several, request.lengths, _growth(request.growth), seed)
    targets = _targets(load, {"ttft": request.ttft, "tpot": request.tpot, "latency": request.e2e}, request.goodput)
    memory = _kv_cache(request)
    setup, kv = _setup(measured, memory, request)
    path = None if measured or fit is not None else profile_of(request.hardware).first_of(("gpu",))
    nominal = [] if path is None else [path.fit]
    start = _within_measured(setup, measured or nominal)
    asked = ServingRequest(
        nominal=nominal,
        targets=targets,
        start=start if request.order is None else replace(start, order=Order(request.order)),
        fixed=frozenset(name for name in FIXED if getattr(request, name) is not None),
        kv=kv,
        replicas=request.replicas,
        route=request.route,
        seed=request.seed,
        price_per_hour=request.price_per_hour,
        watts=request.watts,
        tensor_parallel=None if memory is None else request.tensor_parallel,
        **_scheduled(load, request.start_up, request.arrivals_window),
    )
    apart = _apart(load, (fit, prefill_fit, costs), request.transfer, factor, scatter=scatter)
    found = plan_serving(load, costs, _named(measured), asked, _ticking(request.progress), apart)
    # The search chooses the sequences, so what an engine would take by default does not matter.
    of_setup = [note.sentence for note in setup.notes if note.setting != "max_num_seqs"]
    notes = [*_slower_note(factor), *unmeasured, *notes_of(load), *of_setup, *found.notes]
    from msgspec import structs

    return EnginePlan(structs.replace(found, notes=notes), subject)


FIXED = ("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "batching", "order")
"""Settings that the search leaves alone where they are given."""


def _ticking(progress: "Progress | None") -> Callable[[int], None]:
    """What is called with the number of setups that were simulated."""
    return lambda done: progress(done, 0) if progress else None


def _apart(
    load: Load, known: tuple[Any, Any, StepCosts], transfer: str | None, factor: float, *, scatter: bool
) -> PrefillApart | None:
    """Step costs of engines that prefill and of those that decode, as `simulate_engine` takes them, where there is a
    transfer; known: the fits and the costs of an engine that does both; factor: how many times the fitted time a step
    takes. Raises WrongUsage for nothing to decode."""
    if transfer is None:
        return None
    if isinstance(load, RecordedLoad) and int(load.requests.output_tokens.max()) == 1:
        raise WrongUsage("no request has a second token", where="--transfer", remedy="Leave it out.")
    fit, prefill_fit, costs = known
    moved = Transfer(*transfers(transfer))
    if prefill_fit is None or fit is None:
        return PrefillApart(costs, costs, moved)
    prefill, decode = (
        scaled_costs(step_costs(as_fit(each).result, scatter=scatter), factor, factor) for each in (prefill_fit, fit)
    )
    return PrefillApart(prefill, decode, moved)


def _scheduled(load: Load, start_up: Duration | None, window: Duration | None) -> dict[str, float]:
    """What a schedule of replicas asks of a plan. Raises WrongUsage."""
    if start_up is None or not isinstance(load, RecordedLoad):
        return {}
    found = {"start_up_ms": duration(start_up, "--start-up", zero=True)}
    span_ms = float(load.requests.arrival_ms[-1] - load.requests.arrival_ms[0])
    window_ms = HALF_HOUR_MS if window is None else duration(window, "--arrivals-window")
    if not 2 * window_ms <= span_ms:
        raise WrongUsage(
            f"the recording lasts {format_ms(span_ms)}, less than two windows of {format_ms(window_ms)}",
            where="--arrivals-window",
            remedy="Give a shorter one, such as 5min.",
        )
    return {**found, "window_ms": window_ms}


def _named(fits: Iterable[FitResult]) -> dict[str, FitResult]:
    several = list(fits)
    names = [trace_name(each) for each in several]
    kinds = ("decode", "prefill")
    if len(set(names)) < len(names):
        names = [f"{name} ({kind})" for name, kind in zip(names, kinds, strict=False)]
    return dict(zip(names, several, strict=True))


def _step_factor(slower: float | str | None) -> float:
    """How many times the fitted time a step takes. Raises WrongUsage."""
    pct = 0.0 if slower is None else percent(slower, "--set steps_slower")
    if not -100 < pct < math.inf:
        raise WrongUsage(f"{slower!r} leaves no time for a step", where="--set steps_slower", remedy="Write 20%.")
    return 1 + pct / 100


def _slower_note(factor: float) -> list[str]:
    return [] if factor == 1 else [f"Steps take {format_percent(100 * (factor - 1))} longer than fitted."]


def _growth(growth: float | str | None) -> float:
    """Times the load. Raises WrongUsage."""
    if growth is None:
        return 1.0
    try:
        found = float(str(growth).strip().lower().removesuffix("x"))
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise WrongUsage(f"{growth!r} is no growth", where="--set growth", remedy="Write 2x, or 1.3x.")
    return found


def _at_load(load: Load, offered: list[float], lengths: Any, growth: float, day: int | None) -> Load:
    """The load with its lengths, at its rate. day: the seed with which a recording that keeps its length gets more
    requests or fewer; None where they come at other times instead. Raises WrongUsage."""
    if not isinstance(load, RecordedLoad):
        if lengths is None:
            where = "--users" if isinstance(load, ClosedLoad) else "--rate"
            raise WrongUsage("requests have no lengths", where=where, remedy="Give --lengths 2000:300, or a file.")
        load = replace(load, lengths=_lengths(lengths))
    if isinstance(load, ClosedLoad):
        return scaled_load(load, growth)
    if isinstance(load, RecordedLoad) and not load.rate > 0:
        raise BadInput(
            "the requests have no rate: there is one, or all come at once",
            where="--arrivals",
            remedy="Give a recording of two or more, at different times.",
        )
    if isinstance(load, RecordedLoad) and len(load.requests) < FEWEST:
        raise BadInput(
            f"{len(load.requests)} recorded requests are too few to plan for",
            where="--arrivals",
            remedy=f"Give a recording of {FEWEST} or more, or plan at --rate with --lengths.",
        )
    rate = (offered[0] if offered else load.rate) * growth
    if not offered and growth == 1.0:
        return load
    if day is None or not isinstance(load, RecordedLoad):
        return load.at_rate(rate)
    times = rate / load.rate
    told = f"The recorded day keeps its length: each request comes {number(times, 3)} times in the mean"
    moments = ", again at random moments before the next one" if times > 1 else ""
    requests = load.requests.repeated(times, Streams(day).generator(ARRIVALS))
    return replace(load, requests=requests, notes=(*load.notes, f"{told}{moments}."))


def _lengths(lengths: Any) -> Any:
    """A distribution of `512:128`, or of the requests in a file or table."""
    text = isinstance(lengths, str) and (":" in lengths or not (Path(lengths).suffix or Path(lengths).exists()))
    return parse_lengths(lengths) if text else fit_lengths(recording_of(lengths).requests)


def _targets(load: Load, limits: Mapping[str, Duration | None], goodput: float | str | None) -> Targets:
    """What is promised. Raises WrongUsage where nothing is, or percentiles beside goodput."""
    options = {"ttft": "--ttft", "tpot": "--tpot", "latency": "--e2e"}
    found = [
        parse_target(value, name, options[name])
        if isinstance(value, str)
        else RequestTarget(name, duration(value, options[name]))
        for name, value in limits.items()
        if value is not None
    ]
    if not isinstance(load, RecordedLoad):
        found += [
            RequestTarget(name, limit, group=number, group_name=each.name or f"class {number}")
            for number, each in enumerate(load.classes)
            for name, limit in (("ttft", each.ttft_slo_ms), ("tpot", each.tpot_slo_ms), ("latency", each.deadline_ms))
            if math.isfinite(limit)
        ]
    own = Goodput(USUAL_PERCENT, Promise()) if isinstance(load, RecordedLoad) and _limited(load.requests) else None
    if own is not None and not found:
        return Targets((), own if goodput is None else Goodput(_share(goodput), Promise()))
    if not found:
        raise WrongUsage(
            "there is no limit to keep",
            where="--ttft, --tpot, --e2e",
            remedy="Give --ttft 500ms, --tpot 50ms or --e2e 10s.",
        )
    if goodput is None:
        return Targets(tuple(found), own=own)
    if any(isinstance(value, str) and ":" in value for value in limits.values()):
        raise WrongUsage(
            "percentiles are given beside it", where="--goodput", remedy="Give limits alone: --ttft 500ms."
        )
    limit = {each.metric: each.limit_ms for each in found if each.group is None}
    promise = Promise(*(limit.get(name, math.inf) for name in options))
    return Targets(tuple(found), Goodput(_share(goodput), promise))


def _share(goodput: float | str) -> float:
    """Percent. Raises WrongUsage."""
    found = percent(goodput, "--goodput")
    if not 0 < found < 100:
        raise WrongUsage(f"{found:g} % of requests", where="--goodput", remedy="Give more than 0 and less than 100 %.")
    return found


def _limited(requests: Requests) -> bool:
    """Whether any request says by when it should be done."""
    return any(
        bool(np.isfinite(each).any()) for each in (requests.ttft_slo_ms, requests.tpot_slo_ms, requests.deadline_ms)
    )


def _kv_cache(request: EnginePlanRequest) -> KvCache | None:
    """The cache computed from a model and memory; None without a model."""
    model_config, gpu, kv = request.model_config, request.gpu_memory, request.kv_memory
    if model_config is None:
        return None
    config = model_config if isinstance(model_config, Mapping) else config_in(Path(model_config))
    memory = GpuMemory(
        None if gpu is None else parse_bytes(gpu, option="--gpu-memory"),
        request.gpu_memory_utilization,
        kv=None if kv is None else parse_bytes(kv, option="--set kv_memory"),
    )
    try:
        return kv_cache_of(config, memory, Served(kv_dtype=request.kv_dtype, tensor_parallel=request.tensor_parallel))
    except BadInput as error:
        raise BadInput(error.found, where=str(model_config)[:200], remedy=error.remedy) from None


def _setup(fits: list[FitResult], memory: KvCache | None, request: EnginePlanRequest) -> tuple[EngineSetup, str]:
    """The settings that a search begins with, and where the size of the KV cache comes from."""
    given = named_settings(request)
    if memory is not None:
        given |= {"block_size": memory.block_size, "kv_blocks": memory.blocks}
    given["batching"] = request.batching or "chunked-prefill"
    setup = engine_settings_of(fits, usual={**USUAL, "kv_blocks": UNLIMITED}, **given)
    if memory is not None:
        return setup, memory.how
    if "kv_blocks" not in setup.origin:
        return setup, ""
    return setup, f"{setup.settings[0].kv_blocks:,} blocks ({setup.origin['kv_blocks']})"


def _within_measured(setup: EngineSetup, fits: list[FitResult]) -> EngineSettings:
    """The settings that a search begins with; usual ones that nobody named no larger than the measured steps."""
    start = setup.settings[0]
    sequences, tokens = start.max_num_seqs, start.max_num_batched_tokens
    if setup.origin.get("max_num_seqs", UNNAMED[0]) in UNNAMED:
        sequences = _power_within(fits, "B", sequences)
    if setup.origin.get("max_num_batched_tokens", UNNAMED[0]) in UNNAMED:
        tokens = max(_power_within(fits, "S", tokens), sequences)
    return replace(start, max_num_seqs=sequences, max_num_batched_tokens=tokens)


def _power_within(fits: list[FitResult], column: str, usual: int) -> int:
    """The usual number, or the largest power of two that was measured where that is less."""
    most = max((fit.domain[column][1] for fit in fits), default=math.inf)
    return usual if usual <= most else int(2 ** math.floor(math.log2(max(most, 1))))
