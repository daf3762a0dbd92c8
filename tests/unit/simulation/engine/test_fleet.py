"""Replicas that come and go: a story worked out by hand, a slow rule beside the compiled one, and what must be equal to
something simpler."""

import math
from dataclasses import replace

import numpy as np
import pytest

import latfit
from latfit.errors import WrongUsage
from latfit.simulation.engine.replicas import (
    METRICS,
    ROUTES,
    TOLERANCE,
    Autoscaler,
    Routing,
    Schedule,
    parse_autoscaler,
    serve_replicas,
)
from latfit.simulation.engine.run import EngineRun
from latfit.simulation.engine.settings import EngineSettings
from latfit.simulation.engine.step_cost import linear_costs
from latfit.workload.requests import Requests, make_requests

COSTS = linear_costs(5.0, 0.1, 0.02)
LIMITS = EngineSettings(kv_blocks=500, max_num_seqs=16, max_num_batched_tokens=256)
ALONE = EngineSettings(kv_blocks=500, max_num_seqs=1, asynchronous=False, padded_graphs=False)
"""One request at a time, so that a replica is a queue of which everything can be said by hand."""


def some(n: int = 400, span_ms: float = 20_000.0) -> Requests:
    rng = np.random.default_rng(4)
    lengths = rng.integers(1, 200, n), rng.integers(1, 80, n)
    return make_requests(np.sort(rng.uniform(0, span_ms, n)), *lengths)


@pytest.mark.parametrize("route", ROUTES)
def test_a_schedule_that_changes_nothing_is_a_fixed_number(route: str) -> None:
    """To the last digit, time that is paid included."""
    requests = some()
    fixed = serve_replicas(requests, COSTS, LIMITS, Routing(3, route))
    same = Schedule((0.0, 4_000.0, 9_000.0), (3, 3, 3))
    scheduled = serve_replicas(requests, COSTS, LIMITS, Routing(3, route, scaling=same, start_up_ms=500.0))
    for name in ("start_ms", "first_ms", "last_ms", "replica"):
        np.testing.assert_array_equal(getattr(fixed, name), getattr(scheduled, name))
    assert fixed.counters == scheduled.counters
    assert fixed.replica_ms == scheduled.replica_ms == 3 * fixed.makespan_ms


def served_at(requests: Requests, schedule: Schedule, start_up_ms: float) -> EngineRun:
    routing = Routing(schedule.replicas[0], scaling=schedule, start_up_ms=start_up_ms)
    return serve_replicas(requests, linear_costs(100.0, 0.0, 0.0), ALONE, routing)


def test_a_story_of_four_replicas() -> None:
    """Steps of 100 ms, requests of one step each, one at a time in a replica, one every 60 ms from 0 on.

    One replica until 200: requests at 0, 60, 120, 180 end at 100, 200, 300, 400. Two are asked for at 150 and the
    second serves from 200 on: it takes those at 240 (340) and then every second one. At 410 one is asked for: the
    second has taken those at 240 and 360 (ends 460), is routed to no more, and is gone at 460. Two again from 500
    (asked) and 550 on, in the same place. The first one has waiting ones from the start.
    """
    requests = make_requests([60.0 * i for i in range(11)], 1, 1)
    schedule = Schedule((0.0, 150.0, 410.0, 500.0), (1, 2, 1, 2))
    run = served_at(requests, schedule, 50.0)
    assert run.replica.tolist() == [0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1]
    ends = [100, 200, 300, 400, 340, 500, 460, 600, 700, 800, 700]
    assert run.last_ms.tolist() == pytest.approx(ends)
    assert run.scaled is not None
    assert run.scaled.T.tolist() == [[0, 1, 1], [150, 1, 2], [200, 2, 2], [410, 1, 1], [500, 1, 2], [550, 2, 2]]
    # The first from 0 to the end at 800; the second from 150 to 460, and from 500 to the end.
    assert run.replica_ms == pytest.approx(800 + (460 - 150) + (800 - 500))


def rule_by_hand(run: EngineRun, rule: Autoscaler, start_up_ms: float) -> list[tuple[float, int]]:
    """(moment, asked for) as Kubernetes' documentation tells it, from what a run's requests did: those that have come
    and have not ended, at replicas that are routed to. For replicas that are never sent away, so that all count."""
    asked, recent, found, ready = rule.least, [], [(0.0, rule.least)], [0.0] * rule.least
    moment = rule.every_ms
    arrivals = run.requests.arrival_ms
    while moment <= arrivals[-1]:
        serving = [k for k, at in enumerate(ready) if at <= moment]
        inside = (arrivals < moment) & (run.last_ms > moment) & np.isin(run.replica, serving)
        total = float(inside.sum())
        wanted = math.ceil(total / rule.target) if abs(total / rule.target / asked - 1) > TOLERANCE else asked
        recent.append(min(max(wanted, rule.least), rule.most))
        window = recent[-1 - int(rule.cool_down_ms / rule.every_ms) :]
        now = recent[-1] if recent[-1] >= asked else min(max(window), asked)
        ready += [moment + start_up_ms] * (now - asked)
        if now != asked:
            found.append((moment, now))
        asked = now
        moment += rule.every_ms
    return found


@pytest.mark.parametrize("target", [2.0, 5.0, 11.0])
def test_the_rule_is_that_of_the_documentation(target: float) -> None:
    """One request at a time and no draft: whatever has come and not ended waits or runs. The window outlasts the run,
    so none is sent away."""
    rng = np.random.default_rng(3)
    requests = make_requests(np.cumsum(rng.exponential(40.0, 600)), 1, rng.integers(1, 6, 600))
    rule = Autoscaler("requests", target, most=6, every_ms=333.0, cool_down_ms=1e9)
    routing = Routing(1, "least-loaded", scaling=rule, start_up_ms=500.0)
    run = serve_replicas(requests, linear_costs(30.0, 0.0, 0.0), ALONE, routing)
    assert run.scaled is not None
    asked = [(t, int(m)) for t, _, m in run.scaled.T]
    changes = [each for before, each in zip([(0.0, 0), *asked], asked, strict=False) if before[1] != each[1]]
    assert changes == rule_by_hand(run, rule, 500.0)
    assert len(changes) > 2


@pytest.mark.parametrize("metric", METRICS)
def test_a_rule_follows_the_load(metric: str) -> None:
    """Twenty times the requests in the middle: more replicas then than before, fewer again at the end, and nothing is
    lost."""
    rng = np.random.default_rng(5)
    gaps = np.concatenate([rng.exponential(mean, n) for mean, n in ((400.0, 100), (20.0, 2_000), (400.0, 300))])
    requests = make_requests(np.cumsum(gaps), rng.integers(50, 200, 2_400), rng.integers(10, 60, 2_400))
    target = {"requests": 6.0, "waiting": 1.0, "kv": 0.2}[metric]
    rule = Autoscaler(metric, target, most=8, every_ms=500.0, cool_down_ms=5_000.0)
    routing = Routing(1, "least-loaded", scaling=rule, start_up_ms=1_000.0)
    run = serve_replicas(requests, COSTS, LIMITS, routing)
    assert run.scaled is not None
    moments, serving, _ = run.scaled
    assert serving.max() > 2
    assert serving[-1] <= 2
    assert run.counters.generated_tokens == int(requests.output_tokens.sum())
    assert run.counters.free_blocks == len(run.timelines) * (LIMITS.kv_blocks - LIMITS.null_blocks)
    # What is paid is at least the time that they were routed to, and at most every place all the time.
    until = np.append(moments[1:], run.last_ms.max())
    assert float(serving @ (until - moments)) <= run.replica_ms <= 8 * run.makespan_ms


def test_what_is_no_schedule_and_no_rule() -> None:
    with pytest.raises(WrongUsage, match="do not rise"):
        Schedule((0.0, 5.0, 5.0), (1, 2, 3))
    with pytest.raises(WrongUsage, match="without any replica"):
        Schedule((0.0, 5.0), (1, 0))
    for text in (
        "requests",
        "requests:0:1..8",
        "steps:20:1..8",
        "requests:20:8..1",
        "kv:70%:1..8:0s",
        "kv:70:1..8",
        "requests:20%:1..8",
    ):
        with pytest.raises(WrongUsage):
            parse_autoscaler(text)
    assert parse_autoscaler("kv:70%:2..8:30s:2min") == Autoscaler("kv", 0.7, 8, 2, 30_000.0, 120_000.0)
    with pytest.raises(WrongUsage, match="at the start"):
        Routing(9, scaling=parse_autoscaler("requests:20:1..8"))


def test_the_library_takes_pairs_and_says_what_was_there() -> None:
    fit = latfit.fit("sample_traces/cpu_openvino_bf16_smollm2-135m.parquet", model="linear")
    at = [(0, 1), (20, 3), (40, 1)]
    found = latfit.simulate_engine(
        fit, "4/s", "100:20", kv_blocks=2000, requests=200, replications=2, replicas_at=at, start_up="5s"
    )
    run = found.to_json()["runs"][0]
    assert [each["serving"] for each in run["replicas_over_time"]][:3] == [1, 1, 3]
    assert [*map(list, run["settings"]["replicas_at"])] == [[0.0, 1], [20.0, 3], [40.0, 1]]
    fixed = latfit.simulate_engine(fit, "4/s", "100:20", kv_blocks=2000, requests=200, replications=2, replicas=3)
    assert run["replica_hours"] < fixed.to_json()["runs"][0]["replica_hours"]
    with pytest.raises(WrongUsage, match="start_up"):
        latfit.simulate_engine(fit, "4/s", "100:20", kv_blocks=2000, autoscale="requests:20:1..8")


def test_static_batches_keep_their_number() -> None:
    schedule = Schedule((0.0, 100.0), (1, 2))
    with pytest.raises(WrongUsage, match="in turn"):
        serve_replicas(some(), COSTS, replace(LIMITS, batching="static"), Routing(1, scaling=schedule))
