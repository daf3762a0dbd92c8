"""`simulate`: batching policies under a load; `simulate_study`: the literature's claims on this hardware."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

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
    Options,
    Point,
    Running,
    Serving,
    SimResult,
    System,
    event_log,
    findings,
    points_of,
    study_points,
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

LOGGED = 1000  # requests of an event log

MOST_ROWS = 24  # runs that are shown one a row; of more, p99 by rate and policy


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

    @property
    def frame(self) -> "DataFrame":
        import pandas as pd

        return pd.DataFrame([run.row() for run in self.runs])

    def to_json(self) -> dict[str, Any]:
        """`{"runs": [...]}`, as `--json` prints it."""
        return {"runs": [run.to_json() for run in self.runs]}


@dataclass(frozen=True, repr=False, eq=False)
class PolicySimulation(Simulation):
    """Batching policies on a machine."""

    runs: Sequence[SimResult]
    system: System
    sla_ms: float = math.inf
    skipped: Sequence[str] = ()  # why points were left out
    findings: Sequence[tuple[str, str]] = ()  # claims of a study and what came out
    subject: str = ""  # model and machine, where they are known

    @cached_property
    def answer(self) -> "Verdict":
        from latfit.reporting import policies_verdict

        return policies_verdict(self.runs, self.sla_ms)

    def tables(self, *, brief: bool = False) -> "list[Table]":
        from latfit.reporting import Table, rates_table, runs_table

        if brief and self.findings:
            columns = ("claim", "on this machine")
            return [Table("Claims of the literature", columns, self.findings, words=columns[1:])]
        many = len(self.runs) > MOST_ROWS and not brief
        return [rates_table(self.runs) if many else runs_table(self.runs, brief=brief)]

    @property
    def messages(self) -> list[str]:
        """A study goes beyond what is carried on purpose."""
        return [] if self.findings else super().messages

    @property
    def details(self) -> list[str]:
        """A study's findings."""
        return [f"{claim}: {found}" for claim, found in self.findings]

    def plot(self) -> "Figure":
        from latfit.reporting import runs_figure

        return runs_figure(self.runs)

    def page(self, made: "Making") -> "Rendered":
        from latfit.reporting import policies_page

        made = replace(made, sla_ms=self.sla_ms, subject=self.subject)
        return policies_page(self.runs, self.system, made, self.findings)

    def to_json(self) -> dict[str, Any]:
        found = [{"claim": claim, "found": found} for claim, found in self.findings]
        return {**super().to_json(), **({"findings": found} if found else {})}


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
    from latfit.reporting import what_is_known

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
    given = {**{name: getattr(request, name) for name in SETTINGS}, **(request.settings or {})}
    settings = {
        _setting(key): _parsed(key, value, option_of(SimulateRequest, key))
        for key, value in given.items()
        if value is not None
    }
    skipped: list[SlaOutOfReach] = []
    points = points_of(
        several(request.policy),
        system,
        load,
        _options(request, limit),
        rates=offered,
        varied=varied,
        settings=Settings(**settings),
        solve=solve_optimal,
        skipped=skipped,
    )
    if not points:
        raise skipped[0]
    if request.log is not None:
        first = points[0]
        write_events(request.log, event_log(first.policy, first.system, first.load, LOGGED, request.seed))
    outside = [text for path in machine.paths.values() if (text := PathLatency(path, mean).outside)]
    runs = [structs.replace(run, notes=[*notes_of(load), *outside, *run.notes]) for run in _swept(points, request)]
    left_out = list(dict.fromkeys(error.found for error in skipped))
    return PolicySimulation(runs, system, limit, left_out, subject=what_is_known(machine.paths.values()))


@verb(StudyRequest)
def simulate_study(request: StudyRequest) -> PolicySimulation:
    """Test claims of the literature on batching: every policy at ten loads up to what the main path serves.

    The SLA is 2.5 times the main path's latency for one request unless given. Raises as `simulate` does.
    """
    from latfit.reporting import what_is_known

    machine, system, limit = _simulated(request, float(request.tokens_per_request or 1))
    points = study_points(system, _options(request, limit), solve_optimal)
    runs, limit = _swept(points, request), points[0].options.sla_ms
    return PolicySimulation(runs, system, limit, (), findings(runs, limit), what_is_known(machine.paths.values()))


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
    named = by_name(request.nominal, "--nominal", "gpu:launch=8ms,slope=0.05ms", "=:")
    nominal = {name: nominal_path(name, parse_nominal(text)) for name, text in named.items()}
    # Nominal paths replace measured ones of the same name; with them the hardware file may be missing.
    missing = nominal and isinstance(request.hardware, str | Path) and not Path(request.hardware).exists()
    measured = {} if missing else profile_of(request.hardware).paths
    machine = HardwareProfile({**measured, **nominal})
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


def solve_optimal(rate: float, T_ms: "FloatArray") -> "DispatchTable":
    """The optimal dispatch table of a main path; the policies know of no solver."""
    from latfit.queueing import measured_times, optimal_rule

    return optimal_rule(rate, measured_times(T_ms)).table


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
