"""`tune`: settings of a running engine for a load and its SLOs, found by measuring, planning and measuring again."""

import math
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from latfit import reporting
from latfit.api.answer import Answer, State
from latfit.api.fits import Fit, fit
from latfit.api.loads import make_load
from latfit.api.quantities import duration, rates
from latfit.api.reports import export
from latfit.api.request import verb
from latfit.api.requests import ENGINE_TOKEN, EnginePlanRequest, TuneRequest
from latfit.api.serving import EnginePlan, plan_engine
from latfit.api.validations import Validation, validate
from latfit.engines import BY_KEY, ENGINES, engine_key, engine_started_by
from latfit.errors import BadInput, HardwareMissing, Interrupted, refuse
from latfit.exporting import with_flags
from latfit.files import write_json, write_text
from latfit.messages import Message
from latfit.metrics import Server, ServerState, limit_shown
from latfit.planning import MIN_CHUNK, parse_target
from latfit.profiling import LoadWatch
from latfit.provenance import utc_now
from latfit.simulation import FEWEST
from latfit.tuning import (
    BUSY,
    TRACE_DIR,
    Answered,
    Run,
    Tuning,
    files_in,
    find_steps,
    recording,
    send_load,
    start_engine,
    until_answered,
    warm_up,
)
from latfit.units import count_text, format_ms, format_rate
from latfit.validation import compare_percentile
from latfit.workload import ClosedLoad, OpenLoad, RecordedLoad, Requests, Streams, make_requests

STAGES = (0.5, 1.0, 2.0)  # rates of the first load, as ratios of the requested one
BEHIND = 1.5  # ratio of answering to sending time from which no higher rate is tried
WIDER = 4  # multiple of a limit of requests that hides larger batches
RAMP_UP = 0.2  # share of a drawn load that is not counted, and length of a load that warms the engine up
MIN_WARM_REQUESTS = 4
API_KEY = "--api-key"  # the option of vLLM, SGLang and llama.cpp
START_S = 900.0  # longest time for an engine to load its model and compile
ASKED = 3  # times that a restart by hand is asked for
LESS = (0.8, 0.6, 0.4, 0.2)  # shares of a rate that is too high, for which settings are planned instead
SAVED_S = "10"  # the plug-in writes a file after so many seconds
REQUESTS = "requests.csv"
COLUMNS = {
    "t_s": "due_s",
    "prompt_tokens": "prompt_tokens",
    "output_tokens": "output_tokens",
    "first_token_s": "first_s",
    "last_token_s": "last_s",
}
"""The last load's requests with their measured times, as `latfit validate` reads them."""


@dataclass(frozen=True, repr=False, eq=False)
class Tuned(Answer):
    """Settings with what was planned and measured. validation: the last load beside its simulation.  steps: what
    `--dry-run` would do."""

    result: Tuning
    plan: EnginePlan | None = None
    fit: Fit | None = None
    validation: Validation | None = None
    steps: Sequence[str] = ()

    @property
    def kept(self) -> bool:
        """Whether the last run met the SLOs at the asked rate."""
        runs = self.result.runs
        return bool(runs) and runs[-1].kept and runs[-1].rate_per_s >= self.result.rate_per_s

    @property
    def verified(self) -> bool:
        """Whether the last run had the settings that were found."""
        return self.result.runs[-1].settings == self.result.settings

    @property
    def state(self) -> State:
        return "good" if self.kept or self.steps else "bad"

    @property
    def verdict(self) -> str:
        found, at = self.result, format_rate(self.result.rate_per_s)
        if self.steps:
            return "Nothing was started. Steps:"
        if not found.settings and not self.kept:
            return f"No settings meet the SLOs on one engine at {at}."
        last = found.runs[-1]
        outcome = ", ".join(
            f"{each.name} {format_ms(each.measured_ms)} of {format_ms(each.limit_ms)}" for each in last.figures
        )
        if not self.verified:
            return f"Settings were planned, but not tried: no restart was left. {last.name.capitalize()}: {outcome}."
        if last.rate_per_s < found.rate_per_s:
            return f"One engine does not carry {at}. At {format_rate(last.rate_per_s)} it measured {outcome}."
        return f"The SLOs are {'kept' if last.kept else 'missed'} at {at}: {outcome}."

    @property
    def lines(self) -> list[str]:
        if self.steps:
            return list(self.steps)
        found = self.result
        lines = [] if found.settings or self.plan is None else [self.plan.verdict]
        if found.capacity_per_s is not None:
            ends = found.capacity_interval_per_s
            interval = "" if ends is None else f" (95 %: {ends[0]:.3g} to {ends[1]:.3g})"
            lines.append(f"Capacity {format_rate(found.capacity_per_s)}{interval}.")
        lines.append(f"{count_text(found.restarts, 'restart')}, {format_ms(1e3 * found.seconds)}.")
        return lines + ([f"Start it with: {found.command}"] if found.command else [])

    @property
    def warnings(self) -> list[Message]:
        return self.result.messages

    def tables(self, *, brief: bool = False) -> "list[reporting.Table]":
        rows = [
            [
                run.name,
                f"{each.name} {format_ms(each.limit_ms)}",
                reporting.with_interval(each.planned_ms, each.planned_interval_ms),
                reporting.with_interval(each.measured_ms, each.interval_ms),
                "kept" if each.kept else "broken",
            ]
            for run in self.result.runs
            for each in run.figures
        ]
        names = ["run", "SLO", "planned", "measured", "verdict"]
        return [reporting.Table("", names, rows, words=names)] if rows else []

    @property
    def numbers(self) -> "list[reporting.KeyNumber]":
        measured = [
            reporting.KeyNumber(each.name, format_ms(each.measured_ms), f"limit {format_ms(each.limit_ms)}")
            for run in self.result.runs[-1:]
            for each in run.figures
        ]
        return [*measured, reporting.KeyNumber("Restarts", str(self.result.restarts), "of the engine")]

    def page(self, made: "reporting.Making") -> "reporting.Rendered":
        found = self.result
        asked = f"{found.engine}, {format_rate(found.rate_per_s)}"
        card = reporting.Card(asked, "", self.verdict, self.state, [], self.numbers, found.command)
        planned = [] if self.plan is None else self.plan.tables()
        figure = None if self.validation is None else self.validation.plot()
        return reporting.answer_page("A tuned engine", card, made, [*self.tables(), *planned], figure, self.messages)

    def to_json(self) -> dict[str, Any]:
        return self.result.to_json() | {
            "kept": self.kept,
            "warnings": [each.to_json() for each in self.warnings],
            "dry_run": list(self.steps),
        }


@dataclass
class Loop:
    """The state of one tuning.

    traces: the steps of all runs so far.  plan, fit: the last ones.  share: of the rate, that is planned for.  limit:
    requests that the engine ran at once while others waited; None if none waited.  last: counters at the end of the
    last start.  loads: how many were sent.
    """

    request: TuneRequest
    begun_s: float = field(default_factory=time.monotonic)
    starts: int = 0
    engine: str = ""
    single: bool = True
    traces: list[Path] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    plan: EnginePlan | None = None
    fit: Fit | None = None
    share: float = 1.0
    limit: int | None = None
    last: ServerState | None = None
    loads: int = 0

    def __post_init__(self) -> None:
        request = self.request
        self.command = [part for word in request.command for part in re.split(f"(?<=^{API_KEY})=", word)]
        keys = [word for option, word in pairwise(self.command) if option == API_KEY]
        self.key = keys[-1] if keys else None
        self.token = request.token or self.key
        self.targets = [
            parse_target(str(text), name, f"--{name}")
            for name, text in (("ttft", request.ttft), ("tpot", request.tpot))
            if text is not None
        ]
        no_engine = not self.command and request.url is None
        no_load = request.arrivals is None and not (request.rate and request.lengths)
        refuse(no_engine, "no engine is given", "COMMAND", "Give -- vllm serve MODEL, or --url.")
        refuse(not self.targets, "no SLO is given", "--ttft, --tpot", "Give --ttft 500ms, --tpot 50ms.")
        refuse(no_load, "no load is given", "--rate", "Give --rate 8/s --lengths 500:200, or --arrivals FILE.")
        self.load_s = duration(request.load, "--load") / 1e3
        self.load = _load(request, self.load_s)
        self.rate_per_s = 1e3 * self.load.rate
        self.budget_s = duration(request.budget, "--budget") / 1e3
        self.out = Path(request.out)
        words = " ".join(self.command)
        started = engine_started_by(self.command)
        self.recording_flag = "" if started is None else started.recording_flag
        port = re.search(r"--port[= ](\d+)", words)
        port_text = port[1] if port else (started or ENGINES[0]).port
        self.url = (request.url or f"http://127.0.0.1:{port_text}").rstrip("/")

    def with_settings(self) -> list[str]:
        """Return the command with the settings in use, on loopback by default; the options alone if others start it."""
        has_host = not self.command or any(word.partition("=")[0] == "--host" for word in self.command)
        return with_flags([*self.command, *([] if has_host else ["--host", "127.0.0.1"])], self.settings)

    def show(self, words: Sequence[str]) -> str:
        """Return a command as it is typed; its API key is a variable, as screens and files keep what they show."""
        return " ".join(f'"${ENGINE_TOKEN}"' if word == self.key else shlex.quote(word) for word in words)

    def with_recording(self) -> list[str]:
        """Return the command with the settings in use, and with the engine's option for recording steps."""
        words = self.with_settings()
        return words + ([self.recording_flag] if self.recording_flag and self.recording_flag not in words else [])

    def describe(self) -> list[str]:
        """Return what will happen."""
        start = f"Start: {self.show(self.with_recording())}" if self.command else f"Use the engine at {self.url}"
        stages = ", ".join(format_rate(share * self.rate_per_s) for share in STAGES)
        sent = f"for {format_ms(1e3 * self.load_s)} each"
        if isinstance(self.load, RecordedLoad):
            sent = f"with {count_text(len(self.load.requests), 'recorded request')}"
        again = "Start it again" if self.command else "Ask for a restart"
        return [
            f"1. {start}",
            f"2. Load it at {stages} {sent}, and record its steps.",
            "3. Fit the steps and plan settings for one engine.",
            f"4. {again} with these settings, load it at {format_rate(self.rate_per_s)}, and compare with the plan.",
            f"5. If that run contradicts the plan, repeat 3 and 4: {self.request.max_restarts} restarts at most.",
        ]

    def tell(self, text: str) -> None:
        if self.request.progress is not None:
            self.request.progress(text)

    @contextmanager
    def engine_up(self) -> Iterator[str]:
        """Have an engine with the settings in use, and yield the name of its model."""
        self.starts += 1
        if not self.command:
            yield self.by_hand()
            return
        words = self.with_recording()
        self.tell(f"Starting {self.show(words)}")
        environment = {TRACE_DIR: str(self._steps.absolute()), "LATFIT_TRACE_SECONDS": SAVED_S}
        engine = start_engine(words, self.out / f"engine-{self.starts}.log", environment, self.url)
        try:
            yield until_answered(self.url, START_S, engine.why_gone, self.token)
        finally:
            engine.stop()

    def by_hand(self) -> str:
        """Ask for a restart, but for the first start; return the name of the model. Raises BadInput."""
        for _ in range(ASKED):
            if self.last is not None:
                assert self.request.restart is not None
                self.request.restart(self.show(self.with_settings()))
            model = until_answered(self.url, START_S, token=self.token)
            if self.last is None or Server(self.url).first().state.fell_below(self.last):
                return model
            self.tell("It was not restarted: its counters go on")
        raise BadInput("was not restarted", where=self.url, remedy="End it before it is started again.")

    @property
    def _steps(self) -> Path:
        return self.out / f"steps-{self.starts}"

    def measure(self, names: Sequence[str], shares: Sequence[float]) -> None:
        """Start the engine and load it at shares of the rate, recording its steps.

        names: of the runs to keep, else empty.
        """
        with self.engine_up() as model:
            self.tell("Warming it up")
            count = max(round(RAMP_UP * self.rate_per_s * self.load_s), MIN_WARM_REQUESTS)
            warm_up(lambda number: self.send(model, self.load.sample(count, Streams(self.request.seed, 100 + number))))
            cold = files_in(self._steps)
            with recording(self.url, self.out / f"windows-{self.starts}.parquet") as recorder:
                for stage, (name, share) in enumerate(zip(names, shares, strict=True)):
                    requests = self.requests(share, 10 * self.starts + stage)
                    at = share * self.rate_per_s
                    answers, others = self.load_with(model, requests, at)
                    if name and (others or 0.0) > BUSY:
                        self.tell("Other programs kept the machine busy: sending them again")
                        answers, others = self.load_with(model, requests, at)
                    if name:
                        self.runs.append(self.run_of(name, at, answers, others))
                    if max(each.last_s for each in answers) > BEHIND * max(each.due_s for each in answers):
                        break
            assert recorder.last is not None
            self.last = recorder.last.state
            self.engine = engine_key([{"engine": self.last.engine}])
        shown = limit_shown(recorder.queued)
        self.limit = None if shown is None else round(shown)
        found = find_steps(self._steps, recorder, cold)
        self.single = self.single and recorder.out not in found
        self.traces += found

    def load_with(self, model: str, requests: Requests, at: float) -> tuple[list[Answered], float | None]:
        """Send requests; return the answers and the share of the CPUs that neither engine nor client used."""
        self.tell(f"Sending {len(requests):,} requests at {format_rate(at)}")
        watch = LoadWatch(1)
        answers = self.send(model, requests)
        seen = watch() if self.command else None
        return answers, None if seen is None else seen.other_cpus / (seen.spare_cpus + 1)

    def requests(self, share: float, replication: int) -> Requests:
        """Return the requests at a share of the rate: the recorded ones, or drawn for the length of a load."""
        load = self.load.at_rate(share * self.load.rate)
        if isinstance(load, RecordedLoad):
            return load.requests
        return load.sample(
            max(round(share * self.rate_per_s * self.load_s), 1), Streams(self.request.seed, replication)
        )

    def send(self, model: str, requests: Requests) -> list[Answered]:
        """Send requests. Raises BadInput if none is answered."""
        self.loads += 1
        found = send_load(self.url, model, requests, (self.request.seed, self.loads), self.token)
        if all(each.failure for each in found):
            raise BadInput(found[0].failure, where=self.url, remedy="It has to serve /v1/completions of token ids.")
        return found

    def run_of(self, name: str, at: float, answers: Sequence[Answered], others: float | None) -> Run:
        """Return a run, of a drawn load without its first fifth; its requests go into a file."""
        from pandas import DataFrame

        whole = [each for each in answers if not each.failure]
        columns = {name: [getattr(each, ours) for each in whole] for name, ours in COLUMNS.items()}
        write_text(self.out / REQUESTS, DataFrame(columns).to_csv(index=False))
        # A plan for recorded requests counts all of them, from an idle engine on.
        ramp_up_s = 0.0 if isinstance(self.load, RecordedLoad) else RAMP_UP * self.load_s
        counted = [each for each in answers if each.due_s >= ramp_up_s] or [*answers]
        whole = [each for each in counted if not each.failure]
        planned = {} if self.plan is None else {each.name: each for each in self.plan.result.targets}
        figures = []
        for target in self.targets:
            times = np.array([getattr(each, f"{target.metric}_ms") for each in whole])
            plan = planned.get(target.name)
            known = None if plan is None else (plan.value, plan.interval)
            figures.append(compare_percentile(target.name, target.percentile, times, target.limit_ms, known))
        late = float(np.quantile([each.sent_s - each.due_s for each in counted], 0.99))
        return Run(
            name=name,
            settings=dict(self.settings),
            rate_per_s=at,
            requests=len(counted),
            failed=len(counted) - len(whole),
            late_ms=1e3 * late,
            others=others,
            figures=[each for each in figures if each is not None],
        )

    def plan_settings(self) -> bool:
        """Fit the steps and plan one engine; return whether its settings meet the SLOs at the requested rate.

        If none do, the settings in use are those for a rate that one engine carries, or none.
        """
        if not self.traces:
            remedy = "Give a higher --rate, or a longer --load."
            raise BadInput("no steps of a busy engine were recorded", where=self.url, remedy=remedy)
        self.tell("Fitting and planning")
        # A linear cost of a mean step is the mean cost of the steps of its window; other models are not.
        self.fit = fit([str(each) for each in self.traces], model="auto" if self.single else "linear")
        self.fit.save(self.out / "engine.fit.json")
        largest_step = 2 ** int(math.log2(self.fit.result.domain["S"][1]))
        least = min(MIN_CHUNK, int(self.requests(1.0, 0).prompt_tokens.max()))
        is_feasible = False
        for self.share in (1.0, *LESS):
            self.plan = self.plan_one()
            if self.plan.feasible and self.plan.result.unsupported and largest_step >= least:
                # The engine may allow larger steps than it had: plan with those that it had.
                self.plan = self.plan_one(max_num_batched_tokens=largest_step)
            is_feasible = self.plan.feasible and not self.plan.result.unsupported
            # Mean steps of windows are smaller than those with a prompt: chunks of their size are no settings.
            is_feasible = is_feasible and self.plan.engine["max_num_batched_tokens"] >= least
            if is_feasible:
                break
        assert self.plan is not None
        self.plan.save(self.out / "plan.json")
        self.settings = {}
        if is_feasible:
            exported = export(self.plan, self.engine)
            self.settings = dict(exported.settings)
            exported.save(self.out)
        return is_feasible and self.share == 1.0

    def plan_one(self, **settings: int) -> EnginePlan:
        """Plan one engine, with these settings, for the share of the rate."""
        request = self.request
        return plan_engine(
            self.fit,
            rate_per_s=self.share * self.rate_per_s,
            lengths=request.lengths,
            arrivals=self.load.requests if isinstance(self.load, RecordedLoad) else None,
            ttft=request.ttft,
            tpot=request.tpot,
            replicas=1,
            engine=settings or None,
            seed=request.seed,
        )

    @property
    def may_restart(self) -> bool:
        restarts, used = self.starts - 1, time.monotonic() - self.begun_s
        return restarts < self.request.max_restarts and used < self.budget_s

    def validated(self) -> Validation | None:
        """The last load beside its simulation with the same requests; None if it had no planned settings."""
        if not self.settings or self.plan is None or self.runs[-1].settings != self.settings:
            return None
        engine = {name: self.plan.engine[name] for name in ("max_num_seqs", "max_num_batched_tokens", "kv_blocks")}
        return validate(self.fit, self.out / REQUESTS, engine=engine, seed=self.request.seed)

    def result(self) -> Tuning:
        plan = None if self.plan is None else self.plan.result
        command = self.show(self.with_settings()) if self.settings else ""
        return Tuning(
            engine=BY_KEY[self.engine].name if self.engine in BY_KEY else self.engine,
            rate_per_s=self.rate_per_s,
            settings=self.settings,
            command=command,
            capacity_per_s=None if plan is None else plan.capacity_per_s,
            capacity_interval_per_s=None if plan is None else plan.capacity_interval_per_s,
            restarts=max(self.starts - 1, 0),
            seconds=time.monotonic() - self.begun_s,
            steps="steps" if self.single else "windows",
            runs=self.runs,
            files=[str(each) for each in sorted(self.out.rglob("*")) if each.is_file()],
        )


@verb(TuneRequest)
def tune(request: TuneRequest) -> Tuned:
    """Find settings of one engine for a load and its SLOs: measure, plan, restart, measure again.

    command: starts the engine; or url, of one that somebody else starts again when `restart` is called with the
    options. What was started is stopped. Raises WrongUsage, BadInput, HardwareMissing, TargetNotWritable.
    """
    loop = Loop(request)
    if request.dry_run:
        return Tuned(loop.result(), steps=loop.describe())
    if find_spec("aiohttp") is None:
        remedy = "Install it: pip install 'latfit[live]'."
        raise HardwareMissing("aiohttp is not installed", where="latfit tune", remedy=remedy)
    loop.out.mkdir(parents=True, exist_ok=True)
    try:
        loop.measure(["", "as started", ""], STAGES)
        if not loop.plan_settings() and loop.limit and loop.may_restart:
            loop.settings = {BY_KEY[loop.engine].options[0].name: WIDER * loop.limit}
            loop.measure(["", "", ""], STAGES)
            loop.plan_settings()
        while loop.settings and loop.may_restart:
            before = loop.settings
            loop.measure(["as planned"], [loop.share])
            last = loop.runs[-1]
            if last.kept or all(each.as_planned for each in last.figures):
                break
            loop.plan_settings()
            if loop.settings == before:
                break
    except KeyboardInterrupt:
        raise Interrupted("interrupted", where=str(loop.out), remedy="Its traces and logs are kept.") from None
    found = Tuned(loop.result(), loop.plan, loop.fit, loop.validated())
    write_json(loop.out / "tune.json", found.to_json())
    if found.plan is not None:
        reporting.write_page(loop.out, found.page(reporting.Making(made_at=utc_now())), "report.html")
    return found


def _load(request: TuneRequest, load_s: float) -> OpenLoad | RecordedLoad:
    """Return the load of `latfit plan` with these options; of recorded requests the busiest part of this length.

    Raises WrongUsage, BadInput.
    """
    planned = EnginePlanRequest(rate=request.rate, lengths=request.lengths, arrivals=request.arrivals)
    offered = rates(request.rate)
    load = make_load(planned, offered)
    assert not isinstance(load, ClosedLoad)  # of users, whom the request does not have
    if isinstance(load, OpenLoad):
        return load
    requests = load.requests.at_rate(offered[0]) if offered else load.requests
    busiest = requests.busiest(1e3 * load_s)
    # Classes and deadlines of a recording are no part of what the client sends.
    sent = replace(
        make_requests(busiest.arrival_ms, busiest.prompt_tokens, busiest.output_tokens), prefix=busiest.prefix
    )
    if not (sent.rate > 0 and len(sent) >= FEWEST):
        found = f"{count_text(len(sent), 'recorded request')} in {format_ms(1e3 * load_s)} are too few"
        raise BadInput(found, where="--arrivals", remedy=f"Give {FEWEST} or more, or a longer --load.")
    return RecordedLoad(sent, load.notes)
