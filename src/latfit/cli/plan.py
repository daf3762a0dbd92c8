"""`latfit plan`: which steps meet an SLA, how to run a load of batches within it, or how many serving engines keep
what requests are promised. Which of the three is decided once, from the options, and said."""

import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from latfit.api.request import given_in, ignored, option_of
from latfit.api.requests import EnginePlanRequest, JsonFile, PlanRequest
from latfit.cli.options import FileOptions, OutputOptions, verb
from latfit.cli.output import note, print_answer, progress_bar, say
from latfit.errors import FitNotUsable, SlaOutOfReach, WrongUsage

if TYPE_CHECKING:
    from latfit.api import EnginePlan, Plan


@dataclass(frozen=True)
class PlanFiles(FileOptions):
    """Where a plan goes."""

    out: JsonFile = None


@verb
def plan(batches: PlanRequest, engines: EnginePlanRequest, files: PlanFiles, output: OutputOptions) -> None:
    """Plan batch limits, settings and replicas under a latency SLA.

    With --lengths: the fewest replicas of a serving engine that meet TTFT, TPOT and latency limits, and their settings,
    searched by simulation.

    Without --lengths: steps that meet the SLA, thresholds, engine settings; with --rate also responses with their
    waiting: strategy, T_cut, capacity, replicas. Exit code 5: infeasible; 4: not supported by the data.

    \b
    latfit plan --rate 4/s --lengths 1000:250 --ttft 1s --tpot 50ms
    latfit plan --sla 20ms --rate 500/s
    """
    files.check()
    if _is_of_requests(batches, engines):
        _tell_idle("serving engines are planned", batches, engines, apart={"sla", "paths"})
        if batches.sla is not None and engines.e2e is not None:
            raise WrongUsage("these contradict each other", where="--sla, --e2e", remedy="Give one of them.")
        _plan_engines(replace(engines, e2e=engines.e2e or batches.sla), files, output)
        return
    if batches.sla is None:
        raise WrongUsage(
            "there is no target",
            where="--sla",
            remedy="Give --sla 20ms, or for requests with lengths --ttft 500ms --tpot 50ms.",
        )
    _tell_idle(
        "no --lengths are given, so steps or batches are planned", engines, batches, apart={"hardware", "replicas"}
    )
    _plan_batches(batches, files, output)


def _is_of_requests(batches: PlanRequest, engines: EnginePlanRequest) -> bool:
    """Whether requests have lengths, or limits that only requests have."""
    if any(each is not None for each in (engines.lengths, engines.e2e, engines.goodput, engines.users)):
        return True
    return batches.sla is None and (engines.ttft is not None or engines.tpot is not None)


def _tell_idle(why: str, other: Any, asked: Any, apart: set[str]) -> None:
    """Tell which options belong to the question that is not answered."""
    for name in sorted(given_in(other) - given_in(asked) - apart):
        ignored(option_of(type(other), name), why)


def _plan_engines(request: EnginePlanRequest, files: PlanFiles, output: OutputOptions) -> None:
    """Serving engines for requests with lengths."""
    from latfit.api import plan_engine

    with progress_bar("Simulating", quiet=output.silent) as advance:
        found = plan_engine.of(replace(request, progress=advance))
    note("Planned serving engines for requests with lengths.", quiet=output.silent)
    print_answer(found, output)
    files.write(found, quiet=output.silent)
    _check_engines(found, request)


def _check_engines(found: "EnginePlan", request: EnginePlanRequest) -> None:
    """Raises SlaOutOfReach, FitNotUsable."""
    if not found.feasible:
        limits = {"--ttft": request.ttft, "--tpot": request.tpot, "--e2e": request.e2e}
        more = "more --replicas, " if request.replicas else ""
        raise SlaOutOfReach(
            f"no plan keeps the targets: {found.result.binding}",
            where=", ".join(name for name, limit in limits.items() if limit is not None) or None,
            remedy=f"Give {more}wider limits, a lower --rate, or faster steps.",
        )
    if not found.supported:
        raise FitNotUsable(
            f"the plan is not supported by these data: {found.result.unsupported[0]}",
            where="--fit",
            remedy="Measure such steps, or fit a better model (latfit fit).",
        )


def _plan_batches(request: PlanRequest, files: PlanFiles, output: OutputOptions) -> None:
    """Steps, or a load of requests that are alike, on the machine's paths."""
    from latfit.api import plan as decide, report

    with progress_bar("Planning", quiet=output.silent):
        found = decide.of(request)
    question = "batches of requests that are alike" if request.has_load else "single steps (no --rate)"
    tokens = "" if request.tokens_per_request else "; decode, one token a request: --tokens-per-request changes that"
    note(f"Planned {question}{tokens}.", quiet=output.silent)
    print_answer(found, output)
    if found.feasible and not (output.json or output.verbose):
        say(_next_command(found, request, files))
    replace(files, report=None).write(found, quiet=output.silent)
    if files.report is not None:
        note(report(found.hardware, files.report, plan=found).summary(), quiet=output.silent)
    if not found.feasible:
        raise SlaOutOfReach(found.result.binding, where=f"--sla {request.sla}", remedy=found.result.remedy)
    if found.result.unsupported:
        raise FitNotUsable(
            f"the plan is not supported by these data: {found.result.unsupported[0]}",
            where=f"--hardware {request.paths}",
            remedy="Measure such steps, or fit a better model (latfit fit).",
        )


def _next_command(found: "Plan", request: PlanRequest, files: PlanFiles) -> str:
    """Return what to do after a plan that meets its limit."""
    place = () if str(request.paths) == "hardware.json" else ("--hardware", str(request.paths))
    if not request.has_load:
        load = ["--sla", str(request.sla), "--rate", "500/s"]
        if len(paths := found.hardware.paths) == 1 and all(each.fit.knows_prefill for each in paths.values()):
            load = ["--rate", "4/s", "--lengths", "1000:250", "--ttft", "1s", "--tpot", str(request.sla)]
        return f"Next: {shlex.join(['latfit', 'plan', *load, *place])} (your load); -v here shows every table."
    if request.rate is None or files.report is not None:
        return "Next: -v here shows every table."
    command = shlex.join(["latfit", "report", "--sla", str(request.sla), "--rate", request.rate, *place])
    return f"Next: {command}; -v here shows every table."
