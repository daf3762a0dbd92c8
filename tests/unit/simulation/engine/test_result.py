"""Metrics by hand, and the sign of a queue that grows."""

import math
from dataclasses import replace

import numpy as np
import pytest

from latfit.simulation.engine.replications import Replications
from latfit.simulation.engine.result import Promise, grows, jain, meets, summarise
from latfit.simulation.engine.run import EngineRun, serve
from latfit.simulation.engine.settings import EngineSettings
from latfit.simulation.engine.step_cost import linear_costs
from latfit.workload.load import RecordedLoad
from latfit.workload.requests import make_requests

COSTS = linear_costs(10.0, 0.0, 0.0)
"""A step takes 10 ms, whatever is in it."""

PLAIN = EngineSettings(kv_blocks=1000, asynchronous=False, padded_graphs=False)


def two() -> EngineRun:
    """Tokens of the first request at 10, 20, 30 ms; of the second, which comes at 5, at 20 ms only."""
    return serve(make_requests([0.0, 5.0], [8, 8], [3, 1], user_id=[0, 1]), COSTS, PLAIN)


def test_moments_and_metrics_of_two_requests() -> None:
    run = two()
    assert run.ttft_ms.tolist() == [10.0, 15.0]
    assert run.latency_ms.tolist() == [30.0, 15.0]
    assert run.tpot_ms[0] == 10.0
    assert math.isnan(run.tpot_ms[1])
    found = summarise([run])
    assert found.ttft["mean"].value == 12.5
    assert found.throughput_per_s == pytest.approx(2 / 0.030)
    assert found.output_tokens_per_s == pytest.approx(4 / 0.030)
    assert found.utilisation == 1.0
    assert found.useful_share == 1.0
    # Two gaps of 10 ms; a bin is 1/128 of an octave wide.
    assert found.itl["mean"] == 10.0
    assert found.itl["p99"] == pytest.approx(10.0, rel=0.004)
    assert found.itl["max"] == 10.0
    assert found.to_json()["latency_ms"]["ci"]["mean"] is None


def test_distributions_are_of_the_requests_after_the_warm_up() -> None:
    run = serve(make_requests(50.0 * np.arange(41.0), 8, [3] * 20 + [1] + [5] * 20), COSTS, PLAIN)
    found = Replications(RecordedLoad(run.requests), [run, run], 0.5).distributions_ms()
    assert set(found) == {"ttft", "tpot"}
    for name, times in (("ttft", run.ttft_ms[20:]), ("tpot", run.tpot_ms[21:])):  # one token has no time per token
        assert found[name] == pytest.approx(np.quantile(times, np.linspace(0, 1, 101)), rel=1e-5)


def test_jains_index_of_two_users() -> None:
    """Tokens a ms of latency: 3/30 and 1/15."""
    x, y = 3 / 30, 1 / 15
    assert jain(two()) == pytest.approx((x + y) ** 2 / (2 * (x**2 + y**2)))


def test_goodput_counts_who_got_everything() -> None:
    run = two()
    assert meets(run, Promise()).tolist() == [True, True]
    assert meets(run, Promise(ttft_ms=12.0)).tolist() == [True, False]
    assert meets(run, Promise(tpot_ms=9.0)).tolist() == [False, True]
    assert meets(run, Promise(latency_ms=20.0)).tolist() == [False, True]
    found = summarise([run], Promise(ttft_ms=12.0))
    assert found.slo_attainment == 0.5
    assert found.goodput_per_s == pytest.approx(1 / 0.030)
    own = replace(run, requests=replace(run.requests, deadline_ms=np.array([29.0, np.inf])))
    assert meets(own, Promise()).tolist() == [False, True]


def test_classes_are_told_apart() -> None:
    run = two()
    own = replace(run, requests=replace(run.requests, class_id=np.array([0, 1], dtype=np.int32)))
    assert summarise([run]).by_class == []
    first, second = summarise([own, own], Promise(ttft_ms=12.0)).by_class
    assert (first.requests, first.ttft["mean"], first.slo_attainment) == (2, 10.0, 1.0)
    assert (second.requests, second.latency["p99"], second.slo_attainment) == (2, 15.0, 0.0)


def test_an_overloaded_engine_is_recognised() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(50, 100, 600), rng.integers(10, 30, 600)
    narrow = replace(PLAIN, max_num_seqs=4)
    # Four at a time, about 20 steps of 10 ms each: 20 requests/s.
    over, under = (
        serve(make_requests(np.cumsum(rng.exponential(gap, 600)), *lengths), COSTS, narrow) for gap in (25.0, 100.0)
    )
    assert grows([over])
    assert not grows([under])
    assert not summarise([over]).stable


def test_queue_and_cache_are_averaged_over_busy_time() -> None:
    """Steps of 10 ms hold 1, 2 and 1 blocks of 999; three requests one after another leave 2, 1 and 0 waiting."""
    assert summarise([two()]).kv_usage == pytest.approx(4 / 3 / 999)
    alone = replace(PLAIN, max_num_seqs=1)
    assert summarise([serve(make_requests([0.0, 0.0, 0.0], 8, 1), COSTS, alone)]).queue == pytest.approx(1.0)
