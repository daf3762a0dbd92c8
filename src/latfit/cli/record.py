"""`latfit record`: a running engine's `/metrics` as a trace of windows."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from latfit.cli.options import OutputOptions, verb
from latfit.cli.output import print_json, print_warnings, say, verdict
from latfit.errors import Interrupted
from latfit.units import number

if TYPE_CHECKING:
    from latfit.metrics import Interval

UrlArgument = Annotated[
    str, typer.Argument(help="Address of the server, such as http://localhost:8000.", metavar="URL")
]


@dataclass(frozen=True)
class RecordOptions:
    """How long, how often, where to."""

    panel: ClassVar[str] = "Recording"
    duration: Annotated[str, typer.Option("--duration", help="How long to record; Ctrl-C ends it earlier.")] = "10min"
    every: Annotated[str, typer.Option("--every", help="How often to ask: the shortest window.")] = "1s"
    out: Annotated[Path, typer.Option("--out", help="Trace to write; the texts of /metrics go beside it.")] = Path(
        "trace.parquet"
    )
    path: Annotated[
        str | None, typer.Option("--path", metavar="NAME", help="Label of the execution path: gpu, cpu, ...")
    ] = None


@verb
def record(url: UrlArgument, options: RecordOptions = RecordOptions(), output: OutputOptions = OutputOptions()) -> None:
    """Record a running engine from outside, by polling its /metrics; nothing is restarted.

    Writes the mean step of each window, which latfit fit reads, and the first and last text of /metrics. vLLM and
    SGLang count their steps, Triton its executions.

    \b
    latfit record http://localhost:8000 --duration 10min --out trace.parquet
    """
    from latfit.api import record_server

    with _progress(shown=not output.silent and sys.stderr.isatty()) as progress:
        found = record_server(url, **asdict(options), progress=progress)
    if output.json:
        print_json(found.to_json())
    else:
        verdict(found.verdict, found.state)
        print_warnings(found.warnings)
        say(f"Wrote {found.out} and both texts of /metrics. Next:")
        for command in found.next:
            typer.echo(f"  {command}")
    if found.interrupted:
        raise Interrupted("interrupted", remedy=f"What was recorded until then is kept in {found.out}.")


@contextmanager
def _progress(*, shown: bool) -> "Iterator[Callable[[float, float, Interval | None], None] | None]":
    """A line on stderr that says how far it is and what the engine does."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[now]}"))
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, now="")
        begun: list[float] = []

        def update(at_s: float, whole_s: float, since: "Interval | None") -> None:
            begun.append(at_s) if not begun else None
            told = (
                "" if since is None else f"{number(since.last.running)} running, {number(since.last.waiting)} waiting"
            )
            bar.update(task, completed=at_s - begun[0], total=whole_s, now=told)

        yield update
