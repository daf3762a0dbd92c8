"""`latfit serve`: the router as an HTTP front before running engines."""

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import typer

from latfit.cli.options import OutputOptions, only_with, verb
from latfit.cli.output import note, print_json, verdict
from latfit.errors import WrongUsage

TOKEN, ENGINE_TOKEN = "LATFIT_TOKEN", "LATFIT_ENGINE_TOKEN"
"""Environment variables: what is on a command line, everybody on the machine can read."""


EnginesArgument = Annotated[
    list[str],
    typer.Argument(
        help="One or two engines, the main path first: gpu=http://localhost:8000 cpu=http://localhost:8001.",
        metavar="URL",
    ),
]


@dataclass(frozen=True)
class PathOptions:
    """By which rule requests go to engines."""

    panel: ClassVar[str] = "Paths"
    policy: Annotated[
        Literal["gpu-only", "three-stage", "cutoff", "split"] | None,
        typer.Option("--policy", help="Default: three-stage with two engines."),
    ] = None
    times: Annotated[
        list[str] | None, typer.Option("--times", help="Typical time of a reply: gpu=800ms. Repeatable.")
    ] = None
    hardware: Annotated[
        Path | None, typer.Option("--hardware", help="Profile whose fits give that time, for requests of --lengths.")
    ] = None
    lengths: Annotated[str, typer.Option("--lengths", help="Prompt and output tokens: 500:200.")] = "500:200"
    slots: Annotated[
        list[str] | None,
        typer.Option("--slots", help="Requests that an engine works on at a time: gpu=8. Repeatable."),
    ] = None
    t_cut: Annotated[
        str | None, typer.Option("--t-cut", help="Queueing timeout before falling back to the second engine.")
    ] = None
    classes: Annotated[
        list[str] | None,
        typer.Option(
            "--class", help="Class that a request may name in its header x-latfit-class. Repeatable, most urgent first."
        ),
    ] = None
    ageing: Annotated[
        str | None, typer.Option("--ageing", help="Waiting time worth one class, such as 5s; else strict priority.")
    ] = None
    learn: Annotated[bool, typer.Option("--learn", help="Follow the times that replies take.")] = False


@dataclass(frozen=True)
class ListenOptions:
    """Where callers come in, and what they may."""

    panel: ClassVar[str] = "Listening"
    host: Annotated[str, typer.Option("--host", help="Address to listen at; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 for any that is free.")] = 8080
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help=f"File with the token that callers must bear; else ${TOKEN}.")
    ] = None
    most_waiting: Annotated[
        int, typer.Option("--most-waiting", min=1, help="Requests that may wait; others are refused (429).")
    ] = 256
    max_body: Annotated[str, typer.Option("--max-body", help="Largest body of a request (413).")] = "8MiB"
    max_memory: Annotated[
        str, typer.Option("--max-memory", hidden=True, help="Bodies of all requests together (429).")
    ] = "256MiB"


@dataclass(frozen=True)
class TimeoutOptions:
    """How long engines are waited for."""

    panel: ClassVar[str] = "Timeouts"
    first_byte: Annotated[
        str, typer.Option("--first-byte", help="Until a reply begins; if not streamed, until it is complete.")
    ] = "5min"
    between: Annotated[
        str, typer.Option("--between", hidden=True, help="From one piece of a reply to the next, on either side.")
    ] = "1min"
    connect: Annotated[str, typer.Option("--connect", hidden=True, help="Until an engine is connected.")] = "5s"
    drain: Annotated[str, typer.Option("--drain", help="How long running requests may go on after a stop.")] = "30s"


@verb
@only_with("serve")
def serve(
    engines: EnginesArgument,
    paths: PathOptions = PathOptions(),
    listen: ListenOptions = ListenOptions(),
    timeouts: TimeoutOptions = TimeoutOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Stand before running engines (vLLM, llama.cpp, SGLang) and route each request by a policy.

    OpenAI's /v1/completions and /v1/chat/completions pass through, streams too; /v1/models, /health, /metrics. Nothing
    that a user sends is logged. SIGTERM or Ctrl-C ends it when what runs has ended, a second one at once.

    \b
    latfit serve gpu=http://localhost:8000 cpu=http://localhost:8001 \\
      --times gpu=800ms --times cpu=3s
    """
    from latfit.api import serve as served, token_in

    token = os.environ.get(TOKEN) or None
    given = asdict(paths) | {
        "engines": _addresses(engines),
        "times": _named(paths.times, "--times", "gpu=800ms"),
        "slots": {name: _count(text) for name, text in _named(paths.slots, "--slots", "gpu=8").items()},
    }
    listening = asdict(listen)
    file = listening.pop("token_file")
    found = served(
        **given,
        **listening,
        **asdict(timeouts),
        token=token if file is None else token_in(file),
        engine_token=os.environ.get(ENGINE_TOKEN) or None,
        ready=lambda text: note(text, quiet=output.silent),
    )
    if output.json:
        print_json(found.to_json())
    else:
        verdict(found.verdict, found.state)


def _addresses(texts: list[str]) -> dict[str, str]:
    """By name; one alone needs none. Raises WrongUsage."""
    if len(texts) == 1 and not re.match(r"[\w-]+=", texts[0]):
        return {"gpu": texts[0]}
    return _named(texts, "URL", "gpu=http://localhost:8000")


def _named(texts: list[str] | None, option: str, example: str) -> dict[str, str]:
    """`gpu=TEXT` by name. Raises WrongUsage."""
    found: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or not value.strip() or name in found:
            why = "stands twice" if name in found else "is not a name with its value"
            raise WrongUsage(f"{text!r} {why}", where=option, remedy=f"Write {example}.")
        found[name.strip()] = value.strip()
    return found


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise WrongUsage(f"{text!r} is no number of requests", where="--slots", remedy="Write gpu=8.")
    return int(text)
