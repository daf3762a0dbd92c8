"""`latfit simulate`: what a batching policy makes of a load on this hardware."""

import csv
import io
import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from latfit.cli.groups import takes_groups
from latfit.cli.options import DEFAULT_HARDWARE, HardwareOption, JsonOption, QuietOption, SeedOption, TokensOption
from latfit.cli.simulate_options import LoadOptions, PathOptions, PolicyOptions, RunOptions, SweepOptions
from latfit.errors import SlaOutOfReach, WrongUsage

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
    """
    from latfit.cli.output import note

    load = load_options.load() if study is None else None
    most_tokens = _longest(load_options, load) if tokens_per_request is None else 0.0
    system = path_options.system(hardware, tokens_per_request, most_tokens)
    if tokens_per_request is None and not most_tokens and not path_options.path:
        note("Each request adds one token to a batch (decode); --tokens-per-request changes that.", quiet=quiet or json)
    if study is not None:
        _study(study, system, run_options, sweep_options, seed=seed, json=json, quiet=quiet)
        return
    assert load is not None
    points = _points(system, load, policy_options, load_options, sweep_options, run_options.options(seed))
    if sweep_options.log is not None:
        _write_log(sweep_options.log, points[0], seed)
    runs = run_all(points, sweep_options, quiet=quiet or json)
    show(runs, sweep_options, json=json, quiet=quiet)
    if not any(run["stable"] for run in runs):
        raise SlaOutOfReach(
            "no policy carries this load: " + (runs[0]["notes"] or ["unstable"])[0],
            where="--rate",
            remedy="Lower the rate, add servers, or take a policy that uses both paths.",
        )


def run_all(points: "list[Point]", sweep_options: SweepOptions, *, quiet: bool) -> list[dict[str, Any]]:
    """The runs of the JSON contract, a point each."""
    from latfit.cli.output import progress_bar
    from latfit.sim.sweep import Running, sweep

    if sweep_options.resume and sweep_options.out is None:
        raise WrongUsage("nothing to resume from", where="--resume", remedy="Name the table with --out.")
    if sweep_options.figure is not None:
        from latfit.files import check_writable

        check_writable(sweep_options.figure)
    running = Running(sweep_options.workers, sweep_options.backend, sweep_options.scheduler)
    with progress_bar("Simulating", quiet=quiet) as advance:
        rows = sweep(points, running, out=sweep_options.out, resume=sweep_options.resume, progress=advance)
    return [json_module.loads(row["document"]) for row in rows]


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
        from latfit.report.simulated import rates_table, runs_table

        print_table(runs_table(runs) if len(runs) <= MOST_ROWS else rates_table(runs))
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
) -> "list[Point]":
    from latfit.sim.grid import Grid, points_of

    rates, varied = sweep_options.varied()
    names = policy_options.policy or [DEFAULT_POLICY]
    grid = Grid(names, rates or load_options.rates(), varied)
    return points_of(grid, system, load, options, settings=policy_options.settings(), solve=solve_optimal)


def _longest(load_options: LoadOptions, load: "Load | None") -> float:
    """Tokens of the longest request, where the lengths are to count; 0 where all are alike."""
    if load is None or load_options.prompt_lengths is None:
        return 0.0
    from latfit.workload.recorded import read_requests

    return float(read_requests(load_options.prompt_lengths).requests.prompt_tokens.max())


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
    from latfit.sim.study import findings, policy_points

    if name != "policies":
        raise WrongUsage(f"there is no study {name!r}", where="--study", remedy="Take policies.")
    points = policy_points(system, run_options.options(seed), solve_optimal)
    runs = run_all(points, sweep_options, quiet=quiet or json)
    found = findings(runs, system)
    if json:
        print_json({"runs": runs, "findings": [{"claim": each.claim, "found": each.found} for each in found]})
        return
    show(runs, sweep_options, json=False, quiet=quiet)
    for each in found:
        typer.echo(f"\n{each.claim}\n  {each.found}")


def _write(stream: Any, content: bytes) -> None:
    stream.write(content)
