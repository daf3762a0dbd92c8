"""Simulate the window in which a running server was read, and compare with what the server measured.

The simulation starts from the first reading's running and waiting requests and takes the readings' arrivals. A measured
mean agrees if it lies within TOLERANCE of the range that LEVEL of the replications span. Details:
docs/theory/planning.md, "Watched servers".
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from latfit.metrics import Interval, Reading, between
from latfit.simulation import EngineRun, EngineSettings, StepCosts, serve
from latfit.stats import FloatArray
from latfit.units import format_ms, number
from latfit.validation.watch import spread_arrivals
from latfit.workload import Requests, make_requests

TOLERANCE = 0.25
"""Relative distance outside the simulated range that still agrees: about a fit's error near capacity."""
LEVEL = 0.9
"""Share of the replications that the range spans."""
MIN_REPLICATIONS, MAX_REPLICATIONS, REQUESTS_IN_ALL = 10, 40, 200_000
"""Limits on replications, and on simulated requests over all replications."""


@dataclass(frozen=True)
class Check:
    """A mean of the window, measured and as a simulated range. slack: absolute distance that is ignored, a step or a
    request.
    """

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
        show: Callable[[float], str] = format_ms if self.metric in TIMES else lambda value: number(value, 3)
        ends = [show(self.low), show(self.high)]
        simulated = ends[0] if ends[0] == ends[1] else " to ".join(ends)
        return f"{self.metric} {show(self.measured)} (simulated {simulated})"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "agrees": self.agrees}


COUNTS = ("running", "waiting")
TIMES = ("TTFT", "queue", "TPOT")


def check_window(
    readings: Sequence[Reading],
    settings: EngineSettings,
    costs_of: Callable[[np.random.Generator], StepCosts],
    seed: int = 0,
) -> list[Check]:
    """Compare what a server measured between its readings with simulations of the same window.

    Parameters
    ----------
    settings
        Of one engine; each of several engines has them.
    costs_of
        Draws step costs at the speed of the window, within its error.

    Returns
    -------
    list of Check
        One for each metric that both have: running, waiting, TTFT, queue, TPOT. Empty if request lengths are unknown.
    """
    seen = between(readings[0], readings[-1])
    measured = _measured(readings, seen)
    count = max(seen.arrived, 1.0) + _known(seen.first.running) + _known(seen.first.waiting)
    runs = int(np.clip(REQUESTS_IN_ALL / count, MIN_REPLICATIONS, MAX_REPLICATIONS))
    simulated: dict[str, list[float]] = {}
    for stream in np.random.default_rng(seed).spawn(runs):
        for name, value in _simulated(readings, seen, settings, costs_of, stream).items():
            simulated.setdefault(name, []).append(value)
    step_ms = _known(seen.mean("itl")) or _known((seen.mean_step() or {}).get("T_ms", math.nan))
    found = []
    for name, value in measured.items():
        values = np.array(simulated.get(name, []))
        values = values[np.isfinite(values)]
        if math.isfinite(value) and len(values):
            low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
            slack = 1.0 if name in COUNTS else 0.0 if name == "TPOT" else step_ms
            found.append(Check(name, value, float(low), float(high), slack))
    return found


def _measured(readings: Sequence[Reading], seen: Interval) -> dict[str, float]:
    """Return the means that the server published, by metric; NaN if not published."""
    engines = seen.last.engines
    tpot = seen.mean("tpot")
    return {
        "running": float(np.mean([each.state.running for each in readings[1:]])) / engines,
        "waiting": float(np.mean([each.state.waiting for each in readings[1:]])) / engines,
        "TTFT": seen.mean("queue") + seen.mean("prefill") if _of_engine(seen) else seen.mean("ttft"),
        "queue": seen.mean("queue"),
        "TPOT": seen.mean("itl") if math.isnan(tpot) else tpot,
    }


def _of_engine(seen: Interval) -> bool:
    """Whether the server publishes the engine's own times, without tokenising and HTTP."""
    return math.isfinite(seen.mean("queue") + seen.mean("prefill"))


def _simulated(
    readings: Sequence[Reading],
    seen: Interval,
    settings: EngineSettings,
    costs_of: Callable[[np.random.Generator], StepCosts],
    rng: np.random.Generator,
) -> dict[str, float]:
    """Return the means of one simulation of the window; empty if the load is unknown."""
    edges = np.array([each.t_s - readings[0].t_s for each in readings])
    counts = [between(a, b).arrived / seen.last.engines for a, b in pairwise(readings)]
    came_s = spread_arrivals(edges, np.array(counts), rng)
    running, waiting = (round(_known(n) / seen.last.engines) for n in (seen.first.running, seen.first.waiting))
    lengths = seen.lengths(running + waiting + len(came_s), rng)
    if lengths is None or not len(lengths[0]):
        return {}
    prompt, output = lengths
    if running:  # an output that runs at a moment is longer than most, and a random part of it is left
        pool = output[rng.choice(len(output), running, p=output / output.sum())]
        output[:running] = np.maximum(np.ceil(pool * rng.random(running)), 1)
        prompt[:running] = 1
    arrival_ms = np.concatenate([np.zeros(running + waiting), 1e3 * came_s])
    requests = make_requests(arrival_ms, prompt, output)
    run = serve(requests, costs_of(rng), settings, int(rng.integers(2**31)))
    queued_ms = 1e3 * waiting / max(seen.arrived / seen.last.engines / seen.seconds, 1e-9)
    if running + waiting <= settings.max_num_seqs:  # no queue: the next step takes them
        queued_ms = 0.0
    age_ms = np.zeros(len(requests))
    age_ms[:running] = queued_ms
    age_ms[running : running + waiting] = queued_ms * (1 - (np.arange(waiting) + 0.5) / max(waiting, 1))
    return _means(run, requests, age_ms, running, (1e3 * edges, _of_engine(seen), math.isnan(seen.mean("tpot"))))


def _means(
    run: EngineRun,
    requests: Requests,
    age_ms: FloatArray,
    running: int,
    window: tuple[FloatArray, bool, bool],
) -> dict[str, float]:
    """Return what a server would publish of a simulated window.

    Parameters
    ----------
    age_ms
        Time (n,) that requests had waited at its start.
    running
        How many requests, from the first on, ran by then.
    window
        Moments of the readings; whether times are the engine's own; whether TPOT is a mean over tokens.
    """
    at_ms, of_engine, of_tokens = window
    arrival, end = requests.arrival_ms, at_ms[-1]
    since = run.seen_ms if of_engine else arrival
    started, ended = run.first_ms <= end, run.last_ms <= end
    started[:running] = False
    more = requests.output_tokens - 1
    several = ended & (more > 0)
    runs = (run.start_ms <= at_ms[:, None]) & (at_ms[:, None] < run.last_ms)
    waits = (arrival <= at_ms[:, None]) & (at_ms[:, None] < run.start_ms)
    return {
        "running": float(runs[1:].sum(axis=1).mean()),
        "waiting": float(waits[1:].sum(axis=1).mean()),
        "TTFT": _mean((run.first_ms - since + age_ms)[started]),
        "queue": _mean((run.start_ms - run.seen_ms + age_ms)[ended]),
        "TPOT": _mean(run.tpot_ms[several], more[several] if of_tokens else None),
    }


def _mean(values: FloatArray, weight: Any = None) -> float:
    return float(np.average(values, weights=weight)) if len(values) else math.nan


def _known(value: float) -> float:
    return value if math.isfinite(value) else 0.0
