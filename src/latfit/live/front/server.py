"""A front that listens: until it is told to stop, and then until what it has taken has ended."""

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import TracebackType

from aiohttp import web

from latfit.errors import TargetNotWritable
from latfit.live.front.front import Front

HEAD_S = 15.0
"""Within this the head of a request must be complete, counted from the connection's beginning or the last answer."""

LINGER_S = 2.0
"""For so long what is left of a refused body is read, so that its sender sees the answer."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class FrontServer:
    """`async with FrontServer(front, host, port) as server` listens; its router is started before and closed behind it.

    head_s: see HEAD_S.  drain_s: for so long what runs may go on once it is told to stop.
    """

    def __init__(
        self, front: Front, host: str = "127.0.0.1", port: int = 0, *, head_s: float = HEAD_S, drain_s: float = 30.0
    ) -> None:
        self.front, self._host, self.port = front, host, port
        self._head_s, self._drain_s = head_s, drain_s
        self._told, self._told_again = asyncio.Event(), asyncio.Event()

    async def __aenter__(self) -> "FrontServer":
        """Listen once the router is ready. Raises TargetNotWritable where it cannot, and what executors raise."""
        await self.front.router.start()
        silent = logging.getLogger("latfit.front")  # its messages would quote what was sent
        silent.disabled = True
        server = web.Server(
            self.front.handle,
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
            await web.TCPSite(self._runner, self._host, self.port).start()
        except (OSError, OverflowError, UnicodeError) as error:  # OverflowError: of the port, UnicodeError: of the host
            await self._stop()
            raise TargetNotWritable(
                f"cannot listen: {getattr(error, 'strerror', None) or error}",
                where=f"{self._host}:{self.port}",
                remedy="Give another --port, or --host.",
            ) from None
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stop()

    def stop(self, *_: object) -> None:
        """Drain; told again, end at once."""
        self.front.draining = True
        (self._told_again if self._told.is_set() else self._told).set()

    async def run(self, ready: Callable[["FrontServer"], None] = lambda _: None) -> bool:
        """Serve until SIGTERM, SIGINT or `stop`, then drain. Returns whether all that was taken has ended by itself."""
        loop = asyncio.get_running_loop()
        with ExitStack() as handlers:
            with suppress(RuntimeError, ValueError):  # not in the main thread, or not on this system
                for number in SIGNALS:
                    loop.add_signal_handler(number, self.stop)
                    handlers.callback(loop.remove_signal_handler, number)
            ready(self)
            await self._told.wait()
            return await self._drained()

    async def _drained(self) -> bool:
        router = self.front.router
        draining = asyncio.ensure_future(router.drain(self._drain_s))
        again = asyncio.ensure_future(self._told_again.wait())
        await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        if not draining.done():
            draining.cancel()
            await asyncio.wait((draining,))
            return await router.drain(0.0)
        return draining.result()

    async def _stop(self) -> None:
        self.front.draining = True
        await self.front.router.close(0.0 if self._told_again.is_set() else self._drain_s)
        await self._runner.cleanup()
