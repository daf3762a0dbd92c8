"""An engine with OpenAI's HTTP API as an executor.

A batch is one request, `servers` is how many an engine serves at a time, and T(1) is the time up to the last byte of a
reply. Until the reply begins, another engine may serve the request. If the caller leaves, the engine is stopped.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from latfit.errors import no_address, refuse
from latfit.live.executor import Abandoned, Executor, ExecutorFailed, ExecutorLost, ExecutorTimedOut

HOP_BY_HOP = frozenset(("connection", "expect", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"))
UNAVAILABLE = frozenset((429, 502, 503, 504))  # statuses of an engine that accepts nothing now; another one may
BROKEN = frozenset((*UNAVAILABLE, 500))  # statuses that count as a failed batch
KEEP_ALIVE_S = 2.0  # of an idle connection to an engine, less than engines keep it
STALE_S = 1.0  # a disconnect sooner means that the engine had closed the kept connection: send again on a new one
SERVED_BY = "x-latfit-path"  # header of a reply: its path
MAX_SLOTS = 1024  # more than engines take at a time; a decision looks at each
MAX_FETCHES = 4  # concurrent calls of `fetch`, which need no slot
HEALTH = URL("/health")

Headers = Sequence[tuple[str, str]]
HEADER_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]*")
"""Values that aiohttp can send: UTF-8 (it decodes other bytes to lone surrogates) without control characters."""


@dataclass(frozen=True)
class HttpTimeouts:
    """Limits in seconds."""

    connect_s: float = 5.0  # until a connection to the engine is open
    first_byte_s: float = 300.0  # until the body of the reply begins; if it is not streamed, until it is complete
    between_s: float = 60.0  # from one piece of the body to the next, on either side
    probe_s: float = 2.0  # until GET /health is answered


class RequestInvalid(Abandoned):
    """A request cannot be written as HTTP to the engine; no byte of it was sent."""


@dataclass(eq=False)
class Exchange:
    """A caller's request, and how far the reply has come."""

    request: web.BaseRequest
    target: URL  # path and query
    headers: Headers
    body: Sequence[bytes]
    final: bool = True  # no other engine will be tried, so a reply with a status in UNAVAILABLE is passed on
    reply: web.StreamResponse | None = None  # None before it begins
    whole: bool = False  # all of the reply was passed on
    path: str = ""  # name of the engine
    first_byte_s: float = 0.0  # until the first byte of the reply's body, 0 before
    has_left: bool = False  # the caller
    is_sending: bool = False  # a piece that the caller does not take yet
    work: "asyncio.Task[Any] | None" = field(default=None, repr=False)

    def leave(self) -> None:
        """Stop the engine: the caller is gone."""
        self.has_left = True
        if self.work is not None:
            self.work.cancel()

    async def begin(self, status: int, headers: Headers) -> None:
        self.reply = web.StreamResponse(status=status, headers=CIMultiDict(headers))
        await self._write(self.reply.prepare(self.request))

    async def send(self, piece: bytes) -> None:
        assert self.reply is not None
        self.is_sending = True
        await self._write(self.reply.write(piece))
        self.is_sending = False

    async def _write(self, writing: Awaitable[Any]) -> None:
        try:
            await writing
        except (ConnectionError, aiohttp.ClientError) as error:
            raise Abandoned("the caller left", remedy="No action needed: the engine was stopped.") from error


def forwarded_headers(headers: Iterable[tuple[str, str]], drop: Iterable[str] = ()) -> list[tuple[str, str]]:
    """Return the headers for the next hop. drop: names of others to leave out, in lower case."""
    valid = [each for each in headers if HEADER_VALUE.fullmatch(each[1])]
    named = {each.strip().lower() for name, value in valid if name.lower() == "connection" for each in value.split(",")}
    gone = HOP_BY_HOP | named | set(drop)
    return [each for each in valid if each[0].lower() not in gone and not each[0].lower().startswith("proxy-")]


class HttpExecutor(Executor):
    """An engine over HTTP. Its inputs are exchanges.

    overdue_s: if a caller leaves after this time without a byte, the engine counts as hung.  headers: sent with each
    request in place of its own of that name.
    """

    is_probed = True

    def __init__(
        self,
        name: str,
        url: str,
        slots: int = 1,
        timeouts: HttpTimeouts = HttpTimeouts(),
        *,
        overdue_s: float = 30.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(name, 1, slots)
        self.url, self.timeouts = _parse_url(url), timeouts
        is_name, remedy = re.fullmatch(r"[\w.-]+", name), "Take letters and digits: gpu, cpu-2."
        refuse(not is_name, f"{name!r} is no name of an engine", "URL", remedy)
        refuse(slots > MAX_SLOTS, f"{slots} slots", name, f"Give at most {MAX_SLOTS:,}.")
        self._overdue_s, self._headers = overdue_s, dict(headers or {})
        self._sessions: list[aiohttp.ClientSession] = []  # the first keeps connections, the second does not

    @property
    def max_connections(self) -> int:
        """One a slot, those of `fetch`, and the probe."""
        return self.servers + MAX_FETCHES + 1

    async def start(self) -> None:
        self._fetches = asyncio.Semaphore(MAX_FETCHES)
        for keep_s in (KEEP_ALIVE_S, None)[len(self._sessions) :]:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=keep_s, force_close=keep_s is None)
            session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.timeouts.connect_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
            self._sessions.append(session)

    async def execute(self, inputs: list[Any]) -> Sequence[Any]:
        exchange: Exchange = inputs[0]
        loop, exchange.path, exchange.work = asyncio.get_running_loop(), self.name, asyncio.current_task()
        began = loop.time()
        if exchange.has_left:
            raise self._too_late(exchange, 0.0)
        try:
            await self._exchange(exchange, began)
        except aiohttp.ClientError as error:
            raise self._failure(error, "its reply broke off" if exchange.reply is not None else "not served") from error
        except (TimeoutError, asyncio.CancelledError) as error:
            if not exchange.has_left and isinstance(error, asyncio.CancelledError):  # by the router
                raise
            raise self._too_late(exchange, loop.time() - began) from error
        if exchange.reply is not None and exchange.reply.status in BROKEN:
            remedy = "Its answer was passed on; see its log."
            raise ExecutorFailed(f"it answered {exchange.reply.status}", where=self.name, remedy=remedy)
        return [None]

    async def answers(self) -> bool:
        """Return whether GET /health is answered in time, with any status but 503."""
        try:
            async with asyncio.timeout(self.timeouts.probe_s):
                async with self._sessions[-1].get(self._address(HEALTH), allow_redirects=False) as answer:
                    return answer.status != HTTPStatus.SERVICE_UNAVAILABLE
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def fetch(self, target: URL, headers: Headers, most_bytes: int) -> tuple[int, Headers, bytes]:
        """Return status, headers and body of a small answer to GET. Raises ExecutorLost or Abandoned."""
        body, request = b"", self._request(self._sessions[-1], "GET", target, headers)
        try:
            async with asyncio.timeout(self.timeouts.connect_s), self._fetches, request as answer:
                async for piece in answer.content.iter_any():
                    body += piece
                    if len(body) > most_bytes:
                        raise self._lost(f"not served: its answer has more than {most_bytes:,} bytes")
                return answer.status, forwarded_headers(answer.headers.items(), ("content-length",)), body
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._failure(error, "not served") from error

    async def close(self) -> None:
        sessions, self._sessions = self._sessions, []
        for session in sessions:
            await session.close()

    async def _exchange(self, exchange: Exchange, began: float) -> None:
        """Use a kept connection, or a new one if the engine had just closed that."""
        kept, fresh = self._sessions
        try:
            await self._exchange_on(kept, exchange, began)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            is_stale = asyncio.get_running_loop().time() - began < STALE_S
            if exchange.reply is not None or not is_stale or isinstance(error, aiohttp.ClientConnectorError):
                raise
            await self._exchange_on(fresh, exchange, began)

    async def _exchange_on(self, session: aiohttp.ClientSession, exchange: Exchange, began: float) -> None:
        now = asyncio.get_running_loop().time
        request = self._request(session, "POST", exchange.target, exchange.headers, exchange.body)
        async with asyncio.timeout_at(began + self.timeouts.first_byte_s) as limit, request as answer:
            if answer.status in UNAVAILABLE and not exchange.final:
                raise self._lost(f"not served: it answered {answer.status}")
            headers = forwarded_headers(answer.headers.items(), {SERVED_BY})
            await exchange.begin(answer.status, [*headers, (SERVED_BY, self.name)])
            piece = await answer.content.readany()
            exchange.first_byte_s = now() - began
            while piece:
                limit.reschedule(now() + self.timeouts.between_s)
                await exchange.send(piece)
                limit.reschedule(now() + self.timeouts.between_s)
                piece = await answer.content.readany()
        exchange.whole = True

    @asynccontextmanager
    async def _request(
        self, session: aiohttp.ClientSession, method: str, target: URL, headers: Headers, body: Sequence[bytes] = ()
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the head of an answer; close its connection unless all of it is read."""
        own = {name.lower() for name in self._headers}
        sent = [*forwarded_headers(headers, {"content-length", *own}), *self._headers.items()]
        if body:
            sent.append(("Content-Length", str(sum(map(len, body)))))
        url, data = self._address(target), _pieces(body) if body else None
        try:
            answer = await session.request(method, url, headers=sent, data=data, allow_redirects=False)
        except ValueError as error:  # aiohttp raises it before it sends anything
            raise self._invalid("its headers cannot be sent") from error
        try:
            coding = answer.headers.get("Transfer-Encoding", "chunked").lower()
            if not 200 <= answer.status < 600 or coding != "chunked":  # 101 would begin another protocol
                raise aiohttp.ClientPayloadError(f"status {answer.status}, {coding}")
            yield answer
        finally:
            if not answer.content.at_eof():
                answer.close()
            answer.release()

    def _address(self, target: URL) -> URL:
        """Raises RequestInvalid for a target on another server."""
        if target.absolute or not target.raw_path.startswith("/"):
            raise self._invalid("its target is not a path")
        path, query = self.url.raw_path.rstrip("/") + target.raw_path, target.raw_query_string
        scheme, authority = self.url.scheme, self.url.raw_authority
        found = URL.build(scheme=scheme, authority=authority, path=path, query_string=query, encoded=True)
        if found.origin() != self.url.origin():
            raise self._invalid("its target is another server")
        return found

    def _invalid(self, why: str) -> RequestInvalid:
        return RequestInvalid(f"not sent: {why}", where=self.name, remedy="Send a path, a query and headers of HTTP.")

    def _lost(self, found: str) -> ExecutorLost:
        return ExecutorLost(found, where=self.name, remedy="Send the request again; see whether the engine runs.")

    def _failure(self, error: Exception, what: str) -> ExecutorFailed:
        """Leaves out addresses, which callers need not know."""
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError | TimeoutError):
            return self._lost(f"{what}: it cannot be reached")
        is_closed = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError | OSError)
        return self._lost(f"{what}: {'it closed the connection' if is_closed else 'its answer is not valid HTTP'}")

    def _too_late(self, exchange: Exchange, waited_s: float) -> ExecutorFailed:
        is_hung = not exchange.first_byte_s and waited_s >= self._overdue_s
        if (exchange.has_left or exchange.is_sending) and not is_hung:
            return Abandoned("the caller left", where=self.name, remedy="No action needed: the engine was stopped.")
        found = f"no data for {min(waited_s, self.timeouts.first_byte_s):,.0f} s"
        remedy = "Its connection was closed; raise the timeout if it may take that long."
        return ExecutorTimedOut(found, where=self.name, remedy=remedy)


async def _pieces(body: Sequence[bytes]) -> AsyncIterator[bytes]:
    for piece in body:
        yield piece


def _parse_url(url: str) -> URL:
    """Raise WrongUsage unless it is an HTTP address without a password, query or fragment."""
    try:
        found = URL(url if "://" in url else f"http://{url}")
    except ValueError:
        found = URL()
    more = found.user, found.password, found.query_string, found.fragment
    if found.scheme not in ("http", "https") or not found.host or not found.port or any(more) or re.search(r"\s", url):
        raise no_address(url, "an engine")
    return found
