"""`latfit export`: a plan as the settings of a serving engine."""

from pathlib import Path
from typing import Annotated

import typer

from latfit.cli.options import OutputOptions, verb


@verb
def export(
    target: Annotated[
        str,
        typer.Argument(help="vllm, sglang, trtllm, llamacpp, triton, tensorrt or kubernetes.", metavar="TARGET"),
    ],
    plan: Annotated[Path, typer.Argument(help="The plan, as latfit plan --out writes it.", metavar="PLAN")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="PATH", help="Folder for the files, or one file. Default: printed.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The model's name or folder, as the engine is to load it.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", help="tensorrt: an input, B for the batch: input:Bx3x224x224. Repeatable."),
    ] = None,
    begins: Annotated[
        str | None,
        typer.Option(
            "--begins",
            metavar="TIME",
            help="kubernetes: when the plan's recorded day begins: '06:30 Europe/Berlin'. Default: 00:00 UTC.",
        ),
    ] = None,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Write a plan down as settings of a serving engine: every value with its reason, the plan that it comes from, and
    when it holds.

    \b
    latfit plan --rate 40/s --lengths 2000:300 --ttft 500ms --tpot 50ms --out plan.json
    latfit export vllm plan.json --out serving
    """
    from latfit.api import export as exported
    from latfit.cli.output import echo, note, print_json

    found = exported(plan, target, model=model, shapes=shape or (), begins=begins)
    if output.json:
        print_json(found.to_json())
    elif out is None:
        echo(str(found))
    if out is not None:
        for written in found.save(out):
            note(f"Wrote {written}.", quiet=output.silent)
