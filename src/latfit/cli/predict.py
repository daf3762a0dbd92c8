"""`latfit predict`: the latency of steps from a fit, with intervals, and how it answers to B and S."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from latfit.cli.options import JsonOption
from latfit.errors import BadInput, WrongUsage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from latfit.model import FitResult
    from latfit.stats import FloatArray
    from latfit.trace import Trace

MOST_SHOWN = 40
NO_STEP = "is no step"
POSSIBLE = "A step has 2^31 > S >= B >= 1; what prefills is a part of B and of S, and no count is below zero."
GRID_B, GRID_S = 5, 6
"""Values of B and S that --sensitivity takes where none are named."""


def predict(
    fit: Annotated[Path, typer.Argument(help="A fit file (NAME.fit.json).", metavar="FIT")],
    B: Annotated[list[int] | None, typer.Option("-B", help="Requests in the step. Repeatable.")] = None,
    S: Annotated[list[int] | None, typer.Option("-S", help="Tokens in the step; without it S = B. Repeatable.")] = None,
    context: Annotated[
        float | None,
        typer.Option(
            "--context", help="Cached tokens of each decoding request; without it as is typical of the trace."
        ),
    ] = None,
    context_tokens: Annotated[
        float | None, typer.Option("--context-tokens", help="Cached tokens the whole step reads.")
    ] = None,
    prefill_requests: Annotated[int | None, typer.Option("--prefill-requests", help="How many of B prefill.")] = None,
    prefill_tokens: Annotated[int | None, typer.Option("--prefill-tokens", help="How many of S are prefill.")] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="A table of steps (B, S, ...) instead of -B and -S.")
    ] = None,
    level: Annotated[float, typer.Option("--level", help="Share of steps that the interval is to hold.")] = 0.9,
    sensitivity: Annotated[
        bool,
        typer.Option("--sensitivity", help="What a request or token more costs, and which term is the largest where."),
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse steps outside what was measured (exit code 3).")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Predict the latency of steps, with intervals.

    Every combination of -B and -S with S >= B, or the rows of --data. Steps outside what was measured are marked.
    """
    from latfit.model import read_fit

    fitted = read_fit(fit)
    if sensitivity:
        if data is not None:
            raise WrongUsage("--sensitivity takes -B and -S, no table", where="--data", remedy="Leave one of them out.")
        _answer_to_change(fitted, B, S, context, json=json)
        return
    given = {"context_tokens": context_tokens, "prefill_requests": prefill_requests, "prefill_tokens": prefill_tokens}
    steps = _steps(B or [], S or [], {name: value for name, value in given.items() if value is not None}, data)
    _predict(fitted, _with_context(fitted, steps, context), level, strict=strict, json=json, where=str(fit))


def _predict(fitted: "FitResult", steps: "Trace", level: float, *, strict: bool, json: bool, where: str) -> None:
    from latfit.cli.output import print_json, print_table
    from latfit.fitting import predict as predictions
    from latfit.report import prediction_table

    found = predictions(fitted, steps, level)
    if strict and found.outside.any():
        _refuse(found.why_outside, where)
    rows = [
        {"B": b, "S": s, "T_ms": t, "low": low, "high": high, "level": level, "outside_domain": why != "",
         "why_outside": why}
        for b, s, t, low, high, why in zip(
            *(column.tolist() for column in (steps["B"], steps["S"], found.T_ms, found.low, found.high)),
            found.why_outside.tolist(),
            strict=True,
        )
    ]  # fmt: skip
    if json:
        print_json({"rows": rows, "notes": list(found.notes)})
        return
    print_table(prediction_table(rows[:MOST_SHOWN], level))
    if len(rows) > MOST_SHOWN:
        typer.echo(f"... and {len(rows) - MOST_SHOWN:,} more; --json prints them all.")
    for text in found.notes:
        typer.echo(text)


def _refuse(why_outside: "NDArray[np.object_]", where: str) -> None:
    """Raises BadInput that says how many steps cannot be predicted, and why."""
    reasons = dict.fromkeys(why for why in why_outside.tolist() if why)
    raise BadInput(
        f"{int((why_outside != '').sum())} of {len(why_outside)} steps cannot be told ({'; '.join(reasons)})",
        where=where,
        remedy="Ask inside the fit's domain, measure there, or leave out --strict.",
    )


def _answer_to_change(
    fitted: "FitResult", B: list[int] | None, S: list[int] | None, context: float | None, *, json: bool
) -> None:
    """Slopes, elasticities and largest terms on a grid: of what was named, else over what was measured."""
    import numpy as np

    from latfit.cli.output import print_json, print_table
    from latfit.fitting import sensitivity_of
    from latfit.report import regions_table, sensitivity_table

    typical = dict(fitted.typical) if context is None else {"context_tokens": context}
    axes = [
        np.unique(np.array(named, dtype=np.float64)) if named else _grid(fitted, name, count)
        for name, named, count in (("B", B, GRID_B), ("S", S, GRID_S))
    ]
    if not fitted.knows_prefill and not S:
        axes[1] = axes[0]
    found: dict[str, Any] = sensitivity_of(fitted, axes[0], axes[1], typical).to_json()
    if not any(T is not None for row in found["T_ms"] for T in row):
        raise BadInput(
            "none of the steps lies inside what was measured",
            remedy=f"Ask inside the fit's domain, with {'S >= B' if fitted.knows_prefill else 'S = B'}.",
        )
    if json:
        print_json({"sensitivity": found})
        return
    print_table(sensitivity_table(found))
    print_table(regions_table(found))
    if not fitted.knows_prefill:
        typer.echo("The fit saw decode steps only, so a request counts with its token (S = B).")
    if context is None and fitted.assumed_context:
        typer.echo(f"All {fitted.assumed_context}.")


def _grid(fitted: "FitResult", name: str, count: int) -> "FloatArray":
    """Whole numbers over the measured range of a column, evenly in the logarithm."""
    import numpy as np

    low, high = fitted.domain[name]
    return np.unique(np.round(np.geomspace(max(low, 1.0), max(high, 1.0), count)))


def _with_context(fitted: "FitResult", steps: "Trace", context: float | None) -> "Trace":
    """The steps with so many cached tokens a decoding request. Raises WrongUsage where they name others."""
    from latfit.model import CONTEXT, SOURCES, with_typical_context

    if context is None:
        return steps
    if CONTEXT in steps:
        raise WrongUsage("the cached context is given twice", where="--context", remedy="Give it a request or a step.")
    if context < 0:
        raise WrongUsage("a context cannot be below zero", where="--context", remedy="Give 0 or more.")
    known = {name: steps.floats(name) for name in SOURCES if name in steps}
    found = with_typical_context(known, {**fitted.typical, CONTEXT: context})
    return steps.with_columns(**{name: column for name, column in found.items() if name not in known})


def _steps(B: list[int], S: list[int], given: dict[str, float], data: Path | None) -> "Trace":
    """The steps asked for. Raises WrongUsage, BadInput."""
    import numpy as np

    from latfit.trace import Trace, impossible_steps, open_source, read_columns

    if (data is None) == (not B):
        raise WrongUsage("give either -B (and -S) or --data", remedy="For example: latfit predict FIT -B 8 -S 512")
    if data is not None:
        steps = read_columns(open_source(data), ("B", "S"))
        if (bad := impossible_steps(steps)).any():
            row = int(np.argmax(bad))
            raise BadInput(f"row {row + 1} {NO_STEP}", where=str(data), remedy=POSSIBLE)
        return steps
    pairs = [(b, s) for b in B for s in (S or [b]) if 1 <= b <= s]
    if not pairs:
        raise WrongUsage("no step has S >= B >= 1", where="-B, -S", remedy="Every request computes at least one token.")
    named = [f"--{name.replace('_', '-')}" for name in given]
    columns = {"B": np.array([b for b, _ in pairs], float), "S": np.array([s for _, s in pairs], float)}
    steps = Trace({**columns, **{name: np.full(len(pairs), float(value)) for name, value in given.items()}})
    if impossible_steps(steps).any() or not all(np.isfinite(value) for value in given.values()):
        raise WrongUsage(f"one of these {NO_STEP}", where=", ".join(["-B", "-S", *named]), remedy=POSSIBLE)
    return steps
