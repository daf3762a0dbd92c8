"""`latfit`: the verbs, each imported when it is used, and the one place where errors become exit codes."""

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from latfit._version import __version__
from latfit.cli import terminal
from latfit.cli.output import echo, print_error
from latfit.errors import LatfitError, TargetNotWritable, WrongUsage, first_line, silent

if TYPE_CHECKING:
    from latfit.cli.options import Verb

INTERRUPTED = 130
MEASURING = ("profile", "demo")
ONE_THREAD = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # threads of linear algebra slow small matrices down
PLUGINS = "LATFIT_PLUGINS"  # modules to import first, with commas between them

OUT_OF_MEMORY = "Read a part of a long trace, or turn it into Parquet and summarise it with --cells."
_CLICK_ERROR: Any = typer.BadParameter.__mro__[2]
"""Base of the parser's own errors, wherever this version of Typer keeps its Click."""

VERBS = {
    "Start": {
        "demo": "Measure, fit, plan and report on this machine.",
        "doctor": "Say what this machine lacks, or what limits a running engine.",
    },
    "Measure": {
        "profile": "Measure transformer steps on this machine.",
        "record": "Record a running engine from its /metrics.",
        "watch": "Watch a running engine: SLO, percentiles, bottleneck.",
        "ingest": "Read engine logs and tables into a clean trace.",
        "trace": "Show what a trace covers before it is fitted.",
    },
    "Fit": {
        "fit": "Fit a latency model to a trace and check it.",
        "predict": "Predict the latency of steps, with intervals.",
        "evaluate": "Score a fit on another trace.",
        "compare": "Compare fits or runs; exit code 8 on a regression.",
    },
    "Decide": {
        "catalog": "Step models of measured systems, by name.",
        "hardware": "Execution paths by name: measured fits, nominal numbers.",
        "plan": "Batch limits, engine settings, capacity, replicas under an SLA.",
        "speculate": "From which batch speculative decoding stops paying.",
        "tune": "Find and verify the settings of a running engine.",
        "export": "Write a plan as settings of vLLM, SGLang, Triton, ...",
    },
    "Simulate": {
        "simulate": "Simulate batching policies or a serving engine.",
        "validate": "Compare a measured serving run with its simulation.",
        "ledger": "Compare planned with measured percentiles, run by run.",
        "replay": "Run policies live and compare them with their simulation.",
    },
    "Serve": {"serve": "Route requests to running engines (HTTP proxy)."},
    "Show": {"report": "Write a self-contained HTML page with its figures."},
}
"""Groups of `latfit --help`, each verb with its line."""

MODULES = {"demo": "fit", "fit": "fit", "hardware": "plan", "ingest": "traces", "plan": "plan", "trace": "traces"}
"""Modules of verbs; the others are in `commands`."""


class Verbs(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [name for verbs in VERBS.values() for name in verbs]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        if cmd_name not in self.commands:
            module = import_module(f"latfit.cli.{MODULES.get(cmd_name, 'commands')}")
            verb: Verb | typer.Typer = getattr(module, cmd_name)
            self.commands[cmd_name] = _command(cmd_name, verb)
        return self.commands[cmd_name]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for group, verbs in VERBS.items():
            with formatter.section(group):
                formatter.write_dl(list(verbs.items()))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.list_commands(ctx) and not args[0].startswith("-"):
            for name in self.list_commands(ctx):  # the parser suggests loaded verbs
                self.commands.setdefault(name, typer.core.TyperCommand(name))
        return super().resolve_command(ctx, args)


@cache
def _command(name: str, verb: "Verb | typer.Typer") -> Any:
    from latfit.cli.options import ShownInPanels

    if isinstance(verb, typer.Typer):
        return typer.main.get_command(verb)
    alone = typer.Typer(rich_markup_mode=None, add_completion=False)
    alone.command(name, cls=ShownInPanels)(verb)
    return typer.main.get_command(alone)


# Rich's help would double the start-up time; plain help says the same.
app = typer.Typer(
    name="latfit",
    cls=Verbs,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from latfit.provenance import runs_on

        echo(f"latfit {__version__}\n{runs_on()}")
        raise typer.Exit


@app.callback()
def latfit(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and what it runs on."),
    ] = False,
) -> None:
    """Latency models of inference steps (B requests, S tokens, T ms), and decisions from them.

    latfit fits a model to measured steps, reports its error, and derives batch limits, engine settings, CPU/GPU
    routing, capacity and replicas.

    First steps: latfit fit sample_traces/rtx4090_llama-3.1-8b.parquet, latfit plan --rate 4/s --lengths 1000:250
    --ttft 1s --tpot 50ms, latfit report --sla 50ms. Without data: latfit demo.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if not given or given[0] not in MEASURING:
        for name in ONE_THREAD:
            os.environ.setdefault(name, "1")
    terminal.prepare()
    terminal.end(run(given))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    quiet = silent.set(False)
    try:
        for each in arguments:
            if each.encode(errors="ignore").decode() != each:
                raise WrongUsage(f"{os.fsencode(each)!r} is not UTF-8", remedy="Rename the file.")
        _import_plugins()
        code = app(args=list(arguments), prog_name="latfit", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
        return int(code or 0)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (BrokenPipeError, SystemExit):  # Typer exits where a pipe breaks
        terminal.drop_output(sys.stdout, sys.stderr)
        return 0
    except _CLICK_ERROR as error:
        return _usage(error)
    except Exception as error:  # noqa: BLE001  the last resort: no user is shown a traceback
        if terminal.interrupted() and not isinstance(error, LatfitError):
            return INTERRUPTED
        known = error if isinstance(error, LatfitError) else _as_known(error)
        _tell(str(known))
        return known.exit_code
    finally:
        silent.reset(quiet)


def _import_plugins() -> None:
    for name in filter(None, map(str.strip, os.environ.get(PLUGINS, "").split(","))):
        try:
            import_module(name)
        except LatfitError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001  what a plug-in does is not ours
            raise WrongUsage(
                f"cannot import {name}: {error if isinstance(error, ImportError) else repr(error)}",
                where=PLUGINS,
                remedy=f"Name its folder in PYTHONPATH; `python -c 'import {name}'` shows where it fails.",
            ) from None


def _usage(error: Any) -> int:
    """Print an error of the parser; a group without a verb shows its help."""
    context = getattr(error, "ctx", None)
    if context is None or not error.format_message().strip() or type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        option: Any = getattr(error, "param", None)
        several = f"Repeat {option.opts[0]} for several values. " if getattr(option, "multiple", False) else ""
        _tell(f"{error.format_message().replace('Value error, ', '')}\n{several}See {context.command_path} --help.")
    return int(error.exit_code)


NO_SPACE = (TargetNotWritable, "Write to another place.")
SYSTEM_ERRORS: dict[int | None, tuple[type[LatfitError], str]] = {
    errno.ENOSPC: NO_SPACE,
    errno.EDQUOT: NO_SPACE,
    errno.ENAMETOOLONG: (WrongUsage, "Give a shorter name."),
    errno.ELOOP: (WrongUsage, "Give a name whose links end somewhere."),
}
MAX_NAME = 60  # letters of a file's name in an error


def _as_known(error: Exception) -> LatfitError:
    """Return an error of memory or the file system in its words; else a defect of latfit."""
    if isinstance(error, MemoryError):
        return WrongUsage("out of memory", remedy=OUT_OF_MEMORY)
    if terminal.debugging():
        import traceback

        with suppress(OSError, ValueError):
            traceback.print_exception(error)
    if isinstance(error, OSError) and error.errno is not None:
        kind, remedy = SYSTEM_ERRORS.get(error.errno, (LatfitError, "Check files, permissions and limits."))
        if error.filename is None and kind is TargetNotWritable:
            terminal.drop_output(sys.stdout)
        where = str(error.filename or "stdout")
        return kind(
            os.strerror(error.errno).lower(), where=where[:MAX_NAME] + "..." * (len(where) > MAX_NAME), remedy=remedy
        )
    text = f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__
    remedy = f"Please report it with the command and its traceback, which {terminal.DEBUG}=1 shows."
    return LatfitError(f"this is a defect of latfit ({text})", remedy=remedy)


def _tell(text: str) -> None:
    with suppress(OSError, ValueError):
        print_error(text)
