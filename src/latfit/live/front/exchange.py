"""An HTTP engine as an executor: one request on one of its slots, the reply handed to the caller as it comes.

Engines form their batches themselves, step by step; what a router decides is which engine a request goes to, and when.
So a batch here is one request, and `servers` are the requests that an engine works on at a time. Its time T(1) is that
of a reply, from the moment it is sent on to the last byte.

A reply is passed on piece by piece, byte for byte, its headers as soon as they come. Until then the request may go to
another engine; from then on an error can only cut the reply short. A caller that leaves closes the connection to the
engine, which is how engines are told to stop.
"""

import asyncio
import errno
import os
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

import aiohttp
from yarl import URL

from latfit.errors import WrongUsage
from latfit.live.executor import Abandoned, ExecutorFailed, ExecutorLost, ExecutorTimedOut

HOP_BY_HOP = frozenset(("connection", "expect", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"))
"""Headers between two neighbours, which are not passed on; those that `connection` names are not either."""

AWAY = frozenset((429, 502, 503, 504))
"""Answers of an engine that takes nothing now; another one may."""

BROKEN = frozenset((*AWAY, 500))
IDLE_S, STALE_S = 2.0, 1.0
"""IDLE_S: seconds that an idle connection to an engine is kept, less than engines keep it. STALE_S: a disconnect within
this time means that the engine had already closed a kept connection, and the request is sent again on a new one."""

SERVED_BY = "x-latfit-path"
"""Header of a reply with the name of the path that it is from."""

MOST_SLOTS = 1024
"""More requests at a time than engines take, each of which a decision looks at."""

MAX_FETCHES = 4  # concurrent calls of `fetch`, which need no slot
HEALTH = URL("/health")

Headers = Sequence[tuple[str, str]]
HEADER_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]*")
"""Values that aiohttp can send: UTF-8 (it decodes other bytes to lone surrogates) without control characters."""


@dataclass(frozen=True)
class HttpTimeouts:
    """Seconds. connect: to an engine.  first_byte: until the body of a reply begins; one that is not streamed begins
    when it is complete.  between: from one piece of it to the next, on either side.  probe: of GET /health."""

    connect_s: float = 5.0
    first_byte_s: float = 300.0
    between_s: float = 60.0
    probe_s: float = 2.0


class RequestInvalid(Abandoned):
    """A request cannot be written as HTTP to the engine; no byte of it was sent."""


class NoDescriptors(Abandoned):
    """This process may open no further connection, to any engine."""


class Caller(Protocol):
    """Who gets a reply. Both raise Abandoned where nobody is there any more."""

    async def begin(self, status: int, headers: Headers) -> None: ...

    async def send(self, piece: bytes) -> None: ...


@dataclass(eq=False)
class Exchange:
    """A request on its way through an engine, and its caller.

    target: path and query.  body: the request body as received, in pieces.  final: no other engine will be tried, so a
    reply with a status in AWAY is passed on.  status: of the reply, 0 before it begins.  whole: all of the reply was
    passed on.  path: name of the engine.  first_byte_s: seconds until the first byte of the reply body, 0 before that.
    left: the caller left or stopped reading.
    """

    method: str
    target: URL
    headers: Headers
    body: Sequence[bytes]
    caller: Caller
    final: bool = True
    status: int = 0
    whole: bool = False
    path: str = ""
    first_byte_s: float = 0.0
    left: bool = False
    _handing: bool = False
    _scope: asyncio.Timeout | None = field(default=None, repr=False)

    def leave(self) -> None:
        """The caller is gone; what an engine still does for it is stopped."""
        self.left = True
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def hand(self, piece: bytes, within_s: float) -> None:
        """Send a piece of the reply to the caller. `within_s` limits this, and then the wait for the next piece.

        Raises Abandoned.
        """
        self._time(within_s)
        self._handing = True
        await self.caller.send(piece)
        self._handing = False
        self._time(within_s)

    @property
    def deserted(self) -> bool:
        """Whether the caller left, or a write to it has not finished."""
        return self.left or self._handing

    def _time(self, within_s: float) -> None:
        if self._scope is not None and not self.left:
            self._scope.reschedule(asyncio.get_running_loop().time() + within_s)

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """Raises TimeoutError after so long, or as soon as the caller leaves."""
        try:
            async with asyncio.timeout(0.0 if self.left else seconds) as self._scope:
                yield
        finally:
            self._scope = None


def passed_on(headers: Iterable[tuple[str, str]], drop: Iterable[str] = ()) -> list[tuple[str, str]]:
    """Headers for the next hop whose values can be sent. drop: names of others to leave out, in lower case."""
    known = [each for each in headers if HEADER_VALUE.fullmatch(each[1])]
    named = {each.strip().lower() for name, value in known if name.lower() == "connection" for each in value.split(",")}
    gone = HOP_BY_HOP | named | set(drop)
    return [each for each in known if each[0].lower() not in gone and not each[0].lower().startswith("proxy-")]


class HttpExecutor:
    """An engine at `url`, which works on `slots` requests at a time. Its inputs are exchanges.

    overdue_s: if a caller leaves after this many seconds without a byte of the reply body, the engine counts as hung.
    headers: sent with each request in place of its own of that name.
    """

    largest = 1
    buckets = ()

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
        self.name, self.url, self.servers, self.timeouts = name, _base(url), slots, timeouts
        if not re.fullmatch(r"[\w.-]+", name):
            raise WrongUsage(
                f"{name!r} is no name of an engine", where="URL", remedy="Take letters and digits: gpu, cpu-2."
            )
        if not 1 <= slots <= MOST_SLOTS:
            raise WrongUsage(f"{slots} slots", where=name, remedy=f"Give 1 to {MOST_SLOTS:,}.")
        self._overdue_s, self._headers = overdue_s, dict(headers or {})
        self._sessions: list[aiohttp.ClientSession] = []

    @property
    def max_connections(self) -> int:
        """Connections to the engine at a time: one a slot, those of `fetch`, and the probe."""
        return self.servers + MAX_FETCHES + 1

    async def start(self) -> None:
        """Be ready to connect."""
        self._fetches = asyncio.Semaphore(MAX_FETCHES)
        for keep_s in (IDLE_S, None)[len(self._sessions) :]:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=keep_s, force_close=keep_s is None)
            self._sessions.append(
                aiohttp.ClientSession(
                    connector=connector,
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.timeouts.connect_s),
                    cookie_jar=aiohttp.DummyCookieJar(),
                    auto_decompress=False,
                    skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
                )
            )

    async def execute(self, inputs: list[Any]) -> Sequence[Any]:
        """Pass one request on, and its reply back. Raises Abandoned where its caller left, ExecutorTimedOut,
        ExecutorLost, ExecutorFailed, RequestInvalid, NoDescriptors."""
        exchange: Exchange = inputs[0]
        exchange.path = self.name
        began = asyncio.get_running_loop().time()
        try:
            async with exchange.within(self.timeouts.first_byte_s):
                await self._pass_on(exchange, began)
        except aiohttp.ClientError as error:
            raise self._failure(error, begun=bool(exchange.status)) from error
        except TimeoutError as error:
            raise self._too_late(exchange, asyncio.get_running_loop().time() - began) from error
        if exchange.status in BROKEN:
            raise ExecutorFailed(
                f"it answered {exchange.status}", where=self.name, remedy="Its answer was passed on; see its log."
            )
        return [None]

    async def answers(self) -> bool | None:
        """Whether the engine answers GET /health in time, and not with 503; one that has no such page is alive too.

        None where this process lacks a descriptor to ask.
        """
        try:
            async with asyncio.timeout(self.timeouts.probe_s):
                async with self._sessions[-1].get(self._address(HEALTH), allow_redirects=False) as answer:
                    return answer.status != HTTPStatus.SERVICE_UNAVAILABLE
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if _lacks_descriptors(error):
                return None
            return False

    async def fetch(self, target: URL, headers: Headers, most_bytes: int) -> tuple[int, Headers, bytes]:
        """A small answer to GET, such as the list of models: status, headers, body. Raises ExecutorLost,
        RequestInvalid, NoDescriptors."""
        body, asked = b"", self._asked(self._sessions[-1], "GET", target, headers)
        try:
            async with asyncio.timeout(self.timeouts.connect_s), self._fetches, asked as answer:
                async for piece in answer.content.iter_any():
                    body += piece
                    if len(body) > most_bytes:
                        raise self._away(f"its answer has more than {most_bytes:,} bytes")
                return answer.status, passed_on(answer.headers.items(), ("content-length",)), body
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._failure(error) from error

    async def recover(self) -> None:
        """Every request has a connection of its own, and the router probes the engine before the next one."""

    async def close(self) -> None:
        sessions, self._sessions = self._sessions, []
        for session in sessions:
            await session.close()

    async def _pass_on(self, exchange: Exchange, began: float) -> None:
        """On a connection that was kept, or, where the engine had just closed that, on a new one."""
        kept, fresh = self._sessions
        try:
            await self._exchanged(kept, exchange, began)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            closed_at_once = asyncio.get_running_loop().time() - began < STALE_S
            if exchange.status or not closed_at_once or isinstance(error, aiohttp.ClientConnectorError):
                raise
            await self._exchanged(fresh, exchange, began)

    async def _exchanged(self, session: aiohttp.ClientSession, exchange: Exchange, began: float) -> None:
        async with self._asked(session, exchange.method, exchange.target, exchange.headers, exchange.body) as answer:
            if answer.status in AWAY and not exchange.final:
                raise self._away(f"it answered {answer.status}")
            exchange.status = answer.status
            headers = [*passed_on(answer.headers.items(), {SERVED_BY}), (SERVED_BY, self.name)]
            await exchange.caller.begin(answer.status, headers)
            piece = await answer.content.readany()
            exchange.first_byte_s = asyncio.get_running_loop().time() - began
            while piece:
                await exchange.hand(piece, self.timeouts.between_s)
                piece = await answer.content.readany()
        exchange.whole = True

    @asynccontextmanager
    async def _asked(
        self, session: aiohttp.ClientSession, method: str, target: URL, headers: Headers, body: Sequence[bytes] = ()
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The head of an answer; its connection is closed unless all of it was read. Raises RequestInvalid."""
        own = {name.lower() for name in self._headers}
        sent = [*passed_on(headers, {"content-length", *own}), *self._headers.items()]
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
        """The address of a path and query on this engine. Raises RequestInvalid for other targets."""
        if target.absolute or not target.raw_path.startswith("/"):
            raise self._invalid("its target is not a path")
        found = URL.build(
            scheme=self.url.scheme,
            authority=self.url.raw_authority,
            path=self.url.raw_path.rstrip("/") + target.raw_path,
            query_string=target.raw_query_string,
            encoded=True,
        )
        if found.origin() != self.url.origin():
            raise self._invalid("its target is another server")
        return found

    def _invalid(self, why: str) -> RequestInvalid:
        return RequestInvalid(f"not sent: {why}", where=self.name, remedy="Send a path, a query and headers of HTTP.")

    def _failure(self, error: Exception, *, begun: bool = False) -> ExecutorFailed:
        """What an error of a connection means: the engine is lost, or this process has no descriptor for it."""
        if _lacks_descriptors(error):
            return NoDescriptors("this server has too many open files", where=self.name, remedy="Raise ulimit -n.")
        return self._away(_in_words(error), begun=begun)

    def _away(self, why: str, *, begun: bool = False) -> ExecutorLost:
        found = f"its reply broke off: {why}" if begun else f"not served: {why}"
        return ExecutorLost(found, where=self.name, remedy="Send the request again; see whether the engine runs.")

    def _too_late(self, exchange: Exchange, waited_s: float) -> ExecutorFailed:
        """Why nothing came any more: the caller left or takes nothing, or the engine hangs."""
        hangs = not exchange.first_byte_s and waited_s >= self._overdue_s
        if exchange.deserted and not hangs:
            return Abandoned("the caller left", where=self.name, remedy="Nothing: the engine was told to stop.")
        return ExecutorTimedOut(
            f"nothing came for {min(waited_s, self.timeouts.first_byte_s):,.0f} s",
            where=self.name,
            remedy="Its connection was closed; raise the timeout if it may take that long.",
        )


def _lacks_descriptors(error: BaseException) -> bool:
    """Whether no file can be opened; a name lookup without descriptors may fail as if the name were unknown."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as none_left:
            error = none_left
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def _in_words(error: Exception) -> str:
    """What went wrong, without addresses: callers need not know where engines are."""
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError | TimeoutError):
        return "it cannot be reached"
    closed = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError | OSError)
    return "it closed the connection" if closed else "its answer is no whole HTTP"


async def _pieces(body: Sequence[bytes]) -> AsyncIterator[bytes]:
    for piece in body:
        yield piece


def _base(url: str) -> URL:
    """Raises WrongUsage for what is no address of HTTP, or holds a password, which anybody could read there."""
    try:
        found = URL(url if "://" in url else f"http://{url}")
    except ValueError:
        found = URL()
    more = found.user, found.password, found.query_string, found.fragment
    if found.scheme not in ("http", "https") or not found.host or not found.port or any(more) or re.search(r"\s", url):
        raise WrongUsage(f"{url!r} is no address of an engine", where="URL", remedy="Write http://localhost:8000.")
    return found
