"""The least engines and their settings, against queues that are computed without the simulator and against every
setting tried."""

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from latfit.planning.serving.evaluate import Evaluator, Setup
from latfit.planning.serving.plan import search_space
from latfit.planning.serving.search import Search, SearchSpace
from latfit.planning.serving.targets import Goodput, RequestTarget, Targets
from latfit.simulation import (
    EngineSettings,
    Promise,
    linear_costs,
)
from latfit.stats import FloatArray
from latfit.workload import (
    ClosedLoad,
    Constant,
    OpenLoad,
    Poisson,
    PrefixBlocks,
    RecordedLoad,
    make_requests,
    parse_lengths,
)

SERVICE_MS = 10.0
ONE = EngineSettings(max_num_seqs=1, kv_blocks=1001, asynchronous=False, padded_graphs=False)
EVERYTHING = frozenset({"max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "batching", "order"})
FIXED = SearchSpace(fixed=EVERYTHING)


def lindley(gaps: FloatArray, service_ms: float) -> FloatArray:
    """Responses (n,) of a single server: W = max(W + S - A, 0), in closed form over the running minimum."""
    walk = np.concatenate([[0.0], np.cumsum(service_ms - gaps[1:])])
    return np.asarray(walk - np.minimum.accumulate(np.minimum(walk, 0.0)) + service_ms)


@cache
def p99_in_turn(rate: float, replicas: int, cv2: float = 1.0, n: int = 2_000_000) -> float:
    """p99 of responses where every replica gets each n-th request: its gaps are sums of `replicas` gaps."""
    rng = np.random.default_rng(7)
    gaps = rng.gamma(replicas / cv2, cv2 / rate, n)
    return float(np.quantile(lindley(gaps, SERVICE_MS)[n // 100 :], 0.99))


def single_servers(rate: float, limit_ms: float, load: OpenLoad | None = None) -> Evaluator:
    """One token a request, one request a step, always as long."""
    found = Evaluator(
        load or OpenLoad(Poisson(rate)),
        linear_costs(SERVICE_MS, 0.0, 0.0),
        Targets((RequestTarget("ttft", limit_ms),)),
    )
    found.requests = 60_000
    return found


@pytest.mark.parametrize(("rate", "limit_ms"), [(0.45, 60.0), (0.93, 25.0)])
def test_the_least_replicas_of_single_servers(rate: float, limit_ms: float) -> None:
    expected = next(r for r in range(1, 50) if r > rate * SERVICE_MS and p99_in_turn(rate, r) <= limit_ms)
    found = Search(single_servers(rate, limit_ms), ONE, FIXED).run()
    assert found.best is not None
    assert found.best.setup.replicas == expected
    assert found.fewer is not None
    assert not found.fewer.met


def test_the_highest_load_of_a_single_server_is_where_its_tail_reaches_the_limit() -> None:
    evaluator = single_servers(0.05, 60.0)
    search = Search(evaluator, ONE, FIXED)
    carried = search.bracket(Setup(ONE), 1.0)[0]
    # Within the precision of the search, and of a tail that rises steeply there.
    assert p99_in_turn(0.05 * carried * 0.97, 1) <= 60.0
    assert p99_in_turn(0.05 * carried * 1.05, 1) >= 60.0


@pytest.mark.parametrize("seed", range(2))
def test_what_is_held_for_certain_is_held_and_what_is_said_to_be_missed_is_missed(seed: int) -> None:
    """Against the tail of two million requests by Lindley's recursion."""
    evaluator = replace(single_servers(0.05, 60.0), seed=seed)
    low, _, high = Search(evaluator, ONE, FIXED).spare(Setup(ONE))
    assert p99_in_turn(0.05 * low, 1) <= 60.0 <= p99_in_turn(0.05 * high, 1)
    assert high < 1.4 * low


def test_goodput_counts_requests_that_meet_all() -> None:
    """Half of the requests are long: they take four times as long, and each limit catches other ones."""
    requests = make_requests(1000.0 * np.arange(400.0), 1, np.tile([10, 40], 200))
    load = RecordedLoad(requests)
    promise = Promise(latency_ms=300.0)
    target = RequestTarget("latency", 300.0)
    evaluator = Evaluator(load, linear_costs(10.0, 0, 0), Targets((target,), Goodput(99.0, promise)))
    found = evaluator.measure(Setup(ONE))
    assert found.reached[0].value == 50.0
    assert not found.met
    kept = Evaluator(load, linear_costs(10.0, 0, 0), Targets((target,), Goodput(40.0, promise)))
    assert kept.measure(Setup(ONE)).met


@pytest.mark.nightly
def test_a_replica_count_is_refused_only_where_no_setting_meets_the_targets() -> None:
    """60/s of 500:100 within TTFT 500 ms and TPOT 25 ms: the settings that serving starts with miss it on two replicas,
    others of a grid of 7 batch limits and 3 budgets meet it. A request costs its 550 cached tokens, 20 ns each."""
    load = OpenLoad(Poisson(0.06), Constant(500, 100))
    targets = Targets((RequestTarget("ttft", 500.0), RequestTarget("tpot", 25.0)))

    def evaluator() -> Evaluator:
        found = Evaluator(load, linear_costs(6.0, 0.041, 0.03), targets)
        found.requests = 3_000
        return found

    start = EngineSettings(max_num_seqs=256, max_num_batched_tokens=2048)
    space = SearchSpace(frozenset({"batching", "order", "long_prefill_token_threshold"}), 256, 2304, 500, 600)
    found = Search(evaluator(), start, space).run()
    assert found.best is not None
    judge = evaluator()
    grid = [
        Setup(replace(start, max_num_seqs=seqs, max_num_batched_tokens=tokens), replicas)
        for replicas, seqs, tokens in product((1, 2), (32, 48, 64, 96, 128, 192, 256), (256, 512, 1024))
        if tokens >= seqs
    ]
    least = min(each.replicas for each in grid if judge.measure(each).met)
    assert not judge.measure(Setup(start, least)).met
    assert found.best.setup.replicas == least
    assert judge.measure(found.best.setup).met


def test_a_batch_of_two_is_found() -> None:
    """Steps of 10 + 5 B ms: 90 tokens/s are more than one request gets (66.7) and less than two (100), at 20 ms each;
    three would take 25 ms."""
    evaluator = Evaluator(
        OpenLoad(Poisson(0.09 / 60), Constant(100, 60)),
        linear_costs(10.0, 5.0, 0.0),
        Targets((RequestTarget("ttft", 60_000.0), RequestTarget("tpot", 22.0))),
        requests=3_000,
    )
    space = SearchSpace(EVERYTHING - {"max_num_seqs"}, 16)
    found = Search(evaluator, replace(ONE, max_num_seqs=16), space, replicas=1).run()
    assert found.best is not None
    assert found.best.met
    assert found.best.setup.settings.max_num_seqs == 2


def test_static_batches_of_classes_are_searched_in_their_order() -> None:
    """The engine refuses every other one."""
    space = SearchSpace(frozenset({"batching"}), longest=1, longest_sequence=1, classes=True)
    assert space.alternatives(replace(ONE, batching="static"), "order") == []
    assert [each.order.name for each in space.alternatives(ONE, "order")] == ["priority"]


def test_the_search_knows_the_longest_prompt_and_sequence() -> None:
    found = search_space(RecordedLoad(make_requests([0.0, 1.0, 2.0], [600, 900, 10], [60, 5, 300])), [], frozenset())
    assert (found.longest, found.longest_sequence) == (900, 905)


def test_a_limit_within_the_noise_of_a_request_alone_ends_the_search_for_a_certain_load() -> None:
    """Steps take 10 ms whatever they hold: the median latency is that of the lengths at any load."""
    settings = EngineSettings(max_num_seqs=64, kv_blocks=100_000, asynchronous=False)
    load, targets = (
        OpenLoad(Poisson(0.01), parse_lengths("10:100:0.6")),
        Targets((RequestTarget("latency", 860.0, 50.0),)),
    )
    evaluator = Evaluator(load, linear_costs(10.0, 0.0, 0.0), targets)
    low, _, _ = Search(evaluator, settings, FIXED).spare(Setup(settings))
    assert low <= 1.0
    assert evaluator.work["setups"] < 50


def test_requests_that_come_at_once_are_planned() -> None:
    """80 requests at each of two moments, one at a time: no rate spares a replica for each."""
    load = RecordedLoad(make_requests(np.repeat([0.0, 1e6], 80), 1, 1))
    evaluator = Evaluator(load, linear_costs(SERVICE_MS, 0.0, 0.0), Targets((RequestTarget("ttft", 15.0),)))
    found = Search(evaluator, ONE, FIXED).run()
    assert found.best is not None
    assert found.best.setup.replicas == 80


def test_users_of_any_number_send_enough_requests() -> None:
    """200 users who think for a minute, and a limit that no number of them reaches: every token takes 10 ms."""
    load, targets = ClosedLoad(200, 60_000.0, lengths=Constant(10, 5)), Targets((RequestTarget("tpot", 15.0),))
    evaluator = Evaluator(load, linear_costs(10.0, 0.0, 0.0), targets, alone_ms=50.0, requests=4_000)
    low, _ = Search(evaluator, EngineSettings(), FIXED).bracket(Setup(EngineSettings()), 1.0, replications=1)
    assert low > 5


def test_a_request_alone_finds_the_prefix_of_the_one_before() -> None:
    """Of 64 tokens at 1 ms each, 48 are those of the 200 requests of a conversation: 1 in 200 computes them all."""
    count = 20_000
    own = np.arange(count)
    ids = np.stack([*(3 * (own // 200) + k for k in range(3)), count + own], axis=1).ravel()
    blocks = PrefixBlocks(16, 4 * np.arange(count + 1), ids)
    load = RecordedLoad(replace(make_requests(100.0 * np.arange(20_000.0), 64, 1), prefix=blocks))
    evaluator = Evaluator(load, linear_costs(0.0, 0.0, 1.0), Targets((RequestTarget("ttft", 17.0),)))
    assert evaluator.alone(ONE).met
