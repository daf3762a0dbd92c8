"""`latfit compare`: fits or runs side by side, with a verdict on what changed."""

from latfit.api.requests import CompareRequest
from latfit.cli.options import OutputOptions, verb
from latfit.cli.output import print_answer, print_messages, progress_bar, say, verdict
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
    common. Exit code 8 if one is slower by more than the tolerance, at 95 % confidence for all together, or if a load
    that is given (--rate, --lengths, --ttft, --tpot; one run a side) surely needs more replicas. One run of
    each version cannot separate the machine from the code: measure in turn, and compare all runs with --alternate.

    \b
    latfit compare before.parquet after.parquet --tolerance 3%
    latfit compare before.parquet after.parquet --rate 40/s --lengths 500:200 --tpot 50ms
    latfit compare a1.parquet b1.parquet a2.parquet b2.parquet --alternate
    """
    from latfit.api import compare_runs

    with progress_bar("Comparing", quiet=output.silent):
        found = compare_runs.of(request)
    if output.json or output.verbose or len(found.compared) <= FEW:
        print_answer(found, output)
    else:
        order = sorted(range(len(found.compared)), key=lambda i: found.states[i] != "bad")
        for i in order[:MOST]:
            verdict(found.sentences[i], found.states[i])
        if len(order) > MOST:
            say(f"... and {len(order) - MOST:,} more: --verbose shows them.")
        for line in found.load_lines:
            say(line)
        print_messages(found.messages, verbose=False)
    needing = [each for each in found.upgrades if each.worse]
    if needing and not found.slower:
        raise Regression(
            f"{', '.join(each.source for each in needing)}: the load needs more replicas",
            remedy="Look at what changed between the runs, or plan with more: latfit plan.",
        )
    if found.slower:
        named = ", ".join(found.slower[:MOST]) + (" and more" if len(found.slower) > MOST else "")
        raise Regression(
            f"{named}: slower than {found.baseline} by more than {format_percent(found.tolerance_pct)}",
            remedy="Look at what changed between the runs, or accept it with a larger --tolerance.",
        )
