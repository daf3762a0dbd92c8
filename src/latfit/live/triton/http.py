"""The way to a Triton server by HTTP.

Triton's client makes and reads the bodies (tensors in binary behind a head in JSON); they go over a connection of each
thread by the standard library, not over that client's own connections: those belong to gevent, whose objects cannot be
shared by threads, and a batch there cannot be given up. A call that is cancelled closes its connection.
"""

import json
import select
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import quote, urlsplit

from tritonclient.http import InferenceServerClient, InferInput

from latfit.errors import first_line
from latfit.live.engines import Array
from latfit.live.triton.way import ASKED_S, Calls, Described, late, lost, refused

HEAD = "Inference-Header-Content-Length"
"""Of the part in JSON, in bytes."""

OK, UNAVAILABLE, TIMED_OUT = 200, 503, 504


class HttpWay:
    """To one model. address: a URL.  how: what `http.client.HTTPSConnection` takes beside it, such as context."""

    def __init__(self, address: str, model: tuple[str, str], timeout_s: float, how: Mapping[str, Any]) -> None:
        self._url, self._timeout_s, self._how = urlsplit(address), timeout_s, dict(how)
        name, version = (quote(each, safe="") for each in model)
        base = f"{self._url.path.rstrip('/')}/v2/models/{name}"
        self._base = f"{base}/versions/{version}" if version else base
        self._of_thread = threading.local()

    def described(self) -> Described:
        told, config = self._asked(""), self._asked("/config")
        return Described({each["name"]: each["datatype"] for each in told["inputs"]}, int(config["max_batch_size"]))

    def ready(self) -> bool:
        connection = self._connection(ASKED_S)
        try:
            connection.request("GET", f"{self._base}/ready")
            return connection.getresponse().status == OK
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def infer(self, tensors: Sequence[tuple[str, str, Array]], calls: Calls) -> dict[str, Array]:
        inputs = []
        for name, kind, array in tensors:
            inputs.append(InferInput(name, list(array.shape), kind))
            inputs[-1].set_data_from_numpy(array)
        body, head = InferenceServerClient.generate_request_body(inputs)
        call = _Call(self._kept())
        calls.append(call)
        headers = {"Content-Type": "application/octet-stream"} if head is not None else {}
        answer, text = self._answer(call, body, {**headers, **({HEAD: str(head)} if head is not None else {})})
        if answer.status != OK:
            raise _told(answer.status, text)
        size = answer.getheader(HEAD)
        result = InferenceServerClient.parse_response_body(text, header_length=None if size is None else int(size))
        return {each["name"]: result.as_numpy(each["name"]) for each in result.get_response()["outputs"]}

    def close(self) -> None:
        """Connections of threads end with these."""

    def _answer(self, call: "_Call", body: Any, headers: Mapping[str, str]) -> tuple[Any, bytes]:
        """An answer and its body. A batch is sent once."""
        connection = call.connection
        try:
            connection.request("POST", f"{self._base}/infer", body, headers)
            answer = connection.getresponse()
            return answer, answer.read()
        except TimeoutError as error:
            connection.close()
            raise late() from error
        except (OSError, HTTPException) as error:
            connection.close()
            raise lost(f"{self._url.netloc}: {type(error).__name__}: {first_line(error)}") from error

    def _asked(self, what: str) -> Any:
        connection = self._connection(ASKED_S)
        try:
            connection.request("GET", self._base + what)
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, HTTPException) as error:
            raise lost(f"{self._url.netloc}: {type(error).__name__}: {first_line(error)}") from error
        finally:
            connection.close()
        if answer.status != OK:
            raise _told(answer.status, text)
        try:
            return json.loads(text)
        except ValueError as error:
            raise refused(f"{self._url.netloc} does not answer as Triton does") from error

    def _connection(self, timeout_s: float) -> HTTPConnection:
        kind = HTTPSConnection if self._url.scheme == "https" else HTTPConnection
        return kind(self._url.netloc, timeout=timeout_s, **self._how)

    def _kept(self) -> HTTPConnection:
        """This thread's connection; a new one where the server has closed it, so that nothing is sent twice."""
        kept: HTTPConnection | None = getattr(self._of_thread, "connection", None)
        if kept is None or kept.sock is None or select.select([kept.sock], [], [], 0)[0]:
            if kept is not None:
                kept.close()
            kept = self._of_thread.connection = self._connection(self._timeout_s)
        return kept


class _Call:
    """A batch on a connection."""

    def __init__(self, connection: HTTPConnection) -> None:
        self.connection = connection

    def cancel(self) -> None:
        if self.connection.sock is not None:
            with suppress(OSError):
                self.connection.sock.shutdown(socket.SHUT_RDWR)


def _told(status: int, text: bytes) -> Exception:
    """What Triton says, by what the router has to do about it."""
    try:
        said = str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        said = f"HTTP {status}"
    if status == UNAVAILABLE:
        return lost(said)
    return late() if status == TIMED_OUT else refused(said)
