"""`simulate_engine`: a serving engine under a load, token by token."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

from latfit import reporting, simulation
from latfit.api.answer import WithPage
from latfit.api.fits import Fit, as_fit, names_a_fit
from latfit.api.hardware import profile_of
from latfit.api.quantities import duration, limit, rates, several, transfer as transfers, values_of
from latfit.api.reading import columns_in, make_load, read, recording_of
from latfit.api.request import declared, given_in, ignored, verb
from latfit.api.requests import SimulateEngineRequest, SpecialSettings
from latfit.api.simulations import Simulation
from latfit.errors import BadInput, WrongUsage
from latfit.hardware import ExecutionPath
from latfit.messages import message
from latfit.model import FitResult, fitted_identity
from latfit.trace import CleanTrace, Trace, engine_counts, engine_facts
from latfit.validation import far_context_warning, outside_warning
from latfit.workload import ClosedLoad, Load, OpenLoad

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Q = TypeVar("Q")


@dataclass(frozen=True, repr=False, eq=False)
class EngineSimulation(Simulation, WithPage):
    """Serving engines, each at a load. setup_line: settings and their origin."""

    runs: Sequence[simulation.EngineResult]
    sla_ms: float = math.inf
    subject: str = ""
    setup_line: str = ""
    title = "Simulated serving engines"

    @cached_property
    def _shown(self) -> "reporting.table.Shown":
        tables = reporting.simulation_tables
        best, _ = tables.best_engine(self.runs)
        return reporting.table.Shown(
            *reporting.brief.engines_verdict(self.runs),
            lines=[self.setup_line] if self.setup_line else [],
            messages=self._notes,
            brief=tables.engine_tables(self.runs, brief=True),
            tables=tables.engine_tables(self.runs),
            numbers=reporting.brief.p99_numbers([] if best is None else tables.measured_times(best.summary)),
        )

    def plot(self) -> "Figure":
        return reporting.simulation_figures.engine_figure(self.runs)


AXES = {"rate", "users", "think", "lengths", "tenants", "prefill_replicas", "autoscale", "start_up"}
AXES |= {each.name for each in declared(SpecialSettings)} - {"engine", "service"}
"""What a sweep of engines varies."""


def _axes(vary: Mapping[str, Iterable[Any]]) -> dict[str, list[Any]]:
    fields = {each.name: each for each in declared(SimulateEngineRequest) if each.name in AXES}
    found: dict[str, list[Any]] = {}
    for name, values in vary.items():
        if name not in fields:
            remedy = f"Vary {', '.join(sorted(each.replace('_', '-') for each in AXES))}."
            raise WrongUsage(f"{name!r} is no setting of engines", where="--sweep", remedy=remedy)
        found[name] = [fields[name].parse(str(value), "--sweep") for value in values]
    return found


def named_settings(request: Any) -> dict[str, Any]:
    found = {name: getattr(request, name, None) for name in simulation.USUAL_SETTINGS}
    return {name: value for name, value in found.items() if value is not None}


def with_settings(request: Q) -> Q:
    """Return the request with the settings of its mapping `engine` in fields that are not given. Raises WrongUsage."""
    given = {name.replace("-", "_"): value for name, value in (getattr(request, "engine", None) or {}).items()}
    known = [name for name in ("batching", "order", *simulation.USUAL_SETTINGS) if hasattr(request, name)]
    if unknown := [name for name in given if name not in known]:
        remedy = f"Take {', '.join(known)}."
        raise WrongUsage(f"{unknown[0]!r} is no setting of an engine", where="engine", remedy=remedy)
    explicit = given_in(request)
    return replace(request, engine=None, **{name: given[name] for name in given if name not in explicit})  # type: ignore[type-var]


@verb(SimulateEngineRequest)
def simulate_engine(request: SimulateEngineRequest) -> EngineSimulation:
    """Simulate a serving engine token by token: batching, KV blocks, preemption, orders, replicas.

    Settings that are not given come from the fit's trace. Raises WrongUsage, BadInput; not for an unstable load.
    """
    request = with_settings(request)
    limits = {name: limit(getattr(request, name), f"--{name}") for name in ("ttft", "tpot", "sla")}
    options = simulation.Options(request.requests, request.warmup, request.replications, request.seed, limits["sla"])
    promise = simulation.Promise(limits["ttft"], limits["tpot"], limits["sla"])
    scatter = request.service == "fitted"
    if not request.force:
        check_one_engine(request.fit, request.prefill_fit, request.prefill_on)
    costs, unmeasured, subject, fits = engine_costs(request, scatter=scatter)
    cluster = simulation.Cluster()
    if request.prefill_on is not None:
        moved = () if request.transfer is None else transfers(request.transfer)
        prefill = simulation.step_costs(as_fit(request.prefill_on).result, scatter=scatter)
        cluster = simulation.Cluster(simulation.Routing(), prefill, simulation.Transfer(*moved))
    axes = _axes(values_of(request.vary))
    varied = set(axes)
    offered: list[Any] = rates(axes.pop("rate", None), "--sweep") or rates(request.rate)
    usual = {"rate": offered or [None], "batching": several(request.batching), "order": several(request.order)}
    axes = {**usual, **axes}
    if math.prod(len(values) for values in axes.values()) > simulation.MOST_POINTS:
        found = f"more than {simulation.MOST_POINTS:,} points"
        raise WrongUsage(found, where="--sweep", remedy="Give fewer values of each.")
    given = replace(
        request,
        arrivals=None if request.arrivals is None else recording_of(request.arrivals),
        prompt_lengths=None if request.prompt_lengths is None else recording_of(request.prompt_lengths),
        replicas_at=None if request.replicas_at is None else schedule_of(request.replicas_at),
    )
    running = request.running or simulation.Running(request.workers, request.backend, request.scheduler)
    loads: dict[tuple[Any, ...], Load] = {}
    points, line = [], ""
    for values in product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        case: Any = replace(given, **chosen)
        setup = engine_settings_of(fits, **named_settings(case), batching=case.batching)
        line = line or setup.line
        key = tuple(getattr(case, name) for name in ("rate", "users", "think", "lengths", "tenants"))
        if key not in loads:
            load = make_load(case, [] if case.rate is None else [case.rate])
            load = replace(load, users=case.tenants) if isinstance(load, OpenLoad) else load
            loads[key] = load if case.rate is None or isinstance(load, ClosedLoad) else load.at_rate(case.rate)
        notes = [*unmeasured, *loads[key].notes, *(each.sentence for each in setup.notes)]
        points.append(
            simulation.EnginePoint(
                load=loads[key],
                costs=costs,
                settings=replace(setup.settings, order=order_of(case)),
                options=options,
                promise=promise,
                cluster=replace(cluster, routing=_routing(case), prefill_replicas=case.prefill_replicas),
                labels={name: value for name, value in chosen.items() if name in varied},
                told=partial(_notes, notes, fits),
                whole=not varied and request.out is None and running.backend == "local",
            )
        )
    runs = simulation.simulate_points(
        points, running, out=request.out, resume=request.resume, progress=request.progress
    )
    return EngineSimulation(runs, options.sla_ms, subject, line)


def _notes(
    known: Sequence[str], fits: Sequence[FitResult], run: simulation.EngineRun, settings: simulation.EngineSettings
) -> list[str]:
    beyond = [outside_warning(fits, run, settings), far_context_warning(fits, run)] if fits else []
    return [*known, *(f"{each.message}. {each.remedy}" for each in beyond if each)]


def engine_settings_of(
    sources: Any,
    *,
    batching: str = "chunked-prefill",
    server: Mapping[str, Any] | None = None,
    **given: Any,
) -> simulation.EngineSetup:
    """Return how an engine is set up.

    sources: fits, traces or logs of the engine, or None. server: published settings. given: by names of USUAL_SETTINGS.
    Precedence: given, server, sources, the usual ones. Raises BadInput, WrongUsage.
    """
    origins: list[tuple[str, Mapping[str, Any]]] = []
    counts: dict[str, float] = {}
    for each in sources if isinstance(sources, list | tuple) else [] if sources is None else [sources]:
        name, provenance, counted = _facts_in(each)
        origins.append((name, provenance))
        for key, value in counted.items():
            counts[key] = counts.get(key, 0.0) + value
    facts = engine_facts(origins, counts)
    if server is not None:
        facts = facts.overruled_by("the server's metrics", server)
    named = {name: value for name, value in given.items() if value is not None}
    for name in {"draft_cost", "swap"} & set(named):
        named[name] = duration(named[name], f"--set {name}")
    setup = simulation.set_up_engine(facts, named, batching)
    for name in {"acceptance", "draft_cost"} & set(named):
        if not setup.settings.speculation.draft_tokens:
            ignored(f"--set {name}", "nothing is drafted")
    return setup


def _facts_in(source: Any) -> tuple[str, Mapping[str, Any], Mapping[str, float]]:
    """Return (name, provenance, counts of the engine) of a trace or a fit."""
    counts: Mapping[str, Any]
    if isinstance(source, Fit | FitResult) or names_a_fit(source):
        found = as_fit(source).result
        provenance, counts = found.provenance.get("trace") or {}, found.data.more.get("engine_counts") or {}
        name, paths = (found.data.source or "the fit").partition(", ")[0], {fitted_identity(found).get("path")}
    else:
        steps = source if isinstance(source, CleanTrace | Trace) else read(source)
        name, trace = ("the trace", steps) if isinstance(steps, Trace) else (steps.name, steps.trace)
        provenance, counts = trace.provenance, engine_counts(trace)
        paths = set(trace.coded("path")[1]) if "path" in trace else set()
    if provenance.get("engine") == "vLLM" and paths == {"cpu"}:  # recorded from outside: its metrics name no device
        provenance = {"device_type": "cpu", **provenance}
    return name, provenance, counts


def order_of(request: Any) -> simulation.Order:
    return simulation.Order(
        request.order, request.length_error, limit(request.ageing, "--set ageing"), request.switch_at
    )


def engine_costs(request: Any, *, scatter: bool) -> tuple[simulation.StepCosts, list[str], str, list[FitResult]]:
    """Return step costs, notes, model and machine, and the measured fits."""
    fit, prefill_fit, hardware = request.fit, request.prefill_fit, request.hardware
    prefill_on = getattr(request, "prefill_on", None)
    notes = []
    first = prefill_fit if prefill_on is None else prefill_on
    if fit is not None:
        name, path = str(fit)[:200], ExecutionPath("engine", as_fit(fit).result)
    else:
        found = profile_of(hardware).engine_path
        if found is None:
            raise BadInput("there is no gpu path", where=str(hardware), remedy="Name the engine's fit with --fit.")
        name, path = found.label, found
        if path.nominal is not None:
            costless = path.nominal.per_token_ms == 0 and first is None
            free = "; without per_token a prompt costs no more than one token" if costless else ""
            notes.append(f"{name}: nominal step costs ({path.nominal.text}), not measured{free}.")
    prefill = None if prefill_fit is None else as_fit(prefill_fit).result
    if not (path.fit if first is None else as_fit(first).result).knows_prefill:
        warning = message("no_prefill_fit")
        notes.append(f"{name if first is None else str(first)[:200]}: {warning.message}. {warning.remedy}")
    measured = [each for each in (path.fit, prefill) if each is not None and not each.data.nominal]
    return (
        simulation.step_costs(path.fit, prefill, scatter=scatter),
        notes,
        reporting.fit_tables.what_is_known([path]),
        measured,
    )


def check_one_engine(fit: Any, prefill_fit: Any = None, prefill_on: Any = None) -> None:
    """Raise FitNotUsable for fits of different engines or models."""
    named = {"fit": fit, "prefill fit": prefill_fit, "prefill engine": prefill_on}
    known = {name: as_fit(each).result for name, each in named.items() if each is not None}
    if len(known) > 1:
        from latfit.fitting import check_alike
        from latfit.trace import SYSTEM

        check_alike(known)
        check_alike({name: each for name, each in known.items() if name != "prefill engine"}, SYSTEM)


def schedule_of(given: Any) -> simulation.Schedule:
    """Return replicas over time from pairs (seconds, replicas) or a table (t_s, replicas). Raises BadInput."""
    columns = ("t_s", "replicas")
    if isinstance(given, list | tuple):
        given = dict(zip(columns, zip(*given, strict=True), strict=True))
    table = columns_in(given, columns)
    counts = table.floats("replicas").astype(int)
    if (counts != table.floats("replicas")).any():
        raise BadInput("replicas are not whole", where=str(given)[:200], remedy="Give whole numbers.")
    return simulation.Schedule(tuple((1e3 * table.floats("t_s")).tolist()), tuple(counts.tolist()))


def _routing(case: SimulateEngineRequest) -> simulation.Routing:
    scaling: simulation.Scaling | None = case.replicas_at
    replicas = case.replicas
    if case.autoscale is not None:
        scaling = simulation.parse_autoscaler(case.autoscale)
        replicas = max(replicas, scaling.least)
    elif isinstance(scaling, simulation.Schedule):
        replicas = scaling.replicas[0]
    start_up_ms = 0.0 if scaling is None else duration(case.start_up, "--start-up", zero=True)
    return simulation.Routing(replicas, case.route, case.prefix_share, scaling=scaling, start_up_ms=start_up_ms)
