"""What `latfit serve` costs a request: an engine that answers at once is asked directly and through the front.

`python -m benchmarks.front_overhead [--smoke]`. Engine, front and client are processes that share this machine's cores.
"""

import asyncio
import contextlib
import multiprocessing
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import numpy as np

EVENTS = 64
PIECE = b'data: {"choices":[{"text":" word","index":0}]}\n\n'
WHOLE = (
    b'{"id":"x","object":"text_completion","model":"m","choices":[{"index":0,"text":" word","finish_reason":"stop"}]}'
)
STREAM = b"".join(b"%x\r\n%s\r\n" % (len(PIECE), PIECE) for _ in range(EVENTS)) + b"0\r\n\r\n"
BODY = b'{"model":"m","prompt":"' + b"word " * 200 + b'","max_tokens":1,"stream":%s}'
SENDERS = 32


class Engine(asyncio.Protocol):
    """Reads requests and answers each at once: a stream where that is asked for."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.buffer = transport, b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            size = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            if len(self.buffer) < end + 4 + size:
                return
            body, self.buffer = self.buffer[end + 4 : end + 4 + size], self.buffer[end + 4 + size :]
            if b'"stream":true' in body.replace(b" ", b""):
                kind = b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked"
                self.transport.write(b"HTTP/1.1 200 OK\r\n" + kind + b"\r\n\r\n" + STREAM)
            else:
                kind = b"Content-Type: application/json\r\nContent-Length: %d" % len(WHOLE)
                self.transport.write(b"HTTP/1.1 200 OK\r\n" + kind + b"\r\n\r\n" + WHOLE)


def run_engine(port: int) -> None:
    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", port)
        await server.serve_forever()

    asyncio.run(main())


def wait_for(url: str, within_s: float = 60.0) -> None:
    """Until somebody listens."""
    place, ends = urlsplit(url), time.monotonic() + within_s
    while True:
        with contextlib.suppress(OSError), socket.create_connection((place.hostname, place.port), 1.0):
            return
        if time.monotonic() > ends:
            raise SystemExit(f"nobody listens at {url}")
        time.sleep(0.1)


async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, raw: bytes) -> float:
    """ms from a request to the end of its reply."""
    began = time.perf_counter()
    writer.write(raw)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b" 200 " not in head.split(b"\r\n")[0]:
        raise RuntimeError(head.decode("latin-1"))
    if b"transfer-encoding: chunked" in head:
        while size := int(await reader.readline(), 16):
            await reader.readexactly(size + 2)
        await reader.readline()
    else:
        await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
    return (time.perf_counter() - began) * 1e3


async def measure(name: str, url: str, count: int) -> None:
    place = urlsplit(url)
    found = {}
    for kind in (b"false", b"true"):
        body = BODY % kind
        lines = (f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
                 f"Authorization: Bearer sk-benchmark\r\nContent-Length: {len(body)}\r\n\r\n")  # fmt: skip
        raw = lines.encode() + body
        lone = await asyncio.open_connection(place.hostname, place.port)
        alone = [await one(*lone, raw) for _ in range(count + count // 8)][count // 8 :]
        connections = [lone, *[await asyncio.open_connection(place.hostname, place.port) for _ in range(SENDERS - 1)]]

        async def sender(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, raw: bytes = raw, each: int = count // 8
        ) -> None:
            for _ in range(each):
                await one(reader, writer, raw)

        began = time.perf_counter()
        await asyncio.gather(*(sender(*each) for each in connections))
        found[kind] = (*np.quantile(alone, [0.5, 0.99]), SENDERS * (count // 8) / (time.perf_counter() - began))
        for _, writer in connections:
            writer.close()
    (p50, p99, rate), (stream50, stream99, streams) = found.values()
    print(
        f"  {name:<10} whole: p50 {p50:.2f}, p99 {p99:.2f} ms, {rate:,.0f} req/s of {SENDERS};"
        f" {EVENTS} events: p50 {stream50:.2f}, p99 {stream99:.2f} ms, {streams:,.0f} req/s"
    )


@contextlib.contextmanager
def front(engine_url: str, port: int) -> Iterator[str]:
    command = [sys.executable, "-m", "latfit", "serve", engine_url, "--slots", f"gpu={SENDERS}"]
    process = subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stderr is not None
    process.stderr.readline()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def main(smoke: bool = False, port: int = 18900) -> None:
    count = 64 if smoke else 4000
    engine = multiprocessing.get_context("spawn").Process(target=run_engine, args=(port,), daemon=True)
    engine.start()
    url = f"http://127.0.0.1:{port}"
    print(f"front: {len(BODY):,} bytes, one at a time and {SENDERS} at a time, before an engine that answers at once")
    try:
        wait_for(url)
        asyncio.run(measure("directly", url, count))
        with front(url, port + 1) as there:
            asyncio.run(measure("latfit", there, count))
    finally:
        engine.kill()
        engine.join()


if __name__ == "__main__":
    main("--smoke" in sys.argv[1:])
