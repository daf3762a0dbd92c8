"""Prefill on one vLLM and decoding on another, joined by a KV connector, beside its simulation.

`python -m benchmarks.engine_loop.prefill_apart --vllm ENVIRONMENT [--rate 2] [--seconds 60] [--to 160]`

Two servers of the same small model, each with a core for its forward pass as far as there are cores, share a folder
through vLLM's `ExampleConnector`, which writes the keys and values of whole blocks as files. A request whose prompt has
at most `--to` tokens goes to the first server for its prefill (one token is generated and dropped), then to the second,
which reads the files and decodes; longer ones go to the second alone, as a rule by prompt length (B1 in tokens) would
send them. The transfer is measured with one request at a time: from the end of the prefill to the first token of the
second server, which reads the files and computes what is not in whole blocks. Then Poisson arrivals are served, and
`simulate_engine` runs the same ones with the steps that both servers recorded and the measured transfer.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import pandas as pd

from benchmarks.engine_loop.loop import machine
from benchmarks.engine_loop.server import Server, Skipped, installation, make_model, serving
from latfit.api import fit_phases, simulate_engine
from latfit.stats import FloatArray
from latfit.units import format_ms, format_percent

ALONE, ROUNDS = (32, 64, 96, 128, 160, 192, 256), 6
BLOCK = 32
"""Tokens of a block of the KV cache; whole ones are moved."""


@dataclass(frozen=True)
class Served:
    """A request as its sender saw it, ms. prefill_ms: on the first server, 0 where it was not asked.  first_ms: to the
    first token, which is that of the first server where it was asked."""

    arrival_ms: float
    prompt: int
    output: int
    prefill_ms: float
    first_ms: float
    latency_ms: float


class Client:
    """Sends prompts of so many tokens, each its own, to one or both servers."""

    def __init__(self, session: aiohttp.ClientSession, first: Server, second: Server, seed: int) -> None:
        self.session, self.first, self.second = session, first, second
        self.draw = random.Random(seed)

    def prompt(self, tokens: int) -> list[int]:
        return [self.draw.randint(10, 7_900) for _ in range(tokens)]

    async def ask(self, server: Server, prompt: Sequence[int], output: int) -> tuple[float, float]:
        """Times to the first token and to the end, ms."""
        body = {"model": "m", "prompt": list(prompt), "max_tokens": output, "ignore_eos": True, "stream": True}
        began, first = time.perf_counter(), 0.0
        async with self.session.post(f"{server.url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data: {") and not first:
                    first = time.perf_counter()
        ended = time.perf_counter()
        return 1e3 * (first - began), 1e3 * (ended - began)

    async def serve(self, tokens: int, output: int, arrival_ms: float, *, apart: bool) -> Served:
        prompt = self.prompt(tokens)
        took = (await self.ask(self.first, prompt, 1))[1] if apart else 0.0
        first, whole = await self.ask(self.second, prompt, output)
        return Served(arrival_ms, tokens, output, took, took or first, took + whole)


async def transfer(client: Client) -> tuple[float, float]:
    """Fixed ms, and ms for each token of the prompt, by least squares over requests that are served alone: from the end
    of the prefill to the first token of the second server."""
    rows = []
    for tokens in ALONE * ROUNDS:
        prompt = client.prompt(tokens)
        await client.ask(client.first, prompt, 1)
        rows.append((tokens, (await client.ask(client.second, prompt, 2))[0]))
    size, took = np.array(rows[len(ALONE) :]).T
    medians = [float(np.median(took[size == each])) for each in ALONE]
    each, fixed = np.polyfit(ALONE, medians, 1)
    print("  alone, by tokens: " + ", ".join(f"{s} {format_ms(t)}" for s, t in zip(ALONE, medians, strict=True)))
    return max(float(fixed), 0.0), max(float(each), 0.0)


async def load(client: Client, rate: float, seconds: float, limit: int) -> list[Served]:
    """Poisson arrivals; prompts of 32 to 256 tokens, outputs of 10 to 50."""
    rng = np.random.default_rng(3)
    gaps = rng.exponential(1 / rate, round(rate * seconds))
    began, tasks = time.perf_counter(), []
    for moment, tokens, output in zip(
        np.cumsum(gaps), rng.integers(32, 257, len(gaps)), rng.integers(10, 51, len(gaps)), strict=True
    ):
        await asyncio.sleep(max(began + moment - time.perf_counter(), 0.0))
        sent_ms = 1e3 * (time.perf_counter() - began)
        serving = client.serve(int(tokens), int(output), sent_ms, apart=int(tokens) <= limit)
        tasks.append(asyncio.create_task(serving))
    return list(await asyncio.gather(*tasks))


def figures(times: FloatArray) -> str:
    return f"mean {format_ms(float(np.mean(times)))}, p99 {format_ms(float(np.quantile(times, 0.99)))}"


def steps_of(server: Server, known: set[Path]) -> list[str]:
    return sorted(str(each) for each in set(server.traces.glob("*.parquet")) - known)


async def run(asked: argparse.Namespace, first: Server, second: Server) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        client = Client(session, first, second, 1)
        for tokens in (64, 128, 256, 200):
            await client.serve(tokens, 8, 0.0, apart=True)
        fixed, each = await transfer(client)
        print(f"engine loop: a transfer takes {format_ms(fixed)} and {1e3 * each:.1f} µs a token")
        for name, limit in (
            ("all prompts prefilled apart", 10_000),
            (f"prompts up to {asked.to} tokens", asked.to),
            ("none", 0),
        ):
            await asyncio.sleep(5)
            known = [set(server.traces.glob("*.parquet")) for server in (first, second)]
            served = await load(client, asked.rate, asked.seconds, limit)
            await asyncio.sleep(6)
            ttft, latency = (np.array([getattr(r, key) for r in served]) for key in ("first_ms", "latency_ms"))
            print(f"engine loop: {name}, {asked.rate:g}/s, {len(served)} requests")
            print(f"  measured: TTFT {figures(ttft)}; latency {figures(latency)}")
            steps = [steps_of(server, before) for server, before in zip((first, second), known, strict=True)]
            simulated(served, steps, (fixed, each), limit)


def simulated(served: Sequence[Served], steps: Sequence[list[str]], moved: tuple[float, float], limit: int) -> None:
    """The same requests through the engine simulator; prompts of up to `limit` tokens were prefilled apart."""
    requests = pd.DataFrame(
        {
            "t_s": [r.arrival_ms / 1e3 for r in served],
            "prompt_tokens": [r.prompt for r in served],
            "output_tokens": [r.output for r in served],
        }
    )
    decode, prompts = fit_phases(steps[1]), requests["prompt_tokens"]
    apart, rest = bool((prompts <= limit).any()), bool((prompts > limit).any())
    first = fit_phases(steps[0]) if apart else None
    found = simulate_engine(
        decode.decode,
        arrivals=requests,
        prefill_fit=decode.prefill if rest else None,
        prefill_on=None if first is None else first.prefill or first.decode,
        prefill_lengths=f"..{limit}" if apart and rest else None,
        transfer=f"{moved[0]:.4f}ms+{1e3 * moved[1]:.3f}us" if apart else None,
        seed=1,
    )
    (told,) = found.to_json()["runs"]
    for name in ("ttft_ms", "latency_ms"):
        mean, p99 = (told[name][which] for which in ("mean", "p99"))
        measured = np.array([r.first_ms if name == "ttft_ms" else r.latency_ms for r in served])
        off = format_percent(100 * (mean / float(np.mean(measured)) - 1), signed=True)
        print(f"  simulated: {name[:-3]} mean {format_ms(mean)} ({off}), p99 {format_ms(p99)}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.engine_loop.prefill_apart")
    parser.add_argument("--vllm")
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--to", type=int, default=160)
    parser.add_argument("--keep", type=Path)
    asked = parser.parse_args()
    try:
        vllm = installation(asked.vllm)
    except Skipped as reason:
        sys.exit(f"engine loop: skipped, {reason}")
    place = (asked.keep or Path(tempfile.mkdtemp())).absolute()
    place.mkdir(parents=True, exist_ok=True)
    make_model(vllm, place / "model")
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(place / "kv")},
    }
    (place / "kv").mkdir(exist_ok=True)
    cores = sorted(os.sched_getaffinity(0))
    options = ["--no-async-scheduling", "--enable-logging-iteration-details", "--no-enable-prefix-caching"]
    options += [
        "--block-size",
        str(BLOCK),
        "--disable-hybrid-kv-cache-manager",
        "--kv-transfer-config",
        json.dumps(connector),
    ]
    print(f"engine loop: vLLM {vllm.version}, {machine()}, load {os.getloadavg()[0]:.2f}")
    try:
        with ExitStack() as servers:
            first, second = (
                servers.enter_context(serving(vllm, place / "model", place / name, options, [core]))
                for name, core in (("prefill", cores[-2 % len(cores)]), ("decode", cores[-1]))
            )
            asyncio.run(run(asked, first, second))
    except Skipped as reason:
        sys.exit(f"engine loop: skipped, {reason}")


if __name__ == "__main__":
    main()
