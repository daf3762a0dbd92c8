"""Compare a measured serving run with its simulation: same arrivals, engine limits, and step costs from a fit.

The verdict allows 2 % for means and 4 % for p90 and p99. With the server's counts it judges means on the engine's
clock. See docs/theory/planning.md, "Validation".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from latfit.errors import BadInput
from latfit.hardware import step_columns
from latfit.messages import Message, message
from latfit.model import FitResult
from latfit.records import Number, Record
from latfit.simulation import EngineRun, EngineSettings, Routing, StepCosts, serve_replicas
from latfit.stats import FloatArray
from latfit.units import count_text, number
from latfit.validation.calibrate import Calibration, calibrate
from latfit.validation.measured import Measured
from latfit.validation.server import ServerRun

CONTEXT = "context_tokens"
MAX_RARE_SHARE = 1e-3  # of steps beyond the measured ones without a warning; no reported percentile depends on so few
FAR_CONTEXT = 1.5  # multiple of the cache's tokens beyond which rows bias a fit, and of measured context to warn from
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
    found.append(None if fits[-1].knows_prefill else message("no_prefill_fit"))
    context = max(_highest(each, CONTEXT) for each in fits)
    if context > FAR_CONTEXT * settings.cache_tokens:
        found.append(message("far_rows", context=context, cache=settings.cache_tokens))
    found += [outside_warning(fits, run, settings), far_context_warning(fits, run)]
    return [each for each in found if each is not None]


def outside_warning(fits: Sequence[FitResult], run: EngineRun, settings: EngineSettings) -> Message | None:
    at_least = run.batch_sizes[::-1].cumsum()[::-1]
    # Prompts whose first tokens come together share a step, up to the token budget.
    _, step = np.unique(np.stack([run.replica, run.first_ms]), axis=1, return_inverse=True)
    filled = np.bincount(step.ravel(), weights=run.requests.prompt_tokens)
    most = int(np.quantile(filled, 1 - MAX_RARE_SHARE, method="higher")) if len(filled) else 0
    reached = {
        "B": int((at_least > MAX_RARE_SHARE * run.batch_sizes.sum()).nonzero()[0].max(initial=0)),
        "S": min(most, settings.max_num_batched_tokens),
    }
    beyond = []
    for column, value in reached.items():
        measured = max(_highest(each, column) for each in fits)
        if 0 < measured < value:
            beyond.append(f"{column} = {value:,}, {number(value / measured, 3)}× above the measured {measured:,.0f}")
    return message("simulated_outside", beyond="; ".join(beyond)) if beyond else None


def far_context_warning(fits: Sequence[FitResult], run: EngineRun) -> Message | None:
    """Warn if the median decode step, by its cached tokens a request, lies far outside every fit's measured range."""
    reading = [fit for fit in fits if fit.reads_context]
    if not reading or not len(run.requests) or not run.batch_sizes.any():
        return None
    median = int(np.searchsorted(run.batch_sizes.cumsum(), run.batch_sizes.sum() / 2))
    B = np.array([float(min(median, *(fit.largest_batch for fit in reading)))])
    prompts, outputs = run.requests.prompt_tokens, run.requests.output_tokens
    cached = float(np.average(prompts + outputs / 2, weights=outputs))  # a request takes part in a step for each token
    tried = [step_columns(B, B, each) for each in (cached / FAR_CONTEXT, cached, cached * FAR_CONTEXT)]
    if not all(fit.outside_domain(**step)[0] for fit in reading for step in tried):
        return None
    return message("far_context", steps=f"decode steps of {count_text(int(B[0]), 'request')}", cached=cached)


def not_of_machine(fits: Sequence[FitResult], found: "Validation") -> str:
    """Explain in a sentence why a run cannot be of the fitted machine; empty if it can.

    TPOT is the mean of a request's steps. If its median lies outside the single-step limits of every phase, the step
    times differ, not the queue.
    """
    ends = []
    for limits, phase in ((fit.limits, phase) for fit in fits for phase in fit.limits.by_phase):
        pairs = [[limits.pooled_factor(phase, level, side) for side in ("lower", "upper")] for level in STEP_LEVELS]
        ends += [(low, high) for low, high in pairs if low is not None and high is not None][:1]
    median = found.metrics["tpot_ms"]["p50"] if found.metrics else None
    if not ends or median is None or not median.measured > 0 or not median.simulated > 0:
        return ""
    ratio = median.measured / median.simulated
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


class Bucket(Record, frozen=True):
    """Edges of the server's histogram bucket that holds a quantile, and the simulated quantile, ms."""

    above: float
    up_to: float
    simulated: Number


class Figure(Record, frozen=True):
    """One statistic of one metric, ms; NaN if no request has it. limit_pct: tolerance; None if it is not judged."""

    measured: Number
    simulated: Number
    error_pct: Number
    limit_pct: float | None = None

    @property
    def holds(self) -> bool:
        return self.limit_pct is None or abs(self.error_pct) <= self.limit_pct


class Clocks(Record, frozen=True):
    """Means of a metric on each clock, ms, and quantiles by name. error_pct: of the simulated to the engine's mean."""

    client: Number
    server: Number
    engine: Number
    simulated: Number
    error_pct: Number
    quantiles: Mapping[str, Bucket]

    @property
    def holds(self) -> bool:
        return abs(self.error_pct) <= LIMITS_PCT["mean"]


class ServerComparison(Record, frozen=True):
    """What the server counted of the run, and its means by metric compared with the simulation."""

    requests: int
    counts: Mapping[str, float]
    metrics: Mapping[str, Clocks]
    source: str


class EngineUse(Record, frozen=True):
    """What the simulated engine did, and the limits that it had."""

    steps: int
    preemptions: int
    utilisation: Number
    kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int


class Validation(Record, frozen=True, eq=False, tag_field="schema", tag="latfit.validation/1"):
    """The comparison, by metric and statistic.

    measured, run, was_scored (the requests, (n,), that are compared) are not in the JSON.
    """

    not_in_json: ClassVar[Sequence[str]] = ("measured", "run", "was_scored")

    agrees: bool
    verdict: str
    requests: int
    scored: int
    metrics: Mapping[str, Mapping[str, Figure]]
    calibration: Calibration | None
    server: ServerComparison | None
    engine: EngineUse
    source: str
    measured: Any
    run: Any
    was_scored: Any
    definitions: Mapping[str, str] = msgspec.field(default_factory=lambda: DEFINITIONS)

    @property
    def watched(self) -> bool:
        return self.measured.watched_ms is not None

    @property
    def clocks(self) -> Mapping[str, Clocks]:
        """Each judged metric against the server's counts; empty without them."""
        return {} if self.server is None else self.server.metrics

    @property
    def mean_errors(self) -> dict[str, float]:
        """Errors of the judged means in percent, by metric."""
        means: Mapping[str, Figure | Clocks] = self.clocks
        if not means:
            means = {metric: self.metrics[metric]["mean"] for metric in JUDGED}
        return {metric: each.error_pct for metric, each in means.items()}


@dataclass(frozen=True)
class ValidationOptions:
    """Options of a validation. calibration: on the first third of the requests; the rest is scored."""

    calibration: bool = False
    seed: int = 0
    routing: Routing = field(default_factory=Routing)
    server: ServerRun | None = None


def validate(
    measured: Measured, costs: StepCosts, settings: EngineSettings, how: ValidationOptions = ValidationOptions()
) -> Validation:
    """Simulate the measured arrivals and compare.

    Raises BadInput if a request exceeds the KV cache, or too few requests remain to calibrate.
    """
    scored = np.ones(len(measured), dtype=bool)
    calibration = None
    if how.calibration:
        if len(measured) < MIN_CALIBRATION_REQUESTS:
            raise BadInput(
                f"{len(measured)} requests are too few to calibrate with and to score",
                where=measured.source,
                remedy=f"Give {MIN_CALIBRATION_REQUESTS} or more, or leave out --calibrate.",
            )
        scored = np.arange(len(measured)) >= len(measured) // 3
        calibration = calibrate(measured, costs, settings, ~scored, how.seed, how.routing)
        costs = calibration.costs(costs)
    run = serve_replicas(measured.requests, costs, settings, how.routing, how.seed)
    if calibration is not None:
        run = calibration.delay(run)
    figures = {} if measured.watched_ms is not None else _compare_requests(measured, run, scored)
    server = None if how.server is None else _compare_clocks(measured, run, how.server)
    agrees, verdict = _judge(figures, how.server, server, measured, int(scored.sum()))
    limits = ("kv_blocks", "max_num_seqs", "max_num_batched_tokens")
    engine = EngineUse(
        run.counters.steps,
        run.counters.preemptions,
        run.busy_ms / run.makespan_ms / len(run.timelines),
        **{name: getattr(settings, name) for name in limits},
    )
    return Validation(
        agrees, verdict, len(measured), int(scored.sum()), figures, calibration, server, engine, measured.source,
        measured, run, scored,
    )  # fmt: skip


def _judge(
    figures: Mapping[str, Mapping[str, Figure]],
    run: ServerRun | None,
    server: ServerComparison | None,
    measured: Measured,
    scored: int,
) -> tuple[bool, str]:
    """Return whether all judged figures are within tolerance, and the verdict: by the server's counts where known."""
    against, limits, of = "the measured run", "means within 2 %, p90 and p99 within 4 %", scored
    judged: Mapping[str, Figure | Clocks]
    if run is not None and server is not None:
        watched = measured.watched_ms is not None
        against = f"the server's {'engine' if run.has_engine or not watched else 'own counts'}"
        limits, of = "means within 2 %", run.requests if watched else len(measured)
        judged = {f"{NAMES[metric]} mean": each for metric, each in server.metrics.items()}
    else:
        rows = [(f"{NAMES[metric]} {name}", figures[metric][name]) for metric in JUDGED for name in LIMITS_PCT]
        judged = {name: figure for name, figure in rows if figure.limit_pct is not None}
    off = {name: each for name, each in judged.items() if not each.holds}
    if not off:
        return True, f"Simulation agrees with {against}: {limits} ({of:,} requests)."
    worst = max(off, key=lambda name: abs(off[name].error_pct) / LIMITS_PCT[name.rpartition(" ")[2]])
    return False, (
        f"Simulation differs from {against}: {len(off)} of {len(judged)} figures are outside tolerance, worst"
        f" {worst} {off[worst].error_pct:+.1f} % ({of:,} requests)."
    )


def _error_pct(simulated: float, measured: float) -> float:
    """Return the relative error: NaN without a measured value, infinite if it is zero or without a simulated one."""
    if math.isnan(measured):
        return math.nan
    if measured > 0 and not math.isnan(simulated):
        return 100.0 * (simulated / measured - 1.0)
    return 0.0 if simulated == measured else math.inf


def _compare_requests(measured: Measured, run: EngineRun, scored: NDArray[np.bool_]) -> dict[str, dict[str, Figure]]:
    """Compare every statistic over the scored requests."""
    theirs = metrics(measured, measured.first_ms, measured.last_ms)
    ours = metrics(measured, run.first_ms, run.last_ms)

    def figure(metric: str, name: str) -> Figure:
        pair = _statistic(theirs[metric][scored], name), _statistic(ours[metric][scored], name)
        is_judged = metric in JUDGED and not math.isnan(pair[0])  # no request of one token has a TPOT
        return Figure(*pair, _error_pct(*pair[::-1]), LIMITS_PCT.get(name) if is_judged else None)

    return {metric: {name: figure(metric, name) for name in STATISTICS} for metric in DEFINITIONS}


def _compare_clocks(measured: Measured, run: EngineRun, server: ServerRun) -> ServerComparison:
    """Compare the mean of each judged metric with the server's counts."""
    client, simulated = (
        metrics(measured, first, last)
        for first, last in ((measured.first_ms, measured.last_ms), (run.first_ms, run.last_ms))
    )
    of_scheduler = metrics(measured, run.first_ms, run.last_ms, run.seen_ms) if server.has_engine else simulated
    of_server, of_engine = server.server_ms(), server.engine_ms()
    found = {}
    for metric in JUDGED:
        counted = _counted(metric, measured, run)
        weight = None
        if server.names[metric] == "itl":  # a mean over tokens: each request has output - 1 of them
            weight = np.maximum(measured.requests.output_tokens - 1.0, 0.0)
        seen = np.where(counted, simulated[metric], np.nan)
        quantiles = {
            name: Bucket(*server.quantile_ms(metric, int(name[1:]) / 100), _statistic(seen, name))
            for name in STATISTICS[1:]
        }
        mean = finite_mean(np.where(counted, of_scheduler[metric], np.nan), weight)
        clients, engine = finite_mean(client[metric], weight), of_engine[metric]
        found[metric] = Clocks(clients, of_server[metric], engine, mean, _error_pct(mean, engine), quantiles)
    return ServerComparison(server.requests, server.counts, found, server.source)


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
