"""`record_server`, `fit_recording`: a running engine's windows and their fit."""

import math
import shlex
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from latfit import reporting
from latfit.api.answer import Answer, PlainAnswer, State
from latfit.api.fits import Fit, fit
from latfit.api.quantities import duration as in_ms
from latfit.api.request import verb
from latfit.api.requests import RecordRequest
from latfit.api.validations import Validation, validate
from latfit.errors import BadInput, LatfitError, WrongUsage
from latfit.files import check_writable
from latfit.messages import Message, message
from latfit.metrics import Buckets, Interval, Server, read_state
from latfit.record import MetricsRecorder, texts_beside
from latfit.trace import Trace, check_trace_name, open_source, write_trace
from latfit.units import count_text, format_ms, number

MIN_EVERY_MS = 100.0
MAX_UNANSWERED = 0.05  # share of readings
MIN_WINDOWS = 20
ONE_LOAD = 1.25  # largest B and S over the smallest within which a load is one
MAX_READING = 0.1  # share of a window that a reading may take
MIN_FINISHED = 20  # requests that make a mean worth a comparison
NOT_COMPARED = "Not compared with the server's own histograms: "
LIMIT = "max_num_seqs"  # vLLM does not publish it, and a comparison depends on it
DECIDING = ("no_better_than_constant", "large_error", "drift")  # warnings that decide whether a fit is usable
COUNTED = ("windows", "preempted_windows", "polls", "unanswered", "restarts")


@dataclass(frozen=True, repr=False, eq=False)
class Recorded(Answer):
    """Windows of a running engine; `fit_recording` adds a fit, and a comparison with the server's histograms."""

    trace: Trace
    server: str
    engine: str
    out: Path
    counts: dict[str, Any]
    slowest_s: float
    interrupted: bool = False  # by the user
    seen: Interval | None = None  # the load, where it was fitted
    fit: Fit | None = None
    not_fitted: str = ""  # why there is no fit
    validation: Validation | None = None
    not_validated: str = ""  # why there is no comparison

    @property
    def busy(self) -> Trace:
        """Windows in which the engine worked all the time."""
        return self.trace.select(~self.trace["idle"].astype(bool))

    @cached_property
    def _shown(self) -> "reporting.table.Shown":
        windows, busy, messages = count_text(len(self.trace), "window"), len(self.busy), self.messages
        verdict = f"{windows} of {self.engine}, and in none did it work all the time."
        if busy:
            steps = number(float(self.trace.floats("window_steps").sum()), 6)
            verdict = f"{windows} of {self.engine}, {steps} steps: {_describe(self.busy)}"
        lines, details, tables = [self.not_fitted] if self.not_fitted else [], [], []
        if self.fit is not None:
            lines, details = [self.fit.verdict], [self.fit.range_line]
        if self.validation is not None:
            lines += [self.validation.verdict, *self.validation.lines]
            tables = self.validation.tables(brief=True)
        elif self.fit is not None:
            lines.append(self.not_validated)
        doubtful = messages or self.not_fitted
        state: State = "bad" if not busy else "doubt" if doubtful else "good"
        return reporting.table.Shown(verdict, state, lines, details, messages, tables)

    @property
    def messages(self) -> list[Message]:
        counts, busy, every = self.counts, len(self.busy), len(self.trace)
        shortest_ms = float(self.trace.floats("window_ms").min()) if every else 0.0
        messages = []
        if counts["unanswered"] > MAX_UNANSWERED * counts["polls"]:
            messages.append(message("unanswered", **counts))
        if times := counts["restarts"]:
            messages.append(message("restarted", times=count_text(times, "time")))
        if preempted := counts["preempted_windows"]:
            messages.append(message("preempted", windows=count_text(preempted, "window")))
        if 1e3 * self.slowest_s > MAX_READING * shortest_ms > 0:
            messages.append(message("slow_answers", slowest=1e3 * self.slowest_s))
        if 0 < busy < MIN_WINDOWS:
            messages.append(message("few_windows", windows=count_text(busy, "window")))
        elif busy and all(sizes.max() <= ONE_LOAD * sizes.min() for sizes in map(self.busy.floats, ("B", "S"))):
            messages.append(message("one_load"))
        if idle := every - busy:
            messages.append(message("idle", windows=count_text(idle, "window"), share=idle / every))
        if self.fit is not None:
            messages += [each for each in [self.fit.kept_out()] if each is not None]
            messages += [each for each in self.fit.warnings if each.code in DECIDING]
        return messages + [each for each in (self.validation.warnings if self.validation else ()) if each.needs_action]

    @property
    def fit_file(self) -> Path:
        return self.out.with_suffix(".fit.json")

    @property
    def next(self) -> list[str]:
        """Next commands: a plan for the recorded load with its p99 as limits."""
        if self.fit is None or self.seen is None:
            return []
        fit, trace = shlex.quote(str(self.fit_file)), shlex.quote(str(self.out))
        if self.seen.of_executions:
            path = "" if "path" in self.trace else " --path gpu"
            return [f"latfit fit {trace}{path}", "latfit plan --sla 20ms"]
        ends = (self.seen.mean("prompt_lengths"), self.seen.mean("output_lengths"))
        rate = self.seen.arrived / self.seen.seconds
        load = "--rate 20/s --lengths 500:200"
        if rate > 0 and all(tokens >= 1 for tokens in ends):
            load = f"--rate {number(rate, 3)}/s --lengths {round(ends[0])}:{round(ends[1])}"
        ttft = _limit(self.seen.histogram("ttft"), "500ms")
        tpot = _limit(self.seen.histogram("tpot") or self.seen.histogram("itl"), "50ms")
        found = [
            f"latfit plan --fit {fit} {load} --ttft {ttft} --tpot {tpot}",
            f"latfit doctor {shlex.quote(self.server)} --fit {fit}",
        ]
        if self.validation is not None:
            setup = self.validation.setup
            assumed = {LIMIT: f"--max-num-seqs {setup.settings.max_num_seqs}", "synchronous": "--synchronous"}
            options = [option for name, option in assumed.items() if not setup.is_known(name)]
            if options:
                again = f"latfit validate {fit} {trace} {' '.join(options)}"
                found.append(f"{again}  # assumed above; as the engine has it")
        return found

    def to_json(self) -> dict[str, Any]:
        before, after = texts_beside(self.out)
        return {
            "out": str(self.out),
            "metrics_before": str(before),
            "metrics_after": str(after),
            "server": self.server,
            "engine": self.engine,
            **self.counts,
            "busy_windows": len(self.busy),
            "steps": float(self.trace.floats("window_steps").sum()),
            "interrupted": self.interrupted,
            "warnings": [each.to_json() for each in self.messages],
            "fit_file": self.fit and str(self.fit_file),
            "fit": self.fit and self.fit.to_json(),
            "not_fitted": self.not_fitted or None,
            "validation": self.validation and self.validation.to_json(),
            "not_validated": self.not_validated or None,
            "next": self.next,
        }


def _describe(trace: Trace) -> str:
    ends = {name: (float(trace.floats(name).min()), float(trace.floats(name).max())) for name in ("B", "S", "T_ms")}
    spans = [f"{name} {number(ends[name][0], 3)} to {number(ends[name][1], 3)}" for name in ("B", "S")]
    return f"{', '.join(spans)}, {' to '.join(map(format_ms, ends['T_ms']))} a step."


@verb(RecordRequest)
def record_passes(request: RecordRequest) -> PlainAnswer:
    """Record the forward-pass metrics that an engine publishes over ZeroMQ: single steps.

    Raises WrongUsage, HardwareMissing (pyzmq), BadInput (no step came), TargetNotWritable.
    """
    from latfit.record import PassRecorder

    long_s = in_ms(request.duration, "--duration") / 1e3
    target = Path(request.out)
    check_writable(target)
    check_trace_name(target)
    recorder, interrupted = PassRecorder(request.url), False
    try:
        for spent_s in recorder.record(long_s):
            if request.progress is not None:
                request.progress(spent_s, long_s)
    except KeyboardInterrupt:
        interrupted = True
    trace = recorder.trace({} if request.path is None else {"path": request.path})
    write_trace(target, trace)
    busy, lost = trace.select(~trace["idle"].astype(bool)), trace.provenance.get("lost_steps", 0)
    counts = {"steps": len(busy), "lost_steps": lost, "unread_messages": recorder.unread}
    document = {"out": str(target), "server": request.url, **counts, "interrupted": interrupted}
    return PlainAnswer(document, reporting.table.Shown(f"{len(busy):,} steps: {_describe(busy)}"))


@verb(RecordRequest)
def record_server(request: RecordRequest) -> Recorded:
    """Record a running engine from outside: its `/metrics`, polled, as means over windows.

    Ctrl-C ends it earlier, with what there is. Raises WrongUsage, BadInput, TargetNotWritable.
    """
    long_ms, every_ms = in_ms(request.duration, "--duration"), in_ms(request.every, "--every")
    progress, path = request.progress, request.path
    if every_ms < MIN_EVERY_MS or long_ms < every_ms:
        found = f"every {format_ms(every_ms)} for {format_ms(long_ms)}"
        remedy = f"Ask every {format_ms(MIN_EVERY_MS)} or less often, and for longer than that."
        raise WrongUsage(found, where="--every, --duration", remedy=remedy)
    target = Path(request.out)
    for place in (target, *texts_beside(target), target.with_suffix(".fit.json")):
        check_writable(place)
    check_trace_name(target)
    server = Server(request.url)
    recorder = MetricsRecorder(target, {} if path is None else {"path": path}, server.settings())
    slowest, interrupted = 0.0, False
    try:
        for reading in server.readings(every_ms / 1e3, long_ms / 1e3):
            since = recorder.take(reading)
            slowest = max(slowest, getattr(reading, "took_s", 0.0))
            if progress is not None and recorder.last is not None:
                progress(recorder.last.t_s, long_ms / 1e3, since)
    except KeyboardInterrupt:
        interrupted = True
    if recorder.last is None:
        raise KeyboardInterrupt
    recorder.write()
    if not recorder.rows:
        found = "requests were preempted in all windows" if recorder.preempted else "the engine made no step"
        raise BadInput(found, where=str(server), remedy="Record while it serves requests.")
    trace = recorder.trace()
    counts = {name: trace.provenance[name] for name in COUNTED}
    return Recorded(trace, str(server), recorder.last.state.engine, target, counts, slowest, interrupted)


def _limit(seen: Buckets | None, default: str) -> str:
    low, high = (math.nan, math.nan) if seen is None else seen.bucket(0.99)
    edge = high if math.isfinite(high) else 2 * low
    return format_ms(edge).replace(" ", "") if edge > 0 else default


def _say(error: LatfitError) -> str:
    return message("failed", found=error.found, remedy=error.remedy).text


def fit_recording(recorded: Recorded) -> Recorded:
    """Fit what `record_server` wrote, simulate the load, and compare with the server's histograms.

    The result says why there is no fit or comparison. Raises TargetNotWritable.
    """
    before, after = texts_beside(recorded.out)
    begin_s, end_s = recorded.trace.provenance["texts_at_s"]
    watched_s = max(float(end_s) - float(begin_s), 1e-3)
    seen = Interval(read_state(open_source(before)), read_state(open_source(after)), watched_s)
    found = replace(recorded, seen=seen)
    try:
        found = replace(found, fit=fit(recorded.out))
    except LatfitError as error:
        recorded.fit_file.unlink(missing_ok=True)
        return replace(found, not_fitted=f"Not fitted: {_say(error)}", not_validated="There is no fit.")
    assert found.fit is not None
    found.fit.save(recorded.fit_file)
    if seen.finished < MIN_FINISHED:
        ended = f"{number(max(seen.finished, 0.0))} requests ended in this time"
        return replace(found, not_validated=f"{NOT_COMPARED}{ended}. Record for longer.")
    try:
        return replace(found, validation=validate(recorded.fit_file, recorded.out))
    except LatfitError as error:
        return replace(found, not_validated=f"{NOT_COMPARED}{_say(error)}")
