"""`simulate_engine`: a serving engine under a load, token by token; `engine_settings_of`: how a real one is set up."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from latfit.api.fits import Fit, as_fit
from latfit.api.hardware import profile_of
from latfit.api.loads import make_load, notes_of, recording_of
from latfit.api.quantities import (
    Duration,
    Needs,
    duration,
    library_verb,
    only_with,
    rates,
    transfer as transfers,
    values_of,
)
from latfit.api.reading import read, table_of
from latfit.api.simulations import NOTHING_TO_RESUME, Simulation, not_varied
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
    Progress,
    Promise,
    Routing,
    Running,
    Scaling,
    Schedule,
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
    from pandas import DataFrame

    from latfit.reporting import Making, Rendered, Table, Verdict

Batching = Literal["chunked-prefill", "continuous", "selective", "static"]
OrderName = Literal["fcfs", "sjf", "slo", "fair", "priority", "switch"]
Route = Literal["round-robin", "least-loaded", "shortest-queue", "prefix", "predicted-latency"]
EngineService = Literal["fitted", "deterministic"]
FEW = 4
"""Runs of which a terminal shows every class."""


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

    @property
    def cautions(self) -> list[str]:
        """Without what the verdict says already."""
        return [note for note in super().cautions if not note.startswith("Unstable")]

    @property
    def frame(self) -> "DataFrame":
        import pandas as pd

        return pd.DataFrame([run.row() for run in self.runs])

    def tables(self, *, brief: bool = False) -> "list[Table]":
        from latfit.reporting import brief_engine_table, engine_classes, engine_tables

        if not brief:
            return engine_tables(self.runs)
        return [brief_engine_table(self.runs), *(engine_classes(self.runs) if len(self.runs) <= FEW else [])]

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
            return "Lower the rate, or give more --prefill-replicas or --replicas."
        if not best.rate_per_s > 0:
            return "Lower the rate, or give more --kv-blocks or --max-num-seqs."
        needed = math.floor(best.rate_per_s / each) + 1
        carried = f"--replicas {needed} would carry it, at {format_rate(each, down=True)} each"
        return f"{carried}; or lower the rate, or give more --kv-blocks or --max-num-seqs."

    def page(self, made: "Making") -> "Rendered":
        from latfit.reporting import engines_page

        return engines_page(self.runs, replace(made, sla_ms=self.sla_ms, subject=self.subject))


def _drawn(name: str, *, with_curve: bool = True) -> Needs:
    """What belongs to requests that are drawn."""
    if with_curve:
        return Needs(name, lambda o: o.arrivals is None, "recorded requests have their own")
    drawn = "the arrivals are recorded or follow a curve"
    return Needs(name, lambda o: o.arrivals is None and o.load_curve is None, drawn)


def _ordered(name: str, *orders: str) -> Needs:
    either = " or ".join(orders)
    return Needs(name, lambda o: _any_of(orders, o.order, "fcfs"), f"no order is {either}", f"Add --order {orders[0]}")


def _batched(name: str, *ways: str) -> Needs:
    either = " or ".join(ways)
    return Needs(
        name,
        lambda o: _any_of(ways, o.batching, "chunked-prefill"),
        f"no batching is {either}",
        f"Add --batching {ways[0]}",
    )


def _any_of(names: Sequence[str], given: str | Sequence[str] | None, default: str) -> bool:
    return bool(set(names) & set(_several(given or default)))


NOT_STATIC = ("chunked-prefill", "continuous", "selective")
OF_SETTINGS = (
    _batched("max_num_batched_tokens", *NOT_STATIC),
    _batched("long_prefill_token_threshold", "chunked-prefill"),
    _batched("synchronous", *NOT_STATIC),
    _batched("start_at", "continuous", "static"),
    Needs("start_at", lambda o: not o.decode_first or _any_of(("static",), o.batching, ""), "--decode-first waits"),
    _batched("decode_first", "continuous"),
    _batched("swap", "chunked-prefill", "continuous"),
    _batched("prefix_hit_rate", *NOT_STATIC),
    _ordered("length_error", "sjf", "switch"),
    _ordered("switch_at", "switch"),
    _ordered("ageing", "priority"),
    Needs(
        "route",
        lambda o: (
            o.replicas != 1
            or (getattr(o, "prefill_replicas", None) or 1) != 1
            or getattr(o, "autoscale", None)
            or getattr(o, "replicas_at", None) is not None
        ),
        "there is one engine",
        "Add --replicas 2",
    ),
    Needs("prefix_share", lambda o: o.route == "prefix", "requests are not routed by prefix", "Add --route prefix"),
)
"""What settings of an engine need, a measured one's too."""

WHO_WAIT = "users send a request when they have an answer"
_IN_ONE_CASE = (
    *OF_SETTINGS,
    *(Needs(name, lambda o: o.draft_tokens != 0, "nothing is drafted") for name in ("acceptance", "draft_cost")),
    Needs("ageing", lambda o: o.classes or o.arrivals is not None, "all requests are of one class", "Add --class"),
    Needs("hardware", lambda o: o.fit is None, "--fit names the step costs"),
    Needs(
        "prefill_fit",
        lambda o: o.prefill_on is None or o.prefill_lengths is not None,
        "--prefill-on names the engine that prefills",
    ),
    *(
        Needs(name, lambda o: o.prefill_on is not None, "no engine prefills for another", "Add --prefill-on FIT")
        for name in ("transfer", "prefill_replicas", "prefill_lengths")
    ),
    *(_drawn(name) for name in ("lengths", "tenants", "requests", "replications", "warmup")),
    _drawn("arrival_process", with_curve=False),
    *(Needs(name, lambda o: o.users is None, WHO_WAIT) for name in ("rate", "arrival_process", "tenants")),
    Needs("think", lambda o: o.users is not None, "there are no users", "Add --users 20"),
    *(
        need
        for name in ("autoscale", "replicas_at")
        for need in (
            Needs(name, lambda o: o.users is None, WHO_WAIT),
            Needs(name, lambda o: o.prefill_on is None, "--prefill-on names the engine that prefills"),
        )
    ),
    Needs("replicas", lambda o: o.replicas_at is None, "--replicas-at says how many"),
    Needs("autoscale", lambda o: o.replicas_at is None, "--replicas-at says how many"),
    Needs(
        "start_up",
        lambda o: o.autoscale is not None or o.replicas_at is not None,
        "replicas neither come nor go",
        "Add --autoscale requests:20:1..8",
    ),
)
"""What parameters of one simulation need."""


def _yes(text: str) -> bool:
    return {"yes": True, "true": True, "no": False, "false": False}[text.lower()]


AXES: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("rate", "think", "lengths", "batching", "order"), str),
    **dict.fromkeys(("kv_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"), int),
    **dict.fromkeys(("long_prefill_token_threshold", "start_at", "draft_tokens", "switch_at"), int),
    **dict.fromkeys(("replicas", "prefill_replicas"), int),
    **dict.fromkeys(("users", "tenants"), int),
    **dict.fromkeys(("prefix_hit_rate", "acceptance", "length_error", "prefix_share"), float),
    **dict.fromkeys(("swap", "draft_cost", "ageing", "route", "autoscale", "start_up"), str),
    **dict.fromkeys(("synchronous", "decode_first"), _yes),
}
"""What a sweep of engines varies, and how a value is read."""


def _axes(vary: Mapping[str, Iterable[Any]]) -> dict[str, list[Any]]:
    """What is varied, by parameter, the rate first. Raises WrongUsage."""
    found: dict[str, list[Any]] = {}
    for asked, values in sorted(vary.items(), key=lambda item: item[0] != "rate"):
        name = asked.replace("-", "_")
        if name not in AXES:
            known = ", ".join(sorted(each.replace("_", "-") for each in AXES))
            raise WrongUsage(f"{asked!r} is no setting of engines", where="--sweep", remedy=f"Vary {known}.")
        try:
            found[name] = [AXES[name](str(value)) for value in values]
        except (ValueError, KeyError):
            what = "yes and no" if AXES[name] is _yes else "numbers"
            raise WrongUsage(f"{asked} takes {what}", where="--sweep", remedy="Correct its values.") from None
    return found


def _cases_of(o: Any) -> Iterator[Any]:
    """All parameters, once for each combination of what is varied."""
    axes = _axes(o.vary or values_of(o.sweep))
    for values in product(*axes.values()):
        yield type(o)(**{**vars(o), **dict(zip(axes, values, strict=True))})


def _in_any_case(need: Needs) -> Needs:
    """A parameter has an effect in a sweep where it has one in any of its cases."""
    return replace(need, holds=lambda o: any(need.holds(each) for each in _cases_of(o)))


OF_ENGINES = (
    *(not_varied(name) for name in AXES),
    *map(_in_any_case, _IN_ONE_CASE),
    NOTHING_TO_RESUME,
)
"""What parameters of `simulate_engine` need."""


@library_verb
@only_with(*OF_ENGINES)
def simulate_engine(
    fit: Any = None,
    rate: str | Sequence[str] | None = None,
    lengths: str | None = None,
    *,
    kv_blocks: int | None = None,
    rate_per_s: float | Sequence[float] | None = None,
    prefill_fit: Any = None,
    hardware: Any = "hardware.json",
    prefill_on: Any = None,
    prefill_replicas: int = 1,
    prefill_lengths: str | None = None,
    transfer: str | None = None,
    service: EngineService = "fitted",
    batching: Batching | Sequence[Batching] = "chunked-prefill",
    order: OrderName | Sequence[OrderName] = "fcfs",
    engine: Mapping[str, Any] | None = None,
    length_error: float = 0.0,
    switch_at: int = 32,
    ageing: Duration | None = None,
    arrivals: Any = None,
    arrival_process: str = "poisson",
    load_curve: str | Path | None = None,
    users: int | None = None,
    think: Duration = "1s",
    classes: Iterable[str] = (),
    prompt_lengths: Any = None,
    tenants: int = 1,
    replicas: int = 1,
    route: Route = "round-robin",
    prefix_share: float = 0.5,
    replicas_at: Any = None,
    autoscale: str | None = None,
    start_up: Duration | None = None,
    ttft: Duration | None = None,
    tpot: Duration | None = None,
    sla: Duration | None = None,
    requests: int | None = None,
    replications: int = 5,
    warmup: float | None = None,
    seed: int = 0,
    vary: Mapping[str, Iterable[Any]] | None = None,
    running: Running = Running(),
    out: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    force: bool = False,
) -> EngineSimulation:
    """Simulate a serving engine token by token: batching, KV blocks, preemption, orders, replicas.

    fit: step costs, a Fit or a `.fit.json` file; without it the `gpu` path of `hardware`.  prefill_fit: of steps that
    contain prefill, where they are fitted apart.  rate: "20/s", one or several, with lengths "512:128" (prompt and
    output tokens), or arrivals: recorded requests, a file or a table, or users: who send a request each, wait for its
    end, `think`, and send the next, with lengths.  kv_blocks: of the engine's KV cache.  batching, order: one or
    several, each is simulated.  engine: further settings, see `engine_settings_of`; what is not named the fit's trace
    may tell.  prefill_on: a fit of the prefill_replicas that prefill for the others.  prefill_lengths: tokens of the
    prompts that they prefill, "..160" or "512..", the others being prefilled where they are decoded. replicas_at: how
    many replicas from when on, pairs (seconds, replicas), a file or a table with t_s and replicas. autoscale: a rule,
    "requests:20:1..8" for 20 requests a replica and 1 to 8 of them, see `parse_autoscaler`. start_up: from asking for a
    replica until it serves.  vary: lists of values by name, {"replicas": [1, 2], "rate": ["10/s"]}, see `AXES`, to be
    combined; out: a Parquet file with a row each.  Further parameters are the options of `latfit simulate engine`.
    Raises WrongUsage, BadInput; an unstable load is no error.
    """
    given = dict(locals())
    options = Options(requests, warmup, replications, seed, _limit(sla, "--sla"))
    promise = Promise(_limit(ttft, "--ttft"), _limit(tpot, "--tpot"), options.sla_ms)
    if not force:
        check_one_engine(fit, prefill_fit, prefill_on)
    costs, unmeasured, subject, fits = engine_costs(fit, prefill_fit, prefill_on, hardware, scatter=scatters(service))
    apart = _cluster(prefill_on, transfer, prefill_lengths, scatter=scatters(service))
    axes = _axes(vary or {})
    offered = rates(axes.pop("rate", None), "--sweep rate") or rates(rate, per_s=rate_per_s)
    given |= {
        "arrivals": None if arrivals is None else recording_of(arrivals),
        "prompt_lengths": None if prompt_lengths is None else recording_of(prompt_lengths),
        "replicas_at": None if replicas_at is None else schedule_of(replicas_at),
        **dict.fromkeys(USUAL),
        **(engine or {}),
    }
    cases = _distinct(given, {"rate": offered or [None], **_as_axes(batching, order), **axes}, vary or {})
    loads: dict[tuple[Any, ...], Load] = {}
    points, line = [], ""
    for case, labels in cases:
        setup = engine_settings_of(fits, **{name: case[name] for name in ("kv_blocks", "batching", *USUAL)})
        line = line or setup.line
        ordered = order_of(case["order"], case["length_error"], case["ageing"], case["switch_at"])
        load = _load(case, loads)
        points.append(
            EnginePoint(
                load=load,
                costs=costs,
                settings=replace(setup.settings[0], order=ordered),
                options=options,
                promise=promise,
                cluster=replace(apart, routing=_routing(case), prefill_replicas=case["prefill_replicas"]),
                labels=labels,
                told=partial(_told, [*unmeasured, *notes_of(load), *setup.notes], fits, apart.transfer),
                whole=not vary and out is None and running.backend == "local",
            )
        )
    runs = simulate_points(points, running, out=out, resume=resume, progress=progress)
    return EngineSimulation(runs, options.sla_ms, subject, line)


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


def _as_axes(batching: str | Sequence[str], order: str | Sequence[str]) -> dict[str, list[Any]]:
    return {"batching": _several(batching), "order": _several(order)}


def _distinct(
    given: Mapping[str, Any], axes: Mapping[str, Sequence[Any]], vary: Mapping[str, Any]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """All parameters, and what is varied of them, of each combination; one of those that differ only by what has no
    effect there. Raises WrongUsage for what has none anywhere."""
    names = [name.replace("-", "_") for name in vary]
    if math.prod(len(values) for values in axes.values()) > MOST_POINTS:
        raise WrongUsage(f"more than {MOST_POINTS:,} points", where="--sweep", remedy="Give fewer values of each.")
    found: dict[tuple[Any, ...], tuple[dict[str, Any], dict[str, Any]]] = {}
    idle: dict[str, str] = {}
    for values in product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        case = {**given, **chosen}
        if case["draft_tokens"] == 0 and "draft_tokens" in names:
            case |= {"acceptance": None, "draft_cost": None}
        without = {
            need.name: need.why
            for need in reversed(_IN_ONE_CASE)
            if need.name in names and not need.holds(SimpleNamespace(**case))
        }
        idle |= without
        labels = {name: value for name, value in chosen.items() if name in names and name not in without}
        key = tuple(chosen[name] for name in axes if name not in without)
        found.setdefault((*sorted(without), *key), ({**case, **{name: given[name] for name in without}}, labels))
    for name in names:
        if not any(name in labels for _, labels in found.values()):
            raise WrongUsage(
                f"{name.replace('_', '-')} has no effect: {idle[name]}", where="--sweep", remedy="Leave it out."
            )
    return list(found.values())


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


@dataclass(frozen=True)
class EngineSetup:
    """How an engine is set up. settings: one for each batching.  origin: where each setting comes from that is not the
    usual one, by option: a file's name, "given", "observed" (counted in the steps), "vLLM's default", "assumed".
    notes: what should be known.  files: all that told something."""

    settings: Sequence[EngineSettings]
    origin: Mapping[str, str]
    notes: Sequence[str] = ()
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


@library_verb
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
    if isinstance(source, Fit | FitResult) or str(source).endswith(".json"):
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
            option = f"--{name.replace('_', '-')}"
            raise WrongUsage(
                "has no effect: nothing is drafted",
                where=option,
                remedy=f"Add --draft-tokens 3, or leave {option} out.",
            )
    names = _several(batching)
    if "static" in names and "draft_tokens" not in named:
        chosen["draft_tokens"] = 0
    # What is recorded of contents gives way to a rate that somebody types.
    contents = "prefix_hit_rate" not in named
    settings = [
        replace(_of_engine(name, chosen), prefix_cache=contents, padded_graphs=known.padded_graphs) for name in names
    ]
    origin = {**known.origin, **dict.fromkeys(named, GIVEN)}
    notes = [note for note in known.notes if not any(f"--{name.replace('_', '-')} " in note for name in named)]
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


def _several(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _limit(text: Duration | None, option: str) -> float:
    """A latency target in ms; infinite where there is none."""
    return math.inf if text is None else duration(text, option)


def order_of(name: str, length_error: float, ageing: Duration | None, switch_at: int) -> Order:
    """An order by the names of the command line. Raises WrongUsage."""
    return Order(name, length_error, _limit(ageing, "--ageing"), switch_at)


def scatters(service: str) -> bool:
    """Whether steps scatter as measured. Raises WrongUsage."""
    if service not in ("fitted", "deterministic"):
        raise WrongUsage(
            f"steps of an engine are not {service}", where="--service", remedy="Take fitted or deterministic."
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


def _routing(case: Mapping[str, Any]) -> Routing:
    """The router of a case, with how its replicas come and go. Raises WrongUsage."""
    scaling: Scaling | None = case["replicas_at"]
    replicas, start_up = case["replicas"], case["start_up"]
    if case["autoscale"] is not None:
        scaling = parse_autoscaler(case["autoscale"])
        replicas = max(replicas, scaling.least)
    elif isinstance(scaling, Schedule):
        replicas = scaling.replicas[0]
    if scaling is not None and start_up is None:
        raise WrongUsage(
            "how long a replica takes to start is required",
            where="--start-up",
            remedy="Give --start-up 2min: from asking for one until it serves.",
        )
    recording, share = case["arrivals"], case["prefix_share"]
    contents = recording is not None and recording.requests.prefix is not None and case["prefix_hit_rate"] is None
    if contents and share != USUAL_SHARE:
        raise WrongUsage(
            "has no effect: the recording says what prompts share", where="--prefix-share", remedy="Leave it out."
        )
    start_up_ms = 0.0 if start_up is None else duration(start_up, "--start-up", zero=True)
    return Routing(replicas, case["route"], share, scaling=scaling, start_up_ms=start_up_ms)


def _cluster(prefill_on: Any, transfer: str | None, lengths: str | None, *, scatter: bool) -> Cluster:
    """One engine that serves, and one that prefills for it where there is one."""
    if prefill_on is None:
        return Cluster()
    moved = Transfer() if transfer is None else Transfer(*transfers(transfer))
    if lengths is not None:
        moved = replace(moved, prompts=_range_of(lengths))
    return Cluster(Routing(), step_costs(as_fit(prefill_on).result, scatter=scatter), moved)


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


USUAL_SHARE = 0.5
"""Of a prompt that a user's replica has cached."""

LOADS = ("rate", "users", "think", "lengths", "tenants")
"""What a load depends on, of what a sweep varies."""


def _load(case: Mapping[str, Any], known: dict[tuple[Any, ...], Load]) -> Load:
    """The load of a case, with the lengths of its requests; known: loads so far."""
    key = tuple(case[name] for name in LOADS)
    if key not in known:
        known[key] = _made_load(case)
    return known[key]


def _made_load(case: Mapping[str, Any]) -> Load:
    rate, lengths, recorded = case["rate"], case["lengths"], case["prompt_lengths"] is not None
    names = ("arrivals", "load_curve", "users", "think", "arrival_process", "classes", "prompt_lengths")
    load = make_load([] if rate is None else [rate], **{name: case[name] for name in names})
    if not isinstance(load, RecordedLoad):
        given = None if lengths is None else parse_lengths(lengths)
        if given is not None and recorded:
            raise WrongUsage("lengths are given twice", where="--lengths, --prompt-lengths", remedy="Give one of them.")
        if given is None and not recorded:
            raise WrongUsage(
                "requests have no lengths",
                where="--users" if isinstance(load, ClosedLoad) else "--rate",
                remedy="Give --lengths 512:128 or --prompt-lengths FILE.",
            )
        load = replace(load, lengths=given or load.lengths)
    if isinstance(load, ClosedLoad):
        return load
    if isinstance(load, OpenLoad):
        load = replace(load, users=case["tenants"])
    return load if rate is None else load.at_rate(rate)
