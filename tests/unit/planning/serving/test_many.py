"""More replicas than are simulated at a time: what a share of them gets, and their least number in closed form."""

from bisect import bisect_left
from dataclasses import replace

import numpy as np
import pytest

from latfit.errors import WrongUsage
from latfit.planning.serving.evaluate import TOGETHER, Evaluator
from latfit.planning.serving.search import MOST_REPLICAS, Search
from latfit.simulation import Cluster, EngineSettings, Options, Routing, linear_costs, replicate
from latfit.workload import (
    Constant,
    Dealt,
    OpenLoad,
    bursts,
)
from tests.unit.planning.serving.test_search import FIXED, ONE, SERVICE_MS, p99_in_turn, single_servers

COSTS = linear_costs(8.0, 0.15, 0.02)
LIMITS = EngineSettings(max_num_seqs=16, max_num_batched_tokens=2048, kv_blocks=4000)


def many_servers(rate: float, limit_ms: float) -> Evaluator:
    found = single_servers(rate, limit_ms)
    found.alone_ms = SERVICE_MS
    return found


@pytest.mark.parametrize(("rate", "limit_ms"), [(20.0, 14.0), pytest.param(390.0, 13.0, marks=pytest.mark.nightly)])
def test_the_least_of_hundreds_of_single_servers(rate: float, limit_ms: float) -> None:
    """Each gets every n-th request of a Poisson stream; its tail by Lindley's recursion over two million requests."""
    found = Search(many_servers(rate, limit_ms), ONE, FIXED).run()
    assert found.best is not None
    count = found.best.setup.replicas
    assert TOGETHER < rate * SERVICE_MS < count <= MOST_REPLICAS
    least = round(rate * SERVICE_MS)
    expected = bisect_left(range(2 * least), 1, least + 1, key=lambda r: int(p99_in_turn(rate, r) <= limit_ms))
    assert count == pytest.approx(expected, rel=0.006)


def test_a_share_is_the_first_engines_of_all_to_the_last_bit() -> None:
    """Simulated as a whole, and as the part of the stream that the first of them get."""
    rate, all_of_them = 0.5, 2 * TOGETHER
    load = OpenLoad(bursts(rate, 2.0, 0.2, 500.0), Constant(300, 20))
    options = Options(requests=4_096, replications=1, seed=3)
    whole = replicate(load, COSTS, LIMITS, options, Cluster(Routing(all_of_them))).runs[0]
    share = replace(load, arrivals=Dealt(load.arrivals, TOGETHER, all_of_them))
    half = Options(requests=2_048, replications=1, seed=3)
    part = replicate(share, COSTS, LIMITS, half, Cluster(Routing(TOGETHER))).runs[0]
    rows = whole.replica < TOGETHER
    np.testing.assert_array_equal(part.requests.arrival_ms, whole.requests.arrival_ms[rows])
    np.testing.assert_array_equal(part.first_ms, whole.first_ms[rows])
    np.testing.assert_array_equal(part.last_ms, whole.last_ms[rows])


def test_too_many_are_refused_with_a_part_to_plan() -> None:
    with pytest.raises(WrongUsage, match=r"up to 4,096"):
        Search(many_servers(500.0, 50.0), ONE, FIXED).run()


def test_a_guess_of_more_than_are_planned_is_no_answer() -> None:
    """On 8,192 replicas requests do not meet; on 4,096, of which each is busy for 98 % of the time, 7 % wait."""
    evaluator = replace(many_servers(400.0, 10.01), requests=3_000)
    assert Search(evaluator, ONE, FIXED)._verified(ONE, 2 * MOST_REPLICAS) is None
