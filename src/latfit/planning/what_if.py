"""Simulate a running engine with one setting changed: docs/theory/planning.md, "What-if on a running engine".

Advice is given only if the readings' own window is simulated correctly.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from latfit.metrics import Interval, Reading, between
from latfit.model import FitResult
from latfit.planning.serving.evaluate import Evaluator
from latfit.planning.serving.result import Stalls
from latfit.planning.serving.stalls import stalls_of
from latfit.planning.serving.targets import Targets
from latfit.queueing import bracket
from latfit.simulation import UNLIMITED, EngineRun, EngineSettings, EngineSetup, StepCosts, scaled_costs, serve
from latfit.units import format_ms, format_percent, number
from latfit.validation import TOLERANCE, Check, PhaseSpeed, check_window, window_speed
from latfit.workload import RecordedLoad, Requests, make_requests

MAX_SPEED_CHANGE = 1.2  # largest speed factor, either way, at which advice needs no consent: about the error of a fit
MAX_DRIFT = math.log(1.5)  # largest change of ln speed since the fit that counts as drift; more is another machine
ENOUGH_S = 30.0  # length of readings beyond which sampling noise seldom moves the means
REQUESTS, REPLICATIONS = 1000, 20
WARM_UP = 0.2
MIN_FINISHED = 5  # requests that must end within the readings to determine the load
MIN_CHANGE = 0.03  # relative change that is ignored
MIN_SHARE = 0.8  # share of replications in which a figure must change in one direction
LEVEL = 0.9  # share of replications that a range spans
MOST_TIMES = 2.0**16  # of the measured rate, either way: the loads that the capacity is looked for in
CARRIED = 0.95  # completed share of the offered rate below which an engine is overloaded


@dataclass(frozen=True)
class Outcome:
    """A simulated engine under the load. setting, value: what was changed. runs: figures by replication."""

    setting: str
    value: float
    runs: Mapping[str, np.ndarray[Any, Any]]

    def median(self, name: str) -> float:
        return float(np.median(self.runs[name]))

    @property
    def carried(self) -> bool:
        return self.median("carried") >= 0.5

    def to_json(self) -> dict[str, Any]:
        medians = {name: self.median(name) for name in FIGURES}
        ranges = {name: self.range(name) for name in FIGURES}
        return {"setting": self.setting, "value": self.value, **medians, "carried": self.carried, "range": ranges}

    def range(self, name: str) -> tuple[float, float]:
        """Return the ends of the central LEVEL of the replications; the upper TTFT is infinite under overload."""
        values = np.where(self.runs["carried"], self.runs[name], math.inf) if name in TTFT else self.runs[name]
        values = values[~np.isnan(values)]
        if not len(values):
            return math.nan, math.nan
        ends = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="nearest")
        return float(ends[0]), float(ends[1])

    def compared(self, now: "Outcome") -> str:

        def shown(ms: float) -> str:
            return "growing" if ms == math.inf else format_ms(ms)

        parts = []
        for title, name in (("TTFT p99", "ttft_p99_ms"), ("TPOT p99", "tpot_p99_ms")):
            low, high = map(shown, self.range(name))
            span = f" ({low} to {high})" if low != high else ""
            ends = [each.median(name) if each.carried or name not in TTFT else math.inf for each in (now, self)]
            before, after = map(shown, ends)
            parts.append(f"{title} {before} -> {after}{span}")
        if not (now.carried and self.carried):
            before, after = (number(each.median("tokens_per_s"), 3) for each in (now, self))
            parts.append(f"{before} -> {after} tokens/s")
        if math.isfinite(self.median("meets")):
            before, after = (format_percent(100 * each.median("meets")) for each in (now, self))
            parts.append(f"within the SLO {before} -> {after}")
        return ", ".join(parts)

    def effect(self, now: "Outcome") -> str:
        """Return helps, nothing, trades (one figure for another) or hurts."""
        if gained := self._direction(now, "meets", relative=False):
            return "helps" if gained > 0 else "hurts"
        better = [-self._direction(now, name) for name in ("ttft_p99_ms", "tpot_p99_ms")]
        if not (now.carried and self.carried):
            better.append(self._direction(now, "tokens_per_s"))
        if not any(better):
            return "nothing"
        return "helps" if min(better) >= 0 else "hurts" if max(better) <= 0 else "trades"

    def _direction(self, now: "Outcome", name: str, *, relative: bool = True) -> int:
        """Return 1 if a figure grows in MIN_SHARE of the replications, -1 if it falls, else 0."""
        new, old = self.runs[name], now.runs[name]
        least = MIN_CHANGE * np.abs(old) if relative else 0.005
        return int(np.mean(new > old + least) >= MIN_SHARE) - int(np.mean(new < old - least) >= MIN_SHARE)


TTFT = ("ttft_ms", "ttft_p99_ms")
FIGURES = (*TTFT, "tpot_ms", "tpot_p99_ms", "tokens_per_s", "meets")


@dataclass(frozen=True, eq=False)
class Fitted:
    """An engine with the costs of a fit. impossible: why its sequence limit must be wrong, else empty."""

    costs: StepCosts
    setup: EngineSetup
    unmeasured: Sequence[str]
    fits: Sequence[FitResult]
    impossible: str = ""

    @property
    def settings(self) -> EngineSettings:
        return self.setup.settings


@dataclass(frozen=True, eq=False)
class WhatIf:
    """The load of some readings on a fitted engine."""

    engine: Fitted
    readings: Sequence[Reading]
    slo_ms: tuple[float, float] = (math.inf, math.inf)  # limits of p99 TTFT and TPOT; infinite if not given
    seed: int = 0
    at_measured_speed: bool = False  # simulate at the measured speed however far it is from the fit's

    @cached_property
    def seen(self) -> Interval:
        return between(self.readings[0], self.readings[-1])

    @cached_property
    def speed(self) -> PhaseSpeed | None:
        """Speed factor relative to the fit; None if the readings do not show step times."""
        windows = [between(a, b) for a, b in pairwise(self.readings)]
        return window_speed(windows, self.engine.fits) if self.engine.fits else None

    @property
    def factor(self) -> float:
        return 1.0 if self.speed is None else self.speed.factor

    def costs_now(self, rng: np.random.Generator, drift: float = 0.0) -> StepCosts:
        """Draw step costs at the measured speed within its error. drift: standard deviation of ln speed."""
        error = 0.0 if self.speed is None or math.isnan(self.speed.error) else self.speed.error / self.factor
        factor = self.factor * math.exp(math.hypot(error, drift) * rng.normal())
        return scaled_costs(self.engine.costs, factor, factor)

    @cached_property
    def checks(self) -> list[Check]:
        return [] if self.load is None else check_window(self.readings, self.engine.settings, self.costs_now, self.seed)

    @property
    def believed(self) -> bool:
        return not self.refusal

    @cached_property
    def refusal(self) -> str:
        """Why no advice is given; empty if the simulation matches this engine."""
        longer = "look for longer (--duration 1min)"
        if math.isnan(self.seen.finished):
            return f"{self.seen.last.engine} does not publish how many requests come"
        if self.load is None:
            return f"too few requests ended in this time; {longer}"
        if self.engine.impossible:
            return self.engine.impossible
        if not self.checks:
            return f"{self.seen.last.engine} publishes neither TTFT nor TPOT to compare with"
        if abs(math.log(self.factor)) > math.log(MAX_SPEED_CHANGE) and not self.at_measured_speed:
            return "the fit is of another speed; record again, or simulate at this speed with --at-measured-speed"
        differing = [each for each in self.checks if not each.agrees]
        if not differing:
            return ""
        hint = "check --max-num-seqs, --max-num-batched-tokens and --kv-blocks"
        if {each.metric for each in differing} <= {"TPOT", "running"}:
            hint = "record again for a fit of this load"
        hint += "" if self.seen.seconds >= ENOUGH_S else f", or {longer}"
        found, tolerance = ", ".join(each.sentence for each in differing), format_percent(100 * TOLERANCE)
        return f"the simulated engine is off by more than {tolerance}: {found}; {hint}"

    @cached_property
    def load(self) -> Requests | None:
        """Requests with the measured lengths at one per ms; None if too few ended."""
        if not self.seen.finished >= MIN_FINISHED or not self.seen.arrived > 0:
            return None
        rng = np.random.default_rng(self.seed)
        lengths = self.seen.lengths(REQUESTS, rng)
        return None if lengths is None else make_requests(np.cumsum(rng.exponential(1.0, REQUESTS)), *lengths)

    @property
    def rate_per_ms(self) -> float:
        return self.seen.arrived / self.seen.seconds / 1e3 / self.seen.last.engines

    @cached_property
    def now(self) -> Outcome:
        return self._outcome("", 0, self.engine.settings)

    @cached_property
    def changes(self) -> list[Outcome]:
        """Engines with known limits doubled and halved, and with a quarter more KV cache."""
        now = self.engine.settings
        moved: list[tuple[str, int]] = []
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if self.engine.setup.is_known(name):
                moved += [(name, 2 * getattr(now, name)), (name, getattr(now, name) // 2)]
        if now.kv_blocks < UNLIMITED:
            moved.append(("kv_blocks", now.kv_blocks * 5 // 4))
        found = []
        for name, value in moved:
            limits = {
                "max_num_seqs": now.max_num_seqs,
                "max_num_batched_tokens": now.max_num_batched_tokens,
                name: value,
            }
            if limits["max_num_batched_tokens"] >= limits["max_num_seqs"] >= 1:
                found.append(self._outcome(name, value, replace(now, **limits)))  # type: ignore[arg-type]
        return found

    @cached_property
    def stalls(self) -> Stalls | None:
        if self.load is None or not self.engine.setup.is_known("max_num_batched_tokens"):
            return None
        fit = self.engine.fits[-1] if self.engine.fits else None
        costs = scaled_costs(self.engine.costs, self.factor, self.factor)
        flooded = Evaluator(RecordedLoad(self.load), costs, Targets(()), seed=self.seed)
        return stalls_of(
            costs,
            self.engine.settings,
            (self.load.prompt_tokens, self.load.output_tokens),
            max(each.state.running / each.state.engines for each in self.readings),
            math.inf if fit is None else fit.domain["S"][1],
            lambda settings: flooded.saturated(settings).output_tokens_per_s,
            fit,
        )

    def to_json(self) -> dict[str, Any]:
        stalls = self.stalls if self.believed else None
        return {
            "now": None if self.load is None else self.now.to_json(),
            "speed": self.speed and asdict(self.speed),
            "believed": self.believed,
            "refusal": self.refusal or None,
            "checks": [each.to_json() for each in self.checks],
            "changes": [
                {**each.to_json(), "effect": each.effect(self.now)} for each in (self.changes if self.believed else ())
            ],
            "stalls": stalls and stalls.to_json(),
            "settings_from": dict(self.engine.setup.origin),
            "notes": [*self.engine.unmeasured, *(each.sentence for each in self.engine.setup.notes)],
        }

    def capacity_per_s(self) -> float:
        """Return the highest rate at which p99 meets the SLO; NaN if none does."""
        if self.load is None or not min(self.slo_ms) < math.inf:
            return math.nan
        times = bracket(self._meets, 1.0, growth=2.0, precision=1.001, least=1 / MOST_TIMES, most=MOST_TIMES)[0]
        return times * self.rate_per_ms * 1e3 * self.seen.last.engines if times > 1 / MOST_TIMES else math.nan

    def _meets(self, times: float) -> bool:
        assert self.load is not None
        requests = replace(self.load, arrival_ms=self.load.arrival_ms / (times * self.rate_per_ms))
        costs = scaled_costs(self.engine.costs, self.factor, self.factor)
        found = self._figures(serve(requests, costs, self.engine.settings, self.seed))
        limits = found["ttft_p99_ms"] <= self.slo_ms[0] and found["tpot_p99_ms"] <= self.slo_ms[1]
        return bool(found["carried"] and limits)

    def _outcome(self, name: str, value: float, settings: EngineSettings) -> Outcome:
        found = []
        for stream in np.random.default_rng([self.seed, 1]).spawn(REPLICATIONS):
            rate = self.rate_per_ms * stream.gamma(self.seen.arrived) / self.seen.arrived
            lengths = self.seen.lengths(REQUESTS, stream)
            assert lengths is not None
            requests = make_requests(np.cumsum(stream.exponential(1 / rate, REQUESTS)), *lengths)
            # The machine may have another speed after the readings.
            drift = min(abs(math.log(self.factor)), MAX_DRIFT) / math.sqrt(2)
            found.append(self._figures(serve(requests, self.costs_now(stream, drift), settings, self.seed)))
        return Outcome(name, value, {name: np.array([each[name] for each in found]) for name in found[0]})

    def _figures(self, run: EngineRun) -> dict[str, float]:
        n = len(run.requests)
        counted = np.arange(n) >= WARM_UP * n
        ttft, tpot = run.ttft_ms[counted], run.tpot_ms[counted]
        within = (ttft <= self.slo_ms[0]) & ~(tpot > self.slo_ms[1])
        tpot = tpot[np.isfinite(tpot)]
        last_ms, span_ms = float(run.last_ms.max()), float(run.requests.arrival_ms[-1])
        return {
            "ttft_ms": float(ttft.mean()),
            "ttft_p99_ms": float(np.quantile(ttft, 0.99)),
            "tpot_ms": float(tpot.mean()) if len(tpot) else math.nan,
            "tpot_p99_ms": float(np.quantile(tpot, 0.99)) if len(tpot) else math.nan,
            "tokens_per_s": self.seen.last.engines * float(run.requests.output_tokens.sum()) / last_ms * 1e3,
            "carried": span_ms / (last_ms - float(np.median(run.latency_ms))) >= CARRIED,
            "meets": float(within.mean()) if min(self.slo_ms) < math.inf else math.nan,
        }
