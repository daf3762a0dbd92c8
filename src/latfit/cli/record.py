"""`latfit record`: a running engine's `/metrics` as a trace of windows, with its fit."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from latfit.api.requests import RecordRequest
from latfit.cli.options import OutputOptions, verb
from latfit.cli.output import echo, print_json, print_messages, print_table, progress_bar, say, verdict
from latfit.errors import Interrupted
from latfit.units import number

if TYPE_CHECKING:
    from latfit.api import RecordedFit
    from latfit.metrics import Interval


@verb
def record(request: RecordRequest, output: OutputOptions) -> None:
    """Record a running engine by polling its /metrics; nothing is restarted.

    Writes the mean step of each window, which latfit fit reads, and the first and last text of /metrics. Then fits the
    windows, simulates the observed load, and compares with the server's own histograms.

    \b
    latfit record http://localhost:8000 --duration 10min --out trace.parquet
    """
    from latfit.api import fit_recording, record_server

    with _progress(shown=not output.silent and sys.stderr.isatty()) as progress:
        found = record_server.of(replace(request, progress=progress))
    kept = f"What was recorded until then is kept in {found.out}."
    try:
        with progress_bar("Fitting and simulating", quiet=output.silent):
            fitted = fit_recording(found)
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted while fitting", remedy=f"{kept} latfit fit {shlex.quote(str(found.out))} fits it."
        ) from None
    if output.json:
        print_json(fitted.to_json())
    else:
        _show(fitted, verbose=output.verbose)
    if found.interrupted:
        raise Interrupted("interrupted", remedy=kept)


def _show(found: "RecordedFit", *, verbose: bool) -> None:
    """Windows, fit and comparison, what makes them less certain, and the next commands."""
    verdict(found.recorded.verdict, found.state)
    for line in found.lines:
        say(line)
    if found.validation is not None:
        for table in found.validation.tables(brief=True):
            print_table(table)
        if found.validation.line:
            say(found.validation.line)
    print_messages(found.warnings, verbose=verbose)
    fit_file = "" if found.fit is None else f", {found.file}"
    say(f"Wrote {found.recorded.out}{fit_file} and both texts of /metrics.{' Next:' if found.next else ''}")
    for command in found.next:
        echo(f"  {command}")


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
            told = "no answer" if begun else ""
            begun.append(at_s) if not begun else None
            if since is not None:
                told = f"{number(since.last.running)} running, {number(since.last.waiting)} waiting"
            bar.update(task, completed=at_s - begun[0], total=whole_s, now=told)

        yield update
