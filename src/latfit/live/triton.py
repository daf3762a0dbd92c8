"""Run batches on a model of a Triton server, by HTTP."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlsplit

from latfit.errors import HardwareMissing, WrongUsage, first_line
from latfit.live.engines import UNNAMED, Array, RowStack
from latfit.live.executor import Executor, ExecutorFailed, ExecutorLost, ExecutorTimedOut, padded

READY_TRIES, READY_PAUSE_S = 20, 0.5  # how often a server is asked whether it is ready before the path rests
CONTROL_TIMEOUT_S = 2.0  # for metadata and readiness
HEADER_LENGTH = "Inference-Header-Content-Length"  # bytes of the JSON in front of the tensors


@dataclass(frozen=True)
class TritonModel:
    address: str  # the server's HTTP endpoint: http://host:8000 or https://host
    name: str
    version: str = ""  # empty for the server's choice
    timeout_ms: float = 60_000.0  # for a batch, even if nothing else sets one
    connection: Mapping[str, Any] = field(default_factory=dict)  # more arguments of `aiohttp.TCPConnector`, such as ssl


class TritonExecutor(Executor):
    """Send each batch as one request to Triton. Leave the model's `dynamic_batching` unset.

    largest: at most the model's max_batch_size.  servers: instances of the model.
    """

    def __init__(
        self, name: str, model: TritonModel, largest: int, *, servers: int = 1, buckets: Sequence[int] = ()
    ) -> None:
        super().__init__(name, largest, servers, buckets)
        url = urlsplit(model.address)
        if url.scheme not in ("http", "https"):
            remedy = "Write http://localhost:8000, not gRPC's port."
            raise WrongUsage(f"{model.address!r} is no HTTP address", where=name, remedy=remedy)
        version = f"/versions/{quote(model.version, safe='')}" if model.version else ""
        self._model, self._host = model, url.netloc
        self._url = f"{model.address.rstrip('/')}/v2/models/{quote(model.name, safe='')}{version}"
        self._rows = RowStack()
        self._types: dict[str, tuple[str, Any]] = {}  # Triton's and NumPy's data type of each input
        self._session: Any = None

    async def start(self) -> None:
        """Read the model's inputs. Raises ExecutorFailed, WrongUsage if its batches are too small, HardwareMissing."""
        try:
            import aiohttp
            from tritonclient.http import InferenceServerClient  # noqa: F401 (not first in mid traffic)
            from tritonclient.utils import triton_to_np_dtype
        except ImportError as error:
            remedy = "Install it: pip install 'latfit[triton]'."
            raise HardwareMissing(f"{error.name} is not installed", where=self._model.address, remedy=remedy) from None
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, **self._model.connection)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        try:
            inputs, config = (await self._get(""))["inputs"], await self._get("/config")
            most = max([self.largest, *self.buckets])
            if int(config["max_batch_size"]) < most:
                found = f"batches of up to {most}, but the model's max_batch_size is {config['max_batch_size']}"
                remedy = "Set max_batch_size in its config.pbtxt, or give smaller batches."
                raise WrongUsage(found, where=self.name, remedy=remedy)
        except BaseException:
            await self.close()
            raise
        self._types = {each["name"]: (each["datatype"], triton_to_np_dtype(each["datatype"])) for each in inputs}

    async def execute(self, inputs: list[Any]) -> Sequence[Any]:
        stacked, unlike = self._rows.stack(padded(inputs, self.buckets))
        outputs = unlike if stacked is None else self._rows.split(await self._infer(stacked), stacked, unlike)
        return outputs[: len(inputs)]

    async def recover(self) -> None:
        for _ in range(READY_TRIES):
            try:
                await self._get("/ready")
            except ExecutorFailed:
                await asyncio.sleep(READY_PAUSE_S)
            else:
                return
        raise self._lost("the model is not ready")

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _infer(self, arrays: dict[str, Array]) -> dict[str, Array]:
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
        headers = {"Content-Type": "application/octet-stream"}
        headers |= {} if length is None else {HEADER_LENGTH: str(length)}
        answer, content = await self._exchange("POST", "/infer", self._model.timeout_ms / 1000, body, headers)
        length = answer.headers.get(HEADER_LENGTH)
        result = InferenceServerClient.parse_response_body(content, header_length=length and int(length))
        return {each["name"]: result.as_numpy(each["name"]) for each in result.get_response()["outputs"]}

    async def _get(self, what: str) -> Any:
        _, content = await self._exchange("GET", what, CONTROL_TIMEOUT_S)
        try:
            return json.loads(content) if content else None
        except ValueError:
            raise self._failed(f"{self._host} does not answer as Triton does") from None

    async def _exchange(
        self, method: str, what: str, within_s: float, body: Any = None, headers: Mapping[str, str] = {}
    ) -> tuple[Any, bytes]:
        """Return a good answer and its content. A batch is sent once."""
        import aiohttp

        limit = aiohttp.ClientTimeout(total=within_s)
        try:
            async with self._session.request(
                method, self._url + what, data=body, headers=headers, timeout=limit, allow_redirects=False
            ) as answer:
                content = await answer.read()
        except (OSError, aiohttp.ClientError) as error:  # TimeoutError is an OSError
            if isinstance(error, TimeoutError) and method == "POST":
                raise self._late() from error
            raise self._lost(f"{self._host}: {type(error).__name__}: {first_line(error)}") from error
        if answer.status == HTTPStatus.OK:
            return answer, content
        try:
            found = str(json.loads(content)["error"])
        except (ValueError, KeyError, TypeError):
            found = f"HTTP {answer.status}"
        if answer.status == HTTPStatus.GATEWAY_TIMEOUT:
            raise self._late()
        raise self._lost(found) if answer.status == HTTPStatus.SERVICE_UNAVAILABLE else self._failed(found)

    def _failed(self, found: str) -> ExecutorFailed:
        return ExecutorFailed(found, where=self.name, remedy="See the log of the Triton server.")

    def _lost(self, found: str) -> ExecutorLost:
        remedy = f"See whether model {self._model.name} is ready at {self._model.address}; send the request again."
        return ExecutorLost(found, where=self.name, remedy=remedy)

    def _late(self) -> ExecutorTimedOut:
        found = f"no answer from {self._model.address} in {self._model.timeout_ms:,.0f} ms"
        remedy = "The batch was cancelled; raise the model's timeout_ms if a batch may take that long."
        return ExecutorTimedOut(found, where=self.name, remedy=remedy)
