"""`latfit hardware`: execution paths by name, measured or quoted, and what they cost."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from latfit.cli.options import (
    DEFAULT_HARDWARE,
    HardwareOption,
    JsonOption,
    QuietOption,
    TokensOption,
    group_of_verbs,
    subverb,
)
from latfit.errors import BadInput, WrongUsage

if TYPE_CHECKING:
    from latfit.hardware import ExecutionPath


hardware = group_of_verbs("Execution paths by name: measured fits, nominal numbers.")


@subverb(hardware)
def add(
    name: Annotated[str, typer.Argument(help="Execution path: amx, gpu, cpu, ...", metavar="PATH")],
    fit: Annotated[Path | None, typer.Argument(help="A .fit.json file.", metavar="FIT")] = None,
    quoted: Annotated[
        str | None,
        typer.Option("--quoted", help='Numbers without a measurement: "p50=2ms", "launch=0.5ms,slope=0.02ms".'),
    ] = None,
    profile: HardwareOption = DEFAULT_HARDWARE,
    flops: Annotated[float | None, typer.Option("--flops", help="Peak FLOP/s of the machine, such as 989e12.")] = None,
    bandwidth: Annotated[
        float | None, typer.Option("--bandwidth", help="Memory bandwidth in bytes/s, such as 3.35e12.")
    ] = None,
    flops_per_token: Annotated[
        float | None, typer.Option("--flops-per-token", help="FLOP a token, about twice the model's parameters.")
    ] = None,
    step_bytes: Annotated[
        float | None, typer.Option("--step-bytes", help="Bytes read by every step, about the size of the weights.")
    ] = None,
    price: Annotated[float | None, typer.Option("--price", help="Price an hour, in any one currency.")] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Enter a path into the profile, from a fit or from quoted numbers.

    A path that is there keeps its ceiling and price where nothing new is said; without a fit and a quote only those
    change.
    """
    from dataclasses import replace

    from latfit.cli.output import note, print_json
    from latfit.hardware import Ceiling, add_path

    if not name.strip():
        raise WrongUsage("a path without a name", where="PATH", remedy="Name it: amx, gpu, cpu, ...")
    if price is not None and not 0 <= price < float("inf"):
        raise WrongUsage(f"a price of {price:g}", where="--price", remedy="Give 0 or more an hour.")
    path = _path(name, fit, quoted, profile)
    whole = add_path(
        profile, replace(path, ceiling=Ceiling(flops, bandwidth, flops_per_token, step_bytes), price_per_hour=price)
    )
    if json:
        print_json(whole.to_json()["paths"][name])
    else:
        source = f"quoted: {path.quote.text}" if path.quote else f"the {path.fit.model} fit"
        typer.echo(f"Entered path {name} into {profile} ({source}). Paths: {', '.join(whole.paths)}.")
        if path.quote:
            note("Quoted numbers have no spread and are marked wherever they are used.", quiet=quiet)


def _path(name: str, fit: Path | None, quoted: str | None, profile: Path) -> "ExecutionPath":
    """The path to enter: from the fit, from the quote, or the one that is there already."""
    from latfit.hardware import ExecutionPath, parse_quote, quoted_path, read_hardware
    from latfit.model import read_fit

    if fit is not None and quoted is not None:
        raise WrongUsage("a fit and quoted numbers contradict each other", where="--quoted", remedy="Give one of them.")
    if quoted is not None:
        return quoted_path(name, parse_quote(quoted))
    if fit is not None:
        found = read_fit(fit)
        if not found.status.ok:
            raise BadInput(f"the fit is not usable ({found.status.sentence})", where=str(fit), remedy="Fit it again.")
        return ExecutionPath(name, found)
    known = read_hardware(profile).paths if profile.exists() else {}
    if name not in known:
        raise WrongUsage(
            f"nothing to enter for path {name}",
            where="FIT",
            remedy='Name its .fit.json, or give --quoted "p50=2ms".',
        )
    return known[name]


@subverb(hardware)
def show(
    profile: HardwareOption = DEFAULT_HARDWARE,
    tokens_per_request: TokensOption = None,
    context: Annotated[float | None, typer.Option("--context", help="Cached tokens of a request.")] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show the paths: source, batches by latency (typical, mean, quantiles), fitted peak beside the machine's."""
    from latfit.cli.output import note, print_json, print_table
    from latfit.hardware import beside_the_fit, read_hardware
    from latfit.report import ceilings_table, estimates, estimates_table, paths_table

    known = read_hardware(profile)
    if not known.paths:
        raise BadInput("no execution path in it", where=str(profile), remedy="Add one with `latfit hardware add`.")
    tokens = tokens_per_request or 1
    rows = {name: estimates(path, tokens, context) for name, path in known.paths.items()}
    if json:
        ceilings = {n: beside_the_fit(p.ceiling, p.fit).to_json() for n, p in known.paths.items() if p.ceiling.known}
        described = {
            name: {
                "source": "quoted" if path.quote else "fitted",
                "quoted": path.quote.text if path.quote else None,
                "model": path.fit.model,
                "price_per_hour": path.price_per_hour,
                "ceiling": ceilings.get(name),
                "estimates": [vars(row) for row in rows[name]],
            }
            for name, path in known.paths.items()
        }
        print_json({"hardware": str(profile), "paths": described})
        return
    print_table(paths_table(known))
    for name, path in known.paths.items():
        typer.echo("")
        print_table(estimates_table(path.label, rows[name], tokens))
    shares = ceilings_table(known)
    if shares.rows:
        typer.echo("")
        print_table(shares)
    if tokens_per_request is None:
        note("For decode, one token a request; --tokens-per-request changes that.", quiet=quiet)
