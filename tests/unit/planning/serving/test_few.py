"""What rests on few recorded requests, against intervals by counting and against samples drawn again."""

import math
from dataclasses import replace

import numpy as np
import pytest

from latfit.planning.serving.evaluate import Evaluator, Setup
from latfit.planning.serving.few import percentile_interval, share_interval, warn_of_few_requests
from latfit.planning.serving.targets import Goodput, RequestTarget, Targets
from latfit.simulation import EngineSettings, Promise, linear_costs
from latfit.workload import RecordedLoad, make_requests

ENGINE = EngineSettings(kv_blocks=20_000)


def test_the_interval_of_a_percentile_holds_it() -> None:
    """Of exponential times the 99th percentile is ln 100."""
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(400):
        low, high = percentile_interval(rng.standard_exponential(900), 0.99)
        held += low <= math.log(100) <= high
    # 95 % or a little more, as ranks are whole.
    assert 0.93 <= held / 400 <= 0.99


def test_the_interval_of_requests_in_one_queue_is_wider() -> None:
    """Waiting times of M/D/1 at 70 % (Lindley): ranks of independent requests cover their p90 in about 40 % of runs."""
    rng = np.random.default_rng(2)
    gaps = rng.exponential(1 / 0.7, (300, 2000))
    waits = np.zeros(gaps.shape)
    for i in range(1, gaps.shape[1]):
        waits[:, i] = np.maximum(waits[:, i - 1] + 1 - gaps[:, i], 0)
    truth = float(np.quantile(waits[:, 500:], 0.9))
    ends = [percentile_interval(run[-400:], 0.9) for run in waits]
    assert np.mean([low <= truth <= high for low, high in ends]) >= 0.7


@pytest.mark.parametrize(
    ("share", "n", "expected"), [(0.0, 100, (0.0, 1 - 0.025 ** (1 / 100))), (1.0, 10, (0.025**0.1, 1.0))]
)
def test_the_interval_of_a_share(share: float, n: int, expected: tuple[float, float]) -> None:
    """None of n in the closed form of Clopper and Pearson, and all of them."""
    assert share_interval(share, n) == pytest.approx(expected, rel=1e-9)


def recorded(count: int) -> RecordedLoad:
    """Prompts with a heavy tail."""
    rng = np.random.default_rng(2)
    prompts = np.minimum(400 * (1 + rng.pareto(1.5, count)), 60_000).astype(int)
    return RecordedLoad(make_requests(np.sort(rng.uniform(0, 200.0 * count, count)), prompts, 50))


def measured(load: RecordedLoad, limit_ms: float) -> tuple[Evaluator, Setup]:
    targets = Targets((RequestTarget("ttft", limit_ms),))
    return Evaluator(load, linear_costs(9.0, 0.05, 0.05), targets), Setup(ENGINE, 4)


def test_a_limit_that_other_requests_would_miss_is_told() -> None:
    evaluator, setup = measured(recorded(300), 1e9)
    ttft = np.sort(evaluator.measure(setup).first.ttft_ms)
    tight = replace(evaluator, targets=Targets((RequestTarget("ttft", float(ttft[-2])),)))
    (found,) = warn_of_few_requests(tight, tight.measure(setup))
    assert found.message.startswith("p99 TTFT of 300 requests could be")
    assert warn_of_few_requests(evaluator, evaluator.measure(setup)) == []


def test_a_share_of_few_requests() -> None:
    goodput = Goodput(95.0, Promise(ttft_ms=1e9))
    evaluator, setup = measured(recorded(60), 1e9)
    few = replace(evaluator, targets=Targets((), goodput))
    (found,) = warn_of_few_requests(few, few.measure(setup))
    # None of 60 is up to 6 % of all.
    assert "6 %" in found.message
