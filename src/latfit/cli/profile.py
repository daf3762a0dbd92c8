"""`latfit profile`: measures steps on this machine and writes a trace."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import typer

from latfit.cli.options import OutputOptions, SeedOption, verb
from latfit.cli.output import echo, note, print_json, print_warnings, say, verdict
from latfit.errors import Interrupted, LatfitError
from latfit.units import format_ms, parse_duration_ms

if TYPE_CHECKING:
    from latfit.api import Profile
    from latfit.profiling import Announcement, Progress

DEFAULT_BUDGET = "60s"
MOST_WARNINGS = 3


@dataclass(frozen=True)
class DeviceOptions:
    """What runs the steps."""

    panel: ClassVar[str] = "Device"
    device: Annotated[
        Literal["auto", "numpy", "openvino", "torch-cpu", "torch-cuda"],
        typer.Option("--device", help="auto measures all that is there."),
    ] = "auto"
    isa: Annotated[
        Literal["auto", "amx", "avx512_bf16", "avx512", "avx2"],
        typer.Option("--isa", help="Cap the instruction set of CPU kernels."),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bf16", "fp16", "fp32", "int8"], typer.Option("--dtype", help="auto: bf16 where it is fast.")
    ] = "auto"
    threads: Annotated[int | None, typer.Option("--threads", help="Threads. Default: the CPUs that are idle.")] = None
    pin: Annotated[str | None, typer.Option("--pin", hidden=True, help="CPUs to stay on: 0,2-5.")] = None
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes", hidden=True, help="Processes that alternate. Default: 3 if memory and budget allow."
        ),
    ] = None
    graphs: Annotated[
        bool, typer.Option("--graphs/--no-graphs", hidden=True, help="Record GPU steps as CUDA graphs.")
    ] = True


@dataclass(frozen=True)
class StepOptions:
    """Which steps are measured."""

    panel: ClassVar[str] = "Steps"
    model: Annotated[
        str,
        typer.Option("--model", help="A preset (tiny, smollm2-135m, ..., llama-3.1-8b) or a HuggingFace config.json."),
    ] = "tiny"
    grid: Annotated[
        str | None,
        typer.Option(
            "--grid",
            help="Cells such as 'B=1,2,4,8;S=1,16,64,256': every pair with S >= B. S = B decodes; otherwise one request"
            " prefills S - B + 1 tokens beside B - 1 that decode. Default: as many as fit the budget.",
        ),
    ] = None
    context: Annotated[
        str, typer.Option("--context", help="Cached tokens of a decode request, one number or several: 128,512.")
    ] = "256"
    layers: Annotated[
        int | None, typer.Option("--layers", hidden=True, help="Measure only so many of the model's layers.")
    ] = None
    kernel: Annotated[
        Literal["step", "gemm", "attention"],
        typer.Option("--kernel", hidden=True, help="The whole step, products with weights, or attention."),
    ] = "step"
    engine: Annotated[
        Literal["kernels", "transformers"],
        typer.Option("--engine", hidden=True, help="transformers: HuggingFace's continuous batching, random weights."),
    ] = "kernels"
    history: Annotated[
        str, typer.Option("--history", hidden=True, help="Cached tokens before a prefill chunk: 0,1024.")
    ] = "0"
    cache: Annotated[
        Literal["warm", "cold"], typer.Option("--cache", hidden=True, help="cold: flushed before every step.")
    ] = "warm"


@dataclass(frozen=True)
class RunOptions:
    """How long, and into which file."""

    panel: ClassVar[str] = "Run"
    budget: Annotated[
        str | None, typer.Option("--budget", help=f"Time to spend, such as 60s or 5min. Default: {DEFAULT_BUDGET}.")
    ] = None
    precision: Annotated[
        float, typer.Option("--precision", help="Stop early once every median is known this well (95 % interval).")
    ] = 0.03
    design: Annotated[
        Literal["auto", "adaptive", "grid"],
        typer.Option(
            "--design",
            hidden=True,
            help="adaptive: a grid of five times the budget, the cells that tell a fit most first; grid: every cell"
            " three times. auto: adaptive where a budget and no grid is given.",
        ),
    ] = "auto"
    out: Annotated[Path, typer.Option("--out", help="Trace to write.")] = Path("trace.parquet")
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was interrupted or killed.")] = False
    seed: SeedOption = 0


@verb
def profile(
    device: DeviceOptions = DeviceOptions(),
    steps: StepOptions = StepOptions(),
    run: RunOptions = RunOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Measure transformer steps on this machine and write a trace.

    Every sample is kept. Ctrl-C keeps what was measured, and --resume goes on from there.

    \b
    latfit profile --budget 60s
    """
    budget_ms = parse_duration_ms(run.budget or DEFAULT_BUDGET, option="--budget")

    from latfit.api import profile as measured

    def announce(what: "Announcement") -> None:
        threads = f" with {what.threads} threads" if what.threads else ""
        turns = f" in {what.processes} processes" if what.processes > 1 else ""
        cells = f"{what.cells} cells" if what.cells else "steps"
        text = f"Measuring {cells} of {what.model} on {what.device}{threads}{turns}, {format_ms(what.budget_s * 1e3)}."
        note(text, quiet=output.silent)

    try:
        with _progress_bar(budget_ms / 1e3, shown=not output.silent and sys.stderr.isatty()) as progress:
            found = measured(**asdict(device), **asdict(steps), **asdict(run), progress=progress, announce=announce)
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted before the first step", remedy="Nothing was measured, nothing was written."
        ) from None
    if output.json:
        print_json(found.to_json())
    else:
        _show(found, run.out, output)
    _raise_if_stopped(found, run.out)


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


def _show(found: "Profile", out: Path, output: OutputOptions) -> None:
    """What was measured and how well, warnings, and what comes next."""
    verdict(found.verdict, found.state)
    for text in found.details:
        say(text)
    print_warnings(found.warnings, most=None if output.verbose else MOST_WARNINGS)
    echo(f"Wrote {out}. Next: latfit fit {shlex.quote(str(out))}")


def _raise_if_stopped(found: "Profile", out: Path) -> None:
    last = found.outcomes[-1].result
    if last.interrupted:
        elapsed_ms = sum(outcome.result.elapsed_s for outcome in found.outcomes) * 1e3
        raise Interrupted(
            f"interrupted after {format_ms(elapsed_ms)}",
            remedy=f"What was measured until then ({len(found.trace)} steps) is kept in {out}; --resume goes on.",
        )
    if last.stop == "device_failed":
        failure = next(warning for warning in last.warnings if warning.code == "device_failed")
        raise LatfitError(failure.message, remedy=f"{failure.remedy} What was measured before is kept in {out}.")
