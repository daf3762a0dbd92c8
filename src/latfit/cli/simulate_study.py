"""`latfit simulate study`: claims of the literature, on this hardware."""

from dataclasses import asdict

from latfit.cli.options import OutputOptions, only_with
from latfit.cli.simulate_options import MachineOptions, ResultOptions, RunOptions, SweepOptions, simulated


@only_with("simulate_study")
def study(
    machine: MachineOptions = MachineOptions(),
    run: RunOptions = RunOptions(),
    results: ResultOptions = ResultOptions(),
    table: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """The literature's claims on batching, tested on this hardware.

    Every policy at ten loads up to what the main path serves, and serving engines whose steps cost the same.

    \b
    latfit simulate study --nominal gpu:launch=8ms,slope=0.05ms --nominal amx:p50=2ms
    """
    from latfit.api import simulate_study

    running = table.running()
    simulated(
        lambda advance: simulate_study(
            running=running,
            out=table.out,
            resume=table.resume,
            progress=advance,
            **machine.asked(),
            **asdict(run),
        ),
        results,
        output,
        table.out,
    )
