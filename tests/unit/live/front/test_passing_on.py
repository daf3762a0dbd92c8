"""What the front passes on, both ways, and where."""

import asyncio
import json

import pytest

from latfit.live import HttpTimeouts
from tests.unit.live.front.engine import SSE, Asked, chunk, engine, head, streamed, whole
from tests.unit.live.front.running import PROMPT, Reply, request, running, say, until


async def test_a_reply_comes_as_the_engine_wrote_it() -> None:
    body = b'{"choices": [{"text": "\\u00e9"}],   "usage": null}'
    answer = whole(body, "201 Created", "X-Own: a", "X-Own: b", "Keep-Alive: timeout=5")
    async with engine(answer) as gpu, running([gpu]) as server:
        reply = await say(server, request())
    assert (reply.status, reply.body) == (201, body)
    assert [line for line in reply.head.split("\r\n") if line.startswith("X-Own")] == ["X-Own: a", "X-Own: b"]
    assert reply.header("keep-alive") is None
    assert reply.header("content-length") == str(len(body))
    assert reply.header("x-latfit-path") == "gpu"


async def test_headers_of_an_engine_that_cannot_be_sent_are_left_out() -> None:
    """aiohttp sends UTF-8 without control characters only; what else an engine writes must not garble its reply."""

    async def answer(writer: asyncio.StreamWriter, asked: Asked) -> None:
        odd = b"X-Latin: caf\xe9\r\nX-Escape: \x1b[31m\r\nX-Name: caf\xc3\xa9\r\nX-Tab: a\tb\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n" + odd + b"\r\n{}")

    async with engine(answer) as gpu, running([gpu]) as server:
        for raw in (request(), request(b"", "/v1/models", "GET")):
            reply = await say(server, raw)
            assert (reply.status, reply.body) == (200, b"{}")
            assert [reply.header(name) for name in ("x-latin", "x-escape", "x-tab")] == [None, None, "a\tb"]
            assert b"X-Name: caf\xc3\xa9\r\n" in reply.raw


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions?api-version=1%2F2"])
def test_a_request_goes_on_as_it_came(path: str) -> None:
    async def main() -> Asked:
        async with engine(whole(b"{}")) as gpu, running([gpu]) as server:
            hop = ("Connection: close, X-Hop", "X-Hop: 1", "Proxy-Authorization: x", "TE: trailers")
            own = ("Authorization: Bearer mine", "X-Request-Id: 7", "Accept-Encoding: br", "Cookie: a=b")
            await say(
                server, request(PROMPT, path, "POST", *hop, *own, "Content-Type: application/json; charset=utf-8")
            )
            return gpu.asked[0]

    asked = asyncio.run(main())
    assert asked.lines[0] == f"POST {path} HTTP/1.1"
    assert asked.body == PROMPT
    assert asked.header("authorization") == "Bearer mine"
    assert asked.header("x-request-id") == "7"
    assert asked.header("accept-encoding") == "br"
    assert asked.header("cookie") == "a=b"
    assert asked.header("content-type") == "application/json; charset=utf-8"
    assert asked.header("content-length") == str(len(PROMPT))
    assert asked.header("host") != "front"
    for name in ("x-hop", "proxy-authorization", "te", "transfer-encoding", "user-agent", "accept"):
        assert asked.header(name) is None


async def test_a_stream_is_passed_on_while_it_is_written() -> None:
    """Headers, and then each event, are with the caller before the engine writes more."""
    seen: list[bytes] = []
    arrived = asyncio.Event()

    async def answer(writer: asyncio.StreamWriter, asked: Asked) -> None:
        writer.write(head("200 OK", "Transfer-Encoding: chunked", "Content-Type: text/event-stream"))
        await asyncio.wait_for(arrived.wait(), 2.0)
        for piece in SSE:
            arrived.clear()
            writer.write(chunk(piece))
            await asyncio.wait_for(arrived.wait(), 2.0)
        writer.write(b"0\r\n\r\n")

    async with engine(answer) as gpu, running([gpu]) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request())
        raw = b""
        while data := await reader.read(1 << 16):
            raw += data
            seen.append(data)
            arrived.set()
        writer.close()
    assert Reply(raw).body == b"".join(SSE)
    assert len(seen) >= 1 + len(SSE)


async def test_a_large_body_arrives_whole_and_is_not_copied_on_its_way() -> None:
    """The router's request holds the very pieces that were read."""
    body = json.dumps({"prompt": "x" * 3_000_000}).encode()
    async with engine(whole(b"{}")) as gpu, running([gpu]) as server:
        held: list[int] = []
        server.front.router.listeners.append(lambda each: held.append(sum(map(len, each.input.body))))
        assert (await say(server, request(body))).status == 200
        assert gpu.asked[0].body == body
        assert held == [len(body)]
        raw = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        assert (await say(server, raw + chunk(PROMPT[:7]) + chunk(PROMPT[7:]) + chunk(b""))).status == 200
        assert gpu.asked[1].body == PROMPT


async def test_a_kept_connection_that_the_engine_closed_costs_nothing() -> None:
    async def closes_behind(writer: asyncio.StreamWriter, asked: Asked) -> None:
        await whole(b"{}")(writer, asked)
        asyncio.get_running_loop().call_later(0.02, writer.transport.abort)

    async with engine(closes_behind) as gpu, running([gpu]) as server:
        for _ in range(10):
            assert (await say(server, request())).status == 200
            await asyncio.sleep(0.02)
        assert server.front.router.main.failed_batches == 0


async def test_who_asks_for_leave_to_send_gets_it() -> None:
    async with engine(whole(b"{}")) as gpu, running([gpu]) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request(b"", "/v1/completions", "POST", "Expect: 100-continue").replace(b"th: 0", b"th: 2"))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"{}")
        assert Reply(await reader.read()).status == 200
        assert gpu.asked[0].header("expect") is None
        writer.close()


async def test_models_are_those_of_the_first_engine_that_answers() -> None:
    models = b'{"object": "list", "data": []}'
    async with engine(whole(models)) as cpu, running(["http://127.0.0.1:9", cpu]) as server:
        reply = await say(server, request(b"", "/v1/models", "GET"))
        assert (reply.status, reply.body) == (200, models)
        assert (await say(server, request(b"", "/v1/models", "GET", "X-Odd: \xff\xfe"))).status == 400
        cpu.answer = streamed([b"[", b"1" * 70_000, b"]"], 0.01)
        assert len((await say(server, request(b"", "/v1/models", "GET"))).body) == 70_002
        cpu.answer = whole(b"x" * 2_000_000)
        assert (await say(server, request(b"", "/v1/models", "GET"))).status == 502
        await cpu.stop()
        assert (await say(server, request(b"", "/v1/models", "GET"))).status == 502


async def test_health_and_metrics_tell_of_paths_and_answers() -> None:
    async with engine(streamed(SSE)) as gpu, engine(whole(b"{}")) as cpu, running([gpu, cpu]) as server:
        await say(server, request())
        await say(server, request(b"["))
        health = await say(server, request(b"", "/health", "GET"))
        told = json.loads(health.body)
        assert (health.status, told["status"], told["policy"]) == (200, "ready", "cutoff")
        assert told["paths"] == {"gpu": True, "cpu": True}
        text = (await say(server, request(b"", "/metrics", "GET"))).body.decode()
    lines = text.splitlines()
    assert 'latfit_http_answers_total{code="200"} 2.0' in lines
    assert 'latfit_http_answers_total{code="400"} 1.0' in lines
    assert 'latfit_first_byte_seconds_count{path="gpu"} 1.0' in lines
    assert "latfit_requests_done_total 1.0" in lines
    assert "latfit_held_bytes 0.0" in lines


async def test_urgent_requests_wait_before_others_and_no_class_is_the_last() -> None:
    """One slot, taken by the first request: the others are served by class, and by their order within it."""
    names, all_wait = ["batch", "chat", None, "chat"], asyncio.Event()
    asked = [_of(name, json.dumps({"prompt": str(i)}).encode()) for i, name in enumerate(names)]

    async def answer(writer: asyncio.StreamWriter, asked: Asked) -> None:
        await all_wait.wait()
        await whole(b"{}")(writer, asked)

    async with engine(answer) as gpu:
        limits = {"slots": 1, "classes": ("chat", "batch"), "timeouts": HttpTimeouts(first_byte_s=5.0)}
        async with running([gpu], **limits) as server:  # type: ignore[arg-type]
            first = asyncio.ensure_future(say(server, request()))
            await until(lambda: server.front.router.running == 1)
            others = []
            for k, each in enumerate(asked):
                others.append(asyncio.ensure_future(say(server, each)))
                await until(lambda k=k: server.front.router.waiting == k + 1)
            all_wait.set()
            assert all(reply.status == 200 for reply in await asyncio.gather(first, *others))
            refused = await say(server, _of("fast", b"{}"))
            told = (await say(server, request(b"", "/metrics", "GET"))).body.decode().splitlines()
        assert [json.loads(each.body)["prompt"] for each in gpu.asked[1:]] == ["1", "3", "0", "2"]
    assert refused.status == 400
    assert refused.error["message"] == "the header x-latfit-class names none of the classes chat, batch"
    assert 'latfit_class_seconds_count{class="chat"} 2.0' in told
    assert 'latfit_class_seconds_count{class="batch"} 3.0' in told


def _of(name: str | None, body: bytes) -> bytes:
    return request(body, "/v1/completions", "POST", *([] if name is None else [f"X-Latfit-Class: {name}"]))
