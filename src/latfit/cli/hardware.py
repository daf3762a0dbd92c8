"""`latfit hardware`: execution paths by name, measured or nominal, and what they cost."""

from dataclasses import dataclass
from pathlib import Path

from latfit.api.request import Request, check
from latfit.api.requests import AddPathRequest, Context, Hardware, PathName, Tokens
from latfit.cli.options import OutputOptions, group_of_verbs, subverb
from latfit.cli.output import echo, note, print_json, print_messages, print_table, say
from latfit.errors import BadInput

hardware = group_of_verbs("Execution paths by name: measured fits, nominal numbers.")


@dataclass(frozen=True)
class Profile(Request):
    """The hardware profile."""

    PANEL = "Output"
    hardware: Hardware = Path("hardware.json")


@dataclass(frozen=True)
class Removed(Request):
    """The path to be removed."""

    name: PathName


@dataclass(frozen=True)
class Batches(Request):
    """Batches whose latency is shown."""

    PANEL = "Output"
    tokens_per_request: Tokens = None
    context: Context = None


@subverb(hardware)
def add(request: AddPathRequest, place: Profile, output: OutputOptions) -> None:
    """Enter a path into the profile, from a fit or from nominal numbers.

    An existing path keeps its ceiling and price unless given again. A new measurement of the same system replaces the
    old one; --force also replaces a measured path by nominal numbers or by the fit of another system.

    Example: latfit hardware add gpu --nominal "launch=12ms,slope=0.05ms"
    """
    from latfit.api import Hardware as Machine

    check(request)
    name, profile = request.name, place.hardware
    known = Machine(profile) if profile.exists() else Machine()
    whole = known.add(
        name, request.fit, **{each: vars(request)[each] for each in vars(request).keys() - {"name", "fit"}}
    )
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
def remove(path: Removed, place: Profile, output: OutputOptions) -> None:
    """Remove a path from the profile.

    Example: latfit hardware remove amx
    """
    from latfit.api import Hardware as Machine

    left = Machine(place.hardware).remove(path.name)
    left.save(place.hardware)
    paths = list(left.result.paths)
    if output.json:
        print_json({"hardware": str(place.hardware), "removed": path.name, "paths": paths})
    else:
        say(f"Removed path {path.name} from {place.hardware}. Paths: {', '.join(paths) or 'none'}.")


@subverb(hardware)
def show(place: Profile, batches: Batches, output: OutputOptions) -> None:
    """Show the paths: source, range, latency of batches.

    With -v every batch, and the fitted peak beside the machine's.
    """
    from latfit.api import Hardware as Machine
    from latfit.reporting import ceilings_table, estimates, estimates_table, paths_table

    profile, context, tokens = place.hardware, batches.context, batches.tokens_per_request or 1
    known = Machine(profile)
    if not known.result.paths:
        raise BadInput("no execution path in it", where=str(profile), remedy="Add one with `latfit hardware add`.")
    described = known.described(tokens, context)
    if output.json:
        print_json({"hardware": str(profile), "paths": described})
        return
    print_table(paths_table(known.result, tokens, context))
    print_messages(known.outside(tokens, context), kind="note")
    if output.verbose:
        for path in known.result.paths.values():
            echo()
            print_table(estimates_table(path.label, estimates(path, tokens, context), tokens))
        if (shares := ceilings_table(known.result)).rows:
            echo()
            print_table(shares)
    else:
        say("Next: latfit plan --sla 20ms (-v here for batches of every size)")
    if batches.tokens_per_request is None:
        note("For decode, one token a request; --tokens-per-request changes that.", quiet=output.silent)
