"""Compare a measured serving run with its simulation: same arrivals, engine limits, and step costs from a fit.

The verdict allows 2 % for means and 4 % for p90 and p99. With the server's counts it judges means on the engine's
clock. See docs/theory/planning.md, "Validation".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.errors import BadInput
from latfit.messages import Message, message
from latfit.model import FitResult
from latfit.simulation import EngineRun, EngineSettings, Routing, StepCosts, serve_replicas
from latfit.stats import FloatArray
from latfit.units import number
from latfit.validation.calibrate import Calibration, calibrate
from latfit.validation.measured import Measured
from latfit.validation.server import ServerRun

CONTEXT = "context_tokens"
MAX_RARE_SHARE = 1e-3  # of steps beyond the measured B without a warning; no reported percentile depends on so few
FAR_CONTEXT = 1.5  # multiple of the cache's tokens beyond which rows with more context bias a fit
STEP_LEVELS = (0.99, 0.95, 0.9)  # one-sided levels of single-step limits, in order of preference
MIN_CALIBRATION_REQUESTS = 30

DEFINITIONS: Mapping[str, str] = {
    "ttft_ms": "arrival to first token",
    "tpot_ms": "(last - first token) / (output - 1), without the first token",
    "tpot_with_first_ms": "latency / output, the first token included",
    "latency_ms": "arrival to last token",
}
STATISTICS = ("mean", "p50", "p90", "p99")
LIMITS_PCT: Mapping[str, float] = {"mean": 2.0, "p90": 4.0, "p99": 4.0}  # the median is reported, not judged
NAMES: Mapping[str, str] = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "latency_ms": "latency"}
JUDGED = tuple(NAMES)


def cautions_about(
    fit: FitResult, with_prefill: FitResult | None, run: EngineRun, settings: EngineSettings
) -> Sequence[Message]:
    """Return what biases a simulation by these fits. with_prefill: None if one fit costs all steps."""
    fits = [fit] if with_prefill is None else [fit, with_prefill]
    found: list[Message | None] = []
    if without := [each for each in fits if CONTEXT not in each.columns]:
        kind = "context_left_out" if CONTEXT in without[0].domain else "no_context"
        found.append(message(kind, model=without[0].model))
    elif with_prefill is None:
        found.append(message("one_fit"))
    if any(each.data.more.get("host_time") == "none" for each in fits):
        found.append(message("kernels_only"))
    found.append(no_prefill_warning(fits[-1]))
    context = max(_highest(each, CONTEXT) for each in fits)
    if context > FAR_CONTEXT * settings.cache_tokens:
        found.append(message("far_rows", context=context, cache=settings.cache_tokens))
    found.append(outside_warning(fits, run, settings))
    return [each for each in found if each is not None]


def outside_warning(fits: Sequence[FitResult], run: EngineRun, settings: EngineSettings) -> Message | None:
    at_least = run.batch_sizes[::-1].cumsum()[::-1]
    reached = {
        "B": int((at_least > MAX_RARE_SHARE * run.batch_sizes.sum()).nonzero()[0].max(initial=0)),
        "S": min(int(run.requests.prompt_tokens.max(initial=0)), settings.max_num_batched_tokens),
    }
    beyond = []
    for column, value in reached.items():
        measured = max(_highest(each, column) for each in fits)
        if 0 < measured < value:
            beyond.append(f"{column} = {value:,}, {number(value / measured, 3)}× above the measured {measured:,.0f}")
    return message("simulated_outside", beyond="; ".join(beyond)) if beyond else None


def no_prefill_warning(fit: FitResult) -> Message | None:
    return None if fit.knows_prefill else message("no_prefill_fit")


def not_of_machine(fits: Sequence[FitResult], found: "Validation") -> str:
    """Explain in a sentence why a run cannot be of the fitted machine; empty if it can.

    TPOT is the mean of a request's steps. If its median lies outside the single-step limits of every phase, the step
    times differ, not the queue.
    """
    ends = []
    for limits, phase in ((fit.limits, phase) for fit in fits for phase in fit.limits.by_phase):
        pairs = [(limits.lower_factor(phase, level), limits.factor(phase, level)) for level in STEP_LEVELS]
        ends += [(low, high) for low, high in pairs if low is not None and high is not None][:1]
    figures = [each for each in found.figures if (each.metric, each.statistic) == ("tpot_ms", "p50")]
    if not ends or not figures or not figures[0].measured > 0 or not figures[0].simulated > 0:
        return ""
    ratio = figures[0].measured / figures[0].simulated
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    if low <= ratio <= high:
        return ""
    factor = f"{max(ratio, 1 / ratio):.3g} times {'slower' if ratio > 1 else 'faster'}"
    return (
        f"This run is not of the fitted machine: {factor} per output token (median) than the fit's steps make, whose"
        f" own scatter is {low:.2g} to {high:.2g} times."
    )


def _highest(fit: FitResult, column: str) -> float:
    return float(fit.domain[column][1]) if column in fit.domain else 0.0


@dataclass(frozen=True)
class Figure:
    """One statistic of one metric, ms.

    With a server's counts, `measured` is the mean on the engine's clock; `quantiles` has name → (edges of the server's
    bucket, simulated).
    """

    metric: str
    statistic: str
    measured: float
    simulated: float
    client: float = math.nan
    server: float = math.nan
    quantiles: Mapping[str, tuple[tuple[float, float], float]] = field(default_factory=dict)

    @property
    def error_pct(self) -> float:
        return 100.0 * (self.simulated / self.measured - 1.0) if self.measured > 0 else math.nan

    @property
    def limit_pct(self) -> float | None:
        """None if the figure is not judged."""
        return LIMITS_PCT.get(self.statistic) if self.metric in JUDGED else None

    @property
    def holds(self) -> bool:
        return self.limit_pct is None or abs(self.error_pct) <= self.limit_pct

    def clocks_json(self) -> dict[str, Any]:
        means = {"client": self.client, "server": self.server, "engine": self.measured, "simulated": self.simulated}
        buckets = {
            name: {"above": low, "up_to": high, "simulated": simulated}
            for name, ((low, high), simulated) in self.quantiles.items()
        }
        return {**means, "error_pct": self.error_pct, "quantiles": buckets}


@dataclass(frozen=True, eq=False, repr=False)
class Validation:
    """The comparison. scored: requests (n,) that are compared.  clocks: against the server's counts, if given."""

    measured: Measured
    run: EngineRun
    settings: EngineSettings
    figures: Sequence[Figure]
    scored: NDArray[np.bool_]
    constants: Calibration | None
    server: ServerRun | None = None
    clocks: Sequence[Figure] = ()

    @property
    def watched(self) -> bool:
        return self.measured.watched_ms is not None

    @property
    def judged(self) -> Sequence[Figure]:
        """The figures with a tolerance: means against the server's engine if known, else the client."""
        return self.clocks or [each for each in self.figures if each.limit_pct is not None]

    @property
    def agrees(self) -> bool:
        return all(each.holds for each in self.judged)

    @property
    def mean_errors(self) -> dict[str, float]:
        return {each.metric: each.error_pct for each in self.judged if each.statistic == "mean"}

    @property
    def verdict(self) -> str:
        of, limits = f"{int(self.scored.sum()):,} requests", "means within 2 %, p90 and p99 within 4 %"
        against = "the measured run"
        if self.clocks and self.server is not None:
            against = f"the server's {'engine' if self.server.has_engine or not self.watched else 'own counts'}"
            limits = "means within 2 %"
            of = f"{self.server.requests if self.watched else len(self.measured):,} requests"
        off = [each for each in self.judged if not each.holds]
        if not off:
            return f"Simulation agrees with {against}: {limits} ({of})."
        worst = max(off, key=lambda each: abs(each.error_pct) / (each.limit_pct or 1.0))
        return (
            f"Simulation differs from {against}: {len(off)} of {len(self.judged)} figures are outside tolerance, worst"
            f" {NAMES[worst.metric]} {worst.statistic} {worst.error_pct:+.1f} % ({of})."
        )

    def to_json(self) -> dict[str, Any]:
        table: dict[str, dict[str, Any]] = {}
        for each in self.figures:
            row = {name: getattr(each, name) for name in ("measured", "simulated", "error_pct", "limit_pct")}
            table.setdefault(each.metric, {})[each.statistic] = row
        calibration, server = None, None
        if self.constants is not None:
            calibration = asdict(self.constants) | {"requests": int((~self.scored).sum())}
        if self.server is not None:
            server = {
                "requests": self.server.requests,
                "counts": dict(self.server.counts),
                "metrics": {each.metric: each.clocks_json() for each in self.clocks},
                "source": self.server.source,
            }
        limits = ("kv_blocks", "max_num_seqs", "max_num_batched_tokens")
        return {
            "schema": "latfit.validation/1",
            "agrees": self.agrees,
            "verdict": self.verdict,
            "requests": len(self.measured),
            "scored": int(self.scored.sum()),
            "metrics": table,
            "definitions": dict(DEFINITIONS),
            "calibration": calibration,
            "server": server,
            "engine": {
                "steps": self.run.counters.steps,
                "preemptions": self.run.counters.preemptions,
                "utilisation": self.run.busy_ms / self.run.makespan_ms / len(self.run.timelines),
                **{name: getattr(self.settings, name) for name in limits},
            },
            "source": self.measured.source,
        }


@dataclass(frozen=True)
class Asked:
    """Options of a validation. calibration: on the first third of the requests; the rest is scored."""

    calibration: bool = False
    seed: int = 0
    routing: Routing = field(default_factory=Routing)
    server: ServerRun | None = None


def validate(measured: Measured, costs: StepCosts, settings: EngineSettings, how: Asked = Asked()) -> Validation:
    """Simulate the measured arrivals and compare.

    Raises BadInput if a request exceeds the KV cache, or too few requests remain to calibrate.
    """
    scored = np.ones(len(measured), dtype=bool)
    constants = None
    if how.calibration:
        if len(measured) < MIN_CALIBRATION_REQUESTS:
            raise BadInput(
                f"{len(measured)} requests are too few to calibrate with and to score",
                where=measured.source,
                remedy=f"Give {MIN_CALIBRATION_REQUESTS} or more, or leave out --calibrate.",
            )
        scored = np.arange(len(measured)) >= len(measured) // 3
        constants = calibrate(measured, costs, settings, ~scored, how.seed, how.routing)
        costs = constants.costs(costs)
    run = serve_replicas(measured.requests, costs, settings, how.routing, how.seed)
    if constants is not None:
        run = constants.delay(run)
    clocks = [] if how.server is None else _compare_clocks(measured, run, how.server)
    figures = [] if measured.watched_ms is not None else _compare_requests(measured, run, scored)
    return Validation(measured, run, settings, figures, scored, constants, how.server, clocks)


def _compare_requests(measured: Measured, run: EngineRun, scored: NDArray[np.bool_]) -> list[Figure]:
    theirs = metrics(measured, measured.first_ms, measured.last_ms)
    ours = metrics(measured, run.first_ms, run.last_ms)
    return [
        Figure(metric, name, _statistic(theirs[metric][scored], name), _statistic(ours[metric][scored], name))
        for metric in DEFINITIONS
        for name in STATISTICS
    ]


def _compare_clocks(measured: Measured, run: EngineRun, server: ServerRun) -> list[Figure]:
    client, simulated = (
        metrics(measured, first, last)
        for first, last in ((measured.first_ms, measured.last_ms), (run.first_ms, run.last_ms))
    )
    of_scheduler = metrics(measured, run.first_ms, run.last_ms, run.seen_ms) if server.has_engine else simulated
    of_server, of_engine = server.server_ms(), server.engine_ms()
    found = []
    for metric in JUDGED:
        counted = _counted(metric, measured, run)
        weight = None
        if metric == "tpot_ms" and server.of_tokens:  # a mean over tokens: each request has output - 1 of them
            weight = np.maximum(measured.requests.output_tokens - 1.0, 0.0)
        seen = np.where(counted, simulated[metric], np.nan)
        quantiles = {
            name: (server.quantile_ms(metric, int(name[1:]) / 100), _statistic(seen, name)) for name in STATISTICS[1:]
        }
        mean = finite_mean(np.where(counted, of_scheduler[metric], np.nan), weight)
        clients = finite_mean(client[metric], weight)
        found.append(Figure(metric, "mean", of_engine[metric], mean, clients, of_server[metric], quantiles))
    return found


def _counted(metric: str, measured: Measured, run: EngineRun) -> NDArray[np.bool_] | bool:
    """Return the requests (n,) that a server counts: in a watched run those within it."""
    if measured.watched_ms is None:
        return True
    begin_ms, end_ms = measured.watched_ms
    moment = run.first_ms if metric == "ttft_ms" else run.last_ms
    return np.asarray((measured.requests.arrival_ms >= begin_ms) & (moment <= end_ms))


def metrics(
    measured: Measured, first_ms: FloatArray, last_ms: FloatArray, since_ms: FloatArray | None = None
) -> dict[str, FloatArray]:
    """Return each metric of `DEFINITIONS` by request (n,), NaN if undefined. since_ms (n,): replaces the arrivals."""
    arrival, output = measured.requests.arrival_ms if since_ms is None else since_ms, measured.requests.output_tokens
    more = np.where(output > 1, output - 1, np.nan)
    return {
        "ttft_ms": first_ms - arrival,
        "tpot_ms": (last_ms - first_ms) / more,
        "tpot_with_first_ms": (last_ms - arrival) / output,
        "latency_ms": last_ms - arrival,
    }


def finite_mean(values: FloatArray, weight: FloatArray | None = None) -> float:
    finite = np.isfinite(values)
    if not finite.any() or (weight is not None and not weight[finite].sum() > 0):
        return math.nan
    return float(np.average(values[finite], weights=None if weight is None else weight[finite]))


def _statistic(values: FloatArray, name: str) -> float:
    if name == "mean":
        return finite_mean(values)
    values = values[np.isfinite(values)]
    return float(np.quantile(values, int(name[1:]) / 100)) if len(values) else math.nan
