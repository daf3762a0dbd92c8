"""`latfit demo`: profile, fit, plan and report on this machine, with nothing but the core installed."""

from dataclasses import dataclass
from pathlib import Path

import typer

from latfit.api.request import Request, option
from latfit.api.requests import Seed
from latfit.cli.options import Quiet, verb
from latfit.cli.output import echo
from latfit.errors import WrongUsage
from latfit.units import parse_duration_ms


@dataclass(frozen=True)
class DemoOptions(Request):
    PANEL = "Demo"
    out: Path = option("Output folder.", Path("reports/demo"), metavar="DIR")
    budget: str = option("Time to spend measuring.", "60s")
    seed: Seed = 0
    quiet: Quiet = False


@verb
def demo(options: DemoOptions) -> None:
    """Profile, fit, plan and report on this machine.

    The main workflow end to end, without extras.

    \b
    latfit demo --out reports/demo
    """
    from latfit.api import Fit
    from latfit.cli.fit import feasible_sla
    from latfit.files import make_folder
    from latfit.hardware import HardwareProfile

    out, seed, budget = options.out, options.seed, options.budget
    parse_duration_ms(budget, option="--budget")
    make_folder(out)
    trace, hardware, fitted = out / "trace.parquet", out / "hardware.json", out / "trace.fit.json"
    for path in HardwareProfile.read(hardware).paths.values() if hardware.exists() else ():
        if path.fit.data.source != str(trace.resolve()):  # the fit would replace it
            remedy = "Give the demo a folder of its own with --out."
            raise WrongUsage(f"path {path.name} in it is not of a demo", where=str(hardware), remedy=remedy)
    quietly = ["--quiet"] if options.quiet else []
    measuring = ["--budget", budget, "--out", trace, "--seed", seed, *quietly]
    _do(1, f"latfit profile --budget {budget}", "profile", *measuring)
    # A busy machine may allow no good fit; the demo goes on with it, and its warnings, to the end.
    fitting = [trace, "--hardware", hardware, "--out", fitted, "--seed", seed, "--force", *quietly]
    _do(2, "latfit fit trace.parquet", "fit", *fitting)
    sla = feasible_sla(Fit.load(fitted), least_ms=0.0)
    planning = ["--sla", sla, "--hardware", hardware, *quietly]
    _do(3, f"latfit plan --sla {sla}", "plan", *planning, goes_on=True)
    _do(4, f"latfit report --sla {sla}", "report", *planning, "--out", out)
    echo(f"\nOpen {out / 'report.html'} in a browser.")


def _do(number: int, shown: str, *arguments: object, goes_on: bool = False) -> None:
    """Run a command as a user would type it; its exit code ends the demo unless that goes on."""
    from latfit.cli.app import run

    echo(f"\n[{number}/4] {shown}", bold=True)
    code = run([str(argument) for argument in arguments])
    if code and not goes_on:
        raise typer.Exit(code)
