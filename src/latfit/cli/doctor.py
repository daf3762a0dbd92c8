"""`latfit doctor`: what this machine has, or what limits a running engine."""

from dataclasses import replace

from latfit.api.request import given_in, option_of
from latfit.api.requests import DoctorRequest
from latfit.cli.options import OutputOptions, verb
from latfit.cli.output import print_answer, progress_bar
from latfit.errors import WrongUsage


@verb
def doctor(request: DoctorRequest, output: OutputOptions) -> None:
    """Say what this machine lacks, or what limits a running engine and what would help.

    Reads the engine's /metrics for ten seconds and diagnoses the bottleneck from counters. Without an address it looks
    for an engine at the usual ports of this machine. With a fit the effect of each setting is simulated, if the
    simulation agrees with the measured latencies.

    \b
    latfit doctor
    latfit doctor http://localhost:8000 --fit trace.fit.json
    """
    from latfit.api import examine_machine, examine_server
    from latfit.metrics import LOCAL_PORTS, local_engine

    if request.url is None:
        here = local_engine()
        if here is None:
            if given := sorted(given_in(request)):
                raise WrongUsage(
                    f"no engine answers at ports {', '.join(map(str, LOCAL_PORTS))} of this machine",
                    where=option_of(DoctorRequest, given[0]),
                    remedy="Name one: http://localhost:8000.",
                )
            print_answer(examine_machine(), output)
            return
        request = replace(request, url=here)

    with progress_bar("Reading /metrics", quiet=output.silent) as advance:
        found = examine_server.of(replace(request, progress=lambda done, total: advance(done, int(total))))
    print_answer(found, output)
