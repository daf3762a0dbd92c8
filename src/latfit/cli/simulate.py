"""`latfit simulate`: what a batching policy makes of a load on this hardware."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from latfit.cli.engine_options import EngineOptions
from latfit.cli.groups import takes_groups
from latfit.cli.options import DEFAULT_HARDWARE, HardwareOption, JsonOption, QuietOption, SeedOption, TokensOption
from latfit.cli.serving_options import ClusterOptions, CostOptions, OrderOptions
from latfit.cli.simulate_options import LoadOptions, PathOptions, PolicyOptions, RunOptions, SweepOptions
from latfit.errors import Interrupted, SlaOutOfReach, WrongUsage

if TYPE_CHECKING:
    from latfit.scheduling.optimal import DispatchTable
    from latfit.sim.machine import System
    from latfit.sim.sweep import Point
    from latfit.stats import FloatArray
    from latfit.workload.load import Load

DEFAULT_POLICY = "gpu-only"
LOGGED = 1000
MOST_ROWS = 24
MOST_NOTES = 3


@takes_groups
def simulate(
    policy_options: PolicyOptions = PolicyOptions(),
    load_options: LoadOptions = LoadOptions(),
    path_options: PathOptions = PathOptions(),
    run_options: RunOptions = RunOptions(),
    sweep_options: SweepOptions = SweepOptions(),
    engine_options: EngineOptions = EngineOptions(),
    cost_options: CostOptions = CostOptions(),
    order_options: OrderOptions = OrderOptions(),
    cluster_options: ClusterOptions = ClusterOptions(),
    tokens_per_request: TokensOption = None,
    study: Annotated[
        str | None, typer.Option("--study", help="A study of its own: policies, over rates up to what the GPU serves.")
    ] = None,
    hardware: HardwareOption = DEFAULT_HARDWARE,
    seed: SeedOption = 0,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Simulate batching policies against a load.

    Requests arrive and a policy puts them in batches on one or two execution paths. Policies are compared on the same
    random numbers. For example: latfit simulate --policy three-stage --policy fixed --rate 500/s
    With --engine a serving engine instead: latfit simulate --engine chunked-prefill --fit gpu.fit.json
    --kv-blocks 2588 --arrivals requests.csv
    """
    from latfit.cli.output import note

    if engine_options.engine:
        if policy_options.policy:
            raise WrongUsage(
                "a policy beside an engine", where="--policy", remedy="Leave one out: engines have --order."
            )
        from latfit.cli.simulate_engine import Asked, simulate_engine

        engine = (engine_options, cost_options, order_options, cluster_options)
        asked = Asked(
            *engine, load_options, run_options, hardware, path_options.service, policy_options.ageing, sweep_options
        )
        simulate_engine(asked, seed=seed, json=json, quiet=quiet)
        return
    load = load_options.load(sweep_options.varied()[0]) if study is None else None
    mean, longest = load_options.tokens(load, tokens_per_request)
    system = path_options.system(hardware, mean, longest)
    if tokens_per_request is None and not longest and not path_options.path:
        note("Each request adds one token to a batch (decode); --tokens-per-request changes that.", quiet=quiet or json)
    if study is not None:
        _study(study, system, run_options, sweep_options, seed=seed, json=json, quiet=quiet)
        return
    assert load is not None
    options = run_options.options(seed)
    points = _points(system, load, policy_options, load_options, sweep_options, options, quiet=quiet or json)
    if sweep_options.log is not None:
        _write_log(sweep_options.log, points[0], seed)
    runs = run_all(points, sweep_options, quiet=quiet or json)
    show(runs, sweep_options, json=json, quiet=quiet)
    if sweep_options.report is not None:
        _write_page(sweep_options.report, runs, system, options.sla_ms, quiet=quiet or json)
    if not any(run["stable"] for run in runs):
        raise SlaOutOfReach(
            "no policy carries this load: " + (runs[0]["notes"] or ["unstable"])[0],
            where="--rate",
            remedy="Lower the rate, add servers, or take a policy that uses both paths.",
        )


def run_all(points: "list[Point]", sweep_options: SweepOptions, *, quiet: bool) -> list[dict[str, Any]]:
    """The runs of the JSON contract, a point each."""
    from latfit.cli.output import progress_bar
    from latfit.sim.sweep import Running, documents, sweep

    if sweep_options.resume and sweep_options.out is None:
        raise WrongUsage("nothing to resume from", where="--resume", remedy="Name the table with --out.")
    sweep_options.check_targets()
    running = Running(sweep_options.workers, sweep_options.backend, sweep_options.scheduler)
    try:
        with progress_bar("Simulating", quiet=quiet) as advance:
            rows = sweep(points, running, out=sweep_options.out, resume=sweep_options.resume, progress=advance)
    except KeyboardInterrupt:
        if sweep_options.out is None:
            raise
        kept = f"--resume --out {sweep_options.out} goes on from there."
        raise Interrupted("interrupted; the runs so far are kept", where=str(sweep_options.out), remedy=kept) from None
    return documents(rows)


def show(runs: list[dict[str, Any]], sweep_options: SweepOptions, *, json: bool, quiet: bool, title: str = "") -> None:
    """JSON, or the table with its notes; the picture where one is wanted."""
    from latfit.cli.output import note, print_json, print_table

    if sweep_options.figure is not None:
        from latfit.files import write_whole
        from latfit.report import style
        from latfit.report.simulated import runs_figure

        picture = style.png(runs_figure(runs, title))
        write_whole(sweep_options.figure, lambda stream: _write(stream, picture))
    if json:
        print_json({"runs": runs})
    else:
        from latfit.report.simulated import differences, rates_table, runs_table

        short = len(runs) <= MOST_ROWS
        print_table(runs_table(runs) if short else rates_table(runs))
        for text in differences(runs) if short else ():
            typer.echo(f"  {text}")
        notes = list(dict.fromkeys(text for run in runs for text in run["notes"]))
        for text in notes[:MOST_NOTES]:
            typer.echo(f"  ! {text}")
        if len(notes) > MOST_NOTES:
            typer.echo(f"  ! and {len(notes) - MOST_NOTES} more; --json shows them all.")
    for written in filter(None, (sweep_options.out, sweep_options.figure, sweep_options.log)):
        note(f"Wrote {written}", quiet=quiet or json)


def solve_optimal(rate: float, T_ms: "FloatArray") -> "DispatchTable":
    """The optimal table for a main path."""
    from latfit.queueing.decision import optimal_rule
    from latfit.queueing.service import measured_times

    return optimal_rule(rate, measured_times(T_ms)).table


def _points(
    system: "System",
    load: "Load",
    policy_options: PolicyOptions,
    load_options: LoadOptions,
    sweep_options: SweepOptions,
    options: Any,
    *,
    quiet: bool,
) -> "list[Point]":
    from latfit.cli.output import note
    from latfit.sim.grid import Grid, points_of

    rates, varied = sweep_options.varied()
    names = policy_options.policy or [DEFAULT_POLICY]
    grid = Grid(names, rates or load_options.rates(), varied)
    skipped: list[SlaOutOfReach] = []
    settings = policy_options.settings()
    points = points_of(grid, system, load, options, settings=settings, solve=solve_optimal, skipped=skipped)
    if not points:
        raise skipped[0]
    for text in dict.fromkeys(error.found for error in skipped):
        note(f"Left out a point of the optimal policy: {text}", quiet=quiet)
    return points


def _write_log(target: Path, point: "Point", seed: int) -> None:
    from latfit.files import write_text
    from latfit.sim.events import event_log

    stream = io.StringIO()
    rows = csv.writer(stream, lineterminator="\n")
    rows.writerow(("at_ms", "what", "path", "batch", "requests"))
    for each in event_log(point.policy, point.system, point.load, LOGGED, seed):
        batch = "" if each.batch < 0 else each.batch
        rows.writerow((f"{each.at_ms:.6f}", each.what, each.path, batch, " ".join(map(str, each.requests))))
    write_text(target, stream.getvalue())


def _study(
    name: str,
    system: "System",
    run_options: RunOptions,
    sweep_options: SweepOptions,
    *,
    seed: int,
    json: bool,
    quiet: bool,
) -> None:
    """Run a study, with its findings below the table."""
    from latfit.cli.output import print_json
    from latfit.sim.serving_study import serving_study
    from latfit.sim.study import findings, policy_points

    if name != "policies":
        raise WrongUsage(f"there is no study {name!r}", where="--study", remedy="Take policies.")
    points = policy_points(system, run_options.options(seed), solve_optimal)
    runs = run_all(points, sweep_options, quiet=quiet or json)
    served = serving_study(system.main, seed)
    found = [*findings(runs, system, points[0].options.sla_ms), *served.findings]
    if sweep_options.report is not None:
        claims = [(each.claim, each.found) for each in found]
        _write_page(sweep_options.report, runs, system, points[0].options.sla_ms, claims, quiet=quiet or json)
    if json:
        print_json(
            {"runs": [*runs, *served.runs], "findings": [{"claim": each.claim, "found": each.found} for each in found]}
        )
        return
    show(runs, sweep_options, json=False, quiet=quiet)
    for each in found:
        typer.echo(f"\n{each.claim}\n  {each.found}")


def _write_page(
    folder: Path,
    runs: list[dict[str, Any]],
    system: "System",
    sla_ms: float,
    findings: Sequence[tuple[str, str]] = (),
    *,
    quiet: bool,
) -> None:
    from latfit.cli.output import note
    from latfit.provenance import command_line, utc_now
    from latfit.report.simulated_page import Making, policies_page, write_page

    made = Making(command_line(), utc_now(), sla_ms)
    note(f"Wrote {write_page(folder, policies_page(runs, system, made, findings)).html}", quiet=quiet)


def _write(stream: Any, content: bytes) -> None:
    stream.write(content)
