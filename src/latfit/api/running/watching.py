"""`watch_server`: a running engine from second to second: what it does, whether it keeps its SLO, what limits it."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from time import monotonic
from typing import Any

from latfit import reporting
from latfit.api.answer import Answer, State
from latfit.api.engines import named_settings
from latfit.api.quantities import duration as in_ms
from latfit.api.request import verb
from latfit.api.requests import WatchRequest
from latfit.api.running.examination import check_limit, fitted_engine, slo_of
from latfit.errors import BadInput, WrongUsage
from latfit.metrics import Buckets, Diagnosis, Interval, Reading, Server, Unanswered, between, diagnose
from latfit.planning import WhatIf
from latfit.units import format_ms
from latfit.validation import PhaseSpeed

AGAIN_S = 30.0  # after so long the capacity is predicted anew, for the load there is then
SOON_S = 5.0  # after so long where it was not known
ENOUGH_S = 8.0  # a load that was seen for less is too uncertain
FOREVER_S = 1e9


@dataclass(frozen=True, repr=False, eq=False)
class Snapshot(Answer):
    """A running engine over the last window.

    capacity_per_s: highest rate within the SLO, by a fit; NaN if not known, and `unknown` says why. problem: why the
    server does not answer, else empty. speed: of steps, relative to the fit; None if not known.
    """

    server: str
    diagnosis: Diagnosis
    seen: Interval
    ttft_slo_ms: float = math.inf
    tpot_slo_ms: float = math.inf
    capacity_per_s: float = math.nan
    unknown: str = ""
    problem: str = ""
    speed: PhaseSpeed | None = None

    @property
    def verdict(self) -> str:
        if self.problem:
            return f"{self.server} {self.problem}; the figures are its last."
        return f"{self.diagnosis.engine} at {self.server} {reporting.BINDING[self.diagnosis.binding]}."

    @property
    def state(self) -> State:
        """Bad if surely more than 1 % of requests miss the SLO, in doubt if the buckets cannot show it."""
        kept = [found.share_within(limit) for found, limit in self._promised().values()]
        if self.problem or any(high < 0.99 for _, high in kept):
            return "bad"
        sure = all(low >= 0.99 for low, _ in kept)
        return "good" if sure and self.diagnosis.binding in ("steps", "sequences") else "doubt"

    def _promised(self) -> dict[str, tuple[Buckets, float]]:
        limits = {"ttft": self.ttft_slo_ms, "tpot": self.tpot_slo_ms}
        found = {name: (self._histogram(name), limit) for name, limit in limits.items() if math.isfinite(limit)}
        return {name: (histogram, limit) for name, (histogram, limit) in found.items() if histogram is not None}

    def _histogram(self, name: str) -> Buckets | None:
        """Return the histogram of a time; token gaps where TPOT is not counted by request."""
        names = ("tpot", "itl") if name == "tpot" else (name,)
        every = (self.seen.histogram(each) for each in names)
        return next((found for found in every if found is not None and found.count > 0), None)

    @property
    def lines(self) -> list[str]:
        limits = {"ttft": self.ttft_slo_ms, "tpot": self.tpot_slo_ms}
        times = {name.upper(): (self._histogram(name), limit) for name, limit in limits.items()}
        capacity = self.capacity_per_s, self.unknown
        return reporting.window_lines(self.diagnosis, self.seen, times, capacity, self.speed)

    def to_json(self) -> dict[str, Any]:
        slo = {}
        for name, (histogram, limit) in self._promised().items():
            low, high = histogram.share_within(limit)
            slo[name] = {"limit_ms": limit, "share_low": low, "share_high": high}
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
    """Watch a running engine: a snapshot with each reading, without end. A server that goes away is asked again.

    Raises WrongUsage, FitNotUsable; BadInput where the server never answered.
    """
    every_s, window_s = in_ms(request.every, "--every") / 1e3, in_ms(request.window, "--window") / 1e3
    if window_s < every_s:
        raise WrongUsage("is shorter than --every", where="--window", remedy="Give a longer one.")
    return _snapshots(Server(request.url), every_s, window_s, request, slo_of(request))


def _snapshots(
    server: Server, every_s: float, window_s: float, request: WatchRequest, slo: tuple[float, float]
) -> Iterator[Snapshot]:
    facts = server.settings()
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
        last = Snapshot(str(server), diagnosis, seen, *slo, *capacity, speed=speed)
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
