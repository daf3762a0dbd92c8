"""Batches to a model of a Triton server, by gRPC.

The client that sends from threads is used, not Triton's asyncio client, which turns tensors into messages on the event
loop: batches of 19 MB held it for 190 to 320 ms so, and for 70 to 75 ms from a thread, in half the time; small batches
took as long both ways. A batch that is given up is cancelled at the server too, which frees its thread.
"""

import asyncio
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from latfit.errors import WrongUsage, first_line
from latfit.live.engines import UNNAMED, Array, ByRows
from latfit.live.executor import ExecutorFailed, ExecutorLost, ExecutorTimedOut, check_sizes, padded

ASKED_S, TRIES, PAUSE_S = 2.0, 20, 0.5
"""How long a server may take to say whether it is ready; how often it is asked before the path rests."""

CHANNEL = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 500),
)
"""Messages of any size, as Triton's client has them; a server that is back is noticed in 0.5 s, not in gRPC's 20 s and
more."""


@dataclass(frozen=True)
class TritonModel:
    """address: host:port of the server's gRPC.  version: empty for the server's choice.  timeout_ms: what a batch may
    take, also where nobody else sets a limit.  connection: what `tritonclient.grpc.InferenceServerClient` takes beside
    the address, such as ssl and root_certificates."""

    address: str
    name: str
    version: str = ""
    timeout_ms: float = 60_000.0
    connection: Mapping[str, Any] = field(default_factory=dict)


class TritonExecutor:
    """Each batch is one request to Triton, whose own batcher has nothing left to do: set no dynamic_batching there.

    largest: no more than the model's max_batch_size.  servers: instances of the model.  Needs tritonclient[grpc] (extra
    `triton`).
    """

    def __init__(
        self, name: str, model: TritonModel, largest: int, *, servers: int = 1, buckets: Sequence[int] = ()
    ) -> None:
        check_sizes(name, largest, servers, buckets)
        self.name, self.largest, self.servers, self.buckets = name, largest, servers, tuple(buckets)
        self._model = model
        self._rows = ByRows(self._infer)
        self._threads = ThreadPoolExecutor(servers, f"latfit-{name}")
        self._of_thread = threading.local()
        self._client: Any = None
        self._types: dict[str, Any] = {}

    async def start(self) -> None:
        """Raises ExecutorLost where no server answers, ExecutorFailed with what one says of the model, WrongUsage where
        its batches are too small."""
        await asyncio.to_thread(self._connect)

    async def execute(self, inputs: list[Any]) -> Sequence[Any]:
        calls: list[Any] = []
        found = asyncio.get_running_loop().run_in_executor(self._threads, self._run, inputs, calls)
        try:
            return await found
        except asyncio.CancelledError:
            for call in calls:
                call.cancel()
            raise

    async def recover(self) -> None:
        """Until the model is ready. Raises ExecutorLost where that takes too long."""
        for _ in range(TRIES):
            if await asyncio.to_thread(self._ready):
                return
            await asyncio.sleep(PAUSE_S)
        raise self._lost("the model is not ready")

    async def close(self) -> None:
        self._threads.shutdown(wait=False)
        if self._client is not None:
            await asyncio.to_thread(self._client.close)
            self._client = None

    def _connect(self) -> None:
        from tritonclient.grpc import InferenceServerClient
        from tritonclient.utils import InferenceServerException, triton_to_np_dtype

        if self._client is None:
            how = {"channel_args": list(CHANNEL), **self._model.connection}
            self._client = InferenceServerClient(self._model.address, **how)
        asked = (self._model.name, self._model.version)
        try:
            told = self._client.get_model_metadata(*asked, client_timeout=ASKED_S)
            config = self._client.get_model_config(*asked, client_timeout=ASKED_S).config
        except InferenceServerException as error:
            raise self._told(error) from error
        self._types = {each.name: (each.datatype, triton_to_np_dtype(each.datatype)) for each in told.inputs}
        largest = max([self.largest, *self.buckets])
        if config.max_batch_size < largest:
            raise WrongUsage(
                f"batches of up to {largest}, but the model's max_batch_size is {config.max_batch_size}",
                where=self.name,
                remedy="Set max_batch_size in its config.pbtxt, or give smaller batches.",
            )

    def _ready(self) -> bool:
        from tritonclient.utils import InferenceServerException

        try:
            return bool(self._client.is_model_ready(self._model.name, self._model.version, client_timeout=ASKED_S))
        except InferenceServerException:
            return False

    def _run(self, inputs: list[Any], calls: list[Any]) -> list[Any]:
        self._of_thread.calls = calls
        return self._rows(padded(inputs, self.buckets))[: len(inputs)]

    def _infer(self, arrays: dict[str, Array]) -> dict[str, Array]:
        from tritonclient.grpc import InferInput
        from tritonclient.utils import InferenceServerException

        tensors = []
        for name, array in self._by_name(arrays).items():
            kind, dtype = self._types[name]
            tensors.append(InferInput(name, list(array.shape), kind))
            tensors[-1].set_data_from_numpy(array.astype(dtype, copy=False))
        answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        try:
            call = self._client.async_infer(
                self._model.name,
                tensors,
                lambda result, error: answers.put((result, error)),
                self._model.version,
                client_timeout=self._model.timeout_ms / 1000,
            )
            self._of_thread.calls.append(call)
            result, error = answers.get()
            if error is not None:
                raise error
        except InferenceServerException as error:
            raise self._told(error) from error
        return {each.name: result.as_numpy(each.name) for each in result.get_response().outputs}

    def _by_name(self, arrays: dict[str, Array]) -> dict[str, Array]:
        """Arrays under the names of the model, which need not be given where it has one input."""
        if set(arrays) == {UNNAMED} and len(self._types) == 1:
            return {next(iter(self._types)): arrays[UNNAMED]}
        if set(arrays) != set(self._types):
            raise ValueError(f"inputs {sorted(arrays)}, but the model takes {sorted(self._types)}")
        return arrays

    def _told(self, error: Any) -> ExecutorFailed:
        """What Triton or gRPC say, by what the router has to do about it."""
        status = error.status() or ""
        if "UNAVAILABLE" in status:
            return self._lost(first_line(error))
        if "DEADLINE_EXCEEDED" in status:
            return ExecutorTimedOut(
                f"no answer from {self._model.address} in {self._model.timeout_ms:,.0f} ms",
                where=self.name,
                remedy="Its work was cancelled; raise the model's timeout_ms if a batch may take that long.",
            )
        return ExecutorFailed(first_line(error), where=self.name, remedy="See the log of the Triton server.")

    def _lost(self, found: str) -> ExecutorLost:
        remedy = f"See whether model {self._model.name} is ready at {self._model.address}; send the request again."
        return ExecutorLost(found, where=self.name, remedy=remedy)
