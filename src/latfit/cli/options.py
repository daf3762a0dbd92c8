"""Options that several verbs share, so that they look and behave the same everywhere. Imports stay light."""

from pathlib import Path
from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No notes and no progress on stderr.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of everything random.")]
HardwareOption = Annotated[
    Path, typer.Option("--hardware", help="The machine's profile: execution paths with their fits.")
]
PercentileOption = Annotated[
    float, typer.Option("--percentile", help="Share of steps, in percent, that must meet the SLA.")
]
TokensOption = Annotated[
    int | None,
    typer.Option(
        "--tokens-per-request", min=1, help="Tokens that a request adds to a step; without it 1, which is decode."
    ),
]
SourcesArgument = Annotated[
    list[str],
    typer.Argument(
        help="Traces, engine logs or tables; several files, globs, or - for standard input.", metavar="TRACE..."
    ),
]
DEFAULT_HARDWARE = Path("hardware.json")
