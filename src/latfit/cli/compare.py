"""`latfit compare`: fits or runs side by side, with a verdict on what changed."""

from pathlib import Path
from typing import Annotated

import typer

from latfit.cli.options import OutputOptions, ReadingOptions, SeedOption, only_with, verb
from latfit.errors import Regression
from latfit.units import format_percent

FEW = 4
"""Verdicts that are shown with the range of single steps, without --verbose."""


@verb
@only_with("read", "compare")
def compare(
    sources: Annotated[
        list[Path], typer.Argument(help="Fit files, or traces to fit: the first is the baseline.", metavar="A B...")
    ],
    tolerance: Annotated[str, typer.Option("--tolerance", help="Slowdown from which it is a regression.")] = "5%",
    typed: ReadingOptions = ReadingOptions(),
    seed: SeedOption = 0,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Compare fits or runs, with a verdict on what changed.

    The latency of each against the first, where both have measured. Exit code 8 where one is slower by more than the
    tolerance.

    Example: latfit compare before.fit.json after.fit.json --tolerance 3%
    """
    from latfit.api import compare as compared
    from latfit.cli.output import print_json, print_table, progress_bar, say, verdict
    from latfit.reporting import comparison_table

    with progress_bar("Comparing", quiet=output.silent):
        found = compared(*sources, tolerance=tolerance, seed=seed, **typed.keywords())
    if output.json:
        print_json(found.to_json())
    else:
        for text, state, single in zip(found.sentences, found.states, found.range_lines, strict=True):
            verdict(text, state)
            if output.verbose or len(found.changes) <= FEW:
                say(single)
        if output.verbose:
            print_table(comparison_table(found.names, [fit.result for fit in found.fits]))
    if found.slower:
        raise Regression(
            f"{', '.join(found.slower)}: slower than {found.baseline} by more than"
            f" {format_percent(found.tolerance_pct)}",
            remedy="Look at what changed between the runs, or accept it with a larger --tolerance.",
        )
