"""The least engines that prefill and that decode, against every pair tried and against what must be so."""

from dataclasses import replace

import pytest

from latfit.planning.serving.apart import Pairs
from latfit.planning.serving.evaluate import Evaluator
from latfit.planning.serving.search import SearchSpace
from latfit.planning.serving.targets import RequestTarget, Targets
from latfit.simulation import (
    Cluster,
    EnginePoint,
    EngineSettings,
    Options,
    Routing,
    Transfer,
    linear_costs,
)
from latfit.workload import Constant, OpenLoad, Poisson, RecordedLoad
from tests.unit.planning.serving.test_search import EVERYTHING, FIXED

COSTS = linear_costs(8.0, 0.15, 0.02)
START = EngineSettings(max_num_seqs=64, max_num_batched_tokens=2048, kv_blocks=4000)
TRAFFIC = OpenLoad(Poisson(0.06), Constant(600, 60))
TRANSFER = Transfer(2.0, 0.01)


def apart(
    targets: Targets, transfer: Transfer = TRANSFER, load: OpenLoad | RecordedLoad = TRAFFIC, requests: int = 6_000
) -> Evaluator:
    found = Evaluator(load, COSTS, targets, apart=(COSTS, transfer))
    found.requests = requests
    return found


def keeps(targets: Targets, prefill: int, decode: int) -> bool:
    """In a long simulation."""
    options = Options(requests=20_000, replications=3, seed=11)
    cluster = Cluster(Routing(decode), COSTS, TRANSFER, prefill)
    run = EnginePoint(TRAFFIC, COSTS, START, options, cluster=cluster).run().summary
    figures = {"ttft": run.ttft, "tpot": run.tpot, "latency": run.latency}
    return run.stable and all(figures[each.metric]["p99"].value <= each.limit_ms for each in targets.targets)


@pytest.mark.parametrize(
    "limits",
    [
        {"ttft": 150.0, "tpot": 14.0},
        pytest.param({"ttft": 60.0, "tpot": 30.0}, marks=pytest.mark.nightly),
        pytest.param({"latency": 900.0}, marks=pytest.mark.nightly),
    ],
)
def test_the_least_pair_is_that_of_trying_every_one(limits: dict[str, float]) -> None:
    targets = Targets(tuple(RequestTarget(name, limit) for name, limit in limits.items()))
    pairs = sorted(((n, m) for n in range(1, 7) for m in range(1, 7)), key=sum)
    expected = next((pair for pair in pairs if keeps(targets, *pair)), None)
    assert expected is not None
    found = Pairs(apart(targets), FIXED).run([START], TRANSFER)
    assert found.feasible
    assert found.total == sum(expected)
    assert keeps(targets, found.prefill_replicas, found.replicas)


@pytest.mark.nightly
def test_settings_are_searched_too() -> None:
    """Eight requests a step are fewer than what decodes at a time asks for."""
    targets = Targets((RequestTarget("ttft", 150.0), RequestTarget("tpot", 25.0)))
    few = replace(START, max_num_seqs=8)
    space = SearchSpace(EVERYTHING - {"max_num_seqs"}, most_requests=64, most_tokens=4096, longest=600)
    alone, searched = (Pairs(apart(targets, requests=2_000), each).run([few], TRANSFER) for each in (FIXED, space))
    assert searched.engine is not None
    assert searched.engine.max_num_seqs is not None
    assert searched.engine.max_num_seqs > 8
    assert searched.total < alone.total


def test_what_one_engine_prefills_and_decodes_at_most() -> None:
    """A prompt of 600 tokens in each step of 2,048, three and a bit: 8 + 0.15 n + 0.02 * 2048 ms for 2048/600 of them;
    64 requests that decode take 8 + 64 * 0.17 ms for 64 of 59 tokens."""
    prefill, decode = apart(Targets((RequestTarget("ttft", 150.0),))).of_kinds(START)
    assert prefill == pytest.approx(1e3 * 2048 / 600 / (8 + 0.15 * 4 + 0.02 * 2048), rel=0.02)
    # Places are free one step later than their requests end.
    assert decode == pytest.approx(1e3 * 64 / 60 / (8 + 64 * 0.17), rel=0.03)
