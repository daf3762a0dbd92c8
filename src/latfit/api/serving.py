"""`plan_engine`: how many serving engines meet the SLOs of a load."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from latfit import planning, reporting, workload
from latfit.api.answer import Planned, data_frame
from latfit.api.engines import check_one_engine, engine_costs, engine_settings_of, named_settings, with_settings
from latfit.api.fits import as_fit
from latfit.api.hardware import profile_of
from latfit.api.quantities import duration, percent, rates, transfer as transfers
from latfit.api.reading import make_load
from latfit.api.request import verb
from latfit.api.requests import EnginePlanRequest
from latfit.errors import BadInput, WrongUsage, located, refuse
from latfit.simulation import FEWEST, Order, Promise, StepCosts, Transfer, scaled_costs, step_costs
from latfit.units import format_ms, format_percent, format_rate, number, parse_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HALF_HOUR_MS = 1_800_000.0
RATE_FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0)
LIMIT_FACTORS = (0.6, 1.0, 1.5)


@dataclass(frozen=True, repr=False, eq=False)
class EnginePlan(Planned):
    """Serving engines for a load; `.engine` holds the settings, as `simulate_engine` takes them."""

    result: planning.ServingPlan
    subject: str = ""  # model and machine, if known
    request: EnginePlanRequest | None = None

    @property
    def replicas(self) -> int | None:
        return self.result.replicas.value

    @property
    def engine(self) -> dict[str, Any]:
        """Settings of a replica; empty where nothing meets the targets."""
        return {} if self.result.engine is None else self.result.engine.to_json()

    @property
    def schedule(self) -> Any:
        """DataFrame (t_s, replicas) for `simulate_engine(replicas_at=...)`; empty without a schedule."""
        found = () if self.result.schedule is None else self.result.schedule.replicas_at
        return data_frame({"t_s": t_s, "replicas": replicas} for t_s, replicas in found)

    @cached_property
    def _shown(self) -> "reporting.table.Shown":
        return reporting.serving.show_serving(self.result)

    @cached_property
    def frame(self) -> Any:
        """DataFrame: Pareto front of speed_per_s (a user) and throughput_per_s (a replica), tokens/s."""
        return data_frame(structs.asdict(each) for each in self.result.pareto)

    def plot(self) -> "Figure":
        if not self.feasible:
            raise WrongUsage("the targets cannot be met", where="--figure", remedy="Leave it out.")
        return reporting.plan_figures.serving_figure(self.result)

    def page(self, made: "reporting.layout.Making") -> "reporting.layout.Rendered":
        return reporting.serving.serving_page(self.result, made, nearby=self.nearby(), subject=self.subject)

    def nearby(self) -> dict[str, dict[str, planning.ServingPlan]]:
        """Plan again at rates and TPOT limits around this plan's."""
        request, rate_per_s = self.request, self.result.rate_per_s
        if request is None or request.rate is None:
            return {}

        def again(**changes: Any) -> planning.ServingPlan:
            return plan_engine.of(replace(request, **changes)).result

        around = reporting.layout.values_around
        found = {
            "rate": {
                format_rate(rate): self.result if is_own else again(rate=f"{rate}/s", growth=None)
                for is_own, rate in around(rate_per_s, RATE_FACTORS)
            }
        }
        for target in self.result.targets:
            if target.metric == "tpot" and target.percentile is not None:
                found["TPOT"] = {
                    format_ms(limit): self.result if is_own else again(tpot=f"p{target.percentile:g}:{limit:g}ms")
                    for is_own, limit in around(target.limit, LIMIT_FACTORS)
                }
        return found


@verb(EnginePlanRequest)
def plan_engine(request: EnginePlanRequest) -> EnginePlan:
    """Find the fewest serving engines, and their settings, that meet the SLOs, by simulation.

    Given settings stay. A plan that nothing can meet has feasible=False. Raises BadInput, FitNotUsable, WrongUsage.
    """
    as_given, request = request, with_settings(request)
    fit, prefill_fit, scatter = request.fit, request.prefill_fit, request.service == "fitted"
    if not request.force:
        check_one_engine(fit, prefill_fit)
    costs, unmeasured, subject, measured = engine_costs(request, scatter=scatter)
    factor = 1.0 if request.steps_slower is None else 1 + percent(request.steps_slower, "--set steps_slower") / 100
    if not 0 < factor < math.inf:
        raise WrongUsage("no time is left for a step", where="--set steps_slower", remedy="Write 20%.")
    costs = scaled_costs(costs, factor, factor)
    load = _load(request)
    memory = _kv_cache(request)
    given = named_settings(request)
    if memory is not None:
        given |= {"block_size": memory.block_size, "kv_blocks": memory.blocks}
    batching = request.batching or "chunked-prefill"
    setup = engine_settings_of(measured, batching=batching, **given)
    origin = setup.origin.get("kv_blocks")
    kv = f"{setup.settings.kv_blocks:,} blocks ({origin})" if origin else ""
    path = None if measured or fit is not None else profile_of(request.hardware).engine_path
    nominal = [] if path is None else [path.fit]
    start = planning.within_measured(setup, load, measured or nominal)
    asked = planning.ServingRequest(
        nominal=nominal,
        targets=_targets(load, request),
        start=start if request.order is None else replace(start, order=Order(request.order)),
        fixed=frozenset(name for name in FIXED if getattr(request, name) is not None),
        kv=kv if memory is None else memory.how,
        replicas=request.replicas,
        route=request.route,
        seed=request.seed,
        price_per_hour=request.price_per_hour,
        watts=request.watts,
        tensor_parallel=None if memory is None else request.tensor_parallel,
        **_schedule(load, request),
    )
    names = [planning.trace_name(each) for each in measured]
    if len(set(names)) < len(names):
        names = [f"{name} ({kind})" for name, kind in zip(names, ("decode", "prefill"), strict=False)]
    progress = request.progress
    found = planning.plan_serving(
        load,
        costs,
        dict(zip(names, measured, strict=True)),
        asked,
        lambda done: progress(done, 0) if progress else None,
        _separate_prefill(load, request, costs, factor, scatter=scatter),
    )
    slower = [] if factor == 1 else [f"Steps take {format_percent(100 * (factor - 1))} longer than fitted."]
    # The search chooses the sequences, and the verdict says that a cache is unlimited.
    of_setup = [note.sentence for note in setup.notes if note.setting not in ("max_num_seqs", "kv_blocks")]
    notes = [*slower, *unmeasured, *load.notes, *of_setup, *found.notes]
    return EnginePlan(structs.replace(found, notes=notes), subject, as_given)


FIXED = ("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "batching", "order")
"""Settings that the search leaves alone where they are given."""


def _separate_prefill(
    load: workload.Load, request: EnginePlanRequest, costs: StepCosts, factor: float, *, scatter: bool
) -> planning.PrefillApart | None:
    """Return step costs of separate prefill and decode engines; None without a transfer."""
    if request.transfer is None:
        return None
    if isinstance(load, workload.RecordedLoad) and int(load.requests.output_tokens.max()) == 1:
        raise WrongUsage("no request has a second token", where="--transfer", remedy="Leave it out.")
    moved = Transfer(*transfers(request.transfer))
    if request.prefill_fit is None or request.fit is None:
        return planning.PrefillApart(costs, costs, moved)
    prefill, decode = (
        scaled_costs(step_costs(as_fit(each).result, scatter=scatter), factor, factor)
        for each in (request.prefill_fit, request.fit)
    )
    return planning.PrefillApart(prefill, decode, moved)


def _schedule(load: workload.Load, request: EnginePlanRequest) -> dict[str, float]:
    if request.start_up is None or not isinstance(load, workload.RecordedLoad):
        return {}
    window = request.arrivals_window
    window_ms = HALF_HOUR_MS if window is None else duration(window, "--arrivals-window")
    span_ms = float(load.requests.arrival_ms[-1] - load.requests.arrival_ms[0])
    if not 2 * window_ms <= span_ms:
        found = f"the recording lasts {format_ms(span_ms)}, less than two windows of {format_ms(window_ms)}"
        raise WrongUsage(found, where="--arrivals-window", remedy="Give a shorter one, such as 5min.")
    return {"start_up_ms": duration(request.start_up, "--start-up", zero=True), "window_ms": window_ms}


def _growth(growth: float | str | None) -> float:
    with suppress(ValueError):
        found = 1.0 if growth is None else float(str(growth).strip().lower().removesuffix("x"))
        if 0 < found < math.inf:
            return found
    raise WrongUsage(f"{growth!r} is no growth", where="--set growth", remedy="Write 2x, or 1.3x.")


def _load(request: EnginePlanRequest) -> workload.Load:
    offered = rates(request.rate)
    growth = _growth(request.growth)
    load = make_load(request, offered)
    if isinstance(load, workload.ClosedLoad):
        return planning.scaled(load, growth)
    if isinstance(load, workload.RecordedLoad) and not (load.rate > 0 and len(load.requests) >= FEWEST):
        found = f"{len(load.requests):,} recorded requests at {format_rate(1e3 * load.rate)} are too few to plan for"
        remedy = f"Give a recording of {FEWEST} or more, at different times, or plan at --rate with --lengths."
        raise BadInput(found, where="--arrivals", remedy=remedy)
    rate = (offered[0] if offered else load.rate) * growth
    if not offered and growth == 1.0:
        return load
    if request.start_up is None or not isinstance(load, workload.RecordedLoad):
        return load.at_rate(rate)
    # A recording with a schedule keeps its length, so that it gets more requests or fewer.
    times = rate / load.rate
    moments = ", again at random moments before the next one" if times > 1 else ""
    note = f"The recorded day keeps its length: each request comes {number(times, 3)} times in the mean{moments}."
    requests = load.requests.repeated(times, workload.Streams(request.seed).generator(workload.ARRIVALS))
    return replace(load, requests=requests, notes=(*load.notes, note))


def _targets(load: workload.Load, request: EnginePlanRequest) -> planning.Targets:
    limits = {"ttft": ("--ttft", request.ttft), "tpot": ("--tpot", request.tpot), "latency": ("--e2e", request.e2e)}
    share = None if request.goodput is None else percent(request.goodput, "--goodput")
    if share is not None and not 0 < share < 100:
        raise WrongUsage(f"{share:g} % of requests", where="--goodput", remedy="Give more than 0 and less than 100 %.")
    if share is not None and any(":" in str(value) for _, value in limits.values()):
        remedy = "Give limits alone: --ttft 500ms."
        raise WrongUsage("percentiles are given as well", where="--goodput", remedy=remedy)
    found = [
        planning.parse_target(value, name, option)
        if isinstance(value, str)
        else planning.RequestTarget(name, duration(value, option))
        for name, (option, value) in limits.items()
        if value is not None
    ]
    of_all = {each.metric: each.limit_ms for each in found}
    own = None
    if isinstance(load, workload.RecordedLoad):
        times = (load.requests.ttft_slo_ms, load.requests.tpot_slo_ms, load.requests.deadline_ms)
        if any(np.isfinite(each).any() for each in times):
            own = planning.Goodput(planning.USUAL_PERCENT, Promise())
    else:
        found += [
            planning.RequestTarget(name, limit, group=number, group_name=each.name or f"class {number}")
            for number, each in enumerate(load.classes)
            for name, limit in (("ttft", each.ttft_slo_ms), ("tpot", each.tpot_slo_ms), ("latency", each.deadline_ms))
            if math.isfinite(limit)
        ]
    if not found and own is None:
        remedy = "Give --ttft 500ms, --tpot 50ms or --e2e 10s."
        raise WrongUsage("there is no limit to keep", where="--ttft, --tpot, --e2e", remedy=remedy)
    if share is None:
        return planning.Targets(tuple(found), own=own) if found else planning.Targets((), own)
    promise = Promise(*(of_all.get(name, math.inf) for name in limits))
    return planning.Targets(tuple(found), planning.Goodput(share, promise))


def _kv_cache(request: EnginePlanRequest) -> planning.KvCache | None:
    source, kv = request.model_config, request.kv_memory
    gpu_memory = request.gpu_memory
    if source is None:
        remedy = "Give --model-config config.json, or --kv-blocks instead."
        refuse(gpu_memory is not None, "the KV cache of an unknown model", "--gpu-memory", remedy)
        return None
    with located(str(source)[:200]):
        return planning.kv_cache_of(
            source if isinstance(source, Mapping) else planning.model_config(Path(source)),
            gpu_memory=None if gpu_memory is None else parse_bytes(gpu_memory, option="--gpu-memory"),
            utilisation=request.gpu_memory_utilization,
            kv_memory=None if kv is None else parse_bytes(kv, option="--set kv_memory"),
            kv_dtype=request.kv_dtype,
            tensor_parallel=request.tensor_parallel,
        )
