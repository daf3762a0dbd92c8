"""`latfit hardware`: execution paths by name, measured or nominal, and what they cost."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from latfit.cli.options import (
    DEFAULT_HARDWARE,
    HardwareOption,
    OutputOptions,
    TokensOption,
    group_of_verbs,
    subverb,
)
from latfit.errors import BadInput

hardware = group_of_verbs("Execution paths by name: measured fits, nominal numbers.")


@dataclass(frozen=True)
class MachineOptions:
    """What the machine could do at best, and what it costs."""

    panel: ClassVar[str] = "Machine"
    flops: Annotated[float | None, typer.Option("--flops", help="Peak FLOP/s of the machine, such as 989e12.")] = None
    bandwidth: Annotated[
        float | None, typer.Option("--bandwidth", help="Memory bandwidth in bytes/s, such as 3.35e12.")
    ] = None
    flops_per_token: Annotated[
        float | None, typer.Option("--flops-per-token", help="FLOP a token, about twice the model's parameters.")
    ] = None
    step_bytes: Annotated[
        float | None, typer.Option("--step-bytes", help="Bytes read by every step, about the size of the weights.")
    ] = None
    price: Annotated[float | None, typer.Option("--price", help="Price an hour, in any one currency.")] = None


@dataclass(frozen=True)
class NumbersOptions:
    """Where the path goes, and its numbers where there is no fit."""

    panel: ClassVar[str] = "Path"
    nominal: Annotated[
        str | None,
        typer.Option(
            "--nominal", "--quoted", help='Numbers without a measurement: "p50=2ms", "launch=0.5ms,slope=0.02ms".'
        ),
    ] = None
    hardware: HardwareOption = DEFAULT_HARDWARE
    force: Annotated[
        bool, typer.Option("--force", help="Replace a measured path by nominal numbers or by another system's fit.")
    ] = False


@subverb(hardware)
def add(
    name: Annotated[str, typer.Argument(help="Execution path: amx, gpu, cpu, ...", metavar="PATH")],
    fit: Annotated[Path | None, typer.Argument(help="A .fit.json file.", metavar="FIT")] = None,
    numbers: NumbersOptions = NumbersOptions(),
    machine: MachineOptions = MachineOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Enter a path into the profile, from a fit or from nominal numbers.

    A path that is there keeps its ceiling and price where nothing new is said; without a fit and nominal numbers only
    those change. A new measurement of the same system replaces the old one; --force also replaces a measured path by
    nominal numbers, or by the fit of another system.

    Example: latfit hardware add gpu --nominal "launch=12ms,slope=0.05ms"
    """
    from latfit.api import Hardware
    from latfit.cli.output import note, print_json, say

    profile = numbers.hardware
    known = Hardware(profile) if profile.exists() else Hardware()
    whole = known.add(name, fit, nominal=numbers.nominal, force=numbers.force, **vars(machine))
    whole.save(profile)
    if output.json:
        print_json({**whole.to_json()["paths"][name], "replaced": list(whole.replaced)})
        return
    path = whole.result.paths[name]
    source = f"nominal: {path.nominal.text}" if path.nominal else f"the {path.fit.name} fit"
    say(f"Entered path {name} into {profile} ({source}). Paths: {', '.join(whole.result.paths)}.")
    for sentence in whole.replaced:
        say(sentence)
    if path.nominal:
        note("Nominal numbers have no spread and are marked wherever they are used.", quiet=output.silent)


@subverb(hardware)
def remove(
    name: Annotated[str, typer.Argument(help="Execution path: amx, gpu, cpu, ...", metavar="PATH")],
    profile: HardwareOption = DEFAULT_HARDWARE,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Remove a path from the profile.

    Example: latfit hardware remove amx
    """
    from latfit.api import Hardware
    from latfit.cli.output import print_json, say

    left = Hardware(profile).remove(name)
    left.save(profile)
    paths = list(left.result.paths)
    if output.json:
        print_json({"hardware": str(profile), "removed": name, "paths": paths})
        return
    say(f"Removed path {name} from {profile}. Paths: {', '.join(paths) or 'none'}.")


@subverb(hardware)
def show(
    profile: HardwareOption = DEFAULT_HARDWARE,
    tokens_per_request: TokensOption = None,
    context: Annotated[float | None, typer.Option("--context", help="Cached tokens of a request.")] = None,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Show the paths: source, range, latency of batches.

    With -v every batch, and the fitted peak beside the machine's.
    """
    from latfit.api import Hardware
    from latfit.cli.output import echo, note, print_json, print_table, print_warnings, say
    from latfit.reporting import ceilings_table, estimates, estimates_table, paths_table

    known = Hardware(profile)
    if not known.result.paths:
        raise BadInput("no execution path in it", where=str(profile), remedy="Add one with `latfit hardware add`.")
    tokens = tokens_per_request or 1
    described = known.described(tokens, context)
    if output.json:
        print_json({"hardware": str(profile), "paths": described})
        return
    print_table(paths_table(known.result, tokens, context))
    print_warnings(known.outside(tokens, context))
    if output.verbose:
        for path in known.result.paths.values():
            echo()
            print_table(estimates_table(path.label, estimates(path, tokens, context), tokens))
        if (shares := ceilings_table(known.result)).rows:
            echo()
            print_table(shares)
    else:
        say("Next: latfit plan --sla 20ms (-v here for batches of every size)")
    if tokens_per_request is None:
        note("For decode, one token a request; --tokens-per-request changes that.", quiet=output.silent)
