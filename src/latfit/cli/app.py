"""`latfit`: the verbs, and the one place where errors become exit codes."""

import errno
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from latfit._version import __version__
from latfit.cli.compare import compare
from latfit.cli.demo import demo
from latfit.cli.evaluate import evaluate
from latfit.cli.fit import fit
from latfit.cli.hardware import hardware
from latfit.cli.ingest import ingest
from latfit.cli.plan import plan
from latfit.cli.predict import predict
from latfit.cli.profile import profile
from latfit.cli.report import report
from latfit.cli.simulate import simulate
from latfit.cli.trace import trace
from latfit.cli.validate import validate
from latfit.errors import LatfitError, TargetNotWritable, WrongUsage

# Rich's help would double the start-up time; plain help says the same.
app = typer.Typer(
    name="latfit",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

INTERRUPTED = 130
MEASURING = ("profile", "demo")
ONE_THREAD = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""What libraries of linear algebra read when they load. Their threads gain little on matrices as small as ours mostly
are, and wait for each other at every product: beside one busy neighbour on two cores a plan took 12 s instead of 3."""
_CLICK_ERROR: Any = typer.BadParameter.__mro__[2]
"""Base of the parser's own errors, wherever this version of Typer keeps its Click."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"latfit {__version__}")
        raise typer.Exit


@app.callback()
def latfit(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Fit a latency model to inference steps (B requests, S tokens, T ms), say how far to trust it, and plan with it.

    The straight line through it: latfit profile, latfit fit trace.parquet, latfit plan --sla 20ms, latfit report.
    Or all of it at once on this machine: latfit demo.
    """


for verb in (demo, profile, ingest, fit, evaluate, predict, compare, plan, simulate, report, validate):
    app.command()(verb)
app.add_typer(trace, name="trace")
app.add_typer(hardware, name="hardware")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if not given or given[0] not in MEASURING:
        for name in ONE_THREAD:
            os.environ.setdefault(name, "1")
    sys.exit(run(given))


def run(arguments: Sequence[str]) -> int:
    """Exit code of one command; errors that a user can mend are printed in their own words, without a traceback."""
    try:
        code = app(args=list(arguments), prog_name="latfit", standalone_mode=False)
        sys.stdout.flush()
    except LatfitError as error:
        typer.echo(f"latfit: {error}", err=True)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("latfit: interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_what_is_buffered()
        return 0
    except MemoryError as error:
        typer.echo(f"latfit: out of memory ({error})\nAsk for less at a time: fewer rows, requests or cells.", err=True)
        return WrongUsage.exit_code
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_what_is_buffered()
        typer.echo("latfit: stdout: no space left on the device\nWrite to another place.", err=True)
        return TargetNotWritable.exit_code
    except _CLICK_ERROR as error:
        error.show()
        return int(error.exit_code)
    return int(code or 0)


def _drop_what_is_buffered() -> None:
    """stdout cannot take any more; what is still in its buffer must not fail again when the program ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
