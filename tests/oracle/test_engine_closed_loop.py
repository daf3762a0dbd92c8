"""Users who wait for their answers: the machine-repairman model, Little's law, and a slow second implementation."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from latfit.simulation.engine.replicas import ROUTES, Routing, serve_replicas
from latfit.simulation.engine.replications import Cluster, EnginePoint
from latfit.simulation.engine.run import EngineRun, serve
from latfit.simulation.engine.settings import EngineSettings, Order
from latfit.simulation.engine.step_cost import linear_costs
from latfit.simulation.policies.run import Options
from latfit.stats import IntArray
from latfit.workload.load import ClosedLoad, RequestClass, Streams
from latfit.workload.requests import Constant, make_requests
from tests.oracle.engine_reference import Engine, One
from tests.oracle.test_engine_reference import COSTS, random_case, slow_cost

STEP_MS = 2.0
ALIKE = linear_costs(STEP_MS, 0.0, 0.0)
"""A step costs the same whatever is in it."""

ONE = EngineSettings(max_num_seqs=1, kv_blocks=1001, asynchronous=False, padded_graphs=False)


@dataclass(frozen=True)
class Geometric:
    """Outputs of a geometric number of tokens: nearly exponential service where the mean is high."""

    mean: int

    def lengths(self, count: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        return np.ones(count, dtype=np.int64), rng.geometric(1 / self.mean, count)


def served(load: ClosedLoad, options: EngineSettings = ONE, n: int = 2000, replicas: int = 1) -> tuple[float, float]:
    """(requests per s, mean latency in ms)."""
    asked = Options(requests=n, replications=1, warmup=0.2)
    found = EnginePoint(load, ALIKE, options, asked, cluster=Cluster(Routing(replicas))).run().summary
    assert found.stable
    return found.throughput_per_s, found.latency["mean"].value


@pytest.mark.parametrize(("users", "replicas"), [(1, 1), (4, 1), (5, 1), (6, 1), (20, 1), (3, 3), (40, 2)])
def test_one_at_a_time_with_constant_times(users: int, replicas: int) -> None:
    """N users, service S, thinking Z: X = min(N / (Z + S), 1 / S) of each engine, R = max(S, N S - Z)."""
    S, Z, each = 10 * STEP_MS, 80.0, users / replicas
    X, R = served(ClosedLoad(users, Z, exponential=False, lengths=Constant(1, 10)), replicas=replicas)
    assert pytest.approx(1e3 * replicas * min(each / (Z + S), 1 / S), rel=2e-3) == X
    assert pytest.approx(max(S, each * S - Z), rel=1e-9) == R


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_user_alone_never_waits(asynchronous: bool) -> None:
    options = replace(ONE, max_num_seqs=8, asynchronous=asynchronous)
    X, R = served(ClosedLoad(1, 30.0, exponential=False, lengths=Constant(1, 7)), options)
    assert pytest.approx(7 * STEP_MS) == R
    assert pytest.approx(1e3 / (7 * STEP_MS + 30.0), rel=2e-3) == X


def test_users_who_do_not_think_fill_the_batch() -> None:
    X, R = served(ClosedLoad(12, 0.0, exponential=False, lengths=Constant(1, 9)), replace(ONE, max_num_seqs=12))
    assert pytest.approx(9 * STEP_MS) == R
    assert pytest.approx(1e3 * 12 / (9 * STEP_MS), rel=5e-3) == X


@pytest.mark.parametrize("users", [2, 8, 16])
def test_the_machine_repairman(users: int) -> None:
    """M/M/1//N: p_k = p_0 N!/(N-k)! (S/Z)^k, X = (1 - p_0) / S, R = N / X - Z. Service of 100 steps on the mean has a
    squared coefficient of variation of 0.99."""
    S, Z, n = 100 * STEP_MS, 1000.0, 60_000
    p = np.cumprod(np.concatenate([[1.0], np.arange(users, 0, -1) * S / Z]))
    X = 1e3 * (1 - 1 / p.sum()) / S
    asked = Options(requests=n, replications=4)
    found = EnginePoint(ClosedLoad(users, Z, lengths=Geometric(100)), ALIKE, ONE, asked).run().summary
    latency = found.latency["mean"]
    assert found.throughput_per_s == pytest.approx(X, rel=0.01)
    assert latency.value == pytest.approx(1e3 * users / X - Z, abs=2 * (latency.high - latency.low), rel=0.005)


def loop(users: int, think_ms: float, n: int = 400, *, exponential: bool = True) -> tuple[ClosedLoad, EngineRun]:
    load = ClosedLoad(users, think_ms, exponential, Geometric(20))
    requests, think = load.sample(n, Streams(3)), load.thinking(n, Streams(3))
    return load, serve(requests, linear_costs(3.1, 0.07, 0.013), replace(ONE, max_num_seqs=6), 3, think)


def test_a_user_sends_the_next_request_after_the_answer_and_thinking() -> None:
    _, run = loop(9, 50.0, exponential=False)
    for user in range(9):
        own = run.requests.user_id == user
        np.testing.assert_allclose(run.requests.arrival_ms[own][1:], run.last_ms[own][:-1] + 50.0, rtol=1e-12)


@pytest.mark.parametrize("users", [1, 7, 40])
def test_littles_law_holds_on_the_path(users: int) -> None:
    """Of N users, those in the system and those who think are N at every moment until the first has nothing to send."""
    load, run = loop(users, 120.0)
    assert len(run.requests) == 400
    assert np.all(np.diff(run.requests.arrival_ms) >= 0)
    assert np.all(run.start_ms >= run.requests.arrival_ms)
    think = np.sort(load.thinking(400, Streams(3)))
    first = np.array([run.requests.arrival_ms[run.requests.user_id == user][0] for user in range(users)])
    between = [
        np.diff(run.requests.arrival_ms[own]) - run.latency_ms[own][:-1]
        for own in (run.requests.user_id == user for user in range(users))
    ]
    np.testing.assert_allclose(np.sort(np.concatenate([first, *between])), think, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("order", ["priority", "slo"])
def test_orders_go_by_when_requests_were_sent(order: str) -> None:
    """With one class, by class or by deadline is first come first served."""
    load = ClosedLoad(30, 200.0, lengths=Geometric(20), classes=(RequestClass(deadline_ms=300.0),))
    requests, think = load.sample(600, Streams(1)), load.thinking(600, Streams(1))
    plain, keyed = (serve(requests, ALIKE, replace(ONE, order=Order(name)), 1, think) for name in ("fcfs", order))
    np.testing.assert_array_equal(plain.last_ms, keyed.last_ms)


def test_the_urgent_class_is_answered_first() -> None:
    load = ClosedLoad(30, 200.0, lengths=Geometric(20), classes=(RequestClass(0.5), RequestClass(0.5)))
    requests, think = load.sample(2000, Streams(1)), load.thinking(2000, Streams(1))
    run = serve(requests, ALIKE, replace(ONE, order=Order("priority")), 1, think)
    mean = [float(run.ttft_ms[run.requests.class_id == each].mean()) for each in (0, 1)]
    assert mean[0] < mean[1] / 3


@pytest.mark.parametrize("batching", ["chunked-prefill", "continuous", "selective", "static"])
def test_every_kind_of_engine_serves_users(batching: str) -> None:
    options = EngineSettings(batching=batching, max_num_seqs=8, kv_blocks=2000)
    load = ClosedLoad(20, 100.0, lengths=Geometric(20))
    run = serve(load.sample(500, Streams(2)), COSTS, options, 2, load.thinking(500, Streams(2)))
    assert np.all(run.last_ms >= run.first_ms)
    assert np.all(run.first_ms > run.requests.arrival_ms)
    assert run.counters.generated_tokens == int(run.requests.output_tokens.sum())


@pytest.mark.parametrize("route", ROUTES)
def test_one_routed_engine_is_one_engine(route: str) -> None:
    load = ClosedLoad(20, 100.0, lengths=Geometric(20))
    requests, think = load.sample(500, Streams(2)), load.thinking(500, Streams(2))
    alone = serve(requests, COSTS, ONE, 2, think)
    routed = serve_replicas(requests, COSTS, ONE, Routing(1, route, prefix_share=0.0), 2, think)
    np.testing.assert_array_equal(alone.last_ms, routed.last_ms)


class Users:
    """Slow engines behind a router that looks at how many requests are in each, and users who wait for answers."""

    def __init__(self, engines: list[Engine], requests: list[One], think: list[float], users: int) -> None:
        self.engines, self.think, self.users = engines, think, users
        self.left = requests[users:]
        self.coming = sorted(requests[:users], key=lambda one: one.arrival)
        self.told: set[int] = set()

    def run(self) -> None:
        while self.coming or any(self.busy(each) for each in self.engines):
            plans = [each for each in self.engines if self.busy(each)]
            now = min((self.plans_at(each) for each in plans), default=np.inf)
            if self.coming and self.coming[0].arrival <= now:
                one = self.coming.pop(0)
                counts = [len(each.waiting) + len(each.running) + len(each.coming) for each in self.engines]
                self.engines[int(np.argmin(counts))].coming.append(one)
                continue
            engine = min(plans, key=self.plans_at)
            engine.tick()
            self.answer(engine.running)

    def busy(self, engine: Engine) -> bool:
        return bool(engine.coming or engine.waiting or engine.running)

    def plans_at(self, engine: Engine) -> float:
        alone = not engine.running and not engine.waiting
        return max(engine.now, engine.coming[0].arrival) if alone else engine.now

    def answer(self, ones: list[One]) -> None:
        for one in ones:
            if np.isfinite(one.last) and one.number not in self.told:
                self.told.add(one.number)
                if self.left:
                    following = self.left.pop(0)
                    following.arrival = one.last + self.think[following.number]
                    self.coming.append(following)
                    self.coming.sort(key=lambda each: each.arrival)


@given(seed=st.integers(0, 2**32 - 1))
def test_the_core_does_what_slow_engines_do(seed: int) -> None:
    rng = np.random.default_rng([seed, 1])
    requests, options = random_case(seed)
    n, replicas = len(requests), int(rng.integers(1, 4))
    users = int(rng.integers(1, n + 1))
    think = np.round(rng.exponential(30.0, n) * 8) / 8 + np.arange(n) * 2.0**-20
    requests = make_requests(np.zeros(n), requests.prompt_tokens, requests.output_tokens, user_id=np.arange(n) % users)
    ones = [One(i, float(think[i]), int(requests.prompt_tokens[i]), int(requests.output_tokens[i])) for i in range(n)]
    engines = [Engine(requests, options, slow_cost) for _ in range(replicas)]
    for engine in engines:
        engine.coming, engine.now, engine.busy_until = [], float(think[:users].min()), float(think[:users].min())
    Users(engines, ones, think.tolist(), users).run()
    run = serve_replicas(requests, COSTS, options, Routing(replicas, "least-loaded"), 0, think)
    order = np.argsort([one.arrival for one in ones], kind="stable")
    assert run.counters.steps == sum(each.steps for each in engines)
    np.testing.assert_array_equal(run.requests.arrival_ms, [ones[i].arrival for i in order])
    np.testing.assert_array_equal(run.last_ms, [ones[i].last for i in order])
