"""Simulate the window in which a running server was read, or the load of a recording of its `/metrics`.

A window's simulation starts from the first reading's running and waiting requests. A measured mean agrees if it is
within TOLERANCE of the range that LEVEL of the replications span. In a recording, arrivals are uniform within each of
its windows, lengths are drawn from the server's histograms, and earlier arrivals that explain the requests running at
the start follow from Little's law. See docs/theory/planning.md, "Watched servers".
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from latfit.errors import BadInput
from latfit.metrics import Interval, Reading, between, or_zero, tpot_ms
from latfit.simulation import EngineSettings, StepCosts, serve
from latfit.stats import FloatArray
from latfit.trace import WATCHED, Trace
from latfit.units import format_ms, number
from latfit.validation.compare import finite_mean
from latfit.validation.measured import Measured
from latfit.workload import make_requests

TOLERANCE = 0.25  # relative distance outside the simulated range that still agrees: a fit's error near capacity
LEVEL = 0.9  # share of the replications that the range spans
MIN_REPLICATIONS, MAX_REPLICATIONS, MAX_REQUESTS = 10, 40, 200_000  # MAX_REQUESTS: over all replications
COUNTS = ("running", "waiting")
LEAD_LATENCIES = 3.0  # mean latencies before the watch from which requests may still run at its start
MAX_EARLIER = 100_000


@dataclass(frozen=True)
class Check:
    """A mean of the window, measured and as a simulated range. slack: absolute distance that is ignored."""

    metric: str
    measured: float
    low: float
    high: float
    slack: float

    @property
    def agrees(self) -> bool:
        low, high = self.low * (1 - TOLERANCE) - self.slack, self.high * (1 + TOLERANCE) + self.slack
        return low <= self.measured <= high

    @property
    def sentence(self) -> str:
        """`queue 4.2 s (simulated 0 to 12 ms)`."""
        measured, *ends = (
            number(value, 3) if self.metric in COUNTS else format_ms(value)
            for value in (self.measured, self.low, self.high)
        )
        return f"{self.metric} {measured} (simulated {' to '.join(dict.fromkeys(ends))})"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "agrees": self.agrees}


def check_window(
    readings: Sequence[Reading],
    settings: EngineSettings,
    costs_of: Callable[[np.random.Generator], StepCosts],
    seed: int = 0,
) -> list[Check]:
    """Compare each mean that a server measured with simulations of the window; empty if lengths are unknown.

    costs_of: draws step costs at the speed of the window, within its error.
    """
    seen = between(readings[0], readings[-1])
    count = max(seen.arrived, 1.0) + or_zero(seen.first.running) + or_zero(seen.first.waiting)
    runs = int(np.clip(MAX_REQUESTS / count, MIN_REPLICATIONS, MAX_REPLICATIONS))
    draws = np.random.default_rng(seed).spawn(runs)
    simulated = [_simulate(readings, seen, settings, costs_of, rng) for rng in draws]
    step_ms = or_zero(seen.mean("itl")) or or_zero((seen.mean_step() or {}).get("T_ms", math.nan))
    found = []
    for name, value in _measured(readings, seen).items():
        values = np.array([means[name] for means in simulated if math.isfinite(means.get(name, math.nan))])
        if math.isfinite(value) and len(values):
            low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
            slack = 1.0 if name in COUNTS else 0.0 if name == "TPOT" else step_ms
            found.append(Check(name, value, float(low), float(high), slack))
    return found


def _publishes_engine_times(seen: Interval) -> bool:
    return math.isfinite(seen.mean("queue") + seen.mean("prefill"))


def _measured(readings: Sequence[Reading], seen: Interval) -> dict[str, float]:
    engines = seen.last.engines
    return {
        "running": float(np.mean([each.state.running for each in readings[1:]])) / engines,
        "waiting": float(np.mean([each.state.waiting for each in readings[1:]])) / engines,
        "TTFT": seen.mean("queue") + seen.mean("prefill") if _publishes_engine_times(seen) else seen.mean("ttft"),
        "queue": seen.mean("queue"),
        "TPOT": tpot_ms(seen),
    }


def _simulate(
    readings: Sequence[Reading],
    seen: Interval,
    settings: EngineSettings,
    costs_of: Callable[[np.random.Generator], StepCosts],
    rng: np.random.Generator,
) -> dict[str, float]:
    engines = seen.last.engines
    at_s = np.array([each.t_s - readings[0].t_s for each in readings])
    arrived = np.array([between(a, b).arrived / engines for a, b in pairwise(readings)])
    came_s = spread_arrivals(at_s, arrived, rng)
    running, waiting = (round(or_zero(n) / engines) for n in (seen.first.running, seen.first.waiting))
    early = running + waiting
    lengths = seen.lengths(early + len(came_s), rng)
    if lengths is None or not len(lengths[0]):
        return {}
    prompt, output = lengths
    if running:  # an output that runs at a moment is longer than most, and a random part of it is left
        pool = output[rng.choice(len(output), running, p=output / output.sum())]
        output[:running] = np.maximum(np.ceil(pool * rng.random(running)), 1)
        prompt[:running] = 1
    requests = make_requests(np.concatenate([np.zeros(early), 1e3 * came_s]), prompt, output)
    run = serve(requests, costs_of(rng), settings, int(rng.integers(2**31)))
    age_ms = np.zeros(len(requests))  # the time that requests had waited when the window began
    if early > settings.max_num_seqs:  # else the next step takes all
        queued_ms = 1e3 * waiting / max(seen.arrived / engines / seen.seconds, 1e-9)
        age_ms[:running] = queued_ms
        age_ms[running:early] = queued_ms * (1 - (np.arange(waiting) + 0.5) / max(waiting, 1))
    at_ms, arrival = 1e3 * at_s, requests.arrival_ms
    started, ended = run.first_ms <= at_ms[-1], run.last_ms <= at_ms[-1]
    started[:running] = False
    more = requests.output_tokens - 1
    several = ended & (more > 0)
    runs = (run.start_ms <= at_ms[:, None]) & (at_ms[:, None] < run.last_ms)
    waits = (arrival <= at_ms[:, None]) & (at_ms[:, None] < run.start_ms)
    of_tokens = math.isnan(seen.mean("tpot"))
    return {
        "running": float(runs[1:].sum(axis=1).mean()),
        "waiting": float(waits[1:].sum(axis=1).mean()),
        "TTFT": finite_mean(
            (run.first_ms - (run.seen_ms if _publishes_engine_times(seen) else arrival) + age_ms)[started]
        ),
        "queue": finite_mean((run.start_ms - run.seen_ms + age_ms)[ended]),
        "TPOT": finite_mean(run.tpot_ms[several], more[several] if of_tokens else None),
    }


def is_watched(provenance: Mapping[str, Any]) -> bool:
    """Return whether `latfit record` took the trace from a server as windows."""
    return provenance.get("source") == WATCHED and "texts_at_s" in provenance


def watched(trace: Trace, counted: Interval, source: str, seed: int = 0) -> Measured:
    """Reconstruct the load that a server counted from windows; token times are NaN. Raises BadInput."""
    begin_s, end_s = _texts_at(trace, source)
    seen = replace(counted, seconds=max(end_s - begin_s, 1e-3))
    rng = np.random.default_rng(seed)
    came_s = _arrivals(trace, seen, begin_s, rng)
    under_way = max(0.0, or_zero(seen.first.running) + or_zero(seen.first.waiting))
    latency_s = or_zero(seen.mean("latency")) / 1e3
    earlier = min(round(LEAD_LATENCIES * under_way), MAX_EARLIER) if latency_s > 0 else 0
    early_s = np.sort(-LEAD_LATENCIES * latency_s * rng.random(earlier))
    lengths = seen.lengths(earlier + len(came_s), rng)
    if lengths is None or not len(came_s):
        found = f"{seen.last.engine} does not publish how {'long' if len(came_s) else 'many'} requests are"
        raise BadInput(found, where=source, remedy="Measure with a load generator, and give its result.")
    led_s = -float(early_s[0]) if earlier else 0.0
    requests = make_requests(1e3 * (led_s + np.concatenate([early_s, came_s])), *lengths)
    nobody = np.full(len(requests), np.nan)
    span = (1e3 * led_s, 1e3 * (led_s + seen.seconds))
    return Measured(requests, nobody, nobody, source, watched_ms=span, engines=seen.last.engines)


def _texts_at(trace: Trace, source: str) -> tuple[float, float]:
    try:
        begin_s, end_s = (float(each) for each in trace.provenance["texts_at_s"])
        if end_s > begin_s and {"t_s", "window_ms", "arrived_requests"} <= trace.columns.keys():
            return begin_s, end_s
    except (KeyError, TypeError, ValueError):
        pass
    remedy = "Give a file of latfit record from an engine that counts its requests."
    raise BadInput("does not say when requests came", where=source, remedy=remedy)


def _arrivals(trace: Trace, seen: Interval, begin_s: float, rng: np.random.Generator) -> FloatArray:
    t_s, length_s = trace.floats("t_s") - begin_s, trace.floats("window_ms") / 1e3
    inside = (t_s > -1e-6) & (t_s + length_s <= seen.seconds * (1 + 1e-6)) & (length_s > 0)
    order = np.argsort(t_s[inside], kind="stable")
    start, end = (np.clip(each[inside][order], 0.0, seen.seconds) for each in (t_s, t_s + length_s))
    end = np.maximum.accumulate(end)
    told = np.maximum(np.nan_to_num(trace.floats("arrived_requests")[inside][order]), 0.0)
    edges = np.concatenate([[0.0], np.column_stack([start, end]).ravel(), [seen.seconds]])
    gaps = np.diff(edges)[::2].clip(0.0)
    rest = max(0.0, or_zero(seen.arrived) - float(told.sum()))
    counts = np.zeros(len(edges) - 1)
    counts[1::2] = told
    counts[::2] = rest * gaps / gaps.sum() if gaps.sum() > 0 else 0.0
    return spread_arrivals(edges, counts, rng)


def spread_arrivals(edges: FloatArray, counts: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Draw sorted arrival times of `counts` (k,) requests between `edges` (k + 1,)."""
    total = np.maximum.accumulate(np.concatenate([[0.0], np.cumsum(counts)]))  # counts never fall
    whole = np.diff(np.rint(total)).astype(np.int64)
    which = np.repeat(np.arange(len(whole)), whole)
    return np.sort(edges[which] + (edges[which + 1] - edges[which]) * rng.random(len(which)))
