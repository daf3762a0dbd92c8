"""Run batches on a model of a Triton server, by HTTP.

Triton's client encodes and decodes the bodies; each worker thread sends them over its own `http.client` connection,
since the client's own connections belong to gevent and cannot be shared by threads or closed while a batch is out.
"""

import asyncio
import json
import select
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import quote, urlsplit

from latfit.errors import HardwareMissing, WrongUsage, first_line
from latfit.live.engines import UNNAMED, Array, ByRows
from latfit.live.executor import BatchExecutor, ExecutorFailed, ExecutorLost, ExecutorTimedOut, padded

READY_TRIES, READY_PAUSE_S = 20, 0.5  # how often a server is asked whether it is ready before the path rests
CONTROL_TIMEOUT_S = 2.0  # for metadata and readiness
HEADER_LENGTH = "Inference-Header-Content-Length"  # bytes of the JSON in front of the tensors


@dataclass(frozen=True)
class TritonModel:
    """A model of a Triton server.

    Parameters
    ----------
    address
        The server's HTTP endpoint: http://host:8000 or https://host.
    version
        Empty for the server's choice.
    timeout_ms
        Limit for a batch, even if nothing else sets one.
    connection
        Further arguments of `http.client.HTTPSConnection`, such as context.
    """

    address: str
    name: str
    version: str = ""
    timeout_ms: float = 60_000.0
    connection: Mapping[str, Any] = field(default_factory=dict)


class TritonExecutor(BatchExecutor):
    """Send each batch as one request to Triton. Leave the model's `dynamic_batching` unset: batches come ready.

    Needs the extra `triton`.

    Parameters
    ----------
    largest
        Largest batch, at most the model's max_batch_size.
    servers
        Instances of the model.
    """

    def __init__(
        self, name: str, model: TritonModel, largest: int, *, servers: int = 1, buckets: Sequence[int] = ()
    ) -> None:
        super().__init__(name, largest, servers, buckets)
        self._model, self._url = model, urlsplit(model.address)
        if self._url.scheme not in ("http", "https"):
            raise WrongUsage(
                f"{model.address!r} is no HTTP address",
                where=name,
                remedy="Write http://localhost:8000, not gRPC's port.",
            )
        version = f"/versions/{quote(model.version, safe='')}" if model.version else ""
        self._path = f"{self._url.path.rstrip('/')}/v2/models/{quote(model.name, safe='')}{version}"
        self._threads = ThreadPoolExecutor(servers, f"latfit-{name}")
        self._of_thread = threading.local()
        self._rows = ByRows(self._infer)
        self._types: dict[str, tuple[str, Any]] = {}  # Triton's and NumPy's data type of each input

    async def start(self) -> None:
        """Read the model's inputs.

        Raises
        ------
        ExecutorLost
            If no server answers.
        ExecutorFailed
            If the server refuses the model.
        WrongUsage
            If the model's batches are too small.
        HardwareMissing
            If tritonclient is not installed.
        """
        await asyncio.to_thread(self._describe)

    async def execute(self, inputs: list[Any]) -> Sequence[Any]:
        """Run a batch. If cancelled, close its connection."""
        sent_on: list[HTTPConnection] = []
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, inputs, sent_on)
        except asyncio.CancelledError:
            for connection in sent_on:
                if connection.sock is not None:
                    with suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)
            raise

    async def recover(self) -> None:
        """Wait until the model is ready. Raises ExecutorLost if that takes too long."""
        for _ in range(READY_TRIES):
            if await asyncio.to_thread(self._is_ready):
                return
            await asyncio.sleep(READY_PAUSE_S)
        raise self._lost("the model is not ready")

    async def close(self) -> None:
        self._threads.shutdown(wait=False)

    def _describe(self) -> None:
        try:
            from tritonclient.http import InferenceServerClient  # noqa: F401 (not first in mid traffic)
            from tritonclient.utils import triton_to_np_dtype
        except ImportError as error:
            raise HardwareMissing(
                f"{error.name} is not installed",
                where=self._model.address,
                remedy="Install it: pip install 'latfit[triton]'.",
            ) from None
        inputs, config = self._get("")["inputs"], self._get("/config")
        self._types = {each["name"]: (each["datatype"], triton_to_np_dtype(each["datatype"])) for each in inputs}
        if int(config["max_batch_size"]) < max([self.largest, *self.buckets]):
            raise WrongUsage(
                f"batches of up to {max([self.largest, *self.buckets])}, but the model's max_batch_size is"
                f" {config['max_batch_size']}",
                where=self.name,
                remedy="Set max_batch_size in its config.pbtxt, or give smaller batches.",
            )

    def _is_ready(self) -> bool:
        try:
            self._get("/ready")
        except ExecutorFailed:
            return False
        return True

    def _run(self, inputs: list[Any], sent_on: list[HTTPConnection]) -> list[Any]:
        self._of_thread.sent_on = sent_on
        return self._rows(padded(inputs, self.buckets))[: len(inputs)]

    def _infer(self, arrays: dict[str, Array]) -> dict[str, Array]:
        from tritonclient.http import InferenceServerClient, InferInput

        if set(arrays) == {UNNAMED} and len(self._types) == 1:
            arrays = {next(iter(self._types)): arrays[UNNAMED]}
        if set(arrays) != set(self._types):
            raise ValueError(f"inputs {sorted(arrays)}, but the model takes {sorted(self._types)}")
        inputs = []
        for name, array in arrays.items():
            kind, dtype = self._types[name]
            inputs.append(InferInput(name, list(array.shape), kind))
            inputs[-1].set_data_from_numpy(array.astype(dtype, copy=False))
        body, length = InferenceServerClient.generate_request_body(inputs)
        headers = {} if length is None else {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(length)}
        connection = self._kept_connection()
        self._of_thread.sent_on.append(connection)
        answer, content = self._exchange(connection, "POST", "/infer", body, headers)
        length = answer.getheader(HEADER_LENGTH)
        result = InferenceServerClient.parse_response_body(content, header_length=length and int(length))
        return {each["name"]: result.as_numpy(each["name"]) for each in result.get_response()["outputs"]}

    def _get(self, what: str) -> Any:
        """Return the JSON at a path of the model, None if it is empty."""
        with closing(self._connect(CONTROL_TIMEOUT_S)) as connection:
            _, content = self._exchange(connection, "GET", what)
        try:
            return json.loads(content) if content else None
        except ValueError:
            raise self._failed(f"{self._url.netloc} does not answer as Triton does") from None

    def _exchange(
        self, connection: HTTPConnection, method: str, what: str, body: Any = None, headers: Mapping[str, str] = {}
    ) -> tuple[Any, bytes]:
        """Return a good answer and its content. A request is sent once."""
        try:
            connection.request(method, self._path + what, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, HTTPException) as error:
            connection.close()
            if isinstance(error, TimeoutError) and method == "POST":
                raise self._late() from error
            raise self._lost(f"{self._url.netloc}: {type(error).__name__}: {first_line(error)}") from error
        if answer.status == HTTPStatus.OK:
            return answer, content
        try:
            found = str(json.loads(content)["error"])
        except (ValueError, KeyError, TypeError):
            found = f"HTTP {answer.status}"
        if answer.status == HTTPStatus.GATEWAY_TIMEOUT:
            raise self._late()
        raise self._lost(found) if answer.status == HTTPStatus.SERVICE_UNAVAILABLE else self._failed(found)

    def _connect(self, timeout_s: float) -> HTTPConnection:
        kind = HTTPSConnection if self._url.scheme == "https" else HTTPConnection
        return kind(self._url.netloc, timeout=timeout_s, **self._model.connection)

    def _kept_connection(self) -> HTTPConnection:
        """Return this thread's connection; a new one if the server has closed it, so that no batch is sent twice."""
        kept: HTTPConnection | None = getattr(self._of_thread, "connection", None)
        if kept is None or kept.sock is None or select.select([kept.sock], [], [], 0)[0]:
            if kept is not None:
                kept.close()
            kept = self._of_thread.connection = self._connect(self._model.timeout_ms / 1000)
        return kept

    def _failed(self, found: str) -> ExecutorFailed:
        return ExecutorFailed(found, where=self.name, remedy="See the log of the Triton server.")

    def _lost(self, found: str) -> ExecutorLost:
        remedy = f"See whether model {self._model.name} is ready at {self._model.address}; send the request again."
        return ExecutorLost(found, where=self.name, remedy=remedy)

    def _late(self) -> ExecutorTimedOut:
        return ExecutorTimedOut(
            f"no answer from {self._model.address} in {self._model.timeout_ms:,.0f} ms",
            where=self.name,
            remedy="It was given up; raise the model's timeout_ms if a batch may take that long.",
        )
