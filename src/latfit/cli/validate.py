"""`latfit validate`: a measured serving run against its simulation."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from latfit.cli.options import JsonOption, QuietOption, SeedOption, verb
from latfit.cli.simulate_engine import EngineOptions
from latfit.errors import FitNotUsable, WrongUsage

if TYPE_CHECKING:
    from latfit.validation import Validation


@verb
def validate(
    fit: Annotated[Path, typer.Argument(help="A fit file (NAME.fit.json).", metavar="FIT")],
    requests: Annotated[
        Path, typer.Argument(help="The measured run: arrivals, lengths, first and last token.", metavar="REQUESTS")
    ],
    engine_options: EngineOptions = EngineOptions(),
    prefill_fit: Annotated[
        Path | None, typer.Option("--prefill-fit", help="A fit of its own for steps that hold prefill.")
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Fit ms a step and ms a token on the first third, and score the rest."),
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Write the comparison into a JSON file.")] = None,
    figure: Annotated[Path | None, typer.Option("--figure", help="Draw measured against simulated into a PNG.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 4 where simulated and measured differ.")] = False,
    seed: SeedOption = 0,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Simulate a measured serving run and compare TTFT, TPOT and latency with what was measured.

    The same arrivals go through a simulated engine with the given limits and step costs from the fit. Fits of decode
    steps and of steps with prefill, made apart, are best. For example:
    latfit validate decode.fit.json run.csv --prefill-fit mixed.fit.json --kv-blocks 2588
    """
    from latfit.cli.output import note, print_json, print_warnings
    from latfit.files import check_writable, write_json
    from latfit.model import read_fit
    from latfit.simulation import step_costs
    from latfit.validation import cautions_about, read_measured, validate as compare

    for target in filter(None, (out, figure)):
        check_writable(target)
    settings, *others = engine_options.settings()
    if others:
        raise WrongUsage("one engine was measured", where="--engine", remedy="Give one.")
    fits = read_fit(fit), None if prefill_fit is None else read_fit(prefill_fit)
    found = compare(read_measured(requests), step_costs(*fits), settings, calibration=calibrate, seed=seed)
    cautions = cautions_about(*fits, found.run, settings)
    document = found.to_json() | {"warnings": [asdict(each) for each in cautions]}
    if out is not None:
        write_json(out, document)
    if figure is not None:
        draw(found, figure)
    if json:
        print_json(document)
    else:
        show(found)
        print_warnings(cautions)
    for written in filter(None, (out, figure)):
        note(f"Wrote {written}", quiet=quiet or json)
    if strict and not found.agrees:
        raise FitNotUsable(
            "simulated and measured differ",
            where=str(requests),
            remedy="Check --kv-blocks first, then fit decode and prefill apart (--prefill-fit), then --calibrate.",
        )


def draw(found: "Validation", target: Path) -> None:
    """The figure as a PNG, whole or not at all."""
    from latfit.files import write_bytes
    from latfit.report import style, validation_figure

    write_bytes(target, style.png(validation_figure(found)))


def show(found: "Validation") -> None:
    """The verdict first, then the table, then what the words mean."""
    from latfit.cli.output import print_table
    from latfit.report import validation_table
    from latfit.validation import DEFINITIONS

    typer.echo(f"Simulated {found.verdict}")
    if found.constants is not None:
        typer.echo(
            f"Calibrated on the first {int((~found.scored).sum()):,} requests: {found.constants.step_ms:.4g} ms a step,"
            f" {1e3 * found.constants.token_ms:.4g} µs a token; scored on the rest. At another load this proves little."
        )
    typer.echo("")
    print_table(validation_table(found))
    for name, meaning in DEFINITIONS.items():
        typer.echo(f"  {name.removesuffix('_ms')}: {meaning}")
