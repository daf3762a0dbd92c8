"""`tune`: settings found by measuring, planning and measuring again."""

import math
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from latfit import reporting
from latfit.api.answer import WithPage
from latfit.api.fits import Fit, fit
from latfit.api.quantities import duration, rates
from latfit.api.reading import make_load
from latfit.api.reports import export
from latfit.api.request import verb
from latfit.api.requests import ENGINE_TOKEN, EnginePlanRequest, TuneRequest
from latfit.api.serving import EnginePlan, plan_engine
from latfit.api.validations import Validation, validate
from latfit.engines import BY_KEY, ENGINES, engine_key, engine_started_by
from latfit.errors import BadInput, HardwareMissing, Interrupted, LatfitError, refuse
from latfit.exporting import Exported, with_flags
from latfit.files import write_json, write_text
from latfit.messages import Message
from latfit.metrics import Server, ServerState
from latfit.planning import MIN_CHUNK, parse_target
from latfit.profiling import LoadWatch
from latfit.provenance import utc_now
from latfit.simulation import FEWEST
from latfit.tuning import (
    MAX_OTHER_CPUS,
    TRACE_DIR,
    Answered,
    Run,
    Tuning,
    recording,
    send_load,
    start_engine,
    until_answered,
    warm_up,
)
from latfit.units import count_text, format_ms, format_rate
from latfit.validation import compare_percentile
from latfit.workload import ClosedLoad, OpenLoad, RecordedLoad, Requests, Streams, make_requests

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STAGES = (0.5, 1.0, 2.0)  # rates of the first load, as ratios of the requested one
BEHIND = 1.5  # no higher rate is tried if the last first token comes after this multiple of the sending time
LIMIT_FACTOR = 4  # a limit of requests that hides larger batches is raised to this multiple
RAMP_UP = 0.2  # first share of a drawn load that is not counted; a warm-up load has this share of the requests
MIN_WARM_REQUESTS = 4
API_KEY = "--api-key"  # the option of vLLM, SGLang and llama.cpp
START_S, ENDS_WITHIN_S = 900.0, 2.0  # longest time to load a model and compile; to end after answers broke off
MAX_RESTART_PROMPTS = 3  # to the person who restarts the engine
REDUCED_SHARES = (0.8, 0.6, 0.4, 0.2)  # of the rate; planned in turn if no settings sustain all of it
SAVED_S, WRITTEN_WITHIN_S = 2, 0.5  # seconds between the plug-in's files; longest time to write one
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
class Tuned(WithPage):
    """Settings with what was planned and measured."""

    title = "A tuned engine"

    result: Tuning
    plan: EnginePlan | None = None
    fit: Fit | None = None
    validation: Validation | None = None  # of the last load
    todo: Sequence[str] = ()  # what `--dry-run` would do

    @property
    def kept(self) -> bool:
        """Whether the SLOs were met at the requested rate."""
        run = self.result.tried
        return run is not None and run.kept and run.rate_per_s >= self.result.rate_per_s

    @cached_property
    def _shown(self) -> "reporting.table.Shown":
        found, tables = self.result, reporting.simulation_tables
        if self.todo:
            return reporting.table.Shown("Nothing was started. Steps:", lines=self.todo)
        lines = [] if found.settings or self.kept or self.plan is None else [self.plan.verdict]
        if found.capacity_per_s is not None:
            ends = found.capacity_interval_per_s
            interval = "" if ends is None else f" (95 %: {ends[0]:.3g} to {ends[1]:.3g})"
            lines.append(f"Capacity {format_rate(found.capacity_per_s)}{interval}.")
        lines.append(f"{count_text(found.restarts, 'restart')}, {format_ms(1e3 * found.seconds)}.")
        if found.command:
            lines.append(reporting.table.CommandLine(f"Start it with: {found.command}"))
        table = reporting.table.make_table(
            "",
            [(run, each) for run in found.runs for each in run.figures],
            ("run", lambda row: row[0].name),
            ("SLO", tables.promised),
            *tables.PROMISES,
            ("verdict", lambda row: "met" if row[1].kept else "missed"),
            words=("run", "SLO", "planned", "measured", "verdict"),
        )
        KeyNumber = reporting.table.KeyNumber
        numbers = [
            KeyNumber(each.name, tables.with_interval(each.measured_ms, None), f"limit {format_ms(each.limit_ms)}")
            for each in (found.tried or found.runs[-1]).figures
        ]
        return reporting.table.Shown(
            self._verdict(),
            "good" if self.kept else "bad",
            lines,
            messages=self.warnings,
            brief=[table],
            tables=[table, *([] if self.plan is None else self.plan.tables())],
            numbers=[*numbers, KeyNumber("Restarts", str(found.restarts), "of the engine")],
        )

    def _verdict(self) -> str:
        found, at = self.result, format_rate(self.result.rate_per_s)
        if not found.settings and not self.kept:
            return f"No settings meet the SLOs on one engine at {at}."
        run, with_interval = found.tried, reporting.simulation_tables.with_interval
        if run is None:
            return "Settings were planned, but not tried: no restart or time was left."
        outcome = ", ".join(
            f"{each.name} {with_interval(each.measured_ms, None)} of {format_ms(each.limit_ms)}" for each in run.figures
        )
        if run.rate_per_s < found.rate_per_s:
            return f"One engine does not carry {at}. At {format_rate(run.rate_per_s)} it measured {outcome}."
        how = "" if found.settings else " as it was started"
        return f"The SLOs are {'met' if run.kept else 'missed'} at {at}{how}: {outcome}."

    @property
    def subject(self) -> str:
        return f"{self.result.engine}, {format_rate(self.result.rate_per_s)}"

    def plot(self) -> "Figure | None":
        return None if self.validation is None else self.validation.plot()

    @property
    def warnings(self) -> list[Message]:
        return self.result.messages

    def to_json(self) -> dict[str, Any]:
        return self.result.to_json() | {
            "kept": self.kept,
            "warnings": [each.to_json() for each in self.warnings],
            "dry_run": list(self.todo),
        }


@dataclass
class Loop:
    """The state of one tuning."""

    request: TuneRequest
    begun_s: float = field(default_factory=time.monotonic)
    starts: int = 0
    engine: str = ""
    all_single: bool = True  # whether every start wrote single steps
    traces: list[Path] = field(default_factory=list)  # steps of all starts
    runs: list[Run] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)  # in use; empty as started
    plan: EnginePlan | None = None
    fit: Fit | None = None
    exports: list[Exported] = field(default_factory=list)  # settings of all plans
    share: float = 1.0  # of the rate, that the plan is for
    limit: int | None = None  # most requests that ran while others waited; None if none did
    last: ServerState | None = None  # counters when the last start ended
    loads: int = 0  # sent
    why_gone: Callable[[], str] = lambda: ""  # why the engine has ended; empty while it runs

    def __post_init__(self) -> None:
        request = self.request
        self.command = [part for word in request.command for part in re.split(f"(?<=^{API_KEY})=", word)]
        keys = [word for option, word in pairwise(self.command) if option == API_KEY]
        self.key = keys[-1] if keys else None
        self.token = self.key or request.token
        self.targets = [
            parse_target(str(text), name, f"--{name}")
            for name, text in (("ttft", request.ttft), ("tpot", request.tpot))
            if text is not None
        ]
        no_engine = not self.command and request.url is None
        nobody = request.url is not None and request.restart is None and not request.dry_run
        no_load = request.arrivals is None and not (request.rate and request.lengths)
        refuse(no_engine, "no engine is given", "COMMAND", "Give -- vllm serve MODEL, or --url.")
        refuse(nobody, "nobody restarts the engine", "restart", "Give a function that does, or a command.")
        refuse(not self.targets, "no SLO is given", "--ttft, --tpot", "Give --ttft 500ms, --tpot 50ms.")
        refuse(no_load, "no load is given", "--rate", "Give --rate 8/s --lengths 500:200, or --arrivals FILE.")
        self.seconds = duration(request.load, "--load") / 1e3
        self.load = _make_load(request, self.seconds)
        self.rate_per_s = 1e3 * self.load.rate
        self.budget_s = duration(request.budget, "--budget") / 1e3
        self.out = Path(request.out)
        words = " ".join(self.command)
        started = engine_started_by(self.command)
        self.recording_flag = "" if started is None else started.recording_flag
        self.newer = "" if started is None else f"{started.name} {started.recording_versions}"
        port = re.findall(r"--port[= ](\d+)", words)[-1:] or [(started or ENGINES[0]).port]
        host = (re.findall(r"--host[= ](\S+)", words) or ["127.0.0.1"])[-1].strip("[]")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        place = f"[{host}]:{port[0]}" if ":" in host else f"{host}:{port[0]}"
        self.url = (request.url or f"http://{place}").rstrip("/")
        Server(self.url)  # refuses what is no address

    def with_settings(self) -> list[str]:
        """Return the command, or the options alone if others start it."""
        has_host = not self.command or any(word.partition("=")[0] == "--host" for word in self.command)
        return with_flags([*self.command, *([] if has_host else ["--host", "127.0.0.1"])], self.settings)

    def show(self, words: Sequence[str]) -> str:
        """Return a command to paste into a shell, with a variable for its API key."""
        return " ".join(f'"${ENGINE_TOKEN}"' if word == self.key else shlex.quote(word) for word in words)

    def with_recording(self) -> list[str]:
        words = self.with_settings()
        return words + ([self.recording_flag] if self.recording_flag and self.recording_flag not in words else [])

    def describe(self) -> list[str]:
        """Return what will happen."""
        start = f"Start: {self.show(self.with_recording())}" if self.command else f"Use the engine at {self.url}"
        stages = ", ".join(format_rate(share * self.rate_per_s) for share in STAGES)
        sent = f"for {format_ms(1e3 * self.seconds)} each"
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
        """Yield the name of the model of an engine with the settings in use."""
        self.starts += 1
        if not self.command:
            yield self.by_hand()
            return
        words = self.with_recording()
        self.tell(f"Starting {self.show(words)}")
        environment = {TRACE_DIR: str(self.step_folder.absolute()), "LATFIT_TRACE_SECONDS": str(SAVED_S)}
        engine = start_engine(words, self.out / f"engine-{self.starts}.log", environment, self.url)
        self.why_gone = engine.why_gone
        try:
            yield until_answered(self.url, START_S, engine.why_gone, self.token)
        except BadInput as error:
            if self.recording_flag and self.recording_flag in error.found:  # of an engine that does not have it
                error.remedy = f"tune records steps with it: take {self.newer}, or start yours and give --url."
            raise
        finally:
            engine.stop()

    def by_hand(self) -> str:
        """Ask for a restart. Raises BadInput."""
        for _ in range(MAX_RESTART_PROMPTS):
            if self.last is not None:
                assert self.request.restart is not None
                self.request.restart(self.show(self.with_settings()))
            model = until_answered(self.url, START_S, token=self.token)
            if self.last is None or Server(self.url).first().state.fell_below(self.last):
                return model
            self.tell("It was not restarted: its counters were not reset")
        raise BadInput("was not restarted", where=self.url, remedy="End it before it is started again.")

    @property
    def step_folder(self) -> Path:
        return self.out / f"steps-{self.starts}"

    def measure(self, names: Sequence[str], shares: Sequence[float]) -> None:
        """Start the engine and load it at shares of the rate, recording its steps; loads without a name are no runs."""
        with self.engine_up() as model:
            self.tell("Warming it up")
            count = max(round(RAMP_UP * self.rate_per_s * self.seconds), MIN_WARM_REQUESTS)
            warm_up(lambda number: self.send(model, self.load.sample(count, Streams(self.request.seed, 100 + number))))
            known, single = self.written_steps(), set[Path]()
            # One recorder for all loads: its readings are out of step with bursts that come by the second.
            with recording(self.url, self.out / f"windows-{self.starts}.parquet") as recorder:
                for stage, (name, share) in enumerate(zip(names, shares, strict=True)):
                    requests, at = self.draw_requests(share, 10 * self.starts + stage), share * self.rate_per_s
                    windows = len(recorder.rows)
                    answers, others = self.send_at(model, requests, at)
                    if (others or 0.0) > MAX_OTHER_CPUS:
                        self.tell("Other programs kept the machine busy: sending them again")
                        known, recorder.keep_rows = self.written_steps(), windows
                        answers, others = self.send_at(model, requests, at)
                    known, before = self.written_steps(), known
                    single |= known - before
                    if name:
                        self.runs.append(self.run_of(name, at, answers, others))
                    last_first_s = max(each.first_s for each in answers)
                    if share >= 1 and last_first_s > BEHIND * max(each.due_s for each in answers):
                        break
            assert recorder.last is not None
            self.last = recorder.last.state
            self.engine = engine_key([{"engine": self.last.engine}])
        self.limit = recorder.limit
        self.all_single = self.all_single and bool(single)
        is_busy = not all(row["idle"] for row in recorder.rows)
        self.traces += sorted(single) or ([recorder.out] if is_busy else [])

    def written_steps(self) -> set[Path]:
        """Wait until the plug-in, if one made the folder, has written all steps so far; return its files."""
        if self.step_folder.exists():
            time.sleep(SAVED_S + WRITTEN_WITHIN_S)
        return set(self.step_folder.glob("*.parquet"))

    def send_at(self, model: str, requests: Requests, at: float) -> tuple[list[Answered], float | None]:
        """Send requests; return the answers, and the share of the CPUs that other programs used."""
        self.tell(f"Sending {len(requests):,} requests at {format_rate(at)}")
        watch = LoadWatch()
        answers = self.send(model, requests)
        seen = watch() if self.command else None
        return answers, None if seen is None else seen.share

    def draw_requests(self, share: float, replication: int) -> Requests:
        load = self.load.at_rate(share * self.load.rate)
        if isinstance(load, RecordedLoad):
            return load.requests
        count = max(round(share * self.rate_per_s * self.seconds), 1)
        return load.sample(count, Streams(self.request.seed, replication))

    def send(self, model: str, requests: Requests) -> list[Answered]:
        """Send requests. Raises BadInput if the engine ends, or answers none."""
        self.loads += 1
        found = send_load(self.url, model, requests, (self.request.seed, self.loads), self.token)
        if is_lost := all(each.failure for each in found):
            time.sleep(ENDS_WITHIN_S)
        if reason := self.why_gone():
            raise BadInput(reason, where=self.url, remedy="Its log says why.")
        if is_lost:
            raise BadInput(found[0].failure, where=self.url, remedy="It has to serve /v1/completions of token ids.")
        return found

    def run_of(self, name: str, at: float, answers: Sequence[Answered], others: float | None) -> Run:
        """Return a run without its ramp-up; its requests go into a file."""
        from pandas import DataFrame

        answered = [each for each in answers if not each.failure]
        columns = {name: [getattr(each, ours) for each in answered] for name, ours in COLUMNS.items()}
        write_text(self.out / REQUESTS, DataFrame(columns).to_csv(index=False))
        # A plan for recorded requests counts all of them, from an idle engine on.
        ramp_up_s = 0.0 if isinstance(self.load, RecordedLoad) else RAMP_UP * self.seconds
        counted = [each for each in answers if each.due_s >= ramp_up_s] or [*answers]
        planned = {} if self.plan is None else {each.name: each for each in self.plan.result.targets}
        figures = []
        for target in self.targets:
            times = [math.inf if each.failure else getattr(each, f"{target.metric}_ms") for each in counted]
            plan = planned.get(target.name)
            known = None if plan is None else (plan.value, plan.interval)
            figures.append(compare_percentile(target.name, target.percentile, np.array(times), target.limit_ms, known))
        return Run(
            name=name,
            settings=dict(self.settings),
            rate_per_s=at,
            requests=len(counted),
            failed=sum(bool(each.failure) for each in counted),
            late_ms=1e3 * float(np.quantile([each.sent_s - each.due_s for each in counted], 0.99)),
            others=others,
            figures=[each for each in figures if each is not None],
        )

    def plan_settings(self) -> bool:
        """Fit the steps and plan one engine for the largest share of the rate; return whether that is all of it."""
        if not self.traces:
            remedy = "Give a higher --rate, or a longer --load."
            raise BadInput("no steps of a busy engine were recorded", where=self.url, remedy=remedy)
        self.tell("Fitting and planning")
        # Means over windows suit a linear cost alone.
        self.fit = fit([str(each) for each in self.traces], model="auto" if self.all_single else "linear")
        self.fit.save(self.out / "engine.fit.json")
        largest_step = 2 ** int(math.log2(self.fit.result.domain["S"][1]))
        least = min(MIN_CHUNK, int(self.draw_requests(1.0, 0).prompt_tokens.max()))
        is_feasible = False
        for self.share in (1.0, *REDUCED_SHARES):
            self.plan = self.plan_one()
            if self.plan.feasible and self.plan.result.unsupported and largest_step >= least:
                # The engine may allow larger steps than were measured: plan within the measured ones.
                self.plan = self.plan_one(max_num_batched_tokens=largest_step)
            is_feasible = self.plan.feasible and not self.plan.result.unsupported
            if is_feasible:
                break
        assert self.plan is not None
        self.plan.save(self.out / "plan.json")
        self.settings = {}
        if is_feasible:
            self.exports.append(export(self.plan, self.engine))
            self.settings = dict(self.exports[-1].settings)
        return is_feasible and self.share == 1.0

    def plan_one(self, **settings: int) -> EnginePlan:
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

    def raise_limit(self, limit: int) -> None:
        planned = self.settings
        self.settings = {BY_KEY[self.engine].options[0].name: limit}
        try:
            self.measure(["", "", ""], STAGES)
        except BadInput as error:
            self.tell(f"The engine does not run {limit} requests at once: {error}")
            self.settings = planned
        else:
            self.plan_settings()

    def verify(self) -> bool:
        """Measure with the planned settings; return whether to do that again with others."""
        self.measure(["as planned"], [self.share])
        last, tried = self.runs[-1], (self.share, self.settings)
        if last.kept or all(each.as_planned for each in last.figures):
            return False
        self.plan_settings()
        return bool(self.settings) and (self.share, self.settings) != tried

    @property
    def restarts_left(self) -> int:
        in_time = time.monotonic() - self.begun_s < self.budget_s
        return self.request.max_restarts - (self.starts - 1) if in_time else 0

    def choose(self) -> None:
        """Export the settings of the last run that kept the SLOs at the requested rate, else the last ones."""
        kept = [run for run in self.runs if run.kept and run.rate_per_s >= self.rate_per_s]
        self.settings = kept[-1].settings if kept else self.settings
        for exported in [each for each in self.exports if each.settings == self.settings][-1:]:
            exported.save(self.out)

    def validated(self) -> Validation | None:
        """Simulate the last load; None if it had no planned settings."""
        if not self.settings or self.plan is None or self.runs[-1].settings != self.settings:
            return None
        engine = {name: self.plan.engine[name] for name in ("max_num_seqs", "max_num_batched_tokens", "kv_blocks")}
        return validate(self.fit, self.out / REQUESTS, engine=engine, seed=self.request.seed)

    def result(self) -> Tuning:
        plan = None if self.plan is None or self.plan.result.unsupported else self.plan.result
        is_kept = any(run.kept and run.settings == self.settings for run in self.runs)
        command = self.show(self.with_settings()) if self.settings or is_kept else ""
        return Tuning(
            engine=BY_KEY[self.engine].name if self.engine in BY_KEY else self.engine,
            rate_per_s=self.rate_per_s,
            settings=self.settings,
            command=command,
            capacity_per_s=None if plan is None else plan.capacity_per_s,
            capacity_interval_per_s=None if plan is None else plan.capacity_interval_per_s,
            restarts=max(self.starts - 1, 0),
            seconds=time.monotonic() - self.begun_s,
            steps="steps" if self.all_single else "windows",
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
        return Tuned(loop.result(), todo=loop.describe())
    if find_spec("aiohttp") is None:
        remedy = "Install it: pip install 'latfit[live]'."
        raise HardwareMissing("aiohttp is not installed", where="latfit tune", remedy=remedy)
    is_new = not loop.out.exists()
    loop.out.mkdir(parents=True, exist_ok=True)
    try:
        loop.measure(["", "as started", ""], STAGES)
        # One restart is kept for the settings that follow.
        if not loop.plan_settings() and loop.limit and loop.restarts_left > 1:
            loop.raise_limit(LIMIT_FACTOR * loop.limit)
        while loop.settings and loop.restarts_left > 0 and loop.verify():
            pass
    except KeyboardInterrupt:
        raise Interrupted("interrupted", where=str(loop.out), remedy="Its traces and logs are kept.") from None
    except LatfitError:
        with suppress(OSError):
            if is_new:
                loop.out.rmdir()  # if there is nothing in it
        raise
    loop.choose()
    found = Tuned(loop.result(), loop.plan, loop.fit, loop.validated())
    write_json(loop.out / "tune.json", found.to_json())
    if found.plan is not None:
        reporting.layout.write_page(loop.out, found.page(reporting.layout.Making(made_at=utc_now())), "report.html")
    return found


def _make_load(request: TuneRequest, seconds: float) -> OpenLoad | RecordedLoad:
    """Return the load; of recorded requests the busiest part. Raises WrongUsage, BadInput."""
    planned = EnginePlanRequest(rate=request.rate, lengths=request.lengths, arrivals=request.arrivals)
    offered = rates(request.rate)
    load = make_load(planned, offered)
    assert not isinstance(load, ClosedLoad)  # of users, whom the request does not have
    if isinstance(load, OpenLoad):
        return load
    requests = load.requests.at_rate(offered[0]) if offered else load.requests
    busiest = requests.busiest(1e3 * seconds)
    # Classes and deadlines of a recording are no part of what the client sends.
    sent = replace(
        make_requests(busiest.arrival_ms, busiest.prompt_tokens, busiest.output_tokens), prefix=busiest.prefix
    )
    if not (sent.rate > 0 and len(sent) >= FEWEST):
        found = f"{count_text(len(sent), 'recorded request')} in {format_ms(1e3 * seconds)} are too few"
        raise BadInput(found, where="--arrivals", remedy=f"Give {FEWEST} or more, or a longer --load.")
    return RecordedLoad(sent, load.notes)
