"""Forward-pass metrics that an engine publishes over ZeroMQ, a message for each step.

vLLM publishes with --forward-pass-metrics-port, SGLang with --enable-forward-pass-metrics, NVIDIA Dynamo from its
workers. A message has three frames: topic, number (8 bytes, big endian), and a map in msgpack.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from latfit.engines import ENGINES
from latfit.errors import BadInput, HardwareMissing, WrongUsage
from latfit.trace import Rows, Trace, add_pass, trace_of_passes

SCHEMES = {"zmq": "tcp", "tcp": "tcp", "ipc": "ipc"}
FRAMES = 3
POLL_S = 0.5


def is_stream(address: str) -> bool:
    return address.partition("://")[0] in SCHEMES and "://" in address


class PassRecorder:
    """Steps of the engines that publish at one address. unread: messages without a step."""

    def __init__(self, address: str) -> None:
        """Raises WrongUsage for what is no address, HardwareMissing without pyzmq."""
        scheme, _, place = address.partition("://")
        remedy = "Write zmq://localhost:20380 or ipc:///tmp/name."
        refused = WrongUsage(f"{address!r} is no address of ZeroMQ", where="URL", remedy=remedy)
        try:
            is_address = bool(place) and (scheme == "ipc" or bool(urlsplit(address).port))
        except ValueError:  # the port is no number
            is_address = False
        if not is_address:
            raise refused
        try:
            import zmq
        except ImportError:
            raise HardwareMissing("pyzmq is not installed", where=address, remedy="pip install pyzmq") from None
        self.address, self.rows, self.unread = address, Rows(), 0
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 100_000)
        self._socket.setsockopt(zmq.IPV6, 1)
        try:
            self._socket.connect(f"{SCHEMES[scheme]}://{place}")
        except zmq.ZMQError:
            self._socket.close()
            raise refused from None

    def record(self, seconds: float) -> Iterator[float]:
        """Take messages for so long; yield the seconds so far, often."""
        began = time.monotonic()
        try:
            while (spent := time.monotonic() - began) < seconds:
                yield spent
                until = time.monotonic() + POLL_S
                while self._socket.poll(max(1, round(1000 * (until - time.monotonic())))) and time.monotonic() < until:
                    self._take(self._socket.recv_multipart())
        finally:
            self._socket.close()

    def _take(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != FRAMES:
                raise ValueError
            metrics: dict[str, Any] = msgspec.msgpack.decode(frames[-1], type=dict)
        except (ValueError, msgspec.DecodeError):
            self.unread += 1
            return
        metrics.setdefault("counter_id", int.from_bytes(frames[1], "big"))
        if not add_pass(self.rows, {"fpm": metrics, "observed_at_unix_ms": 1e3 * time.time()}):
            self.unread += 1

    def trace(self, labels: Mapping[str, str]) -> Trace:
        if not (self.rows.numbers("B") > 0).any():
            options = ", ".join(f"{each.name} with {each.passes_flag}" for each in ENGINES if each.passes_flag)
            remedy = f"See whether the engine serves requests and publishes there: {options}."
            found = f"no step came in {self.rows.count + self.unread} messages"
            raise BadInput(found, where=self.address, remedy=remedy)
        texts = {name: np.full(self.rows.count, value, dtype=object) for name, value in labels.items()}
        return trace_of_passes(self.rows).with_columns(**texts)
