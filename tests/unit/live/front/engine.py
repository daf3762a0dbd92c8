"""A stand-in for an engine on a port of its own, which speaks as much HTTP as it is told to, byte by byte."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

SSE = [b'data: {"choices":[{"text":"a"}]}\n\n', b": a comment\n\n", b'data: {"choices":[{"text":"\xc3\xa9"}]}\n\n']
SSE += [b"data: [DONE]\n\n"]


@dataclass
class Asked:
    """A request as it came, and whether its connection was closed before it was answered."""

    head: bytes
    body: bytes
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def lines(self) -> list[str]:
        return self.head.decode("latin-1").rstrip().split("\r\n")

    def header(self, name: str) -> str | None:
        found = [line.partition(": ")[2] for line in self.lines[1:] if line.lower().startswith(f"{name}: ")]
        return found[0] if found else None


Answer = Callable[[asyncio.StreamWriter, Asked], Awaitable[None]]


def head(status: str, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode()


def whole(body: bytes, status: str = "200 OK", *headers: str) -> Answer:
    """A complete answer."""

    async def answer(writer: asyncio.StreamWriter, asked: Asked) -> None:
        writer.write(head(status, f"Content-Length: {len(body)}", "Content-Type: application/json", *headers) + body)

    return answer


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def streamed(pieces: list[bytes], gap_s: float = 0.0, *, end: bool = True, coding: str = "chunked") -> Answer:
    """Chunks as engines stream them; without an end the connection just closes."""

    async def answer(writer: asyncio.StreamWriter, asked: Asked) -> None:
        writer.write(head("200 OK", f"Transfer-Encoding: {coding}", "Content-Type: text/event-stream", "X-Own: 1"))
        for piece in pieces:
            writer.write(chunk(piece))
            await writer.drain()
            if gap_s:
                await asyncio.sleep(gap_s)
        if end:
            writer.write(b"0\r\n\r\n")
        else:
            writer.close()

    return answer


async def hangs(writer: asyncio.StreamWriter, asked: Asked) -> None:
    await asked.closed.wait()


async def dies(writer: asyncio.StreamWriter, asked: Asked) -> None:
    writer.close()


class StandInEngine:
    """answer: how it answers a request other than to /health.  tls: context of an HTTPS server.  healthy: whether it
    says that it is ready.  asked: what it was asked for.  connections: made to it, but for those of /health."""

    def __init__(self, answer: Answer, tls: ssl.SSLContext | None = None) -> None:
        self.answer, self.tls, self.healthy = answer, tls, True
        self.asked: list[Asked] = []
        self.connections = 0
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, ssl=self.tls)
        self.port: int = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As one that is killed: its port and all its connections are gone."""
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        first = True
        try:
            while not writer.is_closing():
                asked = await _read(reader)
                if asked.lines[0].startswith("GET ") and asked.lines[0].split()[1].endswith("/health"):
                    await whole(b"", "200 OK" if self.healthy else "503 Not yet")(writer, asked)
                    continue
                self.connections += first
                first = False
                self.asked.append(asked)
                watching = asyncio.ensure_future(_watch(reader, asked))
                await self.answer(writer, asked)
                await writer.drain()
                watching.cancel()
                await asyncio.wait((watching,))
                if asked.closed.is_set():
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()


async def _read(reader: asyncio.StreamReader) -> Asked:
    found = await reader.readuntil(b"\r\n\r\n")
    asked = Asked(found, b"")
    length = asked.header("content-length")
    if length:
        asked.body = await reader.readexactly(int(length))
    elif asked.header("transfer-encoding"):
        while size := int(await reader.readline(), 16):
            asked.body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    return asked


async def _watch(reader: asyncio.StreamReader, asked: Asked) -> None:
    try:
        if not await reader.read(1):
            asked.closed.set()
    except ConnectionError:
        asked.closed.set()


@asynccontextmanager
async def engine(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[StandInEngine]:
    found = StandInEngine(answer, tls)
    await found.start()
    try:
        yield found
    finally:
        await found.stop()
