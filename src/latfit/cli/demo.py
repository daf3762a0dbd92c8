"""`latfit demo`: profile, fit, plan and report on this machine, with nothing but the core installed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from latfit.api.request import Option, Request
from latfit.api.requests import Seed
from latfit.cli.options import Quiet, verb
from latfit.cli.output import echo
from latfit.errors import WrongUsage
from latfit.units import format_ms, parse_duration_ms

SLA_SHARE = 0.25
"""The demo plans for an SLA of this share of the slowest cell's latency: well inside what it measured."""


@dataclass(frozen=True)
class DemoOptions(Request):
    """Where to, how long, how much is said; each step prints what its own command prints."""

    PANEL = "Demo"
    out: Annotated[Path, Option("Output folder.", metavar="DIR")] = Path("reports/demo")
    budget: Annotated[str, Option("Time to spend measuring.")] = "60s"
    seed: Seed = 0
    quiet: Quiet = False


@verb
def demo(options: DemoOptions) -> None:
    """Profile, fit, plan and report on this machine.

    The main workflow end to end, without extras.

    \b
    latfit demo --out reports/demo
    """
    from latfit.files import make_folder

    out, seed = options.out, options.seed
    parse_duration_ms(options.budget, option="--budget")
    make_folder(out)
    trace, hardware, fitted = out / "trace.parquet", out / "hardware.json", out / "trace.fit.json"
    _check_profile(hardware, trace)
    quietly = ["--quiet"] if options.quiet else []
    _heading(1, f"latfit profile --budget {options.budget}")
    _do("profile", "--budget", options.budget, "--out", trace, "--seed", seed, *quietly)
    _heading(2, "latfit fit trace.parquet")
    # A busy machine may allow no good fit; the demo shows what it is then, with its warnings, to the end.
    _do("fit", trace, "--hardware", hardware, "--out", fitted, "--seed", seed, "--force", *quietly)
    sla = demo_sla(hardware)
    _heading(3, f"latfit plan --sla {sla}")
    _do("plan", "--sla", sla, "--hardware", hardware, *quietly, goes_on=True)
    _heading(4, f"latfit report --sla {sla}")
    _do("report", "--hardware", hardware, "--sla", sla, "--out", out, *quietly)
    echo(f"\nOpen {out / 'report.html'} in a browser.")


def _check_profile(hardware: Path, trace: Path) -> None:
    """Raises WrongUsage where the folder's profile holds what no demo has entered there: the fit would replace it."""
    from latfit.hardware import read_hardware

    known = read_hardware(hardware).paths.values() if hardware.exists() else ()
    other = next((path for path in known if path.fit.data.source != str(trace.resolve())), None)
    if other is not None:
        raise WrongUsage(
            f"path {other.name} in it is not of a demo",
            where=str(hardware),
            remedy="Give the demo a folder of its own with --out.",
        )


def _do(*arguments: object, goes_on: bool = False) -> None:
    """A command as a user would type it; its exit code ends the demo where it is not 0, unless that goes on."""
    from latfit.cli.app import run

    code = run([str(argument) for argument in arguments])
    if code and not goes_on:
        raise typer.Exit(code)


def demo_sla(hardware: Path) -> str:
    """A round SLA inside the measured range, at most a quarter of the slowest step, but one that a step can meet."""
    from latfit.api import plan
    from latfit.hardware import read_hardware

    (path,) = read_hardware(hardware).paths.values()
    wanted_ms = path.fit.domain["T_ms"][1] * SLA_SHARE
    rounded = [float(f"{digit}e{power}") for power in range(-3, 6) for digit in (1, 2, 5)]
    below = max((each for each in rounded if each <= wanted_ms), default=rounded[0])
    candidates = [each for each in rounded if each >= below]
    met = (each for each in candidates if plan(hardware, sla_ms=each).feasible)
    return format_ms(next(met, candidates[-1]), 2).replace(" ", "").replace(",", "")


def _heading(number: int, command: str) -> None:
    """On a terminal in bold."""
    echo(f"\n[{number}/4] {command}", bold=True)
