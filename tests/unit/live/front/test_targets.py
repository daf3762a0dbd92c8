"""Request targets that try to lead a request, or the engines' token, to another host."""

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from latfit.live import HttpTimeouts
from tests.unit.live.front.engine import StandInEngine, engine, hangs, whole
from tests.unit.live.front.running import PROMPT, request, running, say, until

CERTIFICATE = Path(__file__).parents[3] / "stand_in.pem"
"""Of gpu-host, cpu-host and localhost, with its key."""

TOKEN = "Bearer the-engines-token"
PATIENT = HttpTimeouts(first_byte_s=30.0)

FORWARDED = {
    "{path}": "{path}",
    "{path}?": "{path}",
    "{path}?api-version=1%2F2&x=%0d%0aX:%20y": "{path}?api-version=1%2F2&x=%0d%0aX:%20y",
    "{path}?http://evil/": "{path}?http://evil/",
    "{path}?@evil:9/../..//": "{path}?@evil:9/../..//",
    "{path}?a=b?c=%zz&[\\": "{path}?a=b?c=%zz&[\\",
}
"""Targets that are served → what the engine gets, after the path of its address."""

REFUSED = (
    "x://a{path}",
    "http://evil{path}",
    "https://evil{path}",
    "http://gpu-host{path}",
    "http://evil:8000{path}",
    "http://user:password@evil{path}",
    "x://a/{path}",
    "http://{path}",
    "http:{path}",
    "://a{path}",
    "x:{path}",
    "1://a{path}",
    "//evil{path}",
    "/{path}",
    "/\\evil{path}",
    "\\\\evil{path}",
    "\\{path}",
    "@evil{path}",
    ":9@evil{path}",
    ":9{path}",
    ".evil{path}",
    "-x{path}",
    "evil:80",
    "evil",
    "*",
    "?{path}",
    "#{path}",
    "{path}#",
    "{path}#@evil/",
    "{path}?a=b#c",
    "{path}?a b",
    "{path}?\t",
    "{path}?\x00",
    "{path}?\x7f",
    "{path}?\xe9",
    "{path}?\xc3\xa9",
    "{path}\xff",
    "{path}/",
    "{path};x=1",
    "{path}%00",
    "{path}%0d%0aHost:%20evil",
    "{path}/..",
    "/.{path}",
    "/..{path}",
    "/x/..{path}",
    "/x/%2e%2e{path}",
    "/@evil{path}",
    "/:9{path}",
)
"""Targets that no engine gets: 400, or 404 where they name a path."""

ENCODED = ("/%761/completions", "/v1%2Fcompletions", "/%76%31%2fmodels")

ADDRESSES = [f"{scheme}://{{}}{rest}" for scheme in ("http", "https") for rest in ("", ":8000", "/base", ":8000/base/")]


class Network:
    """The names that are looked up, and where they lead: to stand-ins by host, to the thief for all others."""

    def __init__(self) -> None:
        self.hosts: dict[str, StandInEngine] = {}
        self.looked_up: set[str] = set()

    def resolve(self, host: Any, port: Any, *more: Any, **named: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name == "127.0.0.1":
            return RESOLVE(name, port, *more, **named)
        self.looked_up.add(f"{name}:{port}")
        return RESOLVE("127.0.0.1", self.hosts.get(name, self.hosts["thief"]).port, *more, **named)


RESOLVE = socket.getaddrinfo


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    found = Network()
    monkeypatch.setattr(socket, "getaddrinfo", found.resolve)
    monkeypatch.setattr("aiohttp.connector._SSL_CONTEXT_VERIFIED", ssl.create_default_context(cafile=CERTIFICATE))
    return found


@pytest.mark.parametrize("served_by", ["gpu", "cpu"])
@pytest.mark.parametrize("address", ADDRESSES)
async def test_no_target_leads_elsewhere(address: str, served_by: str, network: Network) -> None:
    """Neither a request nor the token; and none that is refused counts against an engine."""
    tls = None
    if address.startswith("https"):
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(CERTIFICATE)
    busy = served_by == "cpu"
    async with (
        engine(hangs if busy else whole(b"{}"), tls) as gpu,
        engine(whole(b"{}"), tls) as cpu,
        engine(whole(b"{}")) as thief,
    ):
        network.hosts = {"gpu-host": gpu, "cpu-host": cpu, "thief": thief}
        urls = [address.format("gpu-host"), address.format("cpu-host")]
        async with running(urls, slots=1, timeouts=PATIENT, headers={"Authorization": TOKEN}) as server:
            holding = asyncio.ensure_future(say(server, request()))
            await until(lambda: gpu.asked)
            if busy:
                gpu.answer = whole(b"{}")  # the request that holds the only slot stays
            for path, method in (("/v1/completions", "POST"), ("/v1/models", "GET")):
                body = PROMPT if method == "POST" else b""
                by = gpu if method == "GET" or not busy else cpu
                for shape, sent in FORWARDED.items():
                    before = len(by.asked)
                    reply = await say(server, request(body, shape.format(path=path), method))
                    assert (reply.status, reply.body) == (200, b"{}"), shape
                    base = "/base" if "/base" in address else ""
                    assert by.asked[before].lines[0] == f"{method} {base}{sent.format(path=path)} HTTP/1.1"
                before = len(gpu.asked) + len(cpu.asked)
                for target in (*(shape.format(path=path) for shape in REFUSED), *ENCODED):
                    for verb in (method, "OPTIONS", "CONNECT"):
                        reply = await say(server, request(body, target, verb))
                        assert reply.status in (400, 404), (verb, target, reply.raw)
                assert len(gpu.asked) + len(cpu.asked) == before
            router = server.front.router
            assert [each.failed_batches for each in router.paths] == [0, 0]
            assert router.up() == {"gpu": True, "cpu": True}
            holding.cancel()
        assert thief.connections == 0
        assert all(asked.header("authorization") == TOKEN for asked in [*gpu.asked, *cpu.asked])
        port = "8000" if ":8000" in address else "443" if tls else "80"
        assert network.looked_up == {f"gpu-host:{port}", f"cpu-host:{port}"}
