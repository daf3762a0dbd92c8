"""`latfit demo`: the whole straight line on this machine, with nothing but the core installed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from latfit.cli.options import QuietOption, SeedOption
from latfit.units import format_ms, parse_duration_ms

if TYPE_CHECKING:
    from latfit.model import FitResult


SLA_SHARE = 0.25
"""The demo plans for an SLA of this share of the slowest cell's latency: well inside what it measured."""


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder that everything goes into.")] = Path("reports/demo"),
    budget: Annotated[str, typer.Option("--budget", help="Time to spend measuring.")] = "60s",
    seed: SeedOption = 0,
    quiet: QuietOption = False,
) -> None:
    """Profile, fit, plan and report on this machine.

    The main job end to end, with nothing but the core installed.
    """
    from latfit.files import make_folder
    from latfit.model import read_fit

    parse_duration_ms(budget, option="--budget")
    make_folder(out)
    trace, hardware, fitted = out / "trace.parquet", out / "hardware.json", out / "trace.fit.json"
    quietly = ["--quiet"] if quiet else []
    _heading(1, "profile", "real transformer steps on this CPU")
    _do("profile", "--budget", budget, "--out", trace, "--seed", seed, *quietly)
    _heading(2, "fit", "a latency model to what was measured")
    _do("fit", trace, "--hardware", hardware, "--out", fitted, "--seed", seed, *quietly)
    sla = demo_sla(read_fit(fitted))
    _heading(3, f"plan --sla {sla}", "what fits under a latency limit")
    _do("plan", "--sla", sla, "--hardware", hardware, *quietly)
    _heading(4, "report", "the same as a page and pictures")
    _do("report", "--hardware", hardware, "--sla", sla, "--out", out, *quietly)


def _do(*arguments: object) -> None:
    """A command as a user would type it; its exit code ends the demo where it is not 0."""
    from latfit.cli.app import run

    code = run([str(argument) for argument in arguments])
    if code:
        raise typer.Exit(code)


def demo_sla(fit: "FitResult") -> str:
    """A round SLA inside the measured range: 1, 2 or 5 times a power of ten, at most a quarter of the slowest step."""
    slowest = fit.domain["T_ms"][1] * SLA_SHARE
    floor = fit.domain["T_ms"][0] * 2
    steps = [float(f"{digit}e{power}") for power in range(-3, 7) for digit in (1, 2, 5)]
    chosen = max((step for step in steps if step <= max(slowest, floor)), default=steps[0])
    return format_ms(max(chosen, floor) if chosen < floor else chosen, 2).replace(" ", "").replace(",", "")


def _heading(number: int, verb: str, purpose: str) -> None:
    typer.echo(f"\n[{number}/4] latfit {verb}: {purpose}")
