"""`latfit replay`: policies driven live on this machine, beside their predictions."""

from dataclasses import replace

import typer

from latfit.api.requests import ReplayRequest
from latfit.cli.options import OutputOptions, verb
from latfit.cli.output import note, print_answer, progress_bar
from latfit.errors import FitNotUsable


@verb
def replay(request: ReplayRequest, output: OutputOptions) -> None:
    """Run batching policies live on this machine and compare them with their simulation.

    Step times are measured and fitted first. Open-loop Poisson arrivals then go through the router to real decode steps
    on two cores, and the same arrivals are simulated. Exit code 4 if a run is not as predicted, or was disturbed.

    Example: latfit replay --policy three-stage --load 70% --duration 20s
    """
    from latfit.api import replay as replayed

    note("Measuring both paths, then each policy at each load.", quiet=output.silent)
    with progress_bar("replay", quiet=output.silent) as progress:
        found = replayed.of(replace(request, progress=progress))
    print_answer(found, output)
    if not found.agrees:
        raise typer.Exit(FitNotUsable.exit_code)
