"""`latfit fit`: fit and check a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from latfit.cli.fit_jobs import Job, plan_jobs
from latfit.cli.fit_options import (
    BootstrapOption,
    BoundsOption,
    EachOption,
    FixOption,
    IntervalsOption,
    LossOption,
    ModelOption,
    OutOption,
    PathOption,
    PriorOption,
    ReportOption,
    ResampleOption,
    ResidualsOption,
    SolverOption,
    StrictOption,
    WeightsOption,
    parse_fixed,
    parse_ranges,
)
from latfit.cli.options import (
    DEFAULT_HARDWARE,
    HardwareOption,
    JsonOption,
    QuietOption,
    SeedOption,
    SourcesArgument,
)
from latfit.cli.reading import ReadingOptions, data_line, read_sources, reads_traces
from latfit.errors import FitNotUsable

if TYPE_CHECKING:
    from latfit.fit import DoubtOptions, FitOptions
    from latfit.model.result import FitResult
    from latfit.trace.ingest import Ingested


@reads_traces
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
    from latfit.fit import DoubtOptions, FitOptions

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


def _fit_job(ingested: "Ingested", job: Job, options: "FitOptions", doubt: "DoubtOptions") -> "FitResult":
    from latfit.fit import fit_trace
    from latfit.provenance import run_facts
    from latfit.trace.ingest import data_facts

    origin = {**run_facts(options.seed), "trace": dict(ingested.trace.provenance)}
    facts = data_facts(ingested, job.system, job.rows)
    return fit_trace(job.rows, options, doubt=doubt, data=facts, provenance=origin)


def _check_targets(jobs: list[Job], hardware: Path) -> None:
    """Unwritable targets and a broken hardware profile are found before the work, not after it."""
    from latfit.files import check_writable
    from latfit.hardware.profile import read_hardware

    for job in jobs:
        check_writable(job.target)
    check_writable(hardware)
    if hardware.exists():
        read_hardware(hardware)


def _store(result: "FitResult", job: Job, hardware: Path) -> None:
    from latfit.hardware.profile import ExecutionPath, add_path
    from latfit.model.result import write_fit

    if result.status.ok:
        write_fit(job.target, result)
        if job.path is not None:
            add_path(hardware, ExecutionPath(job.path, result))


def _print_json(results: Mapping[str, "FitResult"]) -> None:
    from latfit.cli.output import print_json

    documents = {label: result.to_json() for label, result in results.items()}
    print_json(next(iter(documents.values())) if len(documents) == 1 else {"fits": documents})


def _print_result(result: "FitResult", job: Job, hardware: Path) -> None:
    from latfit.cli.output import print_cautions, print_table
    from latfit.report import results, tables

    if job.label:
        typer.echo(f"\n{job.label}")
    typer.echo(data_line(result.data))
    if not result.status.ok:
        return
    typer.echo(tables.trust_sentence(result))
    typer.echo(result.status.sentence)
    print_table(tables.parameters(result, short=True))
    print_table(tables.errors(result).only("model", "steps", "median", "mean", "mean, unseen steps", "R²"))
    if result.bootstrap:
        print_table(results.bootstrap_table(result))
    print_cautions((warning.message, warning.remedy) for warning in result.warnings)
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
