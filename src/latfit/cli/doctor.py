"""`latfit doctor`: what this machine has, or what binds a running engine."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from latfit.cli.options import OutputOptions, SeedOption, only_with, verb
from latfit.cli.output import print_json, progress_bar, say, verdict
from latfit.cli.simulate_engine import SynchronousOption
from latfit.errors import WrongUsage


@dataclass(frozen=True)
class EngineAsItIs:
    """The engine's settings, where it does not tell them, and its step costs."""

    panel: ClassVar[str] = "Engine"
    fit: Annotated[
        Path | None, typer.Option("--fit", metavar="FIT", help="Step costs: simulate what a change would do.")
    ] = None
    prefill_fit: Annotated[
        Path | None,
        typer.Option("--prefill-fit", help="Fit of steps that contain prefill, where they are fitted apart."),
    ] = None
    hardware: Annotated[
        Path | None,
        typer.Option("--hardware", help="In place of --fit: the machine's profile, of which the gpu path is taken."),
    ] = None
    max_num_seqs: Annotated[
        int | None, typer.Option("--max-num-seqs", min=1, help="Sequence limit, where the engine does not tell it.")
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-num-batched-tokens", min=1, help="Token budget of a step, where the engine does not tell it."
        ),
    ] = None
    kv_blocks: Annotated[
        int | None,
        typer.Option("--kv-blocks", min=1, help="Blocks of the KV cache, where the engine does not tell them."),
    ] = None
    synchronous: SynchronousOption = None
    at_measured_speed: Annotated[
        bool,
        typer.Option("--at-measured-speed", help="Simulate at the measured speed, however far it is from the fit's."),
    ] = False


@dataclass(frozen=True)
class ExaminedEngine(EngineAsItIs):
    """The same, and what only `doctor` asks for."""

    block_size: Annotated[
        int | None, typer.Option("--block-size", min=1, hidden=True, help="Tokens in a block of the KV cache.")
    ] = None


@dataclass(frozen=True)
class Promised:
    """What requests are promised."""

    panel: ClassVar[str] = "SLO"
    ttft: Annotated[str | None, typer.Option("--ttft", help="Limit of the time to the first token: 500ms.")] = None
    tpot: Annotated[str | None, typer.Option("--tpot", help="Limit of the time per further token: 50ms.")] = None


@verb
@only_with("examine_server")
def doctor(
    url: Annotated[
        str | None, typer.Argument(help="A running engine; without it this machine is looked at.", metavar="URL")
    ] = None,
    engine: ExaminedEngine = ExaminedEngine(),
    promised: Promised = Promised(),
    duration: Annotated[str, typer.Option("--duration", help="How long the engine is read.")] = "10s",
    seed: SeedOption = 0,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Say what this machine lacks, or what binds a running engine and what would help it.

    With the address of a running engine its /metrics are read for ten seconds: what binds, which setting would help and
    which would do nothing, by what its counters prove; with a fit, by how much, where its simulation agrees with what
    the engine measured.

    \b
    latfit doctor
    latfit doctor http://localhost:8000 --fit trace.fit.json
    """
    if url is None:
        given = [name for name, value in {**asdict(engine), **asdict(promised)}.items() if value not in (None, False)]
        if given:
            option = f"--{given[0].replace('_', '-')}"
            raise WrongUsage("has no effect without a server", where=option, remedy="Name one: http://localhost:8000.")
        _show_machine(output)
        return
    from latfit.api import examine_server

    with progress_bar("Reading /metrics", quiet=output.silent) as advance:
        found = examine_server(
            url,
            **asdict(engine),
            **asdict(promised),
            duration=duration,
            seed=seed,
            progress=lambda done, total: advance(done, int(total)),
        )
    if output.json:
        print_json(found.to_json())
        return
    lines = found.lines  # before anything is printed: what is simulated takes a while, and may fail
    verdict(found.verdict, found.state)
    for line in lines:
        say(line.strip(), "    " if line.startswith("  ") else "  ")


def _show_machine(output: OutputOptions) -> None:
    from latfit.api import examine_machine

    here = examine_machine()
    if output.json:
        print_json(here.to_json())
        return
    verdict(here.verdict, "good")
    for line in here.lines:
        say(line)
    for line in here.features:
        say(line, "  ")
