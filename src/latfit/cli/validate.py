"""`latfit validate`: a measured serving run beside its simulation."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from latfit.cli.options import ForceOption, OutputOptions, SeedOption, only_with, verb
from latfit.cli.output import note, print_json, print_table, print_warnings, progress_bar, say, verdict
from latfit.cli.simulate_engine import EngineOptions, PrefillFitOption
from latfit.errors import FitNotUsable

if TYPE_CHECKING:
    from latfit.api import Validation

MOST_WARNINGS = 3


@dataclass(frozen=True)
class ComparisonOptions:
    """How the two are compared."""

    panel: ClassVar[str] = "Comparison"
    prefill_fit: PrefillFitOption = None
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Fit host time per step and ms per token on the first third; score the rest."),
    ] = False
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 4 where simulated and measured differ.")] = False
    seed: SeedOption = 0
    out: Annotated[Path | None, typer.Option("--out", help="Write the comparison into a JSON file.")] = None
    figure: Annotated[Path | None, typer.Option("--figure", help="Draw measured and simulated into a PNG.")] = None


@verb
@only_with("validate")
def validate(
    fit: Annotated[Path, typer.Argument(help="A fit file (NAME.fit.json).", metavar="FIT")],
    requests: Annotated[
        Path, typer.Argument(help="The measured run: arrivals, lengths, first and last token.", metavar="REQUESTS")
    ],
    limits: EngineOptions = EngineOptions(),
    comparison: ComparisonOptions = ComparisonOptions(),
    force: ForceOption = False,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Simulate a measured serving run and compare TTFT, TPOT and latency with what was measured.

    The same arrivals go through a simulated engine with the given limits and step costs from the fit. Separate fits of
    decode steps and of steps that contain prefill are best.

    \b
    latfit validate decode.fit.json run.csv --prefill-fit mixed.fit.json \\
        --kv-blocks 2588
    """
    from latfit.api import validate as compared
    from latfit.files import check_writable, write_bytes, write_json

    for target in filter(None, (comparison.out, comparison.figure)):
        check_writable(target)
    with progress_bar("Simulating", quiet=output.silent):
        found = compared(
            fit,
            requests,
            prefill_fit=comparison.prefill_fit,
            calibrate=comparison.calibrate,
            seed=comparison.seed,
            force=force,
            **limits.asked(),
        )
    if comparison.out is not None:
        write_json(comparison.out, found.to_json())
    if comparison.figure is not None:
        from latfit.reporting import style

        write_bytes(comparison.figure, style.png(found.plot()))
    if output.json:
        print_json(found.to_json())
    else:
        _show(found, output)
    for written in filter(None, (comparison.out, comparison.figure)):
        note(f"Wrote {written}", quiet=output.silent)
    if not force:
        found.check_machine()
    if comparison.strict and not found.agrees:
        raise FitNotUsable(
            "simulated and measured differ",
            where=str(requests),
            remedy="Check --kv-blocks first, then fit decode and prefill separately (--prefill-fit), then --calibrate.",
        )


def _show(found: "Validation", output: OutputOptions) -> None:
    """The verdict first, then the table; with --verbose all statistics and their definitions."""
    verdict(found.verdict, found.state)
    result = found.result
    if result.constants is not None:
        say(
            f"Calibrated on the first {int((~result.scored).sum()):,} requests: host time"
            f" {result.constants.step_ms:.4g} ms per step, {1e3 * result.constants.token_ms:.4g} µs per token;"
            " scored on the rest. At another load this proves little."
        )
    typer.echo("")
    for table in found.tables(brief=not output.verbose):
        print_table(table)
    if output.verbose:
        for name, meaning in found.to_json()["definitions"].items():
            typer.echo(f"  {name.removesuffix('_ms')}: {meaning}")
    print_warnings(found.warnings, most=None if output.verbose else MOST_WARNINGS)
