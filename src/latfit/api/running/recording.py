"""`record_server`: a running engine's `/metrics` as a trace of windows."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latfit.api.answer import Answer, State
from latfit.api.quantities import duration as in_ms
from latfit.api.request import verb
from latfit.api.requests import RecordRequest
from latfit.errors import BadInput, WrongUsage
from latfit.files import check_writable
from latfit.messages import Message as LatfitWarning, Severity
from latfit.metrics import Server
from latfit.record import MetricsRecorder, texts_beside
from latfit.trace import check_trace_name, write_trace
from latfit.units import format_ms, format_percent, number

if TYPE_CHECKING:
    from pandas import DataFrame

    from latfit.trace import Trace

LEAST_EVERY_MS = 100.0
MANY_UNANSWERED = 0.05
FEW_WINDOWS, ONE_LOAD = 20, 1.25
"""Windows below which they are few, and the ratio of the largest B and S to the smallest within which a load is one."""

SLOW = 0.1
"""Share of a window that a reading may take."""


@dataclass(frozen=True, repr=False, eq=False)
class Recorded(Answer):
    """Windows of a running engine. server: its address.  interrupted: whether the user ended it before its time."""

    trace: "Trace"
    server: str
    engine: str
    out: Path
    counts: dict[str, Any]
    slowest_s: float
    interrupted: bool = False

    @property
    def used(self) -> int:
        """Windows in which the engine worked all the time."""
        return int((~self.trace["idle"].astype(bool)).sum())

    @property
    def state(self) -> State:
        if not self.used:
            return "bad"
        return "doubt" if self.warnings else "good"

    @property
    def verdict(self) -> str:
        """How much was recorded."""
        from latfit.reporting import counted

        steps = number(float(self.trace.floats("window_steps").sum()), 6)
        if not self.used:
            return f"{counted(len(self.trace), 'window')} of {self.engine}, and in none did it work all the time."
        busy = self.trace.select(~self.trace["idle"].astype(bool))
        spans = [f"{name} {_span(busy.floats(name))}" for name in ("B", "S")]
        windows = counted(len(self.trace), "window")
        return f"{windows} of {self.engine}, {steps} steps: {', '.join(spans)}, {_times(busy)} a step."

    @property
    def warnings(self) -> list[LatfitWarning]:
        """What makes the windows less certain."""
        from latfit.reporting import counted

        found = []
        counts, idle = self.counts, len(self.trace) - self.used
        if counts["unanswered"] > MANY_UNANSWERED * counts["polls"]:
            message = f"{counts['unanswered']:,} of {counts['polls']:,} readings were not answered"
            found.append(
                LatfitWarning("unanswered", message, "Look whether the server was up; ask less often (--every).")
            )
        if counts["restarts"]:
            message = f"The server started again {counted(counts['restarts'], 'time')}; windows across it are left out"
            found.append(LatfitWarning("restarted", message, "The texts of /metrics are those of its last run."))
        if counts["preempted_windows"]:
            message = f"Left out: {counted(counts['preempted_windows'], 'window')} in which requests were preempted"
            found.append(LatfitWarning("preempted", message, "Give more KV cache, or record single steps."))
        if len(self.trace) and self.slowest_s * 1e3 > SLOW * float(self.trace.floats("window_ms").min()):
            message = (
                f"The server took up to {format_ms(1e3 * self.slowest_s)} to answer, which blurs the ends of windows"
            )
            found.append(LatfitWarning("slow_answers", message, "Ask less often: --every 10s."))
        found += self._of_load()
        if idle:
            share = format_percent(100 * idle / len(self.trace))
            message = (
                f"In {counted(idle, 'window')} ({share}) the engine had nothing to do for a part of the time: not used"
            )
            found.append(LatfitWarning("idle", message, "No action needed: a busier time tells more.", Severity.NOTE))
        return found

    @property
    def messages(self) -> list[LatfitWarning]:
        return self.warnings

    def _of_load(self) -> Iterator[LatfitWarning]:
        """Where the windows in which it worked are few, or all of one load."""
        from latfit.reporting import counted

        if not self.used:
            return
        busy = self.trace.select(~self.trace["idle"].astype(bool))
        if self.used < FEW_WINDOWS:
            message = f"{counted(self.used, 'window')} of work: few to fit"
            yield LatfitWarning("few_windows", message, "Record for longer, while the load changes.")
        elif all(float(values.max()) <= ONE_LOAD * float(values.min()) for values in map(busy.floats, ("B", "S"))):
            message = "All windows are of one load, so the fit tells of that load and hardly of another"
            yield LatfitWarning("one_load", message, "Record for longer, while the load changes.")

    @property
    def fit_file(self) -> Path:
        """Where `fit_recording` writes its fit."""
        return self.out.with_suffix(".fit.json")

    @property
    def watched_s(self) -> float:
        """From the first text of `/metrics` to the last."""
        begin_s, end_s = self.trace.provenance["texts_at_s"]
        return max(float(end_s) - float(begin_s), 1e-3)

    @property
    def frame(self) -> "DataFrame":
        """A row a window."""
        return self.trace.to_pandas()

    def to_json(self) -> dict[str, Any]:
        """The document of `latfit record --json`."""
        before, after = texts_beside(self.out)
        return {
            "out": str(self.out),
            "metrics_before": str(before),
            "metrics_after": str(after),
            "server": self.server,
            "engine": self.engine,
            **self.counts,
            "busy_windows": self.used,
            "steps": float(self.trace.floats("window_steps").sum()),
            "interrupted": self.interrupted,
            "warnings": [each.to_json() for each in self.warnings],
        }


def _span(values: Any) -> str:
    return f"{number(float(values.min()), 3)} to {number(float(values.max()), 3)}"


def _times(trace: "Trace") -> str:
    T = trace.floats("T_ms")
    return f"{format_ms(float(T.min()))} to {format_ms(float(T.max()))}"


COUNTED = ("windows", "preempted_windows", "polls", "unanswered", "restarts")


@dataclass(frozen=True, repr=False, eq=False)
class RecordedSteps(Answer):
    """Steps that an engine published. server: its address.  interrupted: whether the user ended it before its time."""

    trace: "Trace"
    server: str
    out: Path
    unread: int
    interrupted: bool = False

    @property
    def busy(self) -> "Trace":
        """Steps with requests."""
        return self.trace.select(~self.trace["idle"].astype(bool))

    @property
    def verdict(self) -> str:
        """How much was recorded."""
        spans = [f"{name} {_span(self.busy.floats(name))}" for name in ("B", "S")]
        return f"{len(self.busy):,} steps: {', '.join(spans)}, {_times(self.busy)} a step."

    def to_json(self) -> dict[str, Any]:
        """The document of `latfit record --json` for a stream."""
        lost = self.trace.provenance.get("lost_steps", 0)
        counts = {"steps": len(self.busy), "lost_steps": lost, "unread_messages": self.unread}
        return {"out": str(self.out), "server": self.server, **counts, "interrupted": self.interrupted}


@verb(RecordRequest)
def record_passes(request: RecordRequest) -> RecordedSteps:
    """Record the forward-pass metrics that an engine publishes over ZeroMQ: single steps.

    url: zmq://host:port or ipc:///path. Ctrl-C ends it earlier, with what there is. Raises WrongUsage, HardwareMissing
    (pyzmq), BadInput (no step came), TargetNotWritable.
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
                request.progress(spent_s, long_s, None)
    except KeyboardInterrupt:
        interrupted = True
    trace = recorder.trace({} if request.path is None else {"path": request.path})
    write_trace(target, trace)
    return RecordedSteps(trace, request.url, target, recorder.unread, interrupted)


@verb(RecordRequest)
def record_server(request: RecordRequest) -> Recorded:
    """Record a running engine from outside: its `/metrics`, polled, as means over windows.

    url: of vLLM, SGLang, llama.cpp, or Triton's metrics. Ctrl-C ends it earlier, with what there is. Raises
    WrongUsage, BadInput (nobody answers, the engine counts no steps, or it made none), TargetNotWritable.
    """
    long_ms, every_ms = in_ms(request.duration, "--duration"), in_ms(request.every, "--every")
    progress, path = request.progress, request.path
    if every_ms < LEAST_EVERY_MS or long_ms < every_ms:
        raise WrongUsage(
            f"every {format_ms(every_ms)} for {format_ms(long_ms)}",
            where="--every, --duration",
            remedy=f"Ask every {format_ms(LEAST_EVERY_MS)} or less often, and for longer than that.",
        )
    target = Path(request.out)
    for place in (target, *texts_beside(target), target.with_suffix(".fit.json")):
        check_writable(place)
    check_trace_name(target)
    server = Server(request.url)
    recorder = MetricsRecorder(target, {} if path is None else {"path": path}, server.settings())
    slowest, interrupted = 0.0, False
    try:
        for told in server.readings(every_ms / 1e3, long_ms / 1e3):
            since = recorder.take(told)
            slowest = max(slowest, getattr(told, "took_s", 0.0))
            if progress is not None and recorder.last is not None:
                progress(recorder.last.t_s, long_ms / 1e3, since)
    except KeyboardInterrupt:
        interrupted = True
    if recorder.last is None:
        raise KeyboardInterrupt
    recorder.write()
    if not recorder.rows:
        raise BadInput(
            "the engine made no step in this time"
            if not recorder.preempted
            else "requests were preempted in all windows",
            where=str(server),
            remedy="Record while it serves requests.",
        )
    trace = recorder.trace()
    counts = {name: trace.provenance[name] for name in COUNTED}
    return Recorded(trace, str(server), recorder.last.state.engine, target, counts, slowest, interrupted)
