"""`latfit plan`: how many serving engines keep what requests are promised, and with which settings; what fits under an
SLA, how to run a load of batches within it, from which batch the GPU pays."""

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

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
from latfit.cli.simulate_engine import (
    BlockSizeOption,
    FitOption,
    HiddenPrefillFitOption,
    KvBlocksOption,
    LongPrefillOption,
    PrefixHitOption,
    SynchronousOption,
)
from latfit.errors import FitNotUsable, SlaOutOfReach, WrongUsage

if TYPE_CHECKING:
    from latfit.api import EnginePlan, Plan

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
        typer.Option("--arrivals-window", "--window", hidden=True, help="Windows that --arrivals is cut into."),
    ] = None
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas", min=1, help="Replicas that share the load. Default: 1; of serving engines the fewest that do."
        ),
    ] = None


@dataclass(frozen=True)
class BatchOptions:
    """What a step holds."""

    panel: ClassVar[str] = "Batches"
    tokens_per_request: TokensOption = None
    context: Annotated[
        float | None,
        typer.Option("--context", hidden=True, help="Cached tokens of a request. Default: the median."),
    ] = None


@dataclass(frozen=True)
class MachineOptions:
    """The execution paths, and what a request pays before the GPU begins."""

    panel: ClassVar[str] = "Machine"
    hardware: HardwareOption = DEFAULT_HARDWARE
    max_batch: Annotated[int | None, typer.Option("--max-batch", hidden=True, help="Largest batch of the GPU.")] = None
    transfer: Annotated[
        str | None,
        typer.Option(
            "--transfer",
            hidden=True,
            help="Moving a request, or its cache after prefill apart: 2ms+1us.",
        ),
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
class PromiseOptions:
    """What requests of a serving engine are promised."""

    panel: ClassVar[str] = "Serving engines: targets"
    ttft: Annotated[
        str | None, typer.Option("--ttft", "--ttft-slo", help="Limit of the time to first token: 500ms, or p95:500ms.")
    ] = None
    tpot: Annotated[
        str | None, typer.Option("--tpot", "--tpot-slo", help="Limit of the time per further token: 50ms, or p95:50ms.")
    ] = None
    e2e: Annotated[str | None, typer.Option("--e2e", help="Limit of the whole answer's latency: 10s, or p95:10s.")] = (
        None
    )
    goodput: Annotated[
        str | None,
        typer.Option("--goodput", hidden=True, help="Share of requests that meet all limits, such as 99%."),
    ] = None
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", hidden=True, help="Tokens of a prompt, for --ttft beside --sla.")
    ] = 512


@dataclass(frozen=True)
class TrafficOptions:
    """The requests of serving engines."""

    panel: ClassVar[str] = "Serving engines: traffic"
    lengths: Annotated[
        str | None,
        typer.Option("--lengths", help="Prompt and output tokens: 2000:300, 2000:300:0.8 (they vary), or a file."),
    ] = None
    growth: Annotated[str | None, typer.Option("--growth", help="Plan for so many times the load: 2x.")] = None
    start_up: Annotated[
        str | None,
        typer.Option("--start-up", help="With --arrivals: schedule replicas, which take so long to start: 2min."),
    ] = None
    users: Annotated[
        int | None, typer.Option("--users", min=1, help="Users who send a request, wait for its end, and think.")
    ] = None
    think: Annotated[str, typer.Option("--think", hidden=True, help="How long they think, on average.")] = "1s"
    arrival_process: Annotated[
        str,
        typer.Option("--arrival-process", "--law", hidden=True, help="poisson; gamma:CV; bursts:TIMES:SHARE:LENGTH."),
    ] = "poisson"
    request_class: Annotated[
        list[str] | None,
        typer.Option(
            "--class",
            hidden=True,
            help="NAME:SHARE[:LIMITS], the most urgent first: chat:0.3:ttft=1s,sla=9s.",
        ),
    ] = None


@dataclass(frozen=True)
class ReplicaOptions:
    """A serving engine, and several."""

    panel: ClassVar[str] = "Serving engines: replicas"
    fit: FitOption = None
    prefill_fit: HiddenPrefillFitOption = None
    kv_blocks: KvBlocksOption = None
    model_config: Annotated[
        Path | None,
        typer.Option("--model-config", hidden=True, help="The model's config.json: the KV cache is computed."),
    ] = None
    gpu_memory: Annotated[
        str | None, typer.Option("--gpu-memory", hidden=True, help="Memory of a GPU as nvidia-smi says it: 81559MiB.")
    ] = None
    gpu_memory_utilization: Annotated[
        float, typer.Option("--gpu-memory-utilization", hidden=True, help="Share of it that the engine takes.")
    ] = 0.9
    kv_memory: Annotated[
        str | None, typer.Option("--kv-memory", hidden=True, help="Memory of the KV cache itself: 4GiB.")
    ] = None
    kv_dtype: Annotated[str | None, typer.Option("--kv-dtype", hidden=True, help="Numbers of the KV cache: fp8.")] = (
        None
    )
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", min=1, hidden=True, help="GPUs that hold the model together.")
    ] = 1
    max_num_seqs: Annotated[
        int | None,
        typer.Option("--max-num-seqs", min=1, hidden=True, help="Requests in a step, at most. Default: searched."),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-num-batched-tokens", min=1, hidden=True, help="Tokens in a step, at most. Default: searched."
        ),
    ] = None
    long_prefill_token_threshold: LongPrefillOption = None
    block_size: BlockSizeOption = None
    synchronous: SynchronousOption = None
    prefix_hit_rate: PrefixHitOption = None
    batching: Annotated[
        Literal["chunked-prefill", "continuous"] | None,
        typer.Option("--batching", hidden=True, help="How steps are formed. Default: both are tried."),
    ] = None
    order: Annotated[
        Literal["fcfs", "sjf", "slo", "priority"] | None,
        typer.Option(
            "--order",
            hidden=True,
            help="Order of waiting requests. Default: fcfs; with classes priority is tried, too.",
        ),
    ] = None
    route: Annotated[
        str, typer.Option("--route", hidden=True, help="How requests find their replica, as in simulate engine.")
    ] = "round-robin"
    price_per_hour: Annotated[
        float | None,
        typer.Option("--price-per-hour", min=0, hidden=True, help="Price of a replica."),
    ] = None
    watts: Annotated[float | None, typer.Option("--watts", min=0, hidden=True, help="Power of a replica.")] = None
    steps_slower: Annotated[
        str | None,
        typer.Option("--steps-slower", hidden=True, help="Steps take so much longer than fitted: 20%."),
    ] = None

    def asked(self) -> dict[str, Any]:
        """As parameters of `plan_engine`."""
        found = asdict(self)
        engine = {name: found.pop(name) for name in OF_ENGINE}
        return {**found, "engine": {name: value for name, value in engine.items() if value is not None}}


OF_ENGINE = (
    "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "block_size", "synchronous",
    "prefix_hit_rate",
)  # fmt: skip


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
@only_with("PLANS")
def plan(
    sla: Annotated[
        str | None,
        typer.Option(
            "--sla",
            help="Latency SLA, such as 20ms: per step, or per request when --rate is given.",
            rich_help_panel="Target",
        ),
    ] = None,
    target: TargetOptions = TargetOptions(),
    load: LoadOptions = LoadOptions(),
    batches: BatchOptions = BatchOptions(),
    machine: MachineOptions = MachineOptions(),
    promise: PromiseOptions = PromiseOptions(),
    traffic: TrafficOptions = TrafficOptions(),
    engines: ReplicaOptions = ReplicaOptions(),
    method: MethodOptions = MethodOptions(),
    files: FileOptions = FileOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Say what fits under a latency SLA, and how to run a load within it.

    With requests that have lengths: how many serving engines keep the limits of TTFT, TPOT and latency, and their
    settings, searched by simulation.

    Without lengths: which steps meet the SLA, thresholds, engine settings; with a rate, responses of batches with their
    waiting: strategy, T_cut, capacity, replicas. Exit code 5: it cannot be met; 4: the data do not support it.

    \b
    latfit plan --rate 4/s --lengths 1000:250 --ttft 1s --tpot 50ms
    latfit plan --sla 20ms --rate 500/s
    """
    _check_targets(files)
    values = {name: value for group in (load, promise, traffic, engines) for name, value in vars(group).items()}
    if _of_engines(values | {"sla": sla}):
        _plan_engines(sla, load, machine, (promise, traffic, engines), method, files, output)
        return
    if sla is None:
        raise WrongUsage(
            "there is no target",
            where="--sla",
            remedy="Give --sla 20ms, or for requests with lengths --ttft 500ms --tpot 50ms.",
        )
    _plan_batches(sla, (target, load, batches, machine, method), promise, files, output)


def _of_engines(values: dict[str, Any]) -> bool:
    """Whether serving engines are planned, by the options."""
    from types import SimpleNamespace

    from latfit.api import plans_engines

    return plans_engines(SimpleNamespace(**values))


def _plan_engines(
    sla: str | None,
    load: LoadOptions,
    machine: MachineOptions,
    groups: tuple[PromiseOptions, TrafficOptions, ReplicaOptions],
    method: MethodOptions,
    files: FileOptions,
    output: OutputOptions,
) -> None:
    """Serving engines for requests with lengths."""
    from latfit.api import plan_engine
    from latfit.cli.output import print_json, progress_bar

    promise, traffic, engines = groups
    if sla is not None and promise.e2e is not None:
        raise WrongUsage("the limit of an answer is given twice", where="--sla, --e2e", remedy="Give one of them.")
    asked = asdict(traffic)
    with progress_bar("Simulating", quiet=output.silent) as advance:
        found = plan_engine(
            rate=load.rate,
            arrivals=load.arrivals,
            replicas=load.replicas,
            hardware=machine.hardware,
            transfer=machine.transfer,
            ttft=promise.ttft,
            tpot=promise.tpot,
            e2e=promise.e2e or sla,
            goodput=promise.goodput,
            classes=asked.pop("request_class") or (),
            arrivals_window=load.arrivals_window,
            seed=method.seed,
            force=method.force,
            progress=advance,
            **asked,
            **engines.asked(),
        )
    if output.json:
        print_json(found.to_json())
    else:
        _print_engines(found, output)
    _write_engines(found, files, quiet=output.silent)
    if not found.feasible:
        limits = {"--ttft": promise.ttft, "--tpot": promise.tpot, "--e2e": promise.e2e, "--sla": sla}
        given = [name for name, limit in limits.items() if limit is not None]
        raise SlaOutOfReach(
            f"no plan keeps the targets: {found.result.binding}",
            where=", ".join(given) or None,
            remedy=f"Give {'more --replicas, ' if load.replicas else ''}wider limits, a lower --rate, or faster steps.",
        )
    if not found.supported:
        raise FitNotUsable(
            f"the plan is not supported by these data: {found.result.unsupported[0]}",
            where="--fit",
            remedy="Measure such steps, or fit a better model (latfit fit).",
        )


def _print_engines(found: "EnginePlan", output: OutputOptions) -> None:
    """The verdict, latencies, what they rest on and what would help; verbose: every table."""
    from latfit.cli.output import echo, print_table, print_warnings, say, verdict

    verdict(found.told.verdict, found.told.state)
    for table in found.tables(brief=not output.verbose):
        echo()
        print_table(table)
    echo()
    for line in found.told.lines:
        say(line)
    print_warnings(found.told.warnings, most=None if output.verbose else MOST_WARNINGS)
    for text in found.told.others:
        say(text)


def _write_engines(found: "EnginePlan", files: FileOptions, *, quiet: bool) -> None:
    from latfit.cli.output import note

    if files.out is not None:
        found.save(files.out)
        note(f"Wrote {files.out}.", quiet=quiet)
    if files.figure is not None and not found.feasible:
        note(f"{files.figure} is not drawn: there are no settings to show.", quiet=quiet)
    elif files.figure is not None:
        from latfit.files import write_bytes
        from latfit.reporting import style

        write_bytes(files.figure, style.png(found.plot()))
        note(f"Drew {files.figure}.", quiet=quiet)
    if files.report is not None:
        from latfit.provenance import command_line, utc_now
        from latfit.reporting import Making, write_page

        page = found.page(Making(command_line(), utc_now()))
        note(f"Wrote {write_page(files.report, page).html}", quiet=quiet)


def _plan_batches(
    sla: str, groups: tuple[Any, ...], promise: PromiseOptions, files: FileOptions, output: OutputOptions
) -> None:
    """Steps, or a load of requests that are alike, on the machine's paths."""
    from latfit.api import plan as decide
    from latfit.cli.output import note, print_json, progress_bar

    _, load, batches, machine, _ = groups
    options = {name: value for group in groups for name, value in vars(group).items()}
    hardware = options.pop("hardware")
    options |= {"ttft": promise.ttft, "tpot": promise.tpot, "prompt_tokens": promise.prompt_tokens}
    options |= {"replicas": load.replicas or 1}
    with progress_bar("Planning", quiet=output.silent):
        found = decide(hardware, sla, **options)
    if batches.tokens_per_request is None:
        note("Planned for decode, one token a request; --tokens-per-request changes that.", quiet=output.silent)
    if output.json:
        print_json(found.to_json())
    else:
        _print_plan(found, output, _next_command(sla, load, machine.hardware, files))
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
    from latfit.cli.output import echo, print_table, print_warnings, say, verdict
    from latfit.reporting import plan_summary, plan_tables

    told = plan_summary(found.result)
    verdict(told.verdict, told.state)
    for line in told.lines:
        say(line)
    if told.choices is not None and told.choices.rows and not output.verbose:
        print_table(told.choices)
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
        echo()
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
