"""`latfit profile`: measures real kernels on this machine and writes a trace."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from latfit.cli.options import JsonOption, QuietOption, SeedOption
from latfit.cli.output import note, print_cautions, print_json
from latfit.errors import Interrupted, LatfitError, WrongUsage
from latfit.units import format_ms, parse_duration_ms

if TYPE_CHECKING:
    from latfit.profiler.measure import Announcement, ProfileRequest
    from latfit.profiler.record import ProfileResult
    from latfit.profiler.runner import Progress
    from latfit.trace.table import Trace

GridOption = Annotated[
    str | None,
    typer.Option(
        help="Cells to measure, such as 'B=1,2,4,8;S=1,16,64,256': every pair with S >= B. Where S = B all decode; "
        "else one request prefills S - B + 1 tokens beside B - 1 that decode. Default: as many as fit the budget."
    ),
]


def profile(
    device: Annotated[
        str, typer.Option(help="auto, numpy, openvino, torch-cpu or torch-cuda; auto is what is there.")
    ] = "auto",
    isa: Annotated[str, typer.Option(help="Cap the instruction set: auto, amx, avx512_bf16, avx512 or avx2.")] = "auto",
    model: Annotated[
        str,
        typer.Option(help="A preset (tiny, smollm2-135m, ..., llama-3.2-1b) or a HuggingFace config.json."),
    ] = "tiny",
    layers: Annotated[int | None, typer.Option(help="Measure only so many of the model's layers.")] = None,
    grid: GridOption = None,
    context: Annotated[
        str, typer.Option(help="Cached tokens of a decode request, one number or several: 128,512.")
    ] = "256",
    threads: Annotated[int | None, typer.Option(help="BLAS threads; default: the CPUs this process may use.")] = None,
    budget: Annotated[str, typer.Option(help="Time to spend, such as 60s or 5min.")] = "60s",
    precision: Annotated[
        float, typer.Option(help="Stop early once every median is known this well (95 % interval).")
    ] = 0.03,
    out: Annotated[Path, typer.Option(help="Trace to write.")] = Path("trace.parquet"),
    seed: SeedOption = 0,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Measure steps of a transformer on this machine and write a trace.

    Every sample is kept. Ctrl-C keeps what was measured.
    """
    from latfit.files import check_writable
    from latfit.profiler.isa import ask_blas_for

    budget_ms = parse_duration_ms(budget, option="--budget")
    check_writable(out)
    ask_blas_for(isa)  # before anything loads NumPy

    from latfit.profiler.design import parse_contexts
    from latfit.profiler.measure import ProfileRequest

    request = ProfileRequest(
        device=device,
        isa=isa,
        model=model,
        layers=layers,
        grid=grid,
        contexts=parse_contexts(context),
        threads=threads,
        budget_ms=budget_ms,
        precision=precision,
        seed=seed,
    )
    trace, result = _measured(request, quiet=quiet)
    _store(out, trace, result)
    if json:
        print_json(_summary(out, result))
    else:
        _print(out, result)
    _raise_if_stopped(out, result)


def _measured(request: "ProfileRequest", *, quiet: bool) -> "tuple[Trace, ProfileResult]":
    from latfit.profiler.measure import measure

    def announce(what: "Announcement") -> None:
        threads = f" with {what.threads} threads" if what.threads else ""
        budget = format_ms(request.budget_ms)
        note(f"Measuring {what.cells} cells of {what.model} on {what.device}{threads}, {budget}.", quiet=quiet)

    try:
        with _progress_bar(request.budget_ms / 1e3, shown=not quiet and sys.stderr.isatty()) as progress:
            return measure(request, progress=progress, announce=announce)
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted before the first step", remedy="Nothing was measured, nothing was written."
        ) from None


@contextmanager
def _progress_bar(budget_s: float, *, shown: bool) -> "Iterator[Callable[[Progress], None] | None]":
    """A bar on stderr with the time left of the budget."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

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


def _store(out: Path, trace: "Trace", result: "ProfileResult") -> None:
    """Write the trace; a second Ctrl-C must not undo what the first one was promised to keep."""
    from latfit.trace.store import write_trace

    if not result.samples:
        raise _nothing_measured(result)
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


def _summary(out: Path, result: "ProfileResult") -> dict[str, Any]:
    return {
        "out": str(out),
        "rows": len(result.samples),
        "cells": sum(result.measured),
        "cells_within_precision": sum(result.within_precision),
        "elapsed_s": round(result.elapsed_s, 3),
        "interrupted": result.interrupted,
        "warnings": [doubt.as_json() for doubt in result.doubts],
        "limits": [limit.as_json() for limit in result.limits],
    }


def _print(out: Path, result: "ProfileResult") -> None:
    medians = [interval.median for interval, there in zip(result.intervals, result.measured, strict=True) if there]
    known = (
        f"{sum(result.within_precision)} of {sum(result.measured)} cells known within ±{100 * result.precision:.3g} %"
    )
    typer.echo(f"{len(result.samples)} steps in {format_ms(result.elapsed_s * 1e3)}; {known}.")
    if medians:
        typer.echo(f"Median step times run from {format_ms(min(medians))} to {format_ms(max(medians))}.")
    for limit in result.limits:
        typer.echo(f"Not measured: {limit.cell}: {limit.message}.")
    print_cautions((doubt.message, doubt.remedy) for doubt in result.doubts)
    typer.echo(f"Wrote {out}. Next: latfit fit {out}")


def _raise_if_stopped(out: Path, result: "ProfileResult") -> None:
    if result.interrupted:
        raise Interrupted(
            f"interrupted after {format_ms(result.elapsed_s * 1e3)}",
            remedy=f"What was measured until then ({len(result.samples)} steps) is kept in {out}.",
        )
    if result.stop == "device_failed":
        failure = next(doubt for doubt in result.doubts if doubt.code == "device_failed")
        raise LatfitError(failure.message, remedy=f"{failure.remedy} What was measured before is kept in {out}.")
