"""`latfit compare`: fits or runs side by side, with a verdict on what changed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from latfit.cli.options import JsonOption, QuietOption, SeedOption
from latfit.errors import Regression, WrongUsage

if TYPE_CHECKING:
    from latfit.fitting import Change
    from latfit.model import FitResult


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
    from latfit.fitting import change
    from latfit.report import comparison_table

    if not tolerance >= 0:
        raise WrongUsage(f"a tolerance of {tolerance:g} %", where="--tolerance", remedy="Give 0 or more.")
    if len(sources) < 2:
        raise WrongUsage("one fit has nothing to be compared with", remedy="Name two or more.")
    fits = [_fit_of(source, seed) for source in sources]
    changes = [change(fits[0], other) for other in fits[1:]]
    verdicts = [_verdict(found.median, tolerance) for found in changes]
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


def _verdict(median: float, tolerance: float) -> str:
    if abs(median) * 100 <= tolerance:
        return "as fast"
    return "slower" if median > 0 else "faster"


def _fit_of(source: Path, seed: int) -> "FitResult":
    """The fit in a file, or a fit of the trace in it."""
    from latfit.errors import FitNotUsable
    from latfit.fitting import FitOptions, fit_trace
    from latfit.model import read_fit
    from latfit.trace import check_one_machine, ingest

    if source.name.endswith(".json"):
        fit = read_fit(source)
    else:
        read = ingest(source)
        check_one_machine(read)
        fit = fit_trace(read.trace, FitOptions(seed=seed))
    if not fit.status.ok:
        raise FitNotUsable(fit.status.sentence, where=str(source), remedy=fit.status.remedy)
    return fit
