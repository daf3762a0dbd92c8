"""`latfit watch`: a running engine, live in the terminal."""

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from latfit.api.request import option
from latfit.api.requests import WatchRequest
from latfit.cli.options import OutputOptions, verb
from latfit.cli.output import COLOURS, note, print_answer, styled
from latfit.units import parse_duration_ms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from latfit.api import Snapshot


@dataclass(frozen=True)
class Once(OutputOptions):
    """How often a block is printed."""

    once: bool = option("Print one block and end: over the window, but 10 s at most.", False)


ONCE_MS = 10_000.0  # A single block is over the window, but so long at most


@verb
def watch(request: WatchRequest, output: Once) -> None:
    """Watch a running engine: SLO, percentiles, tokens, queue, KV cache, and what limits it.

    Percentiles come from the buckets of the server's histograms over the window. With a fit the capacity under the SLO
    is predicted. Ctrl-C ends it; without a terminal one block is printed.

    \b
    latfit watch http://localhost:8000 --ttft 500ms --tpot 50ms --fit trace.fit.json
    """
    from latfit.api import block_of, watch_server

    window_ms = parse_duration_ms(str(request.window), option="--window")
    snapshots = watch_server.of(request)
    if output.once or output.json or not sys.stdout.isatty():
        note("Reading /metrics.", quiet=output.silent)
        print_answer(block_of(snapshots, min(window_ms, ONCE_MS) / 1e3), output)
    else:
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
