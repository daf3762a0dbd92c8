"""Loads by `vllm bench serve`, with what the server counted meanwhile and what else the machine did."""

import json
import os
import subprocess
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine_loop.server import Server, other_cores
from latfit.stats import FloatArray
from latfit.units import format_percent

PREFIX = "loop-"
WRITTEN_S = 5.0
"""After this time every step is in a file."""
MOST_FOREIGN, MOST_STOLEN = 0.05, 0.01
"""Shares of a core's time that other programs and other machines may take of a run that counts as quiet."""


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of prompts and of outputs; each is drawn between half of it and one and a half."""

    prompt: int
    output: int


@dataclass(frozen=True)
class Machine:
    """Of the time of a run: cores that other programs kept busy, the share that a hypervisor took, the load average at
    its start and end."""

    foreign: float
    stolen: float
    load: tuple[float, float]

    @property
    def disturbed(self) -> bool:
        return self.foreign > MOST_FOREIGN or self.stolen > MOST_STOLEN

    def __str__(self) -> str:
        others, stolen = (format_percent(100 * each) for each in (self.foreign, self.stolen))
        kind = "disturbed" if self.disturbed else "quiet"
        load = f"load {self.load[0]:.2f} to {self.load[1]:.2f}"
        return f"{kind}: others took {others} of a core, {stolen} was stolen, {load}"


@dataclass(frozen=True)
class LoadRun:
    """One load. result: of `vllm bench serve`; arrived: the same requests with the moments at which the server had
    them; before, after: `/metrics`; steps: the recorder's files; served: what the probe wrote of each request, in the
    order of their arrival; ttft_s: of the server's clock, in any order."""

    rate_per_s: float
    result: Path
    arrived: Path
    before: Path
    after: Path
    steps: Sequence[Path]
    machine: Machine
    served: Sequence[Mapping[str, Any]] = ()
    ttft_s: FloatArray = field(default_factory=lambda: np.empty(0))

    def of_requests(self, name: str) -> FloatArray:
        """What vLLM found of each request (n,), in ms; NaN where it does not tell."""
        found = [each.get(name) for each in self.served]
        return np.array([np.nan if each is None else 1e3 * each for each in found], dtype=np.float64)


def warm_up(server: Server, lengths: Lengths) -> None:
    """Some requests at once and one after another: first steps of each kind take longer."""

    def send(i: int) -> None:
        words = " ".join(f"warm{i}x{j}" for j in range(lengths.prompt // 5))
        asked = {"model": "m", "prompt": words, "max_tokens": lengths.output // 2, "ignore_eos": True}
        request = urllib.request.Request(
            f"{server.url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()

    for first in range(0, 24, 6):
        threads = [threading.Thread(target=send, args=(first + i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@dataclass(frozen=True)
class Load:
    """Poisson arrivals for about so many seconds; again: once more where the machine was disturbed."""

    rate_per_s: float
    seconds: float
    lengths: Lengths
    seed: int
    again: bool = True


def measured(server: Server, load: Load) -> LoadRun:
    """What came of a load, the less disturbed run of two."""
    run = _run(server, load)
    print(f"  {load.rate_per_s:g}/s: {len(run.served):,} requests; {run.machine}", flush=True)
    if not (run.machine.disturbed and load.again):
        return run
    again = _run(server, replace(load, seed=load.seed + 1000))
    print(f"  {load.rate_per_s:g}/s once more: {len(again.served):,} requests; {again.machine}", flush=True)
    return min(run, again, key=lambda each: each.machine.foreign + each.machine.stolen)


def _run(server: Server, load: Load) -> LoadRun:
    name = f"load-{load.rate_per_s:g}-{load.seed}"
    result = server.place / f"{name}.json"
    command = [str(server.vllm.vllm), "bench", "serve", "--backend", "vllm", "--base-url", server.url, "--model", "m"]
    command += ["--tokenizer", str(server.model), "--dataset-name", "random", "--random-range-ratio", "0.5"]
    command += ["--random-input-len", str(load.lengths.prompt), "--random-output-len", str(load.lengths.output)]
    command += ["--num-prompts", str(round(load.rate_per_s * load.seconds)), "--request-rate", str(load.rate_per_s)]
    command += ["--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm", "--seed", str(load.seed)]
    command += ["--result-dir", str(server.place), "--result-filename", result.name]
    command += ["--request-id-prefix", PREFIX, "--ready-check-timeout-sec", "0"]
    before = server.metrics(server.place / f"{name}-before.txt")
    known = server.requests.stat().st_size if server.requests.exists() else 0
    written = set(server.traces.glob("*.parquet"))
    watch = _Watch(server)
    with (server.place / f"{name}.log").open("wb") as log:
        subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": str(server.place / "beside"), "HF_HUB_OFFLINE": "1"},
            preexec_fn=lambda: os.sched_setaffinity(0, other_cores()),
            stdout=log,
            stderr=subprocess.STDOUT,
            check=True,
        )
    machine = watch.end()
    after = server.metrics(server.place / f"{name}-after.txt")
    served, ttft_s = _probed(server.requests, known)
    arrived = _arrived(served, server.place / f"{name}-arrived.csv")
    time.sleep(WRITTEN_S)
    steps = sorted(set(server.traces.glob("*.parquet")) - written)
    return LoadRun(load.rate_per_s, result, arrived, before, after, steps, machine, served, ttft_s)


def _arrived(served: Sequence[Mapping[str, Any]], target: Path) -> Path:
    """A measured run by the server's clock: what `latfit validate` reads, its first tokens by the engine's."""
    lines = ["t_s,prompt_tokens,output_tokens,ttft_s,latency_s"]
    for each in served:
        ttft_s = each["e2e_latency"] - each["decode_time"]
        tokens = each["num_prompt_tokens"], each["num_generation_tokens"]
        lines.append(
            f"{each['arrival'] - served[0]['arrival']:.6f},{tokens[0]},{tokens[1]},{ttft_s},{each['e2e_latency']}"
        )
    target.write_text("\n".join(lines) + "\n")
    return target


def _probed(file: Path, known: int) -> tuple[list[dict[str, Any]], FloatArray]:
    """What the probe wrote behind so many bytes: the requests of the load generator in its order, times of first
    tokens."""
    with file.open("rb") as stream:
        stream.seek(known)
        lines = [json.loads(line) for line in stream.read().splitlines()]
    times = [time_s for line in lines for time_s in line.get("ttft", ())]
    served = [line for line in lines if PREFIX in str(line.get("request_id"))]
    return sorted(served, key=lambda line: float(line["arrival"])), np.array(times)


class _Watch:
    """What a machine does besides a load and its server, from the making of this to `end`."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.began = time.monotonic()
        self.load = os.getloadavg()[0]
        self.busy, self.stolen = _cpu_s()
        self.ours = self._ours_s()

    def _ours_s(self) -> float:
        mine = os.times()
        return self.server.cpu_s() + mine.user + mine.system + mine.children_user + mine.children_system

    def end(self) -> Machine:
        lasted = time.monotonic() - self.began
        busy, stolen = _cpu_s()
        foreign = max(busy - self.busy - (self._ours_s() - self.ours), 0.0) / lasted
        return Machine(foreign, (stolen - self.stolen) / lasted, (self.load, os.getloadavg()[0]))


def _cpu_s() -> tuple[float, float]:
    """Seconds that all cores were busy, and that the hypervisor took, since the machine started."""
    ticks = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    user, nice, system, _, _, irq, soft_irq, stolen = ticks[:8]
    each = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + soft_irq) / each, stolen / each
