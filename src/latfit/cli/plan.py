"""`latfit plan`, which decides once which of three questions it answers, and `latfit hardware`."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latfit.api.quantities import percent
from latfit.api.request import check, given_in, ignored, option, option_of, typed, with_units
from latfit.api.requests import (
    AddPathRequest,
    Context,
    EnginePlanRequest,
    Hardware,
    PageFolder,
    PathName,
    PlanRequest,
    Tokens,
)
from latfit.cli.fit import feasible_sla
from latfit.cli.options import OutputOptions, answer, check_files, group_of_verbs, subverb, verb
from latfit.cli.output import note, print_answer, print_json, say, suggest
from latfit.errors import BadInput, SlaOutOfReach, WrongUsage

if TYPE_CHECKING:
    from latfit.api import Plan

INFEASIBLE = "the plan is infeasible"  # the printed answer says why


@verb
def plan(
    batches: PlanRequest,
    engines: EnginePlanRequest,
    *,
    out: Path | None = option("File for the answer as JSON.", panel="Files"),
    report: PageFolder = None,
    output: OutputOptions,
) -> None:
    """Plan batch limits, settings and replicas under a latency SLA.

    With --lengths: the fewest replicas of a serving engine that meet TTFT, TPOT and latency limits, and their settings,
    searched by simulation.

    Without --lengths: steps that meet the SLA, thresholds, engine settings; with --rate also responses with their
    waiting: strategy, T_cut, capacity, replicas. Exit code 5: infeasible; 4: not supported by the data.

    \b
    latfit plan --rate 4/s --lengths 1000:250 --ttft 1s --tpot 50ms
    latfit plan --sla 20ms --rate 500/s
    """
    has_sla = batches.sla is not None or batches.sla_ms is not None
    of_requests = {"lengths", "e2e", "goodput", "users"} | (set() if has_sla else {"ttft", "tpot"})
    if of_requests & given_in(engines):
        _note_ignored("serving engines are planned", batches, engines, apart={"sla", "sla_ms", "paths"})
        _plan_engines(with_units(batches), engines, output, out=out, report=report)
        return
    if not has_sla:
        remedy = "Give --sla 20ms, or for requests with lengths --ttft 500ms --tpot 50ms."
        raise WrongUsage("there is no target", where="--sla", remedy=remedy)
    if engines.fit is not None and "paths" not in given_in(batches):
        batches, engines = replace(batches, paths=engines.fit), replace(engines, fit=None)
    _note_ignored("no --lengths: steps or batches are planned", engines, batches, apart={"hardware", "replicas"})
    _plan_batches(batches, output, out=out, report=report)


def _note_ignored(why: str, other: Any, request: Any, apart: set[str]) -> None:
    for name in sorted(given_in(other) - given_in(request) - apart):
        ignored(option_of(type(other), name), why)


def _plan_engines(
    batches: PlanRequest, request: EnginePlanRequest, output: OutputOptions, **files: Path | None
) -> None:
    """Plan serving engines; --sla is their end-to-end limit."""
    if batches.sla is not None and request.e2e is not None:
        raise WrongUsage("these contradict each other", where="--sla, --e2e", remedy="Give one of them.")
    request = replace(request, e2e=request.e2e or batches.sla)
    limit = "" if batches.sla is None else f"; --sla {batches.sla} limits their end-to-end latency"
    note(f"Planning serving engines for requests with lengths{limit}.", quiet=output.silent)
    found = answer("plan_engine", request, output, busy="Simulating", **files)
    if not found.feasible:
        asked = {"ttft": request.ttft, "tpot": request.tpot, "sla" if batches.sla else "e2e": request.e2e}
        where = ", ".join(f"--{name}" for name, limit in asked.items() if limit is not None)
        tried, more = found.result.replicas.tried, "more --replicas, " if request.replicas else ""
        less = "" if tried is None else f"{more}a lower --rate, "  # a request alone misses them
        remedy = f"Give {less}wider limits, or faster steps."
        raise SlaOutOfReach(INFEASIBLE, where=where or None, remedy=remedy)
    found.check_supported("--fit")


def _plan_batches(request: PlanRequest, output: OutputOptions, *, out: Path | None, report: Path | None) -> None:
    from latfit.api import report as write_report

    check_files(report=report)
    question = "batches of requests that are alike" if request.has_load else "single steps (no --rate)"
    tokens = "" if request.tokens_per_request else "; decode, one token a request: --tokens-per-request changes that"
    note(f"Planning {question}{tokens}.", quiet=output.silent)
    found, request = answer("plan", request, output, busy="Planning", out=out), with_units(request)
    if found.feasible and not (output.json or output.verbose):
        _suggest_next(found, request, has_report=report is not None)
    if report is not None:
        note(write_report(found.hardware, report, plan=found).summary(), quiet=output.silent)
    if not found.feasible:
        raise SlaOutOfReach(INFEASIBLE, where=f"--sla {request.sla}", remedy=found.result.remedy)
    found.check_supported(f"--hardware {request.paths}")


def _suggest_next(found: "Plan", request: PlanRequest, *, has_report: bool) -> None:
    place = typed(request, "paths")
    if not request.has_load:
        given = typed(request, "context", "percentile", "tokens_per_request", "transfer")
        load = ["--sla", str(request.sla), "--rate", "500/s", *given]
        if len(paths := found.hardware.paths) == 1 and all(each.fit.knows_prefill for each in paths.values()):
            percentile = percent(request.percentile)
            level = "" if percentile == 99 else f"p{percentile:g}:"
            prompt = 1000 if request.context is None else round(request.context)
            load = ["--rate", "4/s", "--lengths", f"{prompt}:250", "--ttft", f"{level}{request.ttft or '1s'}"]
            load += ["--tpot", f"{level}{request.tpot or request.sla}"]
        suggest(shlex.join(["latfit", "plan", *load, *place]))
    elif not has_report and not given_in(request) - {"paths", "sla", "rate"}:  # `latfit report` lacks some others
        suggest(shlex.join(["latfit", "report", "--sla", str(request.sla), "--rate", str(request.rate), *place]))


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
    say(f"Entered path {path.name} into {hardware} ({path.source}). Paths: {', '.join(whole.result.paths)}.")
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

    With -v every batch, and the fitted peak next to the machine's.
    """
    from latfit.api import Hardware as Machine
    from latfit.api.answer import PlainAnswer
    from latfit.messages import note as as_note
    from latfit.reporting import steps, table

    tokens, known = tokens_per_request or 1, Machine(hardware)
    if not known.result.paths:
        raise BadInput("no execution path in it", where=str(hardware), remedy="Add one with `latfit hardware add`.")
    brief, paths = [steps.paths_table(known.result, tokens, context)], known.result.paths.values()
    batches = [steps.estimates_table(each.label, steps.estimates(each, tokens, context), tokens) for each in paths]
    shown = table.Shown(
        messages=list(map(as_note, known.outside(tokens, context))),
        brief=brief,
        tables=[*brief, *batches, steps.ceilings_table(known.result)],
    )
    document = {"hardware": str(hardware), "paths": known.described(tokens, context)}
    print_answer(PlainAnswer(document, shown), output)
    if not (output.json or output.verbose):
        again = PlanRequest(hardware, context=context, tokens_per_request=tokens_per_request)
        sla = ["--sla", feasible_sla(next(iter(paths)).fit), *typed(again, "paths", "context", "tokens_per_request")]
        suggest(shlex.join(["latfit", "plan", *sla]))
    if tokens_per_request is None:
        note("For decode, one token a request; --tokens-per-request changes that.", quiet=output.silent)
