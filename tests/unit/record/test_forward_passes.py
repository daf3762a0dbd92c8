"""A publisher of forward-pass metrics as vLLM and SGLang have it, with steps of known size and time."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from latfit.api import record_passes
from latfit.errors import BadInput, HardwareMissing, WrongUsage
from latfit.record import is_stream
from latfit.trace import read_parquet

zmq = pytest.importorskip("zmq")


class Scheduled(msgspec.Struct, frozen=True):
    """Fields as in the engines' sources."""

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    sum_prefill_kv_tokens: int = 0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class Queued(msgspec.Struct, frozen=True):
    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class SglangMetrics(msgspec.Struct):
    worker_id: str = ""
    dp_rank: int = 0
    wall_time: float = 0.0
    scheduled_requests: Scheduled = Scheduled()
    queued_requests: Queued = Queued()


class VllmMetrics(msgspec.Struct):
    version: int = 1
    worker_id: str = ""
    dp_rank: int = 0
    counter_id: int = 0
    timing_scope: str = "execute_model_cuda"
    wall_time: float = 0.0
    scheduled_requests: Scheduled = Scheduled()
    queued_requests: Queued = Queued()


def metrics(kind: type[SglangMetrics] | type[VllmMetrics], step: int) -> SglangMetrics | VllmMetrics:
    """Step `step`: 2 prompts of 100 tokens and `step` decodes in 10 + step ms; every fifth is a heartbeat."""
    found = kind(worker_id="w", wall_time=(10 + step) / 1e3, queued_requests=Queued(num_prefill_requests=3))
    found.scheduled_requests = Scheduled(2, 200, 0.0, 50, step, 1000 * step, 0.0)
    if isinstance(found, VllmMetrics):
        found.counter_id = step
    return found if step % 5 else kind(worker_id="w")


@contextmanager
def published(place: str, messages: list[tuple[bytes, ...]]) -> Iterator[None]:
    """Publish the messages again and again, each round from the start, until the end of the block."""
    socket = zmq.Context.instance().socket(zmq.PUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(place)
    ended = threading.Event()

    def send() -> None:
        while not ended.wait(0.02):
            for message in messages:
                socket.send_multipart(message)
        socket.close()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("kind", [SglangMetrics, VllmMetrics])
def test_steps_of_a_stream(kind: type[SglangMetrics] | type[VllmMetrics], tmp_path: Path) -> None:
    encode = msgspec.msgpack.Encoder().encode
    messages = [(b"", step.to_bytes(8, "big"), encode(metrics(kind, step))) for step in range(1, 8)]
    messages.append((b"", (10).to_bytes(8, "big"), encode({"worker_id": "w", "scheduled_requests": {}})))
    place = f"ipc://{tmp_path}/passes"
    with published(place, [*messages, (b"", b"", b"\xff"), (b"alone",)]):
        found = record_passes(place, duration="400ms", out=tmp_path / "t.parquet", path="gpu")
    steps = read_parquet(tmp_path / "t.parquet")
    rows = [i for i, step in enumerate(steps["step"].tolist()) if step == 7][:1]
    expected: dict[str, object] = {
        "B": 9,
        "S": 207,
        "T_ms": 17,
        "prefill_requests": 2,
        "prefill_tokens": 200,
        "context_tokens": 7050,
    }
    expected |= {"prefill_context_tokens": 50, "queued_requests": 3, "path": "gpu", "idle": False}
    for name, value in expected.items():
        assert steps[name][rows[0]] == (pytest.approx(value) if isinstance(value, float) else value), name
    assert steps["idle"].tolist() == [step % 5 == 0 for step in steps["step"].tolist()]
    assert found.to_json()["steps"] == sum(step % 5 != 0 for step in steps["step"].tolist()) >= 6
    assert found.result["unread_messages"] >= 2
    assert found.verdict.endswith("B 3 to 9, S 201 to 207, 11 ms to 17 ms a step.")


def test_nobody_publishes(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no step came in 0 messages"):
        record_passes(f"ipc://{tmp_path}/nobody", duration="10ms", out=tmp_path / "t.parquet")
    assert not (tmp_path / "t.parquet").exists()


@pytest.mark.parametrize(
    "address", ["zmq://localhost", "tcp://localhost:port", "ipc://", "zmq://*:1", "zmq://a b:1", f"ipc:///{200 * 'a'}"]
)
def test_addresses_that_are_none(address: str, tmp_path: Path) -> None:
    with pytest.raises(WrongUsage, match="no address of ZeroMQ"):
        record_passes(address, out=tmp_path / "t.parquet")
    assert is_stream(address)
    assert not is_stream("http://localhost:8000")
    assert not is_stream("localhost:8000")


def test_an_address_is_checked_before_pyzmq(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(WrongUsage):
        record_passes("zmq://localhost", out=tmp_path / "t.parquet")
    with pytest.raises(HardwareMissing):
        record_passes("zmq://localhost:1", out=tmp_path / "t.parquet")
