"""`latfit evaluate`: how well a fit predicts steps that it has not seen."""

from dataclasses import dataclass

from latfit.api.request import Request
from latfit.api.requests import FitFile, Force, ReadRequest
from latfit.cli.options import OutputOptions, read_sources, verb
from latfit.cli.output import print_answer


@dataclass(frozen=True)
class ScoredFit(Request):
    """The fit that is scored."""

    SHOWN = "fit"
    fit: FitFile
    force: Force = False


@verb
def evaluate(scored: ScoredFit, request: ReadRequest, output: OutputOptions) -> None:
    """Score a fit on a trace that it was not fitted to.

    Errors overall and by phase, coverage of the prediction intervals, and steps outside the measured range. Exit code 4
    if the steps are of another machine.

    Example: latfit evaluate trace.fit.json other.parquet
    """
    from latfit.api import Fit

    found = Fit.load(scored.fit).evaluate(read_sources(request, quiet=output.silent))
    print_answer(found, output)
    if not scored.force:
        found.check_machine()
