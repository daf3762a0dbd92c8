"""`latfit plan`: what fits under an SLA, how to run a load within it, from which batch the GPU pays."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from latfit.cli.options import (
    DEFAULT_HARDWARE,
    ForceOption,
    HardwareOption,
    LawsOnlyOption,
    OutputOptions,
    PercentileOption,
    SeedOption,
    TokensOption,
    only_with,
    verb,
)
from latfit.errors import SlaOutOfReach

if TYPE_CHECKING:
    from latfit.api import Plan

MOST_WARNINGS = 3


@dataclass(frozen=True)
class TargetOptions:
    """What is to be met."""

    panel: ClassVar[str] = "Target"
    percentile: PercentileOption = 99.0
    objective: Annotated[
        str | None,
        typer.Option("--objective", hidden=True, help="Objective weights (minimised): p99=1,mean=0.5,throughput=0.1."),
    ] = None


@dataclass(frozen=True)
class LoadOptions:
    """The requests that come."""

    panel: ClassVar[str] = "Load"
    rate: Annotated[str | None, typer.Option("--rate", help="Requests that arrive, such as 500/s.")] = None
    arrivals: Annotated[
        Path | None,
        typer.Option("--arrivals", help="Recorded arrivals (t_s), or a rate over time (t_s, rate_per_s)."),
    ] = None
    arrivals_window: Annotated[
        str | None,
        typer.Option("--arrivals-window", "--window", help="Length of the windows that --arrivals is cut into."),
    ] = None
    replicas: Annotated[int, typer.Option("--replicas", help="Replicas that share the load.")] = 1


@dataclass(frozen=True)
class BatchOptions:
    """What a step holds."""

    panel: ClassVar[str] = "Batches"
    tokens_per_request: TokensOption = None
    context: Annotated[
        float | None, typer.Option("--context", help="Cached tokens of a request; without it the trace's median.")
    ] = None


@dataclass(frozen=True)
class MachineOptions:
    """The execution paths, and what a request pays before the GPU begins."""

    panel: ClassVar[str] = "Machine"
    hardware: HardwareOption = DEFAULT_HARDWARE
    max_batch: Annotated[int | None, typer.Option("--max-batch", help="Largest batch of the GPU.")] = None
    transfer: Annotated[
        str | None,
        typer.Option("--transfer", help="Moving a request to the GPU: fixed, or with a part per token: 2ms+1us."),
    ] = None
    wait: Annotated[
        str | None,
        typer.Option("--wait", hidden=True, help="Expected wait for the GPU; without it what the rate makes it."),
    ] = None
    launch_share: Annotated[
        float,
        typer.Option("--launch-share", hidden=True, help="Share of the launch cost in a step from which B2 counts."),
    ] = 0.5


@dataclass(frozen=True)
class EngineOptions:
    """Targets for the settings of a serving engine."""

    panel: ClassVar[str] = "Engine"
    ttft: Annotated[
        str | None, typer.Option("--ttft", "--ttft-slo", help="Target for the first token of a prompt.")
    ] = None
    tpot: Annotated[
        str | None, typer.Option("--tpot", "--tpot-slo", help="Target between tokens; without it the SLA.")
    ] = None
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Tokens of a prompt, for --ttft.")] = 512


@dataclass(frozen=True)
class MethodOptions:
    """How the answer is found."""

    panel: ClassVar[str] = "Method"
    laws_only: LawsOnlyOption = False
    seed: SeedOption = 0
    force: ForceOption = False


@dataclass(frozen=True)
class FileOptions:
    """Where the answer goes beside the terminal."""

    panel: ClassVar[str] = "Files"
    out: Annotated[Path | None, typer.Option("--out", help="File for the plan as JSON.")] = None
    figure: Annotated[Path | None, typer.Option("--figure", help="PNG file for the main picture.")] = None
    report: Annotated[Path | None, typer.Option("--report", metavar="DIR", help="Folder for the report page.")] = None


@verb
@only_with("plan")
def plan(
    sla: Annotated[
        str,
        typer.Option(
            "--sla",
            help="Latency SLA, such as 20ms: per step, or per request when --rate is given.",
            rich_help_panel="Target",
        ),
    ],
    target: TargetOptions = TargetOptions(),
    load: LoadOptions = LoadOptions(),
    batches: BatchOptions = BatchOptions(),
    machine: MachineOptions = MachineOptions(),
    engine: EngineOptions = EngineOptions(),
    method: MethodOptions = MethodOptions(),
    files: FileOptions = FileOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Say what fits under a latency SLA, and how to run a load within it.

    Without a rate: which steps meet the SLA, thresholds, engine settings. With a rate, responses with their waiting:
    strategy, T_cut, capacity, replicas, verified by an event simulation. Exit code 5 where the SLA cannot be met.

    Example: latfit plan --sla 20ms --rate 500/s
    """
    from latfit.api import plan as decide
    from latfit.cli.output import note, print_json, progress_bar

    _check_targets(files)
    groups = (target, load, batches, machine, engine, method)
    options = {name: value for group in groups for name, value in vars(group).items()}
    hardware = options.pop("hardware")
    tokens = batches.tokens_per_request
    with progress_bar("Planning", quiet=output.silent):
        found = decide(hardware, sla, **{**options, "tokens_per_request": tokens or 1})
    if tokens is None:
        note("Planned for decode, one token a request; --tokens-per-request changes that.", quiet=output.silent)
    if output.json:
        print_json(found.to_json())
    else:
        _print_plan(found, output, _next_command(sla, load, hardware, files))
    _write(found, files, quiet=output.silent)
    if not found.feasible:
        raise SlaOutOfReach(found.result.binding, where=f"--sla {sla}", remedy=found.result.remedy)


def _check_targets(files: FileOptions) -> None:
    """That files can be written, before any work is done. Raises TargetNotWritable."""
    from latfit.files import check_writable, make_folder

    for target in (files.out, files.figure):
        if target is not None:
            check_writable(target)
    if files.report is not None:
        make_folder(files.report)


def _write(found: "Plan", files: FileOptions, *, quiet: bool) -> None:
    from latfit.cli.output import note

    if files.out is not None:
        found.save(files.out)
        note(f"Wrote {files.out}.", quiet=quiet)
    if files.figure is not None:
        from latfit.files import write_bytes
        from latfit.reporting import style

        write_bytes(files.figure, style.png(found.plot()))
        note(f"Drew {files.figure}.", quiet=quiet)
    if files.report is not None:
        from latfit.api import report

        note(report(found.hardware, files.report, plan=found).summary(), quiet=quiet)


def _print_plan(found: "Plan", output: OutputOptions, next_command: str) -> None:
    """The verdict, thresholds, load, settings, what needs action; verbose: what it assumes and rests on too."""
    from latfit.cli.output import print_table, print_warnings, say, verdict
    from latfit.reporting import plan_summary, plan_tables

    told = plan_summary(found.result)
    verdict(told.verdict, told.state)
    for line in told.lines:
        say(line)
    print_warnings(
        [*told.warnings, *told.others] if output.verbose else told.warnings,
        most=None if output.verbose else MOST_WARNINGS,
    )
    if not output.verbose:
        if found.feasible:
            say(next_command)
        return
    for text in found.result.notes:
        say(text)
    for table in plan_tables(found.result):
        typer.echo("")
        print_table(table)


def _next_command(sla: str, load: LoadOptions, hardware: Path, files: FileOptions) -> str:
    """What to do after a plan that holds."""
    place = () if hardware == DEFAULT_HARDWARE else ("--hardware", str(hardware))
    if load.rate is None and load.arrivals is None:
        command = shlex.join(["latfit", "plan", "--sla", sla, *place, "--rate", "500/s"])
        return f"Next: {command} (responses at your rate); -v here shows every table."
    if load.rate is None or files.report is not None:
        return "Next: -v here shows every table."
    command = shlex.join(["latfit", "report", "--sla", sla, "--rate", load.rate, *place])
    return f"Next: {command}; -v here shows every table."
