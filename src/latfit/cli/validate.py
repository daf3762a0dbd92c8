"""`latfit validate`: a measured serving run beside its simulation."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import typer

from latfit.cli.options import ForceOption, OutputOptions, SeedOption, only_with, verb
from latfit.cli.output import echo, note, print_json, print_table, print_warnings, progress_bar, say, verdict
from latfit.cli.simulate_engine import (
    EngineOptions,
    PrefillFitOption,
    ReplicaOptions,
    SchedulingOptions,
    ServiceOption,
    SpecialOptions,
)
from latfit.errors import FitNotUsable

if TYPE_CHECKING:
    from latfit.api import Validation

MOST_WARNINGS = 3


@dataclass(frozen=True)
class ComparisonOptions:
    """How the two are compared."""

    panel: ClassVar[str] = "Comparison"
    metrics_after: Annotated[
        Path | None,
        typer.Option("--metrics-after", help="The server's /metrics after the run: compare with its engine's counts."),
    ] = None
    metrics_before: Annotated[
        Path | None, typer.Option("--metrics-before", help="... and before it. Default: from the server's start on.")
    ] = None
    run_steps: Annotated[
        list[str] | None,
        typer.Option(
            "--run-steps", metavar="TRACE", help="Steps recorded during the run: tells the machine's speed apart."
        ),
    ] = None
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Fit host time per step and ms per token on the first third; score the rest."),
    ] = False
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 4 where simulated and measured differ.")] = False
    seed: SeedOption = 0
    out: Annotated[Path | None, typer.Option("--out", help="Write the comparison into a JSON file.")] = None
    figure: Annotated[Path | None, typer.Option("--figure", help="Draw measured and simulated into a PNG.")] = None


@dataclass(frozen=True)
class StepOptions:
    """Where step costs come from."""

    panel: ClassVar[str] = "Step costs"
    prefill_fit: PrefillFitOption = None
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Model to fit to the trace's steps. Default: auto.")
    ] = None
    time: Annotated[
        Literal["compute", "period"] | None,
        typer.Option("--time", hidden=True, help="What to fit, as for latfit fit. Default: the period where known."),
    ] = None
    where: Annotated[str | None, typer.Option("--where", help='Use only steps for which this holds: "tp == 8".')] = None
    service: ServiceOption = "fitted"


@verb
@only_with("validate")
def validate(
    fit: Annotated[
        list[str],
        typer.Argument(help="Traces or logs of the engine, or a fit file (NAME.fit.json).", metavar="TRACE|FIT"),
    ],
    requests: Annotated[
        Path,
        typer.Argument(
            help="The measured run: arrivals, lengths, first and last token; or what latfit record wrote.",
            metavar="RUN",
        ),
    ],
    costs: StepOptions = StepOptions(),
    limits: EngineOptions = EngineOptions(),
    scheduling: SchedulingOptions = SchedulingOptions(),
    special: SpecialOptions = SpecialOptions(),
    replicas: ReplicaOptions = ReplicaOptions(),
    comparison: ComparisonOptions = ComparisonOptions(),
    force: ForceOption = False,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Simulate a measured serving run and compare TTFT, TPOT and latency with what was measured.

    The same arrivals go through a simulated engine. Step costs are fitted to a trace or log of the engine, which also
    says how it is set up; an option here goes before what it says.

    \b
    latfit validate server.log run.json --metrics-before 0.txt --metrics-after 1.txt
    latfit validate rtx4090_llama-3.1-8b.fit.json \\
        sample_traces/rtx4090_llama-3.1-8b_requests.csv --kv-blocks 2588
    """
    from latfit.api import validate as compared
    from latfit.files import check_writable, write_bytes, write_json

    for target in filter(None, (comparison.out, comparison.figure)):
        check_writable(target)
    with progress_bar("Fitting and simulating", quiet=output.silent):
        found = compared(
            fit,
            requests,
            metrics_after=comparison.metrics_after,
            metrics_before=comparison.metrics_before,
            run_steps=comparison.run_steps,
            calibrate=comparison.calibrate,
            seed=comparison.seed,
            force=force,
            **asdict(costs),
            **limits.asked(),
            **(asdict(scheduling) | {"order": scheduling.order or ["fcfs"]}),
            **asdict(special),
            **asdict(replicas),
        )
    if comparison.out is not None:
        write_json(comparison.out, found.to_json())
    if comparison.figure is not None:
        from latfit.reporting import style

        write_bytes(comparison.figure, style.png(found.plot()))
    if output.json:
        print_json(found.to_json())
    else:
        _show(found, output)
    for written in filter(None, (comparison.out, comparison.figure)):
        note(f"Wrote {written}", quiet=output.silent)
    if not force:
        found.check_machine()
    if comparison.strict and not found.agrees:
        raise FitNotUsable(
            "simulated and measured differ",
            where=str(requests),
            remedy="Check how the engine was set up first (--kv-blocks), then give a trace of it, then --calibrate.",
        )


def _show(found: "Validation", output: OutputOptions) -> None:
    """The verdict first, then the table; with --verbose all statistics and their definitions."""
    verdict(found.verdict, found.state)
    result = found.result
    if result.constants is not None:
        say(
            f"Calibrated on the first {int((~result.scored).sum()):,} requests: host time"
            f" {result.constants.step_ms:.4g} ms per step, {1e3 * result.constants.token_ms:.4g} µs per token;"
            " scored on the rest. At another load this proves little."
        )
    echo()
    for table in found.tables(brief=not output.verbose):
        print_table(table)
    if found.line:
        say(found.line)
    if output.verbose:
        for name, meaning in found.to_json()["definitions"].items():
            echo(f"  {name.removesuffix('_ms')}: {meaning}")
    print_warnings(found.warnings, most=None if output.verbose else MOST_WARNINGS)
