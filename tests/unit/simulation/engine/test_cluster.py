"""Replicas and prefill apart: what must be equal to something simpler, and who goes where."""

from dataclasses import replace

import numpy as np
import pytest

from latfit.errors import WrongUsage
from latfit.simulation.engine.replicas import ROUTES, Routing, Transfer, serve_apart, serve_replicas
from latfit.simulation.engine.run import serve
from latfit.simulation.engine.settings import EngineSettings
from latfit.simulation.engine.step_cost import linear_costs
from latfit.workload.requests import Requests, make_requests

COSTS = linear_costs(5.0, 0.1, 0.02)
LIMITS = EngineSettings(kv_blocks=500, max_num_seqs=16, max_num_batched_tokens=256)


def some(n: int = 200, span_ms: float = 20_000.0, users: int = 1) -> Requests:
    rng = np.random.default_rng(4)
    lengths = rng.integers(1, 200, n), rng.integers(1, 80, n)
    return make_requests(np.sort(rng.uniform(0, span_ms, n)), *lengths, user_id=rng.integers(0, users, n))


def test_round_robin_is_every_second_request_alone() -> None:
    requests = some()
    routed = serve_replicas(requests, COSTS, LIMITS, Routing(2))
    for which in (0, 1):
        rows = slice(which, None, 2)
        alone = serve(requests.select(rows), COSTS, LIMITS)
        np.testing.assert_array_equal(routed.last_ms[rows], alone.last_ms)
        np.testing.assert_array_equal(routed.first_ms[rows], alone.first_ms)


@pytest.mark.parametrize("route", ROUTES)
def test_nothing_is_lost_between_replicas(route: str) -> None:
    requests = some(users=7)
    run = serve_replicas(requests, COSTS, LIMITS, Routing(3, route))
    assert np.all(run.last_ms >= run.first_ms)
    assert run.counters.generated_tokens == int(requests.output_tokens.sum())
    assert run.counters.free_blocks == 3 * (LIMITS.kv_blocks - LIMITS.null_blocks)
    assert set(run.replica.tolist()) == {0, 1, 2}


def test_the_least_loaded_gets_the_next_one() -> None:
    """A long request, then short ones: as long as it runs, they go to the other replica, one after the other."""
    arrivals = [0.0, *np.arange(1, 6) * 200.0]
    requests = make_requests(arrivals, [10] * 6, [500, *[2] * 5])
    run = serve_replicas(requests, COSTS, LIMITS, Routing(2, "least-loaded"))
    assert run.replica.tolist() == [0, 1, 1, 1, 1, 1]


def test_a_user_goes_back_to_the_prefix_and_saves_its_tokens() -> None:
    requests = make_requests([1000.0 * i for i in range(8)], [160] * 8, [4] * 8, user_id=[0, 1, 0, 1, 0, 1, 0, 1])
    run = serve_replicas(requests, COSTS, LIMITS, Routing(2, "prefix", prefix_share=0.5, slack=0))
    # An idle pair: everybody fits on the first replica, and only the first prompt of each user is computed in full.
    assert run.counters.prefill_tokens == 2 * 160 + 6 * 80


def test_prefill_apart_adds_up_for_a_single_request() -> None:
    """Prefill of 100 tokens 5.1 + 2 ms; transfer 3 + 100 * 0.01; two steps of one token 5.12 ms each."""
    quiet = replace(LIMITS, asynchronous=False)
    found = serve_apart(make_requests([0.0], [100], [3]), (COSTS, COSTS), (quiet, quiet), Transfer(3.0, 0.01))
    assert found.first_ms[0] == pytest.approx(7.1)
    assert found.last_ms[0] == pytest.approx(7.1 + 4.0 + 2 * 5.12)


def test_prefill_apart_conserves_tokens_and_recomputes_what_is_preempted() -> None:
    requests = some()
    small = replace(LIMITS, kv_blocks=40)
    found = serve_apart(requests, (COSTS, COSTS), (LIMITS, small), Transfer(1.0, 0.001))
    assert np.all(found.last_ms >= found.first_ms)
    assert found.counters.generated_tokens == int(requests.output_tokens.sum())
    assert found.counters.preemptions > 0
    assert found.counters.free_blocks == LIMITS.kv_blocks - 1 + 39


def test_what_cannot_be_routed() -> None:
    with pytest.raises(WrongUsage, match="is not a route"):
        Routing(2, "random")
    with pytest.raises(WrongUsage, match="replicas"):
        Routing(0)
    with pytest.raises(WrongUsage, match="in turn"):
        serve_replicas(some(), COSTS, replace(LIMITS, batching="static"), Routing(2, "least-loaded"))
    with pytest.raises(WrongUsage, match="below zero"):
        Transfer(-1.0)


def test_the_shortest_queue_counts_tokens_and_not_requests() -> None:
    """One long prompt, of 40 steps, is more than four short ones."""
    requests = make_requests([0.0, 1.0, 2.0, 3.0, 4.0], [10_000, 20, 20, 20, 20], [50] * 5)
    limits = replace(LIMITS, kv_blocks=2000)
    by_tokens = serve_replicas(requests, COSTS, limits, Routing(2, "shortest-queue"))
    by_requests = serve_replicas(requests, COSTS, limits, Routing(2, "least-loaded"))
    assert by_tokens.replica.tolist() == [0, 1, 1, 1, 1]
    assert by_requests.replica.tolist() == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("second", [600, 3000])
def test_the_predicted_latency_is_that_of_the_costs(second: int) -> None:
    """Both engines prefill, 1,000 tokens the one and `second` the other: the next prompt goes where the rest takes less
    time, which is where its first token comes sooner, as both ways show."""
    limits = replace(LIMITS, kv_blocks=2000)
    arrivals = [0.0, 0.0, 5.0]
    run = serve_replicas(
        make_requests(arrivals, [1000, second, 300], [40, 40, 2]), COSTS, limits, Routing(2, "predicted-latency")
    )
    assert run.replica.tolist() == [0, 1, 1 if second < 1000 else 0]
    ways = [
        serve(make_requests([0.0, 5.0], [prompt, 300], [40, 2]), COSTS, limits).ttft_ms[1] for prompt in (1000, second)
    ]
    assert run.ttft_ms[2] == min(ways)
