"""`latfit watch`: a running engine, live in the terminal."""

import os
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from latfit.cli.doctor import EngineAsItIs, Promised
from latfit.cli.options import OutputOptions, only_with, verb
from latfit.cli.output import COLOURS, note, print_json, say, styled, verdict
from latfit.cli.record import UrlArgument
from latfit.units import parse_duration_ms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from latfit.api import Snapshot


@dataclass(frozen=True)
class WatchOptions:
    """What is shown, how often, over how long."""

    panel: ClassVar[str] = "Watching"
    window: Annotated[str, typer.Option("--window", help="How far back the figures reach.")] = "30s"
    every: Annotated[str, typer.Option("--every", help="How often the engine is read.")] = "1s"


ONCE_MS = 10_000.0
"""A single block is over the window, but so long at most."""


@verb
@only_with("watch_server")
def watch(
    url: UrlArgument,
    promised: Promised = Promised(),
    options: WatchOptions = WatchOptions(),
    engine: EngineAsItIs = EngineAsItIs(),
    once: Annotated[
        bool, typer.Option("--once", help="Print one block and end: over the window, but 10 s at most.")
    ] = False,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Watch a running engine: SLO, tails, tokens, queue, KV cache, what limits it and what would help.

    Tails are those of the server's histograms over the window, known by their buckets. With a fit the capacity under
    the SLO is predicted. Ctrl-C ends it; without a terminal one block is printed.

    \b
    latfit watch http://localhost:8000 --ttft 500ms --tpot 50ms --fit trace.fit.json
    """
    from latfit.api import block_of, watch_server

    window_ms = parse_duration_ms(options.window, option="--window")
    snapshots = watch_server(url, **asdict(promised), **asdict(options), **asdict(engine))
    if once or output.json or not sys.stdout.isatty():
        note("Reading /metrics.", quiet=output.silent)
        found = block_of(snapshots, min(window_ms, ONCE_MS) / 1e3)
        if output.json:
            print_json(found.to_json())
            return
        verdict(found.verdict, found.state)
        for line in found.lines:
            say(line, "  ")
        return
    _show_live(snapshots)


def _show_live(snapshots: "Iterator[Snapshot]") -> None:
    """Until Ctrl-C; what was shown last stays."""
    from rich.console import Console, Group
    from rich.live import Live

    plain = bool(os.environ.get("NO_COLOR"))
    console = Console()
    try:
        with Live(styled("Reading /metrics."), console=console, auto_refresh=False) as live:
            for found in snapshots:
                shown = styled(found.verdict, "" if plain else f"bold {COLOURS[found.state]}")
                live.update(Group(shown, *(styled(f"  {line}") for line in found.lines)), refresh=True)
    except KeyboardInterrupt:
        return
