"""What changes do: scaled costs, shorter prompts, and the front of settings that no other dominates."""

import pytest

from latfit.planning.serving.effects import effects_of, max_step_slowdown
from latfit.planning.serving.evaluate import Evaluator, Setup
from latfit.planning.serving.plan import ServingRequest, plan_serving
from latfit.planning.serving.targets import RequestTarget, Targets, parse_target
from latfit.simulation import EngineSettings, linear_costs
from latfit.workload import Constant, OpenLoad, Poisson

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
