"""Operating points of planted step times, found by bisection in plain Python; slow engines keep them after a burst."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import brentq

import latfit
from latfit.planning.serving.evaluate import Evaluator
from latfit.planning.serving.plan import ServingRequest, plan_serving
from latfit.planning.serving.result import OperatingStates
from latfit.planning.serving.states import in_system, operating_states, states_at, sustainable_rates, with_burst
from latfit.planning.serving.targets import RequestTarget, Targets
from latfit.simulation import EngineSettings, StepCosts, linear_costs, serve, step_costs
from latfit.simulation.engine.step_cost import Table
from latfit.workload import Constant, OpenLoad, Poisson, Requests
from tests.oracle.engine_reference import Engine

OUTPUT = 40
SETTINGS = EngineSettings(max_num_seqs=256, max_num_batched_tokens=2048, kv_blocks=4000, padded_graphs=False)
TOKENS = 7.0
"""Output tokens per ms that come, 175 requests per second."""
LOAD = OpenLoad(Poisson(TOKENS / OUTPUT), Constant(2, OUTPUT))

FLAT = {1: 10.0, 256: 10.0}
JUMP = {1: 3.0, 32: 3.0, 40: 12.6, 256: 12.6}
STEEP = {1: 3.0, 32: 3.0, 256: 3.0 * 8**1.5}
Times = dict[int, float]


def planted(times: Times) -> StepCosts:
    """Steps with D decoding requests last `times`, log-linear between, whatever they prefill."""
    nodes, values = np.log1p(list(times)), np.log(list(times.values()))
    counts, places, table = np.zeros((3, 4), np.int64), np.zeros((3, 4, len(nodes))), np.zeros((3, len(nodes)))
    counts[:2, 0], places[:2, 0], table[:2] = len(nodes), nodes, values
    return StepCosts(linear_costs(1.0, 0.0, 0.0).typical, table=Table(counts, places, table))


def T(times: Times, B: float) -> float:
    return float(np.exp(np.interp(np.log1p(B), np.log1p(list(times)), np.log(list(times.values())))))


def balance(times: Times, low: float, high: float) -> float:
    """The batch between two at which as many tokens are made as come."""
    return float(brentq(lambda B: B - TOKENS * T(times, B), low, high))


def found(times: Times, settings: EngineSettings = SETTINGS) -> OperatingStates:
    states = operating_states(Evaluator(LOAD, planted(times), Targets(())), settings, 1, [])
    assert states is not None
    return states


CASES = {
    "one": (FLAT, [balance(FLAT, 1, 256)]),
    "three": (JUMP, [balance(JUMP, 1, 30), balance(JUMP, 32, 40), balance(JUMP, 40, 256)]),
    "two and a queue": (STEEP, [balance(STEEP, 1, 30), balance(STEEP, 40, 200), 256.0]),
}


@pytest.mark.parametrize("case", CASES)
def test_all_operating_points_are_found(case: str) -> None:
    times, expected = CASES[case]
    states = found(times)
    assert [each.batch for each in states.points] == pytest.approx(expected, rel=5e-3)
    assert [each.stable for each in states.points] == [True, False, True][: len(expected)]
    assert [each.tpot_ms for each in states.points] == pytest.approx([T(times, B) for B in expected], rel=1e-2)
    assert states.points[-1].overloaded == (case == "two and a queue")
    assert states.confirmed == (None if case == "one" else True)


def test_the_load_and_the_setting_are_those_of_the_planted_cliff() -> None:
    """Up to 32 requests B / T(B) rises to 32 / 3 tokens per ms; beyond it falls to 40 / 12.6."""
    states = found(JUMP)
    assert states.from_rate_per_s == pytest.approx(1e3 * 40 / 12.6 / OUTPUT, rel=1e-2)
    assert states.to_rate_per_s == pytest.approx(1e3 * 32 / 3 / OUTPUT, rel=1e-2)
    assert states.max_num_seqs == 32
    one = found(JUMP, replace(SETTINGS, max_num_seqs=32))
    assert len(one.points) == 1
    assert one.from_rate_per_s is None


class Slow(Engine):
    """A slow engine with planted step times."""

    def __init__(self, requests: Requests, settings: EngineSettings, times: Times) -> None:
        cost = [T(times, D) for D in range(settings.max_num_seqs + 1)]
        super().__init__(requests, settings, lambda step: cost[sum(decodes for _, _, decodes in step)])


def held(engine: Engine, start: float, end: float) -> float:
    """Mean number of requests in a slow engine between two shares of the time of arrivals."""
    last = max(one.arrival for one in engine.all)
    inside = [min(one.last, end * last) - max(one.arrival, start * last) for one in engine.all]
    return sum(max(each, 0.0) for each in inside) / ((end - start) * last)


def test_padding_to_graphs_makes_no_states() -> None:
    """B / T(B) falls by 15 % from 32 to 33 requests, which run as 40: chance passes that."""
    linear = {B: float(B) for B in (1, 8, 16, 24, 32, 40, 64)}
    states = found(linear, replace(SETTINGS, max_num_seqs=64, padded_graphs=True))
    assert states.from_rate_per_s is None


@pytest.mark.parametrize(("times", "sequences", "stays"), [(JUMP, 256, True), (JUMP, 32, False), (STEEP, 256, True)])
def test_a_slow_engine_stays_where_the_burst_left_it(times: Times, sequences: int, stays: bool) -> None:
    settings = replace(SETTINGS, max_num_seqs=sequences)
    requests = with_burst(LOAD, 120, 2_500.0, seed=3)
    engine = Slow(requests, settings, times)
    engine.run()
    fast = balance(times, 1, 30)
    assert held(engine, 0.2, 0.5) == pytest.approx(fast, rel=0.2)
    after = held(engine, 0.85, 1.0)
    assert after > 80 if stays else after == pytest.approx(fast, rel=0.3)
    run = serve(requests, planted(times), settings)
    assert in_system(run, 0.85, 1.0) == pytest.approx(after, rel=0.05)


@pytest.mark.parametrize(("prompt", "output", "sequences"), [(3000, 100, 128), (100, 200, 32), (100, 20, 256)])
def test_the_largest_batch_serves_what_a_flooded_engine_serves(prompt: int, output: int, sequences: int) -> None:
    """Long prompts fill every step, long outputs every slot, short ones share steps; the flood is simulated."""
    settings = EngineSettings(max_num_seqs=sequences, kv_blocks=40_000, padded_graphs=False)
    costs, load = linear_costs(5.0, 0.1, 0.05), OpenLoad(Poisson(0.01), Constant(prompt, output))
    rates = sustainable_rates(costs, settings, (np.full(9, prompt), np.full(9, output)))
    flooded = Evaluator(load, costs, Targets(())).saturated(settings)
    assert 1e3 * rates.per_ms[-1] == pytest.approx(flooded.requests_per_s, rel=0.04)


def test_intervals_are_those_of_the_draws() -> None:
    """T = a + b B: B = rate a / (1 - rate b), for each draw of the fit by itself."""
    rng = np.random.default_rng(5)
    B = np.tile([1, 2, 4, 8, 12, 16, 24, 32, 48, 64], 6)
    steps = pd.DataFrame({"B": B, "S": B, "T_ms": (5 + 0.05 * B) * np.exp(rng.normal(0, 0.02, len(B)))})
    fit = latfit.fit(steps, model="linear").result
    settings = replace(SETTINGS, max_num_seqs=64)
    rates = sustainable_rates(step_costs(fit), settings, (np.full(9, 1), np.full(9, OUTPUT)), [fit])
    (point,) = states_at(rates, 4.0 / OUTPUT, OUTPUT).points
    names = fit.draws["parameters"]
    drawn = np.asarray(fit.draws["values"])
    a = drawn[:, names.index("tau_0")]
    b = sum(drawn[:, names.index(name)] for name in ("tau_B", "tau_S") if name in names)
    assert point.interval == pytest.approx(np.quantile(4 * a / (1 - 4 * b), [0.025, 0.975]), rel=0.01)
    assert point.interval is not None
    assert point.interval[0] < 4 * 5 / (1 - 4 * 0.05) < point.interval[1]


@pytest.mark.parametrize(("times", "warned"), [(JUMP, True), (FLAT, False)])
def test_a_plan_warns_of_the_slow_state(times: Times, warned: bool) -> None:
    request = ServingRequest(
        Targets((RequestTarget("tpot", 200.0),)),
        SETTINGS,
        fixed=frozenset(
            {"max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "batching", "order"}
        ),
        kv="given",
        replicas=1,
    )
    plan = plan_serving(LOAD, planted(times), {}, request)
    texts = [each.text for each in plan.warnings if "Two states" in each.text]
    assert bool(texts) == warned
    if warned:
        (text,) = texts
        assert text.startswith("Two states at one load: 21 requests at once at 3 ms a token, but after a burst 88")
        assert text.endswith("--set max_num_seqs=32 removes the slow state.")
