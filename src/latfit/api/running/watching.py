"""`watch_server`: a running engine from second to second: what it does, whether it keeps its SLO, what limits it."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from time import monotonic
from typing import Any

from latfit.api.answer import Answer, State
from latfit.api.quantities import duration as in_ms
from latfit.api.request import verb
from latfit.api.requests import WatchRequest
from latfit.api.running.examination import BINDING, check_limit, engine_of, limits_of, slo_of
from latfit.api.running.what_if import WhatIf
from latfit.errors import BadInput, WrongUsage
from latfit.metrics import Buckets, Diagnosis, Interval, Reading, Server, Unanswered, between, diagnose
from latfit.units import format_ms, format_percent, format_rate, number
from latfit.validation import PhaseSpeed

AGAIN_S = 30.0
"""After so long the capacity is predicted anew, for the load there is then."""
SOON_S, ENOUGH_S = 5.0, 8.0
"""... and after so long where it was not known; a load that was seen for less than the second is too uncertain."""
FEW = 20
"""Requests below which a 99th percentile is the slowest of them."""
FOREVER_S = 1e9


@dataclass(frozen=True, repr=False, eq=False)
class Snapshot(Answer):
    """A running engine over the last window. problem: why the server does not answer, empty where it does.
    capacity_per_s: the highest rate of such requests that meets the SLO, by a fit; NaN where it is not known, and
    unknown says why.  speed: how long steps take, compared with when the fit was made; None where it is not known."""

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
        return f"{self.diagnosis.engine} at {self.server} {BINDING[self.diagnosis.binding]}."

    @property
    def state(self) -> State:
        """Bad where the SLO is missed by more than 1 % of requests for sure, in doubt where that cannot be told."""
        kept = [self._kept(name, limit) for name, limit in self._promised()]
        if self.problem or any(high < 0.99 for _, high in kept):
            return "bad"
        sure = all(low >= 0.99 for low, _ in kept)
        return "good" if sure and self.diagnosis.binding in ("steps", "sequences") else "doubt"

    def _promised(self) -> list[tuple[str, float]]:
        limits = [("ttft", self.ttft_slo_ms), ("tpot", self.tpot_slo_ms)]
        return [(name, limit) for name, limit in limits if math.isfinite(limit) and self._histogram(name) is not None]

    def _kept(self, name: str, limit: float) -> tuple[float, float]:
        found = self._histogram(name)
        return (math.nan, math.nan) if found is None else found.share_within(limit)

    def _histogram(self, name: str) -> Buckets | None:
        """Of a time; gaps between tokens where TPOT is not counted by request."""
        found = self.seen.histogram(name)
        if name == "tpot" and (found is None or not found.count > 0):
            found = self.seen.histogram("itl")
        return found if found is not None and found.count > 0 else None

    @property
    def lines(self) -> list[str]:
        """What is shown below the verdict."""
        told = self.diagnosis.figures
        cache = "KV cache use unknown"
        if math.isfinite(told["kv_usage"]):
            cache = f"KV cache at most {format_percent(100 * told['kv_usage'])} full"
        rates = [format_rate(told[name]) for name in ("arrived_per_s", "finished_per_s")]
        came = f"{rates[0]} arrived, {rates[1]} completed"
        if math.isnan(told["arrived_per_s"]):
            came = "requests not counted"
        tokens = [f"{number(told[name], 3)}/s" for name in ("prefill_per_s", "generated_per_s")]
        now = self.seen.last
        return [
            f"last {number(told['seconds'], 3)} s: {came}; tokens {tokens[0]} in, {tokens[1]} out",
            f"now: {number(now.running)} running, {number(now.waiting)} waiting; {cache}",
            self._tail("TTFT", "ttft", self.ttft_slo_ms),
            self._tail("TPOT", "tpot", self.tpot_slo_ms),
            f"limit: {self.diagnosis.why}",
            *([f"speed: {self.speed.sentence}"] if self.speed is not None and self.speed.has_changed else []),
            self._capacity(),
            self._setting(),
        ]

    def _tail(self, title: str, name: str, limit: float) -> str:
        found = self._histogram(name)
        if found is None:
            return f"{title}: no request in this time"
        p99 = " to ".join(format_ms(edge) for edge in found.bucket(0.99))
        few = f" (of {number(found.count)})" if found.count < FEW else ""
        told = f"{title}: mean {format_ms(found.mean)}, p99 {p99}{few}"
        if not math.isfinite(limit):
            return told
        low, high = (format_percent(100 * share) for share in found.share_within(limit))
        if low == high:
            return f"{told}; within {format_ms(limit)}: {low}"
        return f"{told}; within {format_ms(limit)}: {low} to {high} (exact in recorded steps: latfit trace show FILES)"

    def _capacity(self) -> str:
        if math.isnan(self.capacity_per_s):
            return f"capacity: {self.unknown}"
        now = self.diagnosis.figures["arrived_per_s"]
        used = format_percent(100 * now / self.capacity_per_s)
        return f"capacity: {format_rate(self.capacity_per_s, down=True)} of such requests within the SLO; {used} used"

    def _setting(self) -> str:
        """The setting that would move what binds, or that none would."""
        helps = [each for each in self.diagnosis.levers if each.effect == "helps"]
        if helps:
            return f"setting: {helps[0].setting}: {helps[0].why}"
        if self.diagnosis.binding == "steps":
            return "setting: none would help; only faster steps or less load would"
        return "setting: the counters do not show one"

    def to_json(self) -> dict[str, Any]:
        """The document of `latfit watch --once --json`."""
        slo = {}
        for name, limit in self._promised():
            low, high = self._kept(name, limit)
            slo[name] = {"limit_ms": limit, "share_low": low, "share_high": high}
        tails = {name: found for name in ("ttft", "tpot", "latency") if (found := self._histogram(name)) is not None}
        return {
            "server": self.server,
            "verdict": self.verdict,
            "problem": self.problem or None,
            **self.diagnosis.to_json(),
            "p99_ms": {name: found.bucket(0.99) for name, found in tails.items()},
            "slo": slo,
            "speed": None if self.speed is None else asdict(self.speed),
            "capacity_per_s": self.capacity_per_s,
            "capacity_unknown": self.unknown or None,
        }


@dataclass
class _Watch:
    """The readings of the last window, and what was predicted of them."""

    server: Server
    window_s: float
    request: WatchRequest
    slo: tuple[float, float]
    facts: dict[str, Any] = field(default_factory=dict)
    """Settings that the server tells."""
    readings: deque[Reading] = field(default_factory=deque)
    capacity: tuple[float, str] = (math.nan, "")
    predicted_s: float = -math.inf
    speed: PhaseSpeed | None = None
    last: Snapshot | None = None

    @property
    def fitted(self) -> bool:
        """Whether step costs are known."""
        return self.request.fit is not None or self.request.hardware is not None

    def take(self, told: "Reading | Unanswered") -> Snapshot | None:
        """The snapshot with one reading more; None where there are too few. Raises BadInput where there is none yet
        and the server has not answered for a whole window."""
        if isinstance(told, Unanswered):
            if self.last is not None:
                self.last = replace(self.last, problem=str(told))
            elif monotonic() - self.readings[-1].t_s > self.window_s:
                raise BadInput(
                    f"answered once, and now {told}", where=str(self.server), remedy="Try again once it is up."
                )
            return self.last
        if self.readings and told.state.fell_below(self.readings[-1].state):
            self.readings.clear()
        self.readings.append(told)
        while len(self.readings) > 2 and told.t_s - self.readings[1].t_s >= self.window_s:
            self.readings.popleft()
        if len(self.readings) < 2:
            return None
        seen, diagnosis = (
            between(self.readings[0], told),
            diagnose(self.readings, {**self.facts, **limits_of(self.request)}),
        )
        check_limit(self.request.max_num_seqs, self.readings)
        later_s = AGAIN_S if math.isfinite(self.capacity[0]) else min(SOON_S, self.window_s)
        enough_s = min(0.9 * self.window_s, ENOUGH_S)
        if self.fitted and seen.seconds < enough_s:
            self.capacity = math.nan, f"unknown for the first {format_ms(1e3 * enough_s)}"
        elif told.t_s - self.predicted_s >= later_s:
            self.predicted_s = told.t_s
            self.capacity, self.speed = self._predicted(diagnosis, seen)
        self.last = Snapshot(str(self.server), diagnosis, seen, *self.slo, *self.capacity, speed=self.speed)
        return self.last

    def _predicted(self, diagnosis: Diagnosis, seen: Interval) -> tuple[tuple[float, str], PhaseSpeed | None]:
        """The capacity (requests a second, why it is not known) and the speed of the machine."""
        if not self.fitted:
            return (math.nan, "unknown without a fit (--fit FIT)"), None
        engine = engine_of(seen, diagnosis, self.facts, self.request)
        what_if = WhatIf(engine, list(self.readings), self.slo, at_measured_speed=self.request.at_measured_speed)
        return self._capacity(what_if), what_if.speed

    def _capacity(self, what_if: WhatIf) -> tuple[float, str]:
        if min(self.slo) == math.inf:
            return math.nan, "unknown without an SLO (--ttft 500ms, --tpot 50ms)"
        if not what_if.believed:
            return math.nan, f"unknown: {what_if.refusal}"
        found = what_if.capacity_per_s()
        return found, "" if math.isfinite(found) else "no rate of such requests keeps the SLO"


@verb(WatchRequest)
def watch_server(request: WatchRequest) -> Iterator[Snapshot]:
    """Watch a running engine: a snapshot with each reading, without end. A server that goes away is asked again.

    Raises WrongUsage, FitNotUsable; BadInput where the server never answered.
    """
    every_s, window_s = in_ms(request.every, "--every") / 1e3, in_ms(request.window, "--window") / 1e3
    if window_s < every_s:
        raise WrongUsage("is shorter than --every", where="--window", remedy="Give a longer one.")
    server = Server(request.url)
    return _snapshots(server, every_s, _Watch(server, window_s, request, slo_of(request)))


def _snapshots(server: Server, every_s: float, watched: "_Watch") -> Iterator[Snapshot]:
    watched.facts = server.settings()
    for told in server.readings(every_s, FOREVER_S):
        found = watched.take(told)
        if found is not None:
            yield found


def block_of(snapshots: Iterator[Snapshot], seconds: float) -> Snapshot:
    """The snapshot after some time."""
    begun = monotonic()
    for found in snapshots:
        if monotonic() - begun >= seconds:
            return found
    raise AssertionError("snapshots end")
