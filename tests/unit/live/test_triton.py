"""The Triton executor against a server that speaks Triton's protocol and does as it is told."""

import asyncio
import json
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from typing import Any

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

pytestmark = pytest.mark.skipif(find_spec("tritonclient") is None, reason="tritonclient is missing (latfit[triton])")

LARGEST, BUCKETS = 8, (1, 4, 8)
TENSOR = {"name": "X", "datatype": "FP32", "shape": [-1, 4]}
PAGES = {"": {"name": "double", "inputs": [TENSOR]}, "/config": {"max_batch_size": LARGEST}}


class DoublingServer(ThreadingHTTPServer):
    """A model `double` of rows of 4 float32. fails: status of its answers, if not 200.  sizes: batches that came.
    cancelled: released for each batch whose connection was closed while it hung."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Double)
        self.hangs, self.fails = False, 0
        self.sizes: list[int] = []
        self.cancelled = threading.Semaphore(0)
        self.connections: list[Any] = []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)

    def kill(self) -> None:
        self.shutdown()
        self.server_close()
        for each in self.connections:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class Double(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: DoublingServer

    def say(self, status: int, body: bytes = b"", head: int = 0) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if head:
            self.send_header("Inference-Header-Content-Length", str(head))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        what = self.path.removeprefix("/v2/models/double")
        if what == "/ready":
            self.say(200)
        elif what in PAGES:
            self.say(200, json.dumps(PAGES[what]).encode())
        else:
            self.say(404, b'{"error": "Request for unknown model: \'triple\' is not found"}')

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        size = int(self.headers["Inference-Header-Content-Length"])
        shape = json.loads(body[:size])["inputs"][0]["shape"]
        self.server.sizes.append(shape[0])
        if self.server.hangs and select.select([self.connection], [], [], 30.0)[0]:
            self.close_connection = True
            self.server.cancelled.release()
            return
        if self.server.fails:
            self.say(self.server.fails, b'{"error": "as it was told"}')
            return
        array = np.frombuffer(body[size:], np.float32) * 2
        output = {"name": "Y", "datatype": "FP32", "shape": shape, "parameters": {"binary_data_size": array.nbytes}}
        head = json.dumps({"model_name": "double", "outputs": [output]}).encode()
        self.say(200, head + array.tobytes(), len(head))

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[DoublingServer]:
    found = DoublingServer()
    yield found
    found.kill()


def executor(address: str, name: str = "double", largest: int = LARGEST, **model: Any) -> TritonExecutor:
    buckets = BUCKETS if largest == LARGEST else ()
    return TritonExecutor("triton", TritonModel(address, name, **model), largest, buckets=buckets)


def router(triton: TritonExecutor, **options: Any) -> Router:
    return Router([triton], [[1.0] * LARGEST], gpu_only(Limits(LARGEST)), RouterOptions(**options))


def test_everybody_gets_its_row_and_the_model_sees_buckets_only(server: DoublingServer) -> None:
    rows = np.random.default_rng(0).standard_normal((100, 4))

    async def main() -> list[Any]:
        async with router(executor(server.address), example=rows[0]) as live:
            assert server.sizes == list(BUCKETS)
            first = await asyncio.gather(*(live.submit(row) for row in rows[:50]))
            named = [live.submit({"X": row}) for row in rows[50:]]  # unlike the example, which has no name
            wrong = await asyncio.gather(*named, return_exceptions=True)
            assert all("inputs ['X'], not ['']" in str(each) for each in wrong)
            return first

    outputs = asyncio.run(main())
    np.testing.assert_allclose(np.array(outputs), 2 * rows[:50], rtol=1e-6)
    assert set(server.sizes) == set(BUCKETS)


@pytest.mark.parametrize(("status", "kind"), [(503, ExecutorLost), (504, ExecutorTimedOut), (400, ExecutorFailed)])
async def test_errors_are_told_by_what_is_to_be_done(server: DoublingServer, status: int, kind: type) -> None:
    async with router(executor(server.address)) as live:
        server.fails = status
        with pytest.raises(ExecutorFailed) as raised:
            await live.submit(np.ones(4))
        assert type(raised.value) is kind
        server.fails = 0
        assert (await live.submit(np.ones(4))).tolist() == [2.0] * 4


@pytest.mark.parametrize("limits", [({"timeout_ms": 100.0}, {}), ({}, {"timeout_ms": 100.0})])
async def test_a_batch_that_is_late_is_cancelled_at_the_server(
    server: DoublingServer, limits: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """By the router's limit, or by the client's own."""
    async with router(executor(server.address, **limits[1]), **limits[0]) as live:
        server.hangs = True
        with pytest.raises(ExecutorTimedOut):
            await live.submit(np.ones(4))
        server.hangs = False
        assert (await asyncio.wait_for(live.submit(np.ones(4)), 20)).tolist() == [2.0] * 4
    assert server.cancelled.acquire(timeout=5.0)


async def test_a_server_that_dies_and_comes_back() -> None:
    server = DoublingServer()
    async with router(executor(server.address), patience_ms=60_000.0) as live:
        assert (await live.submit(np.ones(4))).tolist() == [2.0] * 4
        await asyncio.to_thread(server.kill)
        with pytest.raises(ExecutorLost):
            await live.submit(np.ones(4))
        waits = asyncio.ensure_future(live.submit(np.ones(4)))  # nobody else fails while it is away
        await asyncio.sleep(0.1)
        assert not waits.done()
        server = await asyncio.to_thread(DoublingServer, server.server_port)
        assert (await asyncio.wait_for(waits, 30)).tolist() == [2.0] * 4
    server.kill()


@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        ({"name": "triple"}, ExecutorFailed, "unknown model: 'triple'"),
        ({"largest": 9}, WrongUsage, "max_batch_size is 8"),
        ({"address": "http://127.0.0.1:1"}, ExecutorLost, "127.0.0.1:1"),
        ({"address": "localhost:8001"}, WrongUsage, "'localhost:8001' is no HTTP address"),
    ],
)
def test_what_cannot_start_says_why(
    server: DoublingServer, given: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        asyncio.run(executor(**{"address": server.address, **given}).start())
