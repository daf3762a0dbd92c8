"""`latfit serve` end to end on a machine without a GPU: two real engines, each policy under the same arrivals.

`python -m benchmarks.serve_two_engines --engines PYTHON [--rate 0.8] [--seconds 60] [--policy NAME ...] [--kill]`.
PYTHON: of an environment with `xllamacpp` and `gguf` (`benchmarks/llama_engine.py`). Engine `gpu` is a llama.cpp of 4
slots on one core, `cpu` one of 1 slot with the same model on another; front and client share both. Requests of 40 to 80
words ask for 8 to 48 tokens, streamed, open loop; a response counts from the moment at which it was to be sent.

rate: of what the engine `gpu` was measured to carry with all slots busy.  kill: in a last run the engine `gpu` is
killed (-9) halfway.
"""

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np

from benchmarks.front_overhead import wait_for

ENGINE_PORTS, PORT = {"gpu": 18801, "cpu": 18802}, 18800
SLOTS = {"gpu": 4, "cpu": 1}
WIDTH, LAYERS = 256, 6
CUT_OFF = 0
POLICIES = ("gpu-only", "cutoff", "three-stage")


@dataclass(frozen=True)
class Reply:
    """ms from when it was to be sent. text: all of the stream."""

    status: int
    path: str
    first_ms: float
    whole_ms: float
    text: bytes

    @property
    def complete(self) -> bool:
        return self.status == 200 and self.text.rstrip().endswith(b"data: [DONE]")


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, object], due: float) -> Reply:
    text, first = b"", 0.0
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            async for piece in answer.content.iter_any():
                first = first or time.perf_counter()
                text += piece
            path = answer.headers.get("x-latfit-path", "")
            ended = time.perf_counter()
            return Reply(answer.status, path, (first - due) * 1e3, (ended - due) * 1e3, text)
    except aiohttp.ClientError:
        return Reply(CUT_OFF, "", 0.0, 0.0, text)


def bodies(count: int, seed: int) -> list[dict[str, object]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "model": "m",
            "prompt": " ".join(
                f"{chr(97 + a)}{chr(97 + b)}" for a, b in rng.integers(0, 26, (rng.integers(40, 81), 2))
            ),
            "max_tokens": int(rng.integers(8, 49)),
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": True,
        }
        for _ in range(count)
    ]


async def alone(url: str, at_once: int) -> tuple[float, float]:
    """Median time of a reply (ms) with all slots busy, and replies a second."""
    count, began = 20 * at_once, time.perf_counter()
    async with aiohttp.ClientSession() as session:
        asked = iter(bodies(count, 1))
        found: list[float] = []

        async def sender() -> None:
            for body in asked:
                reply = await ask(session, url, body, time.perf_counter())
                found.append(reply.whole_ms)

        await asyncio.gather(*(sender() for _ in range(at_once)))
    return float(np.median(found)), count / (time.perf_counter() - began)


async def driven(url: str, arrive_s: Sequence[float]) -> list[Reply]:
    began = time.perf_counter() + 0.2
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(moment_s: float, body: dict[str, object]) -> Reply:
            await asyncio.sleep(max(began + moment_s - time.perf_counter(), 0.0))
            return await ask(session, url, body, began + moment_s)

        each = zip(arrive_s, bodies(len(arrive_s), 2), strict=True)
        return await asyncio.gather(*(one(moment, body) for moment, body in each))


@contextlib.contextmanager
def processes(*commands: Sequence[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [subprocess.Popen(each, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for each in commands]
    try:
        yield started
    finally:
        for each in started:
            each.terminate()
        for each in started:
            each.wait(60)


def told(policy: str, replies: Sequence[Reply]) -> str:
    whole = [each for each in replies if each.complete]
    first, last = (np.array([getattr(each, name) for each in whole]) for name in ("first_ms", "whole_ms"))
    by, ended = Counter(each.path for each in whole), Counter(each.status for each in replies if not each.complete)
    return (
        f"  {policy:<12} {len(whole):,} of {len(replies):,} whole; to {', '.join(f'{k} {v:,}' for k, v in by.items())};"
        f" first byte p50 {np.median(first):.0f}, p99 {np.quantile(first, 0.99):.0f} ms;"
        f" reply p50 {np.median(last):.0f}, p99 {np.quantile(last, 0.99):.0f} ms"
        f"{f'; others ended with (0: cut off) {dict(ended)}' if ended else ''}"
    )


def main(given: argparse.Namespace) -> None:
    engine = str(Path(__file__).parent / "llama_engine.py")
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder) / "model.gguf")
        engines = [
            [given.engines, engine, model, str(port), str(SLOTS[name]), str(core), str(WIDTH), str(LAYERS)]
            for core, (name, port) in enumerate(ENGINE_PORTS.items())
        ]
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ENGINE_PORTS.items()}
        with processes(engines[0]) as (gpu,):  # which makes the model
            wait_for(urls["gpu"])
            with processes(engines[1]):
                wait_for(urls["cpu"])
                compare(given, urls, gpu)


def compare(given: argparse.Namespace, urls: dict[str, str], gpu: subprocess.Popen[bytes]) -> None:
    measured = {name: asyncio.run(alone(url, SLOTS[name])) for name, url in urls.items()}
    times = {name: each[0] for name, each in measured.items()}
    rate = given.rate * measured["gpu"][1]
    arrive = np.cumsum(np.random.default_rng(0).exponential(1 / rate, max(int(rate * given.seconds), 20)))
    print(
        f"serve: a reply takes {times['gpu']:.0f} ms (gpu, 4 at a time), {times['cpu']:.0f} ms (cpu); {rate:.1f} req/s"
    )
    print(told("directly", asyncio.run(driven(urls["gpu"], arrive.tolist()))))
    policies = given.policy or POLICIES
    for number, policy in enumerate([*policies, *(policies[-1:] if given.kill else ())]):
        killed = number == len(policies)
        command = [sys.executable, "-m", "latfit", "serve", "--port", str(PORT), "--policy", policy]
        for name, url in urls.items():
            command += [f"{name}={url}", "--slots", f"{name}={SLOTS[name]}"]
            command += ["--times", f"{name}={times[name]:.1f}ms"]
        with processes(command):
            wait_for(f"http://127.0.0.1:{PORT}")
            if killed:
                threading.Timer(float(arrive[-1]) / 2, gpu.kill).start()
            replies = asyncio.run(driven(f"http://127.0.0.1:{PORT}", arrive.tolist()))
        print(told(f"{policy}{', gpu killed' if killed else ''}", replies))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", required=True)
    parser.add_argument("--rate", type=float, default=0.8)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--kill", action="store_true")
    main(parser.parse_args())
