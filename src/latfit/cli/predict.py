"""`latfit predict`: the latency of steps from a fit, with intervals, and what a request or token more costs."""

from typing import TYPE_CHECKING, Any

from latfit.api.requests import PredictRequest
from latfit.cli.options import OutputOptions, verb
from latfit.cli.output import print_json, print_messages, print_table, say
from latfit.errors import WrongUsage

if TYPE_CHECKING:
    from latfit.api import Fit, Predicted

MOST_SHOWN = 16  # rows of a table, without --verbose


@verb
def predict(steps: PredictRequest, output: OutputOptions) -> None:
    """Predict the latency of steps, with intervals.

    Every combination of -B and -S with S >= B, or the rows of --data. Steps outside the measured range are marked.

    Example: latfit predict rtx4090_llama-3.1-8b.fit.json -B 8 -B 32 -S 512
    """
    from latfit.api import Fit, note_unread, predicted, steps_from
    from latfit.api.request import check

    check(steps)
    found = Fit.load(steps.fit)
    if steps.sensitivity:
        _print_sensitivity(found, steps, output)
        return
    if steps.data is None and not steps.B:
        raise WrongUsage("no step is given", where="-B, --data", remedy="For example: latfit predict FIT -B 8 -S 512")
    given = {name: getattr(steps, name) for name in ("context_tokens", "prefill_requests", "prefill_tokens")}
    note_unread(found.result, {**given, "context": steps.context})
    asked = steps_from(steps.data or steps.B, steps.S or None, given, every_combination=steps.data is None)
    _print_predictions(predicted(found.result, asked, steps.level, steps.context, strict=steps.strict), output)


def _print_predictions(found: "Predicted", output: OutputOptions) -> None:
    from latfit.reporting import prediction_table

    document = found.to_json()
    if output.json:
        print_json(document)
        return
    rows: list[dict[str, Any]] = document["rows"]
    shown = rows if output.verbose else rows[:MOST_SHOWN]
    print_table(prediction_table(shown, found.level))
    if len(rows) > len(shown):
        say(f"... and {len(rows) - len(shown):,} more: --verbose shows them.")
    print_messages(found.notes, verbose=output.verbose, kind="note")


def _print_sensitivity(fit: "Fit", steps: PredictRequest, output: OutputOptions) -> None:
    """Slopes, elasticities and dominant terms on a grid: of what was named, else over the measured range."""
    from latfit.reporting import regions_table, sensitivity_table

    found: dict[str, Any] = fit.sensitivity(steps.B or None, steps.S or None, steps.context).to_json()
    if output.json:
        print_json({"sensitivity": found})
        return
    table = sensitivity_table(found)
    if output.verbose or len(table.rows) <= MOST_SHOWN:
        print_table(table)
    print_table(regions_table(found))
    if not fit.result.knows_prefill:
        say("The fit contains decode steps only, so a request counts with its token (S = B).")
    if steps.context is None and fit.result.assumed_context:
        say(f"All {fit.result.assumed_context}.")
    if not output.verbose and len(table.rows) > MOST_SHOWN:
        say(f"Slopes at {len(table.rows)} steps: --verbose shows them.")
