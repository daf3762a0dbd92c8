"""`simulate`: batching policies under a load; `simulate_study`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from latfit import reporting, simulation
from latfit.api.answer import Answer, WithPage, data_frame
from latfit.api.hardware import check_one_model, profile_of
from latfit.api.quantities import by_name, count, duration, limit, rates, several, values_of
from latfit.api.reading import make_load, request_tokens
from latfit.api.request import declared, given_in, ignored, option_of, verb
from latfit.api.requests import PolicySettings, SimulateRequest, StudyRequest
from latfit.errors import SlaOutOfReach, WrongUsage, refuse
from latfit.hardware import HardwareProfile, PathLatency, nominal_path, parse_nominal
from latfit.policies import Settings
from latfit.queueing import solve_optimal
from latfit.workload import Load, RecordedLoad

if TYPE_CHECKING:
    from matplotlib.figure import Figure


LOGGED = 1000  # requests of an event log


class Simulation(Answer):
    """Simulated runs, one a policy or engine at a load."""

    runs: Sequence[simulation.SimResult] | Sequence[simulation.EngineResult]

    @property
    def answer(self) -> "reporting.table.Verdict":
        return reporting.table.Verdict(self.verdict, self.state)

    @property
    def stable(self) -> bool:
        """Whether any run carries its load."""
        return any(run.stable if isinstance(run, simulation.SimResult) else run.summary.stable for run in self.runs)

    @property
    def _notes(self) -> list[str]:
        return reporting.brief.distinct(text for run in self.runs for text in run.notes)

    @property
    def frame(self) -> Any:
        return data_frame(run.row() for run in self.runs)

    def to_json(self) -> dict[str, Any]:
        return {"runs": [run.to_json() for run in self.runs]}


@dataclass(frozen=True, repr=False, eq=False)
class PolicySimulation(Simulation, WithPage):
    """Batching policies on a machine."""

    runs: Sequence[simulation.SimResult]
    system: simulation.System
    sla_ms: float = math.inf
    skipped: Sequence[str] = ()  # why points were left out
    findings: Sequence[tuple[str, str]] = ()  # claims of a study, and what came out
    subject: str = ""
    title = "Simulated batching policies"

    @cached_property
    def _shown(self) -> "reporting.table.Shown":
        brief, tables = (reporting.simulation_tables.policy_tables(self.runs, brief=each) for each in (True, False))
        messages, columns = self._notes, ("claim", "on this machine")
        if self.findings:  # a study overloads paths on purpose
            brief = [reporting.table.Table("Claims of the literature", columns, self.findings, words=columns[1:])]
            messages, tables = [], [*brief, *tables]
        best = reporting.simulation_tables.best_policies(self.runs, self.sla_ms)[:1]
        found = reporting.brief.policies_verdict(self.runs, self.sla_ms)
        numbers = reporting.brief.p99_numbers(("Response", run.latency) for run in best)
        return reporting.table.Shown(*found, messages=messages, brief=brief, tables=tables, numbers=numbers)

    def plot(self) -> "Figure":
        return reporting.simulation_figures.runs_figure(self.runs)

    def to_json(self) -> dict[str, Any]:
        found = [{"claim": claim, "found": found} for claim, found in self.findings]
        return super().to_json() | ({"findings": found} if found else {})


SETTINGS = {
    each.name: f"{each.name}_ms" if timedelta in each.kinds else each.name.replace("b1", "B1")
    for each in declared(PolicySettings)
    if each.name != "settings"
}
"""Settings of policies: fields of `latfit.policies.Settings` by the names of options."""


@verb(SimulateRequest)
def simulate(request: SimulateRequest) -> PolicySimulation:
    """Simulate batching policies on one or two execution paths, all on the same random numbers.

    Raises WrongUsage, BadInput; runs of an unstable load have `stable=False`.
    """
    axes = values_of(request.vary)
    offered = rates(axes.pop("rate", None), "--sweep") or rates(request.rate)
    if unknown := next((name for name in axes if name not in SETTINGS), None):
        remedy = f"Vary rate, {', '.join(name.replace('_', '-') for name in SETTINGS)}."
        raise WrongUsage(f"{unknown!r} is not a setting", where="--sweep", remedy=remedy)
    load = make_load(request, offered)
    _check_load(load, request)
    mean, longest = request_tokens(load, request.by_prompt, request.tokens_per_request)
    machine, system, options = _simulated(request, mean, longest)
    if not any(path.nominal is None or path.nominal.per_token_ms for path in machine.paths.values()):
        for name in {"tokens_per_request", "by_prompt", "prompt_lengths"} & given_in(request):
            ignored(option_of(SimulateRequest, name), "every path has nominal numbers without per_token")
    given = {name: value for name in SETTINGS if (value := getattr(request, name)) is not None}
    given |= request.settings or {}
    named = {SETTINGS[name]: _parse_setting(name, given[name], option_of(SimulateRequest, name)) for name in given}
    skipped: list[SlaOutOfReach] = []
    points = simulation.points_of(
        several(request.policy),
        system,
        load,
        options,
        rates=offered,
        varied={SETTINGS[name]: [_parse_setting(name, each, "--sweep") for each in axes[name]] for name in axes},
        settings=Settings(**named),
        solve=solve_optimal,
        skipped=skipped,
    )
    if not points:
        raise skipped[0]
    if request.log is not None:
        first = points[0]
        simulation.write_events(
            request.log, simulation.event_log(first.policy, first.system, first.load, LOGGED, request.seed)
        )
    outside = [text for path in machine.paths.values() if (text := PathLatency(path, mean).outside)]
    runs = [structs.replace(run, notes=[*load.notes, *outside, *run.notes]) for run in _sweep(points, request)]
    left_out = list(dict.fromkeys(error.found for error in skipped))
    subject = reporting.fit_tables.what_is_known(machine.paths.values())
    return PolicySimulation(runs, system, options.sla_ms, left_out, subject=subject)


@verb(StudyRequest)
def simulate_study(request: StudyRequest) -> PolicySimulation:
    """Test claims of the literature on batching: every policy at ten loads up to what the main path serves.

    The default SLA is 2.5 times the main path's latency for one request. Raises as `simulate` does.
    """
    machine, system, options = _simulated(request, float(request.tokens_per_request or 1))
    points = simulation.study_points(system, options, solve_optimal)
    runs, sla_ms = _sweep(points, request), points[0].options.sla_ms
    subject = reporting.fit_tables.what_is_known(machine.paths.values())
    return PolicySimulation(runs, system, sla_ms, (), simulation.findings(runs, sla_ms), subject)


def _simulated(
    request: Any, mean: float, longest: float = 0.0
) -> tuple[HardwareProfile, simulation.System, simulation.Options]:
    servers = {
        name: count(each, "--set servers", "amx=2")
        for name, each in by_name(request.servers, "--set servers", "amx=2").items()
    }
    buckets = request.buckets or ()
    if isinstance(buckets, str):
        buckets = [count(part.strip(), "--set buckets", "1,2,4,8") for part in buckets.split(",")]
    named = by_name(request.nominal, "--nominal", "gpu:launch=8ms,slope=0.05ms", "=:")
    nominal = {name: nominal_path(name, parse_nominal(text)) for name, text in named.items()}
    # Nominal paths replace measured ones of the same name; with them the hardware file may be missing.
    missing = nominal and isinstance(request.hardware, str | Path) and not Path(request.hardware).exists()
    machine = HardwareProfile({**({} if missing else profile_of(request.hardware).paths), **nominal})
    system = simulation.system_of(machine, simulation.Serving(mean, request.service, longest, servers, buckets))
    if not request.force:
        check_one_model(HardwareProfile({path.name: machine.paths[path.name] for path in system.paths}))
    names = ("requests", "warmup", "replications", "seed", "precision")
    options = simulation.Options(sla_ms=limit(request.sla, "--sla"), **{name: getattr(request, name) for name in names})
    return machine, system, options


def _sweep(points: Sequence[simulation.Point], request: Any) -> Sequence[simulation.SimResult]:
    running = request.running or simulation.Running(request.workers, request.backend, request.scheduler)
    return simulation.sweep(points, running, out=request.out, resume=request.resume, progress=request.progress)


def _check_load(load: Load, request: SimulateRequest) -> None:
    if isinstance(load, RecordedLoad):
        found, wanted = len(load.requests), request.requests or 0
        remedy = "Leave --requests out for all of them."
        refuse(wanted > found, f"{wanted:,} requests are asked for, and {found:,} are recorded", "--requests", remedy)
        return
    has_tokens = any(min(each.ttft_slo_ms, each.tpot_slo_ms) < math.inf for each in load.classes)
    remedy = "Give the deadline of a response: chat:0.3:sla=2s."
    refuse(has_tokens, "policies answer requests as a whole, without a first token", "--class", remedy)


def _parse_setting(name: str, value: Any, option: str) -> Any:
    if SETTINGS[name].endswith("_ms"):
        return duration(value, option)
    return str(value).replace("-", " ") if name == "rule" else count(value, option, "a whole number above zero")
