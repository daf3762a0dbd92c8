"""`latfit replay`: policies driven live on this machine, beside their predictions."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from latfit.cli.options import OutputOptions, SeedOption, verb
from latfit.errors import FitNotUsable


@dataclass(frozen=True)
class LoadOptions:
    """What is sent."""

    panel: ClassVar[str] = "Load"
    policy: Annotated[
        str, typer.Option("--policy", help="Policies, with commas between them: gpu-only,three-stage,cutoff.")
    ] = "gpu-only,three-stage"
    load: Annotated[
        str | None, typer.Option("--load", help="Shares of what the main path carries. Default: 50%,70%.")
    ] = None
    rate: Annotated[str | None, typer.Option("--rate", help="Requests, in place of --load: 100/s,200/s.")] = None
    duration: Annotated[str, typer.Option("--duration", help="How long each run lasts.")] = "20s"
    seed: SeedOption = 0


@dataclass(frozen=True)
class PathOptions:
    """What serves: two processes, a core each."""

    panel: ClassVar[str] = "Paths"
    model: Annotated[str, typer.Option("--model", help="Whose decode steps run.")] = "tiny"
    launch: Annotated[
        str, typer.Option("--launch", help="How long each batch takes to get to the stand-in for a GPU.")
    ] = "8ms"
    max_batch: Annotated[int, typer.Option("--max-batch", help="Its largest batch.")] = 32


@verb
def replay(
    load: LoadOptions = LoadOptions(), paths: PathOptions = PathOptions(), output: OutputOptions = OutputOptions()
) -> None:
    """Run batching policies live on this machine and hold the simulation against them.

    Open-loop Poisson arrivals go through the router to real decode steps on two cores. Their times are measured and
    fitted first; the same arrivals are simulated. Exit code 4 where a run is not as predicted, or others disturbed it.

    Example: latfit replay --policy three-stage --load 70% --duration 20s
    """
    from latfit.api import replay as replayed
    from latfit.cli.output import note, print_json, print_table, progress_bar, verdict

    note("Measuring both paths, then each policy at each load.", quiet=output.silent)
    with progress_bar("replay", quiet=output.silent) as progress:
        found = replayed(
            load.policy.split(","),
            load.load.split(",") if load.load else None,
            rate=load.rate.split(",") if load.rate else None,
            duration_each=load.duration,
            model=paths.model,
            launch=paths.launch,
            max_batch=paths.max_batch,
            seed=load.seed,
            progress=progress,
        )
    if output.json:
        print_json(found.to_json())
    else:
        verdict(found.verdict, found.state)
        for table in found.tables(brief=not output.verbose):
            print_table(table)
        for line in found.notes:
            note(line, quiet=output.silent)
    if not found.agrees:
        raise typer.Exit(FitNotUsable.exit_code)
