"""Schedules of engines: none is cheaper of all there are, engines are there when they are needed, and a number that
does not change is the fixed one."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from latfit.planning.serving.evaluate import VERIFIED, Evaluator, Setup
from latfit.planning.serving.result import SchedulePlan
from latfit.planning.serving.schedule import Day, day_of, schedule_engines
from latfit.planning.serving.targets import RequestTarget, Targets
from latfit.simulation import EngineSettings, linear_costs
from latfit.simulation.engine.replicas import Routing, serve_replicas
from latfit.workload import RecordedLoad, make_requests

COSTS = linear_costs(100.0, 0.0, 0.0)
ALONE = EngineSettings(kv_blocks=500, max_num_seqs=1, asynchronous=False, padded_graphs=False)
"""A queue of 100 ms a token."""

LIMIT_MS, START_UP_MS, WINDOW_MS = 1_500.0, 4_000.0, 20_000.0
TARGETS = Targets((RequestTarget("latency", LIMIT_MS),))


def day(seed: int, rates: tuple[float, ...]) -> Day:
    """Requests of one to four tokens at some rates a second, a window each."""
    rng = np.random.default_rng(seed)
    arrivals = np.concatenate(
        [[0.0], *(WINDOW_MS * k + np.sort(rng.uniform(1, WINDOW_MS, int(20 * each))) for k, each in enumerate(rates))]
    )
    arrivals = np.append(arrivals, WINDOW_MS * len(rates))
    load = RecordedLoad(make_requests(arrivals, 1, rng.integers(1, 5, len(arrivals))))
    return day_of(load, WINDOW_MS, START_UP_MS)


def planned(of: Day, most: int) -> SchedulePlan:
    evaluator = Evaluator(of.load, COSTS, TARGETS)
    evaluator.alone_ms = 250.0
    evaluator.requests = len(of.load.requests)
    return schedule_engines(evaluator, evaluator.measure(Setup(ALONE, most), replications=VERIFIED), of, 3.6)


def hours_if_kept(of: Day, counts: tuple[int, ...], most: int) -> float:
    """Replica-hours of a schedule, infinite where it misses the limit over all or in a window that could have more."""
    asked = of.asked(counts)
    routing = Routing(asked.replicas[0], scaling=asked, start_up_ms=START_UP_MS)
    run = serve_replicas(of.load.requests, COSTS, ALONE, routing)
    if np.quantile(run.latency_ms, 0.99) > LIMIT_MS:
        return np.inf
    for k, count in enumerate(counts):
        rows = slice(of.rows[k], of.rows[k + 1])
        if count < most and np.quantile(run.latency_ms[rows], 0.99) > LIMIT_MS:
            return np.inf
    return run.replica_ms / 3.6e6


@pytest.mark.parametrize("seed", range(6))
def test_no_schedule_is_cheaper(seed: int) -> None:
    """Of all ways to give three windows one to three engines each."""
    rates = tuple(np.random.default_rng(seed).choice([2.0, 4.0, 7.0], 3).tolist())
    of = day(seed, rates)
    every = {counts: hours_if_kept(of, counts, 3) for counts in itertools.product((1, 2, 3), repeat=3)}
    found = planned(of, 3)
    counts = tuple(each.replicas for each in found.windows)
    assert found.feasible
    assert found.replica_hours == pytest.approx(every[counts])
    assert found.replica_hours == pytest.approx(min(every.values()))


def test_engines_are_asked_for_ahead_of_need() -> None:
    """Three windows of 20 s, engines that take 4 s: two are needed from 20 s on, so asked for at 16 s."""
    of = day(0, (2.0, 7.0, 2.0))
    assert of.asked((1, 2, 1)).steps_s == [(0.0, 1), (16.0, 2), (40.0, 1)]
    assert of.asked((2, 2, 2)).steps_s == [(0.0, 2)]
    assert of.asked((3, 1, 2)).steps_s == [(0.0, 3), (20.0, 1), (36.0, 2)]
    slow = replace(of, start_up_ms=30_000.0)
    assert slow.asked((1, 2, 4)).steps_s == [(0.0, 2), (10.0, 4)]
    # The first request of all may come later than the start-up time: nobody waits for the first window.
    late = replace(of, edges=of.edges + 5_000.0)
    assert late.asked((1, 2, 1)).steps_s == [(0.0, 1), (21.0, 2), (45.0, 1)]


def test_the_windows_hold_every_request_once_and_the_price_is_that_of_the_hours() -> None:
    of = day(2, (2.0, 7.0, 4.0))
    assert (of.rows[0], of.rows[-1]) == (0, len(of.load.requests))
    part, lead = of.part(1, 3_000.0)
    arrival = of.load.requests.arrival_ms
    early = int(((arrival >= 17_000.0) & (arrival < 20_000.0)).sum())
    assert len(part.requests) == early + of.rows[2] - of.rows[1]
    assert int(lead * len(part.requests)) == early
    found = planned(of, 3)
    tokens = int(of.load.requests.output_tokens.sum())
    assert found.price_per_million_tokens == pytest.approx(1e6 * 3.6 * found.replica_hours / tokens)
    assert found.saved > 0
