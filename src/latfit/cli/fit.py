"""`latfit fit`: fit and check a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from latfit.cli.fit_jobs import Job, plan_jobs
from latfit.cli.fit_options import parse_fixed, parse_ranges
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
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="saturation, saturation-gamma, context, roofline, linear, quadratic, hinge or constant, each also with"
            " +moe; or auto, which chooses by cross-validation.",
        ),
    ] = "saturation",
    loss: Annotated[str, typer.Option("--loss", help="huber, soft_l1, tukey or linear.")] = "huber",
    residuals: Annotated[
        str, typer.Option("--residuals", help="relative (log of predicted/observed) or absolute (ms).")
    ] = "relative",
    fix: Annotated[list[str] | None, typer.Option("--fix", help="Hold a parameter: P_max=60. Repeatable.")] = None,
    bounds: Annotated[
        list[str] | None, typer.Option("--bounds", help="Bound a parameter: k_B=0.01:1. Repeatable.")
    ] = None,
    prior: Annotated[
        list[str] | None,
        typer.Option("--prior", help="What is known of a parameter: P_max=60:5 (mean:sd). Repeatable."),
    ] = None,
    weights: Annotated[
        str, typer.Option("--weights", help="What counts the same: rows, segment (doublings of S) or variance (cells).")
    ] = "rows",
    solver: Annotated[
        str, typer.Option("--solver", help="separable, or trf: plain SciPy from several starts.")
    ] = "separable",
    intervals: Annotated[
        str,
        typer.Option(
            "--intervals",
            help="Intervals of the parameters from: sandwich (their covariance), profile (the cost itself; slow) or"
            " bootstrap (resampled fits).",
        ),
    ] = "sandwich",
    bootstrap: Annotated[
        int, typer.Option("--bootstrap", help="Resample the steps so many times, such as 1000, and keep the outcome.")
    ] = 0,
    resample: Annotated[
        str,
        typer.Option(
            "--resample", help="What --bootstrap draws: rows, block (of time), residual; auto is block or rows."
        ),
    ] = "auto",
    each: Annotated[
        bool, typer.Option("--each", help="Fit every system (hardware, model, tp) in the file by itself.")
    ] = False,
    typed: ReadingOptions = ReadingOptions(),
    path: Annotated[
        str | None, typer.Option("--path", help="Execution path of a trace that names none: cpu, amx, gpu, ...")
    ] = None,
    hardware: HardwareOption = DEFAULT_HARDWARE,
    out: Annotated[
        Path | None, typer.Option("--out", help="The fit file; without it NAME.fit.json in this folder.")
    ] = None,
    report_folder: Annotated[
        Path | None, typer.Option("--report", help="Also write the report into this folder.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 4 when the fit has warnings.")] = False,
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
    print_table(tables.parameters(result))
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
