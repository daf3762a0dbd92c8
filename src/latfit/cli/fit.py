"""`latfit fit`: fit a model to traces and check it: one fit a system, with its execution path and its file.

What users say of parameters is read here: fixed values, ranges and priors by name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from latfit.cli.options import (
    DEFAULT_HARDWARE,
    HardwareOption,
    JsonOption,
    QuietOption,
    ReadingOptions,
    SeedOption,
    SourcesArgument,
    data_line,
    read_sources,
    verb,
)
from latfit.errors import FitNotUsable, WrongUsage

if TYPE_CHECKING:
    from latfit.fitting import DoubtOptions, FitOptions
    from latfit.model import FitResult
    from latfit.trace import CleanTrace, Trace


ASSUMED_PATH = "gpu"
"""Steps that say nothing of where they ran come from an engine's log, and engines run on GPUs."""


@dataclass(frozen=True)
class Job:
    """One system to fit: its identity (empty where the file holds one), rows, execution path, and where the fit goes.

    path is None where the fit belongs to no machine's profile; assumed: nobody said which path it is.
    """

    system: Mapping[str, str]
    rows: "Trace"
    path: str | None
    target: Path
    assumed: bool

    @property
    def label(self) -> str:
        return ".".join(_file_safe(value) for value in self.system.values())


def plan_jobs(ingested: "CleanTrace", *, each: bool, path: str | None, out: Path | None) -> list[Job]:
    """The systems of a trace: one a path; several of hardware, model or tp only with --each."""
    from latfit.trace import check_one_machine

    if not each:
        check_one_machine(ingested)
    systems = list(ingested.trace.systems())
    several_machines = any(set(system) - {"path"} for system, _ in systems) and each
    jobs = []
    for system, rows in systems:
        named = str(rows["path"][0]) if "path" in rows else path or ingested.path
        entered = None if several_machines else named or ASSUMED_PATH
        jobs.append(Job(system, rows, entered, Path(), assumed=named is None))
    named_after = Path(f"{_without_endings(ingested.sources[0].name) or 'trace'}.fit.json")
    return [replace(job, target=_target(out or named_after, job.label)) for job in jobs]


def _without_endings(source: str) -> str:
    """The name of a source without its format and compression; other dots are its own: llama-3.1-8b.csv.gz."""
    file = Path(source)
    return Path(file.stem).stem if file.suffix in (".gz", ".zst") else file.stem


def _target(out: Path, label: str) -> Path:
    """NAME.fit.json, or NAME.LABEL.fit.json where a file holds several systems."""
    if not label:
        return out
    return out.with_name(f"{out.name.removesuffix('.json').removesuffix('.fit')}.{label}.fit.json")


def _file_safe(value: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in value) or "unnamed"


ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        help="saturation, saturation-gamma, context, roofline, linear, quadratic, hinge or constant, each also with"
        " +moe; or auto, which chooses by cross-validation.",
    ),
]
LossOption = Annotated[str, typer.Option("--loss", help="huber, soft_l1, tukey or linear.")]
ResidualsOption = Annotated[
    str, typer.Option("--residuals", help="relative (log of predicted/observed) or absolute (ms).")
]
FixOption = Annotated[list[str] | None, typer.Option("--fix", help="Hold a parameter: P_max=60. Repeatable.")]
BoundsOption = Annotated[list[str] | None, typer.Option("--bounds", help="Bound a parameter: k_B=0.01:1. Repeatable.")]
PriorOption = Annotated[
    list[str] | None,
    typer.Option("--prior", help="What is known of a parameter: P_max=60:5 (mean:sd). Repeatable."),
]
WeightsOption = Annotated[
    str, typer.Option("--weights", help="What counts the same: rows, segment (doublings of S) or variance (cells).")
]
SolverOption = Annotated[str, typer.Option("--solver", help="separable, or trf: plain SciPy from several starts.")]
IntervalsOption = Annotated[
    str,
    typer.Option(
        "--intervals",
        help="Intervals of the parameters from: sandwich (their covariance), profile (the cost itself; slow) or"
        " bootstrap (resampled fits, 1000 unless --bootstrap says how many).",
    ),
]
BootstrapOption = Annotated[
    int, typer.Option("--bootstrap", help="Refit so many resamples of the steps, such as 1000, and keep them.")
]
ResampleOption = Annotated[
    str,
    typer.Option("--resample", help="What --bootstrap draws: rows, block (of time), residual; auto is block or rows."),
]
EachOption = Annotated[
    bool, typer.Option("--each", help="Fit every system (hardware, model, tp) in the file by itself.")
]
PathOption = Annotated[
    str | None, typer.Option("--path", help="Execution path of a trace that names none: cpu, amx, gpu, ...")
]
OutOption = Annotated[Path | None, typer.Option("--out", help="The fit file; without it NAME.fit.json in this folder.")]
ReportOption = Annotated[Path | None, typer.Option("--report", help="Also write the report into this folder.")]
StrictOption = Annotated[bool, typer.Option("--strict", help="Exit with 4 when the fit has warnings.")]


def parse_fixed(texts: list[str]) -> dict[str, float]:
    """{parameter: value} from `P_max=60`. Raises WrongUsage."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        _check_once(name, found, "--fix")
        found[name] = _number(value, text, "--fix", "P_max=60")
    return found


def _check_once(name: str, found: Mapping[str, object], option: str) -> None:
    if name in found:
        raise WrongUsage(f"{name} is given twice", where=option, remedy="Give it once.")


def parse_ranges(texts: list[str], option: str) -> dict[str, tuple[float, float]]:
    """{parameter: two numbers} from `k_B=0.01:1`: low and high of --bounds, mean and spread of --prior.

    Raises WrongUsage.
    """
    found: dict[str, tuple[float, float]] = {}
    for text in texts:
        name, _, span = text.partition("=")
        first, _, second = span.partition(":")
        example = "k_B=0.01:1" if option == "--bounds" else "P_max=60:5 (mean and standard deviation)"
        ends = (_number(first, text, option, example), _number(second, text, option, example))
        orderly = ends[0] < ends[1] if option == "--bounds" else ends[1] > 0
        if not (0 <= ends[0] < math.inf and 0 < ends[1] < math.inf and orderly):
            wanted = "low:high with 0 <= low < high" if option == "--bounds" else "mean:sd, the sd above zero"
            raise WrongUsage(f"{text!r} cannot be used", where=option, remedy=f"Give {wanted}.")
        _check_once(name, found, option)
        found[name] = ends
    return found


def _number(value: str, text: str, option: str, example: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise WrongUsage(f"{text!r} cannot be read", where=option, remedy=f"Write it like {example}.") from None


@verb
def fit(
    trace: SourcesArgument,
    model: ModelOption = "saturation",
    loss: LossOption = "huber",
    residuals: ResidualsOption = "relative",
    fix: FixOption = None,
    bounds: BoundsOption = None,
    prior: PriorOption = None,
    weights: WeightsOption = "rows",
    solver: SolverOption = "separable",
    intervals: IntervalsOption = "sandwich",
    bootstrap: BootstrapOption = 0,
    resample: ResampleOption = "auto",
    each: EachOption = False,
    typed: ReadingOptions = ReadingOptions(),
    path: PathOption = None,
    hardware: HardwareOption = DEFAULT_HARDWARE,
    out: OutOption = None,
    report_folder: ReportOption = None,
    strict: StrictOption = False,
    seed: SeedOption = 0,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Fit a latency model to a trace and check it.

    Writes NAME.fit.json and enters the fit into the hardware profile.
    """
    from latfit.cli.output import progress_bar
    from latfit.fitting import DoubtOptions, FitOptions

    options = FitOptions(
        model,
        loss,
        residuals,
        parse_fixed(fix or []),
        parse_ranges(bounds or [], "--bounds"),
        seed=seed,
        solver=solver,
        priors=parse_ranges(prior or [], "--prior"),
        weights=weights,
    )
    ingested = read_sources(trace, typed, quiet=quiet or json)
    jobs = plan_jobs(ingested, each=each, path=path, out=out)
    _check_targets(jobs, hardware)
    with progress_bar("Fitting", quiet=quiet or json) as advance:
        doubt = DoubtOptions(intervals, bootstrap, resample, advance)
        results = {job.label: _fit_job(ingested, job, options, doubt) for job in jobs}
    for job in jobs:
        _store(results[job.label], job, hardware)
    if json:
        _print_json(results)
    else:
        for job in jobs:
            _print_result(results[job.label], job, hardware)
    if report_folder is not None:
        from latfit.cli.report import write_report

        write_report(hardware, folder=report_folder, quiet=quiet or json)
    _raise_where_unusable(results, strict=strict, where=ingested.name)


def _fit_job(ingested: "CleanTrace", job: Job, options: "FitOptions", doubt: "DoubtOptions") -> "FitResult":
    from latfit.fitting import fit_trace
    from latfit.provenance import run_facts
    from latfit.trace import data_facts

    origin = {**run_facts(options.seed), "trace": dict(ingested.trace.provenance)}
    facts = data_facts(ingested, job.system, job.rows)
    return fit_trace(job.rows, options, doubt=doubt, data=facts, provenance=origin)


def _check_targets(jobs: list[Job], hardware: Path) -> None:
    """Unwritable targets and a broken hardware profile are found before the work, not after it."""
    from latfit.files import check_writable
    from latfit.hardware import read_hardware

    for job in jobs:
        check_writable(job.target)
    check_writable(hardware)
    if hardware.exists():
        read_hardware(hardware)


def _store(result: "FitResult", job: Job, hardware: Path) -> None:
    from latfit.hardware import ExecutionPath, add_path
    from latfit.model import write_fit

    if result.status.ok:
        write_fit(job.target, result)
        if job.path is not None:
            add_path(hardware, ExecutionPath(job.path, result))


def _print_json(results: Mapping[str, "FitResult"]) -> None:
    from latfit.cli.output import print_json

    documents = {label: result.to_json() for label, result in results.items()}
    print_json(next(iter(documents.values())) if len(documents) == 1 else {"fits": documents})


def _print_result(result: "FitResult", job: Job, hardware: Path) -> None:
    from latfit.cli.output import print_table, print_warnings
    from latfit.report import tables, tables as results

    if job.label:
        typer.echo(f"\n{job.label}")
    typer.echo(data_line(result.data.to_json()))
    if not result.status.ok:
        return
    typer.echo(tables.trust_sentence(result))
    typer.echo(result.status.sentence)
    print_table(tables.parameters(result, short=True))
    print_table(tables.errors(result).only("model", "steps", "median error", "MAPE", "cross-validated MAPE", "R²"))
    if result.bootstrap:
        print_table(results.bootstrap_table(result))
    print_warnings(result.warnings)
    typer.echo(f"Wrote {job.target}.")
    if job.path is None:
        typer.echo(f"Not entered into {hardware}: the systems of --each are not paths of one machine.")
        return
    assumed = " (assumed; say --path cpu if it is not)" if job.assumed else ""
    typer.echo(f"Entered into {hardware} as path {job.path}{assumed}. Next: latfit plan --sla 20ms")


def _raise_where_unusable(results: Mapping[str, "FitResult"], *, strict: bool, where: str) -> None:
    for label, result in results.items():
        place = f"{where} ({label})" if label else where
        if not result.status.ok:
            raise FitNotUsable(result.status.sentence, where=place, remedy=result.status.remedy)
        if strict and result.warnings:
            raise FitNotUsable(f"--strict: {result.warnings[0].message}", where=place, remedy=result.warnings[0].remedy)
