"""Every request gets one answer: whole, cut off where all can see it, or an error that says why."""

import asyncio
import json
import logging
import socket
import sys
from contextlib import suppress

import pytest
from aiohttp.test_utils import make_mocked_request
from yarl import URL

from latfit.live import Exchange, FrontServer, HttpTimeouts
from latfit.live.front.exchange import RequestInvalid
from tests.unit.live.front.engine import SSE, Answer, Asked, chunk, dies, engine, hangs, head, streamed, whole
from tests.unit.live.front.running import PROMPT, Reply, request, running, say, until

HELLO = request()
LENGTH = b"Content-Length: %d" % len(PROMPT)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (request(b"{"), 400),
        (request(b"[1]"), 400),
        (request(b"\xff\xfe{}"), 400),
        (request(b'{"a":' * 50_000), 400),
        (request(b'{"a":' * 100_000), 400),
        (request(b"[" + b" " * 300_000 + b"}"), 400),
        (request(b'{"a": ' + b"9" * 10_000 + b"}"), 400),
        (request(b""), 400),
        (request(PROMPT, "/v1/completions", "POST", "X-Odd: \xff\xfe"), 400),
        (request(PROMPT, "/v1/completions", "POST", "Content-Encoding: gzip"), 415),
        (request(PROMPT, "/v1/completions", "POST", "Content-Encoding: identity", "Content-Encoding: gzip"), 415),
        (HELLO.replace(LENGTH, b"Transfer-Encoding: gzip, chunked").replace(PROMPT, chunk(PROMPT) + chunk(b"")), 415),
        (HELLO.replace(b"HTTP/1.1", b"HTTP/0.9"), 505),
        (HELLO.replace(b"HTTP/1.1", b"HTTP/2.0"), 505),
        (b"GET /health\r\n\r\n", 505),
        (request(b'{"prompt": "' + b"x" * 1_000_000 + b'"}'), 413),
        (HELLO.replace(LENGTH, b"Content-Length: 99999999999"), 413),
        (HELLO.replace(LENGTH, b"Transfer-Encoding: chunked").replace(PROMPT, chunk(b" " * 600_000) * 2), 413),
        (request(path="/v1/embeddings"), 404),
        (request(path="/../etc/passwd"), 404),
        (request(method="GET"), 405),
        (request(path="/health"), 405),
    ],
)
async def test_what_cannot_be_served_is_refused_in_words(raw: bytes, status: int) -> None:
    async with engine(whole(b"{}")) as gpu, running([gpu], most_bytes=1_000_000) as server:
        reply = await say(server, raw)
        assert reply.status == status
        assert reply.head.startswith("HTTP/1.1 ")
        assert reply.error["type"] == "invalid_request_error"
        assert gpu.asked == []


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"y" * 90_000,
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        HELLO.replace(LENGTH, b"Transfer-Encoding: chunked"),
    ],
)
async def test_what_is_no_http_is_refused(raw: bytes) -> None:
    async with engine(whole(b"{}")) as gpu, running([gpu]) as server:
        assert (await say(server, raw)).status == 400


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer wrong", "Basic right", "Bearer right2", "Bearer \xff"])
async def test_a_wrong_token_is_refused_and_the_right_one_ends_here(given: str | None) -> None:
    async with engine(whole(b"{}")) as gpu, running([gpu], token="right") as server:
        headers = () if given is None else (f"Authorization: {given}",)
        for path, method in (
            ("/v1/completions", "POST"),
            ("/v1/models", "GET"),
            ("/metrics", "GET"),
            ("/x", "GET"),
        ):
            reply = await say(server, request(PROMPT, path, method, *headers))
            assert (reply.status, reply.header("www-authenticate")) == (401, "Bearer")
        assert gpu.asked == []
        assert (await say(server, request(b"", "/health", "GET"))).status == 200
        assert (
            await say(server, request(PROMPT, "/v1/completions", "POST", "Authorization: bearer right"))
        ).status == 200
        assert gpu.asked[0].header("authorization") is None


async def test_a_head_that_drips_is_cut_off_and_a_body_that_drips_is_told() -> None:
    async with engine(whole(b"{}")) as gpu, running([gpu], body_s=0.2, server={"head_s": 0.3}) as server:

        async def drip(raw: bytes) -> bytes:
            """What came until the front closed the connection, which it does while bytes still come."""
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            found = asyncio.ensure_future(reader.read())
            for k in range(len(raw)):
                if found.done():
                    break
                writer.write(raw[k : k + 1])
                await asyncio.sleep(0.02)
            with suppress(ConnectionError):
                return await found
            return b""

        silent, slow_head = await asyncio.gather(drip(b""), drip(HELLO))
        assert (silent, slow_head) == (b"", b"")
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(HELLO[:-5])
        assert Reply(await reader.read()).status == 408
        writer.close()
        assert gpu.asked == []


async def test_a_flood_is_refused_at_once_and_the_rest_is_served() -> None:
    slow = streamed(SSE, 0.01)
    async with engine(slow) as gpu, engine(slow) as cpu, running([gpu, cpu], most_waiting=8) as server:
        replies = await asyncio.gather(*(say(server, HELLO) for _ in range(200)))
        router = server.front.router
        served = [reply for reply in replies if reply.status == 200]
        refused = [reply for reply in replies if reply.status == 429]
        assert len(served) + len(refused) == 200
        assert all(reply.body == b"".join(SSE) for reply in served)
        assert all(1 <= int(reply.header("retry-after") or 0) <= 60 for reply in refused)
        assert refused[0].error["type"] == "rate_limit_error"
        assert (router.done, router.refused) == (len(served), len(refused))
        assert len(gpu.asked) + len(cpu.asked) == len(served) >= 12
        assert (await say(server, HELLO)).status == 200


async def test_bodies_together_stay_within_the_memory_that_they_may_have() -> None:
    async with engine(hangs) as gpu, running([gpu], most_held_bytes=20_000, overdue_s=9.0) as server:
        body = b'{"p": "' + b"x" * 9000 + b'"}'
        first = [asyncio.ensure_future(say(server, request(body))) for _ in range(2)]
        await until(lambda: len(gpu.asked) == 2)
        assert (await say(server, request(body))).status == 429
        for each in first:
            each.cancel()


async def test_a_caller_that_leaves_stops_the_engine_in_mid_stream() -> None:
    async with engine(streamed(SSE * 100, 0.01)) as gpu, running([gpu]) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(HELLO)
        await reader.readuntil(b"[DONE]")
        writer.close()
        await until(lambda: gpu.asked[0].closed.is_set())
        await until(lambda: server.front.router.running == 0)
        assert server.front.router.cancelled == 1
        assert server.front.router.main.failed_batches == 0


async def test_callers_that_leave_while_they_wait_never_reach_an_engine() -> None:
    async with engine(hangs) as gpu, running([gpu], slots=1, overdue_s=9.0) as server:
        callers = [asyncio.ensure_future(say(server, HELLO)) for _ in range(5)]
        await until(lambda: server.front.router.waiting == 4)
        for each in callers:
            each.cancel()
        await until(lambda: server.front.router.running == 0)
        assert (len(gpu.asked), server.front.router.cancelled) == (1, 5)
        assert server.front.router.up() == {"gpu": True}


async def test_impatient_callers_of_an_engine_that_hangs_close_its_path() -> None:
    patient = HttpTimeouts(first_byte_s=30.0)
    async with engine(hangs) as gpu, running([gpu], overdue_s=0.05, timeouts=patient) as server:
        caller = asyncio.ensure_future(say(server, HELLO))
        await until(lambda: len(gpu.asked) == 1)
        await asyncio.sleep(0.1)
        assert server.front.router.up() == {"gpu": True}
        caller.cancel()
        await until(lambda: server.front.router.running == 0)
        assert server.front.router.up() == {"gpu": False}


async def test_a_caller_that_reads_nothing_is_cut_off() -> None:
    async with engine(streamed([b"x" * 100_000] * 500)) as gpu, running([gpu]) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(HELLO)
        await until(lambda: len(gpu.asked) == 1 and gpu.asked[0].closed.is_set())
        await until(lambda: server.front.router.running == 0)
        assert server.front.router.up() == {"gpu": True}
        writer.close()


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels have no TCP_USER_TIMEOUT")
async def test_a_caller_that_reads_no_answer_of_the_front_is_cut_off() -> None:
    async with engine(whole(b"{}")) as gpu, running([gpu]) as server:
        opened = socket.socket()
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        opened.connect(("127.0.0.1", server.port))
        _, writer = await asyncio.open_connection(sock=opened, limit=1024)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)  # more than the kernel's buffers take

        async def write_on() -> None:
            while True:
                await asyncio.sleep(0.1)
                writer.write(b" ")
                await writer.drain()

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(write_on(), 4.0)


async def _head_only(writer: asyncio.StreamWriter, asked: Asked) -> None:
    writer.write(head("200 OK", "Transfer-Encoding: chunked"))
    await asyncio.sleep(0.05)
    writer.close()


async def _no_http(writer: asyncio.StreamWriter, asked: Asked) -> None:
    writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
    writer.close()


async def _stops(writer: asyncio.StreamWriter, asked: Asked) -> None:
    writer.write(head("200 OK", "Transfer-Encoding: chunked") + chunk(SSE[0]))
    await asked.closed.wait()


@pytest.mark.parametrize("answer", [streamed(SSE[:1], end=False), _head_only, _stops])
async def test_an_engine_that_dies_or_stops_after_its_headers_cuts_the_reply_off(answer: Answer) -> None:
    async with engine(answer) as gpu, engine(whole(b"{}")) as cpu, running([gpu, cpu]) as server:
        reply = await say(server, HELLO)
        assert (reply.status, reply.header("x-latfit-path")) == (200, "gpu")
        assert reply.raw.count(b"data:") == (answer is not _head_only)
        with pytest.raises(ValueError, match="cut off"):
            _ = reply.body
        assert cpu.asked == []
        assert server.front.router.up() == {"gpu": False, "cpu": True}
        assert (await say(server, HELLO)).header("x-latfit-path") == "cpu"


@pytest.mark.parametrize(
    "answer",
    [
        dies,
        _no_http,
        whole(b"", "101 Switching Protocols", "Upgrade: websocket", "Connection: Upgrade"),
        whole(b"{}", "600 x"),
        streamed(SSE, coding="gzip, chunked"),
        *(whole(b"no", f"{k} x") for k in (429, 502, 503, 504)),
    ],
)
async def test_what_an_engine_did_not_begin_another_one_serves(answer: Answer) -> None:
    async with engine(answer) as gpu, engine(whole(b'{"by": "cpu"}')) as cpu, running([gpu, cpu]) as server:
        reply = await say(server, HELLO)
        assert (reply.status, reply.body) == (200, b'{"by": "cpu"}')
        assert len(cpu.asked) == 1
        assert server.front.router.up() == {"gpu": False, "cpu": True}
        text = (await say(server, request(b"", "/metrics", "GET"))).body
        assert b"latfit_requests_retried_total 1.0\n" in text
        assert b"latfit_requests_failed_total 0.0\n" in text  # it was saved
        assert b"latfit_requests_submitted_total 1.0\n" in text


async def test_an_engine_that_is_gone_is_told_and_where_all_are_nobody_waits_long() -> None:
    async with engine(whole(b"{}")) as gpu, engine(whole(b"{}")) as cpu, running([gpu, cpu]) as server:
        await gpu.stop()
        assert (await say(server, HELLO)).header("x-latfit-path") == "cpu"
        await cpu.stop()
        first = await say(server, HELLO)
        assert first.error["type"] == "server_error"
        assert (first.status, first.error["message"]) in [
            (502, "cpu: not served: it cannot be reached"),
            (503, "every path is down"),
        ]
        reply = await say(server, HELLO)
        assert (reply.status, reply.header("retry-after")) == (503, "1")
        assert (await say(server, request(b"", "/health", "GET"))).status == 503


async def up(server: FrontServer) -> tuple[int, dict[str, bool], bytes]:
    """Status and paths of /health, and the lines of latfit_path_up in /metrics."""
    health = await say(server, request(b"", "/health", "GET"))
    metrics = (await say(server, request(b"", "/metrics", "GET"))).body.splitlines()
    lines = b" ".join(line.split()[-1] for line in metrics if line.startswith(b"latfit_path_up{"))
    return health.status, json.loads(health.body)["paths"], lines


async def test_an_engine_that_dies_or_comes_back_while_nobody_asks_is_noticed() -> None:
    async with engine(whole(b"{}")) as gpu, engine(whole(b"{}")) as cpu, running([gpu, cpu]) as server:
        assert await up(server) == (200, {"gpu": True, "cpu": True}, b"1.0 1.0")
        await gpu.stop()
        await until(lambda: not server.front.router.up()["gpu"])
        assert await up(server) == (200, {"gpu": False, "cpu": True}, b"0.0 1.0")
        await cpu.stop()
        await until(lambda: not server.front.router.up()["cpu"])
        assert await up(server) == (503, {"gpu": False, "cpu": False}, b"0.0 0.0")
        await gpu.start(gpu.port)
        await until(lambda: server.front.router.up()["gpu"])
        assert await up(server) == (200, {"gpu": True, "cpu": False}, b"1.0 0.0")
        assert (await say(server, HELLO)).header("x-latfit-path") == "gpu"


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        (URL("http://evil/v1/completions"), []),
        (URL("//evil/v1/completions"), []),
        (URL("v1/completions"), []),
        (URL.build(path="x://a/v1/completions", encoded=True), []),
        (URL("/v1/completions"), [("X-Odd\r\nHost: evil", "a")]),
    ],
)
async def test_a_request_that_cannot_be_sent_does_not_count_against_its_engine(
    target: URL, headers: list[tuple[str, str]]
) -> None:
    async with engine(whole(b"{}")) as gpu, running([gpu]) as server:
        router = server.front.router
        for _ in range(4):
            with pytest.raises(RequestInvalid, match="not sent"):
                await router.submit(Exchange(make_mocked_request("POST", "/"), target, headers, [PROMPT]))
        assert (gpu.asked, router.up(), router.main.failed_batches) == ([], {"gpu": True}, 0)


async def test_errors_of_an_engine_are_passed_on_and_three_of_its_own_close_the_path() -> None:
    error = json.dumps({"error": {"message": "no such model"}}).encode()
    async with engine(whole(error, "404 Not Found")) as gpu, running([gpu]) as server:
        for _ in range(5):
            reply = await say(server, HELLO)
            assert (reply.status, reply.body) == (404, error)
        gpu.answer = whole(error, "500 Oh")
        for _ in range(3):
            reply = await say(server, HELLO)
            assert (reply.status, reply.body) == (500, error)
        assert server.front.router.up() == {"gpu": False}


async def test_draining_ends_what_runs_and_refuses_what_comes() -> None:
    async with engine(streamed(SSE, 0.1)) as gpu, running([gpu], slots=1) as server:
        serving = asyncio.ensure_future(server.run())
        taken = [asyncio.ensure_future(say(server, HELLO)) for _ in range(2)]
        await until(lambda: server.front.router.waiting == 1)
        server.stop()
        await asyncio.sleep(0)
        late, health = await asyncio.gather(say(server, HELLO), say(server, request(b"", "/health", "GET")))
        assert (late.status, late.header("retry-after")) == (503, "1")
        assert (health.status, json.loads(health.body)["status"]) == (503, "draining")
        assert [(await each).body for each in taken] == [b"".join(SSE)] * 2
        assert await serving


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize("stops", [1, 2])
async def test_where_nothing_may_go_on_only_what_ran_is_cut_off(busy: bool, stops: int) -> None:
    """No time to drain, or a second signal while it drains."""
    slow = {"drain_s": 0.0 if stops == 1 else 60.0}
    async with engine(hangs) as gpu, running([gpu], overdue_s=9.0, server=slow) as server:
        serving = asyncio.ensure_future(server.run())
        taken = [asyncio.ensure_future(say(server, HELLO)) for _ in range(int(busy))]
        await until(lambda: len(gpu.asked) == len(taken))
        for _ in range(stops):
            server.stop()
            await asyncio.sleep(0)
        assert await serving is not busy
        assert [(await each).status for each in taken] == [503] * len(taken)


TRACING = (
    "Traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "Tracestate: s3cret",
    "Baggage: s3cret",
    "Baggage: s3=cret=s3cret",
)
"""OpenTelemetry logs what it finds malformed."""


def test_nothing_that_a_user_sent_is_logged(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        secret = b'{"prompt": "s3cret"'
        async with engine(streamed(SSE[:1], end=False)) as gpu, running([gpu]) as server:
            for raw in (
                request(secret),
                request(secret + b"}", "/v1/completions?s3cret", "POST", "Authorization: s3cret"),
                request(secret + b"}", "/s3cret"),
                b"GET /\x00s3cret HTTP/1.1\r\n\r\n",
                request(secret + b"}", "/v1/completions", "POST", "X-Odd: s3cret\xff"),
                request(secret + b"}", "/v1/completions", "POST", *TRACING),
            ):
                await say(server, raw)

    with caplog.at_level(logging.DEBUG):
        asyncio.run(main())
    told = caplog.text + "".join(capfd.readouterr())
    assert "s3cret" not in told


async def test_a_hundred_thousand_pieces_wait_for_their_reader() -> None:
    """What a slow reader has not taken is not kept: the engine is made to wait."""
    written = 0

    async def counts(writer: asyncio.StreamWriter, asked: Asked) -> None:
        nonlocal written
        writer.write(head("200 OK", "Transfer-Encoding: chunked"))
        for _ in range(2000):
            writer.write(chunk(b"x" * 10_000))
            await writer.drain()
            written += 10_000

    patient = HttpTimeouts(first_byte_s=5.0, between_s=5.0)
    async with engine(counts) as gpu, running([gpu], timeouts=patient) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(HELLO)
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.3)
        assert written < 15_000_000
        writer.close()
