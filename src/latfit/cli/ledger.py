"""`latfit ledger`: promises of plans, and what was measured."""

from dataclasses import dataclass

from latfit.api.requests import LedgerAddRequest, LedgerRequest, ReportFolder
from latfit.cli.options import Files, OutputOptions, group_of_verbs, subverb
from latfit.cli.output import note, print_answer

ledger = group_of_verbs("Compare planned with measured percentiles, run by run.")


@dataclass(frozen=True)
class LedgerPage(Files):
    """What is written."""

    PANEL = "Output"
    report: ReportFolder = None


@subverb(ledger)
def add(request: LedgerAddRequest, output: OutputOptions) -> None:
    """Compare a measured run with its plan, and keep both in the ledger, once.

    The run must have the planned rate and output lengths to count. Requests without an answer are slower than any
    limit. Exit code 3 for a plan that misses its targets.

    \b
    latfit plan --rate 4/s --lengths 1000:250 --ttft 1s --tpot 50ms --out plan.json
    latfit ledger add plan.json run.json
    """
    from latfit.api import add_to_ledger

    found = add_to_ledger.of(request)
    print_answer(found, output)
    note(f"Added to {request.ledger}", quiet=output.silent)


@subverb(ledger)
def show(request: LedgerRequest, page: LedgerPage, output: OutputOptions) -> None:
    """Show promises kept and broken, and how many stated intervals cover what was measured.

    Example: latfit ledger show --report ledger
    """
    from latfit.api import ledger as shown

    found = shown.of(request)
    print_answer(found, output)
    page.write(found, quiet=output.silent)
