"""Spans of a story, as OpenTelemetry's own exporter has them."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed (latfit[dev])")
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from latfit.live import RequestSpans, Router, RouterOptions, sent_by
from latfit.policies import Limits
from latfit.policies.policy import gpu_only
from tests.unit.live.virtual import ExactExecutor, clock_s, on_virtual_time

TIMES = [20.0, 30.0]


class Fails(ExactExecutor):
    async def execute(self, inputs: list[Any]) -> Sequence[Any]:
        await super().execute(inputs)
        if "secret" in inputs:
            raise ValueError("no such word: secret")
        return inputs


def spans_of(story: Any) -> tuple[Sequence[ReadableSpan], TracerProvider]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def main() -> None:
        router = Router([Fails("gpu", TIMES)], [TIMES], gpu_only(Limits(2)), RouterOptions(), clock_s)
        RequestSpans(router, provider)
        async with router:
            await story(router, provider.get_tracer("sender"))

    on_virtual_time(main())
    return exporter.get_finished_spans(), provider


def test_spans_tell_path_batch_waiting_and_end() -> None:
    """One runs alone for 20 ms; the next two wait for it; a fourth waits for them and gives up."""

    async def story(router: Router, _: Any) -> None:
        tasks = [asyncio.ensure_future(router.submit(word)) for word in ("first", "second", "secret")]
        await asyncio.sleep(0.021)
        left = asyncio.ensure_future(router.submit("left"))
        await asyncio.sleep(0.001)
        left.cancel()
        await asyncio.gather(*tasks, left, return_exceptions=True)

    found, _ = spans_of(story)
    assert {each.name for each in found} == {"latfit.request"}
    told = [dict(each.attributes or {}) for each in found]
    base = {"latfit.class": 0, "latfit.path": "gpu"}
    assert {**base, "latfit.outcome": "served", "latfit.batch": 1, "latfit.waited_ms": 0.0} in told
    failed = [each for each in told if each["latfit.outcome"] == "ExecutorFailed"]
    assert [each["latfit.batch"] for each in failed] == [2, 2]
    assert [each["latfit.waited_ms"] for each in failed] == pytest.approx([20.0, 20.0])
    assert {"latfit.outcome": "cancelled", "latfit.class": 0} in told
    assert len(told) == 4
    assert [each.status.is_ok for each in found if each.attributes == failed[0]] == [False] * 2
    assert "secret" not in "".join(each.to_json() for each in found)


def test_a_trace_goes_on_from_the_headers_of_a_request() -> None:
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

    async def story(router: Router, _: Any) -> None:
        with sent_by({"traceparent": f"00-{trace_id}-{parent}-01"}):
            sent = asyncio.ensure_future(router.submit("x"))
        await sent
        await router.submit("y")

    first, second = spans_of(story)[0]
    assert first.context is not None
    assert first.parent is not None
    assert (f"{first.context.trace_id:032x}", f"{first.parent.span_id:016x}") == (trace_id, parent)
    assert second.parent is None
