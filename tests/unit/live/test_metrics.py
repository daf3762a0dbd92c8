"""What Prometheus is told of a router, read back by its own parser."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from latfit.live import QueueFull, Router, RouterMetrics, RouterOptions
from latfit.policies import Limits
from latfit.policies.policy import gpu_only
from tests.unit.live.virtual import ExactExecutor, clock_s

TIMES = [20.0, 30.0]


VIRTUAL_TIME = True


async def test_metrics_of_a_story() -> None:
    """Five requests at 0 ms, one too many: a batch of one ends at 20 ms, batches of two at 50 and 80; one gives up."""
    registry = CollectorRegistry()
    options = RouterOptions(most_waiting=4)
    router = Router([ExactExecutor("gpu", TIMES)], [TIMES], gpu_only(Limits(2)), options, clock_s)
    registry.register(RouterMetrics(router))
    async with router:
        tasks = [asyncio.ensure_future(router.submit(i)) for i in range(5)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await router.submit(5)
        await asyncio.sleep(0.1)
        late = asyncio.ensure_future(router.submit(6))
        await asyncio.sleep(0.001)
        late.cancel()
        await asyncio.gather(*tasks, late, return_exceptions=True)
        text = generate_latest(registry).decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name, sample.labels.get("le", "")] = sample.value
    assert samples["latfit_requests_submitted_total", ""] == 6
    assert samples["latfit_requests_refused_total", ""] == 1
    assert samples["latfit_requests_done_total", ""] == 5
    assert samples["latfit_requests_cancelled_total", ""] == 1
    assert samples["latfit_path_batches_total", ""] == 4
    assert samples["latfit_path_up", ""] == 1
    assert samples["latfit_path_busy_seconds_total", ""] == pytest.approx(0.02 + 0.03 + 0.03)
    within = [samples["latfit_response_seconds_bucket", end] for end in ("0.01", "0.025", "0.05", "0.1", "+Inf")]
    assert within == [0, 1, 3, 5, 5]
    assert samples["latfit_response_seconds_sum", ""] == pytest.approx(0.02 + 2 * 0.05 + 2 * 0.08)
