"""Running engines examined and watched, and what a machine lacks."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from time import monotonic
from typing import Any

import numpy as np

from latfit import reporting
from latfit.api.answer import Answer, PlainAnswer, State
from latfit.api.engines import engine_costs, engine_settings_of, named_settings
from latfit.api.quantities import duration as in_ms, limit
from latfit.api.request import verb
from latfit.api.requests import DoctorRequest, RunningEngine, WatchRequest
from latfit.errors import BadInput, WrongUsage
from latfit.metrics import Buckets, Diagnosis, Interval, Reading, Server, Unanswered, between, diagnose
from latfit.planning import Fitted, WhatIf
from latfit.profiling import inventory
from latfit.units import format_ms, number
from latfit.validation import PhaseSpeed

EVERY_S = 1.0
MIN_READINGS = 2


@dataclass(frozen=True, repr=False, eq=False)
class Examination(Answer):
    server: str
    diagnosis: Diagnosis  # what its counters prove
    seen: Interval
    what_if: WhatIf | None = None  # settings moved on a fitted engine
    gone: str = ""  # why the readings ended early
    users: tuple[int, float] | None = None  # (requests at once, TPOT in ms) that the fit allows

    @cached_property
    def _shown(self) -> "reporting.table.Shown":
        found, figures = self.diagnosis, self.diagnosis.figures
        parts = [f"{found.engine} at {self.server} {reporting.running.BINDING[found.binding]}"]
        pace = {"TPOT": figures["tpot_ms"], "a step": figures["T_ms"]}  # llama.cpp publishes no TPOT
        known = [f"{format_ms(value)} {name}" for name, value in pace.items() if math.isfinite(value)]
        if found.binding != "idle" and math.isfinite(figures["running"]) and known:
            parts.append(f"{number(figures['running'], 2)} requests at once at {known[0]}")
        if self.users is not None:
            parts.append(f"up to {self.users[0]:,} within {format_ms(self.users[1])}")
        if found.growing:
            parts.append("add replicas")
        elif found.binding in reporting.running.REMEDY:
            parts.append(reporting.running.REMEDY[found.binding])
        states: dict[str, State] = {"idle": "doubt", "unknown": "doubt", "steps": "good"}
        state = "bad" if self.gone else states.get(found.binding, "bad")
        return reporting.table.Shown(f"{'; '.join(parts)}.", state, self._lines())

    def _lines(self) -> list[str]:
        gone = f"After {format_ms(1e3 * self.seen.seconds)} it {self.gone}; the figures are from before."
        lines = [*([gone] if self.gone else []), self.diagnosis.why]
        if self.diagnosis.binding == "idle":
            return lines
        speed = None if self.what_if is None else self.what_if.speed
        changed = [speed.sentence] if speed is not None and speed.has_changed else []
        levers = [f"{each.setting}: {each.why}" for each in self.diagnosis.levers]
        load_line, what_if = reporting.running.load_line(self.diagnosis), reporting.running.what_if_lines(self.what_if)
        return [*lines, load_line, *changed, *levers, *what_if]

    def to_json(self) -> dict[str, Any]:
        about = {"server": self.server, "verdict": self.verdict, "gone": self.gone or None}
        return {**about, **self.diagnosis.to_json(), "simulated": self.what_if and self.what_if.to_json()}


@verb(DoctorRequest)
def examine_server(request: DoctorRequest) -> Examination:
    """Find what binds a running engine, which setting would help, and which would do nothing.

    Counters prove what binds; with a fit changed settings are simulated. Raises WrongUsage, BadInput, FitNotUsable.
    """
    server, slo = Server(request.url or ""), slo_of(request)
    wanted_s = in_ms(request.duration, "--duration") / 1e3
    readings, gone = _read_one_run(server, min(EVERY_S, wanted_s / 2), wanted_s, request.progress)
    if len(readings) < MIN_READINGS:
        raise BadInput("stopped answering, or started again", where=str(server), remedy="Try again once it is up.")
    facts = {**server.settings(), **readings[-1].state.facts}
    check_limit(request.max_num_seqs, readings)
    seen, diagnosis = between(readings[0], readings[-1]), diagnose(readings, {**facts, **named_settings(request)})
    if request.fit is None and request.hardware is None:
        return Examination(str(server), diagnosis, seen, gone=gone)
    fitted = fitted_engine(request, seen, diagnosis, facts)
    what_if = WhatIf(fitted, readings, slo, request.seed, request.at_measured_speed)
    users = None
    if math.isfinite(slo[1]):
        B = np.arange(1.0, fitted.fits[0].largest_batch + 1)
        within = np.flatnonzero(fitted.fits[0].latency_ms(B, B) <= slo[1])
        each = int(within[-1]) + 1 if len(within) else 0
        users = each * diagnosis.engines, slo[1]
    return Examination(str(server), diagnosis, seen, what_if, gone, users)


def fitted_engine(request: RunningEngine, seen: Interval, diagnosis: Diagnosis, facts: Mapping[str, Any]) -> Fitted:
    """Return the engine with the request's step costs. facts: published settings."""
    costs, unmeasured, _, fits = engine_costs(request, scatter=True)
    server, given = {**facts, **seen.last.facts}, named_settings(request)
    if diagnosis.binding == "sequences" and "max_num_seqs" not in diagnosis.limits:
        server["max_num_seqs"] = round(diagnosis.figures["running_most"] / diagnosis.engines)
    if 0 < seen.count("prefix_hits") < seen.count("prefix_queries"):
        given["prefix_hit_rate"] = seen.count("prefix_hits") / seen.count("prefix_queries")
    setup = engine_settings_of(fits, server=server, **given)
    found = Fitted(costs, setup, unmeasured, fits)
    queues = diagnosis.binding == "unknown" and "max_num_seqs" not in diagnosis.limits
    if queues and diagnosis.figures["running_most"] < found.settings.max_num_seqs * diagnosis.engines:
        limit = "no source has the sequence limit"
        if found.setup.is_known("max_num_seqs"):
            limit = f"fewer run than the trace's limit of {found.settings.max_num_seqs:,}"
        return replace(found, impossible=f"Requests wait, and {limit}: give --max-num-seqs as the engine has it")
    return found


def check_limit(max_num_seqs: int | None, readings: Sequence[Reading]) -> None:
    most = max((each.state.running / each.state.engines for each in readings), default=0.0)
    if max_num_seqs is not None and most > max_num_seqs:
        raise WrongUsage(
            f"{max_num_seqs:,} is not the engine's limit: {number(most)} requests ran at once",
            where="--max-num-seqs",
            remedy="Give it as the engine has it, or leave it out.",
        )


def slo_of(request: RunningEngine) -> tuple[float, float]:
    return limit(request.ttft, "--ttft"), limit(request.tpot, "--tpot")


def _read_one_run(
    server: Server, every_s: float, wanted_s: float, progress: Callable[[float, float], None] | None
) -> tuple[list[Reading], str]:
    """Return readings of one run, and why they ended early."""
    found: list[Reading] = []
    gone = ""
    for told in server.readings(every_s, wanted_s):
        if isinstance(told, Unanswered):
            gone = str(told)
            continue
        if found and told.state.fell_below(found[0].state):
            return found, "started again"
        found.append(told)
        gone = ""
        if progress is not None:
            progress(told.t_s - found[0].t_s, wanted_s)
    return found, gone


def examine_machine() -> PlainAnswer:
    """Return what this machine has and lacks; nothing heavy is imported."""
    found = inventory()
    return PlainAnswer(found, reporting.running.show_machine(found))


AGAIN_S = 30.0  # after so long the capacity is predicted anew, for the load there is then
SOON_S = 5.0  # after so long where it was not known
ENOUGH_S = 8.0  # a load that was seen for less is too uncertain
FOREVER_S = 1e9


@dataclass(frozen=True, repr=False, eq=False)
class Snapshot(Answer):
    """A running engine over the last window."""

    server: str
    diagnosis: Diagnosis
    seen: Interval
    limits_ms: Mapping[str, float]  # SLOs of ttft and tpot, infinite without one
    capacity_per_s: float = math.nan  # highest rate within the SLO, by a fit
    unknown: str = ""  # why the capacity is NaN
    problem: str = ""  # why the server does not answer
    speed: PhaseSpeed | None = None  # of steps, relative to the fit

    @cached_property
    def _shown(self) -> "reporting.table.Shown":
        binding = self.diagnosis.binding
        kept = [found.share_within(limit) for found, limit in self._promised.values()]
        sure = all(low >= 0.99 for low, _ in kept) and binding in ("steps", "sequences")
        broken = self.problem or any(high < 0.99 for _, high in kept)
        times = {name.upper(): (self._histogram(name), limit) for name, limit in self.limits_ms.items()}
        verdict = f"{self.diagnosis.engine} at {self.server} {reporting.running.BINDING[binding]}."
        if self.problem:
            verdict = f"{self.server} {self.problem}; the figures are its last."
        capacity = self.capacity_per_s, self.unknown
        lines = reporting.running.window_lines(self.diagnosis, self.seen, times, capacity, self.speed)
        return reporting.table.Shown(verdict, "bad" if broken else "good" if sure else "doubt", lines)

    @property
    def _promised(self) -> dict[str, tuple[Buckets, float]]:
        """Histogram and limit of each time with an SLO."""
        finite = {name: limit for name, limit in self.limits_ms.items() if math.isfinite(limit)}
        return {name: (seen, limit) for name, limit in finite.items() if (seen := self._histogram(name)) is not None}

    def _histogram(self, name: str) -> Buckets | None:
        """Return the histogram of a time, of token gaps for a missing TPOT."""
        names = ("tpot", "itl") if name == "tpot" else (name,)
        every = (self.seen.histogram(each) for each in names)
        return next((found for found in every if found is not None and found.count > 0), None)

    def to_json(self) -> dict[str, Any]:
        slo = {}
        for name, (histogram, limit_ms) in self._promised.items():
            low, high = histogram.share_within(limit_ms)
            slo[name] = {"limit_ms": limit_ms, "share_low": low, "share_high": high}
        tails = {name: found for name in ("ttft", "tpot", "latency") if (found := self._histogram(name)) is not None}
        return {
            "server": self.server,
            "verdict": self.verdict,
            "problem": self.problem or None,
            **self.diagnosis.to_json(),
            "p99_ms": {name: found.bucket(0.99) for name, found in tails.items()},
            "slo": slo,
            "speed": self.speed and asdict(self.speed),
            "capacity_per_s": self.capacity_per_s,
            "capacity_unknown": self.unknown or None,
        }


@verb(WatchRequest)
def watch_server(request: WatchRequest) -> Iterator[Snapshot]:
    """Watch a running engine: a snapshot with each reading, without end.

    Raises WrongUsage, FitNotUsable; BadInput where the server never answered.
    """
    every_s, window_s = in_ms(request.every, "--every") / 1e3, in_ms(request.window, "--window") / 1e3
    if window_s < every_s:
        raise WrongUsage("is shorter than --every", where="--window", remedy="Give a longer one.")
    return _snapshots(Server(request.url), every_s, window_s, request, slo_of(request))


def _snapshots(
    server: Server, every_s: float, window_s: float, request: WatchRequest, slo: tuple[float, float]
) -> Iterator[Snapshot]:
    facts, limits = server.settings(), dict(zip(("ttft", "tpot"), slo, strict=True))
    has_fit = request.fit is not None or request.hardware is not None
    enough_s = min(0.9 * window_s, ENOUGH_S)
    readings: deque[Reading] = deque()  # of the last window
    last: Snapshot | None = None
    speed: PhaseSpeed | None = None
    capacity, predicted_s = (math.nan, ""), -math.inf
    for reading in server.readings(every_s, FOREVER_S):
        if isinstance(reading, Unanswered):
            if last is not None:
                last = replace(last, problem=str(reading))
                yield last
            elif monotonic() - readings[-1].t_s > window_s:
                raise BadInput(
                    f"answered once, and now {reading}", where=str(server), remedy="Try again once it is up."
                )
            continue
        if readings and reading.state.fell_below(readings[-1].state):  # it started again
            readings.clear()
        readings.append(reading)
        while len(readings) > 2 and reading.t_s - readings[1].t_s >= window_s:
            readings.popleft()
        if len(readings) < 2:
            continue
        seen = between(readings[0], reading)
        diagnosis = diagnose(readings, {**facts, **named_settings(request)})
        check_limit(request.max_num_seqs, readings)
        later_s = AGAIN_S if math.isfinite(capacity[0]) else min(SOON_S, window_s)
        if not has_fit:
            capacity = math.nan, "unknown without a fit (--fit FIT)"
        elif seen.seconds < enough_s:
            capacity = math.nan, f"unknown for the first {format_ms(1e3 * enough_s)}"
        elif reading.t_s - predicted_s >= later_s:
            predicted_s = reading.t_s
            engine = fitted_engine(request, seen, diagnosis, facts)
            what_if = WhatIf(engine, list(readings), slo, at_measured_speed=request.at_measured_speed)
            capacity, speed = _predict_capacity(what_if, slo), what_if.speed
        last = Snapshot(str(server), diagnosis, seen, limits, *capacity, speed=speed)
        yield last


def _predict_capacity(what_if: WhatIf, slo: tuple[float, float]) -> tuple[float, str]:
    if min(slo) == math.inf:
        return math.nan, "unknown without an SLO (--ttft 500ms, --tpot 50ms)"
    if not what_if.believed:
        return math.nan, f"unknown: {what_if.refusal}"
    rate = what_if.capacity_per_s()
    return rate, "" if math.isfinite(rate) else "no rate of such requests keeps the SLO"


def block_of(snapshots: Iterator[Snapshot], seconds: float) -> Snapshot:
    begun = monotonic()
    for found in snapshots:
        if monotonic() - begun >= seconds:
            return found
    raise AssertionError("snapshots end")
