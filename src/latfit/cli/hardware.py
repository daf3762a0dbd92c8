"""`latfit hardware`: execution paths by name, measured or nominal, and what they cost."""

from pathlib import Path

from latfit.api.request import check
from latfit.api.requests import AddPathRequest, Context, Hardware, PathName, Tokens
from latfit.cli.options import OutputOptions, group_of_verbs, subverb
from latfit.cli.output import echo, note, print_json, print_messages, print_table, say, suggest
from latfit.errors import BadInput

hardware = group_of_verbs("Execution paths by name: measured fits, nominal numbers.")
PROFILE = Path("hardware.json")


@subverb(hardware)
def add(request: AddPathRequest, *, hardware: Hardware = PROFILE, output: OutputOptions) -> None:
    """Enter a path into the profile, from a fit or from nominal numbers.

    An existing path keeps its ceiling and price unless given again. A new measurement of the same system replaces the
    old one; --force also replaces a measured path by nominal numbers or by the fit of another system.

    Example: latfit hardware add gpu --nominal "launch=12ms,slope=0.05ms"
    """
    from latfit.api import Hardware as Machine

    check(request)
    known = Machine(hardware) if hardware.exists() else Machine()
    facts = {name: value for name, value in vars(request).items() if name not in ("name", "fit")}
    whole = known.add(request.name, request.fit, **facts)
    whole.save(hardware)
    if output.json:
        print_json({**whole.to_json()["paths"][request.name], "replaced": list(whole.replaced)})
        return
    path = whole.result.paths[request.name]
    source = f"nominal: {path.nominal.text}" if path.nominal else f"the {path.fit.name} fit"
    say(f"Entered path {path.name} into {hardware} ({source}). Paths: {', '.join(whole.result.paths)}.")
    for sentence in whole.replaced:
        say(sentence)
    if path.nominal:
        note("Nominal numbers have no spread and are marked wherever they are used.", quiet=output.silent)


@subverb(hardware)
def remove(*, name: PathName, hardware: Hardware = PROFILE, output: OutputOptions) -> None:
    """Remove a path from the profile.

    Example: latfit hardware remove amx
    """
    from latfit.api import Hardware as Machine

    left = Machine(hardware).remove(name)
    left.save(hardware)
    paths = list(left.result.paths)
    if output.json:
        print_json({"hardware": str(hardware), "removed": name, "paths": paths})
    else:
        say(f"Removed path {name} from {hardware}. Paths: {', '.join(paths) or 'none'}.")


@subverb(hardware)
def show(
    *,
    hardware: Hardware = PROFILE,
    tokens_per_request: Tokens = None,
    context: Context = None,
    output: OutputOptions,
) -> None:
    """Show the paths: source, range, latency of batches.

    With -v every batch, and the fitted peak beside the machine's.
    """
    from latfit.api import Hardware as Machine
    from latfit.reporting import ceilings_table, estimates, estimates_table, paths_table

    tokens, known = tokens_per_request or 1, Machine(hardware)
    if not known.result.paths:
        raise BadInput("no execution path in it", where=str(hardware), remedy="Add one with `latfit hardware add`.")
    described = known.described(tokens, context)
    if output.json:
        print_json({"hardware": str(hardware), "paths": described})
        return
    print_table(paths_table(known.result, tokens, context))
    print_messages(known.outside(tokens, context), kind="note")
    if output.verbose:
        paths = known.result.paths.values()
        tables = [estimates_table(each.label, estimates(each, tokens, context), tokens) for each in paths]
        shares = ceilings_table(known.result)
        for table in [*tables, shares] if shares.rows else tables:
            echo()
            print_table(table)
    else:
        suggest("latfit plan --sla 20ms")
    if tokens_per_request is None:
        note("For decode, one token a request; --tokens-per-request changes that.", quiet=output.silent)
