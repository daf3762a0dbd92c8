"""`latfit predict`: the latency of steps from a fit, with intervals."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from latfit.cli.options import JsonOption
from latfit.errors import BadInput, WrongUsage

if TYPE_CHECKING:
    from latfit.trace.table import Trace

MOST_SHOWN = 40


def predict(
    fit: Annotated[Path, typer.Argument(help="A fit file (NAME.fit.json).", metavar="FIT")],
    B: Annotated[list[int] | None, typer.Option("-B", help="Requests in the step. Repeatable.")] = None,
    S: Annotated[list[int] | None, typer.Option("-S", help="Tokens in the step; without it S = B. Repeatable.")] = None,
    context_tokens: Annotated[
        float | None, typer.Option("--context-tokens", help="Cached tokens the step reads.")
    ] = None,
    prefill_requests: Annotated[int | None, typer.Option("--prefill-requests", help="How many of B prefill.")] = None,
    prefill_tokens: Annotated[int | None, typer.Option("--prefill-tokens", help="How many of S are prefill.")] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="A table of steps (B, S, ...) instead of -B and -S.")
    ] = None,
    level: Annotated[float, typer.Option("--level", help="Share of steps that the interval is to hold.")] = 0.9,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse steps outside what was measured (exit code 3).")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Predict the latency of steps, with intervals.

    Every combination of -B and -S with S >= B, or the rows of --data. Steps outside what was measured are marked.
    """
    from latfit.cli.output import print_json, print_table
    from latfit.fit.apply import predict as predictions
    from latfit.model.result import read_fit
    from latfit.report.results import prediction_table

    fitted = read_fit(fit)
    given = {"context_tokens": context_tokens, "prefill_requests": prefill_requests, "prefill_tokens": prefill_tokens}
    steps = _steps(B or [], S or [], {name: value for name, value in given.items() if value is not None}, data)
    found = predictions(fitted, steps, level)
    if strict and found.outside.any():
        raise BadInput(
            f"{int(found.outside.sum())} of {len(steps)} steps lie outside what was measured",
            where=str(fit),
            remedy="Ask inside the fit's domain, measure there, or leave out --strict.",
        )
    rows = [
        {"B": b, "S": s, "T_ms": t, "low": low, "high": high, "level": level, "outside_domain": bool(out)}
        for b, s, t, low, high, out in zip(
            steps["B"].tolist(),
            steps["S"].tolist(),
            found.T_ms.tolist(),
            found.low.tolist(),
            found.high.tolist(),
            found.outside.tolist(),
            strict=True,
        )
    ]
    if json:
        print_json({"rows": rows})
        return
    print_table(prediction_table(rows[:MOST_SHOWN], level))
    if len(rows) > MOST_SHOWN:
        typer.echo(f"... and {len(rows) - MOST_SHOWN:,} more; --json prints them all.")


def _steps(B: list[int], S: list[int], given: dict[str, float], data: Path | None) -> "Trace":
    """The steps asked for. Raises WrongUsage, BadInput."""
    import numpy as np

    from latfit.trace.readers import open_source
    from latfit.trace.readers.tabular import read_columns
    from latfit.trace.table import Trace

    if (data is None) == (not B):
        raise WrongUsage("give either -B (and -S) or --data", remedy="For example: latfit predict FIT -B 8 -S 512")
    if data is not None:
        return read_columns(open_source(data), ("B", "S"))
    pairs = [(b, s) for b in B for s in (S or [b]) if 1 <= b <= s]
    if not pairs:
        raise WrongUsage("no step has S >= B >= 1", where="-B, -S", remedy="Every request computes at least one token.")
    columns = {"B": np.array([b for b, _ in pairs], float), "S": np.array([s for _, s in pairs], float)}
    return Trace({**columns, **{name: np.full(len(pairs), float(value)) for name, value in given.items()}})
