"""Compare a measured serving run with its simulation: same arrivals, engine limits, and step costs from a fit.

TTFT, TPOT and latency count from a request's arrival and are taken over requests (`DEFINITIONS`). The verdict allows 2
% for means and 4 % for p90 and p99 (`LIMITS`). With the server's own counts it judges the means against the engine's
clock. Definitions and clocks: docs/theory/planning.md, "Validation".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.errors import BadInput
from latfit.messages import Message as LatfitWarning
from latfit.model import FitResult
from latfit.simulation import EngineRun, EngineSettings, Routing, StepCosts, serve_replicas
from latfit.stats import FloatArray
from latfit.units import number
from latfit.validation.calibrate import Calibration, calibrate
from latfit.validation.measured import Measured
from latfit.validation.server import ServerRun

CONTEXT = "context_tokens"
RARE = 1e-3
"""Largest share of steps that may exceed the measured B without a warning; no reported percentile depends on so few."""
FAR = 1.5
"""Multiple of the cache's tokens beyond which rows with more context bias a fit."""


def cautions_about(
    fit: FitResult, with_prefill: FitResult | None, run: EngineRun, settings: EngineSettings
) -> Sequence[LatfitWarning]:
    """Return warnings about what in the fits biases this simulation.

    Parameters
    ----------
    fit
        Of decode steps, and of all others unless `with_prefill` is given.
    with_prefill
        Of steps with prefill.
    """
    fits = [fit] if with_prefill is None else [fit, with_prefill]
    found = []
    if without := [each for each in fits if CONTEXT not in each.columns]:
        found.append(_no_context(without[0]))
    elif with_prefill is None:
        found.append(
            LatfitWarning(
                "one_fit",
                "One fit covers decode and prefill steps, whose cost per cached token differs",
                "Give the trace instead of the fit, or fit them separately and give the second as --prefill-fit.",
            )
        )
    if any(each.data.more.get("host_time") == "none" for each in fits):
        found.append(
            LatfitWarning(
                "no_host_time",
                "The steps are sums of kernels and hold no host time, so every figure is a lower bound",
                "Fit steps of a recorded engine, or add its host time with --calibrate.",
            )
        )
    if warning := no_prefill_warning(fits[-1]):
        found.append(warning)
    found += [_far(each, settings) for each in fits if _highest(each, CONTEXT) > FAR * settings.cache_tokens][:1]
    if warning := outside_warning(fits, run, settings):
        found.append(warning)
    return found


def outside_warning(fits: Sequence[FitResult], run: EngineRun, settings: EngineSettings) -> LatfitWarning | None:
    """Warn if the simulated steps exceed the range that the fits measured together; None if they do not.

    B counts up to its 1 - RARE quantile over steps. S is at least the longest prompt that is computed in one step.
    """
    prompt = int(run.requests.prompt_tokens.max(initial=0))
    at_least = run.batch_sizes[::-1].cumsum()[::-1]
    reached = {
        "B": int((at_least > RARE * run.batch_sizes.sum()).nonzero()[0].max(initial=0)),
        "S": min(prompt, settings.max_num_batched_tokens),
    }
    beyond = []
    for column, value in reached.items():
        measured = max(_highest(each, column) for each in fits)
        if 0 < measured < value:
            beyond.append(f"{column} = {value:,}, {number(value / measured, 3)}× above the measured {measured:,.0f}")
    if not beyond:
        return None
    return LatfitWarning(
        "outside_domain",
        f"Simulated steps lie outside the measured range: {'; '.join(beyond)}",
        "Measure such steps, or lower --max-num-seqs and --max-num-batched-tokens to what the engine had.",
    )


def no_prefill_warning(fit: FitResult) -> LatfitWarning | None:
    """Warn if the fit that costs steps with prefill has no data on them; else None."""
    if fit.knows_prefill:
        return None
    return LatfitWarning(
        "no_prefill",
        "The fit has no data on steps with prefill, so TTFT is a lower bound",
        "Fit steps with prefill too, or give a separate fit of them as --prefill-fit.",
    )


WIDEST = (0.99, 0.95, 0.9)
"""One-sided levels of single-step limits, in order of preference."""


def not_of_machine(fits: Sequence[FitResult], found: "Validation") -> str:
    """Explain in a sentence why a run cannot be of the fitted machine; empty if it can be.

    TPOT is the mean of a request's steps. If its median over requests lies outside the single-step limits of every
    phase, the step times differ, not the queue. A watched run has no such median.
    """
    if found.watched:
        return ""
    (tpot,) = (each for each in found.figures if each.metric == "tpot_ms" and each.statistic == "p50")
    ends = [limits for fit in fits for limits in _widest_limits(fit)]
    if not ends or not tpot.measured > 0 or not tpot.simulated > 0:
        return ""
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    ratio = tpot.measured / tpot.simulated
    if low <= ratio <= high:
        return ""
    factor = f"{max(ratio, 1 / ratio):.3g} times {'slower' if ratio > 1 else 'faster'}"
    return (
        f"This run is not of the fitted machine: {factor} per output token (median) than the fit's steps make, whose"
        f" own scatter is {low:.2g} to {high:.2g} times."
    )


def _widest_limits(fit: FitResult) -> list[tuple[float, float]]:
    """Return the (lower, upper) factors of single steps of every phase that has them."""
    found = []
    for phase in fit.limits.by_phase:
        known = [(fit.limits.lower_factor(phase, level), fit.limits.factor(phase, level)) for level in WIDEST]
        found += [(low, high) for low, high in known if low is not None and high is not None][:1]
    return found


def _highest(fit: FitResult, column: str) -> float:
    """Return the upper end of the measured range; 0 if unknown."""
    return float(fit.domain[column][1]) if column in fit.domain else 0.0


def _no_context(fit: FitResult) -> LatfitWarning:
    remedy = "Fit --model context or roofline to a trace with a context_tokens column."
    if CONTEXT in fit.domain:
        remedy = f"The trace has it, the model {fit.model} leaves it out; --model roofline takes it in."
    return LatfitWarning(
        "no_context", "Step costs do not depend on context length, which can dominate decode steps", remedy
    )


def _far(fit: FitResult, settings: EngineSettings) -> LatfitWarning:
    return LatfitWarning(
        "far_rows",
        f"The fit includes rows of up to {_highest(fit, CONTEXT):,.0f} cached tokens, beyond the cache's"
        f" {settings.cache_tokens:,}: rows that the engine never reaches bias it",
        f"Fit with --where 'context_tokens <= {settings.cache_tokens}'.",
    )


DEFINITIONS: Mapping[str, str] = {
    "ttft_ms": "arrival to first token",
    "tpot_ms": "(last - first token) / (output - 1), without the first token",
    "tpot_with_first_ms": "latency / output, the first token included",
    "latency_ms": "arrival to last token",
}
STATISTICS = ("mean", "p50", "p90", "p99")
LIMITS: Mapping[str, float] = {"mean": 2.0, "p90": 4.0, "p99": 4.0}
"""Tolerance of each statistic in percent; the median is reported, not judged."""

NAMES: Mapping[str, str] = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "latency_ms": "latency"}
JUDGED = ("ttft_ms", "tpot_ms", "latency_ms")


def error_pct(simulated: float, measured: float) -> float:
    return 100.0 * (simulated / measured - 1.0) if measured > 0 else math.nan


@dataclass(frozen=True)
class Figure:
    """One statistic of one metric, ms."""

    metric: str
    statistic: str
    measured: float
    simulated: float

    @property
    def error_pct(self) -> float:
        return error_pct(self.simulated, self.measured)

    @property
    def limit_pct(self) -> float | None:
        """Tolerance in percent; None if the figure is not judged."""
        return LIMITS.get(self.statistic) if self.metric in JUDGED else None

    @property
    def holds(self) -> bool:
        return self.limit_pct is None or abs(self.error_pct) <= self.limit_pct


@dataclass(frozen=True)
class Clocks(Figure):
    """Mean of one metric in ms on the clocks of client, server and engine (`measured`), and simulated on the engine's.

    quantiles: {name: (edges of the server's histogram bucket, simulated on the server's clock)}.
    """

    client: float
    server: float
    quantiles: Mapping[str, tuple[tuple[float, float], float]]

    def to_json(self) -> dict[str, Any]:
        means = {"client": self.client, "server": self.server, "engine": self.measured, "simulated": self.simulated}
        buckets = {
            name: {"above": low, "up_to": high, "simulated": simulated}
            for name, ((low, high), simulated) in self.quantiles.items()
        }
        return {**means, "error_pct": self.error_pct, "quantiles": buckets}


@dataclass(frozen=True, eq=False, repr=False)
class Validation:
    """The comparison.

    Attributes
    ----------
    scored
        Requests (n,) that are compared: all, or those after the calibration third.
    server, clocks
        The server's counts, and each judged metric against them, if given.
    """

    measured: Measured
    run: EngineRun
    settings: EngineSettings
    figures: Sequence[Figure]
    scored: NDArray[np.bool_]
    constants: Calibration | None
    server: ServerRun | None = None
    clocks: Sequence[Clocks] = ()

    def __repr__(self) -> str:
        return f"Validation({self.verdict})"

    @property
    def watched(self) -> bool:
        """Whether only the server's counts are known and no single request."""
        return self.measured.watched_ms is not None

    @property
    def judged(self) -> Sequence[Figure]:
        """The figures with a tolerance: means against the server's engine if it is known, else against the client."""
        return self.clocks or [each for each in self.figures if each.limit_pct is not None]

    @property
    def agrees(self) -> bool:
        return all(each.holds for each in self.judged)

    @property
    def mean_errors(self) -> dict[str, float]:
        """Errors of the judged means in percent, by metric."""
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
            row = {"measured": each.measured, "simulated": each.simulated, "error_pct": each.error_pct}
            table.setdefault(each.metric, {})[each.statistic] = row | {"limit_pct": each.limit_pct}
        constants = self.constants
        return {
            "schema": "latfit.validation/1",
            "agrees": self.agrees,
            "verdict": self.verdict,
            "requests": len(self.measured),
            "scored": int(self.scored.sum()),
            "metrics": table,
            "definitions": dict(DEFINITIONS),
            "calibration": None if constants is None else asdict(constants) | {"requests": int((~self.scored).sum())},
            "server": None
            if self.server is None
            else {
                "requests": self.server.requests,
                "counts": dict(self.server.counts),
                "metrics": {each.metric: each.to_json() for each in self.clocks},
                "source": self.server.source,
            },
            "engine": {
                "steps": self.run.counters.steps,
                "preemptions": self.run.counters.preemptions,
                "utilisation": self.run.busy_ms / self.run.makespan_ms / len(self.run.timelines),
                "kv_blocks": self.settings.kv_blocks,
                "max_num_seqs": self.settings.max_num_seqs,
                "max_num_batched_tokens": self.settings.max_num_batched_tokens,
            },
            "source": self.measured.source,
        }


@dataclass(frozen=True)
class Asked:
    """Options of a validation.

    Attributes
    ----------
    calibration
        Calibrate on the first third of the requests and score the rest.
    routing
        Among equal engines.
    server
        The server's counts of the run.
    """

    calibration: bool = False
    seed: int = 0
    routing: Routing = field(default_factory=Routing)
    server: ServerRun | None = None


def validate(
    measured: Measured,
    costs: StepCosts,
    settings: EngineSettings,
    how: Asked = Asked(),
) -> Validation:
    """Simulate the measured arrivals and compare.

    Raises
    ------
    BadInput
        If a request exceeds the KV cache, or too few requests remain to calibrate.
    """
    scored = np.ones(len(measured), dtype=bool)
    constants = None
    if how.calibration:
        if len(measured) < FEWEST:
            raise BadInput(
                f"{len(measured)} requests are too few to calibrate with and to score",
                where=measured.source,
                remedy=f"Give {FEWEST} or more, or leave out --calibrate.",
            )
        scored = np.arange(len(measured)) >= len(measured) // 3
        constants = calibrate(measured, costs, settings, ~scored, how.seed, how.routing)
        costs = constants.costs(costs)
    run = serve_replicas(measured.requests, costs, settings, how.routing, how.seed)
    if constants is not None:
        run = constants.delay(run)
    clocks = [] if how.server is None else _clocks(measured, run, how.server)
    figures = [] if measured.watched_ms is not None else _figures(measured, run, scored)
    return Validation(measured, run, settings, figures, scored, constants, how.server, clocks)


def _clocks(measured: Measured, run: EngineRun, server: ServerRun) -> list[Clocks]:
    client, simulated = (
        metrics(measured, first, last)
        for first, last in ((measured.first_ms, measured.last_ms), (run.first_ms, run.last_ms))
    )
    of_scheduler = metrics(measured, run.first_ms, run.last_ms, run.seen_ms) if server.has_engine else simulated
    counted = _counted(measured, run)
    simulated, of_scheduler = (
        {name: np.where(counted[name], values, np.nan) for name, values in each.items()}
        for each in (simulated, of_scheduler)
    )
    of_server, of_engine = server.server_ms(), server.engine_ms()
    weight = np.ones(len(measured))
    if server.of_tokens:  # a mean over tokens, of which each request has as many as it generates after the first
        weight = np.maximum(measured.requests.output_tokens - 1.0, 0.0)
    return [
        Clocks(
            metric,
            "mean",
            of_engine[metric],
            _mean(of_scheduler[metric], weight if metric == "tpot_ms" else None),
            _mean(client[metric], weight if metric == "tpot_ms" else None),
            of_server[metric],
            {
                name: (server.quantile_ms(metric, int(name[1:]) / 100), _statistic(simulated[metric], name))
                for name in STATISTICS[1:]
            },
        )
        for metric in JUDGED
    ]


def _counted(measured: Measured, run: EngineRun) -> dict[str, NDArray[np.bool_]]:
    """Return the requests (n,) whose metrics a server counts.

    In a watched run these arrived and ended within it: TTFT by the first token, all else by the last.
    """
    if measured.watched_ms is None:
        return dict.fromkeys(DEFINITIONS, np.ones(len(measured), dtype=bool))
    begin_ms, end_ms = measured.watched_ms
    came = measured.requests.arrival_ms >= begin_ms
    ended = dict.fromkeys(DEFINITIONS, came & (run.last_ms <= end_ms))
    return {**ended, "ttft_ms": came & (run.first_ms <= end_ms)}


def _mean(values: FloatArray, weight: FloatArray | None) -> float:
    known = np.isfinite(values)
    if not known.any() or (weight is not None and not weight[known].sum() > 0):
        return math.nan
    return float(np.average(values[known], weights=None if weight is None else weight[known]))


FEWEST = 30


def _figures(measured: Measured, run: EngineRun, scored: NDArray[np.bool_]) -> list[Figure]:
    theirs = metrics(measured, measured.first_ms, measured.last_ms)
    ours = metrics(measured, run.first_ms, run.last_ms)
    return [
        Figure(metric, name, _statistic(theirs[metric][scored], name), _statistic(ours[metric][scored], name))
        for metric in DEFINITIONS
        for name in STATISTICS
    ]


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


def _statistic(values: FloatArray, name: str) -> float:
    values = values[np.isfinite(values)]
    if not len(values):
        return math.nan
    return float(values.mean()) if name == "mean" else float(np.quantile(values, int(name[1:]) / 100))
