"""`latfit profile`: measures real kernels on this machine and writes a trace."""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from latfit.cli.options import JsonOption, QuietOption, SeedOption
from latfit.cli.output import note, print_json, print_warnings
from latfit.errors import Interrupted, LatfitError, WrongUsage
from latfit.units import format_ms, parse_duration_ms

if TYPE_CHECKING:
    from latfit.profiling import Announcement, Journal, PathOutcome, ProfileRequest, ProfileResult, Progress, Surface
    from latfit.trace import Trace


GridOption = Annotated[
    str | None,
    typer.Option(
        help="Cells to measure, such as 'B=1,2,4,8;S=1,16,64,256': every pair with S >= B. Where S = B all decode; "
        "else one request prefills S - B + 1 tokens beside B - 1 that decode. Default: as many as fit the budget."
    ),
]


ADAPTIVE_MODEL = "context"
"""What the adaptive design fits on the way: the structure that reads everything the profiler varies."""


def profile(
    device: Annotated[
        str, typer.Option(help="auto, numpy, openvino, torch-cpu or torch-cuda; auto is all that is there.")
    ] = "auto",
    isa: Annotated[str, typer.Option(help="Cap the instruction set: auto, amx, avx512_bf16, avx512 or avx2.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, bf16, fp16, fp32 or int8; auto is bf16 where it is fast.")] = "auto",
    model: Annotated[
        str,
        typer.Option(help="A preset (tiny, smollm2-135m, ..., llama-3.1-8b) or a HuggingFace config.json."),
    ] = "tiny",
    layers: Annotated[int | None, typer.Option(help="Measure only so many of the model's layers.")] = None,
    kernel: Annotated[
        str, typer.Option(help="step: all of it; gemm: products with weights only; attention: over the cache only.")
    ] = "step",
    engine: Annotated[
        str, typer.Option(help="kernels, or transformers: HuggingFace's continuous batching on a random model.")
    ] = "kernels",
    grid: GridOption = None,
    context: Annotated[
        str, typer.Option(help="Cached tokens of a decode request, one number or several: 128,512.")
    ] = "256",
    history: Annotated[
        str, typer.Option(help="Cached tokens before a prefill chunk, one number or several: 0,1024.")
    ] = "0",
    cache: Annotated[str, typer.Option(help="warm, or cold: caches are flushed before every step.")] = "warm",
    threads: Annotated[int | None, typer.Option(help="Threads; default: the CPUs that are idle.")] = None,
    pin: Annotated[str | None, typer.Option(help="CPUs to stay on: 0,2-5.")] = None,
    processes: Annotated[
        int | None, typer.Option(help="Processes that take turns; default: 3 where memory and budget allow.")
    ] = None,
    graphs: Annotated[bool, typer.Option(help="Record GPU steps as CUDA graphs.")] = True,
    budget: Annotated[
        str | None, typer.Option(help="Time to spend, such as 60s or 5min; 60s where nothing is said.")
    ] = None,
    design: Annotated[
        str,
        typer.Option(
            help="adaptive: measure next what tells the model most; grid: every cell in rounds. auto is adaptive where "
            "a budget and no grid is given."
        ),
    ] = "auto",
    precision: Annotated[
        float, typer.Option(help="Stop early once every median is known this well (95 % interval).")
    ] = 0.03,
    out: Annotated[Path, typer.Option(help="Trace to write.")] = Path("trace.parquet"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was interrupted or killed.")] = False,
    seed: SeedOption = 0,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Measure steps of a transformer on this machine and write a trace.

    Every sample is kept. Ctrl-C keeps what was measured, and --resume goes on from there.
    """
    from latfit.files import check_writable
    from latfit.trace import check_trace_name

    budget_ms = parse_duration_ms(budget or "60s", option="--budget")
    check_trace_name(out)
    check_writable(out)

    from latfit.profiling import Journal, ProfileRequest, journal_of, parse_contexts, parse_cpus

    request = ProfileRequest(
        device=device,
        isa=isa,
        dtype=dtype,
        model=model,
        layers=layers,
        part=kernel,
        engine=engine,
        grid=grid,
        contexts=parse_contexts(context),
        histories=parse_contexts(history, option="--history"),
        cache=cache,
        threads=threads,
        pin=parse_cpus(pin),
        processes=processes,
        graphs=graphs,
        budget_ms=budget_ms,
        design=("adaptive" if budget and not grid else "grid") if design == "auto" else design,
        precision=precision,
        seed=seed,
    )
    request.check()
    if resume and engine != "kernels":
        raise WrongUsage("an engine's run cannot be continued", where="--resume", remedy="Start it anew without it.")
    journal = Journal(journal_of(out), request, resume=resume)
    try:
        trace, outcomes = _measured(request, journal, quiet=quiet)
        _store(out, trace, outcomes)
    except BaseException:
        journal.close(finished=not any(record.samples for record in journal.paths.values()), stored=False)
        raise
    journal.close(finished=outcomes[-1].result.stop in ("precise", "budget"))
    if json:
        print_json(_summary(out, outcomes))
    else:
        _print(out, outcomes)
    _raise_if_stopped(out, outcomes)


def _measured(request: "ProfileRequest", journal: "Journal", *, quiet: bool) -> "tuple[Trace, tuple[PathOutcome, ...]]":
    from latfit.profiling import Listeners, measure

    def announce(what: "Announcement") -> None:
        threads = f" with {what.threads} threads" if what.threads else ""
        turns = f" in {what.processes} processes" if what.processes > 1 else ""
        budget = format_ms(request.budget_ms)
        cells = f"{what.cells} cells" if what.cells else "steps"
        note(f"Measuring {cells} of {what.model} on {what.device}{threads}{turns}, {budget}.", quiet=quiet)

    try:
        with _progress_bar(request.budget_ms / 1e3, shown=not quiet and sys.stderr.isatty()) as progress:
            return measure(request, listeners=Listeners(progress, announce), journal=journal, refit=_refit)
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted before the first step", remedy="Nothing was measured, nothing was written."
        ) from None


def _refit(cells: "Trace") -> "Surface | None":
    """The fit that the adaptive design asks for; fitting and profiling know nothing of each other."""
    from latfit.fitting import solved
    from latfit.profiling import Surface

    found = solved(cells, ADAPTIVE_MODEL)
    return Surface(*found) if found else None


@contextmanager
def _progress_bar(budget_s: float, *, shown: bool) -> "Iterator[Callable[[Progress], None] | None]":
    """A bar on stderr with the time left of the budget."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress as Bar, TextColumn

    columns = (
        BarColumn(),
        TextColumn("{task.fields[left]} left, {task.fields[done]} cells known, {task.fields[samples]} samples"),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=budget_s, left=format_ms(budget_s * 1e3), done="0", samples=0)

        def update(now: "Progress") -> None:
            left_s = max(0.0, now.budget_s - now.elapsed_s)
            bar.update(
                task,
                completed=budget_s - left_s,
                left=f"{left_s:.0f} s",
                done=f"{now.cells_done} of {now.cells}",
                samples=now.samples,
            )

        yield update


def _store(out: Path, trace: "Trace", outcomes: "Sequence[PathOutcome]") -> None:
    """Write the trace; a second Ctrl-C must not undo what the first one was promised to keep."""
    from latfit.trace import write_trace

    if not len(trace):
        raise _nothing_measured(outcomes[0].result)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        write_trace(out, trace)
    finally:
        signal.signal(signal.SIGINT, before)


def _nothing_measured(result: "ProfileResult") -> LatfitError:
    if result.interrupted:
        return Interrupted("interrupted before the first step", remedy="Nothing was measured, nothing was written.")
    if result.limits:
        return WrongUsage(
            f"no cell fits in memory; {result.limits[0].message}", where="--grid", remedy="Ask for smaller steps."
        )
    return WrongUsage(
        "the time was over before the first step could be measured",
        where="--budget",
        remedy="Give more time: 60s is the default.",
    )


def _summary(out: Path, outcomes: "Sequence[PathOutcome]") -> dict[str, Any]:
    """The whole run, and each path by itself under `paths`."""
    parts = [_path_summary(outcome) for outcome in outcomes]
    counts = ("rows", "cells", "cells_within_precision", "elapsed_s")
    return {
        "out": str(out),
        **{key: sum(part[key] for part in parts) for key in counts},
        "interrupted": any(outcome.result.interrupted for outcome in outcomes),
        "warnings": [each for part in parts for each in part["warnings"]],
        "limits": [each for part in parts for each in part["limits"]],
        "paths": {outcome.path: part for outcome, part in zip(outcomes, parts, strict=True)},
    }


def _path_summary(outcome: "PathOutcome") -> dict[str, Any]:
    result = outcome.result
    between = result.between_processes
    return {
        "device": outcome.device,
        "rows": len(result.samples),
        "cells": sum(result.measured),
        "cells_within_precision": sum(result.within_precision),
        "elapsed_s": round(result.elapsed_s, 3),
        "between_processes": between.as_json() if between else None,
        "prediction_half_width_pct": None if (width := result.prediction_half_width) is None else 100 * width,
        "warnings": [warning.to_json() for warning in result.warnings],
        "limits": [limit.as_json() for limit in result.limits],
    }


def _print(out: Path, outcomes: "Sequence[PathOutcome]") -> None:
    for outcome in outcomes:
        _print_path(outcome.result, f"{outcome.path}: " if len(outcomes) > 1 else "")
    typer.echo(f"Wrote {out}. Next: latfit fit {out}")


def _print_path(result: "ProfileResult", prefix: str) -> None:
    medians = [interval.median for interval, there in zip(result.intervals, result.measured, strict=True) if there]
    known = (
        f"{sum(result.within_precision)} of {sum(result.measured)} cells known within ±{100 * result.precision:.3g} %"
    )
    if (width := result.prediction_half_width) is not None:
        known = (
            f"{sum(result.measured)} of {len(result.cells)} cells measured, all predicted within ±{100 * width:.1f} %"
        )
    typer.echo(f"{prefix}{len(result.samples)} steps in {format_ms(result.elapsed_s * 1e3)}; {known}.")
    if medians:
        typer.echo(f"Median step times run from {format_ms(min(medians))} to {format_ms(max(medians))}.")
    if between := result.between_processes:
        typer.echo(
            f"Between {between.processes} processes medians move by {100 * between.sd:.1f} %, "
            f"so a step's time is known within ±{100 * between.half_width:.1f} % (95 %)."
        )
    for limit in result.limits:
        typer.echo(f"Not measured: {limit.cell}: {limit.message}.")
    print_warnings(result.warnings)


def _raise_if_stopped(out: Path, outcomes: "Sequence[PathOutcome]") -> None:
    last = outcomes[-1].result
    steps = sum(len(outcome.result.samples) for outcome in outcomes)
    if last.interrupted:
        raise Interrupted(
            f"interrupted after {format_ms(sum(outcome.result.elapsed_s for outcome in outcomes) * 1e3)}",
            remedy=f"What was measured until then ({steps} steps) is kept in {out}; --resume goes on.",
        )
    if last.stop == "device_failed":
        failure = next(warning for warning in last.warnings if warning.code == "device_failed")
        raise LatfitError(failure.message, remedy=f"{failure.remedy} What was measured before is kept in {out}.")
