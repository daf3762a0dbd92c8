"""Classes of requests: Cobham's waits of priorities without preemption, and what deadlines make of late requests."""

from dataclasses import replace

import numpy as np
import pytest

from latfit.simulation.engine.run import EngineRun, serve
from latfit.simulation.engine.settings import EngineSettings, Order
from latfit.simulation.engine.step_cost import linear_costs
from latfit.workload.requests import Requests, make_requests

STEP_MS = 2.0
COSTS = linear_costs(STEP_MS, 0.0, 0.0)
ONE = EngineSettings(max_num_seqs=1, kv_blocks=1001, asynchronous=False, padded_graphs=False)


def two_classes(n: int, rho: float, deadlines: tuple[float, float], seed: int = 1, tokens: int = 4) -> Requests:
    """Poisson arrivals of requests of `tokens` steps, three in ten of them of the urgent class."""
    rng = np.random.default_rng(seed)
    which = (rng.random(n) > 0.3).astype(np.int32)
    arrivals = np.cumsum(rng.exponential(tokens * STEP_MS / rho, n))
    return make_requests(arrivals, 1, tokens, class_id=which, deadline_ms=np.array(deadlines)[which])


def waits(run: EngineRun) -> list[float]:
    """Mean wait of each class, ms."""
    wait = run.start_ms - run.requests.arrival_ms
    return [float(wait[run.requests.class_id == each].mean()) for each in (0, 1)]


@pytest.mark.parametrize("order", ["priority", "slo"])
def test_waits_of_two_classes_are_those_of_cobham(order: str) -> None:
    """W_0 = lambda S^2 / 2; W_1 = W_0 / (1 - rho_1), W_2 = W_0 / ((1 - rho_1) (1 - rho)) (Cobham 1954). Deadlines that
    are over at once are an order by class."""
    rho, S = 0.8, 4 * STEP_MS
    run = serve(two_classes(300_000, rho, (1e-6, 1e-6)), COSTS, replace(ONE, order=Order(order)))
    first, second = waits(run)
    at_work = rho * S / 2
    assert first == pytest.approx(at_work / (1 - 0.3 * rho), rel=0.02)
    assert second == pytest.approx(at_work / ((1 - 0.3 * rho) * (1 - rho)), rel=0.05)


def test_priorities_conserve_the_work() -> None:
    """Kleinrock's conservation law: sum of rho_k W_k is the same in every order that is not idle while one waits."""
    requests = two_classes(50_000, 0.9, (40.0, 400.0))
    found = [waits(serve(requests, COSTS, replace(ONE, order=Order(name)))) for name in ("fcfs", "slo", "priority")]
    sums = [np.dot(np.bincount(requests.class_id), each) for each in found]
    assert sums[1] == pytest.approx(sums[0], rel=1e-9)
    assert sums[2] == pytest.approx(sums[0], rel=1e-9)


def test_deadlines_that_can_be_met_are_met_in_their_order() -> None:
    """Three wait behind one: the earliest deadline is first, whatever its class."""
    requests = make_requests([0.0, 1.0, 2.0, 3.0], 1, 10, class_id=[0, 1, 0, 1], deadline_ms=[1e3, 900.0, 800.0, 700.0])
    run = serve(requests, COSTS, replace(ONE, order=Order("slo")))
    assert np.argsort(run.start_ms).tolist() == [0, 3, 2, 1]


def test_of_late_requests_the_urgent_class_is_first() -> None:
    """All deadlines but the last one's have passed when the first request ends, at 20 ms."""
    requests = make_requests(
        [0.0, 1.0, 2.0, 3.0, 4.0], 1, 10, class_id=[0, 1, 1, 0, 0], deadline_ms=[5.0, 5.0, 5.0, 9.0, 300.0]
    )
    run = serve(requests, COSTS, replace(ONE, order=Order("slo")))
    assert np.argsort(run.start_ms).tolist() == [0, 3, 1, 2, 4]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("rho", [0.95, 1.2])
def test_deadlines_of_50_and_200_ms_tell_classes_apart(rho: float, fast: bool) -> None:
    """Beyond capacity everybody is late; then, too, the class with the shorter deadline is served sooner."""
    requests = two_classes(20_000, rho, (50.0, 200.0), tokens=10)
    options = EngineSettings(max_num_seqs=8, kv_blocks=1001, order=Order("slo"), fast=fast)
    run = serve(requests, linear_costs(8 * STEP_MS, 0.0, 0.0), options)
    p99 = [float(np.quantile(run.latency_ms[requests.class_id == each], 0.99)) for each in (0, 1)]
    assert p99[0] < 0.6 * p99[1]
