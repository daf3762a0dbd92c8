"""The options of `latfit fit`, and what users say of parameters, read: values, ranges and priors by name."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from latfit.errors import WrongUsage

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
