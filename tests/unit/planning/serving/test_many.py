"""More replicas than are simulated at a time: what a share of them gets, and their least number in closed form."""

from bisect import bisect_left
from dataclasses import replace

import numpy as np
import pytest

from latfit.errors import WrongUsage
from latfit.planning.serving.evaluate import TOGETHER, VERIFIED, Evaluator, Setup
from latfit.planning.serving.search import MOST_REPLICAS, Search
from latfit.planning.serving.targets import RequestTarget, Targets
from latfit.simulation import Cluster, EngineSettings, Options, Routing, linear_costs, replicate, simulate_engine
from latfit.workload import (
    ARRIVALS,
    ClosedLoad,
    Constant,
    Dealt,
    Gamma,
    OpenLoad,
    Poisson,
    RecordedLoad,
    Streams,
    bursts,
    make_requests,
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


def test_figures_are_those_of_all_replicas_simulated() -> None:
    load, count = OpenLoad(Poisson(1.5), Constant(300, 20)), 100
    targets = Targets((RequestTarget("ttft", 100.0),))
    evaluator = Evaluator(load, COSTS, targets)
    evaluator.alone_ms = evaluator.alone(LIMITS).summary.latency["mean"].value
    shared = evaluator.measure(Setup(LIMITS, count), replications=VERIFIED).summary
    options = Options(requests=60_000, replications=4, seed=5)
    whole = simulate_engine(load, COSTS, LIMITS, options, cluster=Cluster(Routing(count))).summary
    for name in ("mean", "p50", "p90"):
        assert shared.ttft[name].value == pytest.approx(whole.ttft[name].value, rel=0.03)
        assert shared.latency[name].value == pytest.approx(whole.latency[name].value, rel=0.02)
    assert shared.utilisation == pytest.approx(whole.utilisation, rel=0.05)
    assert shared.queue == pytest.approx(whole.queue, rel=0.2)


def test_dealt_arrivals_have_their_rate_and_their_gaps() -> None:
    """Every 100th of a Poisson stream comes in gaps of cv 1/10, of one with gaps of cv 2 in gaps of cv 1/5; one of 100
    by chance in gaps of cv 1, and of cv sqrt(1 + 3/100) of the other."""
    rng = Streams(1).generator(ARRIVALS)
    cases = ((Poisson(0.5), True, 0.1), (Gamma(0.5, 2.0), True, 0.2), (Poisson(0.5), False, 1.0))
    for whole, in_turn, cv in (*cases, (Gamma(0.5, 2.0), False, 1.03**0.5)):
        process = Dealt(whole, 1, 100, in_turn)
        times = process.times_ms(20_000, rng)
        gaps = np.diff(times)
        assert len(times) == 20_000
        assert process.rate == pytest.approx(0.005)
        assert gaps.mean() == pytest.approx(200.0, rel=0.03)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)
        assert process.at_rate(0.01).rate == pytest.approx(0.01)


def test_users_and_recorded_requests_of_many_replicas() -> None:
    """Users who never think keep every place busy: a step of one request each, one after the other."""
    targets = Targets((RequestTarget("ttft", 50.0),))
    users = ClosedLoad(400, 0.0, lengths=Constant(1, 1))
    loop = Evaluator(users, linear_costs(10.0, 0.0, 0.0), targets, alone_ms=10.0)
    found = loop.measure(Setup(ONE, 200), replications=VERIFIED)
    assert found.summary.throughput_per_s == pytest.approx(200 * 100.0, rel=0.05)
    requests = make_requests(np.linspace(0.0, 150.0, 3_000), 300, 20)
    recorded = Evaluator(RecordedLoad(requests), COSTS, targets)
    assert len(recorded.measure(Setup(LIMITS, 150)).first.requests) == 3_000


def test_gaps_that_are_not_drawn_one_by_one_are_those_that_are() -> None:
    """Two of five servers of a gamma stream: means and variances of the two kinds of gaps."""
    rng = np.random.default_rng(2)
    times = Dealt(Gamma(1.0, 1.5), 2, 5).times_ms(100_000, rng)
    gaps = np.diff(times)
    for start, several in ((0, 1), (1, 4)):
        assert gaps[start::2].mean() == pytest.approx(several, rel=0.02)
        assert gaps[start::2].var() == pytest.approx(several * 2.25, rel=0.05)


def test_too_many_are_refused_with_a_part_to_plan() -> None:
    with pytest.raises(WrongUsage, match=r"up to 4,096"):
        Search(many_servers(500.0, 50.0), ONE, FIXED).run()
