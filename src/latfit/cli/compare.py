"""`latfit compare`: fits or runs side by side, with a verdict on what changed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from latfit.cli.options import JsonOption, QuietOption, SeedOption
from latfit.errors import Regression, WrongUsage

if TYPE_CHECKING:
    from latfit.fitting import Change


def compare(
    sources: Annotated[
        list[Path], typer.Argument(help="Fit files, or traces to fit: the first is the yardstick.", metavar="A B...")
    ],
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="Slowdown in percent from which it is a regression.")
    ] = 5.0,
    seed: SeedOption = 0,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compare fits or runs, with a verdict on what changed.

    The latency of each against the first, where both have measured. Exit code 8 where one is slower by more than the
    tolerance.
    """
    from latfit.cli.output import print_json, print_table
    from latfit.fitting import FitOptions, change, fit_of
    from latfit.report import comparison_table

    if not tolerance >= 0:
        raise WrongUsage(f"a tolerance of {tolerance:g} %", where="--tolerance", remedy="Give 0 or more.")
    if len(sources) < 2:
        raise WrongUsage("one fit has nothing to be compared with", remedy="Name two or more.")
    fits = [fit_of(source, FitOptions(seed=seed)) for source in sources]
    changes = [change(fits[0], other) for other in fits[1:]]
    verdicts = [found.verdict(tolerance) for found in changes]
    if json:
        runs = [
            {"source": str(source), "verdict": verdict, **vars(found)}
            for source, found, verdict in zip(sources[1:], changes, verdicts, strict=True)
        ]
        print_json({"yardstick": str(sources[0]), "tolerance_pct": tolerance, "compared": runs})
    else:
        print_table(comparison_table([str(source) for source in sources], fits))
        for source, found, verdict in zip(sources[1:], changes, verdicts, strict=True):
            typer.echo(
                f"{source} is {verdict}: {found.median:+.1%} latency in the median of {found.points} common steps"
                f" against {sources[0]}{_certainty(found)}; single steps {found.least:+.1%} to {found.most:+.1%}."
            )
    slower = [str(source) for source, verdict in zip(sources[1:], verdicts, strict=True) if verdict == "slower"]
    if slower:
        raise Regression(
            f"{', '.join(slower)}: slower than {sources[0]} by more than {tolerance:g} %",
            remedy="Look at what changed between the runs, or accept it with a larger --tolerance.",
        )


def _certainty(found: "Change") -> str:
    if found.low is None or found.high is None:
        return ""
    return f" (95 % interval {found.low:+.1%} to {found.high:+.1%})"
