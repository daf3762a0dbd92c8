"""The Triton executor against a server that speaks Triton's protocol and does as it is told."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
import pytest

from latfit.errors import WrongUsage
from latfit.live import (
    ExecutorFailed,
    ExecutorLost,
    ExecutorTimedOut,
    Router,
    RouterOptions,
    TritonExecutor,
    TritonModel,
)
from latfit.policies import Limits
from latfit.policies.policy import gpu_only
from tests.conftest import ROOT
from tests.docs.examples import blocks

pytestmark = pytest.mark.skipif(find_spec("tritonclient") is None, reason="tritonclient is missing (latfit[triton])")

LARGEST, BUCKETS = 8, (1, 4, 8)
Server = Any


class Told:
    """What the server is to do, and what it saw."""

    def __init__(self) -> None:
        self.ready, self.hangs = True, False
        self.fails: str | None = None
        self.sizes: list[int] = []
        self.cancelled = 0


def doubling_server(told: Told, address: str = "127.0.0.1:0") -> tuple[Server, str]:
    """A model `double` of rows of 4 float32, at most 8 of them; the server, and its address."""
    from concurrent.futures import ThreadPoolExecutor

    import grpc
    from tritonclient.grpc import service_pb2 as pb, service_pb2_grpc as services

    class Double(services.GRPCInferenceServiceServicer):  # type: ignore[misc]
        def ModelReady(self, request: Any, context: Any) -> Any:
            return pb.ModelReadyResponse(ready=told.ready)

        def ModelMetadata(self, request: Any, context: Any) -> Any:
            if request.name != "double":
                context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.name}' is not found")
            tensor = pb.ModelMetadataResponse.TensorMetadata
            x, y = tensor(name="X", datatype="FP32", shape=[-1, 4]), tensor(name="Y", datatype="FP32", shape=[-1, 4])
            return pb.ModelMetadataResponse(name="double", inputs=[x], outputs=[y])

        def ModelConfig(self, request: Any, context: Any) -> Any:
            response = pb.ModelConfigResponse()
            response.config.max_batch_size = 8
            return response

        def ModelInfer(self, request: Any, context: Any) -> Any:
            shape = list(request.inputs[0].shape)
            told.sizes.append(shape[0])
            ended = threading.Event()
            context.add_callback(ended.set)
            if told.hangs and ended.wait(30.0):
                told.cancelled += 1
            if told.fails is not None:
                context.abort(getattr(grpc.StatusCode, told.fails), "as it was told")
            array = np.frombuffer(request.raw_input_contents[0], np.float32) * 2
            response = pb.ModelInferResponse(model_name="double")
            response.outputs.add(name="Y", datatype="FP32", shape=shape)
            response.raw_output_contents.append(array.tobytes())
            return response

    server = grpc.server(ThreadPoolExecutor(8))
    services.add_GRPCInferenceServiceServicer_to_server(Double(), server)
    port = server.add_insecure_port(address)
    server.start()
    return server, f"127.0.0.1:{port}"


def doubling_web_server(told: Told, address: str = "127.0.0.1:0") -> tuple[Server, str]:
    """The same by HTTP."""
    import json
    import select
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    http_status = {"UNAVAILABLE": 503, "DEADLINE_EXCEEDED": 504, "INVALID_ARGUMENT": 400}
    tensor = {"name": "X", "datatype": "FP32", "shape": [-1, 4]}
    known = {"": {"name": "double", "inputs": [tensor]}, "/config": {"max_batch_size": 8}}

    class Double(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def say(self, status: int, body: bytes = b"", head: int | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if head is not None:
                self.send_header("Inference-Header-Content-Length", str(head))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            what = self.path.removeprefix("/v2/models/double")
            if what == "/ready":
                self.say(200 if told.ready else 400)
            elif what in known:
                self.say(200, json.dumps(known[what]).encode())
            else:
                self.say(404, b'{"error": "Request for unknown model: \'triple\' is not found"}')

        def do_POST(self) -> None:
            body, size = (
                self.rfile.read(int(self.headers["Content-Length"])),
                self.headers["Inference-Header-Content-Length"],
            )
            shape = json.loads(body[: int(size)])["inputs"][0]["shape"]
            told.sizes.append(shape[0])
            if told.hangs and select.select([self.connection], [], [], 30.0)[0]:
                told.cancelled += 1
                self.close_connection = True
                return
            if told.fails is not None:
                self.say(http_status[told.fails], b'{"error": "as it was told"}')
                return
            array = np.frombuffer(body[int(size) :], np.float32) * 2
            output = {"name": "Y", "datatype": "FP32", "shape": shape, "parameters": {"binary_data_size": array.nbytes}}
            head = json.dumps({"model_name": "double", "outputs": [output]}).encode()
            self.say(200, head + array.tobytes(), len(head))

        def log_message(self, *_: Any) -> None: ...

    class WebServer(ThreadingHTTPServer):
        daemon_threads = True
        open: ClassVar[list[Any]] = []

        def process_request(self, request: Any, client_address: Any) -> None:
            self.open.append(request)
            super().process_request(request, client_address)

        def stop(self, _: None) -> Any:
            """As a server of gRPC has it: all connections end."""
            self.shutdown()
            self.server_close()
            for each in self.open:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            ended = threading.Event()
            ended.set()
            return ended

    server = WebServer(("127.0.0.1", int(address.rpartition(":")[2])), Double)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_port}"


SERVERS = {"grpc": doubling_server, "http": doubling_web_server}


@pytest.fixture(params=SERVERS)
def way(request: pytest.FixtureRequest) -> str:
    if find_spec(f"tritonclient.{request.param}") is None:
        pytest.skip(f"tritonclient[{request.param}] is missing")
    return str(request.param)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def address(told: Told, way: str) -> Iterator[str]:
    server, address = SERVERS[way](told)
    yield address
    server.stop(None).wait()


def executor(address: str, name: str = "double", largest: int = LARGEST, **model: Any) -> TritonExecutor:
    return TritonExecutor(
        "triton", TritonModel(address, name, **model), largest, buckets=BUCKETS if largest == 8 else ()
    )


def router(triton: TritonExecutor, **options: Any) -> Router:
    return Router([triton], [[1.0] * LARGEST], gpu_only(Limits(LARGEST)), RouterOptions(**options))


def test_everybody_gets_its_row_and_the_model_sees_buckets_only(address: str, told: Told) -> None:
    rows = np.random.default_rng(0).standard_normal((100, 4))

    async def main() -> list[Any]:
        async with router(executor(address), example=rows[0]) as live:
            assert told.sizes == list(BUCKETS)
            by_name = [{"X": row} for row in rows[50:]]
            first = await asyncio.gather(*(live.submit(row) for row in rows[:50]))
            wrong = await asyncio.gather(*(live.submit(row) for row in by_name), return_exceptions=True)
            assert all("inputs ['X'], not ['']" in str(each) for each in wrong)
            return first

    outputs = asyncio.run(main())
    np.testing.assert_allclose(np.array(outputs), 2 * rows[:50], rtol=1e-6)
    assert set(told.sizes) == set(BUCKETS)


def test_inputs_may_have_their_names(address: str) -> None:
    async def main() -> None:
        async with router(executor(address)) as live:
            assert (await live.submit({"X": np.ones(4)})).tolist() == [2.0] * 4

        async with router(executor(address)) as live:
            with pytest.raises(ExecutorFailed, match=r"inputs \['Z'\], but the model takes \['X'\]"):
                await live.submit({"Z": np.ones(4)})

    asyncio.run(main())


@pytest.mark.parametrize(
    ("status", "kind"),
    [("UNAVAILABLE", ExecutorLost), ("DEADLINE_EXCEEDED", ExecutorTimedOut), ("INVALID_ARGUMENT", ExecutorFailed)],
)
def test_errors_are_told_by_what_is_to_be_done(address: str, told: Told, status: str, kind: type) -> None:
    async def main() -> None:
        async with router(executor(address)) as live:
            told.fails = status
            with pytest.raises(ExecutorFailed) as raised:
                await live.submit(np.ones(4))
            assert type(raised.value) is kind
            told.fails = None
            assert (await live.submit(np.ones(4))).tolist() == [2.0] * 4

    asyncio.run(main())


def test_a_batch_that_is_late_is_cancelled_at_the_server(address: str, told: Told) -> None:
    async def main() -> None:
        async with router(executor(address), timeout_ms=100.0) as live:
            told.hangs = True
            with pytest.raises(ExecutorTimedOut):
                await live.submit(np.ones(4))
            told.hangs = False
            assert (await asyncio.wait_for(live.submit(np.ones(4)), 20)).tolist() == [2.0] * 4

    asyncio.run(main())
    assert eventually(lambda: told.cancelled == 1)


def test_the_client_has_a_limit_of_its_own(address: str, told: Told) -> None:
    async def main() -> None:
        triton = executor(address, timeout_ms=100.0)
        await triton.start()
        told.hangs = True
        with pytest.raises(ExecutorTimedOut, match="in 100 ms"):
            await triton.execute([np.ones(4)])
        told.hangs = False
        await triton.close()

    asyncio.run(main())


def test_a_server_that_dies_and_comes_back(told: Told, way: str) -> None:
    server, address = SERVERS[way](told)

    async def main() -> None:
        nonlocal server
        async with router(executor(address), patience_ms=60_000.0) as live:
            assert (await live.submit(np.ones(4))).tolist() == [2.0] * 4
            await asyncio.to_thread(server.stop(None).wait)
            with pytest.raises(ExecutorLost):
                await live.submit(np.ones(4))
            waits = asyncio.ensure_future(live.submit(np.ones(4)))  # nobody else fails while it is away
            await asyncio.sleep(0.3)
            assert not waits.done()
            server, _ = await asyncio.to_thread(SERVERS[way], told, address)
            assert (await asyncio.wait_for(waits, 30)).tolist() == [2.0] * 4

    asyncio.run(main())
    server.stop(None).wait()


@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        ({"name": "triple"}, ExecutorFailed, "unknown model: 'triple'"),
        ({"largest": 9}, WrongUsage, "max_batch_size is 8"),
        ({"address": "127.0.0.1:1"}, ExecutorLost, "127.0.0.1:1"),
    ],
)
def test_what_cannot_start_says_why(address: str, given: dict[str, Any], kind: type[Exception], says: str) -> None:
    async def main() -> None:
        scheme = "http://" if address.startswith("http") else ""
        elsewhere = {"address": scheme + given["address"]} if "address" in given else {}
        triton = executor(**{"address": address, **given, **elsewhere})
        with pytest.raises(kind, match=says):
            await triton.start()
        await triton.close()

    asyncio.run(main())


def test_large_batches_do_not_hold_the_event_loop_by_waiting(address: str, told: Told) -> None:
    """While a batch is at the server, the loop runs others' callbacks."""

    async def main() -> None:
        triton = executor(address, timeout_ms=1000.0)
        await triton.start()
        told.hangs = True
        batch = asyncio.ensure_future(triton.execute([np.ones(4)]))
        for _ in range(10):
            await asyncio.sleep(0.001)
        assert not batch.done()
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch
        await triton.close()

    asyncio.run(main())


def test_the_page_shows_an_executor_that_runs(address: str) -> None:
    (shown,) = [each for each in blocks(ROOT / "docs" / "live.md", "py") if "Triton" in each]
    names: dict[str, Any] = {}
    shown = shown.replace("http://localhost:8000" if address.startswith("http") else "localhost:8001", address)
    exec(compile(shown, "live.md", "exec"), names)
    shown_executor = names["web" if address.startswith("http") else "gpu"]

    async def main() -> None:
        async with router(shown_executor, example=np.ones(4)) as live:
            assert (await live.submit(np.ones(4))).tolist() == [2.0] * 4

    asyncio.run(main())


def eventually(holds: Callable[[], bool]) -> bool:
    for _ in range(200):
        if holds():
            return True
        time.sleep(0.01)
    return False
