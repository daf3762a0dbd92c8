"""What changes do: scaled costs, shorter prompts, and the front of settings that no other dominates."""

from dataclasses import astuple, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from latfit.planning.serving.apart import PrefillApart
from latfit.planning.serving.effects import effects_of, front, max_step_slowdown
from latfit.planning.serving.evaluate import Evaluator, Saturated, Setup, saturated_in
from latfit.planning.serving.plan import ServingRequest, plan_serving
from latfit.planning.serving.targets import RequestTarget, Targets, parse_target
from latfit.simulation import EngineSettings, Transfer, linear_costs
from latfit.workload import Constant, OpenLoad, Poisson, RecordedLoad, make_requests
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
    measured = by.measure(Setup(EngineSettings(kv_blocks=4000)))
    assert max_step_slowdown(by, measured, 4.0) == pytest.approx(1.5, rel=0.02)


def test_a_plan_says_how_much_slower_steps_may_be_and_what_tokens_cost() -> None:
    load = RecordedLoad(make_requests(5.0 * np.arange(300.0), 100, 20))
    start = EngineSettings(max_num_seqs=16, max_num_batched_tokens=512, kv_blocks=4000)
    targets = Targets((RequestTarget("tpot", 30.0), RequestTarget("ttft", 400.0)))
    request = ServingRequest(targets, start, fixed=EVERYTHING, price_per_hour=2.0)
    found = plan_serving(load, COSTS, {}, request, apart=PrefillApart(COSTS, COSTS, Transfer(2.0, 0.01)))
    assert found.replicas.value is not None
    assert found.steps_may_be_slower_pct is not None
    for factor, met in ((1.0, True), (1.03, False)):
        slower = factor * (1 + found.steps_may_be_slower_pct / 100)
        costs = linear_costs(8.0 * slower, 0.15 * slower, 0.02 * slower)
        assert Evaluator(load, costs, targets).measure(Setup(start, found.replicas.value)).met is met
    apart = found.prefill_apart
    assert apart is not None
    paid = ((found.outcome, found.cost, found.replicas.value), (apart.outcome, apart, apart.total))
    for outcome, cost, count in paid:
        assert outcome is not None
        tokens_an_hour = 3600 * outcome.output_tokens_per_s
        assert cost.price_per_million_tokens == pytest.approx(1e6 * 2.0 * count / tokens_an_hour)


def test_the_throughput_of_a_saturated_engine_is_that_of_its_middle_half() -> None:
    """A request of 10 tokens ends every 10 ms: 100 requests/s and 1,000 tokens/s, from the 25th to the 75th of 100."""
    requests = make_requests(np.zeros(100), 1, 10)
    run: Any = SimpleNamespace(requests=requests, last_ms=10.0 * np.arange(100), tpot_ms=np.full(100, 9.0))
    assert astuple(saturated_in(run)) == pytest.approx((100.0, 1000.0, 9.0))


@pytest.mark.parametrize("planned", range(6))
def test_the_front_has_what_no_other_setting_beats(planned: int) -> None:
    """Speed of each user in tokens/s against throughput of the engine, of six settings."""
    speeds, throughputs = (50, 40, 30, 45, 20, 10), (100, 200, 300, 150, 250, 300)
    tried = [replace(SETTINGS, max_num_seqs=2 << k) for k in range(6)]

    def saturated(settings: EngineSettings) -> Saturated:
        k = tried.index(settings)
        return Saturated(1.0, throughputs[k], 1e3 / speeds[k])

    evaluator: Any = SimpleNamespace(saturated=saturated)
    space: Any = SimpleNamespace(alternatives=lambda best, name: tried if name == "max_num_seqs" else [])
    rows = front(evaluator, tried[planned], space)
    assert [row.max_num_seqs for row in rows if row.best] == [2 << planned]
    assert {row.max_num_seqs for row in rows} == {2, 4, 8, 16, 2 << planned}
    assert sorted(row.throughput_per_s for row in rows) == [row.throughput_per_s for row in rows]


def test_a_plan_of_a_load_that_nothing_carries_says_so() -> None:
    request = ServingRequest(Targets((RequestTarget("tpot", 1.0),)), SETTINGS)
    found = plan_serving(LOAD, COSTS, {}, request)
    assert (found.feasible, found.promise, found.replicas.tried) == (False, "misses", None)
    assert "a request alone" in found.binding
    assert found.to_json()["engine"] is None
    assert found.to_json()["replicas"]["value"] is None
    assert not found.effects


@pytest.mark.parametrize(
    ("text", "limit_ms", "percentile"), [("500ms", 500.0, 99.0), ("p95:2s", 2000.0, 95.0), ("99.9%:1s", 1000.0, 99.9)]
)
def test_targets_as_people_write_them(text: str, limit_ms: float, percentile: float) -> None:
    found = parse_target(text, "ttft", "--ttft")
    assert (found.limit_ms, found.percentile) == (limit_ms, percentile)
