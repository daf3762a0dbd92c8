"""Listen for a front until a signal or `stop`, then finish the requests that were accepted."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from aiohttp import HttpVersion10, HttpVersion11, StreamReader, web
from aiohttp.http import RawRequestMessage

from latfit.errors import TargetNotWritable, WrongUsage
from latfit.live.front.front import HTTP_1, Front

HEAD_S = 15.0  # for the head of a request, from the connection's beginning or the last answer
LINGER_S = 2.0  # for reading what is left of a refused body, so that its sender sees the answer
MAX_BACKLOG = 128  # connections accepted in one turn of the event loop, before any of them can be refused
SPARE_DESCRIPTORS = 8  # for the listening socket, name lookups and files of libraries

MAX_KERNEL_INT = (1 << 31) - 1

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _LimitedServer(web.Server):
    """Refuse connections beyond `max_connections`: `backlog` of them with a 503, others without."""

    def __init__(self, front: Front, max_connections: int, backlog: int, **options: Any) -> None:
        super().__init__(front.handle, request_factory=_make_request, **options)
        self._front, self._max_connections, self._backlog = front, max_connections, backlog
        unread_s = max((each.timeouts.between_s for each in front.engines), default=60.0)
        self._unread_ms = min(round(1000 * unread_s), MAX_KERNEL_INT)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if sys.platform == "linux":
            opened = transport.get_extra_info("socket")
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self._unread_ms)
        excess = len(self.connections) - self._max_connections
        if excess > self._backlog:
            transport.abort()
        elif excess > 0:
            transport.write(self._front.answer_when_full())
            transport.write_eof()
            handler.close()  # its request is dropped as it comes: closing at once would reset the connection
            asyncio.get_running_loop().call_later(LINGER_S, transport.close)


def _make_request(
    message: RawRequestMessage, payload: StreamReader, protocol: web.RequestHandler, writer: Any, task: Any
) -> web.BaseRequest:
    """Answer as HTTP/1.1 if another version than 1.0 is named, which aiohttp would repeat."""
    known = message.version in (HttpVersion10, HttpVersion11)
    answered = message if known else message._replace(version=HttpVersion11)
    request = web.BaseRequest(answered, payload, protocol, writer, task, asyncio.get_running_loop())
    request[HTTP_1] = known
    return request


def _split_descriptors(engine_connections: int) -> tuple[int, int]:
    """Return how many callers to serve, and to refuse or accept at a time. Raises WrongUsage."""
    if sys.platform == "win32":
        return sys.maxsize, MAX_BACKLOG
    import resource

    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return sys.maxsize, MAX_BACKLOG
    taken = len(os.listdir("/dev/fd")) + SPARE_DESCRIPTORS + engine_connections
    backlog = min((allowed - taken) // 3, MAX_BACKLOG)
    if backlog < 1:
        remedy = "Raise it (ulimit -n 4096), or give fewer --slots."
        found = f"{allowed:,} open files are allowed, {taken + 3:,} needed"
        raise WrongUsage(found, where="ulimit -n", remedy=remedy)
    return allowed - taken - 2 * backlog, backlog


class FrontServer:
    """Listen within `async with FrontServer(front, host, port) as server`, which starts and closes the router.

    head_s: time for the head of a request.  drain_s: time to finish after `stop`.
    """

    def __init__(
        self, front: Front, host: str = "127.0.0.1", port: int = 0, *, head_s: float = HEAD_S, drain_s: float = 30.0
    ) -> None:
        self.front, self._host, self.port = front, host, port
        self._head_s, self._drain_s = head_s, drain_s
        self._stopping, self._is_killed = asyncio.Event(), False

    @property
    def url(self) -> str:
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self.port}"

    async def __aenter__(self) -> "FrontServer":
        """Raises TargetNotWritable, WrongUsage, and what the executors raise."""
        max_callers, backlog = _split_descriptors(sum(each.max_connections for each in self.front.engines))
        await self.front.router.start()
        silent = logging.getLogger("latfit.front")  # its messages would quote what was sent
        silent.disabled = True
        server = _LimitedServer(
            self.front,
            max_callers,
            backlog,
            handler_cancellation=True,
            access_log=None,
            logger=silent,
            keepalive_timeout=self._head_s,
            lingering_time=LINGER_S,
            auto_decompress=False,
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self.port, backlog=backlog).start()
        except (OSError, OverflowError, UnicodeError) as error:  # OverflowError: of the port, UnicodeError: of the host
            await self._stop()
            found, where = f"cannot listen: {getattr(error, 'strerror', None) or error}", f"{self._host}:{self.port}"
            raise TargetNotWritable(found, where=where, remedy="Give another --port, or --host.") from None
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    def stop(self, *_: object) -> None:
        """Drain; called again, end at once."""
        self.front.draining = True
        router = self.front.router
        if self._stopping.is_set():
            self._is_killed |= bool(router.waiting or router.running)
            router.drop_all()
        self._stopping.set()

    async def run(self, ready: Callable[["FrontServer"], None] = lambda _: None) -> bool:
        """Serve until SIGTERM, SIGINT or `stop`, then drain. Return whether all requests ended by themselves."""
        loop = asyncio.get_running_loop()
        with ExitStack() as handlers:
            with suppress(RuntimeError, ValueError):  # not in the main thread, or not on this system
                for number in SIGNALS:
                    loop.add_signal_handler(number, self.stop)
                    handlers.callback(loop.remove_signal_handler, number)
            ready(self)
            await self._stopping.wait()
            return await self.front.router.drain(self._drain_s) and not self._is_killed

    async def _stop(self) -> None:
        self.front.draining = True
        await self.front.router.close(0.0 if self._is_killed else self._drain_s)
        await self._runner.cleanup()
