"""A span for each request, for OpenTelemetry (`opentelemetry-api`; an SDK exports the spans).

A span has path, batch, waiting time and outcome, nothing of the contents.
"""

import math
import time
from asyncio import Future
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from latfit._version import __version__
from latfit.live.router import Router
from latfit.live.waiting import Request

try:  # at the first request, no file descriptor may be left for an import
    from opentelemetry import context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    INSTALLED = False
else:
    INSTALLED = True

SPAN = "latfit.request"


class RequestSpans:
    """Make a span of each request that a router takes from now on. Raises ImportError."""

    def __init__(self, router: Router, provider: Any = None) -> None:
        from opentelemetry import trace

        self._error = trace.StatusCode.ERROR
        self._tracer = trace.get_tracer("latfit", __version__, provider)
        router.arrival_listeners.append(self._arrived)

    def _arrived(self, request: Request) -> None:
        request.future.add_done_callback(partial(self._ended, request, time.time_ns()))  # in the sender's context

    def _ended(self, request: Request, began_ns: int, future: "Future[Any]") -> None:
        error = None if future.cancelled() else future.exception()
        outcome = "cancelled" if future.cancelled() else "served" if error is None else type(error).__name__
        facts: dict[str, Any] = {"latfit.outcome": outcome, "latfit.class": request.class_id}
        if math.isfinite(request.started_ms):
            waited = request.started_ms - request.arrived_ms
            facts |= {"latfit.path": request.path, "latfit.batch": request.batch, "latfit.waited_ms": waited}
        span = self._tracer.start_span(SPAN, start_time=began_ns, attributes=facts)
        if error is not None:
            span.set_status(self._error, outcome)
        span.end()


@contextmanager
def sent_by(headers: Mapping[str, str]) -> Iterator[None]:
    """Put requests sent inside into the trace of the header `traceparent`, if opentelemetry-api is there.

    Other headers of tracing are not read: OpenTelemetry logs their contents where malformed.
    """
    if not INSTALLED:
        yield
        return
    named = {"traceparent": headers.get("traceparent", "")}
    token = context.attach(TraceContextTextMapPropagator().extract(named))
    try:
        yield
    finally:
        context.detach(token)
