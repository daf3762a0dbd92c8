"""`latfit validate`: a measured serving run beside its simulation."""

from dataclasses import dataclass
from typing import Annotated

from latfit.api.request import Option
from latfit.api.requests import Figure, JsonFile, ValidateRequest
from latfit.cli.options import Files, OutputOptions, verb
from latfit.cli.output import print_answer, progress_bar
from latfit.errors import FitNotUsable


@dataclass(frozen=True)
class ValidationFiles(Files):
    """Where a comparison goes."""

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

    files.check()
    with progress_bar("Fitting and simulating", quiet=output.silent):
        found = compared.of(request)
    print_answer(found, output)
    files.write(found, quiet=output.silent)
    if not request.force:
        found.check_machine()
    if files.strict and not found.agrees:
        raise FitNotUsable(
            "simulated and measured differ",
            where=str(request.run),
            remedy="Check how the engine was set up first (--kv-blocks), then give a trace of it, then --calibrate.",
        )
