"""Batches to a model of a Triton server, from threads, so that the event loop makes no messages."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from latfit.errors import HardwareMissing, WrongUsage
from latfit.live.engines import UNNAMED, Array, ByRows
from latfit.live.executor import ExecutorFailed, ExecutorLost, ExecutorTimedOut, check_sizes, padded
from latfit.live.triton.way import Calls, Refused, Way

TRIES, PAUSE_S = 20, 0.5
"""How often a server is asked whether it is ready before the path rests."""


@dataclass(frozen=True)
class TritonModel:
    """address: host:port of the server's gRPC, or its HTTP as http://host:port or https://host.  version: empty for the
    server's choice.  timeout_ms: what a batch may take, also where nobody else sets a limit.  connection: what
    `tritonclient.grpc.InferenceServerClient` takes beside the address, such as ssl and root_certificates; by HTTPS what
    `http.client.HTTPSConnection` takes, such as context."""

    address: str
    name: str
    version: str = ""
    timeout_ms: float = 60_000.0
    connection: Mapping[str, Any] = field(default_factory=dict)


class TritonExecutor:
    """Each batch is one request to Triton, whose own batcher has nothing left to do: set no dynamic_batching there.

    largest: no more than the model's max_batch_size.  servers: instances of the model.  Needs the extra `triton`.
    """

    def __init__(
        self, name: str, model: TritonModel, largest: int, *, servers: int = 1, buckets: Sequence[int] = ()
    ) -> None:
        check_sizes(name, largest, servers, buckets)
        self.name, self.largest, self.servers, self.buckets = name, largest, servers, tuple(buckets)
        self._model = model
        self._threads = ThreadPoolExecutor(servers, f"latfit-{name}")
        self._way: Way | None = None
        self._rows = ByRows(self._infer)
        self._of_thread = threading.local()
        self._types: dict[str, Any] = {}

    async def start(self) -> None:
        """Raises ExecutorLost where no server answers, ExecutorFailed with what one says of the model, WrongUsage where
        its batches are too small."""
        await asyncio.to_thread(self._connect)

    async def execute(self, inputs: list[Any]) -> Sequence[Any]:
        calls: Calls = []
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
        if self._way is not None:
            await asyncio.to_thread(self._way.close)
            self._way = None

    def _connect(self) -> None:
        from tritonclient.utils import triton_to_np_dtype

        model = self._model
        if self._way is None:
            self._way = _way(model)
        try:
            told = self._way.described()
        except Refused as error:
            raise self._told(error) from error
        self._types = {name: (kind, triton_to_np_dtype(kind)) for name, kind in told.inputs.items()}
        largest = max([self.largest, *self.buckets])
        if told.largest < largest:
            raise WrongUsage(
                f"batches of up to {largest}, but the model's max_batch_size is {told.largest}",
                where=self.name,
                remedy="Set max_batch_size in its config.pbtxt, or give smaller batches.",
            )

    def _ready(self) -> bool:
        return self._way is not None and self._way.ready()

    def _run(self, inputs: list[Any], calls: Calls) -> list[Any]:
        self._of_thread.calls = calls
        return self._rows(padded(inputs, self.buckets))[: len(inputs)]

    def _infer(self, arrays: dict[str, Array]) -> dict[str, Array]:
        assert self._way is not None
        tensors = []
        for name, array in self._by_name(arrays).items():
            kind, dtype = self._types[name]
            tensors.append((name, kind, array.astype(dtype, copy=False)))
        try:
            return self._way.infer(tensors, self._of_thread.calls)
        except Refused as error:
            raise self._told(error) from error

    def _by_name(self, arrays: dict[str, Array]) -> dict[str, Array]:
        """Arrays under the names of the model, which need not be given where it has one input."""
        if set(arrays) == {UNNAMED} and len(self._types) == 1:
            return {next(iter(self._types)): arrays[UNNAMED]}
        if set(arrays) != set(self._types):
            raise ValueError(f"inputs {sorted(arrays)}, but the model takes {sorted(self._types)}")
        return arrays

    def _told(self, error: Refused) -> ExecutorFailed:
        """What Triton or the way to it say, by what the router has to do about it."""
        model = self._model
        if error.kind == "lost":
            return self._lost(str(error))
        if error.kind == "late":
            return ExecutorTimedOut(
                f"no answer from {model.address} in {model.timeout_ms:,.0f} ms",
                where=self.name,
                remedy="It was given up; raise the model's timeout_ms if a batch may take that long.",
            )
        return ExecutorFailed(str(error), where=self.name, remedy="See the log of the Triton server.")

    def _lost(self, found: str) -> ExecutorLost:
        remedy = f"See whether model {self._model.name} is ready at {self._model.address}; send the request again."
        return ExecutorLost(found, where=self.name, remedy=remedy)


def _way(model: TritonModel) -> Way:
    """Raises HardwareMissing."""
    asked, timeout_s = (model.name, model.version), model.timeout_ms / 1000
    try:
        if model.address.startswith(("http://", "https://")):
            from latfit.live.triton.http import HttpWay

            return HttpWay(model.address, asked, timeout_s, model.connection)
        from latfit.live.triton.grpc import GrpcWay

        return GrpcWay(model.address.removeprefix("grpc://"), asked, timeout_s, model.connection)
    except ImportError as error:
        raise HardwareMissing(
            f"{error.name} is not installed", where=model.address, remedy="Install it: pip install 'latfit[triton]'."
        ) from None
