"""`latfit simulate --engine ...`: what a serving engine makes of a load, token by token."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from latfit.cli.engine_options import EngineOptions
from latfit.cli.serving_options import ClusterOptions, CostOptions, OrderOptions
from latfit.errors import SlaOutOfReach, WrongUsage

if TYPE_CHECKING:
    from latfit.cli.simulate_options import LoadOptions, RunOptions, SweepOptions
    from latfit.sim.engine.cost import StepCosts
    from latfit.sim.engine.serve import EngineRun
    from latfit.sim.engine.settings import EngineSettings
    from latfit.workload.load import Load
    from latfit.workload.requests import Requests


REQUESTS = 100_000
"""Of each replication, where nobody says."""


@dataclass(frozen=True)
class Asked:
    """The options of `simulate` that a serving engine reads."""

    engine: EngineOptions
    cost: CostOptions
    order: OrderOptions
    cluster: ClusterOptions
    load: "LoadOptions"
    run: "RunOptions"
    hardware: Path
    service: str
    ageing: str | None
    sweep: "SweepOptions"


def simulate_engine(asked: Asked, *, seed: int, json: bool, quiet: bool) -> None:
    """Run every engine and order at every rate; print, draw, and say where nothing carries the load."""
    from latfit.cli.output import note, print_json, print_table, progress_bar
    from latfit.files import write_whole

    figure, folder = asked.sweep.figure, asked.sweep.report
    asked.sweep.check_targets()
    costs, unmeasured = asked.cost.costs(asked.hardware, scatter=_scatters(asked.service))
    cases = _cases(asked)
    found: list[tuple[dict[str, Any], EngineRun]] = []
    with progress_bar("Simulating", quiet=quiet or json) as advance:
        for done, (load, settings) in enumerate(cases):
            entry, run = _one(asked, load, settings, costs, seed)
            found.append((entry | {"notes": [*unmeasured, *entry["notes"]]}, run))
            advance(done + 1, len(cases))
    runs = [entry for entry, _ in found]
    if figure is not None:
        from latfit.report import style
        from latfit.report.served import engine_figure

        picture = style.png(engine_figure(found))
        write_whole(figure, lambda stream: _write(stream, picture))
    if json:
        print_json({"runs": runs})
    else:
        from latfit.report.served import engine_tables

        for table in engine_tables(runs):
            print_table(table)
            typer.echo("")
        for text in dict.fromkeys(text for run in runs for text in run["notes"]):
            typer.echo(f"  ! {text}")
    if figure is not None:
        note(f"Wrote {figure}", quiet=quiet or json)
    if folder is not None:
        from latfit.provenance import command_line, utc_now
        from latfit.report.simulated_page import Making, engines_page, write_page

        made = Making(command_line(), utc_now(), asked.run.options(seed).sla_ms)
        note(f"Wrote {write_page(folder, engines_page(found, made)).html}", quiet=quiet or json)
    if asked.load.arrivals is None and not any(run["stable"] for run in runs):
        raise SlaOutOfReach(
            "no engine carries this load: requests wait longer and longer",
            where="--rate",
            remedy="Lower the rate, or give more --replicas, --kv-blocks or --max-num-seqs.",
        )


def _scatters(service: str) -> bool:
    """Whether steps scatter as measured. Raises WrongUsage for a law that steps of an engine have not."""
    if service not in ("fitted", "deterministic"):
        raise WrongUsage(
            f"steps of an engine are not {service}", where="--service", remedy="Take fitted or deterministic."
        )
    return service == "fitted"


def _cases(asked: Asked) -> "list[tuple[Load, EngineSettings]]":
    """Every load with every engine and order."""
    from latfit.workload.load import ClosedLoad, OpenLoad

    load = asked.load.load()
    if isinstance(load, ClosedLoad):
        raise WrongUsage("engines take no closed loop", where="--users", remedy="Give --rate or --arrivals.")
    if isinstance(load, OpenLoad):
        law = asked.cost.length_law()
        if law is not None and asked.load.prompt_lengths is not None:
            raise WrongUsage("lengths are given twice", where="--lengths, --prompt-lengths", remedy="Give one of them.")
        if law is None and asked.load.prompt_lengths is None:
            raise WrongUsage(
                "requests have no lengths", where="--rate", remedy="Give --lengths 512:128 or --prompt-lengths FILE."
            )
        load = replace(load, users=asked.cluster.tenants, lengths=law or load.lengths)
    loads: list[Load] = [load.at_rate(rate) for rate in asked.load.rates()] or [load]
    engines = [
        asked.order.applied(settings, order)
        for settings in asked.engine.settings()
        for order in asked.order.orders(asked.ageing)
    ]
    return [(each, settings) for each in loads for settings in engines]


def _one(
    asked: Asked, load: "Load", settings: "EngineSettings", costs: "StepCosts", seed: int
) -> "tuple[dict[str, Any], EngineRun]":
    """The entry of the JSON, and the first replication."""
    from latfit.sim.engine.result import summary
    from latfit.sim.estimate import STEADY, reach_in
    from latfit.sim.length import length_of
    from latfit.sim.simulate import kind_of
    from latfit.workload.load import ClosedLoad, OpenLoad, RecordedLoad
    from latfit.workload.randomness import Streams

    assert not isinstance(load, ClosedLoad)
    recorded = isinstance(load, RecordedLoad)
    options = asked.run.options(seed)
    runs = []
    for replication in range(1 if recorded else options.replications):
        count = len(load.requests) if isinstance(load, RecordedLoad) else options.requests or REQUESTS
        requests = load.sample(count, Streams(seed, replication))
        runs.append(_served(asked, requests, settings, costs, seed + replication))
    warmup = options.warmup
    if warmup is None:
        # Recorded requests and a load that varies have a course of their own, of which the start is a part.
        steady = kind_of(load) == STEADY
        warmup = length_of(count, 1, None, reach_in(runs[0].latency_ms)).warm / count if steady else 0.0
    entry = summary(runs, asked.cluster.promise(options.sla_ms), 0.0 if recorded else warmup)
    if isinstance(load, OpenLoad):
        named = {f"class {place}": each.name or f"class {place}" for place, each in enumerate(load.classes)}
        entry["by_class"] = [each | {"class": named[each["class"]]} for each in entry["by_class"]]
    notes = (
        [] if entry["stable"] else ["Requests wait longer and longer: these latencies are those of this run's length."]
    )
    return {
        "policy": settings.batching,
        "engine": settings.batching,
        "order": settings.order.name,
        "rate_per_s": load.rate * 1e3,
        **entry,
        "share": {"engine": 1.0},
        "settings": {
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "kv_blocks": settings.kv_blocks,
            "block_size": settings.block_size,
            "replicas": asked.cluster.replicas,
            "route": asked.cluster.route,
            "prefill_apart": asked.cost.prefill_on is not None,
        },
        "seed": seed,
        "notes": notes,
    }, runs[0]


def _served(
    asked: Asked, requests: "Requests", settings: "EngineSettings", costs: "StepCosts", seed: int
) -> "EngineRun":
    from latfit.sim.engine.cluster import serve_apart, serve_replicas

    if asked.cost.prefill_on is None:
        return serve_replicas(requests, costs, settings, asked.cluster.routing(), seed)
    if asked.cluster.replicas > 1:
        raise WrongUsage("replicas prefill for themselves", where="--prefill-on", remedy="Leave out --replicas.")
    from latfit.model.result import read_fit
    from latfit.sim.engine.cost import step_costs

    of_prefill = step_costs(read_fit(asked.cost.prefill_on), scatter=_scatters(asked.service))
    both = serve_apart(requests, (of_prefill, costs), (settings, settings), asked.cost.transfer_of(), seed)
    return both.whole(requests)


def _write(stream: Any, content: bytes) -> None:
    stream.write(content)
