"""`simulate`: batching policies under a load; `simulate_study`: the literature's claims on this hardware."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latfit.api.answer import Answer, State
from latfit.api.hardware import check_one_model, profile_of
from latfit.api.loads import make_load, notes_of, request_tokens
from latfit.api.quantities import by_name, count, duration, rates, several, values_of
from latfit.api.request import given_in, ignored, option_of, verb
from latfit.api.requests import SimulateRequest, StudyRequest
from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.hardware import HardwareProfile, PathLatency, nominal_path, parse_nominal
from latfit.policies import Settings
from latfit.simulation import (
    EngineResult,
    Finding,
    Grid,
    Options,
    Point,
    Running,
    Serving,
    ServingStudy,
    SimResult,
    System,
    event_log,
    findings,
    points_of,
    policy_points,
    row_of,
    serving_study,
    sweep,
    system_of,
    write_events,
)
from latfit.workload import Load, RecordedLoad

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from latfit.policies import DispatchTable
    from latfit.reporting import Making, Rendered, Table, Verdict
    from latfit.stats import FloatArray

LOGGED = 1000
"""Requests of an event log."""

MOST_ROWS = 24
"""Runs that are shown one a row; of more, p99 by rate and policy."""


class Simulation(Answer):
    """Simulated runs, one a policy or engine at a load. Print it for the answer; `.frame` has every run, a row each,
    times in ms, rates per second, shares from 0 to 1; `.plot()` draws them; `.to_json()` is what the command prints
    with `--json`; `.page()` is the report."""

    runs: Sequence[SimResult] | Sequence[EngineResult]

    @cached_property
    def answer(self) -> "Verdict":
        """The verdict with its state."""
        raise NotImplementedError

    @property
    def verdict(self) -> str:
        return self.answer.text

    @property
    def state(self) -> State:
        return self.answer.state

    @property
    def notes(self) -> list[str]:
        """What limits the results, each once."""
        return list(dict.fromkeys(text for run in self.runs for text in run.notes))

    @property
    def stable(self) -> bool:
        """Whether any run carries its load."""
        return any(run.stable if isinstance(run, SimResult) else run.summary.stable for run in self.runs)

    @property
    def messages(self) -> list[str]:
        """Of notes that differ in their numbers only the first."""
        from latfit.reporting import distinct

        return distinct(self.notes)

    def to_json(self) -> dict[str, Any]:
        """`{"runs": [...]}`, as `--json` prints it."""
        return {"runs": [run.to_json() for run in self.runs]}


@dataclass(frozen=True, repr=False, eq=False)
class PolicySimulation(Simulation):
    """Batching policies on a machine. skipped: why points were left out.  findings, engines: of a study.  subject:
    model and machine, where they are known."""

    runs: Sequence[SimResult]
    system: System
    sla_ms: float = math.inf
    skipped: Sequence[str] = ()
    findings: Sequence[Finding] = ()
    engines: ServingStudy | None = None
    subject: str = ""

    @cached_property
    def answer(self) -> "Verdict":
        from latfit.reporting import policies_verdict

        return policies_verdict(self.runs, self.sla_ms)

    @property
    def frame(self) -> "DataFrame":
        import pandas as pd

        return pd.DataFrame([{k: v for k, v in row_of(run).items() if k not in HIDDEN} for run in self.runs])

    def tables(self, *, brief: bool = False) -> "list[Table]":
        from latfit.reporting import brief_findings_table, rates_table, runs_table

        if brief and self.findings:
            return [brief_findings_table(self.findings)]
        many = len(self.runs) > MOST_ROWS and not brief
        return [rates_table(self.runs) if many else runs_table(self.runs, brief=brief)]

    @property
    def messages(self) -> list[str]:
        """A study goes beyond what is carried on purpose."""
        return [] if self.findings else super().messages

    @property
    def details(self) -> list[str]:
        """By how much p99 differs from that of the baseline, the first policy at a rate; a study's findings."""
        from latfit.reporting import differences

        gaps = differences(self.runs) if len(self.runs) <= MOST_ROWS else []
        return [*gaps, *(f"{each.claim}: {each.found}" for each in self.findings)]

    def plot(self) -> "Figure":
        from latfit.reporting import runs_figure

        return runs_figure(self.runs)

    def page(self, made: "Making") -> "Rendered":
        from latfit.reporting import policies_page

        claims = [(each.claim, each.found) for each in self.findings]
        return policies_page(self.runs, self.system, replace(made, sla_ms=self.sla_ms, subject=self.subject), claims)

    def to_json(self) -> dict[str, Any]:
        if self.engines is None:
            return super().to_json()
        return {
            "runs": [*(each.to_json() for each in self.runs), *(each.to_json() for each in self.engines.runs)],
            "findings": [{"claim": each.claim, "found": each.found} for each in self.findings],
        }


HIDDEN = ("document", "notes", "p99_error")
"""Columns of a sweep's file that say nothing to a reader."""


SETTINGS: Mapping[str, str] = {
    "batch": "batch",
    "window": "window_ms",
    "t_cut": "t_cut_ms",
    "b1": "B1",
    "max_batch": "max_batch",
    "rule": "rule",
    "longest": "longest_ms",
    "merge_below": "merge_below",
    "ageing": "ageing_ms",
}
"""Settings of policies by name: what they are inside."""


@verb(SimulateRequest)
def simulate(request: SimulateRequest) -> PolicySimulation:
    """Simulate batching policies on one or two execution paths, all on the same random numbers.

    hardware: a `hardware.json`, a HardwareProfile, or {"cpu": fit, "gpu": "launch=12ms,slope=0.05ms"}. Raises
    WrongUsage, BadInput; an unstable load is no error: its runs have `stable=False`.
    """
    axes = values_of(request.vary)
    offered = rates(axes.pop("rate", None), "--sweep rate") or rates(request.rate, per_s=request.rate_per_s)
    load = make_load(request, offered)
    if request.requests is not None and isinstance(load, RecordedLoad) and request.requests > len(load.requests):
        few = f"{request.requests:,} requests are asked for, and {len(load.requests):,} are recorded"
        raise WrongUsage(few, where="--requests", remedy="Leave --requests out for all of them.")
    _refuse_tokens_of_classes(load)
    mean, longest = request_tokens(load, request.by_prompt, request.tokens_per_request)
    machine, system, limit = _simulated(request, mean, longest)
    _tell_unread_tokens(machine, request)
    varied = {
        _setting(key): [_parsed(key, value, f"--sweep {key.replace('_', '-')}") for value in values]
        for key, values in axes.items()
    }
    given = {name: value for name in SETTINGS if (value := getattr(request, name)) is not None}
    skipped: list[SlaOutOfReach] = []
    grid = Grid(several(request.policy), offered, varied, policy_settings({**given, **(request.settings or {})}))
    points = points_of(grid, system, load, _options(request, limit), solve=solve_optimal, skipped=skipped)
    if not points:
        raise skipped[0]
    if request.log is not None:
        first = points[0]
        write_events(request.log, event_log(first.policy, first.system, first.load, LOGGED, request.seed))
    runs = _swept(points, request)
    left_out = list(dict.fromkeys(error.found for error in skipped))
    outside = [text for path in machine.paths.values() if (text := PathLatency(path, mean).outside)]
    told = [replace(run, notes=[*notes_of(load), *outside, *run.notes]) for run in runs]
    return PolicySimulation(told, system, limit, left_out, subject=_subject(machine))


@verb(StudyRequest)
def simulate_study(request: StudyRequest) -> PolicySimulation:
    """Put claims of the literature on batching to the test: every policy at ten loads up to what the main path
    serves, and serving engines whose steps cost the same.

    The SLA is 2.5 times the main path's latency for one request unless given. Raises as `simulate` does.
    """
    machine, system, limit = _simulated(request, float(request.tokens_per_request or 1))
    points = policy_points(system, _options(request, limit), solve_optimal)
    runs = _swept(points, request)
    limit = points[0].options.sla_ms
    engines = serving_study(system.main, request.seed)
    found = [*findings(runs, system, limit), *engines.findings]
    return PolicySimulation(runs, system, limit, (), found, engines, _subject(machine))


def _simulated(request: Any, mean: float, longest: float = 0.0) -> tuple[HardwareProfile, System, float]:
    """The machine, its paths that serve requests of such tokens, and the SLA in ms. Raises WrongUsage."""
    servers = {
        name: count(each, "--servers", "amx=2") for name, each in by_name(request.servers, "--servers", "amx=2").items()
    }
    buckets = request.buckets or ()
    if isinstance(buckets, str):
        try:
            buckets = [int(part) for part in buckets.split(",") if part.strip()]
        except ValueError:
            remedy = "Give values between commas."
            raise WrongUsage(f"{buckets!r} cannot be read", where="--buckets", remedy=remedy) from None
    machine = _machine(request.hardware, by_name(request.nominal, "--nominal", "gpu:launch=8ms,slope=0.05ms", "=:"))
    system = system_of(machine, Serving(mean, request.service, longest, servers, buckets))
    if not request.force:
        check_one_model(HardwareProfile({path.name: machine.paths[path.name] for path in system.paths}))
    given = request.sla is not None or request.sla_ms is not None
    return machine, system, duration(request.sla, "--sla", request.sla_ms) if given else math.inf


def _options(request: Any, limit: float) -> Options:
    return Options(request.requests, request.warmup, request.replications, request.seed, limit, request.precision)


def _swept(points: Sequence[Point], request: Any) -> Sequence[SimResult]:
    running = request.running or Running(request.workers, request.backend, request.scheduler)
    return sweep(points, running, out=request.out, resume=request.resume, progress=request.progress)


def _machine(hardware: Any, nominal: Mapping[str, str] | None) -> HardwareProfile:
    """The machine with paths by nominal numbers, which take the place of those with their names; where there are some
    its file may be missing."""
    more = {name: nominal_path(name, parse_nominal(text)) for name, text in (nominal or {}).items()}
    missing = isinstance(hardware, str | Path) and not Path(hardware).exists()
    known = {} if more and missing else profile_of(hardware).paths
    return HardwareProfile({**known, **more})


def _refuse_tokens_of_classes(load: Load) -> None:
    """Raises WrongUsage for a class that is promised times of tokens, of which policies know nothing."""
    several = () if isinstance(load, RecordedLoad) else load.classes
    if any(min(each.ttft_slo_ms, each.tpot_slo_ms) < math.inf for each in several):
        raise WrongUsage(
            "policies answer requests as a whole, without a first token",
            where="--class",
            remedy="Give the deadline of a response: chat:0.3:sla=2s.",
        )


def _tell_unread_tokens(machine: HardwareProfile, request: SimulateRequest) -> None:
    """Tell where every path costs the same whatever tokens requests have."""
    if not any(path.nominal is None or path.nominal.per_token_ms for path in machine.paths.values()):
        for name in {"tokens_per_request", "by_prompt", "prompt_lengths"} & given_in(request):
            ignored(f"--{name.replace('_', '-')}", "every path has nominal numbers without per_token")


def _subject(machine: HardwareProfile) -> str:
    from latfit.reporting import what_is_known

    return what_is_known(machine.paths.values())


def solve_optimal(rate: float, T_ms: "FloatArray") -> "DispatchTable":
    """The optimal dispatch table of a main path; the policies know of no solver."""
    from latfit.queueing import measured_times, optimal_rule

    return optimal_rule(rate, measured_times(T_ms)).table


def policy_settings(given: Mapping[str, Any]) -> Settings:
    """Settings of policies by the names of `SETTINGS`; None for the default. Raises WrongUsage."""
    return Settings(
        **{
            _setting(key): _parsed(key, value, option_of(SimulateRequest, key))
            for key, value in given.items()
            if value is not None
        }
    )


def _setting(key: str) -> str:
    if key not in SETTINGS:
        known = ", ".join(name.replace("_", "-") for name in SETTINGS)
        raise WrongUsage(f"{key!r} is not a setting", where="--sweep", remedy=f"Vary rate, {known}.")
    return SETTINGS[key]


def _parsed(key: str, value: Any, option: str) -> Any:
    """Return the value of a setting. Raises WrongUsage."""
    if _setting(key).endswith("_ms"):
        return duration(value, option)
    if key == "rule":
        return str(value).replace("-", " ")
    try:
        return int(value)
    except (TypeError, ValueError):
        raise WrongUsage(f"{value!r} cannot be read", where=option, remedy="Give a number.") from None
