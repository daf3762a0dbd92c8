"""`latfit compare`: fits or runs side by side, with a verdict on what changed."""

from latfit.api.requests import CompareRequest
from latfit.cli.options import OutputOptions, verb
from latfit.cli.output import print_json, print_messages, print_table, progress_bar, say, verdict
from latfit.errors import Regression
from latfit.units import format_percent

FEW = 2
"""Verdicts that are shown with what they stand on, without --verbose."""
MOST = 8
"""Verdicts that are shown, those on regressions first; --verbose shows all."""


@verb
def compare(request: CompareRequest, output: OutputOptions) -> None:
    """Compare runs, with a verdict by phase and region.

    The first is the baseline. Phases and regions of (B, S) are compared in common cells, or by fits where none are
    common. Exit code 8 if one is slower by more than the tolerance, at 95 % confidence for all together. One run of
    each version cannot separate the machine from the code: measure in turn, and compare all runs with --alternate.

    \b
    latfit compare before.parquet after.parquet --tolerance 3%
    latfit compare a1.parquet b1.parquet a2.parquet b2.parquet --alternate
    """
    from latfit.api import compare_runs
    from latfit.reporting import changes_table, comparison_table

    with progress_bar("Comparing", quiet=output.silent):
        found = compare_runs.of(request)
    if output.json:
        print_json(found.to_json())
    else:
        order = sorted(range(len(found.compared)), key=lambda i: found.states[i] != "bad")
        shown = order if output.verbose else order[:MOST]
        for i in shown:
            verdict(found.sentences[i], found.states[i])
            if not output.verbose and len(order) > FEW:
                continue
            one = found.compared[i]
            print_table(changes_table(one.name, one.change, found.tolerance_pct, brief=not output.verbose))
            say(found.basis[i])
        if len(shown) < len(order):
            say(f"... and {len(order) - len(shown):,} more: --verbose shows them.")
        print_messages(found.notes, verbose=output.verbose, kind="note")
        if output.verbose and found.fits:
            print_table(comparison_table(found.names, [fit.result for fit in found.fits]))
    if found.slower:
        named = ", ".join(found.slower[:MOST]) + (" and more" if len(found.slower) > MOST else "")
        raise Regression(
            f"{named}: slower than {found.baseline} by more than {format_percent(found.tolerance_pct)}",
            remedy="Look at what changed between the runs, or accept it with a larger --tolerance.",
        )
