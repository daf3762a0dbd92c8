"""`simulate_engine`: a serving engine under a load, token by token; `engine_settings_of`: how a real one is set up."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from latfit.api.fits import Fit, as_fit, names_a_fit
from latfit.api.hardware import profile_of
from latfit.api.loads import make_load, notes_of, recording_of
from latfit.api.quantities import duration, rates, several, transfer as transfers, values_of
from latfit.api.reading import read, table_of
from latfit.api.request import declared, ignored, verb
from latfit.api.requests import Duration, SimulateEngineRequest
from latfit.api.simulations import Simulation
from latfit.errors import BadInput, WrongUsage
from latfit.hardware import ExecutionPath
from latfit.model import FitResult, fitted_identity
from latfit.simulation import (
    ALL_PROMPTS,
    MOST_POINTS,
    Cluster,
    EnginePoint,
    EngineResult,
    EngineRun,
    EngineSettings,
    KnownSettings,
    Options,
    Order,
    Promise,
    Routing,
    Running,
    Scaling,
    Schedule,
    SettingNote,
    Speculation,
    StepCosts,
    Transfer,
    known_settings,
    parse_autoscaler,
    simulate_points,
    step_costs,
)
from latfit.trace import CleanTrace, Trace, engine_counts, engine_facts, open_source, read_columns
from latfit.units import format_percent, format_rate
from latfit.validation import no_prefill_warning, outside_warning
from latfit.workload import ClosedLoad, Load, OpenLoad, RecordedLoad, parse_lengths

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from latfit.reporting import Making, Rendered, Table, Verdict

Q = TypeVar("Q")


@dataclass(frozen=True, repr=False, eq=False)
class EngineSimulation(Simulation):
    """Serving engines, each at a load. subject: model and machine of the steps, where they are known.  setup_line: how
    the engine is set up and who says so, where that is not options alone."""

    runs: Sequence[EngineResult]
    sla_ms: float = math.inf
    subject: str = ""
    setup_line: str = ""

    @cached_property
    def answer(self) -> "Verdict":
        from latfit.reporting import engines_verdict

        return engines_verdict(self.runs)

    def tables(self, *, brief: bool = False) -> "list[Table]":
        from latfit.reporting import engine_tables

        return engine_tables(self.runs, brief=brief)

    @property
    def lines(self) -> list[str]:
        return [self.setup_line] if self.setup_line else []

    def plot(self) -> "Figure":
        from latfit.reporting import engine_figure

        return engine_figure(self.runs)

    @property
    def would_carry(self) -> str:
        """What would carry a load that no run does, in a sentence."""
        best = max(self.runs, key=lambda run: run.summary.throughput_per_s)
        each = best.summary.throughput_per_s / best.routing.replicas
        if best.routing.scaling is not None:
            return "Ask for more replicas, or sooner; or lower the rate."
        if best.prefill_replicas:
            return "Lower the rate, or give more --set prefill_replicas or --replicas."
        if not best.rate_per_s > 0:
            return "Lower the rate, or give more --kv-blocks or --max-num-seqs."
        needed = math.floor(best.rate_per_s / each) + 1
        carried = f"--replicas {needed} would carry it, at {format_rate(each, down=True)} each"
        return f"{carried}; or lower the rate, or give more --kv-blocks or --max-num-seqs."

    def page(self, made: "Making") -> "Rendered":
        from latfit.reporting import engines_page

        return engines_page(self.runs, replace(made, sla_ms=self.sla_ms, subject=self.subject))


AXES = (
    "rate", "users", "think", "lengths", "tenants", "batching", "order", "kv_blocks", "block_size", "max_num_seqs",
    "max_num_batched_tokens", "long_prefill_token_threshold", "synchronous", "start_at", "decode_first", "swap",
    "prefix_hit_rate", "draft_tokens", "acceptance", "draft_cost", "length_error", "switch_at", "ageing", "replicas",
    "prefill_replicas", "route", "prefix_share", "autoscale", "start_up",
)  # fmt: skip
"""What a sweep of engines varies."""


def _axes(vary: Mapping[str, Iterable[Any]]) -> dict[str, list[Any]]:
    """What is varied, by parameter, the rate first. Raises WrongUsage."""
    fields = {each.name: each for each in declared(SimulateEngineRequest)}
    found: dict[str, list[Any]] = {}
    for asked, values in sorted(vary.items(), key=lambda item: item[0] != "rate"):
        name = asked.replace("-", "_")
        if name not in AXES:
            known = ", ".join(sorted(each.replace("_", "-") for each in AXES))
            raise WrongUsage(f"{asked!r} is no setting of engines", where="--sweep", remedy=f"Vary {known}.")
        try:
            found[name] = [fields[name].value_of(str(value)) for value in values]
        except (ValueError, KeyError):
            told = f"{', '.join(map(str, values))}: no values of {asked}"
            raise WrongUsage(told, where="--sweep", remedy=fields[name].text) from None
    return found


def named_settings(request: Any) -> dict[str, Any]:
    """The settings of an engine that a request names, as `engine_settings_of` takes them."""
    found = {name: getattr(request, name, None) for name in ("kv_blocks", *USUAL)}
    return {name: value for name, value in found.items() if value is not None}


def with_settings(request: Q) -> Q:
    """Return the request with the settings of its mapping `engine` as fields. Raises WrongUsage."""
    given = {name.replace("-", "_"): value for name, value in (getattr(request, "engine", None) or {}).items()}
    if unknown := [name for name in given if not hasattr(request, name)]:
        raise WrongUsage(f"{unknown[0]!r} is no setting", where="engine", remedy=f"Take {', '.join(USUAL)}.")
    return replace(request, engine=None, **given)  # type: ignore[type-var]


@verb(SimulateEngineRequest)
def simulate_engine(request: SimulateEngineRequest) -> EngineSimulation:
    """Simulate a serving engine token by token: batching, KV blocks, preemption, orders, replicas.

    Settings that are not named the fit's trace may tell. Raises WrongUsage, BadInput; an unstable load is no error.
    """
    request = with_settings(request)
    options = Options(
        request.requests, request.warmup, request.replications, request.seed, _limit(request.sla, "--sla")
    )
    promise = Promise(_limit(request.ttft, "--ttft"), _limit(request.tpot, "--tpot"), options.sla_ms)
    fit, prefill_fit, scatter = request.fit, request.prefill_fit, scatters(request.service)
    if not request.force:
        check_one_engine(fit, prefill_fit, request.prefill_on)
    costs, unmeasured, subject, fits = engine_costs(
        fit, prefill_fit, request.prefill_on, request.hardware, scatter=scatter
    )
    apart = _cluster(request, scatter=scatter)
    axes = _axes(values_of(request.vary))
    offered = rates(axes.pop("rate", None), "--sweep rate") or rates(request.rate, per_s=request.rate_per_s)
    given = replace(
        request,
        arrivals=None if request.arrivals is None else recording_of(request.arrivals),
        prompt_lengths=None if request.prompt_lengths is None else recording_of(request.prompt_lengths),
        replicas_at=None if request.replicas_at is None else schedule_of(request.replicas_at),
    )
    names = {"batching": several(request.batching), "order": several(request.order)}
    varied = {name.replace("-", "_") for name in values_of(request.vary)}
    running = request.running or Running(request.workers, request.backend, request.scheduler)
    loads: dict[tuple[Any, ...], Load] = {}
    points, line = [], ""
    for chosen in _cases({"rate": offered or [None], **names, **axes}):
        case = replace(given, **chosen)
        setup = engine_settings_of(fits, **named_settings(case), batching=case.batching)
        line = line or setup.line
        ordered = order_of(case)
        load = _load(case, loads)
        known = [*unmeasured, *notes_of(load), *(each.sentence for each in setup.notes)]
        points.append(
            EnginePoint(
                load=load,
                costs=costs,
                settings=replace(setup.settings[0], order=ordered),
                options=options,
                promise=promise,
                cluster=replace(apart, routing=_routing(case), prefill_replicas=case.prefill_replicas),
                labels={name: value for name, value in chosen.items() if name in varied},
                told=partial(_told, known, fits, apart.transfer),
                whole=not varied and request.out is None and running.backend == "local",
            )
        )
    runs = simulate_points(points, running, out=request.out, resume=request.resume, progress=request.progress)
    return EngineSimulation(runs, options.sla_ms, subject, line)


def _cases(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of what is varied. Raises WrongUsage for too many."""
    if math.prod(len(values) for values in axes.values()) > MOST_POINTS:
        raise WrongUsage(f"more than {MOST_POINTS:,} points", where="--sweep", remedy="Give fewer values of each.")
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def _told(
    known: Sequence[str],
    fits: Sequence[FitResult],
    transfer: Transfer,
    run: EngineRun,
    settings: EngineSettings,
) -> list[str]:
    """What should be known of a run, after what is known of all."""
    beyond = outside_warning(fits, run, settings) if fits else None
    told = [*known, *([f"{beyond.message}. {beyond.remedy}"] if beyond else [])]
    if transfer.prompts != ALL_PROMPTS:
        share = float(transfer.prefilled_apart(run.requests.prompt_tokens).mean())
        told.append(f"{format_percent(100 * share)} of the prompts are prefilled apart.")
        if share < 1 and fits and (own := no_prefill_warning(fits[-1])):
            told.append(f"The others: {own.message}. {own.remedy}")
    return told


USUAL: Mapping[str, Any] = {
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "block_size": 16,
    "long_prefill_token_threshold": 0,
    "synchronous": False,
    "start_at": 1,
    "decode_first": False,
    "swap": None,
    "prefix_hit_rate": 0.0,
    "draft_tokens": 0,
    "acceptance": 0.7,
    "draft_cost": None,
}
"""Settings of an engine that nobody names, by the names of the command line's options."""

MOST_FILES = 2
"""Files that are named where settings come from."""

GIVEN, ASSUMED = "given", "assumed"
"""Origins of a setting that an option names, and of one that no source names."""

UNNAMED = (ASSUMED, "vLLM's default")
"""Origins of settings that no source names (`engine_settings_of`)."""


@dataclass(frozen=True)
class EngineSetup:
    """How an engine is set up. settings: one for each batching.  origin: where each setting comes from that is not the
    usual one, by option: a file's name, "given", "observed" (counted in the steps), "vLLM's default", "assumed".
    notes: what should be known.  files: all that told something."""

    settings: Sequence[EngineSettings]
    origin: Mapping[str, str]
    notes: Sequence[SettingNote] = ()
    files: Sequence[str] = ()

    @property
    def line(self) -> str:
        """The settings that decide, and where they come from; empty where options name them all."""
        if not self.files or all(source in (GIVEN, ASSUMED) for source in self.origin.values()):
            return ""
        one = self.settings[0]
        parts = [
            f"{one.kv_blocks:,} KV blocks of {one.block_size}",
            f"{one.max_num_seqs:,} requests and {one.max_num_batched_tokens:,} tokens a step at most",
            ("asynchronous" if one.asynchronous else "synchronous")
            + (" (assumed; --synchronous if not)" if self.origin.get("synchronous") == ASSUMED else ""),
        ]
        if one.cached_share:
            parts.append(f"{format_percent(100 * one.cached_share)} of prompts cached")
        if one.speculation.draft_tokens:
            drafts = one.speculation
            accepted = format_percent(100 * drafts.acceptance)
            parts.append(f"{drafts.draft_tokens} draft tokens, accepted one after the other with {accepted}")
        more = f" and {len(self.files) - MOST_FILES} more" if len(self.files) > MOST_FILES else ""
        return f"Engine: {', '.join(parts)} (from {', '.join(self.files[:MOST_FILES])}{more})."


def engine_settings_of(
    sources: Any,
    *,
    kv_blocks: int | None = None,
    batching: str | Sequence[str] = "chunked-prefill",
    server: Mapping[str, Any] | None = None,
    usual: Mapping[str, Any] = USUAL,
    **given: Any,
) -> EngineSetup:
    """How the engine is set up that sources tell of: KV blocks, block size, `max_num_seqs`, token budget, scheduling
    beside the step before, share of prompts found in the prefix cache, drafts and their acceptance.

    sources: a fit of an engine's steps (it keeps what its trace said), a trace, a log, a CleanTrace, several of these,
    or None.  server: facts of the running server by the names of a recorder's provenance, which go before those of the
    sources; where the two differ a note says so.  kv_blocks, batching,
    given: settings that options name, None where they do not; they go before all else. Their names are those of
    `USUAL`.  usual: settings that nobody names. Raises WrongUsage, also where nobody says how large the KV cache is;
    BadInput.
    """
    several = sources if isinstance(sources, list | tuple) else [] if sources is None else [sources]
    origins: list[tuple[str, Mapping[str, Any]]] = []
    counts: dict[str, float] = {}
    for each in several:
        name, provenance, did = _told_by(each)
        origins.append((name, provenance))
        for key, value in did.items():
            counts[key] = counts.get(key, 0.0) + value
    named = {name: value for name, value in {**given, "kv_blocks": kv_blocks}.items() if value is not None}
    facts = engine_facts(origins, counts)
    if server is not None:
        facts = facts.overruled_by("the server's metrics", server)
    known = known_settings(facts, named.get("block_size"))
    return _setup(known, named, batching, usual)


def _told_by(source: Any) -> tuple[str, Mapping[str, Any], Mapping[str, float]]:
    """(name, provenance, what the engine did besides) of a trace, or of what a fit keeps of its own."""
    if isinstance(source, Fit | FitResult) or names_a_fit(source):
        found = as_fit(source).result
        provenance, counts = found.provenance.get("trace"), found.data.more.get("engine_counts")
        numbers = counts.items() if isinstance(counts, Mapping) else ()
        provenance = provenance if isinstance(provenance, Mapping) else {}
        return (
            (found.data.source or "the fit").partition(", ")[0],
            _with_device(provenance, {fitted_identity(found).get("path")}),
            {str(name): float(value) for name, value in numbers if isinstance(value, int | float)},
        )
    if isinstance(source, Trace):
        name, trace = "the trace", source
    else:
        steps = source if isinstance(source, CleanTrace) else read(source)
        name, trace = steps.name, steps.trace
    paths = set(trace.coded("path")[1]) if "path" in trace else set()
    return name, _with_device(trace.provenance, paths), engine_counts(trace)


def _with_device(provenance: Mapping[str, Any], paths: Collection[str | None]) -> Mapping[str, Any]:
    """Add the device of a vLLM that was recorded from outside with `--path cpu`; its metrics name none."""
    if provenance.get("engine") == "vLLM" and set(paths) == {"cpu"}:
        return {"device_type": "cpu", **provenance}
    return provenance


def _setup(
    known: KnownSettings, named: Mapping[str, Any], batching: str | Sequence[str], usual: Mapping[str, Any]
) -> EngineSetup:
    chosen = {**usual, **known.values, **named}
    if "kv_blocks" not in chosen:
        raise WrongUsage(
            "the size of the KV cache is required",
            where="--kv-blocks",
            remedy="Look for `KV cache size: ... tokens` in the engine's log (GPU or CPU) and divide by the block size:"
            " 16 tokens unless it is set, 128 on a CPU.",
        )
    for name in ("acceptance", "draft_cost"):
        if name in named and not chosen["draft_tokens"]:
            ignored(f"--{name.replace('_', '-')}", "nothing is drafted")
    names = several(batching)
    if "static" in names and "draft_tokens" not in named:
        chosen["draft_tokens"] = 0
    # What is recorded of contents gives way to a rate that somebody types.
    contents = "prefix_hit_rate" not in named
    settings = [
        replace(_of_engine(name, chosen), prefix_cache=contents, padded_graphs=known.padded_graphs) for name in names
    ]
    origin = {**known.origin, **dict.fromkeys(named, GIVEN)}
    notes = [note for note in known.notes if note.setting not in named]
    return EngineSetup(settings, origin, notes, known.files)


def _of_engine(batching: str, chosen: Mapping[str, Any]) -> EngineSettings:
    draft_cost, swap = chosen["draft_cost"], chosen["swap"]
    draft_ms = 0.0 if draft_cost is None else duration(draft_cost, "--draft-cost")
    return EngineSettings(
        batching=batching,
        max_num_seqs=chosen["max_num_seqs"],
        max_num_batched_tokens=chosen["max_num_batched_tokens"],
        kv_blocks=chosen["kv_blocks"],
        block_size=chosen["block_size"],
        long_prefill_token_threshold=chosen["long_prefill_token_threshold"],
        asynchronous=not chosen["synchronous"],
        start_at=chosen["start_at"],
        prefill_first=not chosen["decode_first"],
        swap_ms_per_token=None if swap is None else duration(swap, "--swap"),
        cached_share=chosen["prefix_hit_rate"],
        speculation=Speculation(chosen["draft_tokens"], chosen["acceptance"], draft_ms),
    )


def _limit(text: Duration | None, option: str) -> float:
    """A latency target in ms; infinite where there is none."""
    return math.inf if text is None else duration(text, option)


def order_of(request: Any) -> Order:
    """The order of waiting requests. Raises WrongUsage."""
    return Order(request.order, request.length_error, _limit(request.ageing, "--set ageing"), request.switch_at)


def scatters(service: str) -> bool:
    """Whether steps scatter as measured. Raises WrongUsage."""
    if service not in ("fitted", "deterministic"):
        raise WrongUsage(
            f"steps of an engine are not {service}", where="--set service", remedy="Take fitted or deterministic."
        )
    return service == "fitted"


def engine_costs(
    fit: Any, prefill_fit: Any, prefill_on: Any, hardware: Any, *, scatter: bool
) -> tuple[StepCosts, list[str], str, list[FitResult]]:
    """Step costs, a note on each that was not measured (nominal ones, prefill that the fit has no data on), what is
    known of model and machine, and the fits that measured."""
    from latfit.reporting import what_is_known

    notes = []
    first = prefill_fit if prefill_on is None else prefill_on
    if fit is not None:
        name, steps = str(fit)[:200], as_fit(fit).result
        subject = what_is_known([ExecutionPath("engine", steps)])
    else:
        path = profile_of(hardware).first_of(("gpu",))
        if path is None:
            raise BadInput("there is no gpu path", where=str(hardware), remedy="Name the engine's fit with --fit.")
        name, steps, subject = path.label, path.fit, what_is_known([path])
        if path.nominal is not None:
            costless = path.nominal.per_token_ms == 0 and first is None
            free = "; without per_token a prompt costs no more than one token" if costless else ""
            notes.append(f"{name}: nominal step costs ({path.nominal.text}), not measured{free}.")
    prefill: FitResult | None = None if prefill_fit is None else as_fit(prefill_fit).result
    of_prefill = steps if first is None else as_fit(first).result
    if warning := no_prefill_warning(of_prefill):
        notes.append(f"{name if first is None else str(first)[:200]}: {warning.message}. {warning.remedy}")
    measured = [each for each in (steps, prefill) if each is not None and not each.data.nominal]
    return step_costs(steps, prefill, scatter=scatter), notes, subject, measured


def check_one_engine(fit: Any, prefill_fit: Any, prefill_on: Any = None) -> None:
    """Raises FitNotUsable where the fits of one engine are of different systems, or those of engines that serve
    together of different models."""
    named = {"fit": fit, "prefill fit": prefill_fit, "prefill engine": prefill_on}
    known = {name: as_fit(each).result for name, each in named.items() if each is not None}
    if len(known) > 1:
        from latfit.fitting import SYSTEM, check_alike

        check_alike(known)
        check_alike({name: each for name, each in known.items() if name != "prefill engine"}, SYSTEM)


def schedule_of(given: Any) -> Schedule:
    """How many replicas from when on, of pairs (seconds, replicas), a file or a table with columns t_s and replicas.
    Raises BadInput, WrongUsage."""
    if isinstance(given, Schedule):
        return given
    if isinstance(given, str | Path):
        table = read_columns(open_source(given), ("t_s", "replicas"))
    elif isinstance(given, list | tuple):
        import numpy as np

        table = Trace({name: np.array([row[place] for row in given]) for place, name in enumerate(("t_s", "replicas"))})
    else:
        table = table_of(given)
    missing = [name for name in ("t_s", "replicas") if name not in table]
    if missing:
        raise BadInput(f"no column {missing[0]}", where=str(given)[:200], remedy="Give t_s and replicas.")
    moments, counts = table.floats("t_s"), table.floats("replicas")
    if not (counts == counts.astype(int)).all():
        raise BadInput("replicas are not whole", where=str(given)[:200], remedy="Give whole numbers.")
    return Schedule(tuple((1e3 * moments).tolist()), tuple(counts.astype(int).tolist()))


def _routing(case: SimulateEngineRequest) -> Routing:
    """The router of a case, with how its replicas come and go. Raises WrongUsage."""
    scaling: Scaling | None = case.replicas_at
    replicas, start_up = case.replicas, case.start_up
    if case.autoscale is not None:
        scaling = parse_autoscaler(case.autoscale)
        replicas = max(replicas, scaling.least)
    elif isinstance(scaling, Schedule):
        replicas = scaling.replicas[0]
    if scaling is not None and start_up is None:
        raise WrongUsage(
            "how long a replica takes to start is required",
            where="--start-up",
            remedy="Give --start-up 2min: from asking for one until it serves.",
        )
    start_up_ms = 0.0 if start_up is None else duration(start_up, "--start-up", zero=True)
    return Routing(replicas, case.route, case.prefix_share, scaling=scaling, start_up_ms=start_up_ms)


def _cluster(request: SimulateEngineRequest, *, scatter: bool) -> Cluster:
    """One engine that serves, and one that prefills for it where there is one."""
    if request.prefill_on is None:
        return Cluster()
    moved = Transfer() if request.transfer is None else Transfer(*transfers(request.transfer))
    if request.prefill_lengths is not None:
        moved = replace(moved, prompts=_range_of(request.prefill_lengths))
    return Cluster(Routing(), step_costs(as_fit(request.prefill_on).result, scatter=scatter), moved)


def _range_of(text: str) -> tuple[float, float]:
    """(lowest, highest) of `100..200`, `..200` or `100..` tokens. Raises WrongUsage."""
    low, dots, high = text.replace(" ", "").partition("..")
    ends = [each.replace(",", "") for each in (low, high)]
    if dots and any(ends) and all(not each or each.isdecimal() for each in ends):
        found = (float(ends[0] or 0), float(ends[1] or math.inf))
        if found[0] <= found[1]:
            return found
    raise WrongUsage(
        f"{text!r} is no range of tokens", where="--prefill-lengths", remedy="Write ..160, 512.. or 160..512."
    )


LOADS = ("rate", "users", "think", "lengths", "tenants")
"""What a load depends on, of what a sweep varies."""


def _load(case: SimulateEngineRequest, known: dict[tuple[Any, ...], Load]) -> Load:
    """The load of a case, with the lengths of its requests; known: loads so far."""
    key = tuple(getattr(case, name) for name in LOADS)
    if key not in known:
        known[key] = _made_load(case)
    return known[key]


def _made_load(case: SimulateEngineRequest) -> Load:
    rate: Any = case.rate
    load = make_load(case, [] if rate is None else [rate])
    if not isinstance(load, RecordedLoad):
        if case.lengths is None and case.prompt_lengths is None:
            raise WrongUsage(
                "requests have no lengths",
                where="--users" if isinstance(load, ClosedLoad) else "--rate",
                remedy="Give --lengths 512:128 or --set prompt_lengths=FILE.",
            )
        load = replace(load, lengths=load.lengths if case.lengths is None else parse_lengths(case.lengths))
    if isinstance(load, ClosedLoad):
        return load
    if isinstance(load, OpenLoad):
        load = replace(load, users=case.tenants)
    return load if rate is None else load.at_rate(rate)
