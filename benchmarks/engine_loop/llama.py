"""The promise kept by a second engine: llama.cpp's server recorded by its counters, planned for, and started anew.

`python -m benchmarks.engine_loop.llama --engine PYTHON [--seconds 60] [--limits 2s:40ms] [--rate 0.8]`.
PYTHON: of an environment with `xllamacpp` and `gguf`, whose server is llama.cpp's (`benchmarks/llama_engine.py`); the
model has random weights and is made here. The server has one core, the load and the recorder another one.

A server with 16 slots is loaded by so many requests at once as `RECORDED` says while `latfit record` reads its
counters; its windows are fitted, a plan for two limits is made at `rate` times what it carried and exported for
llama.cpp; a new server with these settings then serves the planned arrivals. TPOT is the server's own (`timings` of
each reply), TTFT the reply's time at the client less the server's time of decoding.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np

from benchmarks.engine_loop.server import free_port, model_cores, other_cores
from benchmarks.front_overhead import wait_for
from benchmarks.llama_engine import CONTEXT
from latfit.api import EnginePlan, Fit, export, fit, plan_engine, record_server, simulate_engine
from latfit.stats import FloatArray, IntArray
from latfit.units import format_ms, format_percent

ENGINE = Path(__file__).parents[1] / "llama_engine.py"
WIDTH, LAYERS, SLOTS = 256, 6, 16
PROMPT, OUTPUT, SHORT, ONE, WORDS = (20, 60), (32, 96), (2, 8), (1, 2), (259, 512)
"""Tokens of a prompt and of a reply, and their numbers: from, to."""

RECORDED = ((2, OUTPUT), (4, OUTPUT), (8, OUTPUT), (16, OUTPUT), (32, SHORT), (32, ONE))
"""Loads that are recorded: requests that are always under way, tokens of a reply. Short replies make large steps; with
more requests than slots some always wait, so that the server is never idle for want of the client."""

ROUNDS = 3
"""How often all of them are gone through, so that a machine that becomes slower does so in each."""

SETTINGS, BATCH = ("parallel", "batch_size"), 2048
"""Of llama.cpp; its own tokens of a step."""

STATISTICS: Mapping[str, Callable[[FloatArray], float]] = {
    "mean": lambda values: float(np.mean(values)),
    "p99": lambda values: float(np.quantile(values, 0.99)),
}


@dataclass(frozen=True)
class Load:
    """Requests: when they are sent, and their tokens (n,)."""

    at_s: FloatArray
    prompt: IntArray
    output: IntArray

    def save(self, file: Path) -> None:
        """As `latfit plan --arrivals` reads it."""
        rows = zip(self.at_s, self.prompt, self.output, strict=True)
        lines = [f"{at:.4f},{prompt},{output}" for at, prompt, output in rows]
        file.write_text("\n".join(["t_s,prompt_tokens,output_tokens", *lines, ""]))

    def bodies(self) -> list[dict[str, object]]:
        rng = np.random.default_rng(0)
        return [
            {
                "prompt": rng.integers(*WORDS, int(prompt)).tolist(),
                "n_predict": int(output),
                "ignore_eos": True,
                "cache_prompt": False,
            }
            for prompt, output in zip(self.prompt, self.output, strict=True)
        ]


def poisson(rate_per_s: float, count: int, seed: int, output: tuple[int, int] = OUTPUT) -> Load:
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(1 / rate_per_s, count))
    return Load(at_s - at_s[0], rng.integers(*PROMPT, count), rng.integers(*output, count))


def main(arguments: Sequence[str]) -> None:
    """Print the figures, or why there are none."""
    parser = argparse.ArgumentParser(prog="benchmarks.engine_loop.llama")
    parser.add_argument("--engine", help="Python of an environment with xllamacpp and gguf")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each recorded load; half of that planned for")
    parser.add_argument(
        "--limits", help="of the p99 of TTFT and TPOT: 2s:40ms; default: 10 s, three quarters of 16 slots"
    )
    parser.add_argument("--rate", type=float, default=0.5, help="of what the first server carries, that is planned for")
    asked = parser.parse_args(arguments)
    there = [asked.engine, "-c", "import xllamacpp, gguf"]
    if asked.engine is None or subprocess.run(there, capture_output=True, check=False).returncode:
        print("llama loop: skipped, name the Python of an environment with xllamacpp and gguf by --engine")
        return
    os.sched_setaffinity(0, other_cores())
    with tempfile.TemporaryDirectory() as place:
        _run(asked, Path(place))


def _run(asked: argparse.Namespace, place: Path) -> None:
    with serving(asked.engine, place, SLOTS) as url:
        carried = asyncio.run(closed(url, SLOTS, asked.seconds / 2))
        print(f"llama loop: {SLOTS} slots carry {carried:.2f} req/s", flush=True)
        asyncio.run(recorded(url, place / "steps.parquet", asked.seconds))
    steps = fit(place / "steps.parquet", path="cpu")
    print(steps.summary(), flush=True)
    rate = asked.rate * carried
    load = poisson(rate, max(round(rate * asked.seconds * 2), 50), seed=9)
    load.save(place / "load.csv")
    ttft, tpot = asked.limits.split(":") if asked.limits else _limits(steps, place)
    print(f"llama loop: {rate:.2f} req/s, limits {ttft} and {tpot} at the p99", flush=True)
    plan = plan_engine(
        steps,
        arrivals=str(place / "load.csv"),
        ttft=ttft,
        tpot=tpot,
        replicas=1,
        batching="chunked-prefill",
        engine={"synchronous": True},
    )
    print(plan.summary(), flush=True)
    if not plan.feasible:
        print("llama loop: nothing to export; ask for longer --limits or a lower --rate")
        return
    found = export(plan, "llamacpp", model=str(place / "model.gguf"))
    found.save(place / "exported")
    planned = [int(found.settings[name]) for name in SETTINGS]
    with serving(asked.engine, place, *planned) as url:
        asyncio.run(closed(url, planned[0], 5.0))
        replies = asyncio.run(driven(url, load))
    print(f"llama loop: as planned ({', '.join(map(str, planned))})")
    show(replies, plan)


def _limits(steps: Fit, place: Path) -> tuple[str, str]:
    """TTFT and TPOT that as many slots as were recorded do not keep: the sequence limit has to bind."""
    engine = {"max_num_seqs": SLOTS, "max_num_batched_tokens": BATCH, "synchronous": True}
    arrivals, blocks = str(place / "load.csv"), SLOTS * CONTEXT // 16
    found = simulate_engine(steps, arrivals=arrivals, engine=engine, kv_blocks=blocks, force=True)
    (run,) = found.to_json()["runs"]
    return "10s", f"{0.75 * run['tpot_ms']['p99']:.3g}ms"


@contextmanager
def serving(python: str, place: Path, slots: int, batch: int = 0) -> Iterator[str]:
    """The address of a server with these settings, llama.cpp's own where 0."""
    port = free_port()
    words = [str(ENGINE), str(place / "model.gguf"), port, slots, model_cores()[0], WIDTH, LAYERS, batch]
    with (place / f"server-{slots}-{batch}.log").open("wb") as log:
        started = subprocess.Popen([python, *map(str, words)], stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_for(f"http://127.0.0.1:{port}")
            _until_loaded(f"http://127.0.0.1:{port}/health")
            yield f"http://127.0.0.1:{port}"
        finally:
            started.terminate()
            started.wait(60)


def _until_loaded(health: str, within_s: float = 120.0) -> None:
    """Until it answers: it listens before it has its model."""
    ends = time.monotonic() + within_s
    while time.monotonic() < ends:
        with suppress(OSError), urllib.request.urlopen(health, timeout=5):
            return
        time.sleep(0.3)
    raise SystemExit(f"{health} does not become ready")


async def ask(session: aiohttp.ClientSession, url: str, body: Mapping[str, object], due_s: float = 0.0) -> list[float]:
    """TTFT and TPOT in ms of a request that is sent at a moment of the loop's clock."""
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(max(due_s - clock(), 0.0))
    began = max(due_s, 0.0) or clock()
    async with session.post(f"{url}/completion", json=body) as answer:
        timings = (await answer.json())["timings"]
    decoding_ms, more = timings["predicted_ms"], max(timings["predicted_n"] - 1, 1)
    return [1e3 * (clock() - began) - decoding_ms, decoding_ms / more]


async def closed(url: str, at_once: int, seconds: float, output: tuple[int, int] = OUTPUT) -> float:
    """Requests a second with so many under way all the time."""
    clock = asyncio.get_running_loop().time
    began, bodies, ended = clock(), iter(poisson(1.0, 5000, at_once, output).bodies()), 0
    async with _session() as session:

        async def sender() -> None:
            nonlocal ended
            while clock() - began < seconds:
                await ask(session, url, next(bodies))
                ended += 1

        await asyncio.gather(*(sender() for _ in range(at_once)))
    return ended / (clock() - began)


async def driven(url: str, load: Load) -> FloatArray:
    """TTFT and TPOT in ms (n, 2)."""
    began = asyncio.get_running_loop().time() + 0.2
    async with _session() as session:
        each = zip(load.at_s, load.bodies(), strict=True)
        return np.array(await asyncio.gather(*(ask(session, url, body, began + at) for at, body in each)))


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=900))


async def recorded(url: str, out: Path, seconds: float) -> None:
    """The server's windows under each of `RECORDED`."""
    lasts = f"{seconds * len(RECORDED):.1f}s"
    asked = asyncio.to_thread(record_server, url, duration=lasts, every="500ms", out=out, path="cpu")
    recording = asyncio.create_task(asked)
    for at_once, output in RECORDED * ROUNDS:
        await closed(url, at_once, seconds / ROUNDS, output)
    found = await recording
    print(f"llama loop: {found.verdict}", flush=True)
    for warning in found.messages:
        print(f"  ! {warning.message}. {warning.remedy}")


def show(replies: FloatArray, plan: EnginePlan) -> None:
    """TTFT and TPOT beside what was planned."""
    assert plan.result.outcome is not None
    for name, times in zip(("TTFT", "TPOT"), replies.T, strict=True):
        for which, statistic in STATISTICS.items():
            value, said = statistic(times), getattr(plan.result.outcome, name.lower())[which].value
            off = format_percent(100 * (said / value - 1), signed=True)
            print(f"  {name} {which:<5}{format_ms(value):>10}  planned {format_ms(said)}, {off}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
