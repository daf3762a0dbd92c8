"""`latfit evaluate`: how well a fit predicts steps that it has not seen."""

from pathlib import Path
from typing import Annotated

import typer

from latfit.cli.options import (
    JsonOption,
    QuietOption,
    ReadingOptions,
    SourcesArgument,
    data_line,
    read_sources,
    verb,
)


@verb
def evaluate(
    fit: Annotated[Path, typer.Argument(help="A fit file (NAME.fit.json).", metavar="FIT")],
    source: SourcesArgument,
    typed: ReadingOptions = ReadingOptions(),
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Say how well a fit predicts a trace it has not seen.

    Errors overall and by phase, how many steps fall into the fit's intervals, and how many lie outside its data.
    """
    from latfit.cli.output import print_json, print_table
    from latfit.fitting import evaluate as scores
    from latfit.model import read_fit
    from latfit.report import evaluation_table
    from latfit.trace import check_one_system, data_facts

    fitted = read_fit(fit)
    read = read_sources(source, typed, quiet=quiet or json)
    check_one_system(read)
    found = scores(fitted, read.trace)
    if json:
        print_json(found)
        return
    typer.echo(data_line(data_facts(read, {}, read.trace)))
    print_table(evaluation_table(found))
    for level, share in found["interval_coverage"].items():
        typer.echo(f"{100 * share:.1f} % of steps lie in the interval that is to hold {100 * float(level):g} %.")
    typer.echo(f"{found['outside_domain']:,} steps lie outside what the fit has measured.")
    for text in found["notes"]:
        typer.echo(text)
