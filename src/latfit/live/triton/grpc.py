"""The way to a Triton server by gRPC.

The client that sends from threads is used, not Triton's asyncio client, which turns tensors into messages on the event
loop: batches of 19 MB held it for 190 to 320 ms so, and for 70 to 75 ms from a thread, in half the time; small batches
took as long both ways. A batch that is given up is cancelled at the server too, which frees its thread.
"""

import queue
from collections.abc import Mapping, Sequence
from typing import Any

from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from latfit.errors import first_line
from latfit.live.engines import Array
from latfit.live.triton.way import ASKED_S, Calls, Described, Refused, late, lost, refused

CHANNEL = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 500),
)
"""Messages of any size, as Triton's client has them; a server that is back is noticed in 0.5 s, not in gRPC's 20 s and
more."""


class GrpcWay:
    """To one model. how: what `tritonclient.grpc.InferenceServerClient` takes beside the address."""

    def __init__(self, address: str, model: tuple[str, str], timeout_s: float, how: Mapping[str, Any]) -> None:
        self._client = InferenceServerClient(address, **{"channel_args": list(CHANNEL), **how})
        self._model, self._timeout_s = model, timeout_s

    def described(self) -> Described:
        try:
            told = self._client.get_model_metadata(*self._model, client_timeout=ASKED_S)
            config = self._client.get_model_config(*self._model, client_timeout=ASKED_S).config
        except InferenceServerException as error:
            raise _told(error) from error
        return Described({each.name: each.datatype for each in told.inputs}, int(config.max_batch_size))

    def ready(self) -> bool:
        try:
            return bool(self._client.is_model_ready(*self._model, client_timeout=ASKED_S))
        except InferenceServerException:
            return False

    def infer(self, tensors: Sequence[tuple[str, str, Array]], calls: Calls) -> dict[str, Array]:
        inputs = []
        for name, kind, array in tensors:
            inputs.append(InferInput(name, list(array.shape), kind))
            inputs[-1].set_data_from_numpy(array)
        answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        try:
            call = self._client.async_infer(
                self._model[0],
                inputs,
                lambda result, error: answers.put((result, error)),
                self._model[1],
                client_timeout=self._timeout_s,
            )
            calls.append(call)
            result, error = answers.get()
            if error is not None:
                raise error
        except InferenceServerException as error:
            raise _told(error) from error
        return {each.name: result.as_numpy(each.name) for each in result.get_response().outputs}

    def close(self) -> None:
        self._client.close()


def _told(error: Any) -> Refused:
    """What Triton or gRPC say, by what the router has to do about it."""
    status = error.status() or ""
    if "UNAVAILABLE" in status:
        return lost(first_line(error))
    return late() if "DEADLINE_EXCEEDED" in status else refused(first_line(error))
