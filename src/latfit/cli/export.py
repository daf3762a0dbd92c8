"""`latfit export`: a plan as the settings of a serving engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from latfit.api.request import Option
from latfit.api.requests import ExportRequest
from latfit.cli.options import OutputOptions, verb
from latfit.cli.output import echo, note, print_json


@dataclass(frozen=True)
class ExportFiles(OutputOptions):
    """Where the settings go."""

    out: Annotated[Path | None, Option("Folder for the files, or one file. Default: printed.", metavar="PATH")] = None


@verb
def export(request: ExportRequest, output: ExportFiles) -> None:
    """Write a plan as settings of a serving engine, every value with its reason.

    \b
    latfit plan --rate 40/s --lengths 2000:300 --ttft 500ms --tpot 50ms --out plan.json
    latfit export vllm plan.json --out serving
    """
    from latfit.api import export as exported

    found = exported.of(request)
    if output.json:
        print_json(found.to_json())
    elif output.out is None:
        echo(str(found))
    if output.out is not None:
        for written in found.save(output.out):
            note(f"Wrote {written}.", quiet=output.silent)
