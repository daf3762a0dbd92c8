"""The HTTP front: check requests of OpenAI's API, route them, and answer from one of the engines.

Errors have the shape that OpenAI's clients read. Nothing that a user sent is kept or logged. Bodies are read before
they are routed, within limits of size, time and memory, and are never copied.
"""

import asyncio
import hmac
import json
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import web
from multidict import CIMultiDict
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from latfit.errors import LatfitError
from latfit.live.executor import Abandoned, ExecutorFailed, ExecutorLost, ExecutorTimedOut
from latfit.live.front.exchange import HEADER_VALUE, Exchange, Headers, HttpExecutor, RequestInvalid
from latfit.live.metrics import BUCKETS_S, RouterMetrics
from latfit.live.router import Closed, NoPath, QueueFull, Router
from latfit.live.tracing import sent_by

TARGET = re.compile(r"/[!\"$-~]*")  # path and query (origin-form of RFC 9112), without host or fragment

HTTP_1 = web.RequestKey("http_1", bool)  # whether the request names version 1.0 or 1.1
MAX_MODELS_BYTES = 1 << 20  # of the answer to /v1/models
MAX_PARSED_BYTES = 256 << 10  # of a body that is parsed as JSON: a millisecond's work
MAX_RETRY_S = 60
CLASS = "x-latfit-class"  # header that names the class of a request


@dataclass(frozen=True)
class FrontOptions:
    token: str | None = None  # callers must send it; None accepts anybody
    most_bytes: int = 8 << 20  # of a request's body
    most_held_bytes: int = 256 << 20  # of all bodies that are read, wait or run
    body_s: float = 30.0  # in which a body must come
    classes: Sequence[str] = ()  # of the router, the most urgent first; a request that names none is of the last


class Refused(Exception):
    """An error that the front answers itself. kind: its type, as OpenAI names them."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", **headers: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def answer(self) -> web.Response:
        error = {"message": str(self), "type": self.kind, "param": None, "code": HTTPStatus(self.status).name.lower()}
        return web.json_response({"error": error}, status=self.status, headers=self.headers)


STATUS: Mapping[type[LatfitError], int] = {
    QueueFull: 429,
    NoPath: 503,
    Closed: 503,
    RequestInvalid: 400,
    ExecutorTimedOut: 504,
    ExecutorFailed: 502,
}
"""Status for a request that no engine answered; the first that fits."""


class Front:
    """Answer HTTP requests from a router whose executors are engines."""

    def __init__(self, router: Router, options: FrontOptions = FrontOptions()) -> None:
        self.router, self.options = router, options
        self.engines = [path.executor for path in router.paths if isinstance(path.executor, HttpExecutor)]
        self.draining = False  # refuse new requests, serve accepted ones
        self.held_bytes = 0  # of bodies in memory
        self._routes: dict[str, tuple[str, Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]]] = {
            "/v1/completions": ("POST", self._complete),
            "/v1/chat/completions": ("POST", self._complete),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
        }
        registry = self.registry = CollectorRegistry()
        registry.register(RouterMetrics(router))
        self._answers = Counter("latfit_http_answers", "Answers by status", ["code"], registry=registry)
        self._retried = Counter("latfit_requests_retried", "Requests that a second engine got", registry=registry)
        held = Gauge("latfit_held_bytes", "Bodies of requests in memory", registry=registry)
        held.set_function(lambda: self.held_bytes)
        to_byte = "From a request's way to the engine to the first byte of its reply"
        self._first_byte = Histogram(
            "latfit_first_byte_seconds", to_byte, ["path"], buckets=BUCKETS_S, registry=registry
        )
        to_end = "From a request's body to the end of its reply, by the class that it is of"
        self._by_class = Histogram("latfit_class_seconds", to_end, ["class"], buckets=BUCKETS_S, registry=None)
        if options.classes:
            registry.register(self._by_class)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request of `aiohttp.web.Server`."""
        try:
            answer = await self._route(request)
        except Refused as refused:
            answer = refused.answer()
            if not request.content.is_eof():
                answer.force_close()
        self._answers.labels(str(answer.status)).inc()
        return answer

    def answer_when_full(self) -> bytes:
        """Return the 503 for a connection that is closed before its request is read."""
        full = "this server has too many connections"
        answer = Refused(503, full, "server_error", retry_after="1", connection="close").answer()
        self._answers.labels(str(answer.status)).inc()
        headers = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
        assert isinstance(answer.body, bytes)
        head = f"HTTP/1.1 {answer.status} {answer.reason}\r\n{headers}Content-Length: {len(answer.body)}\r\n\r\n"
        return head.encode() + answer.body

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        if not request.get(HTTP_1, True):
            raise Refused(505, "HTTP/1.0 and HTTP/1.1 only", connection="close")
        if not TARGET.fullmatch(request.raw_path):
            raise Refused(400, "the target is not a path that begins with / and its query", connection="close")
        path = request.rel_url.raw_path
        if path != "/health":
            self._check_token(request)
        route = self._routes.get(path)
        if route is None:
            raise Refused(404, f"no such path; try {', '.join(self._routes)}")
        method, answer = route
        if request.method != method:
            raise Refused(405, f"{method} only", allow=method)
        return await answer(request)

    def _check_token(self, request: web.BaseRequest) -> None:
        if self.options.token is None:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self.options.token.encode())
        if kind.lower() != "bearer" or not same:
            raise Refused(401, "a valid token is needed", www_authenticate="Bearer")

    async def _complete(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.draining:
            raise Refused(503, "this server is shutting down", "server_error", retry_after="1", connection="close")
        headers, class_id = self._headers(request), self._class_of(request)
        body: list[bytes] = []
        try:
            await self._read(request, body)
            began, exchange = time.monotonic(), Exchange(request, request.rel_url, headers, body)
            await self._serve(exchange, class_id)
            if self.options.classes:
                self._by_class.labels(self.options.classes[class_id]).observe(time.monotonic() - began)
            assert exchange.reply is not None
            return exchange.reply
        finally:
            self.held_bytes -= sum(map(len, body))

    def _class_of(self, request: web.BaseRequest) -> int:
        classes = self.options.classes
        name = request.headers.get(CLASS)
        if not classes or name is None:
            return max(len(classes) - 1, 0)
        if name not in classes:
            raise Refused(400, f"the header {CLASS} names none of the classes {', '.join(classes)}")
        return classes.index(name)

    def _headers(self, request: web.BaseRequest) -> Headers:
        """Leave out a token that this server checks."""
        own = () if self.options.token is None else ("authorization",)
        found = [(name, value) for name, value in request.headers.items() if name.lower() not in own]
        if not all(HEADER_VALUE.fullmatch(value) for _, value in found):
            raise Refused(400, "a header is not UTF-8")
        return found

    async def _read(self, request: web.BaseRequest, body: list[bytes]) -> None:
        most = self.options.most_bytes
        plain = {"content-encoding": "identity", "transfer-encoding": "chunked"}
        if any(each.lower() != plain[name] for name in plain for each in request.headers.getall(name, ())):
            raise Refused(415, "a body must come without a content-encoding")
        if (request.content_length or 0) > most:
            raise Refused(413, f"a body may have {most:,} bytes")
        if request.headers.get("expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # as aiohttp's own servers do: nothing of the answer is out
        total = 0
        try:
            async with asyncio.timeout(self.options.body_s):
                while piece := await request.content.readany():
                    total += len(piece)
                    if total > most:
                        raise Refused(413, f"a body may have {most:,} bytes")
                    if self.held_bytes + len(piece) > self.options.most_held_bytes:
                        raise Refused(429, "too many bytes wait", "rate_limit_error", retry_after=self._retry_s())
                    body.append(piece)
                    self.held_bytes += len(piece)
        except TimeoutError:
            raise Refused(408, f"the body did not come within {self.options.body_s:g} s") from None
        except web.RequestPayloadError:
            raise Refused(400, "the body is incomplete, or not valid HTTP") from None
        if not _is_object(body, total):
            raise Refused(400, "the body is not a JSON object")

    async def _serve(self, exchange: Exchange, class_id: int) -> None:
        """Route a request, also to a second engine if one is lost before its reply began."""
        exchange.final = len(self.engines) < 2

        def retry(error: BaseException) -> bool:
            if exchange.final or exchange.reply is not None or not isinstance(error, ExecutorLost):
                return False
            exchange.final = True
            self._retried.inc()
            return True

        try:
            with sent_by(exchange.request.headers):
                await self.router.submit(exchange, class_id, retry=retry)
        except asyncio.CancelledError:
            exchange.leave()
            raise
        except (QueueFull, NoPath, Closed, ExecutorFailed) as error:
            if exchange.reply is None:
                raise self._refusal(error) from None
            if not exchange.whole and exchange.request.transport is not None:
                exchange.request.transport.abort()  # shows the reader that the reply is not whole
        if exchange.first_byte_s:
            self._first_byte.labels(exchange.path).observe(exchange.first_byte_s)

    def _refusal(self, error: LatfitError) -> Refused:
        status = next(status for kind, status in STATUS.items() if isinstance(error, kind))
        kind = {400: "invalid_request_error", 429: "rate_limit_error"}.get(status, "server_error")
        where = f"{error.where}: " if error.where else ""
        later = {"retry_after": self._retry_s()} if status in (429, 503) else {}
        return Refused(status, f"{where}{error.found}", kind, **later)

    def _retry_s(self) -> str:
        path = self.router.main
        wait_s = self.router.waiting * float(path.times_ms[1]) / path.executor.servers / 1000
        return str(max(1, min(math.ceil(wait_s), MAX_RETRY_S)))

    async def _models(self, request: web.BaseRequest) -> web.Response:
        up, headers = self.router.up(), self._headers(request)
        try:
            for engine in sorted(self.engines, key=lambda each: not up[each.name]):
                with suppress(ExecutorLost):
                    status, theirs, body = await engine.fetch(request.rel_url, headers, MAX_MODELS_BYTES)
                    return web.Response(status=status, body=body, headers=CIMultiDict(theirs))
        except Abandoned as error:
            raise self._refusal(error) from None
        raise Refused(502, "no engine answers", "server_error")

    async def _health(self, request: web.BaseRequest) -> web.Response:
        up = self.router.up()
        status = "draining" if self.draining else "ready" if any(up.values()) else "down"
        counts = {"waiting": self.router.waiting, "running": self.router.running}
        state = {"status": status, "policy": self.router.policy.name, **counts, "paths": up}
        answer = web.json_response(state, status=200 if status == "ready" else 503)
        answer.force_close()  # anybody may ask for it, without a token
        return answer

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        return web.Response(body=generate_latest(self.registry), headers={"Content-Type": "text/plain; version=0.0.4"})


def _is_object(body: Sequence[bytes], size: int) -> bool:
    """Return whether a body can be a JSON object; of a large one only both ends are read."""
    if size > MAX_PARSED_BYTES:
        first, last = (next((each for each in pieces if not each.isspace()), b"") for pieces in (body, body[::-1]))
        return first.lstrip()[:1] == b"{" and last.rstrip()[-1:] == b"}"
    try:
        return isinstance(json.loads(b"".join(body)), dict)
    except (ValueError, RecursionError):
        return False
