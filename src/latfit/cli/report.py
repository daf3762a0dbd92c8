"""`latfit report`: one page and its pictures from a hardware profile."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from latfit.cli.options import (
    DEFAULT_HARDWARE,
    HardwareOption,
    LawsOnlyOption,
    OutputOptions,
    PercentileOption,
    TokensOption,
    only_with,
    verb,
)
from latfit.errors import WrongUsage

DEFAULT_FOLDER = Path("reports")


@dataclass(frozen=True)
class PlanOptions:
    """What the report is to plan for; nothing without an SLA."""

    panel: ClassVar[str] = "Plan"
    sla: Annotated[
        str | None, typer.Option("--sla", help="Latency SLA, such as 20ms: per step, or per request with --rate.")
    ] = None
    rate: Annotated[str | None, typer.Option("--rate", help="With --sla: requests that arrive, such as 500/s.")] = None
    percentile: PercentileOption = 99.0
    tokens_per_request: TokensOption = None
    laws_only: LawsOnlyOption = False


@dataclass(frozen=True)
class InputOptions:
    """What the page is about."""

    panel: ClassVar[str] = "Input"
    hardware: HardwareOption = DEFAULT_HARDWARE
    trace: Annotated[
        list[Path] | None,
        typer.Option("--trace", help="Measured steps to draw; without it those the fits were made from. Repeatable."),
    ] = None


@verb
@only_with("report")
def report(
    inputs: InputOptions = InputOptions(),
    asked: PlanOptions = PlanOptions(),
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder for the page and its pictures.")
    ] = DEFAULT_FOLDER,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Write one self-contained HTML page, answer first, and its figures as PNG.

    Example: latfit report --sla 50ms
    """
    if out.suffix.lower() in (".html", ".htm") and not out.is_dir():
        raise WrongUsage(
            f"{out.name} would be a folder, with the page report.html in it",
            where="--out",
            remedy="Name a folder: --out reports.",
        )
    from latfit.api import report as write
    from latfit.cli.output import echo, note, print_json, progress_bar, say

    options = {**vars(asked), "tokens_per_request": asked.tokens_per_request or 1}
    with progress_bar("Writing the report", quiet=output.silent):
        written = write(inputs.hardware, out, trace=inputs.trace or None, **options)
    for text in written.notes:
        note(text, quiet=output.silent)
    if output.json:
        print_json(written.to_json())
        return
    say(written.summary())
    if output.verbose:
        for figure in written.figures:
            echo(str(figure))
