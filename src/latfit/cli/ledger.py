"""`latfit ledger`: promises of plans, and what was measured."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from latfit.api.request import Request
from latfit.api.requests import LedgerAddRequest, LedgerRequest, ReportFolder
from latfit.cli.options import OutputOptions, group_of_verbs, subverb
from latfit.cli.output import note, print_json, print_table, say, verdict

if TYPE_CHECKING:
    from latfit.api import LedgerAnswer

ledger = group_of_verbs("What plans promised, and what runs measured.")


@dataclass(frozen=True)
class LedgerPage(Request):
    """What is written."""

    PANEL = "Output"
    report: ReportFolder = None


@subverb(ledger)
def add(request: LedgerAddRequest, output: OutputOptions) -> None:
    """Compare a measured run with its plan, and keep both in the ledger.

    \b
    latfit plan --rate 4/s --lengths 1000:250 --ttft 1s --tpot 50ms --out plan.json
    latfit ledger add plan.json run.json
    """
    from latfit.api import add_to_ledger

    found = add_to_ledger.of(request)
    _show(found, output)
    note(f"Added to {request.ledger}", quiet=output.silent)


@subverb(ledger)
def show(request: LedgerRequest, page: LedgerPage, output: OutputOptions) -> None:
    """Show promises kept and broken, and how many stated intervals cover what was measured.

    Example: latfit ledger show --report ledger
    """
    from latfit.api import ledger as shown

    found = shown.of(request)
    if page.report is not None:
        from latfit.provenance import utc_now
        from latfit.reporting import Making, write_page

        written = write_page(page.report, found.page(Making(made_at=utc_now())))
        note(f"Wrote {written.html}", quiet=output.silent)
    _show(found, output)


def _show(found: "LedgerAnswer", output: OutputOptions) -> None:
    if output.json:
        print_json(found.to_json())
        return
    verdict(found.verdict, found.state)
    for table in found.tables(brief=not output.verbose):
        print_table(table)
    for line in found.lines:
        say(line)
