"""`latfit simulate engine`: a serving engine under a load, token by token.

Its limits are options by the names that serving engines use; `latfit validate` takes the same.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import typer

from latfit.cli.options import DEFAULT_HARDWARE, ForceOption, HardwareOption, OutputOptions, SeedOption, only_with
from latfit.cli.output import say
from latfit.cli.simulate_options import ResultOptions, SweepOptions, simulated
from latfit.cli.simulate_policies import LoadOptions
from latfit.errors import SlaOutOfReach
from latfit.units import format_rate

Names = Literal["chunked-prefill", "continuous", "selective", "static"]

KvBlocksOption = Annotated[
    int | None,
    typer.Option("--kv-blocks", help="Blocks of the KV cache. Default: what the engine's trace or log says."),
]
BlockSizeOption = Annotated[
    int | None,
    typer.Option("--block-size", hidden=True, help="Tokens in a block. Default: the trace's, else 16."),
]
LongPrefillOption = Annotated[
    int | None,
    typer.Option(
        "--long-prefill-token-threshold", hidden=True, help="Prompt tokens of one request in a step; 0: no limit."
    ),
]
SynchronousOption = Annotated[
    bool | None,
    typer.Option(
        "--synchronous/--asynchronous",
        hidden=True,
        help="Schedule a step after the one before it, or beside it. Default: as the trace says, else beside it.",
    ),
]
PrefixHitOption = Annotated[
    float | None,
    typer.Option(
        "--prefix-hit-rate",
        hidden=True,
        help="Share of every prompt that is cached already. Default: as recorded, else 0.",
    ),
]
FitOption = Annotated[
    Path | None, typer.Option("--fit", help="Fit of the engine's steps. Default: the gpu path of --hardware.")
]
HiddenPrefillFitOption = Annotated[
    Path | None, typer.Option("--prefill-fit", hidden=True, help="A separate fit of steps that contain prefill.")
]


@dataclass(frozen=True)
class EngineOptions:
    """Limits of an engine; `validate` takes the same. None: as the fit's trace says, else the usual."""

    panel: ClassVar[str] = "Engine"
    batching: Annotated[
        list[Names] | None,
        typer.Option(
            "--batching",
            "--engine",
            help="How steps are formed; chunked-prefill is vLLM's. Repeatable where several are simulated.",
        ),
    ] = None
    kv_blocks: KvBlocksOption = None
    max_num_seqs: Annotated[
        int | None, typer.Option("--max-num-seqs", help="Requests in a step, at most. Default: the trace's, else 256.")
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option("--max-num-batched-tokens", help="Tokens in a step, at most. Default: the trace's, else 2048."),
    ] = None
    block_size: BlockSizeOption = None
    long_prefill_token_threshold: LongPrefillOption = None
    synchronous: SynchronousOption = None

    def asked(self) -> dict[str, Any]:
        """As parameters of `engine_settings_of`."""
        return asdict(self) | {"batching": self.batching or ["chunked-prefill"]}


@dataclass(frozen=True)
class SchedulingOptions:
    """Orders and what few engines do."""

    panel: ClassVar[str] = "Engine"
    order: Annotated[
        list[Literal["fcfs", "sjf", "slo", "fair", "priority", "switch"]] | None,
        typer.Option("--order", help="Order of waiting requests. Repeatable where several are simulated."),
    ] = None
    length_error: Annotated[
        float,
        typer.Option("--length-error", hidden=True, help="sjf: standard deviation of log(predicted/true output)."),
    ] = 0.0
    switch_at: Annotated[
        int, typer.Option("--switch-at", hidden=True, help="switch: queue length from which it is sjf by class.")
    ] = 32
    ageing: Annotated[
        str | None,
        typer.Option("--ageing", hidden=True, help="Priority ageing: waiting time worth one class, such as 50ms."),
    ] = None


@dataclass(frozen=True)
class SpecialOptions:
    """Settings that few engines have."""

    panel: ClassVar[str] = "Engine"
    start_at: Annotated[
        int | None,
        typer.Option("--start-at", hidden=True, help="continuous, static: queue length that starts a prefill."),
    ] = None
    decode_first: Annotated[
        bool | None, typer.Option("--decode-first", hidden=True, help="continuous: prefill only when nothing decodes.")
    ] = None
    swap: Annotated[
        str | None,
        typer.Option("--swap", hidden=True, help="Swap preempted requests out and in, at this per token: 2us."),
    ] = None
    prefix_hit_rate: PrefixHitOption = None
    draft_tokens: Annotated[
        int | None,
        typer.Option(
            "--draft-tokens", hidden=True, help="Speculative decoding: tokens per draft. Default: the trace's, else 0."
        ),
    ] = None
    acceptance: Annotated[
        float | None,
        typer.Option(
            "--acceptance",
            hidden=True,
            help="Probability that a draft token is accepted. Default: as recorded, else 0.7.",
        ),
    ] = None
    draft_cost: Annotated[
        str | None, typer.Option("--draft-cost", hidden=True, help="Time per draft token, such as 0.5ms.")
    ] = None


PrefillFitOption = Annotated[
    Path | None, typer.Option("--prefill-fit", help="A separate fit of steps that contain prefill.")
]


ServiceOption = Annotated[
    Literal["fitted", "deterministic"],
    typer.Option("--service", hidden=True, help="Step times: as the measured ones scatter, or always the typical one."),
]


@dataclass(frozen=True)
class CostOptions:
    """What a step costs."""

    panel: ClassVar[str] = "Step costs"
    fit: FitOption = None
    prefill_fit: HiddenPrefillFitOption = None
    hardware: HardwareOption = DEFAULT_HARDWARE
    prefill_on: Annotated[
        Path | None,
        typer.Option("--prefill-on", hidden=True, help="Disaggregated prefill, on an engine with this fit."),
    ] = None
    prefill_replicas: Annotated[
        int, typer.Option("--prefill-replicas", min=1, hidden=True, help="Engines that prefill for the others.")
    ] = 1
    prefill_lengths: Annotated[
        str | None,
        typer.Option("--prefill-lengths", hidden=True, help="Tokens of prompts that they prefill: ..160, 512.. (all)."),
    ] = None
    transfer: Annotated[
        str | None,
        typer.Option("--transfer", hidden=True, help="KV transfer between them: fixed plus per token, 2ms+1us."),
    ] = None
    service: ServiceOption = "fitted"
    force: ForceOption = False


@dataclass(frozen=True)
class TrafficOptions:
    """What drawn requests are like."""

    panel: ClassVar[str] = "Load"
    lengths: Annotated[
        str | None, typer.Option("--lengths", help="Prompt and output tokens of requests at a --rate, such as 512:128.")
    ] = None
    tenants: Annotated[
        int, typer.Option("--tenants", hidden=True, min=1, help="Users that requests at a --rate come from.")
    ] = 1


@dataclass(frozen=True)
class ReplicaOptions:
    """Several engines."""

    panel: ClassVar[str] = "Engine"
    replicas: Annotated[int, typer.Option("--replicas", help="Equal engines behind a router.")] = 1
    route: Annotated[
        Literal["round-robin", "least-loaded", "shortest-queue", "prefix", "predicted-latency"],
        typer.Option("--route", help="Routing among replicas."),
    ] = "round-robin"
    prefix_share: Annotated[
        float,
        typer.Option("--prefix-share", hidden=True, help="prefix: share of a prompt that a user's replica has cached."),
    ] = 0.5
    replicas_at: Annotated[
        Path | None,
        typer.Option("--replicas-at", hidden=True, help="Table (t_s, replicas): how many are asked for from when on."),
    ] = None
    autoscale: Annotated[
        str | None,
        typer.Option(
            "--autoscale",
            hidden=True,
            help="Rule for them, METRIC:TARGET:LEAST..MOST: requests:20:1..8, waiting:2:1..8, kv:70%:1..8:15s:5min.",
        ),
    ] = None
    start_up: Annotated[
        str | None,
        typer.Option("--start-up", hidden=True, help="From asking for a replica until it serves, such as 2min."),
    ] = None


@dataclass(frozen=True)
class TargetOptions:
    """Latency targets, and how long the simulation runs."""

    panel: ClassVar[str] = "Targets and run"
    ttft: Annotated[str | None, typer.Option("--ttft", "--ttft-slo", help="Target for time to first token.")] = None
    tpot: Annotated[str | None, typer.Option("--tpot", "--tpot-slo", help="Target for time per output token.")] = None
    sla: Annotated[str | None, typer.Option("--sla", help="Target for the latency of a whole response.")] = None
    requests: Annotated[int | None, typer.Option("--requests", help="Requests per replication. Default: 100,000.")] = (
        None
    )
    replications: Annotated[int, typer.Option("--replications", hidden=True, help="Independent replications.")] = 5
    warmup: Annotated[
        float | None,
        typer.Option(
            "--warmup", hidden=True, help="Share of each replication discarded as warm-up. Default: measured."
        ),
    ] = None
    seed: SeedOption = 0
    sweep: Annotated[
        list[str] | None,
        typer.Option("--sweep", help="Settings to vary: 'rate=10/s,20/s; replicas=1..4'. Repeatable."),
    ] = None

    def asked(self) -> dict[str, Any]:
        """As parameters of the library."""
        from latfit.api import values_of

        found = asdict(self)
        return found | {"vary": values_of(found.pop("sweep")) or None}


@only_with("simulate_engine")
def engine(
    limits: EngineOptions = EngineOptions(),
    scheduling: SchedulingOptions = SchedulingOptions(),
    special: SpecialOptions = SpecialOptions(),
    replicas: ReplicaOptions = ReplicaOptions(),
    cost: CostOptions = CostOptions(),
    load: LoadOptions = LoadOptions(),
    traffic: TrafficOptions = TrafficOptions(),
    target: TargetOptions = TargetOptions(),
    results: ResultOptions = ResultOptions(),
    table: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """A serving engine, token by token.

    Batching, KV cache, preemption and replicas are simulated; steps cost what a fit says. Check the engine's limits
    with `latfit validate` on a measured run first.

    \b
    latfit simulate engine --fit gpu.fit.json --kv-blocks 2588 --rate 2/s \\
        --lengths 512:128
    """
    from latfit.api import simulate_engine

    settings, running = limits.asked() | asdict(special), table.running()
    found = simulated(
        lambda advance: simulate_engine(
            batching=settings.pop("batching"),
            kv_blocks=settings.pop("kv_blocks"),
            engine=settings,
            progress=advance,
            **(asdict(scheduling) | {"order": scheduling.order or ["fcfs"]}),
            **asdict(replicas),
            **asdict(cost),
            **load.asked(),
            **asdict(traffic),
            **target.asked(),
            running=running,
            out=table.out,
            resume=table.resume,
        ),
        results,
        output,
        table.out,
    )
    if found.setup_line and not output.json:
        say(found.setup_line)
    if not found.stable:
        best = max(found.runs, key=lambda run: run.summary.throughput_per_s)
        raise SlaOutOfReach(
            f"no engine carries {format_rate(best.rate_per_s)}: {best.engine} serves"
            f" {format_rate(best.summary.throughput_per_s)}",
            where="--rate" if load.arrivals is None else "--arrivals",
            remedy=found.would_carry,
        )
