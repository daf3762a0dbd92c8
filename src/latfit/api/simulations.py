"""`simulate`: batching policies under a load; `simulate_study`: the literature's claims on this hardware."""

import html
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from latfit.api.hardware import check_one_model, profile_of
from latfit.api.loads import make_load, notes_of, request_tokens
from latfit.api.quantities import Duration, Needs, duration, library_verb, only_with, rates, values_of
from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.hardware import HardwareProfile, PathLatency, nominal_path, parse_nominal
from latfit.policies import POLICIES, Settings
from latfit.simulation import (
    EngineResult,
    Finding,
    Grid,
    Options,
    Point,
    Progress,
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

State = Literal["good", "doubt", "bad"]
Service = Literal["fitted", "deterministic", "exponential"]
LOGGED = 1000
"""Requests of an event log."""

MOST_ROWS = 24
"""Runs that are shown one a row; of more, p99 by rate and policy."""


class Simulation(ABC):
    """Simulated runs, one a policy or engine at a load. Print it for the answer; `.frame` has every run, a row each,
    times in ms, rates per second; `.plot()` draws them; `.to_json()` is what the command prints with `--json`."""

    runs: Sequence[SimResult] | Sequence[EngineResult]

    @cached_property
    @abstractmethod
    def answer(self) -> "Verdict":
        """The verdict with its state."""

    @property
    def verdict(self) -> str:
        """The answer in a sentence."""
        return self.answer.text

    @property
    def state(self) -> State:
        """Whether the verdict is good, in doubt or bad."""
        return self.answer.state

    @property
    @abstractmethod
    def frame(self) -> "DataFrame":
        """A DataFrame, one row a run: times in ms, rates per second, shares from 0 to 1."""

    @abstractmethod
    def tables(self, *, brief: bool = False) -> "list[Table]":
        """The results as tables of text; brief: the few rows that fit a terminal."""

    @abstractmethod
    def plot(self) -> "Figure":
        """A matplotlib figure of the runs."""

    @abstractmethod
    def page(self, made: "Making") -> "Rendered":
        """The report page."""

    @property
    def details(self) -> list[str]:
        """What else the runs say, in sentences."""
        return []

    @property
    def notes(self) -> list[str]:
        """What limits the results, each once."""
        return list(dict.fromkeys(text for run in self.runs for text in run.notes))

    @property
    def stable(self) -> bool:
        """Whether any run carries its load."""
        return any(run.stable if isinstance(run, SimResult) else run.summary.stable for run in self.runs)

    @property
    def cautions(self) -> list[str]:
        """Of notes that differ in their numbers only the first: those of a summary."""
        from latfit.reporting import distinct

        return distinct(self.notes)

    def to_json(self) -> dict[str, Any]:
        """`{"runs": [...]}`, as `--json` prints it."""
        return {"runs": [run.to_json() for run in self.runs]}

    def summary(self) -> str:
        """The verdict, a short table and what limits them, as the command prints them."""
        from latfit.reporting import table_text

        tables = [table_text(table) for table in self.tables(brief=True)]
        return "\n".join([self.verdict, *tables, *(f"  ! {note}" for note in self.cautions)])

    def __repr__(self) -> str:
        return f"Simulation of {len(self.runs)} run{'' if len(self.runs) == 1 else 's'}: {self.verdict}"

    def _repr_html_(self) -> str:
        from latfit.reporting import table_html

        return f"<p><b>{html.escape(self.verdict)}</b></p>" + "".join(map(table_html, self.tables(brief=True)))


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
        from latfit.reporting import brief_findings_table, brief_runs_table, rates_table, runs_table

        if brief:
            return [brief_findings_table(self.findings) if self.findings else brief_runs_table(self.runs)]
        return [runs_table(self.runs) if len(self.runs) <= MOST_ROWS else rates_table(self.runs)]

    @property
    def cautions(self) -> list[str]:
        """A study goes beyond what is carried on purpose."""
        return [] if self.findings else super().cautions

    @property
    def details(self) -> list[str]:
        """By how much p99 differs from that of the baseline, the first policy at a rate; a study's findings."""
        from latfit.reporting import differences

        gaps = differences(self.runs) if len(self.runs) <= MOST_ROWS else []
        return [*gaps, *(f"\n{each.claim}\n  {each.found}" for each in self.findings)]

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


def _duration(value: Any, option: str) -> float:
    return duration(value, option)


SETTINGS: Mapping[str, tuple[str, Callable[[Any, str], Any]]] = {
    "batch": ("batch", lambda value, option: int(value)),
    "window": ("window_ms", _duration),
    "t_cut": ("t_cut_ms", _duration),
    "b1": ("B1", lambda value, option: int(value)),
    "max_batch": ("max_batch", lambda value, option: int(value)),
    "rule": ("rule", lambda value, option: str(value).replace("-", " ")),
    "longest": ("longest_ms", _duration),
    "merge_below": ("merge_below", lambda value, option: int(value)),
    "ageing": ("ageing_ms", _duration),
}
"""Settings of policies by name: what they are inside, and how a value is read."""


def _used(key: str) -> Needs:
    """A setting that only some policies have."""
    inner = SETTINGS[key][0]
    names = [name for name, policy in POLICIES.items() if inner in policy.settings]
    why = f"no policy is {' or '.join(names)}"
    return Needs(key, lambda o: set(names) & set(_names(o)), why, f"Add --policy {names[0]}")


def _names(o: Any) -> list[str]:
    asked = o.policy or "gpu-only"
    return [asked] if isinstance(asked, str) else list(asked)


def varied_names(o: Any) -> list[str]:
    """Names of what is varied."""
    return [name.replace("-", "_") for name in (o.vary if o.vary is not None else values_of(o.sweep))]


def _idle_in_sweep(o: Any) -> list[str]:
    """What is varied though no policy has it."""
    inner = {key: SETTINGS[key][0] for key in varied_names(o) if key in SETTINGS}
    used = {"max_batch", "ageing_ms"} | {
        each for name in _names(o) if name in POLICIES for each in POLICIES[name].settings
    }
    return [key for key, name in inner.items() if name not in used]


def not_varied(key: str) -> Needs:
    return Needs(key, lambda o: key not in varied_names(o), "--sweep varies it")


def _adds_paths(o: Any) -> bool:
    """Whether the machine's file has a path that is not given by nominal numbers."""
    if not o.nominal:
        return True
    if _is_name(o.hardware) and not Path(o.hardware).exists():
        return False
    named = {str(each).replace("=", ":").partition(":")[0].strip() for each in o.nominal}
    return bool(set(profile_of(o.hardware).paths) - named)


NOTHING_TO_RESUME = Needs(
    "resume", lambda o: o.out is not None, "there is nothing to resume from", "Name the table with --out"
)
NO_FILE = "--nominal names every path that is simulated"
OF_MACHINES = (
    Needs("hardware", _adds_paths, NO_FILE),
    NOTHING_TO_RESUME,
)
"""What the parameters of a simulated machine need."""

OF_POLICIES = (
    *OF_MACHINES,
    *(_used(key) for key in ("batch", "window", "t_cut", "b1", "rule", "longest", "merge_below")),
    Needs("longest", lambda o: set(_names(o)) != {"split"} or o.merge_below, "nothing waits", "Add --merge-below 4"),
    Needs("ageing", lambda o: len(o.classes or ()) > 1 or o.arrivals is not None, "there is one class", "Add --class"),
    *(not_varied(key) for key in ("rate", *SETTINGS)),
    *(Needs(key, lambda o: not _idle_in_sweep(o), "no policy has all that it varies") for key in ("sweep", "vary")),
    Needs(
        "arrival_process",
        lambda o: o.arrivals is None and o.load_curve is None and o.users is None,
        "arrivals follow a file or their users, none are drawn from a process",
    ),
    Needs("rate", lambda o: o.users is None, "users send a request when they have an answer"),
    Needs("think", lambda o: o.users is not None, "there are no users", "Add --users 20"),
    Needs("by_prompt", lambda o: o.arrivals is not None, "no prompt lengths are known", "Add --arrivals FILE"),
)
"""What parameters of `simulate` need."""


def _is_name(hardware: Any) -> bool:
    return isinstance(hardware, str | Path)


@library_verb
@only_with(*OF_POLICIES)
def simulate(
    hardware: Any = "hardware.json",
    rate: str | Sequence[str] | None = None,
    policy: str | Sequence[str] = "gpu-only",
    *,
    rate_per_s: float | Sequence[float] | None = None,
    arrivals: Any = None,
    arrival_process: str = "poisson",
    load_curve: str | Path | None = None,
    users: int | None = None,
    think: Duration = "1s",
    classes: Iterable[str] = (),
    prompt_lengths: Any = None,
    by_prompt: bool = False,
    tokens_per_request: int | None = None,
    nominal: Mapping[str, str] | None = None,
    service: Service = "fitted",
    servers: Mapping[str, int] | None = None,
    buckets: Sequence[int] = (),
    settings: Mapping[str, Any] | None = None,
    vary: Mapping[str, Sequence[Any]] | None = None,
    sla: Duration | None = None,
    sla_ms: float | None = None,
    requests: int | None = None,
    replications: int = 5,
    warmup: float | None = None,
    precision: float | None = None,
    seed: int = 0,
    log: Path | None = None,
    running: Running = Running(),
    out: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    force: bool = False,
) -> PolicySimulation:
    """Simulate batching policies on one or two execution paths, all on the same random numbers.

    hardware: a `hardware.json`, a HardwareProfile, or {"cpu": fit, "gpu": "launch=12ms,slope=0.05ms"}.  rate: "500/s",
    one or several.  policy: one or several; the first is the baseline.  arrivals: recorded requests, a file or a
    table.  settings: of the policies, {"t_cut": "2ms", "batch": 8}; vary: lists of them to be combined.  Further
    parameters are the options of `latfit simulate policies`. Raises WrongUsage, BadInput; an unstable load is no error:
    its runs have `stable=False`.
    """
    asked = {name.replace("-", "_"): values for name, values in (vary or {}).items()}
    swept = rates(asked.pop("rate", None), "--sweep rate")
    offered = swept or rates(rate, per_s=rate_per_s)
    load = make_load(
        offered,
        arrivals=arrivals,
        load_curve=load_curve,
        users=users,
        think=think,
        arrival_process=arrival_process,
        classes=classes,
        prompt_lengths=prompt_lengths,
    )
    if requests is not None and isinstance(load, RecordedLoad) and requests > len(load.requests):
        few = f"{requests:,} requests are asked for, and {len(load.requests):,} are recorded"
        raise WrongUsage(few, where="--requests", remedy="Leave --requests out for all of them.")
    _refuse_tokens_of_classes(load)
    mean, longest = request_tokens(load, by_prompt, tokens_per_request)
    serving = Serving(mean, service, longest, servers or {}, buckets)
    machine = _machine(hardware, nominal)
    _refuse_unread_tokens(machine, tokens_per_request, by_prompt, prompt_lengths)
    system = _system(machine, serving, force=force)
    limit = math.inf if sla is None and sla_ms is None else duration(sla, "--sla", sla_ms)
    options = Options(requests, warmup, replications, seed, limit, precision)
    varied = {_setting(key)[0]: [_parsed(key, value) for value in values] for key, values in asked.items()}
    names = [policy] if isinstance(policy, str) else list(policy)
    skipped: list[SlaOutOfReach] = []
    grid = Grid(names, offered, varied, policy_settings(settings or {}))
    points = points_of(grid, system, load, options, solve=solve_optimal, skipped=skipped)
    if not points:
        raise skipped[0]
    _log_events(log, points[0], seed)
    runs = sweep(points, running, out=out, resume=resume, progress=progress)
    left_out = list(dict.fromkeys(error.found for error in skipped))
    outside = [text for path in machine.paths.values() if (text := PathLatency(path, mean).outside)]
    told = [replace(run, notes=[*notes_of(load), *outside, *run.notes]) for run in runs]
    return PolicySimulation(told, system, limit, left_out, subject=_subject(machine))


def _machine(hardware: Any, nominal: Mapping[str, str] | None) -> HardwareProfile:
    """The machine with paths by nominal numbers, which take the place of those with their names; where there are some
    its file may be missing."""
    more = {name: nominal_path(name, parse_nominal(text)) for name, text in (nominal or {}).items()}
    missing = isinstance(hardware, str | Path) and not Path(hardware).exists()
    known = {} if more and missing else profile_of(hardware).paths
    return HardwareProfile({**known, **more})


def _system(machine: HardwareProfile, serving: Serving, *, force: bool) -> System:
    """The paths of a machine that serve. force: whether they may be of different models."""
    system = system_of(machine, serving)
    if not force:
        check_one_model(HardwareProfile({path.name: machine.paths[path.name] for path in system.paths}))
    return system


def _refuse_tokens_of_classes(load: Load) -> None:
    """Raises WrongUsage for a class that is promised times of tokens, of which policies know nothing."""
    several = () if isinstance(load, RecordedLoad) else load.classes
    if any(min(each.ttft_slo_ms, each.tpot_slo_ms) < math.inf for each in several):
        raise WrongUsage(
            "policies answer requests as a whole, without a first token",
            where="--class",
            remedy="Give the deadline of a response: chat:0.3:sla=2s.",
        )


def _refuse_unread_tokens(
    machine: HardwareProfile, tokens_per_request: int | None, by_prompt: bool, prompt_lengths: Any
) -> None:
    """Raises WrongUsage for tokens of requests where every path costs the same whatever they are."""
    given = {
        "--tokens-per-request": tokens_per_request is not None,
        "--by-prompt": by_prompt,
        "--prompt-lengths": prompt_lengths is not None,
    }
    read = any(path.nominal is None or path.nominal.per_token_ms for path in machine.paths.values())
    for option in (name for name, said in given.items() if said and not read):
        why = "has no effect: every path has nominal numbers without per_token, whatever tokens requests have"
        raise WrongUsage(why, where=option, remedy=f"Give --nominal with per_token, or leave {option} out.")


def _subject(machine: HardwareProfile) -> str:
    from latfit.reporting import what_is_known

    return what_is_known(machine.paths.values())


def _log_events(target: Path | None, point: Point, seed: int) -> None:
    if target is not None:
        write_events(target, event_log(point.policy, point.system, point.load, LOGGED, seed))


@library_verb
@only_with(*OF_MACHINES)
def simulate_study(
    hardware: Any = "hardware.json",
    *,
    nominal: Mapping[str, str] | None = None,
    tokens_per_request: int | None = None,
    service: Service = "fitted",
    servers: Mapping[str, int] | None = None,
    buckets: Sequence[int] = (),
    sla: Duration | None = None,
    sla_ms: float | None = None,
    requests: int | None = None,
    replications: int = 5,
    warmup: float | None = None,
    precision: float | None = None,
    seed: int = 0,
    running: Running = Running(),
    out: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    force: bool = False,
) -> PolicySimulation:
    """Put claims of the literature on batching to the test: every policy at ten loads up to what the main path
    serves, and serving engines whose steps cost the same.

    Parameters as in `simulate`; `sla`: without it 2.5 times the main path's latency for one request. Raises as
    `simulate` does.
    """
    serving = Serving(float(tokens_per_request or 1), service, 0.0, servers or {}, buckets)
    machine = _machine(hardware, nominal)
    system = _system(machine, serving, force=force)
    limit = math.inf if sla is None and sla_ms is None else duration(sla, "--sla", sla_ms)
    options = Options(requests, warmup, replications, seed, limit, precision)
    points = policy_points(system, options, solve_optimal)
    runs = sweep(points, running, out=out, resume=resume, progress=progress)
    limit = points[0].options.sla_ms
    engines = serving_study(system.main, seed)
    found = [*findings(runs, system, limit), *engines.findings]
    return PolicySimulation(runs, system, limit, (), found, engines, _subject(machine))


def solve_optimal(rate: float, T_ms: "FloatArray") -> "DispatchTable":
    """The optimal dispatch table of a main path; the policies know of no solver."""
    from latfit.queueing import measured_times, optimal_rule

    return optimal_rule(rate, measured_times(T_ms)).table


def policy_settings(given: Mapping[str, Any]) -> Settings:
    """Settings of policies by the names of `SETTINGS`; None for the default. Raises WrongUsage."""
    chosen = {
        _setting(key)[0]: _parsed(key, value, key.replace("_", "-"))
        for key, value in given.items()
        if value is not None
    }
    return Settings(**chosen)


def _setting(key: str) -> tuple[str, Callable[[Any, str], Any]]:
    if key not in SETTINGS:
        known = ", ".join(name.replace("_", "-") for name in SETTINGS)
        raise WrongUsage(f"{key!r} is not a setting", where="--sweep", remedy=f"Vary rate, {known}.")
    return SETTINGS[key]


def _parsed(key: str, value: Any, where: str = "sweep") -> Any:
    option = f"--{where}" if where != "sweep" else f"--sweep {key.replace('_', '-')}"
    try:
        return _setting(key)[1](value, option)
    except (TypeError, ValueError):
        raise WrongUsage(f"{value!r} cannot be read", where=option, remedy="Give a number.") from None
