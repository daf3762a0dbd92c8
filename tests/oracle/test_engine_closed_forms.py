"""One request at a time is a single server: Pollaczek and Khinchine's formula; and what orders are known to do."""

from dataclasses import replace

import numpy as np
import pytest

from latfit.simulation.engine.result import jain
from latfit.simulation.engine.run import serve
from latfit.simulation.engine.settings import EngineSettings, Order
from latfit.simulation.engine.step_cost import linear_costs
from latfit.stats import FloatArray
from latfit.workload.requests import make_requests

STEP_MS = 2.0
ONE = EngineSettings(max_num_seqs=1, kv_blocks=1001, asynchronous=False, padded_graphs=False)
BATCHES = 50


def waits(output: "np.ndarray[tuple[int], np.dtype[np.int64]]", rho: float, seed: int) -> FloatArray:
    """Waiting times (n,) at utilisation rho; a request of k tokens takes k steps."""
    rng = np.random.default_rng(seed)
    gap = STEP_MS * float(output.mean()) / rho
    requests = make_requests(np.cumsum(rng.exponential(gap, len(output))), 1, output)
    run = serve(requests, linear_costs(STEP_MS, 0.0, 0.0), ONE)
    return np.asarray(run.start_ms - requests.arrival_ms)


@pytest.mark.parametrize("law", ["deterministic", "geometric"])
def test_the_mean_wait_is_that_of_a_single_server(law: str) -> None:
    """W = lambda E[S^2] / (2 (1 - rho)), with Poisson arrivals and any law of service."""
    n, rho = 400_000, 0.7
    rng = np.random.default_rng(1)
    output = np.full(n, 4) if law == "deterministic" else rng.geometric(0.25, n)
    mean = STEP_MS * 4.0
    square = mean**2 if law == "deterministic" else STEP_MS**2 * (2 - 0.25) / 0.25**2
    expected = rho / mean * square / (2 * (1 - rho))
    found = waits(np.asarray(output, dtype=np.int64), rho, 2)[n // 20 :]
    batches = found[: len(found) // BATCHES * BATCHES].reshape(BATCHES, -1).mean(axis=1)
    error = float(batches.std(ddof=1) / np.sqrt(BATCHES))
    assert float(batches.mean()) == pytest.approx(expected, abs=4 * error)
    assert error < 0.03 * expected


def test_shortest_first_shortens_the_mean_and_not_the_work() -> None:
    rng = np.random.default_rng(3)
    requests = make_requests(np.cumsum(rng.exponential(10.0, 5000)), 1, rng.geometric(0.25, 5000))
    costs = linear_costs(STEP_MS, 0.0, 0.0)
    fcfs, sjf = (serve(requests, costs, replace(ONE, order=Order(name))) for name in ("fcfs", "sjf"))
    assert sjf.latency_ms.mean() < fcfs.latency_ms.mean()
    assert sjf.busy_ms == pytest.approx(fcfs.busy_ms)
    # One server that is never idle while somebody waits ends its work at the same moment in any order.
    assert sjf.last_ms.max() == fcfs.last_ms.max()


def test_fair_order_protects_a_light_user_from_a_heavy_one() -> None:
    """A user sends 300 requests at once, another one every 200 ms."""
    arrivals = np.concatenate([np.zeros(300), np.arange(1, 21) * 200.0])
    user = np.concatenate([np.zeros(300), np.ones(20)])
    order = np.argsort(arrivals, kind="stable")
    requests = make_requests(arrivals[order], 8, 10, user_id=user[order])
    costs = linear_costs(STEP_MS, 0.0, 0.0)
    settings = replace(ONE, max_num_seqs=2)
    fcfs, fair = (serve(requests, costs, replace(settings, order=Order(name))) for name in ("fcfs", "fair"))
    light = requests.user_id == 1
    assert fair.ttft_ms[light].max() < 50.0 < fcfs.ttft_ms[light].mean()
    assert 0.5 <= jain(fcfs) <= 1.0
    assert fair.latency_ms[light].mean() < fcfs.latency_ms[light].mean() / 5
