"""The same customers through Ciw, another simulator of queues: equal response times, one customer after the other."""

from collections.abc import Iterator

import numpy as np
import pytest

from latfit.policies import policy as policies
from latfit.policies.policy import Limits
from latfit.simulation.policies.replication import draw, run
from latfit.simulation.policies.service import ServicePath, System, table_path
from latfit.stats import FloatArray
from latfit.workload.arrivals import Gamma, Poisson
from latfit.workload.load import OpenLoad, RequestClass
from latfit.workload.random_streams import SERVICE, Streams

ciw = pytest.importorskip("ciw")
pytestmark = pytest.mark.filterwarnings(
    "ignore:Pickle, copy, and deepcopy support:DeprecationWarning"
)  # of Ciw's, from 3.12
GREEDY = policies.gpu_only(Limits(1))
N = 1500


def given(values: Iterator[float]) -> object:
    """Ciw takes these values one after the other; there are no arrivals behind the last."""
    return ciw.dists.Sequential([*values, float("inf")])


def ciw_responses(gaps: FloatArray, servers: int, service: object) -> FloatArray:
    network = ciw.create_network(
        arrival_distributions=[given(iter(gaps.tolist()))],
        service_distributions=[service],
        number_of_servers=[servers],
    )
    simulation = ciw.Simulation(network)
    simulation.simulate_until_max_customers(len(gaps), method="Finish")
    records = sorted(simulation.get_all_records(), key=lambda record: record.arrival_date)
    return np.array([record.exit_date - record.arrival_date for record in records])


@pytest.mark.parametrize("servers", [1, 3])
def test_deterministic_service(servers: int) -> None:
    system, streams = System(table_path("cpu", [2.0], servers=servers)), Streams(4)
    drawn = draw(OpenLoad(Gamma(0.4 * servers, 1.5)), N, 0.0, system, streams)
    found = run(GREEDY, system, drawn, streams)
    theirs = ciw_responses(np.diff(drawn.load.arrive, prepend=0.0), servers, ciw.dists.Deterministic(2.0))
    assert found.response_ms[: len(theirs)] == pytest.approx(theirs, abs=1e-6)
    assert len(theirs) == N


@pytest.mark.parametrize("servers", [1, 4])
def test_exponential_service(servers: int) -> None:
    """Ciw is given our service times in the order of their starts."""
    path = table_path("cpu", [2.0], servers=servers, exponential=True)
    system, streams = System(path), Streams(5)
    drawn = draw(OpenLoad(Poisson(0.4 * servers)), N, 0.0, system, streams)
    found = run(GREEDY, system, drawn, streams)
    u = Streams(5).generator(SERVICE, 0).random(N)
    theirs = ciw_responses(
        np.diff(drawn.load.arrive, prepend=0.0), servers, ciw.dists.Sequential((-2 * np.log1p(-u)).tolist())
    )
    assert found.response_ms[: len(theirs)] == pytest.approx(theirs, abs=1e-6)
    assert len(theirs) == N


def test_priority_classes() -> None:
    """Means of two classes under strict priority, against Ciw on its own random numbers, within standard errors."""
    rate, shares = 0.35, (0.3, 0.7)
    path: ServicePath = table_path("cpu", [2.0], exponential=True)
    load = OpenLoad(Poisson(rate), classes=(RequestClass(shares[0]), RequestClass(shares[1])))
    ours, theirs = [], []
    for seed in range(8):
        streams = Streams(seed)
        drawn = draw(load, 4000, 0.0, System(path), streams)
        found = run(GREEDY, System(path), drawn, streams)
        ours.append([found.response_ms[600:][drawn.load.class_id[600:] == c].mean() for c in range(2)])
        ciw.seed(seed)
        network = ciw.create_network(
            arrival_distributions={
                "a": [ciw.dists.Exponential(rate * shares[0])],
                "b": [ciw.dists.Exponential(rate * shares[1])],
            },
            service_distributions={"a": [ciw.dists.Exponential(0.5)], "b": [ciw.dists.Exponential(0.5)]},
            number_of_servers=[1],
            priority_classes={"a": 0, "b": 1},
        )
        simulation = ciw.Simulation(network)
        simulation.simulate_until_max_time(4000 / rate)
        records = [record for record in simulation.get_all_records() if record.arrival_date > 600 / rate]
        times = {name: [r.exit_date - r.arrival_date for r in records if r.customer_class == name] for name in "ab"}
        theirs.append([np.mean(times[name]) for name in "ab"])
    a, b = np.array(ours), np.array(theirs)
    error = np.sqrt((a.var(axis=0, ddof=1) + b.var(axis=0, ddof=1)) / 8)
    assert np.all(np.abs(a.mean(axis=0) - b.mean(axis=0)) < 5.5 * error)
