"""A front before stand-in engines, and callers who say on the wire just what a test wants."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from latfit.live import Front, FrontOptions, FrontServer, HttpExecutor, HttpTimeouts, Router, RouterOptions
from latfit.policies import Limits, Policy, cutoff
from latfit.policies.policy import gpu_only
from tests.unit.live.front.engine import StandInEngine

NAMES = ("gpu", "cpu")
QUICK = HttpTimeouts(connect_s=1.0, first_byte_s=0.5, between_s=0.5)


@asynccontextmanager
async def running(
    engines: Sequence[StandInEngine | str],
    *,
    slots: int = 2,
    timeouts: HttpTimeouts = QUICK,
    policy: Policy | None = None,
    most_waiting: int = 100,
    overdue_s: float = 0.3,
    patience_ms: float = 200.0,
    probe_ms: float = 50.0,
    server: dict[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
    headers: Mapping[str, str] | None = None,
    **options: Any,
) -> AsyncIterator[FrontServer]:
    """Each engine with T(1) = 50 ms; two by default under a T_cut of 20 ms."""
    urls = [each if isinstance(each, str) else each.url for each in engines]
    executors = [
        HttpExecutor(name, url, slots, timeouts, overdue_s=overdue_s, headers=headers)
        for name, url in zip(NAMES, urls, strict=False)
    ]
    rule = policy or (gpu_only(Limits(1)) if len(engines) == 1 else cutoff(20.0, Limits(1, 1)))
    deadlines = (float("inf"),) * max(len(options.get("classes", ())), 1)
    limits = RouterOptions(most_waiting, deadlines, timeout_ms=float("inf"), patience_ms=patience_ms, probe_ms=probe_ms)
    router = Router(executors, [[50.0]] * len(engines), rule, limits, clock)
    front = Front(router, FrontOptions(**options))
    async with FrontServer(front, **{"drain_s": 2.0, **(server or {})}) as listening:
        yield listening
        await until(lambda: front.held_bytes == 0)
    assert router.submitted == router.done + router.failed + router.cancelled


@dataclass
class Reply:
    """raw: all that came."""

    raw: bytes

    @property
    def head(self) -> str:
        return self.raw.partition(b"\r\n\r\n")[0].decode("latin-1")

    @property
    def status(self) -> int:
        return int(self.head.split()[1])

    @property
    def body(self) -> bytes:
        """With what chunks are made of taken off; raises ValueError where it is not whole."""
        rest = self.raw.partition(b"\r\n\r\n")[2]
        if "transfer-encoding: chunked" not in self.head.lower():
            return rest
        found = b""
        while True:
            size, mark, rest = rest.partition(b"\r\n")
            if not mark or len(rest) < int(size, 16) + 2:
                raise ValueError("cut off")
            found, rest = found + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
            if not int(size, 16):
                return found

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return found

    def header(self, name: str) -> str | None:
        found = [
            line.partition(":")[2].strip() for line in self.head.split("\r\n") if line.lower().startswith(f"{name}:")
        ]
        return found[0] if found else None


PROMPT = json.dumps({"model": "m", "prompt": "hello", "max_tokens": 4}).encode()


def request(body: bytes = PROMPT, path: str = "/v1/completions", method: str = "POST", *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: front", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


async def say(server: FrontServer, raw: bytes) -> Reply:
    """What comes back until the front closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(raw)
        async with asyncio.timeout(30.0):
            return Reply(await reader.read())
    finally:
        writer.close()


async def until(condition: Any, within_s: float = 3.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)
