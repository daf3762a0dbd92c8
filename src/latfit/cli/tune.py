"""`latfit tune`: settings of a running engine, planned and verified."""

import os
from dataclasses import replace

from latfit.api.requests import TuneRequest
from latfit.cli.options import OutputOptions, verb
from latfit.cli.output import echo, note, print_answer
from latfit.errors import SlaOutOfReach

TOKEN = "LATFIT_ENGINE_TOKEN"


@verb
def tune(request: TuneRequest, output: OutputOptions) -> None:
    """Find settings of an engine that meet SLOs at a rate, and verify them: usually one or two restarts.

    Starts the engine on loopback, loads it below, at and above the rate, records its steps, plans settings, starts it
    again with them, and compares the measured TTFT and TPOT with the plan. What was started is stopped at the end.
    Exit code 5 if the SLOs are not met.

    \b
    latfit tune --rate 8/s --lengths 500:200 --ttft 500ms --tpot 50ms -- vllm serve MODEL
    """
    from latfit.api import tune as tuned

    def ask(options: str) -> None:
        echo(f"Restart the engine with: {options}", err=True)
        input("Press Enter when it is starting.")

    found = tuned.of(
        replace(
            request,
            token=os.environ.get(TOKEN) or None,
            restart=ask,
            progress=lambda text: note(text, quiet=output.silent),
        )
    )
    print_answer(found, output)
    if found.result.runs:
        note(f"Wrote {request.out}: traces, fit, plan, settings and logs.", quiet=output.silent)
    if not request.dry_run and not found.kept:
        raise SlaOutOfReach(
            "the SLOs are not met at this rate on one engine",
            where="--rate",
            remedy="Lower the rate, allow longer times, or add replicas: latfit plan says how many.",
        )
