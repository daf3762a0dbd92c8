"""What changes do: scaled costs, shorter prompts, and the front of settings that no other dominates."""

from itertools import pairwise

import numpy as np
import pytest

from latfit.errors import WrongUsage
from latfit.planning.serving.effects import effects_of, front, max_step_slowdown, undominated
from latfit.planning.serving.evaluate import Evaluator, Setup
from latfit.planning.serving.plan import ServingRequest, plan_serving
from latfit.planning.serving.result import Trade
from latfit.planning.serving.search import SearchSpace
from latfit.planning.serving.targets import RequestTarget, Targets, parse_target
from latfit.simulation import EngineSettings, linear_costs
from latfit.workload import Constant, OpenLoad, Poisson
from tests.unit.planning.serving.test_search import EVERYTHING

COSTS = linear_costs(8.0, 0.15, 0.02)
SETTINGS = EngineSettings(kv_blocks=4000)
TARGETS = Targets((RequestTarget("ttft", 400.0), RequestTarget("tpot", 60.0)))
LOAD = OpenLoad(Poisson(0.01), Constant(600, 60))


def evaluator(load: OpenLoad = LOAD) -> Evaluator:
    found = Evaluator(load, COSTS, TARGETS)
    found.requests = 4_000
    return found


def test_changes_do_what_they_say() -> None:
    by = evaluator()
    best = by.measure(Setup(SETTINGS, 2))
    found = {each.change: each for each in effects_of(by, best, cache=True)}
    figure = best.tightest.name
    assert {each.target for each in found.values()} == {figure}
    assert all(each.before == best.tightest.value for each in found.values())
    # More engines, less work: each makes the figure smaller; a cache that never fills does not count.
    for change in ("3 replicas", "prefill 20 % faster", "decode 20 % faster", "prompts 20 % shorter"):
        assert found[change].after < found[change].before
    assert found["KV cache 50 % larger"].after == pytest.approx(found["KV cache 50 % larger"].before)


def test_what_it_bears_is_where_the_target_is_reached() -> None:
    """A request alone has a token every step of 10 ms; its limit of 15 ms is reached with steps half as long again."""
    rare = OpenLoad(Poisson(1e-6), Constant(600, 60))
    by = Evaluator(rare, linear_costs(10.0, 0.0, 0.0), Targets((RequestTarget("tpot", 15.0),)))
    by.requests = 300
    assert max_step_slowdown(by, by.measure(Setup(EngineSettings(kv_blocks=4000)))) == pytest.approx(1.5, rel=0.02)


def test_the_front_is_what_no_other_dominates() -> None:
    rng = np.random.default_rng(1)
    trades = [Trade(i, 1, float(a), float(b), best=i == 7) for i, (a, b) in enumerate(rng.random((60, 2)))]
    kept = undominated(trades)
    expected = {
        one.max_num_seqs
        for one in trades
        if one.best
        or not any(o.speed_per_s > one.speed_per_s and o.throughput_per_s > one.throughput_per_s for o in trades)
    }
    assert {each.max_num_seqs for each in kept} == expected
    assert all(a.throughput_per_s <= b.throughput_per_s for a, b in pairwise(kept))


def test_larger_batches_trade_speed_for_throughput() -> None:
    found = front(evaluator(), SETTINGS, SearchSpace(frozenset({"max_num_batched_tokens"}), 256, 2048, 600))
    assert len(found) > 3
    assert sum(each.best for each in found) == 1
    only = [each for each in found if not each.best]
    assert all(a.speed_per_s >= b.speed_per_s for a, b in pairwise(only))


def test_a_plan_of_a_load_that_nothing_carries_says_so() -> None:
    request = ServingRequest(Targets((RequestTarget("tpot", 1.0),)), SETTINGS)
    found = plan_serving(LOAD, COSTS, {}, request)
    assert (found.feasible, found.promise, found.replicas.tried) == (False, "misses", None)
    assert "a request alone" in found.binding
    assert found.to_json()["engine"] is None
    assert found.to_json()["replicas"]["value"] is None
    assert not found.effects


def test_given_replicas_are_kept() -> None:
    found = plan_serving(LOAD, COSTS, {}, ServingRequest(TARGETS, SETTINGS, EVERYTHING, replicas=4, kv="given"))
    assert found.replicas.value == 4
    assert found.feasible
    assert not any("replicas" in each.change for each in found.effects)
    overloaded = OpenLoad(Poisson(0.2), Constant(600, 60))
    short = plan_serving(overloaded, COSTS, {}, ServingRequest(TARGETS, SETTINGS, replicas=1, kv="given"))
    assert (short.feasible, short.replicas.tried) == (False, 1)


@pytest.mark.parametrize(
    ("text", "limit_ms", "percentile"), [("500ms", 500.0, 99.0), ("p95:2s", 2000.0, 95.0), ("99.9%:1s", 1000.0, 99.9)]
)
def test_targets_as_people_write_them(text: str, limit_ms: float, percentile: float) -> None:
    found = parse_target(text, "ttft", "--ttft")
    assert (found.limit_ms, found.percentile) == (limit_ms, percentile)


@pytest.mark.parametrize("text", ["500", "p0:1s", "p100:1s", "px:1s", "p95:", "p95:-1s"])
def test_what_is_no_target(text: str) -> None:
    with pytest.raises(WrongUsage, match="--ttft"):
        parse_target(text, "ttft", "--ttft")
