"""The request of each verb: what it takes, in which unit, with which default. See `latfit.api.request`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from latfit.api.request import Option, Request, option, setting
from latfit.units import MOST_SEED

if TYPE_CHECKING:
    from latfit.api.fits import Fit
    from latfit.api.plans import Plan
    from latfit.live import Executor
    from latfit.profiling import Announcement, Progress as Measuring
    from latfit.simulation import Running

TOKEN, ENGINE_TOKEN = "LATFIT_TOKEN", "LATFIT_ENGINE_TOKEN"
"""Environment variables, because everybody on the machine can read a command line."""

Duration = str | timedelta
Clock = Literal["compute", "period"]
Ranges = Mapping[str, tuple[float, float]] | Sequence[str] | None
Progress = Callable[[float, int], None]
Batching = Literal["chunked-prefill", "continuous", "selective", "static"]
OrderName = Literal["fcfs", "sjf", "slo", "fair", "priority", "switch"]
Route = Annotated[Literal["round-robin", "least-loaded", "shortest-queue", "prefix", "predicted-latency"], "Routing."]
Device = Literal["auto", "numpy", "openvino", "torch-cpu", "torch-cuda"]
Isa = Literal["auto", "amx", "avx512_bf16", "avx512", "avx2"]
FrontPolicy = Literal["gpu-only", "three-stage", "cutoff", "split"]
Service = Literal["fitted", "deterministic", "exponential"]
StepTimes = Annotated[Literal["fitted", "deterministic"], "Step times: with noise, or the typical one."]
Policies = "gpu-only|fixed|window|marginal-cost|three-stage|cutoff|optimal|split|deadline"
"""Policies that come with latfit; plug-ins may add others."""

Seed = Annotated[int, Option("Random seed.", min=0, max=MOST_SEED)]
Force = Annotated[bool, Option("Proceed although the fit is of another machine or model.")]
Hardware = Annotated[Any, Option("The machine's paths with their fits.", "--hardware", Path, "Machine")]
Sources = Annotated[Any, Option("Traces, logs, tables; globs; - for stdin.", kind=list[str], argument="TRACE")]
FitFile = Annotated[Path, Option("A fit file (NAME.fit.json).", argument="FIT")]
Server = Annotated[str, Option("Address of the server, such as http://localhost:8000.", argument="URL")]
Tokens = Annotated[int | None, Option("Tokens per request and step. Default: 1 (decode).", min=1)]
Percentile = Annotated[float | str, Option("Percentile of steps or responses that must meet the SLA.", metavar="X")]
RateOf = Annotated[str | None, Option("Arrival rate, such as 500/s.", panel="Load")]
LengthsOf = Annotated[Any, Option("Prompt and output tokens: 2000:300[:VARIATION], or a file.", kind=str, panel="Load")]
Sla = Annotated[Duration | None, Option("SLA, such as 20ms: per step; with --rate per request.", panel="Target")]
Context = Annotated[float | None, Option("Cached tokens of a request. Default: the median of the fit's trace.")]
LawsOnly = Annotated[bool, Option("No noise: steps take their mean time, arrivals are Poisson.")]
Arrivals = Annotated[Any, Option("Recorded requests; in plan also rates over time (t_s, rate_per_s).", panel="Load")]
TransferOf = Annotated[str | None, Option("Time to move a request or its KV cache: fixed plus per token, 2ms+1us.")]
Ageing = Annotated[Duration | None, "Priority ageing: waiting time worth one class, such as 50ms."]
PathName = Annotated[str, Option("Execution path: amx, gpu, cpu, ...", argument="PATH")]
TraceFile = Annotated[Path, Option("Trace to write.")]
Ttft = Annotated[Duration | None, Option("TTFT SLO: 500ms; plan: also p95:500ms.", "--ttft --ttft-slo", panel="Target")]
Tpot = Annotated[Duration | None, Option("TPOT SLO: 50ms; plan: also p95:50ms.", "--tpot --tpot-slo", panel="Target")]
WindowOf = Annotated[
    Duration | None, Option("Window length of --arrivals, such as 30min.", "--arrivals-window --window", panel="Load")
]
KvBlocks = Annotated[
    int | None, Option("Blocks of the KV cache. Default: the engine's if known, else unlimited.", min=1)
]
Listener = Annotated[Progress | None, "Called with (done, total)."]
ReportFolder = Annotated[Path | None, Option("Folder for the report page.", metavar="DIR")]
PageFolder = Annotated[Path | None, Option("Folder for the report page.", metavar="DIR", panel="Files")]


@dataclass(frozen=True, kw_only=True)
class Cluster(Request):
    NEEDS = "scheduler: backend"
    backend: Literal["local", "dask"] = setting("Where to run: cells of traces, or runs of a sweep.", "local")
    scheduler: str | None = setting("Address of a Dask cluster, tcp://...; without it workers here.")


@dataclass(frozen=True, kw_only=True)
class ReadOptions(Cluster):
    PANEL = "Reading"
    map: Mapping[str, str] | str | None = option("Names of the columns in the source: B=batch,S=tokens,T_ms=latency.")
    unit: Literal["ns", "us", "ms", "s"] | None = option("Unit of the latency column.")
    format: str = option("Format of the sources; auto detects it from the content.", "auto", metavar="NAME")
    where: str | None = option("Use only rows that match: \"hardware == 'h100' and tp == 8\".")
    keep: Sequence[str] = option("Keep rows that this rule would drop: cold_start. Repeatable.", ())
    drop: Sequence[str] = option("Drop rows that are only marked by default: outlier. Repeatable.", ())
    max_t: str | None = setting("Drop slower steps, such as 300ms. Biases a fit; off by default.")
    allow_drops: bool = option("Accept that more than half of the rows are dropped.", False)
    cells: bool = option("Summarise into weighted cells, in constant memory; always for folders.", False)
    cells_file: Path | None = setting("File in which cells are kept, so that a report finds them again.")
    skip_bad: bool = option("Skip and count unreadable files of a folder.", False)
    progress: Listener = None


@dataclass(frozen=True)
class ReadRequest(ReadOptions):
    SHOWN = "format map unit where cells keep drop allow_drops skip_bad"
    source: Sources
    _: KW_ONLY
    cells_time: Literal["compute", "period", "auto"] = setting("T of cells; auto: mostly the period.", "compute")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Request):
    PANEL = "Model"
    NEEDS = "resample: bootstrap intervals"
    model: str | None = option(
        "auto (cross-validation), saturation, saturation-gamma, context, roofline, linear, quadratic, hinge, constant;"
        " each also +moe, +correction.",
        metavar="NAME",
    )
    time: Clock | None = option("compute: forward pass; period: step to step, with the host. Default: period if known.")
    window_means: bool = setting("Rows are window means, although no column shows it (window_ms, B_sd, ...).", False)
    weights: str | None = setting("What counts the same: rows, doublings of S, or cells by their variance.")
    fix: Mapping[str, float] | Sequence[str] | None = option("Hold a parameter: P_max=60. Repeatable.")
    bounds: Ranges = setting("Bound a parameter: k_B=0.01:1. Repeatable.")
    prior: Ranges = setting("Prior of a parameter, mean and deviation: P_max=60:5. Repeatable.")
    loss: str | None = setting("Robust loss of the residuals: huber, soft_l1, tukey or linear.")
    residuals: str | None = setting("relative (log of predicted/observed) or absolute (ms).")
    bootstrap: int = option("Number of bootstrap resamples, such as 1000.", 0, min=0)
    intervals: Literal["sandwich", "profile", "bootstrap"] | None = setting("Intervals of parameters.")
    resample: str | None = setting("What the bootstrap draws: auto, rows or block (of time).")
    seed: Seed = 0
    path: str | None = option(
        "Execution path: cpu, gpu; with --each '{hardware}-tp{tp}'. Default: the trace's.", panel="Systems and files"
    )


@dataclass(frozen=True)
class FitRequest(ModelOptions, ReadOptions):
    source: Sources


@dataclass(frozen=True)
class FitEachRequest(FitRequest):
    SHOWN = "model bootstrap fix map unit where path"
    LACKS = "keep drop skip_bad"
    made: "Callable[[str, Fit], None] | None" = setting("Called with (label, fit) when each is made.")


@dataclass(frozen=True)
class PredictRequest(Request):
    PANEL = "Steps"
    EXCLUDES = "B data; data sensitivity; context context_tokens"
    NEEDS = "S: B data sensitivity"
    fit: FitFile
    B: Sequence[int] = option("Requests in the step. Repeatable.", (), names="-B")
    S: Sequence[int] = option("Tokens in the step; without it S = B. Repeatable.", (), names="-S")
    context: Context = None
    context_tokens: float | None = option("Cached tokens that the whole step attends to.")
    prefill_requests: int | None = option("How many of B prefill.")
    prefill_tokens: int | None = option("How many of S are prefill.")
    data: Path | None = option("A table of steps (B, S, ...) instead of -B and -S.")
    level: float = option("Coverage of the prediction interval.", 0.9)
    sensitivity: bool = option("Marginal cost per request and per token, and the dominant term.", False)
    strict: bool = option("Refuse steps outside the measured range (exit code 3).", False)


@dataclass(frozen=True)
class SpeculateRequest(Request):
    PANEL = "Speculation"
    EXCLUDES = "drafts draft_cost"
    fit: FitFile
    drafts: Any = option("Fit of the engine with drafts. Default: FIT at B (1 + K) tokens.", kind=Path, metavar="FIT")
    draft_tokens: int | None = option("Tokens per draft. Default: as recorded.", min=1, max=64)
    acceptance: float | None = option("Acceptance probability of a draft token. Default: as recorded.")
    draft_cost: str | None = option("Time to draft a token, such as 0.5ms. Default: 0.")
    context: Context = None
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class CompareRequest(ReadOptions):
    SHOWN = "tolerance each alternate path rate lengths ttft tpot kv_blocks map unit where"
    LACKS = "keep drop skip_bad"
    EXCLUDES = "each alternate rate"
    NEEDS = "lengths ttft tpot kv_blocks price_per_hour: rate"
    sources: Annotated[
        Sequence[Any],
        Option("Fit files, or traces to fit: the first is the baseline.", kind=list[str], argument="A B..."),
    ]
    tolerance: str | float = option("Slowdown that counts as a regression.", "5%", panel="Comparison")
    names: Sequence[str] | None = setting("Names of the sources, for the verdict.")
    each: bool = option("Compare every system with the same one of the baseline.", False, panel="Comparison")
    alternate: bool = option("The files are starts of A and B in turn: A B A2 B2.", False, panel="Comparison")
    path: str | None = option("Execution path to compare; with --each '{hardware}-tp{tp}'.", panel="Comparison")
    rate: RateOf = None
    lengths: LengthsOf = None
    ttft: Ttft = None
    tpot: Tpot = None
    kv_blocks: KvBlocks = None
    price_per_hour: float | None = setting("Price of a replica per hour.")
    seed: Seed = 0


@dataclass(frozen=True)
class PlanTarget(Request):
    PANEL = "Target"
    paths: Hardware = "hardware.json"
    sla: Sla = None
    rate: RateOf = None
    _: KW_ONLY
    sla_ms: float | None = setting("The SLA as a number of milliseconds.")
    percentile: Percentile = 99.0
    tokens_per_request: Tokens = None
    context: Context = None
    ttft: Ttft = None
    tpot: Tpot = None
    prompt_tokens: int = option("Tokens of a prompt, for --ttft with --sla.", 512)
    force: Force = False


@dataclass(frozen=True)
class PlanRequest(PlanTarget):
    """How to batch requests within an SLA; without a load, which steps meet it."""

    PANEL = "Load"
    SHOWN = "sla rate replicas paths"
    EXCLUDES = "rate rate_per_s arrivals"
    NEEDS = (
        "prompt_tokens: ttft; arrivals_window: arrivals; "
        "replicas objective laws_only seed max_batch: rate rate_per_s arrivals"
    )
    _: KW_ONLY
    rate_per_s: float | None = setting("The rate as a number of requests a second.")
    arrivals: Arrivals = None
    arrivals_window: WindowOf = None
    replicas: int = option("Replicas. Default: 1; for serving engines the fewest that suffice.", 1, min=1)
    objective: str | Mapping[str, float] | None = setting("Minimised: p99=1,mean=0.5,throughput=0.1.")
    max_batch: int | None = setting("Largest batch of the main path.")
    transfer: TransferOf = None
    wait: Duration | None = setting("Expected wait for the GPU; without it what the rate makes it.")
    laws_only: LawsOnly = False
    seed: Seed = 0

    @property
    def has_load(self) -> bool:
        return any(each is not None for each in (self.rate, self.rate_per_s, self.arrivals))


@dataclass(frozen=True)
class StepBudgetRequest(Request):
    paths: Any
    sla: Duration | None = setting('The SLA of a step, "10ms".')
    _: KW_ONLY
    sla_ms: float | None = setting("The SLA as a number of milliseconds.")
    B: int | Iterable[int] | None = setting("Numbers of requests to tabulate. Default: 1, 2, 4, ... max_requests.")
    percentile: float | str = setting("Percent of steps that must meet the SLA.", 99.0)
    path: str | None = setting("Which path, where there are several.")
    max_requests: int | None = setting("Default: the most that were measured.")


@dataclass(frozen=True, kw_only=True)
class EngineLimits(Request):
    PANEL = "Engine"
    kv_blocks: KvBlocks = None
    max_num_seqs: int | None = option("Most requests in a step. Default: the engine's, else 256.", min=1)
    max_num_batched_tokens: int | None = option("Most tokens in a step. Default: the engine's, else 2048.", min=1)
    synchronous: bool | None = option("Scheduling. Default: the trace's.", names="--synchronous/--asynchronous")
    block_size: int | None = setting("Tokens in a block of the KV cache. Default: the trace's, else 16.")


@dataclass(frozen=True, kw_only=True)
class EngineFields(EngineLimits):
    """Settings of an engine; None: as the fit's trace says, else the usual."""

    long_prefill_token_threshold: int | None = setting("Most prompt tokens of one request in a step; 0: no limit.")
    prefix_hit_rate: float | None = setting("Cached share of every prompt. Default: as recorded, else 0.")
    engine: Mapping[str, Any] | None = setting("Settings that are not given otherwise, such as a plan's `.engine`.")


@dataclass(frozen=True, kw_only=True)
class SpecialSettings(EngineFields):
    start_at: int | None = setting("continuous, static: queue length that starts a prefill.")
    swap: str | None = setting("Swap preempted requests out and in, at this per token: 2us.")
    draft_tokens: int | None = setting("Speculative decoding: tokens per draft. Default: the trace's, else 0.")
    acceptance: float | None = setting("Probability that a draft token is accepted. Default: as recorded, else 0.7.")
    draft_cost: str | None = setting("Time per draft token, such as 0.5ms.")
    batching: Batching | Sequence[Batching] = option(
        "Batching; chunked-prefill is vLLM's. Repeatable.",
        "chunked-prefill",
        names="--batching --engine",
        kind=list[str],
        metavar="|".join(get_args(Batching)),
    )
    order: OrderName | Sequence[OrderName] = option(
        "Scheduling policy. Repeatable.", "fcfs", kind=list[str], metavar="|".join(get_args(OrderName))
    )
    length_error: float = setting("sjf: standard deviation of log(predicted/true output).", 0.0)
    switch_at: int = setting("switch: queue length from which it is sjf by class.", 32)
    ageing: Ageing = None
    replicas: int = option("Identical engines behind a router.", 1)
    route: Route = "round-robin"
    prefix_share: float = setting("prefix routing: share of a prompt that a user's replica has cached.", 0.5)
    service: StepTimes = "fitted"


@dataclass(frozen=True, kw_only=True)
class Memory(Request):
    PANEL = "KV cache"
    model_config: Any = option("The model's config.json, to compute the KV cache.")
    gpu_memory: str | None = option("Memory of a GPU as nvidia-smi prints it: 81559MiB.")
    gpu_memory_utilization: float = setting("Share of GPU memory that the engine uses.", 0.9)
    kv_memory: str | None = setting("Memory of the KV cache: 4GiB.")
    kv_dtype: str | None = setting("KV-cache dtype: fp8.")
    tensor_parallel: int = setting("Tensor-parallel size: GPUs of one replica.", 1)


FitOfEngine = Annotated[
    Any, Option("Fit of steps. Default: the gpu path of --hardware.", panel="Engine", metavar="FIT")
]
PrefillFit = Annotated[Any, Option("A separate fit of steps that contain prefill.", panel="Engine")]
Users = Annotated[int | None, Option("Closed-loop users, each with one request at a time.", min=1, panel="Load")]
Think = Annotated[Duration, Option("Mean think time of a user between requests.", panel="Load")]
ArrivalProcess = Annotated[
    str, Option("poisson; gamma:CV; bursts:TIMES:SHARE:LENGTH (4:0.1:1s).", "--arrival-process --law", panel="Load")
]
Classes = Annotated[
    Iterable[str],
    Option("NAME:SHARE[:LIMITS], urgent first: chat:0.3:50ms; engine: chat:0.3:ttft=1s.", "--class", list[str], "Load"),
]
StartUp = Annotated[
    Duration | None, Option("Start-up time of a replica: 2min; with --arrivals plan schedules replicas.", panel="Load")
]


@dataclass(frozen=True)
class EnginePlanRequest(EngineFields, Memory):
    PANEL = "Serving engines"
    SHOWN = "rate lengths ttft tpot e2e replicas hardware fit kv_blocks"
    LACKS = "max_num_seqs max_num_batched_tokens"
    EXCLUDES = (
        "rate rate_per_s users; arrivals users; lengths arrivals; classes arrivals; arrival_process arrivals; "
        "kv_blocks model_config; fit hardware; transfer replicas; transfer users; gpu_memory kv_memory"
    )
    NEEDS = (
        "think: users; start_up: arrivals; arrivals_window: start_up; arrival_process: rate rate_per_s; "
        "gpu_memory_utilization kv_memory kv_dtype tensor_parallel: model_config"
    )
    fit: FitOfEngine = None
    rate: RateOf = None
    lengths: LengthsOf = None
    _: KW_ONLY
    ttft: Ttft = None
    tpot: Tpot = None
    e2e: Duration | None = option("SLO of the end-to-end latency: 10s, or p95:10s.")
    goodput: float | str | None = option("Share of requests that must meet all SLOs, such as 99%.")
    rate_per_s: float | None = setting("The rate as a number of requests a second.")
    arrivals: Arrivals = None
    arrival_process: ArrivalProcess = "poisson"
    growth: float | str | None = setting("Multiple of the load to plan for: 2x.")
    users: Users = None
    think: Think = "1s"
    classes: Classes = ()
    start_up: StartUp = None
    arrivals_window: WindowOf = None
    prefill_fit: PrefillFit = None
    transfer: TransferOf = None
    hardware: Hardware = "hardware.json"
    replicas: int | None = option("Replicas that there are. Default: the fewest that do.", min=1)
    route: Route = "round-robin"
    order: Literal["fcfs", "sjf", "slo", "priority"] | None = setting("Default: fcfs; with classes also priority.")
    batching: Literal["chunked-prefill", "continuous"] | None = setting("Batching. Default: both are tried.")
    price_per_hour: float | None = setting("Price of a replica per hour.")
    watts: float | None = setting("Power of a replica.")
    service: StepTimes = "fitted"
    steps_slower: float | str | None = setting("Plan with steps slower than fitted: 20%.")
    seed: Seed = 0
    progress: Listener = None
    force: Force = False


@dataclass(frozen=True, kw_only=True)
class SweepOptions(Cluster):
    PANEL = "Run"
    NEEDS = "resume: out"
    requests: int | None = option("Requests per replication. Default: as many as the load needs; for engines 100,000.")
    replications: int = option("Least number of independent replications.", 5)
    warmup: float | None = setting("Share of each replication discarded as warm-up. Default: measured.")
    seed: Seed = 0
    sla: Duration | None = option("Latency SLA per response, such as 20ms; attainment is reported.")
    out: Path | None = option("Write the runs into one Parquet file.")
    resume: bool = option("Keep the runs that --out contains already.", False)
    workers: int | None = setting("Runs at a time. Default: one per core.")
    running: "Running | None" = setting("workers, backend and scheduler in one record.")
    progress: Listener = None
    force: Force = False


@dataclass(frozen=True, kw_only=True)
class PolicyMachine(SweepOptions):
    PANEL = "Machine"
    sla_ms: float | None = setting("The SLA as a number of milliseconds.")
    nominal: Mapping[str, str] | Sequence[str] | None = option(
        "A path's nominal numbers: gpu:launch=8ms,slope=0.05ms, amx:p50=2ms. Repeatable.", names="--nominal --path"
    )
    tokens_per_request: Tokens = None
    service: Service = setting("Service-time distribution.", "fitted")
    servers: Mapping[str, int] | None = setting('Servers of a path, {"amx": 2}.')
    buckets: Sequence[int] | str | None = setting("Batch sizes that the main path pads to: 1,2,4,8.")
    precision: float | None = setting("Relative precision of p99 to reach, such as 0.01.")


@dataclass(frozen=True)
class StudyRequest(PolicyMachine):
    SHOWN = "hardware nominal sla requests seed out"
    hardware: Hardware = "hardware.json"


@dataclass(frozen=True, kw_only=True)
class PolicySettings(Request):
    PANEL = "Policies"
    batch: int | None = option("fixed: batch size.")
    window: Duration | None = setting("window: batching timeout, such as 2ms.")
    t_cut: Duration | None = option("cutoff, three-stage: queueing timeout before falling back to the CPU tier.")
    b1: int | None = setting("three-stage: smallest batch for the GPU.")
    max_batch: int | None = setting("Largest batch on the main path.")
    rule: Literal["amortised", "literal", "total-delay"] | None = setting("marginal-cost: the rule.")
    longest: Duration | None = setting("marginal-cost, split: longest wait for more requests.")
    merge_below: int | None = setting("split: fewer requests than this wait for more.")
    ageing: Ageing = None
    settings: Mapping[str, Any] | None = setting('Settings by name, {"t_cut": "2ms", "batch": 8}.')


@dataclass(frozen=True, kw_only=True)
class SimulatedLoad(Request):
    PANEL = "Load"
    EXCLUDES = "arrivals users load_curve; rate users; arrivals classes; arrivals prompt_lengths"
    NEEDS = "think: users vary; arrival_process: rate rate_per_s vary; ageing: classes arrivals"
    rate_per_s: float | Sequence[float] | None = setting("The rates as numbers of requests a second.")
    arrivals: Arrivals = None
    arrival_process: ArrivalProcess = "poisson"
    load_curve: Path | str | None = setting("Table (t_s, rate_per_s) of a rate that varies and repeats.")
    users: Users = None
    think: Think = "1s"
    classes: Classes = ()
    prompt_lengths: Any = setting("Recorded requests to draw token lengths from.")
    vary: Mapping[str, Iterable[Any]] | str | Sequence[str] | None = option(
        "Settings to vary: 'rate=10/s,20/s; replicas=1..4'.", names="--sweep", kind=list[str], panel="Run"
    )


RatesOf = Annotated[str | Sequence[str] | None, Option("Arrival rate: 500/s. Repeatable, a run each.", panel="Load")]


@dataclass(frozen=True)
class SimulateRequest(PolicySettings, SimulatedLoad, PolicyMachine):
    SHOWN = "policy rate arrivals hardware nominal t_cut batch sla requests vary out"
    NEEDS = "by_prompt: arrivals"
    hardware: Hardware = "hardware.json"
    rate: RatesOf = None
    policy: str | Sequence[str] = option(
        "Batching policy; the first is the baseline. Repeatable.", "gpu-only", metavar=Policies, panel="Policies"
    )
    _: KW_ONLY
    by_prompt: bool = setting("With --arrivals: count the prompt's tokens of a request.", False)
    log: Path | None = setting("Event log of the first 1,000 requests of run 1 (CSV).")


@dataclass(frozen=True)
class SimulateEngineRequest(SpecialSettings, SimulatedLoad, SweepOptions):
    PANEL = "Engine"
    SHOWN = "fit kv_blocks max_num_seqs max_num_batched_tokens batching replicas rate lengths ttft tpot vary"
    LACKS = "hardware sla"
    EXCLUDES = (
        "fit hardware; lengths prompt_lengths; arrivals lengths; autoscale replicas_at; replicas replicas_at; "
        "users autoscale; prefill_on autoscale; prefill_on replicas_at"
    )
    NEEDS = (
        "switch_at length_error: order vary; prefix_share: route vary; start_up: autoscale replicas_at vary; "
        "transfer prefill_replicas: prefill_on; "
        "route: replicas prefill_replicas autoscale replicas_at vary"
    )
    fit: FitOfEngine = None
    rate: RatesOf = None
    lengths: str | None = option("Prompt and output tokens of requests at a --rate, such as 512:128.", panel="Load")
    _: KW_ONLY
    prefill_fit: PrefillFit = None
    hardware: Hardware = "hardware.json"
    prefill_on: Any = option("Disaggregated prefill, on an engine with this fit.")
    prefill_replicas: int = setting("Engines that prefill for the others.", 1)
    transfer: TransferOf = None
    tenants: int = setting("Users that requests at a rate come from, for routing by prefix.", 1)
    replicas_at: Any = setting("Table (t_s, replicas): requested replicas over time.")
    autoscale: str | None = option("Autoscaler METRIC:TARGET:LEAST..MOST: requests:20:1..8, kv:70%:1..8:15s:5min.")
    start_up: StartUp = None
    ttft: Ttft = None
    tpot: Tpot = None


@dataclass(frozen=True)
class ValidateRequest(SpecialSettings):
    PANEL = "Comparison"
    SHOWN = (
        "metrics_before metrics_after run_steps calibrate kv_blocks max_num_seqs max_num_batched_tokens replicas "
        "where strict out figure"
    )
    LACKS = "batching order"
    EXCLUDES = "calibrate metrics_after; calibrate run_steps"
    NEEDS = "metrics_before: metrics_after; route: replicas; switch_at length_error: order"
    fit: Annotated[Any, Option("Traces or logs of the engine, or a fit file.", kind=list[str], argument="TRACE|FIT")]
    run: Annotated[Any, Option("The measured requests, or what latfit record wrote.", argument="RUN")]
    _: KW_ONLY
    prefill_fit: PrefillFit = None
    model: str | None = option("Model to fit to the trace's steps. Default: auto.", metavar="NAME", panel="Step costs")
    time: Clock | None = setting("What to fit, as for latfit fit. Default: the period if available.")
    where: str | None = option('Use only steps that match: "tp == 8".', panel="Step costs")
    metrics_after: Path | str | None = option("The server's /metrics after the run.", kind=Path)
    metrics_before: Path | str | None = option("/metrics before the run. Default: since the server's start.", kind=Path)
    run_steps: Any = option("Steps recorded during the run, for the machine's speed.", kind=list[str], metavar="TRACE")
    calibrate: bool = option("Fit speed, host time and start delay on the first third; score the rest.", False)
    seed: Seed = 0
    force: Force = False


@dataclass(frozen=True)
class ExportRequest(Request):
    PANEL = "Settings"
    SHOWN = "target plan model shapes begins"
    plan: Annotated[Any, Option("The plan, as latfit plan --out writes it.", argument="PLAN")]
    target: Annotated[str, Option("vllm, sglang, trtllm, llamacpp, triton, tensorrt or kubernetes.", argument="TARGET")]
    _: KW_ONLY
    model: str | None = option("The model's name or folder, as the engine loads it.")
    shapes: str | Sequence[str] = option("tensorrt: an input: input:Bx3x224x224. Repeatable.", (), names="--shape")
    begins: str | None = option("kubernetes: start of day: '06:30 Europe/Berlin'. Default: 00:00 UTC.", metavar="TIME")


@dataclass(frozen=True)
class ReportRequest(Request):
    PANEL = "Report"
    EXCLUDES = "sla plan"
    NEEDS = "percentile tokens_per_request: sla sla_ms plan; laws_only: rate rate_per_s"
    paths: Hardware = "hardware.json"
    out: Path | str = option("Folder for the page and its pictures.", "reports", kind=Path, metavar="DIR")
    sla: Sla = None
    rate: str | None = option("With --sla: arrival rate, such as 500/s.")
    _: KW_ONLY
    sla_ms: float | None = setting("The SLA as a number of milliseconds.")
    rate_per_s: float | None = setting("The rate as a number of requests a second.")
    percentile: Percentile = 99.0
    tokens_per_request: Tokens = None
    laws_only: LawsOnly = False
    plan: "Plan | None" = setting("A plan that was made already.")
    trace: Any = option("Measured steps to draw. Default: those of the fits. Repeatable.", kind=list[Path])


@dataclass(frozen=True)
class ProfileRequest(Request):
    PANEL = "Steps"
    SHOWN = "model budget device isa dtype grid context threads precision seed out resume"
    model: str = option("A preset (tiny, smollm2-135m, ..., llama-3.1-8b) or a HuggingFace config.json.", "tiny")
    budget: Duration | None = option("Time to spend, such as 60s or 5min. Default: 60s.", panel="Run")
    device: Device = option("auto measures everything available.", "auto", panel="Device")
    _: KW_ONLY
    isa: Isa = option("Cap the instruction set of CPU kernels.", "auto", panel="Device")
    dtype: Literal["auto", "bf16", "fp16", "fp32", "int8"] = option("auto: bf16 if it is fast.", "auto", panel="Device")
    threads: int | None = option("Threads. Default: the idle CPUs.", panel="Device")
    pin: str | None = option("CPUs to pin to: 0,2-5.", panel="Device")
    processes: int | None = option("Processes that alternate. Default: 3 if memory and budget allow.", panel="Device")
    graphs: bool = setting("Whether GPU steps are recorded as CUDA graphs.", True)
    grid: str | None = option(
        "Cells: 'B=1,2,4;S=1,16,64', every pair with S >= B. S = B decodes, else one request prefills S - B + 1 tokens."
    )
    context: str = option("Cached tokens of a decode request, one number or several: 128,512.", "256")
    layers: int | None = option("Number of the model's layers to measure.")
    kernel: Literal["step", "gemm", "attention"] = setting("The whole step or a part.", "step")
    history: str = setting("Cached tokens before a prefill chunk: 0,1024.", "0")
    design: Literal["auto", "adaptive", "grid"] = setting("The most informative cells first, or all in turn.", "auto")
    precision: float = option("Stop once every median has this relative precision (95 % interval).", 0.03, panel="Run")
    seed: Seed = 0
    out: Path | str | None = setting("File of the trace; a journal next to it keeps what is measured until the end.")
    resume: bool = option("Continue a run that was interrupted or killed.", False, panel="Run")
    progress: "Callable[[Measuring], None] | None" = setting("Called with the state of the run.")
    announce: "Callable[[Announcement], None] | None" = setting("Called before a device is measured.")


@dataclass(frozen=True)
class RecordRequest(Request):
    PANEL = "Recording"
    url: Server
    _: KW_ONLY
    duration: Duration = option("How long to record; Ctrl-C ends it earlier.", "10min")
    every: Duration = option("Polling interval: the shortest window.", "1s")
    out: Path | str = option("Trace to write; the fit and texts of /metrics go next to it.", "trace.parquet", kind=Path)
    path: str | None = option("Label of the execution path: gpu, cpu, ...", metavar="NAME")
    progress: Callable[..., None] | None = setting("Called with each reading: seconds so far, seconds asked for.")


@dataclass(frozen=True)
class TuneRequest(Request):
    PANEL = "Tuning"
    SHOWN = "command rate lengths arrivals ttft tpot url load max_restarts budget out dry_run"
    EXCLUDES = "url command; lengths arrivals"
    command: Sequence[str] = option(
        "Starts the engine: -- vllm serve MODEL", (), kind=list[str] | None, argument="COMMAND"
    )
    _: KW_ONLY
    rate: RateOf = None
    lengths: LengthsOf = None
    ttft: Ttft = None
    tpot: Tpot = None
    arrivals: Any = option("Recorded requests to send, in any format that is read; --rate scales them.", panel="Load")
    url: str | None = option("A running engine that you restart by hand when asked.")
    load: Duration = option("How long to send requests at each rate; of --arrivals the busiest part.", "1min")
    max_restarts: int = option("Most restarts of the engine.", 2, min=1)
    budget: Duration = option("Time after which the engine is not restarted again.", "20min")
    out: Path | str = option("Folder for traces, fit, plan, settings and logs.", "tuned", kind=Path, metavar="DIR")
    dry_run: bool = option("Show what would be done.", False)
    token: str | None = setting("Bearer token of the engine; else the --api-key of its command.")
    seed: Seed = 0
    restart: Callable[[str], None] | None = setting("Called with an engine's options; returns when it is up.")
    progress: Callable[[str], None] | None = setting("Called with each step, in words.")


@dataclass(frozen=True, kw_only=True)
class RunningEngine(EngineLimits):
    EXCLUDES = "fit hardware"
    NEEDS = "prefill_fit: fit; kv_blocks block_size synchronous at_measured_speed: fit hardware"
    fit: Any = option("Step costs: simulate what a change would do.", metavar="FIT")
    prefill_fit: PrefillFit = None
    hardware: Any = setting("Instead of --fit: the machine's profile, its gpu path.")
    ttft: Ttft = None
    tpot: Tpot = None
    at_measured_speed: bool = option("Simulate at the measured speed, even far from the fit's.", False)


@dataclass(frozen=True)
class WatchRequest(RunningEngine):
    PANEL = "Watching"
    SHOWN = "ttft tpot fit window every max_num_seqs max_num_batched_tokens kv_blocks at_measured_speed"
    url: Server
    _: KW_ONLY
    window: Duration = option("Length of the window that figures cover.", "30s")
    every: Duration = option("How often to read the engine.", "1s")


@dataclass(frozen=True)
class DoctorRequest(RunningEngine):
    PANEL = "Reading"
    SHOWN = "ttft tpot fit duration max_num_seqs max_num_batched_tokens kv_blocks at_measured_speed"
    NEEDS = "ttft tpot seed: fit hardware"
    url: str | None = option("A running engine. Default: one on this machine, else the machine itself.", argument="URL")
    _: KW_ONLY
    duration: Duration = option("How long to read the engine.", "10s")
    seed: Seed = 0
    progress: Callable[[float, float], None] | None = setting("Called with (seconds, of).")


@dataclass(frozen=True)
class ServeRequest(Request):
    PANEL = "Routing"
    SHOWN = "policy times hardware lengths slots t_cut classes ageing learn host port token_file"
    NEEDS = "lengths: hardware; learn: times hardware; ageing: classes"
    engines: Annotated[
        str | Mapping[str, str] | Sequence[str],
        Option("One or two engines, such as gpu=http://localhost:8000.", kind=list[str], argument="URL"),
    ]
    _: KW_ONLY
    policy: FrontPolicy | None = option("Routing policy. Default: three-stage with two engines.")
    times: Mapping[str, Duration] | Sequence[str] | None = option("Typical time of a response: gpu=800ms. Repeatable.")
    hardware: Any = option("Profile whose fits give that time, for requests of --lengths.")
    lengths: str = option("Prompt and output tokens: 500:200.", "500:200")
    slots: Mapping[str, int] | Sequence[str] | None = option("Concurrent requests of an engine: gpu=8. Repeatable.")
    t_cut: Duration | None = option("Queueing timeout before falling back to the second engine.")
    learn: bool = option("Learn response times while serving.", False)
    classes: Sequence[str] | None = option(
        "Class in the header x-latfit-class, urgent first. Repeatable.", names="--class"
    )
    ageing: Duration | None = option("Waiting time worth one class, such as 5s; else strict priority.")
    host: str = option("Address to listen at; 0.0.0.0 for all.", "127.0.0.1", panel="Listening")
    port: int = option("Port; 0 for any that is free.", 8080, min=0, max=65535, panel="Listening")
    token: str | None = setting("What callers must bear.")
    token_file: Path | None = option("File with the clients' bearer token; else $LATFIT_TOKEN.", panel="Listening")
    engine_token: str | None = setting("Sent to the engines.")
    most_waiting: int = setting("Most queued requests; others are rejected (429).", 256)
    max_body: str = setting("Largest body of a request (413).", "8MiB")
    max_memory: str = setting("Bodies of all requests together (429).", "256MiB")
    connect: Duration = setting("Until an engine is connected.", "5s")
    first_byte: Duration = option("Timeout until a response begins, or is complete.", "5min", panel="Timeouts")
    between: Duration = setting("From one piece of a reply to the next, on either side.", "1min")
    drain: Duration = option("Time for running requests to finish after a stop.", "30s", panel="Timeouts")
    ready: Callable[[str], None] | None = setting("Called with the address and the rule in words.")


@dataclass(frozen=True)
class ReplayRequest(Request):
    PANEL = "Replay"
    EXCLUDES = "load rate"
    policy: str | Sequence[str] = option("Policies: gpu-only,three-stage,cutoff.", "gpu-only,three-stage", kind=str)
    load: Any = option("Loads as shares of the main path's capacity. Default: 50%,70%.", kind=str)
    _: KW_ONLY
    rate: Any = option("Arrival rates instead of --load: 100/s,200/s.", kind=str)
    duration_each: Duration = option("How long each run lasts.", "20s", names="--duration")
    executors: "Sequence[Executor] | None" = setting("The main path and the side path, if there is one.")
    model: str = option("Model whose decode steps run.", "tiny")
    launch: Duration = setting("How long each batch takes to get to the stand-in for a GPU.", "8ms")
    max_batch: int = setting("Its largest batch.", 32)
    seed: Seed = 0
    progress: Listener = None


@dataclass(frozen=True)
class CatalogRequest(Request):
    name: str | None = option("A system, such as rtx4090/llama-3.1-8b.", argument="NAME")


@dataclass(frozen=True)
class CatalogAddRequest(Request):
    PANEL = "Entry"
    fit: Annotated[Any, Option("A fit file (NAME.fit.json).", kind=Path, argument="FIT")]
    _: KW_ONLY
    name: str | None = option("GPU/MODEL, with @tp2 for tensor parallelism. Default: as the trace says.")
    folder: Path | str | None = option("Folder of entries. Default: $LATFIT_CATALOG.", kind=Path)
    source: str | None = setting("Where the steps come from.")
    weights: float | None = setting("Parameters of the model, for scaling.")


LedgerFile = Annotated[Path | str, Option("The ledger's file.", kind=Path, panel="Ledger")]


@dataclass(frozen=True)
class LedgerRequest(Request):
    ledger: LedgerFile = "ledger.json"


@dataclass(frozen=True)
class LedgerAddRequest(Request):
    plan: Annotated[Path | str, Option("A plan for requests, or tune.json.", kind=Path, argument="PLAN")]
    run: Any = option("The run: vllm bench serve --save-detailed, GuideLLM, a table.", kind=Path | None, argument="RUN")
    _: KW_ONLY
    ledger: LedgerFile = "ledger.json"


@dataclass(frozen=True)
class AddPathRequest(Request):
    PANEL = "Path"
    EXCLUDES = "fit nominal"
    NEEDS = "force: fit nominal"
    name: PathName
    fit: Path | None = option("A .fit.json file.", argument="FIT")
    nominal: str | None = option(
        'Numbers without a measurement: "p50=2ms", "launch=0.5ms,slope=0.02ms".', names="--nominal --quoted"
    )
    force: bool = option("Replace a measured path by nominal numbers or by another system's fit.", False)
    flops: float | None = option("Peak FLOP/s of the machine, such as 989e12.", panel="Machine")
    bandwidth: float | None = option("Memory bandwidth in bytes/s, such as 3.35e12.", panel="Machine")
    flops_per_token: float | None = option("FLOP per token, about twice the model's parameters.", panel="Machine")
    step_bytes: float | None = option("Bytes read by every step, about the size of the weights.", panel="Machine")
    price: float | None = option("Price per hour, in any one currency.", panel="Machine")
