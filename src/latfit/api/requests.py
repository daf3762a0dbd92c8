"""The request of each verb: what it takes, in which unit, with which default. See `latfit.api.request`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from latfit.api.request import Option, Request
from latfit.units import MOST_SEED

if TYPE_CHECKING:
    from latfit.api.fits import Fit
    from latfit.api.plans import Plan
    from latfit.live import Executor
    from latfit.profiling import Announcement, Progress as Measuring
    from latfit.simulation import Running

Duration = str | timedelta
Time = Literal["compute", "period"]
Ranges = Mapping[str, tuple[float, float]] | Sequence[str] | None
Progress = Callable[[float, int], None]
Batching = Literal["chunked-prefill", "continuous", "selective", "static"]
OrderName = Literal["fcfs", "sjf", "slo", "fair", "priority", "switch"]
Route = Annotated[
    Literal["round-robin", "least-loaded", "shortest-queue", "prefix", "predicted-latency"], "Routing policy."
]
Service = Literal["fitted", "deterministic", "exponential"]
Policies = "gpu-only|fixed|window|marginal-cost|three-stage|cutoff|optimal|split|deadline"
"""Policies that come with latfit; plug-ins may add others."""

Seed = Annotated[int, Option("Random seed.", min=0, max=MOST_SEED)]
Force = Annotated[bool, Option("Proceed although the fit is of another machine or model.")]
Hardware = Annotated[
    Any,
    Option("The machine's profile: execution paths with their fits.", "--hardware", Path, "Machine"),
]
Sources = Annotated[
    Any,
    Option(
        "Traces, engine logs or tables; several files, globs, or - for standard input.",
        kind=list[str],
        argument=True,
        metavar="TRACE",
    ),
]
FitFile = Annotated[Path, Option("A fit file (NAME.fit.json).", argument=True, metavar="FIT")]
Server = Annotated[str, Option("Address of the server, such as http://localhost:8000.", argument=True, metavar="URL")]
Tokens = Annotated[int | None, Option("Tokens per request and step. Default: 1 (decode).", min=1)]
Percentile = Annotated[float | str, Option("Percentile that must meet the SLA: of steps, or of responses.", kind=float)]
RateOf = Annotated[str | None, Option("Arrival rate, such as 500/s.", panel="Load")]
LengthsOf = Annotated[
    Any,
    Option("Prompt and output tokens: 2000:300, 2000:300:0.8 (they vary), or a file.", kind=str, panel="Load"),
]
Sla = Annotated[
    Duration | None, Option("Latency SLA, such as 20ms: per step, or per request when --rate is given.", panel="Target")
]
Context = Annotated[float | None, Option("Cached tokens of a request. Default: the median of the fit's trace.")]
LawsOnly = Annotated[bool, Option("No noise: steps take their mean time, arrivals are Poisson.")]
Arrivals = Annotated[
    Any,
    Option(
        "Recorded requests, in any format that is read; plan also takes a rate over time (t_s, rate_per_s).",
        panel="Load",
    ),
]
TransferOf = Annotated[
    str | None,
    Option("Time to move a request or, after disaggregated prefill, its KV cache: fixed plus per token, 2ms+1us."),
]
Ageing = Annotated[Duration | None, "Priority ageing: waiting time worth one class, such as 50ms."]
PathName = Annotated[str, Option("Execution path: amx, gpu, cpu, ...", argument=True, metavar="PATH")]
TraceFile = Annotated[Path, Option("Trace to write.")]
JsonFile = Annotated[Path | None, Option("File for the answer as JSON.")]
Ttft = Annotated[
    Duration | None,
    Option("SLO of the time to first token: 500ms; plan also takes p95:500ms.", "--ttft --ttft-slo", panel="Target"),
]
Tpot = Annotated[
    Duration | None,
    Option("SLO of the time per output token: 50ms; plan also takes p95:50ms.", "--tpot --tpot-slo", panel="Target"),
]
WindowOf = Annotated[
    Duration | None,
    Option("Window length of --arrivals, such as 30min.", "--arrivals-window --window", panel="Load"),
]
Listener = Annotated[Progress | None, "Called with (done, total)."]
ReportFolder = Annotated[Path | None, Option("Folder for the report page.", metavar="DIR")]
Figure = Annotated[Path | None, Option("PNG file for the main picture.")]


@dataclass(frozen=True, kw_only=True)
class Cluster(Request):
    """Where many pieces of work are done."""

    NEEDS = "scheduler: backend"
    backend: Annotated[Literal["local", "dask"], "Where to run: cells of traces, or runs of a sweep."] = "local"
    scheduler: Annotated[str | None, "Address of a Dask cluster, tcp://...; without it workers here."] = None


@dataclass(frozen=True, kw_only=True)
class ReadOptions(Cluster):
    """How a source is read and cleaned."""

    PANEL = "Reading"
    map: Annotated[
        Mapping[str, str] | str | None,
        Option("Names of the columns in the source: B=batch,S=tokens,T_ms=latency."),
    ] = None
    unit: Annotated[Literal["ns", "us", "ms", "s"] | None, Option("Unit of the latency column.")] = None
    format: Annotated[str, Option("Format of the sources; auto detects it from the content.", metavar="NAME")] = "auto"
    where: Annotated[str | None, Option("Use only rows that match: \"hardware == 'h100' and tp == 8\".")] = None
    keep: Annotated[Sequence[str], Option("Keep rows that this rule would drop: cold_start. Repeatable.")] = ()
    drop: Annotated[Sequence[str], Option("Drop rows that are only marked by default: outlier. Repeatable.")] = ()
    max_t: Annotated[str | None, "Drop slower steps, such as 300ms. Biases a fit; off by default."] = None
    allow_drops: Annotated[bool, Option("Accept that more than half of the rows are dropped.")] = False
    cells: Annotated[bool, Option("Summarise into weighted cells, in constant memory; always for folders.")] = False
    cells_file: Annotated[Path | None, "File in which cells are kept, so that a report finds them again."] = None
    skip_bad: Annotated[bool, Option("Skip and count unreadable files of a folder.")] = False
    cells_time: Annotated[
        Literal["compute", "period", "auto"], "What T is in cells; auto: the period where most steps know theirs."
    ] = "compute"
    progress: Listener = None


@dataclass(frozen=True)
class ReadRequest(ReadOptions):
    """Clean steps from a source."""

    SHOWN = "format map unit where cells keep drop allow_drops skip_bad"
    source: Sources


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Request):
    """What is fitted, and how sure its parameters are."""

    PANEL = "Model"
    NEEDS = "resample: bootstrap intervals"
    model: Annotated[
        str | None,
        Option(
            "auto (chosen by cross-validation), saturation, saturation-gamma, context, roofline, linear, quadratic,"
            " hinge or constant, each also with +moe or +correction.",
            metavar="NAME",
        ),
    ] = None
    time: Annotated[
        Time | None,
        Option(
            "compute: forward pass (T_ms); period: step to step, with host overhead. Default: the period if available."
        ),
    ] = None
    window_means: Annotated[bool, "Rows are window means, although no column shows it (window_ms, B_sd, ...)."] = False
    weights: Annotated[str | None, "What counts the same: rows, doublings of S, or cells by their variance."] = None
    fix: Annotated[Mapping[str, float] | Sequence[str] | None, Option("Hold a parameter: P_max=60. Repeatable.")] = None
    bounds: Annotated[Ranges, "Bound a parameter: k_B=0.01:1. Repeatable."] = None
    prior: Annotated[Ranges, "Prior of a parameter, mean and deviation: P_max=60:5. Repeatable."] = None
    loss: Annotated[str | None, "Robust loss of the residuals: huber, soft_l1, tukey or linear."] = None
    residuals: Annotated[str | None, "relative (log of predicted/observed) or absolute (ms)."] = None
    bootstrap: Annotated[int, Option("Number of bootstrap resamples, such as 1000.", min=0)] = 0
    intervals: Annotated[
        Literal["sandwich", "profile", "bootstrap"] | None,
        "Intervals of parameters: sandwich (covariance) or bootstrap (also profile).",
    ] = None
    resample: Annotated[str | None, "What the bootstrap draws: auto, rows or block (of time)."] = None
    seed: Seed = 0
    path: Annotated[
        str | None,
        Option(
            "Execution path: cpu, amx, gpu. Default: the trace's. With --each, '{hardware}-tp{tp}' names every system.",
            panel="Systems and files",
        ),
    ] = None


@dataclass(frozen=True)
class FitRequest(ModelOptions, ReadOptions):
    """Fit a latency model to steps of one system."""

    source: Sources


@dataclass(frozen=True)
class FitEachRequest(FitRequest):
    """Fit every system of a source."""

    SHOWN = "model bootstrap fix map unit where path"
    LACKS = "keep drop skip_bad"
    made: Annotated["Callable[[str, Fit], None] | None", "Called with (label, fit) as each is there."] = None


@dataclass(frozen=True)
class FitPhasesRequest(ReadOptions):
    """Fit decode steps apart from those with prefill."""

    source: Sources
    _: KW_ONLY
    cache_tokens: Annotated[int | None, "What the KV cache holds; steps with more cached tokens are left out."] = None
    model: Annotated[str | None, "As of `fit`."] = None
    seed: int = 0
    time: Annotated[Time | None, "As of `fit`."] = None


@dataclass(frozen=True)
class PredictRequest(Request):
    """The steps whose latency is predicted."""

    PANEL = "Steps"
    EXCLUDES = "B data; data sensitivity; context context_tokens"
    NEEDS = "S: B data sensitivity"
    fit: FitFile
    B: Annotated[Sequence[int], Option("Requests in the step. Repeatable.", "-B")] = ()
    S: Annotated[Sequence[int], Option("Tokens in the step; without it S = B. Repeatable.", "-S")] = ()
    context: Context = None
    context_tokens: Annotated[float | None, Option("Cached tokens that the whole step attends to.")] = None
    prefill_requests: Annotated[int | None, Option("How many of B prefill.")] = None
    prefill_tokens: Annotated[int | None, Option("How many of S are prefill.")] = None
    data: Annotated[Path | None, Option("A table of steps (B, S, ...) instead of -B and -S.")] = None
    level: Annotated[float, Option("Coverage of the prediction interval.")] = 0.9
    sensitivity: Annotated[bool, Option("Marginal cost per request and per token, and the dominant term.")] = False
    strict: Annotated[bool, Option("Refuse steps outside the measured range (exit code 3).")] = False


@dataclass(frozen=True)
class SpeculateRequest(Request):
    """Steps with and without drafts."""

    PANEL = "Speculation"
    EXCLUDES = "drafts draft_cost"
    fit: FitFile
    drafts: Annotated[
        Any, Option("A fit of the engine while it drafts. Default: FIT at B (1 + K) tokens.", kind=Path, metavar="FIT")
    ] = None
    draft_tokens: Annotated[int | None, Option("Tokens per draft. Default: as recorded.", min=1, max=64)] = None
    acceptance: Annotated[
        float | None,
        Option("Probability that a draft token is accepted if the one before it was. Default: as recorded."),
    ] = None
    draft_cost: Annotated[str | None, Option("Time to draft a token, such as 0.5ms. Default: 0.")] = None
    context: Context = None
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class CompareRequest(ReadOptions):
    """Compare runs with the first one."""

    SHOWN = "tolerance each alternate path rate lengths ttft tpot kv_blocks map unit where"
    LACKS = "keep drop skip_bad"
    EXCLUDES = "each alternate rate"
    NEEDS = "lengths ttft tpot kv_blocks price_per_hour: rate"
    sources: Annotated[
        Sequence[Any],
        Option(
            "Fit files, or traces to fit: the first is the baseline.", kind=list[str], argument=True, metavar="A B..."
        ),
    ]
    tolerance: Annotated[str | float, Option("Slowdown that counts as a regression.", panel="Comparison")] = "5%"
    names: Annotated[Sequence[str] | None, "Names of the sources, for the verdict."] = None
    each: Annotated[
        bool,
        Option("Compare every system (hardware, model, tp) with the same one of the baseline.", panel="Comparison"),
    ] = False
    alternate: Annotated[
        bool,
        Option("The files are runs of A and B in turn (A B A2 B2), each with its own start.", panel="Comparison"),
    ] = False
    path: Annotated[
        str | None,
        Option(
            "Execution path to compare if a source has several. With --each, '{hardware}-tp{tp}' matches systems.",
            panel="Comparison",
        ),
    ] = None
    rate: RateOf = None
    lengths: LengthsOf = None
    ttft: Ttft = None
    tpot: Tpot = None
    kv_blocks: Annotated[int | None, Option("Blocks of the KV cache. Default: from the engine's trace.", min=1)] = None
    price_per_hour: Annotated[float | None, "Price of a replica per hour."] = None
    seed: Seed = 0


@dataclass(frozen=True)
class StepPlanRequest(Request):
    """Which steps meet an SLA, and from which batch the GPU pays."""

    PANEL = "Target"
    paths: Hardware = "hardware.json"
    sla: Sla = None
    rate: RateOf = None
    _: KW_ONLY
    sla_ms: Annotated[float | None, "The SLA as a number of milliseconds."] = None
    percentile: Percentile = 99.0
    tokens_per_request: Tokens = None
    context: Context = None
    launch_share: Annotated[float, "Share of the launch cost in a step from which B2 counts."] = 0.5
    ttft: Ttft = None
    tpot: Tpot = None
    prompt_tokens: Annotated[int, Option("Tokens of a prompt, for --ttft with --sla.")] = 512
    force: Force = False


@dataclass(frozen=True)
class PlanRequest(StepPlanRequest):
    """How to run a load of batches within an SLA; without a load, which steps meet it."""

    PANEL = "Load"
    SHOWN = "sla rate replicas paths"
    EXCLUDES = "sla sla_ms; rate rate_per_s arrivals"
    NEEDS = (
        "prompt_tokens: ttft; arrivals_window: arrivals; "
        "replicas objective laws_only seed max_batch: rate rate_per_s arrivals"
    )
    _: KW_ONLY
    rate_per_s: Annotated[float | None, "The rate as a number of requests a second."] = None
    arrivals: Arrivals = None
    arrivals_window: WindowOf = None
    replicas: Annotated[
        int, Option("Replicas that share the load. Default: 1; for serving engines the fewest that suffice.", min=1)
    ] = 1
    objective: Annotated[
        str | Mapping[str, float] | None, "Objective weights (minimised): p99=1,mean=0.5,throughput=0.1."
    ] = None
    max_batch: Annotated[int | None, "Largest batch of the main path."] = None
    transfer: TransferOf = None
    wait: Annotated[Duration | None, "Expected wait for the GPU; without it what the rate makes it."] = None
    laws_only: LawsOnly = False
    seed: Seed = 0

    @property
    def has_load(self) -> bool:
        """Whether responses to a load are planned, not single steps."""
        return any(each is not None for each in (self.rate, self.rate_per_s, self.arrivals))


@dataclass(frozen=True)
class StepBudgetRequest(Request):
    """What fits into a step within an SLA."""

    EXCLUDES = "sla sla_ms"
    paths: Any
    sla: Annotated[Duration | None, 'The SLA of a step, "10ms".'] = None
    _: KW_ONLY
    sla_ms: Annotated[float | None, "The SLA as a number of milliseconds."] = None
    B: Annotated[int | Iterable[int] | None, "Numbers of requests to tabulate. Default: 1, 2, 4, ... max_requests."] = (
        None
    )
    percentile: Annotated[float | str, "Percent of steps that must meet the SLA."] = 99.0
    path: Annotated[str | None, "Which path, where there are several."] = None
    max_requests: Annotated[int | None, "Default: the most that were measured."] = None


@dataclass(frozen=True, kw_only=True)
class EngineLimits(Request):
    """Limits of a serving engine."""

    PANEL = "Engine"
    kv_blocks: Annotated[
        int | None, Option("Blocks of the KV cache. Default: from the engine's trace, log or metrics.", min=1)
    ] = None
    max_num_seqs: Annotated[
        int | None,
        Option("Most requests in a step. Default: the engine's, else 256; plan searches it.", min=1),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        Option("Most tokens in a step. Default: the engine's, else 2048; plan searches it.", min=1),
    ] = None
    synchronous: Annotated[
        bool | None,
        Option(
            "Synchronous or asynchronous scheduling. Default: the trace's, else asynchronous.",
            "--synchronous/--asynchronous",
        ),
    ] = None
    block_size: Annotated[int | None, "Tokens in a block of the KV cache. Default: the trace's, else 16."] = None


@dataclass(frozen=True, kw_only=True)
class EngineSettings(EngineLimits):
    """Settings of an engine; None: as the fit's trace says, else the usual."""

    long_prefill_token_threshold: Annotated[int | None, "Most prompt tokens of one request in a step; 0: no limit."] = (
        None
    )
    prefix_hit_rate: Annotated[float | None, "Cached share of every prompt. Default: as recorded, else 0."] = None
    engine: Annotated[Mapping[str, Any] | None, "Further settings by name, such as those of a plan's `.engine`."] = None


@dataclass(frozen=True, kw_only=True)
class SpecialSettings(EngineSettings):
    """Settings that few engines have."""

    start_at: Annotated[int | None, "continuous, static: queue length that starts a prefill."] = None
    decode_first: Annotated[bool | None, "continuous: prefill only when nothing decodes."] = None
    swap: Annotated[str | None, "Swap preempted requests out and in, at this per token: 2us."] = None
    draft_tokens: Annotated[int | None, "Speculative decoding: tokens per draft. Default: the trace's, else 0."] = None
    acceptance: Annotated[
        float | None, "Probability that a draft token is accepted. Default: as recorded, else 0.7."
    ] = None
    draft_cost: Annotated[str | None, "Time per draft token, such as 0.5ms."] = None
    batching: Annotated[
        Batching | Sequence[Batching],
        Option(
            "Batching; chunked-prefill is vLLM's. Repeatable if several are simulated.",
            "--batching --engine",
            list[Batching],
        ),
    ] = "chunked-prefill"
    order: Annotated[
        OrderName | Sequence[OrderName],
        Option("Scheduling policy. Repeatable if several are simulated.", kind=list[OrderName]),
    ] = "fcfs"
    length_error: Annotated[float, "sjf: standard deviation of log(predicted/true output)."] = 0.0
    switch_at: Annotated[int, "switch: queue length from which it is sjf by class."] = 32
    ageing: Ageing = None
    replicas: Annotated[int, Option("Identical engines behind a router.")] = 1
    route: Route = "round-robin"
    prefix_share: Annotated[float, "prefix routing: share of a prompt that a user's replica has cached."] = 0.5
    service: Annotated[
        Literal["fitted", "deterministic"],
        "Step times: with the measured noise, or always the typical one.",
    ] = "fitted"


@dataclass(frozen=True, kw_only=True)
class Memory(Request):
    """Memory from which the size of the KV cache is computed."""

    PANEL = "KV cache"
    model_config: Annotated[Any, Option("The model's config.json, to compute the KV cache.")] = None
    gpu_memory: Annotated[str | None, Option("Memory of a GPU as nvidia-smi prints it: 81559MiB.")] = None
    gpu_memory_utilization: Annotated[float, "Share of GPU memory that the engine uses."] = 0.9
    kv_memory: Annotated[str | None, "Memory of the KV cache: 4GiB."] = None
    kv_dtype: Annotated[str | None, "KV-cache dtype: fp8."] = None
    tensor_parallel: Annotated[int, "Tensor-parallel size: GPUs of one replica."] = 1


FitOfEngine = Annotated[
    Any, Option("Fit of the engine's steps. Default: the gpu path of --hardware.", panel="Engine", metavar="FIT")
]
PrefillFit = Annotated[Any, Option("A separate fit of steps that contain prefill.", panel="Engine")]
Users = Annotated[int | None, Option("Closed-loop users, each with one request at a time.", min=1, panel="Load")]
Think = Annotated[Duration, Option("Mean think time of a user between requests.", panel="Load")]
ArrivalProcess = Annotated[
    str,
    Option(
        "poisson; gamma:CV (bursty if CV > 1); bursts:TIMES:SHARE:LENGTH, such as bursts:4:0.1:1s.",
        "--arrival-process --law",
        panel="Load",
    ),
]
Classes = Annotated[
    Iterable[str],
    Option(
        "NAME:SHARE[:LIMITS], the most urgent first: chat:0.3:50ms; of engines also chat:0.3:ttft=1s,sla=9s.",
        "--class",
        list[str],
        "Load",
    ),
]
StartUp = Annotated[
    Duration | None,
    Option("Start-up time of a replica, such as 2min; plan schedules replicas for --arrivals.", panel="Load"),
]


@dataclass(frozen=True)
class EnginePlanRequest(EngineSettings, Memory):
    """Serving engines for a load of requests with lengths."""

    PANEL = "Serving engines"
    SHOWN = "rate lengths ttft tpot e2e replicas hardware fit kv_blocks"
    LACKS = "max_num_seqs max_num_batched_tokens"
    EXCLUDES = (
        "rate rate_per_s; arrivals users; rate users; lengths arrivals; classes arrivals; "
        "kv_blocks model_config; fit hardware; transfer replicas; transfer users"
    )
    NEEDS = (
        "think: users; start_up: arrivals; arrivals_window: start_up; arrival_process: rate rate_per_s; "
        "gpu_memory gpu_memory_utilization kv_memory kv_dtype tensor_parallel: model_config"
    )
    fit: FitOfEngine = None
    rate: RateOf = None
    lengths: LengthsOf = None
    _: KW_ONLY
    ttft: Ttft = None
    tpot: Tpot = None
    e2e: Annotated[Duration | None, Option("SLO of the end-to-end latency: 10s, or p95:10s.")] = None
    goodput: Annotated[float | str | None, Option("Share of requests that must meet all SLOs, such as 99%.")] = None
    rate_per_s: Annotated[float | None, "The rate as a number of requests a second."] = None
    arrivals: Arrivals = None
    arrival_process: ArrivalProcess = "poisson"
    growth: Annotated[float | str | None, "Multiple of the load to plan for: 2x."] = None
    users: Users = None
    think: Think = "1s"
    classes: Classes = ()
    start_up: StartUp = None
    arrivals_window: WindowOf = None
    prefill_fit: PrefillFit = None
    transfer: TransferOf = None
    hardware: Hardware = "hardware.json"
    replicas: Annotated[int | None, Option("Replicas that there are. Default: the fewest that do.", min=1)] = None
    route: Route = "round-robin"
    order: Annotated[
        Literal["fcfs", "sjf", "slo", "priority"] | None,
        "Scheduling policy. Default: fcfs; with classes also priority.",
    ] = None
    batching: Annotated[Literal["chunked-prefill", "continuous"] | None, "Batching. Default: both are tried."] = None
    price_per_hour: Annotated[float | None, "Price of a replica per hour."] = None
    watts: Annotated[float | None, "Power of a replica."] = None
    service: Annotated[str, "Step times: fitted (as measured ones scatter) or deterministic."] = "fitted"
    steps_slower: Annotated[float | str | None, "Plan with steps slower than fitted: 20%."] = None
    seed: Seed = 0
    progress: Listener = None
    force: Force = False


@dataclass(frozen=True, kw_only=True)
class SweepOptions(Cluster):
    """How long simulations run, and a table of many."""

    PANEL = "Run"
    NEEDS = "resume: out"
    requests: Annotated[
        int | None, Option("Requests per replication. Default: as many as the load needs; for engines 100,000.")
    ] = None
    replications: Annotated[int, Option("Least number of independent replications.")] = 5
    warmup: Annotated[float | None, "Share of each replication discarded as warm-up. Default: measured."] = None
    seed: Seed = 0
    sla: Annotated[Duration | None, Option("Latency SLA per response, such as 20ms; attainment is reported.")] = None
    out: Annotated[Path | None, Option("Write the runs into one Parquet file.")] = None
    resume: Annotated[bool, Option("Keep the runs that --out contains already.")] = False
    workers: Annotated[int | None, "Runs at a time. Default: one per core."] = None
    running: Annotated["Running | None", "workers, backend and scheduler in one record."] = None
    progress: Listener = None
    force: Force = False


@dataclass(frozen=True, kw_only=True)
class PolicyMachine(SweepOptions):
    """The machine on which policies are simulated."""

    PANEL = "Machine"
    EXCLUDES = "sla sla_ms"
    sla_ms: Annotated[float | None, "The SLA as a number of milliseconds."] = None
    nominal: Annotated[
        Mapping[str, str] | Sequence[str] | None,
        Option(
            "A path by nominal numbers: gpu:launch=8ms,slope=0.05ms, amx:p50=2ms, short gpu=8ms+0.05ms*256."
            " Repeatable.",
            "--nominal --path",
        ),
    ] = None
    tokens_per_request: Tokens = None
    service: Annotated[Service, "Service-time distribution."] = "fitted"
    servers: Annotated[Mapping[str, int] | None, 'Servers of a path, {"amx": 2}.'] = None
    buckets: Annotated[Sequence[int] | str | None, "Batch sizes that the main path pads to: 1,2,4,8."] = None
    precision: Annotated[float | None, "Relative precision of p99 to reach, such as 0.01."] = None


@dataclass(frozen=True)
class StudyRequest(PolicyMachine):
    """Claims of the literature, tested on this hardware."""

    SHOWN = "hardware nominal sla requests seed out"
    hardware: Hardware = "hardware.json"


@dataclass(frozen=True, kw_only=True)
class PolicySettings(Request):
    """Settings of batching policies."""

    PANEL = "Policies"
    batch: Annotated[int | None, Option("fixed: batch size.")] = None
    window: Annotated[Duration | None, "window: batching timeout, such as 2ms."] = None
    t_cut: Annotated[
        Duration | None, Option("cutoff, three-stage: queueing timeout before falling back to the CPU tier.")
    ] = None
    b1: Annotated[int | None, "three-stage: smallest batch for the GPU."] = None
    max_batch: Annotated[int | None, "Largest batch on the main path."] = None
    rule: Annotated[Literal["amortised", "literal", "total-delay"] | None, "marginal-cost: the rule."] = None
    longest: Annotated[Duration | None, "marginal-cost, split: longest wait for more requests."] = None
    merge_below: Annotated[int | None, "split: fewer requests than this wait for more."] = None
    ageing: Ageing = None
    settings: Annotated[Mapping[str, Any] | None, 'Settings by name, {"t_cut": "2ms", "batch": 8}.'] = None


@dataclass(frozen=True, kw_only=True)
class SimulatedLoad(Request):
    """The requests that a simulation serves."""

    PANEL = "Load"
    EXCLUDES = "arrivals users load_curve; rate users; rate rate_per_s; arrivals classes; arrivals prompt_lengths"
    NEEDS = "think: users vary; arrival_process: rate rate_per_s vary; ageing: classes arrivals"
    rate_per_s: Annotated[float | Sequence[float] | None, "The rates as numbers of requests a second."] = None
    arrivals: Arrivals = None
    arrival_process: ArrivalProcess = "poisson"
    load_curve: Annotated[Path | str | None, "Table (t_s, rate_per_s) of a rate that varies and repeats."] = None
    users: Users = None
    think: Think = "1s"
    classes: Classes = ()
    prompt_lengths: Annotated[Any, "Recorded requests to draw token lengths from."] = None
    vary: Annotated[
        Mapping[str, Iterable[Any]] | str | Sequence[str] | None,
        Option("Settings to vary: 'rate=10/s,20/s; replicas=1..4'. Repeatable.", "--sweep", list[str], "Run"),
    ] = None


RatesOf = Annotated[
    str | Sequence[str] | None, Option("Arrival rate, such as 500/s. Repeatable: one run each.", panel="Load")
]


@dataclass(frozen=True)
class SimulateRequest(PolicySettings, SimulatedLoad, PolicyMachine):
    """Batching policies on one or two execution paths."""

    SHOWN = "policy rate arrivals hardware nominal t_cut batch sla requests vary out"
    NEEDS = "by_prompt: arrivals"
    hardware: Hardware = "hardware.json"
    rate: RatesOf = None
    policy: Annotated[
        str | Sequence[str],
        Option("Batching policy; the first is the baseline. Repeatable.", metavar=Policies, panel="Policies"),
    ] = "gpu-only"
    _: KW_ONLY
    by_prompt: Annotated[bool, "With --arrivals: count the prompt's tokens of a request."] = False
    log: Annotated[Path | None, "Event log of the first 1,000 requests of run 1 (CSV)."] = None


@dataclass(frozen=True)
class SimulateEngineRequest(SpecialSettings, SimulatedLoad, SweepOptions):
    """A serving engine, token by token."""

    PANEL = "Engine"
    SHOWN = "fit kv_blocks max_num_seqs max_num_batched_tokens batching replicas rate lengths ttft tpot vary"
    LACKS = "hardware sla"
    EXCLUDES = (
        "fit hardware; lengths prompt_lengths; arrivals lengths; autoscale replicas_at; replicas replicas_at; "
        "users autoscale; prefill_on autoscale; prefill_on replicas_at"
    )
    NEEDS = (
        "switch_at length_error: order vary; prefix_share: route vary; start_up: autoscale replicas_at vary; "
        "transfer prefill_replicas prefill_lengths: prefill_on; "
        "route: replicas prefill_replicas autoscale replicas_at vary"
    )
    fit: FitOfEngine = None
    rate: RatesOf = None
    lengths: Annotated[
        str | None, Option("Prompt and output tokens of requests at a --rate, such as 512:128.", panel="Load")
    ] = None
    _: KW_ONLY
    prefill_fit: PrefillFit = None
    hardware: Hardware = "hardware.json"
    prefill_on: Annotated[Any, Option("Disaggregated prefill, on an engine with this fit.")] = None
    prefill_replicas: Annotated[int, "Engines that prefill for the others."] = 1
    prefill_lengths: Annotated[str | None, "Tokens of prompts that they prefill: ..160, 512... Default: all."] = None
    transfer: TransferOf = None
    tenants: Annotated[int, "Users that requests at a rate come from, for routing by prefix."] = 1
    replicas_at: Annotated[Any, "Table (t_s, replicas): requested replicas over time."] = None
    autoscale: Annotated[
        str | None,
        Option("Autoscaler, METRIC:TARGET:LEAST..MOST: requests:20:1..8, waiting:2:1..8, kv:70%:1..8:15s:5min."),
    ] = None
    start_up: StartUp = None
    ttft: Ttft = None
    tpot: Tpot = None


@dataclass(frozen=True)
class ValidateRequest(SpecialSettings):
    """A measured serving run compared with its simulation."""

    PANEL = "Comparison"
    SHOWN = (
        "metrics_before metrics_after run_steps calibrate kv_blocks max_num_seqs max_num_batched_tokens replicas "
        "where strict out figure"
    )
    LACKS = "batching order"
    EXCLUDES = "calibrate metrics_after; calibrate run_steps"
    NEEDS = "metrics_before: metrics_after; route: replicas; switch_at length_error: order"
    fit: Annotated[
        Any,
        Option(
            "Traces or logs of the engine, or a fit file (NAME.fit.json).",
            kind=list[str],
            argument=True,
            metavar="TRACE|FIT",
        ),
    ]
    run: Annotated[
        Any,
        Option(
            "The measured run: arrivals, lengths, first and last token; or what latfit record wrote.",
            argument=True,
            metavar="RUN",
        ),
    ]
    _: KW_ONLY
    prefill_fit: PrefillFit = None
    model: Annotated[
        str | None, Option("Model to fit to the trace's steps. Default: auto.", metavar="NAME", panel="Step costs")
    ] = None
    time: Annotated[Time | None, "What to fit, as for latfit fit. Default: the period if available."] = None
    where: Annotated[str | None, Option('Use only steps that match: "tp == 8".', panel="Step costs")] = None
    metrics_after: Annotated[
        Path | str | None,
        Option("The server's /metrics after the run, to compare with the engine's counts.", kind=Path),
    ] = None
    metrics_before: Annotated[
        Path | str | None,
        Option("The server's /metrics before the run. Default: since its start.", kind=Path),
    ] = None
    run_steps: Annotated[
        Any,
        Option("Steps recorded during the run, to measure the machine's speed.", kind=list[str], metavar="TRACE"),
    ] = None
    calibrate: Annotated[bool, Option("Fit speed, host time and start delay on the first third; score the rest.")] = (
        False
    )
    seed: Seed = 0
    force: Force = False


@dataclass(frozen=True)
class ExportRequest(Request):
    """A plan as the settings of a serving engine."""

    PANEL = "Settings"
    SHOWN = "target plan model shapes begins"
    plan: Annotated[Any, Option("The plan, as latfit plan --out writes it.", argument=True, metavar="PLAN")]
    target: Annotated[
        str,
        Option("vllm, sglang, trtllm, llamacpp, triton, tensorrt or kubernetes.", argument=True, metavar="TARGET"),
    ]
    _: KW_ONLY
    model: Annotated[str | None, Option("The model's name or folder, as the engine loads it.")] = None
    shapes: Annotated[
        str | Sequence[str],
        Option("tensorrt: an input, B for the batch: input:Bx3x224x224. Repeatable.", "--shape"),
    ] = ()
    begins: Annotated[
        str | None,
        Option(
            "kubernetes: start of the plan's recorded day: '06:30 Europe/Berlin'. Default: 00:00 UTC.",
            metavar="TIME",
        ),
    ] = None


@dataclass(frozen=True)
class ReportRequest(Request):
    """One page and its pictures from a hardware profile."""

    PANEL = "Report"
    EXCLUDES = "sla sla_ms; rate rate_per_s; sla plan"
    NEEDS = "percentile tokens_per_request: sla sla_ms plan; laws_only: rate rate_per_s"
    paths: Hardware = "hardware.json"
    out: Annotated[Path | str, Option("Folder for the page and its pictures.", kind=Path, metavar="DIR")] = "reports"
    sla: Sla = None
    rate: Annotated[str | None, Option("With --sla: arrival rate, such as 500/s.")] = None
    _: KW_ONLY
    sla_ms: Annotated[float | None, "The SLA as a number of milliseconds."] = None
    rate_per_s: Annotated[float | None, "The rate as a number of requests a second."] = None
    percentile: Percentile = 99.0
    tokens_per_request: Tokens = None
    laws_only: LawsOnly = False
    plan: Annotated["Plan | None", "A plan that was made already."] = None
    trace: Annotated[
        Any,
        Option("Measured steps to draw. Default: those of the fits. Repeatable.", kind=list[Path]),
    ] = None


@dataclass(frozen=True)
class ProfileRequest(Request):
    """Steps of a transformer, measured on this machine."""

    PANEL = "Steps"
    SHOWN = "model budget device isa dtype grid context threads precision seed out resume"
    model: Annotated[str, Option("A preset (tiny, smollm2-135m, ..., llama-3.1-8b) or a HuggingFace config.json.")] = (
        "tiny"
    )
    budget: Annotated[Duration | None, Option("Time to spend, such as 60s or 5min. Default: 60s.", panel="Run")] = None
    device: Annotated[
        Literal["auto", "numpy", "openvino", "torch-cpu", "torch-cuda"],
        Option("auto measures everything available.", panel="Device"),
    ] = "auto"
    _: KW_ONLY
    isa: Annotated[
        Literal["auto", "amx", "avx512_bf16", "avx512", "avx2"],
        Option("Cap the instruction set of CPU kernels.", panel="Device"),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bf16", "fp16", "fp32", "int8"], Option("auto: bf16 if it is fast.", panel="Device")
    ] = "auto"
    threads: Annotated[int | None, Option("Threads. Default: the idle CPUs.", panel="Device")] = None
    pin: Annotated[str | None, Option("CPUs to pin to: 0,2-5.", panel="Device")] = None
    processes: Annotated[
        int | None, Option("Processes that alternate. Default: 3 if memory and budget allow.", panel="Device")
    ] = None
    graphs: Annotated[bool, "Whether GPU steps are recorded as CUDA graphs."] = True
    grid: Annotated[
        str | None,
        Option(
            "Cells such as 'B=1,2,4,8;S=1,16,64,256': every pair with S >= B. S = B decodes; otherwise one request"
            " prefills S - B + 1 tokens beside B - 1 that decode. Default: as many as fit the budget."
        ),
    ] = None
    context: Annotated[str, Option("Cached tokens of a decode request, one number or several: 128,512.")] = "256"
    layers: Annotated[int | None, Option("Number of the model's layers to measure.")] = None
    kernel: Annotated[Literal["step", "gemm", "attention"], "The whole step, products with weights, or attention."] = (
        "step"
    )
    engine: Annotated[
        Literal["kernels", "transformers"],
        Option("transformers: HuggingFace's continuous batching, random weights."),
    ] = "kernels"
    history: Annotated[str, "Cached tokens before a prefill chunk: 0,1024."] = "0"
    cache: Annotated[Literal["warm", "cold"], "cold: flushed before every step."] = "warm"
    design: Annotated[
        Literal["auto", "adaptive", "grid"],
        "adaptive: a grid of five times the budget, the most informative cells first; grid: every cell three times.",
    ] = "auto"
    precision: Annotated[
        float, Option("Stop once every median has this relative precision (95 % interval).", panel="Run")
    ] = 0.03
    seed: Seed = 0
    out: Annotated[
        Path | str | None, "File of the trace; a journal beside it keeps what is measured until the end."
    ] = None
    resume: Annotated[bool, Option("Continue a run that was interrupted or killed.", panel="Run")] = False
    progress: Annotated["Callable[[Measuring], None] | None", "Called with the state of the run."] = None
    announce: Annotated["Callable[[Announcement], None] | None", "Called before a device is measured."] = None


@dataclass(frozen=True)
class RecordRequest(Request):
    """A running engine's `/metrics` as a trace of windows."""

    PANEL = "Recording"
    url: Server
    _: KW_ONLY
    duration: Annotated[Duration, Option("How long to record; Ctrl-C ends it earlier.")] = "10min"
    every: Annotated[Duration, Option("Polling interval: the shortest window.")] = "1s"
    out: Annotated[Path | str, Option("Trace to write; the fit and texts of /metrics go next to it.", kind=Path)] = (
        "trace.parquet"
    )
    path: Annotated[str | None, Option("Label of the execution path: gpu, cpu, ...", metavar="NAME")] = None
    progress: Annotated[Callable[..., None] | None, "Called with each reading: seconds so far, seconds asked for."] = (
        None
    )


@dataclass(frozen=True)
class TuneRequest(Request):
    """Settings of a running engine for a load, found and verified."""

    PANEL = "Tuning"
    SHOWN = "command rate lengths ttft tpot url load max_restarts budget out dry_run"
    EXCLUDES = "url command"
    command: Annotated[
        Sequence[str],
        Option(
            "What starts the engine: -- vllm serve MODEL ...", kind=list[str] | None, argument=True, metavar="COMMAND"
        ),
    ] = ()
    _: KW_ONLY
    rate: RateOf = None
    lengths: Annotated[
        str | None, Option("Prompt and output tokens: 2000:300, or 2000:300:0.8 (they vary).", panel="Load")
    ] = None
    ttft: Ttft = None
    tpot: Tpot = None
    url: Annotated[str | None, Option("A running engine that you restart by hand when asked.")] = None
    load: Annotated[Duration, Option("How long to send requests at each rate.")] = "1min"
    max_restarts: Annotated[int, Option("Most restarts of the engine.", min=1)] = 2
    budget: Annotated[Duration, Option("Time after which the engine is not restarted again.")] = "20min"
    out: Annotated[Path | str, Option("Folder for traces, fit, plan, settings and logs.", kind=Path, metavar="DIR")] = (
        "tuned"
    )
    dry_run: Annotated[bool, Option("Show what would be done.")] = False
    token: Annotated[str | None, "Bearer token of the engine."] = None
    seed: Seed = 0
    restart: Annotated[
        Callable[[str], None] | None, "Called with the options for an engine at url; returns when it is up."
    ] = None
    progress: Annotated[Callable[[str], None] | None, "Called with each step, in words."] = None


@dataclass(frozen=True, kw_only=True)
class RunningEngine(EngineLimits):
    """A running engine: its limits where it does not publish them, step costs and SLO."""

    EXCLUDES = "fit hardware"
    NEEDS = "prefill_fit: fit; kv_blocks block_size synchronous at_measured_speed: fit hardware"
    fit: Annotated[Any, Option("Step costs: simulate what a change would do.", metavar="FIT")] = None
    prefill_fit: PrefillFit = None
    hardware: Annotated[Any, "Instead of --fit: the machine's profile, its gpu path."] = None
    ttft: Ttft = None
    tpot: Tpot = None
    at_measured_speed: Annotated[bool, Option("Simulate at the measured speed, even far from the fit's.")] = False


@dataclass(frozen=True)
class WatchRequest(RunningEngine):
    """A running engine from second to second."""

    PANEL = "Watching"
    SHOWN = "ttft tpot fit window every max_num_seqs max_num_batched_tokens kv_blocks at_measured_speed"
    url: Server
    _: KW_ONLY
    window: Annotated[Duration, Option("Length of the window that figures cover.")] = "30s"
    every: Annotated[Duration, Option("How often to read the engine.")] = "1s"


@dataclass(frozen=True)
class DoctorRequest(RunningEngine):
    """What binds a running engine, and what would help it."""

    PANEL = "Reading"
    SHOWN = "ttft tpot fit duration max_num_seqs max_num_batched_tokens kv_blocks at_measured_speed"
    NEEDS = "ttft tpot seed: fit hardware"
    url: Annotated[
        str | None,
        Option(
            "A running engine. Default: one on this machine, else the machine itself.", argument=True, metavar="URL"
        ),
    ] = None
    _: KW_ONLY
    duration: Annotated[Duration, Option("How long to read the engine.")] = "10s"
    seed: Seed = 0
    progress: Annotated[Callable[[float, float], None] | None, "Called with (seconds, of)."] = None


@dataclass(frozen=True)
class ServeRequest(Request):
    """The router as an HTTP proxy for one or two running engines."""

    PANEL = "Routing"
    SHOWN = "policy times hardware lengths slots t_cut classes ageing learn host port token_file"
    NEEDS = "lengths: hardware; learn: times hardware; ageing: classes"
    engines: Annotated[
        str | Mapping[str, str] | Sequence[str],
        Option(
            "One or two engines, the main path first: gpu=http://localhost:8000 cpu=http://localhost:8001.",
            kind=list[str],
            argument=True,
            metavar="URL",
        ),
    ]
    _: KW_ONLY
    policy: Annotated[
        Literal["gpu-only", "three-stage", "cutoff", "split"] | None,
        Option("Default: three-stage with two engines."),
    ] = None
    times: Annotated[
        Mapping[str, Duration] | Sequence[str] | None, Option("Typical time of a response: gpu=800ms. Repeatable.")
    ] = None
    hardware: Annotated[Any, Option("Profile whose fits give that time, for requests of --lengths.")] = None
    lengths: Annotated[str, Option("Prompt and output tokens: 500:200.")] = "500:200"
    slots: Annotated[
        Mapping[str, int] | Sequence[str] | None,
        Option("Concurrent requests of an engine: gpu=8. Repeatable."),
    ] = None
    t_cut: Annotated[Duration | None, Option("Queueing timeout before falling back to the second engine.")] = None
    learn: Annotated[bool, Option("Learn response times while serving.")] = False
    classes: Annotated[
        Sequence[str] | None,
        Option("Class that requests name in the header x-latfit-class. Repeatable, most urgent first.", "--class"),
    ] = None
    ageing: Annotated[Duration | None, Option("Waiting time worth one class, such as 5s; else strict priority.")] = None
    host: Annotated[str, Option("Address to listen at; 0.0.0.0 for all.", panel="Listening")] = "127.0.0.1"
    port: Annotated[int, Option("Port; 0 for any that is free.", min=0, max=65535, panel="Listening")] = 8080
    token: Annotated[str | None, "What callers must bear."] = None
    token_file: Annotated[
        Path | None,
        Option("File with the bearer token that clients must send; else $LATFIT_TOKEN.", panel="Listening"),
    ] = None
    engine_token: Annotated[str | None, "Sent to the engines."] = None
    most_waiting: Annotated[int, "Most queued requests; others are rejected (429)."] = 256
    max_body: Annotated[str, "Largest body of a request (413)."] = "8MiB"
    max_memory: Annotated[str, "Bodies of all requests together (429)."] = "256MiB"
    connect: Annotated[Duration, "Until an engine is connected."] = "5s"
    first_byte: Annotated[
        Duration, Option("Timeout until a response begins; if not streamed, until it is complete.", panel="Timeouts")
    ] = "5min"
    between: Annotated[Duration, "From one piece of a reply to the next, on either side."] = "1min"
    drain: Annotated[Duration, Option("Time for running requests to finish after a stop.", panel="Timeouts")] = "30s"
    ready: Annotated[Callable[[str], None] | None, "Called with the address and the rule in words."] = None


@dataclass(frozen=True)
class ReplayRequest(Request):
    """Policies run live on this machine, compared with their simulation."""

    PANEL = "Replay"
    EXCLUDES = "load rate"
    policy: Annotated[
        str | Sequence[str],
        Option("Policies, with commas between them: gpu-only,three-stage,cutoff.", kind=str),
    ] = "gpu-only,three-stage"
    load: Annotated[Any, Option("Loads as shares of the main path's capacity. Default: 50%,70%.", kind=str)] = None
    _: KW_ONLY
    rate: Annotated[Any, Option("Arrival rates instead of --load: 100/s,200/s.", kind=str)] = None
    duration_each: Annotated[Duration, Option("How long each run lasts.", "--duration")] = "20s"
    executors: Annotated["Sequence[Executor] | None", "The main path and the side path, if there is one."] = None
    model: Annotated[str, Option("Model whose decode steps run.")] = "tiny"
    launch: Annotated[Duration, "How long each batch takes to get to the stand-in for a GPU."] = "8ms"
    max_batch: Annotated[int, "Its largest batch."] = 32
    seed: Seed = 0
    progress: Listener = None


@dataclass(frozen=True)
class CatalogRequest(Request):
    """The catalogue of step models, or one of its systems."""

    name: Annotated[str | None, Option("A system, such as rtx4090/llama-3.1-8b.", argument=True, metavar="NAME")] = None


@dataclass(frozen=True)
class CatalogAddRequest(Request):
    """A fit added to a folder of own step models."""

    PANEL = "Entry"
    fit: Annotated[Any, Option("A fit file (NAME.fit.json).", kind=Path, argument=True, metavar="FIT")]
    _: KW_ONLY
    name: Annotated[str | None, Option("GPU/MODEL, with @tp2 for tensor parallelism. Default: as the trace says.")] = (
        None
    )
    folder: Annotated[Path | str | None, Option("Folder of entries. Default: $LATFIT_CATALOG.", kind=Path)] = None
    source: Annotated[str | None, "Where the steps come from."] = None
    weights: Annotated[float | None, "Parameters of the model, for scaling."] = None


LedgerFile = Annotated[Path | str, Option("The ledger's file.", kind=Path, panel="Ledger")]


@dataclass(frozen=True)
class LedgerRequest(Request):
    """Promises with what was measured."""

    ledger: LedgerFile = "ledger.json"


@dataclass(frozen=True)
class LedgerAddRequest(Request):
    """A run compared with its plan, for the ledger."""

    plan: Annotated[
        Path | str,
        Option("A plan for requests (latfit plan --out), or tune.json.", kind=Path, argument=True, metavar="PLAN"),
    ]
    run: Annotated[
        Any,
        Option(
            "The measured run: vllm bench serve --save-detailed, GuideLLM, a table. tune.json has its own.",
            kind=Path | None,
            argument=True,
            metavar="RUN",
        ),
    ] = None
    _: KW_ONLY
    ledger: LedgerFile = "ledger.json"


@dataclass(frozen=True)
class AddPathRequest(Request):
    """A path entered into a hardware profile."""

    PANEL = "Path"
    EXCLUDES = "fit nominal"
    NEEDS = "force: fit nominal"
    name: PathName
    fit: Annotated[Path | None, Option("A .fit.json file.", argument=True, metavar="FIT")] = None
    nominal: Annotated[
        str | None,
        Option('Numbers without a measurement: "p50=2ms", "launch=0.5ms,slope=0.02ms".', "--nominal --quoted"),
    ] = None
    force: Annotated[bool, Option("Replace a measured path by nominal numbers or by another system's fit.")] = False
    flops: Annotated[float | None, Option("Peak FLOP/s of the machine, such as 989e12.", panel="Machine")] = None
    bandwidth: Annotated[float | None, Option("Memory bandwidth in bytes/s, such as 3.35e12.", panel="Machine")] = None
    flops_per_token: Annotated[
        float | None, Option("FLOP per token, about twice the model's parameters.", panel="Machine")
    ] = None
    step_bytes: Annotated[
        float | None, Option("Bytes read by every step, about the size of the weights.", panel="Machine")
    ] = None
    price: Annotated[float | None, Option("Price per hour, in any one currency.", panel="Machine")] = None
