"""`latfit evaluate`: how well a fit predicts steps that it has not seen."""

from pathlib import Path
from typing import Annotated

import typer

from latfit.cli.options import (
    ForceOption,
    OutputOptions,
    ReadingOptions,
    SourcesArgument,
    only_with,
    read_sources,
    verb,
)


@verb
@only_with("read")
def evaluate(
    fit: Annotated[Path, typer.Argument(help="A fit file (NAME.fit.json).", metavar="FIT")],
    source: SourcesArgument,
    typed: ReadingOptions = ReadingOptions(),
    force: ForceOption = False,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Score a fit on a trace that it was not fitted to.

    Whether the steps are of the fitted machine (exit code 4 where they are not), errors overall and by phase, coverage
    of the prediction intervals, and how many steps lie outside the measured range.

    Example: latfit evaluate trace.fit.json other.parquet
    """
    from latfit.api import Fit, data_line
    from latfit.cli.output import print_json, print_table, print_warnings, say, verdict
    from latfit.reporting import evaluation_table, machine_table

    found = Fit.load(fit).evaluate(read_sources(source, typed, quiet=output.silent))
    if output.json:
        print_json(found.to_json())
    else:
        verdict(found.verdict, found.state)
        say(data_line(found.data))
        say(found.coverage_line)
        if output.verbose:
            print_table(evaluation_table(found.to_json()))
            print_table(machine_table(found.to_json()["machine"]))
        elif found.phase_line:
            say(found.phase_line)
        print_warnings(found.scores["notes"], most=None if output.verbose else 3)
    if not force:
        found.check_machine()
