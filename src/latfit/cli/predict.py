"""`latfit predict`: the latency of steps from a fit, with intervals, and what a request or token more costs."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from latfit.cli.options import OutputOptions, only_with, verb
from latfit.errors import WrongUsage

if TYPE_CHECKING:
    from latfit.api import Fit, Predicted

MOST_SHOWN = 16
"""Rows of a table, without --verbose."""


@dataclass(frozen=True)
class StepOptions:
    """The steps that are asked about."""

    panel: ClassVar[str] = "Steps"
    B: Annotated[list[int] | None, typer.Option("-B", help="Requests in the step. Repeatable.")] = None
    S: Annotated[list[int] | None, typer.Option("-S", help="Tokens in the step; without it S = B. Repeatable.")] = None
    context: Annotated[
        float | None,
        typer.Option(
            "--context", help="Cached tokens of each decoding request; without it the median of the fit's trace."
        ),
    ] = None
    context_tokens: Annotated[
        float | None, typer.Option("--context-tokens", help="Cached tokens the whole step reads.")
    ] = None
    prefill_requests: Annotated[int | None, typer.Option("--prefill-requests", help="How many of B prefill.")] = None
    prefill_tokens: Annotated[int | None, typer.Option("--prefill-tokens", help="How many of S are prefill.")] = None
    data: Annotated[Path | None, typer.Option("--data", help="A table of steps (B, S, ...) instead of -B and -S.")] = (
        None
    )


@verb
@only_with("Fit.predict")
def predict(
    fit: Annotated[Path, typer.Argument(help="A fit file (NAME.fit.json).", metavar="FIT")],
    steps: StepOptions = StepOptions(),
    level: Annotated[float, typer.Option("--level", help="Coverage of the prediction interval.")] = 0.9,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Cost of a request or token more, and the dominant term.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse steps outside the measured range (exit code 3).")
    ] = False,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Predict the latency of steps, with intervals.

    Every combination of -B and -S with S >= B, or the rows of --data. Steps outside the measured range are marked.

    Example: latfit predict rtx4090_llama-3.1-8b.fit.json -B 8 -B 32 -S 512
    """
    from latfit.api import Fit, predicted, refuse_unread, steps_from

    found = Fit.load(fit)
    if sensitivity:
        if steps.data is not None:
            raise WrongUsage("--sensitivity takes -B and -S, no table", where="--data", remedy="Leave one of them out.")
        _print_sensitivity(found, steps, output)
        return
    if (steps.data is None) == (not steps.B):
        raise WrongUsage(
            "give one of them" if steps.B else "no step is given",
            where="-B, --data",
            remedy="For example: latfit predict FIT -B 8 -S 512",
        )
    given = {name: value for name, value in vars(steps).items() if name not in ("B", "S", "data", "context")}
    refuse_unread(found.result, {**given, "context": steps.context})
    asked = steps_from(steps.data or steps.B, steps.S or None, given, every_combination=steps.data is None)
    _print_predictions(predicted(found.result, asked, level, steps.context, strict=strict), output)


def _print_predictions(found: "Predicted", output: OutputOptions) -> None:
    from latfit.cli.output import print_json, print_table, print_warnings, say
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
    print_warnings(found.notes, most=None if output.verbose else 3)


def _print_sensitivity(fit: "Fit", steps: StepOptions, output: OutputOptions) -> None:
    """Slopes, elasticities and dominant terms on a grid: of what was named, else over the measured range."""
    from latfit.cli.output import print_json, print_table, say
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
