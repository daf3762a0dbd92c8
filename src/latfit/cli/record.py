"""`latfit record`: a running engine's `/metrics` as a trace of windows, with its fit."""

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from latfit.api.requests import RecordRequest
from latfit.cli.options import OutputOptions, verb
from latfit.cli.output import echo, note, print_answer, progress_bar
from latfit.errors import Interrupted
from latfit.units import number

if TYPE_CHECKING:
    from latfit.metrics import Interval


@verb
def record(request: RecordRequest, output: OutputOptions) -> None:
    """Record a running engine by polling its /metrics; nothing is restarted.

    Writes the mean step of each window, which latfit fit reads, and the first and last text of /metrics. Then fits the
    windows, simulates the observed load, and compares with the server's own histograms.

    An address of ZeroMQ is that of an engine's forward-pass metrics: single steps.

    \b
    latfit record http://localhost:8000 --duration 10min --out trace.parquet
    latfit record zmq://localhost:20380
    """
    from latfit.api import fit_recording, record_passes, record_server
    from latfit.record import is_stream

    with progress_bar("Recording", quiet=output.silent) as advance:

        def show(at_s: float, whole_s: float, since: "Interval | None") -> None:
            last = None if since is None else since.last
            now = "" if last is None else f"{number(last.running)} running, {number(last.waiting)} waiting"
            advance(at_s, whole_s, now)

        if is_stream(request.url):
            steps = record_passes.of(replace(request, progress=show))
        else:
            found = record_server.of(replace(request, progress=show))
    if is_stream(request.url):
        print_answer(steps, output)
        note(f"Wrote {steps.out}. Next: latfit fit {shlex.quote(str(steps.out))}", quiet=output.silent)
        return
    kept = f"What was recorded until then is kept in {found.out}."
    try:
        with progress_bar("Fitting and simulating", quiet=output.silent):
            fitted = fit_recording(found)
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted while fitting", remedy=f"{kept} latfit fit {shlex.quote(str(found.out))} fits it."
        ) from None
    print_answer(fitted, output)
    fit_file = "" if fitted.fit is None else f", {fitted.fit_file}"
    note(f"Wrote {found.out}{fit_file} and both texts of /metrics.", quiet=output.silent)
    if not output.json and fitted.next:
        echo("Next:")
        for command in fitted.next:
            echo(f"  {command}")
    if found.interrupted:
        raise Interrupted("interrupted", remedy=kept)
