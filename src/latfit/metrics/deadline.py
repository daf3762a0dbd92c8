"""HTTP requests whose timeout covers the whole exchange, without redirects."""

import socket
import urllib.request
from collections.abc import Callable
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from io import BufferedReader, RawIOBase
from time import monotonic
from typing import Any


def timed_opener(*, direct: bool) -> urllib.request.OpenerDirector:
    """Return an opener whose `timeout` limits an exchange from connecting to the last byte.

    The limit covers connecting to one address; a name with several unreachable addresses takes it once for each.

    Parameters
    ----------
    direct
        Whether proxies of the environment are left out.
    """
    proxies = [urllib.request.ProxyHandler({})] if direct else []
    return urllib.request.build_opener(_TimedHTTP, _TimedHTTPS, _NoRedirects, *proxies)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Reports a redirect as the answer, so that nothing is read from an address that was not given."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _Timed(urllib.request.AbstractHTTPHandler):
    """Reads responses until a deadline; `http.client` begins its timeout anew with each receive."""

    def do_open(
        self, http_class: Callable[..., HTTPConnection], req: urllib.request.Request, **options: Any
    ) -> HTTPResponse:
        assert req.timeout is not None
        deadline = monotonic() + req.timeout

        def connect(host: str, **more: Any) -> HTTPConnection:
            connection = http_class(host, **more)
            connection.response_class = partial(_TimedResponse, deadline)  # type: ignore[assignment]
            return connection

        return super().do_open(connect, req, **options)


class _TimedHTTP(_Timed, urllib.request.HTTPHandler): ...


class _TimedHTTPS(_Timed, urllib.request.HTTPSHandler): ...


class _TimedResponse(HTTPResponse):
    """A response whose head and body are read until a deadline."""

    def __init__(self, deadline: float, connected: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(connected, *args, **options)
        self.fp.close()
        self.fp = BufferedReader(_Receiver(connected, deadline))


class _Receiver(RawIOBase):
    """The bytes that a socket receives until a deadline."""

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        self._socket, self._deadline = connected, deadline
        self._stream = connected.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._deadline - monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(left_s)
        return self._stream.readinto(buffer)

    def close(self) -> None:
        self._stream.close()
        super().close()
