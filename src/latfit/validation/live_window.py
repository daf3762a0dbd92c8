"""Simulate the window in which a running server was read, and compare with what the server measured.

The simulation starts from the first reading's running and waiting requests. A measured mean agrees if it is within
TOLERANCE of the range that LEVEL of the replications span. See docs/theory/planning.md, "Watched servers".
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from latfit.metrics import Interval, Reading, between
from latfit.simulation import EngineSettings, StepCosts, serve
from latfit.units import format_ms, number
from latfit.validation.compare import finite_mean
from latfit.validation.watch import finite_or_zero, spread_arrivals
from latfit.workload import make_requests

TOLERANCE = 0.25  # relative distance outside the simulated range that still agrees: a fit's error near capacity
LEVEL = 0.9  # share of the replications that the range spans
MIN_REPLICATIONS, MAX_REPLICATIONS, MAX_REQUESTS = 10, 40, 200_000  # MAX_REQUESTS: over all replications
COUNTS = ("running", "waiting")


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
    count = max(seen.arrived, 1.0) + finite_or_zero(seen.first.running) + finite_or_zero(seen.first.waiting)
    runs = int(np.clip(MAX_REQUESTS / count, MIN_REPLICATIONS, MAX_REPLICATIONS))
    draws = np.random.default_rng(seed).spawn(runs)
    simulated = [_simulate(readings, seen, settings, costs_of, rng) for rng in draws]
    step_ms = finite_or_zero(seen.mean("itl")) or finite_or_zero((seen.mean_step() or {}).get("T_ms", math.nan))
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
    tpot, engines = seen.mean("tpot"), seen.last.engines
    return {
        "running": float(np.mean([each.state.running for each in readings[1:]])) / engines,
        "waiting": float(np.mean([each.state.waiting for each in readings[1:]])) / engines,
        "TTFT": seen.mean("queue") + seen.mean("prefill") if _publishes_engine_times(seen) else seen.mean("ttft"),
        "queue": seen.mean("queue"),
        "TPOT": seen.mean("itl") if math.isnan(tpot) else tpot,
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
    running, waiting = (round(finite_or_zero(n) / engines) for n in (seen.first.running, seen.first.waiting))
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
