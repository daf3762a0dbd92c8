"""`record_server`: a running engine's `/metrics` as a trace of windows."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latfit.api.answer import Answer, State
from latfit.api.quantities import duration as in_ms
from latfit.api.request import verb
from latfit.api.requests import RecordRequest
from latfit.errors import BadInput, WrongUsage
from latfit.files import check_writable
from latfit.messages import Message, Severity
from latfit.metrics import Server
from latfit.record import MetricsRecorder, texts_beside
from latfit.trace import check_trace_name, write_trace
from latfit.units import count_text, format_ms, format_percent, number

if TYPE_CHECKING:
    from latfit.trace import Trace

MIN_EVERY_MS = 100.0
MANY_UNANSWERED = 0.05  # share of readings
FEW_WINDOWS = 20
ONE_LOAD = 1.25  # largest B and S over the smallest within which a load is one
SLOW = 0.1  # share of a window that a reading may take
COUNTED = ("windows", "preempted_windows", "polls", "unanswered", "restarts")


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
    def busy(self) -> "Trace":
        """Windows in which the engine worked all the time."""
        return self.trace.select(~self.trace["idle"].astype(bool))

    @property
    def state(self) -> State:
        return "doubt" if self.messages and len(self.busy) else "good" if len(self.busy) else "bad"

    @property
    def verdict(self) -> str:
        """How much was recorded."""
        windows = count_text(len(self.trace), "window")
        if not len(self.busy):
            return f"{windows} of {self.engine}, and in none did it work all the time."
        steps = number(float(self.trace.floats("window_steps").sum()), 6)
        return f"{windows} of {self.engine}, {steps} steps: {_describe(self.busy)}"

    @property
    def messages(self) -> list[Message]:
        """What makes the windows less certain."""
        counts, busy = self.counts, len(self.busy)
        idle = len(self.trace) - busy
        shortest_ms = float(self.trace.floats("window_ms").min()) if len(self.trace) else 0.0
        is_one_load = busy >= FEW_WINDOWS and all(
            float(values.max()) <= ONE_LOAD * float(values.min()) for values in map(self.busy.floats, ("B", "S"))
        )
        rows = (
            (
                counts["unanswered"] > MANY_UNANSWERED * counts["polls"],
                "unanswered",
                f"{counts['unanswered']:,} of {counts['polls']:,} readings were not answered",
                "Look whether the server was up; ask less often (--every).",
            ),
            (
                counts["restarts"],
                "restarted",
                f"The server started again {count_text(counts['restarts'], 'time')}; windows across it are left out",
                "The texts of /metrics are those of its last run.",
            ),
            (
                counts["preempted_windows"],
                "preempted",
                f"Left out: {count_text(counts['preempted_windows'], 'window')} in which requests were preempted",
                "Give more KV cache, or record single steps.",
            ),
            (
                len(self.trace) and self.slowest_s * 1e3 > SLOW * shortest_ms,
                "slow_answers",
                f"The server took up to {format_ms(1e3 * self.slowest_s)} to answer, which blurs the ends of windows",
                "Ask less often: --every 10s.",
            ),
            (
                0 < busy < FEW_WINDOWS,
                "few_windows",
                f"{count_text(busy, 'window')} of work: few to fit",
                "Record for longer, while the load changes.",
            ),
            (
                is_one_load,
                "one_load",
                "All windows are of one load, so the fit tells of that load and hardly of another",
                "Record for longer, while the load changes.",
            ),
        )
        messages = [Message(code, text, remedy) for applies, code, text, remedy in rows if applies]
        if idle:
            share = format_percent(100 * idle / len(self.trace))
            text = f"In {count_text(idle, 'window')} ({share}) the engine was idle for a part of the time: not used"
            messages.append(Message("idle", text, "No action needed: a busier time tells more.", Severity.NOTE))
        return messages

    @property
    def fit_file(self) -> Path:
        """Where `fit_recording` writes its fit."""
        return self.out.with_suffix(".fit.json")

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
            "busy_windows": len(self.busy),
            "steps": float(self.trace.floats("window_steps").sum()),
            "interrupted": self.interrupted,
            "warnings": [each.to_json() for each in self.messages],
        }


def _describe(trace: "Trace") -> str:
    """Ranges of B, S and the times of steps."""
    ends = {name: (float(trace.floats(name).min()), float(trace.floats(name).max())) for name in ("B", "S", "T_ms")}
    spans = [f"{name} {number(ends[name][0], 3)} to {number(ends[name][1], 3)}" for name in ("B", "S")]
    return f"{', '.join(spans)}, {' to '.join(map(format_ms, ends['T_ms']))} a step."


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
        return f"{len(self.busy):,} steps: {_describe(self.busy)}"

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
    if every_ms < MIN_EVERY_MS or long_ms < every_ms:
        raise WrongUsage(
            f"every {format_ms(every_ms)} for {format_ms(long_ms)}",
            where="--every, --duration",
            remedy=f"Ask every {format_ms(MIN_EVERY_MS)} or less often, and for longer than that.",
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
            "requests were preempted in all windows" if recorder.preempted else "the engine made no step in this time",
            where=str(server),
            remedy="Record while it serves requests.",
        )
    trace = recorder.trace()
    counts = {name: trace.provenance[name] for name in COUNTED}
    return Recorded(trace, str(server), recorder.last.state.engine, target, counts, slowest, interrupted)
