"""A running engine simulated as it is, and with a setting moved: what each would make of the load that was just seen.

The load: arrivals at the rate of the readings (Poisson), with lengths drawn from the server's histograms, each bucket
evenly and then scaled so that the mean is the server's. The engine: step costs of a fit, the KV cache as the server
says it, limits as options, the server or the fit say them; where nobody does and the readings show a limit, that one.

Steps are then taken times the factor with which the simulated TPOT is the measured one: near its capacity an engine
makes much of little, so that steps a tenth too long make TPOT longer by far more. Where that factor is beyond `FAR`,
the fit or the settings are not this engine's, and no change is told.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from latfit.api.engines import USUAL, EngineSetup, engine_costs, engine_settings_of
from latfit.api.serving import UNLIMITED
from latfit.metrics import Diagnosis, Interval, tpot_ms
from latfit.model import FitResult
from latfit.simulation import EngineRun, EngineSettings, StepCosts, scaled_costs, serve
from latfit.units import format_ms, format_percent, number
from latfit.workload import Requests, make_requests

FAR, FARTHEST = 0.2, 1.5
ASSUMED = "assumed"
"""Where a setting comes from that nobody told, as `engine_settings_of` calls it."""
REQUESTS = 2000
WARM_UP = 0.2
FEWEST_FINISHED = 5
SAME = 0.03
"""Changes below this are none."""
CARRIED = 0.95
"""Share of the offered rate below which an engine is past its capacity."""
HALVINGS, HALVINGS_OF_SCALE = 12, 8


@dataclass(frozen=True)
class Outcome:
    """A simulated engine under the load. setting, value: what is other than now, empty where nothing."""

    setting: str
    value: float
    ttft_ms: float
    ttft_p99_ms: float
    tpot_ms: float
    tpot_p99_ms: float
    tokens_per_s: float
    carried: bool
    meets: float = math.nan

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def told_ttft(self) -> str:
        """Where the load is not carried it is as long as the run is."""
        return format_ms(self.ttft_p99_ms) if self.carried else "growing"

    def told(self, now: "Outcome") -> str:
        """Beside the engine as it is."""
        parts = [
            f"TTFT p99 {now.told_ttft} -> {self.told_ttft}",
            f"TPOT p99 {format_ms(now.tpot_p99_ms)} -> {format_ms(self.tpot_p99_ms)}",
        ]
        if not (now.carried and self.carried):
            parts.append(f"{number(now.tokens_per_s, 3)} -> {number(self.tokens_per_s, 3)} tokens/s")
        if math.isfinite(self.meets):
            parts.append(f"within the SLO {format_percent(100 * now.meets)} -> {format_percent(100 * self.meets)}")
        return ", ".join(parts)

    def effect(self, now: "Outcome") -> str:
        """helps, nothing, trades (one for the other) or hurts."""
        if math.isfinite(self.meets) and abs(self.meets - now.meets) > 0.005:
            return "helps" if self.meets > now.meets else "hurts"
        better = [_less(self.ttft_p99_ms, now.ttft_p99_ms), _less(self.tpot_p99_ms, now.tpot_p99_ms)]
        if not (now.carried and self.carried):
            better.append(_less(now.tokens_per_s, self.tokens_per_s))
        if not any(better):
            return "nothing"
        return "helps" if min(better) >= 0 else "hurts" if max(better) <= 0 else "trades"


def _less(new: float, old: float) -> int:
    """1 where it is clearly less, -1 where clearly more."""
    return 1 if new < old * (1 - SAME) else -1 if new > old * (1 + SAME) else 0


@dataclass(frozen=True, eq=False)
class Fitted:
    """An engine as a fit knows it. guessed: whether requests may wait for a sequence limit that nobody tells."""

    costs: StepCosts
    setup: EngineSetup
    notes: Sequence[str]
    fits: Sequence[FitResult]
    guessed: bool = False

    @property
    def settings(self) -> EngineSettings:
        return self.setup.settings[0]


def fitted_engine(
    fit: Any, prefill_fit: Any, hardware: Any, diagnosis: Diagnosis, facts: Mapping[str, Any], given: Mapping[str, Any]
) -> Fitted:
    """The engine of a diagnosis. facts: what the server says; given: settings that options name. Raises BadInput,
    FitNotUsable, WrongUsage."""
    costs, unmeasured, _, fits = engine_costs(fit, prefill_fit, None, hardware, scatter=True)
    told = dict(facts)
    if diagnosis.binding == "sequences" and "max_num_seqs" not in diagnosis.limits:
        told["max_num_seqs"] = round(diagnosis.figures["running_most"])
    setup = engine_settings_of(fits, server=told, usual={**USUAL, "kv_blocks": UNLIMITED}, **given)
    guessed = diagnosis.binding == "unknown" and setup.origin.get("max_num_seqs", ASSUMED) == ASSUMED
    return Fitted(costs, setup, [*unmeasured, *setup.notes], fits, guessed)


@dataclass(frozen=True, eq=False)
class WhatIf:
    """The load of an interval on a fitted engine. ttft_slo_ms, tpot_slo_ms: limits of requests, infinite without."""

    engine: Fitted
    seen: Interval
    ttft_slo_ms: float = math.inf
    tpot_slo_ms: float = math.inf
    seed: int = 0

    @cached_property
    def requests(self) -> Requests | None:
        """The load; None where too few requests ended to know it."""
        rate_per_ms = self.seen.arrived / self.seen.seconds / 1e3
        if not self.seen.finished >= FEWEST_FINISHED or not rate_per_ms > 0:
            return None
        rng = np.random.default_rng(self.seed)
        lengths = self.seen.lengths(REQUESTS, rng)
        if lengths is None:
            return None
        return make_requests(np.cumsum(rng.exponential(1 / rate_per_ms, REQUESTS)), *lengths)

    @cached_property
    def now(self) -> Outcome | None:
        """The engine as it is; None where the load is not known."""
        return None if self.requests is None else self._outcome("", 0, self.engine.settings, self.requests)

    @property
    def no_load(self) -> str:
        """Why the load is not known."""
        if math.isnan(self.seen.finished):
            return f"{self.seen.last.engine} does not tell how many requests come"
        return "too few requests ended in this time"

    @property
    def measured_tpot_ms(self) -> float:
        return tpot_ms(self.seen)

    @cached_property
    def scale(self) -> float:
        """The factor of all steps with which the simulated TPOT is the measured one, at most `FARTHEST` and at least
        its inverse; NaN where the load or the TPOT is not known. TPOT rises with it, so that halving finds it."""
        if self.requests is None or not self.measured_tpot_ms > 0:
            return math.nan
        low, high = -math.log(FARTHEST), math.log(FARTHEST)
        for _ in range(HALVINGS_OF_SCALE):
            middle = (low + high) / 2
            costs = scaled_costs(self.engine.costs, math.exp(middle), math.exp(middle))
            run = serve(self.requests, costs, self.engine.settings, self.seed)
            longer = _summary(run, "", 0, math.inf, math.inf).tpot_ms > self.measured_tpot_ms
            low, high = (low, middle) if longer else (middle, high)
        return math.exp((low + high) / 2)

    @property
    def believed(self) -> bool:
        return self.scale > 0 and abs(math.log(self.scale)) <= math.log1p(FAR) and not self.engine.guessed

    @property
    def far_off(self) -> str:
        """What is wrong with a fit or settings that are not believed."""
        if math.isnan(self.scale):
            return "No TPOT was measured"
        if self.engine.guessed:
            return "Requests wait, and nobody tells the sequence limit (--max-num-seqs)"
        near = 1 / FARTHEST < self.scale * 1.01 < FARTHEST
        times = (
            f"steps {self.scale:.2f} times as long" if near else f"steps more than {FARTHEST} times longer or shorter"
        )
        measured = f"the measured TPOT of {format_ms(self.measured_tpot_ms)}"
        return f"The fit or the settings are not this engine's: {measured} takes {times}"

    @cached_property
    def costs(self) -> StepCosts:
        """Of a step, so that the engine as it is has the measured TPOT."""
        return scaled_costs(self.engine.costs, self.scale, self.scale) if self.scale > 0 else self.engine.costs

    @cached_property
    def changes(self) -> list[Outcome]:
        """With settings doubled and halved, and a quarter more KV cache."""
        if self.requests is None:
            return []
        now = self.engine.settings
        moved: list[tuple[str, int]] = [("max_num_seqs", 2 * now.max_num_seqs), ("max_num_seqs", now.max_num_seqs // 2)]
        budget = now.max_num_batched_tokens
        moved += [("max_num_batched_tokens", 2 * budget), ("max_num_batched_tokens", budget // 2)]
        if now.kv_blocks < UNLIMITED:
            moved.append(("kv_blocks", now.kv_blocks * 5 // 4))
        found = []
        for name, value in moved:
            changed: dict[str, Any] = {name: value}
            settings = replace(now, **changed)
            if settings.max_num_seqs >= 1 and settings.max_num_batched_tokens >= settings.max_num_seqs:
                found.append(self._outcome(name, value, settings, self.requests))
        return found

    def capacity_per_s(self) -> float:
        """The highest rate of such requests at which p99 keeps the limits; NaN where the load is not known or no rate
        does."""
        if self.requests is None or not min(self.ttft_slo_ms, self.tpot_slo_ms) < math.inf:
            return math.nan
        rate = len(self.requests) / (self.requests.arrival_ms[-1] / 1e3)
        low, high = 0.0, 1.0
        while high < 2**20 and self._keeps(high):
            low, high = high, 2 * high
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._keeps(middle) else (low, middle)
        return low * rate if low > 0 else math.nan

    def _keeps(self, times: float) -> bool:
        assert self.requests is not None
        faster = replace(self.requests, arrival_ms=self.requests.arrival_ms / times)
        found = self._outcome("", 0, self.engine.settings, faster)
        return found.carried and found.ttft_p99_ms <= self.ttft_slo_ms and found.tpot_p99_ms <= self.tpot_slo_ms

    def _outcome(self, name: str, value: float, settings: EngineSettings, requests: Requests) -> Outcome:
        run = serve(requests, self.costs, settings, self.seed)
        return _summary(run, name, value, self.ttft_slo_ms, self.tpot_slo_ms)


def _summary(run: EngineRun, name: str, value: float, ttft_slo_ms: float, tpot_slo_ms: float) -> Outcome:
    """Of the requests behind the warm-up."""
    n = len(run.requests)
    kept = np.arange(n) >= WARM_UP * n
    ttft, tpot = run.ttft_ms[kept], run.tpot_ms[kept]
    within = (ttft <= ttft_slo_ms) & ~(tpot > tpot_slo_ms)
    promised = min(ttft_slo_ms, tpot_slo_ms) < math.inf
    tpot = tpot[np.isfinite(tpot)]
    last_ms, span_ms = float(run.last_ms.max()), float(run.requests.arrival_ms[-1])
    return Outcome(
        name,
        value,
        float(ttft.mean()),
        float(np.quantile(ttft, 0.99)),
        float(tpot.mean()) if len(tpot) else math.nan,
        float(np.quantile(tpot, 0.99)) if len(tpot) else math.nan,
        float(run.requests.output_tokens.sum()) / last_ms * 1e3,
        span_ms / (last_ms - float(np.median(run.latency_ms))) >= CARRIED,
        float(within.mean()) if promised else math.nan,
    )
