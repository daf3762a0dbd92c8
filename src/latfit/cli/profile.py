"""`latfit profile`: measures steps on this machine and writes a trace."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from latfit.api.request import Request
from latfit.api.requests import ProfileRequest, TraceFile
from latfit.cli.options import OutputOptions, verb
from latfit.cli.output import echo, note, print_json, print_messages, say, verdict
from latfit.errors import Interrupted, LatfitError
from latfit.units import format_ms, parse_duration_ms

if TYPE_CHECKING:
    from latfit.api import Profile
    from latfit.profiling import Announcement, Progress


@dataclass(frozen=True)
class Target(Request):
    """Where the trace goes."""

    PANEL = "Run"
    out: TraceFile = Path("trace.parquet")


@verb
def profile(request: ProfileRequest, file: Target, output: OutputOptions) -> None:
    """Measure transformer steps on this machine and write a trace.

    Every sample is kept. Ctrl-C keeps what was measured, and --resume goes on from there.

    \b
    latfit profile --budget 60s
    """
    budget_ms = parse_duration_ms(str(request.budget or "60s"), option="--budget")

    from latfit.api import profile as measured

    def announce(what: "Announcement") -> None:
        threads = f" with {what.threads} threads" if what.threads else ""
        turns = f" in {what.processes} processes" if what.processes > 1 else ""
        cells = f"{what.cells} cells" if what.cells else "steps"
        text = f"Measuring {cells} of {what.model} on {what.device}{threads}{turns}, {format_ms(what.budget_s * 1e3)}."
        note(text, quiet=output.silent)

    try:
        with _progress_bar(budget_ms / 1e3, shown=not output.silent and sys.stderr.isatty()) as progress:
            found = measured.of(replace(request, out=file.out, progress=progress, announce=announce))
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted before the first step", remedy="Nothing was measured, nothing was written."
        ) from None
    if output.json:
        print_json(found.to_json())
    else:
        _show(found, file.out, output)
    _raise_if_stopped(found, file.out)


@contextmanager
def _progress_bar(budget_s: float, *, shown: bool) -> "Iterator[Callable[[Progress], None] | None]":
    """A bar on stderr with the time left of the budget."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress as Bar, TextColumn

    columns = (
        BarColumn(),
        TextColumn("{task.fields[left]} left, {task.fields[done]} cells known, {task.fields[samples]} samples"),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=budget_s, left=format_ms(budget_s * 1e3), done="0", samples=0)

        def update(now: "Progress") -> None:
            left_s = max(0.0, now.budget_s - now.elapsed_s)
            bar.update(
                task,
                completed=budget_s - left_s,
                left=f"{left_s:.0f} s",
                done=f"{now.cells_done} of {now.cells}",
                samples=now.samples,
            )

        yield update


def _show(found: "Profile", out: Path, output: OutputOptions) -> None:
    """What was measured and how well, warnings, and what comes next."""
    verdict(found.verdict, found.state)
    for text in found.details:
        say(text)
    print_messages(found.warnings, verbose=output.verbose)
    echo(f"Wrote {out}. Next: latfit fit {shlex.quote(str(out))}")


def _raise_if_stopped(found: "Profile", out: Path) -> None:
    last = found.outcomes[-1].result
    if last.interrupted:
        elapsed_ms = sum(outcome.result.elapsed_s for outcome in found.outcomes) * 1e3
        raise Interrupted(
            f"interrupted after {format_ms(elapsed_ms)}",
            remedy=f"What was measured until then ({len(found.trace)} steps) is kept in {out}; --resume goes on.",
        )
    if last.stop == "device_failed":
        failure = next(warning for warning in last.warnings if warning.code == "device_failed")
        raise LatfitError(failure.message, remedy=f"{failure.remedy} What was measured before is kept in {out}.")
