"""`latfit validate`: a measured serving run beside its simulation."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from latfit.api.request import Option, Request
from latfit.api.requests import Figure, JsonFile, ValidateRequest
from latfit.cli.options import OutputOptions, verb
from latfit.cli.output import echo, note, print_json, print_messages, print_table, progress_bar, say, verdict
from latfit.errors import FitNotUsable

if TYPE_CHECKING:
    from latfit.api import Validation


@dataclass(frozen=True)
class ValidationFiles(Request):
    """What becomes of the files."""

    PANEL = "Comparison"
    strict: Annotated[bool, Option("Exit code 4 if simulated and measured differ.")] = False
    out: JsonFile = None
    figure: Figure = None


@verb
def validate(request: ValidateRequest, files: ValidationFiles, output: OutputOptions) -> None:
    """Compare the measured TTFT, TPOT and latency of a serving run with its simulation.

    The same arrivals go through a simulated engine. Step times are fitted to a trace or log of the engine, which also
    has its settings; options take precedence.

    \b
    latfit validate server.log run.json --metrics-before 0.txt --metrics-after 1.txt
    latfit validate rtx4090_llama-3.1-8b.fit.json \\
        sample_traces/rtx4090_llama-3.1-8b_requests.csv --kv-blocks 2588
    """
    from latfit.api import validate as compared
    from latfit.files import check_writable, write_bytes, write_json

    for target in filter(None, (files.out, files.figure)):
        check_writable(target)
    with progress_bar("Fitting and simulating", quiet=output.silent):
        found = compared.of(request)
    if files.out is not None:
        write_json(files.out, found.to_json())
    if files.figure is not None:
        from latfit.reporting import style

        write_bytes(files.figure, style.png(found.plot()))
    if output.json:
        print_json(found.to_json())
    else:
        _show(found, output)
    for written in filter(None, (files.out, files.figure)):
        note(f"Wrote {written}", quiet=output.silent)
    if not request.force:
        found.check_machine()
    if files.strict and not found.agrees:
        raise FitNotUsable(
            "simulated and measured differ",
            where=str(request.run),
            remedy="Check how the engine was set up first (--kv-blocks), then give a trace of it, then --calibrate.",
        )


def _show(found: "Validation", output: OutputOptions) -> None:
    """The verdict first, then the table; with --verbose all statistics and their definitions."""
    verdict(found.verdict, found.state)
    result = found.result
    if (calibration := result.constants) is not None:
        error = calibration.errors
        say(
            f"Calibrated on the first {int((~result.scored).sum()):,} requests: decode steps ×"
            f" {calibration.decode_factor:.3f} ± {error['decode_factor']:.2g}, steps with prefill ×"
            f" {calibration.prefill_factor:.3f} ± {error['prefill_factor']:.2g}, host time {calibration.step_ms:.3g} ±"
            f" {error['step_ms']:.2g} ms per step, start delay {calibration.start_ms:.3g} ± {error['start_ms']:.2g} ms;"
            " scored on the rest."
        )
    echo()
    for table in found.tables(brief=not output.verbose):
        print_table(table)
    if found.line:
        say(found.line)
    if output.verbose:
        for name, meaning in found.to_json()["definitions"].items():
            echo(f"  {name.removesuffix('_ms')}: {meaning}")
    print_messages(found.warnings, verbose=output.verbose)
