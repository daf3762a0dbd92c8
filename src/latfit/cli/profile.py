"""`latfit profile`: measures steps on this machine and writes a trace."""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from latfit.api.request import Request
from latfit.api.requests import ProfileRequest, TraceFile
from latfit.cli.options import OutputOptions, verb
from latfit.cli.output import echo, note, print_answer, progress_bar
from latfit.errors import Interrupted, LatfitError
from latfit.units import format_ms

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
    from latfit.api import profile as measured

    def announce(what: "Announcement") -> None:
        threads = f" with {what.threads} threads" if what.threads else ""
        turns = f" in {what.processes} processes" if what.processes > 1 else ""
        cells, time = f"{what.cells} cells of {what.model}", format_ms(what.budget_s * 1e3)
        text = f"Measuring {cells} on {what.device}{threads}{turns}, {time}."
        note(text, quiet=output.silent)

    try:
        with progress_bar("Measuring", quiet=output.silent) as advance:

            def show(now: "Progress") -> None:
                counts = f"{now.cells_done} of {now.cells} cells known, {now.samples} samples"
                advance(min(now.elapsed_s, now.budget_s), now.budget_s, counts)

            found = measured.of(replace(request, out=file.out, progress=show, announce=announce))
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted before the first step", remedy="Nothing was measured, nothing was written."
        ) from None
    print_answer(found, output)
    if not output.json:
        echo(f"Wrote {file.out}. Next: latfit fit {shlex.quote(str(file.out))}")
    _raise_if_stopped(found, file.out)


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
