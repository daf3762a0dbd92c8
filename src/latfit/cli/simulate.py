"""`latfit simulate`: what a batching policy makes of a load on this hardware; its options in groups."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from latfit.cli.options import (
    DEFAULT_HARDWARE,
    HardwareOption,
    JsonOption,
    QuietOption,
    SeedOption,
    TokensOption,
    verb,
)
from latfit.cli.simulate_engine import ClusterOptions, CostOptions, EngineOptions, OrderOptions
from latfit.errors import Interrupted, SlaOutOfReach, WrongUsage
from latfit.units import parse_duration_ms, parse_rate_per_ms

if TYPE_CHECKING:
    from latfit.policies import DispatchTable, Settings
    from latfit.simulation import Options, Point, SimResult, System
    from latfit.stats import FloatArray
    from latfit.workload import ArrivalLaw, Load, RequestClass


@dataclass(frozen=True)
class PolicyOptions:
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help="gpu-only, fixed, window, marginal-cost, three-stage, cutoff, optimal, split or deadline. Repeatable.",
        ),
    ] = None
    batch: Annotated[int | None, typer.Option("--batch", help="Batch of the fixed policy.")] = None
    window: Annotated[str | None, typer.Option("--window", help="How long the window policy waits, such as 2ms.")] = (
        None
    )
    t_cut: Annotated[
        str | None, typer.Option("--t-cut", help="Age at which cutoff and three-stage give up on the GPU.")
    ] = None
    b1: Annotated[int | None, typer.Option("--b1", help="Batch from which three-stage takes the GPU.")] = None
    max_batch: Annotated[int | None, typer.Option("--max-batch", help="Largest batch on the main path.")] = None
    rule: Annotated[str, typer.Option("--rule", help="Of marginal-cost: amortised, literal or 'total delay'.")] = (
        "amortised"
    )
    longest: Annotated[
        str | None, typer.Option("--longest", help="Longest wait for others under marginal-cost and split.")
    ] = None
    merge_below: Annotated[
        int, typer.Option("--merge-below", help="Split holds back fewer requests than this, to merge them.")
    ] = 1
    ageing: Annotated[
        str | None, typer.Option("--ageing", help="Waiting that makes up for one class, such as 50ms.")
    ] = None

    def settings(self) -> "Settings":
        import math

        from latfit.policies import Settings

        def wait(text: str | None, option: str) -> float | None:
            return None if text is None else parse_duration_ms(text, option=option)

        return Settings(
            batch=self.batch,
            window_ms=wait(self.window, "--window"),
            t_cut_ms=wait(self.t_cut, "--t-cut"),
            B1=self.b1,
            max_batch=self.max_batch,
            rule=self.rule,
            longest_ms=wait(self.longest, "--longest") or math.inf,
            merge_below=self.merge_below,
            ageing_ms=wait(self.ageing, "--ageing") or math.inf,
        )


@dataclass(frozen=True)
class LoadOptions:
    rate: Annotated[
        list[str] | None, typer.Option("--rate", help="Arrivals, such as 500/s. Repeatable: one run each.")
    ] = None
    law: Annotated[
        str,
        typer.Option(
            "--law", help="poisson; gamma:CV (bursts if CV > 1); bursts:TIMES:SHARE:LENGTH, such as bursts:4:0.1:1s."
        ),
    ] = "poisson"
    load_curve: Annotated[
        Path | None,
        typer.Option(
            "--load-curve", help="Table (t_s, rate_per_s) of a rate that varies and repeats; scaled by --rate."
        ),
    ] = None
    arrivals: Annotated[
        Path | None, typer.Option("--arrivals", help="Recorded requests, in any format that is read; scaled by --rate.")
    ] = None
    users: Annotated[
        int | None, typer.Option("--users", help="A closed loop: so many send a request at a time and think between.")
    ] = None
    think: Annotated[str, typer.Option("--think", help="Mean time that the users of a closed loop think.")] = "1s"
    request_class: Annotated[
        list[str] | None,
        typer.Option(
            "--class", help="NAME:SHARE[:DEADLINE], the most urgent first, such as chat:0.3:50ms. Repeatable."
        ),
    ] = None
    prompt_lengths: Annotated[
        Path | None,
        typer.Option("--prompt-lengths", help="Recorded requests whose prompt tokens the requests are to have."),
    ] = None

    by_prompt: Annotated[
        bool,
        typer.Option("--by-prompt", help="With --arrivals: each adds as many tokens to a batch as its prompt has."),
    ] = False

    def tokens(self, load: "Load | None", tokens_per_request: int | None) -> tuple[float, float]:
        """Tokens of a typical request and of the longest; 0 for the latter where all are alike. Raises WrongUsage."""
        from latfit.workload import RecordedLoad, Resampled

        prompts = None
        if isinstance(load, RecordedLoad):
            prompts = load.requests.prompt_tokens if self.by_prompt else None
        elif load is not None and isinstance(load.lengths, Resampled):
            prompts = load.lengths.prompt_tokens
        if self.by_prompt and prompts is None:
            raise WrongUsage("there are no prompts to go by", where="--by-prompt", remedy="Give --arrivals FILE.")
        if prompts is None:
            return float(tokens_per_request or 1), 0.0
        if tokens_per_request is not None:
            raise WrongUsage("requests have tokens of their own", where="--tokens-per-request", remedy="Leave it out.")
        return float(prompts.mean()), float(prompts.max())

    def load(self, swept: Sequence[float] = ()) -> "Load":
        """The load, at the first rate. swept: rates per ms in place of --rate. Raises WrongUsage for kinds of load that
        contradict each other."""
        from latfit.workload import ClosedLoad, OpenLoad, RecordedLoad, fit_lengths, read_curve, read_requests

        kinds = [self.arrivals is not None, self.users is not None, self.load_curve is not None]
        if sum(kinds) > 1:
            raise WrongUsage("several kinds of load", where="--arrivals, --users, --load-curve", remedy="Give one.")
        rates = [*swept, *self.rates()]
        if not any(kinds) and not rates:
            raise WrongUsage(
                "no load is given", where="--rate", remedy="Give --rate 500/s, --arrivals FILE or --users 20."
            )
        classes = tuple(parse_class(text) for text in self.request_class or ())
        more: dict[str, Any] = {"classes": classes} if classes else {}
        if self.prompt_lengths is not None:
            more["lengths"] = fit_lengths(read_requests(self.prompt_lengths).requests)
        if self.arrivals is not None:
            if more:
                where = "--class, --prompt-lengths"
                raise WrongUsage("recorded requests have their own", where=where, remedy="Leave these out.")
            return RecordedLoad(read_requests(self.arrivals).requests)
        if self.users is not None:
            return ClosedLoad(self.users, parse_duration_ms(self.think, option="--think"), **more)
        if self.load_curve is not None:
            return OpenLoad(read_curve(self.load_curve), **more)
        return OpenLoad(parse_law(self.law, rates[0]), **more)

    def rates(self) -> list[float]:
        return [parse_rate_per_ms(text, option="--rate") for text in self.rate or ()]


@dataclass(frozen=True)
class PathOptions:
    path: Annotated[
        list[str] | None,
        typer.Option(
            "--path",
            help="A path with quoted times: gpu:launch=8ms,slope=0.05ms, amx:p50=2ms (one at a time), or short"
            " gpu=8ms+0.05ms*256, amx=exp:2ms (a mean). Repeatable.",
        ),
    ] = None
    service: Annotated[
        str,
        typer.Option(
            "--service", help="How service times, or steps of an engine, scatter: fitted, deterministic or exponential."
        ),
    ] = "fitted"
    servers: Annotated[
        list[str] | None, typer.Option("--servers", help="Servers of a path, such as amx=2. Repeatable.")
    ] = None
    buckets: Annotated[
        str | None, typer.Option("--buckets", help="Batch sizes that the main path pads to, such as 1,2,4,8.")
    ] = None

    def system(self, hardware: Path, tokens_per_request: float, most_tokens: float) -> "System":
        from latfit.hardware import HardwareProfile, read_hardware
        from latfit.simulation import Serving, quoted_path, system_of

        serving = Serving(
            tokens_per_request,
            self.service,
            most_tokens,
            dict(parse_count(text, "--servers") for text in self.servers or ()),
            [int(part) for part in _split(self.buckets, ",", int, "--buckets")],
        )
        quoted = [quoted_path(text, serving) for text in self.path or ()]
        profile = HardwareProfile() if quoted and not hardware.exists() else read_hardware(hardware)
        return system_of(profile, quoted, serving)


@dataclass(frozen=True)
class RunOptions:
    requests: Annotated[
        int | None,
        typer.Option("--requests", help="Requests of each replication; without it as many as the load needs."),
    ] = None
    replications: Annotated[int, typer.Option("--replications", help="Independent runs, at least.")] = 5
    precision: Annotated[
        float | None, typer.Option("--precision", help="Go on until p99 is known within this share, such as 0.01.")
    ] = None
    warmup: Annotated[
        float | None,
        typer.Option(
            "--warmup", help="Share of each run left out at its start; without it until the start is forgotten."
        ),
    ] = None
    sla: Annotated[str | None, typer.Option("--sla", help="Response time against which attainment is counted.")] = None

    def options(self, seed: int) -> "Options":
        import math

        from latfit.simulation import Options

        sla_ms = math.inf if self.sla is None else parse_duration_ms(self.sla, option="--sla")
        return Options(self.requests, self.warmup, self.replications, seed, sla_ms, self.precision)


@dataclass(frozen=True)
class SweepOptions:
    sweep: Annotated[
        str | None,
        typer.Option("--sweep", help="Settings to vary, such as 'rate=100/s,200/s; t-cut=1ms,2ms; batch=8,16'."),
    ] = None
    out: Annotated[Path | None, typer.Option("--out", help="Write the runs into one Parquet file.")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Take over the runs that --out holds already.")] = False
    workers: Annotated[int | None, typer.Option("--workers", help="Runs at a time; without it one a core.")] = None
    backend: Annotated[str, typer.Option("--backend", help="Where runs are made: local, or dask.")] = "local"
    scheduler: Annotated[
        str | None, typer.Option("--scheduler", help="Address of a Dask cluster, tcp://...; without it workers here.")
    ] = None
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Draw the runs into a PNG: p99 over the rate, or the frontier.")
    ] = None
    report: Annotated[
        Path | None, typer.Option("--report", help="Folder for one page with the answer, the picture and the tables.")
    ] = None
    log: Annotated[
        Path | None,
        typer.Option("--log", help="Write the event log of the first 1,000 requests of the first run (CSV)."),
    ] = None

    def check_targets(self) -> None:
        """Raises TargetNotWritable before a long run instead of after it."""
        from latfit.files import check_writable, make_folder

        if self.figure is not None:
            check_writable(self.figure)
        if self.report is not None:
            from latfit.report import PAGE_NAME

            make_folder(self.report)
            check_writable(self.report / PAGE_NAME)

    def varied(self) -> tuple[list[float], dict[str, list[Any]]]:
        """Rates per ms, and settings with their values. Raises WrongUsage."""
        rates: list[float] = []
        settings: dict[str, list[Any]] = {}
        for part in filter(None, (piece.strip() for piece in (self.sweep or "").split(";"))):
            name, _, values = (piece.strip() for piece in part.partition("="))
            if name == "rate":
                rates = [parse_rate_per_ms(text.strip(), option="--sweep rate") for text in values.split(",")]
            elif name in SETTINGS:
                key, parse = SETTINGS[name]
                settings[key] = _split(values, ",", parse, f"--sweep {name}")
            else:
                raise WrongUsage(
                    f"{name!r} cannot be varied", where="--sweep", remedy=f"Vary rate, {', '.join(SETTINGS)}."
                )
        return rates, settings


def _duration(text: str) -> float:
    return parse_duration_ms(text, option="--sweep")


SETTINGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "batch": ("batch", int),
    "window": ("window_ms", _duration),
    "t-cut": ("t_cut_ms", _duration),
    "b1": ("B1", int),
    "max-batch": ("max_batch", int),
    "rule": ("rule", str),
    "longest": ("longest_ms", _duration),
    "merge-below": ("merge_below", int),
    "ageing": ("ageing_ms", _duration),
}
"""What --sweep can vary: the setting it stands for, and how its values are read."""


def _split(text: str | None, by: str, read: Callable[[str], Any], where: str) -> list[Any]:
    try:
        return [read(part.strip()) for part in (text or "").split(by) if part.strip()]
    except ValueError:
        raise WrongUsage(f"{text!r} cannot be read", where=where, remedy="Give values between commas.") from None


def parse_count(text: str, where: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not name or not number.isdigit() or int(number) < 1:
        raise WrongUsage(f"{text!r} is no count of a path", where=where, remedy="Write amx=2.")
    return name, int(number)


def parse_class(text: str) -> "RequestClass":
    import math

    from latfit.workload import RequestClass

    name, *rest = text.split(":")
    try:
        share = float(rest[0])
    except (ValueError, IndexError):
        raise WrongUsage(f"{text!r} is no class", where="--class", remedy="Write chat:0.3:50ms.") from None
    deadline = parse_duration_ms(rest[1], option="--class") if len(rest) > 1 else math.inf
    return RequestClass(share, deadline, name)


def parse_law(text: str, rate: float) -> "ArrivalLaw":
    """A law of arrivals with a mean rate per ms."""
    from latfit.workload import Gamma, Poisson, bursts

    name, *rest = text.split(":")
    try:
        if name == "poisson" and not rest:
            return Poisson(rate)
        if name == "gamma" and len(rest) == 1:
            return Gamma(rate, float(rest[0]))
        if name == "bursts" and len(rest) == 3:
            return bursts(rate, float(rest[0]), float(rest[1]), parse_duration_ms(rest[2], option="--law"))
    except ValueError:
        pass
    except WrongUsage as error:
        raise WrongUsage(f"{text!r}: {error.found}", where="--law", remedy="Numbers of a law are above zero.") from None
    raise WrongUsage(
        f"{text!r} is no law of arrivals", where="--law", remedy="Write poisson, gamma:2 or bursts:4:0.1:1s."
    )


DEFAULT_POLICY = "gpu-only"
LOGGED = 1000
MOST_ROWS = 24
MOST_NOTES = 3


@verb
def simulate(
    policy_options: PolicyOptions = PolicyOptions(),
    load_options: LoadOptions = LoadOptions(),
    path_options: PathOptions = PathOptions(),
    run_options: RunOptions = RunOptions(),
    sweep_options: SweepOptions = SweepOptions(),
    engine_options: EngineOptions = EngineOptions(),
    cost_options: CostOptions = CostOptions(),
    order_options: OrderOptions = OrderOptions(),
    cluster_options: ClusterOptions = ClusterOptions(),
    tokens_per_request: TokensOption = None,
    study: Annotated[
        str | None, typer.Option("--study", help="A study of its own: policies, over rates up to what the GPU serves.")
    ] = None,
    hardware: HardwareOption = DEFAULT_HARDWARE,
    seed: SeedOption = 0,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Simulate batching policies against a load.

    Requests arrive and a policy puts them in batches on one or two execution paths. Policies are compared on the same
    random numbers. For example: latfit simulate --policy three-stage --policy fixed --rate 500/s
    With --engine a serving engine instead: latfit simulate --engine chunked-prefill --fit gpu.fit.json
    --kv-blocks 2588 --arrivals requests.csv
    """
    from latfit.cli.output import note

    if engine_options.engine:
        if policy_options.policy:
            raise WrongUsage(
                "a policy beside an engine", where="--policy", remedy="Leave one out: engines have --order."
            )
        from latfit.cli.simulate_engine import Asked, simulate_engine

        engine = (engine_options, cost_options, order_options, cluster_options)
        asked = Asked(
            *engine, load_options, run_options, hardware, path_options.service, policy_options.ageing, sweep_options
        )
        simulate_engine(asked, seed=seed, json=json, quiet=quiet)
        return
    load = load_options.load(sweep_options.varied()[0]) if study is None else None
    mean, longest = load_options.tokens(load, tokens_per_request)
    system = path_options.system(hardware, mean, longest)
    if tokens_per_request is None and not longest and not path_options.path:
        note("Each request adds one token to a batch (decode); --tokens-per-request changes that.", quiet=quiet or json)
    if study is not None:
        _study(study, system, run_options, sweep_options, seed=seed, json=json, quiet=quiet)
        return
    assert load is not None
    options = run_options.options(seed)
    points = _points(system, load, policy_options, load_options, sweep_options, options, quiet=quiet or json)
    if sweep_options.log is not None:
        from latfit.simulation import event_log, write_events

        first = points[0]
        write_events(sweep_options.log, event_log(first.policy, first.system, first.load, LOGGED, seed))
    runs = run_all(points, sweep_options, quiet=quiet or json)
    show(runs, sweep_options, json=json, quiet=quiet)
    if sweep_options.report is not None:
        _write_page(sweep_options.report, runs, system, options.sla_ms, quiet=quiet or json)
    if not any(run.stable for run in runs):
        raise SlaOutOfReach(
            "no policy carries this load: " + (*runs[0].notes, "unstable")[0],
            where="--rate",
            remedy="Lower the rate, add servers, or take a policy that uses both paths.",
        )


def run_all(points: "list[Point]", sweep_options: SweepOptions, *, quiet: bool) -> "list[SimResult]":
    """The results of all points, with a bar on the way."""
    from latfit.cli.output import progress_bar
    from latfit.simulation import Running, sweep

    if sweep_options.resume and sweep_options.out is None:
        raise WrongUsage("nothing to resume from", where="--resume", remedy="Name the table with --out.")
    sweep_options.check_targets()
    running = Running(sweep_options.workers, sweep_options.backend, sweep_options.scheduler)
    try:
        with progress_bar("Simulating", quiet=quiet) as advance:
            return sweep(points, running, out=sweep_options.out, resume=sweep_options.resume, progress=advance)
    except KeyboardInterrupt:
        if sweep_options.out is None:
            raise
        kept = f"--resume --out {sweep_options.out} goes on from there."
        raise Interrupted("interrupted; the runs so far are kept", where=str(sweep_options.out), remedy=kept) from None


def show(runs: "list[SimResult]", sweep_options: SweepOptions, *, json: bool, quiet: bool) -> None:
    """JSON, or the table with its notes; the picture where one is wanted."""
    from latfit.cli.output import note, print_json, print_table, print_warnings

    if sweep_options.figure is not None:
        from latfit.files import write_bytes
        from latfit.report import runs_figure, style

        write_bytes(sweep_options.figure, style.png(runs_figure(runs)))
    if json:
        print_json({"runs": [run.to_json() for run in runs]})
    else:
        from latfit.report import differences, rates_table, runs_table

        short = len(runs) <= MOST_ROWS
        print_table(runs_table(runs) if short else rates_table(runs))
        for text in differences(runs) if short else ():
            typer.echo(f"  {text}")
        notes = list(dict.fromkeys(text for run in runs for text in run.notes))
        print_warnings(notes[:MOST_NOTES])
        if len(notes) > MOST_NOTES:
            print_warnings([f"and {len(notes) - MOST_NOTES} more; --json shows them all."])
    for written in filter(None, (sweep_options.out, sweep_options.figure, sweep_options.log)):
        note(f"Wrote {written}", quiet=quiet or json)


def solve_optimal(rate: float, T_ms: "FloatArray") -> "DispatchTable":
    """The optimal table for a main path."""
    from latfit.queueing import measured_times, optimal_rule

    return optimal_rule(rate, measured_times(T_ms)).table


def _points(
    system: "System",
    load: "Load",
    policy_options: PolicyOptions,
    load_options: LoadOptions,
    sweep_options: SweepOptions,
    options: Any,
    *,
    quiet: bool,
) -> "list[Point]":
    from latfit.cli.output import note
    from latfit.simulation import Grid, points_of

    rates, varied = sweep_options.varied()
    names = policy_options.policy or [DEFAULT_POLICY]
    grid = Grid(names, rates or load_options.rates(), varied, policy_options.settings())
    skipped: list[SlaOutOfReach] = []
    points = points_of(grid, system, load, options, solve=solve_optimal, skipped=skipped)
    if not points:
        raise skipped[0]
    for text in dict.fromkeys(error.found for error in skipped):
        note(f"Left out a point of the optimal policy: {text}", quiet=quiet)
    return points


def _study(
    name: str,
    system: "System",
    run_options: RunOptions,
    sweep_options: SweepOptions,
    *,
    seed: int,
    json: bool,
    quiet: bool,
) -> None:
    """Run a study, with its findings below the table."""
    from latfit.cli.output import print_json
    from latfit.simulation import findings, policy_points, serving_study

    if name != "policies":
        raise WrongUsage(f"there is no study {name!r}", where="--study", remedy="Take policies.")
    points = policy_points(system, run_options.options(seed), solve_optimal)
    runs = run_all(points, sweep_options, quiet=quiet or json)
    served = serving_study(system.main, seed)
    found = [*findings(runs, system, points[0].options.sla_ms), *served.findings]
    if sweep_options.report is not None:
        claims = [(each.claim, each.found) for each in found]
        _write_page(sweep_options.report, runs, system, points[0].options.sla_ms, claims, quiet=quiet or json)
    if json:
        print_json(
            {
                "runs": [*(each.to_json() for each in runs), *(each.to_json() for each in served.runs)],
                "findings": [{"claim": each.claim, "found": each.found} for each in found],
            }
        )
        return
    show(runs, sweep_options, json=False, quiet=quiet)
    for each in found:
        typer.echo(f"\n{each.claim}\n  {each.found}")


def _write_page(
    folder: Path,
    runs: "list[SimResult]",
    system: "System",
    sla_ms: float,
    findings: Sequence[tuple[str, str]] = (),
    *,
    quiet: bool,
) -> None:
    from latfit.cli.output import note
    from latfit.provenance import command_line, utc_now
    from latfit.report import Making, policies_page, write_page

    made = Making(command_line(), utc_now(), sla_ms)
    note(f"Wrote {write_page(folder, policies_page(runs, system, made, findings)).html}", quiet=quiet)
