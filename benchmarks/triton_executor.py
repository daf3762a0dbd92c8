"""`latfit.live.TritonExecutor` in front of a real Triton server (nvidia-pytriton's), with CPU stand-ins for models: a
main path to which every batch takes 8 ms, and a CPU path.

`python -m benchmarks.triton_executor [--smoke] [--triton PYTHON]`; PYTHON: an interpreter that has nvidia-pytriton,
skipped without. Prints what the way to the server and back takes, what became of every request while the server was
killed and started again, and policies live beside their simulation.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from latfit.api import replay
from latfit.errors import LatfitError
from latfit.live import Router, RouterOptions, ThreadExecutor, TritonExecutor, TritonModel
from latfit.policies import Limits, policy

EXPORTS = Path(__file__).parent / "exports"
ROW = np.ones(1, np.float32)
MODELS = {"gpu": (32, 8.0, 0.1), "cpu": (4, 0.5, 1.5), "at_once": (32, 0.0, 0.0)}
"""Largest batch, and launch and slope ms of a batch."""


class Fed(TritonExecutor):
    """Runs whatever it is given on a row of its own, as a replay wants it."""

    async def execute(self, inputs: list[Any]) -> Sequence[Any]:
        return await super().execute([ROW] * len(inputs))


def repository(folder: Path) -> Path:
    for name, (largest, launch, slope) in MODELS.items():
        values = {"launch_ms": launch, "slope_ms": slope, "exponential": 0}
        lines = [
            f'name: "{name}"\nbackend: "python"\nmax_batch_size: {largest}',
            'input [ { name: "INPUT" data_type: TYPE_FP32 dims: [ 1 ] } ]',
            'output [ { name: "BATCH" data_type: TYPE_INT32 dims: [ 1 ] } ]',
            "instance_group [ { count: 1 kind: KIND_CPU } ]",
            *(f'parameters {{ key: "{k}" value: {{ string_value: "{v}" }} }}' for k, v in values.items()),
        ]
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text("\n".join([*lines, ""]))
        (folder / name / "1" / "model.py").write_text((EXPORTS / "stand_in.py").read_text())
    return folder


class Server:
    """A Triton server on a repository. pid: of its process.  address: of its HTTP, the same after a new start."""

    def __init__(self, python: str, models: Path) -> None:
        self._command = [python, str(EXPORTS / "triton_probe.py"), "serve", str(models)]
        self._ports = ["0", "0"]
        self.address = ""

    def start(self) -> None:
        self._process = subprocess.Popen(
            [*self._command, *self._ports], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        told = self._process.stdout.readline().split()
        if len(told) != 3:
            raise SystemExit("the server does not start")
        self.pid, self.address = int(told[0]), told[2]
        self._ports = [each.rpartition(":")[2] for each in told[1:]]

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        self._process.communicate()


async def ways(address: str, count: int) -> None:
    """A batch to a model that does nothing, and back, one after the other."""
    triton = Fed("triton", TritonModel(address, "at_once"), 32)
    await triton.start()
    for size in (1, 32):
        took = []
        for _ in range(count):
            began = time.perf_counter()
            await triton.execute([None] * size)
            took.append((time.perf_counter() - began) * 1e3)
        p50, p99 = np.quantile(took, [0.5, 0.99])
        print(f"triton: a batch of {size} there and back: p50 {p50:.2f}, p99 {p99:.2f} ms")
    await triton.close()


def policies(server: Server, seconds: float) -> None:
    """The same policies as `latfit replay`, by two models of the server."""
    executors = [Fed(name, TritonModel(server.address, name), MODELS[name][0]) for name in ("gpu", "cpu")]
    found = replay(
        ["gpu-only", "cutoff", "three-stage"], ["50%", "70%"], duration_each=f"{seconds}s", executors=executors
    )
    print(found.summary())


async def killed(server: Server, seconds: float) -> None:
    """A server that dies while requests come, and one in its place; the second path is in this process."""
    outcomes: Counter[str] = Counter()

    async def one() -> None:
        try:
            await router.submit(ROW)
            outcomes["served"] += 1
        except LatfitError as error:
            outcomes[type(error).__name__] += 1

    async def stream() -> None:
        sent = []
        while not enough.is_set():
            sent.append(asyncio.ensure_future(one()))
            await asyncio.sleep(0.003)
        await asyncio.gather(*sent)

    def in_this_process(rows: list[Any]) -> list[Any]:
        time.sleep((MODELS["cpu"][1] + MODELS["cpu"][2] * len(rows)) / 1000)
        return rows

    enough = asyncio.Event()
    main = TritonExecutor("gpu", TritonModel(server.address, "gpu"), MODELS["gpu"][0])
    side = ThreadExecutor("cpu", in_this_process, MODELS["cpu"][0])
    times = [[launch + slope * b for b in range(1, n + 1)] for n, launch, slope in (MODELS["gpu"], MODELS["cpu"])]
    rule = policy.cutoff(20.0, Limits(MODELS["gpu"][0], MODELS["cpu"][0]))
    async with Router([main, side], times, rule, RouterOptions(timeout_ms=2000.0)) as router:
        sender = asyncio.ensure_future(stream())
        await asyncio.sleep(seconds)
        await asyncio.to_thread(server.kill)
        began, before = time.monotonic(), dict(outcomes)
        await asyncio.to_thread(server.start)
        away = time.monotonic() - began
        while not router.up()["gpu"] and time.monotonic() - began < 60:
            await asyncio.sleep(0.05)
        back, batches = time.monotonic() - began, router.main.batches
        await asyncio.sleep(seconds)
        enough.set()
        await sender
        print(
            f"triton, killed: {before.get('served', 0)} served before; a new one ready after {away:.1f} s, used again"
            f" after {back:.1f} s, {router.main.batches - batches} batches since; of {router.submitted} requests in all"
            f" {dict(outcomes)}"
        )


def main(smoke: bool = False, arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.triton_executor")
    parser.add_argument("--triton", metavar="PYTHON")
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args(arguments)
    if given.triton is None:
        print("Triton executor: skipped, no --triton PYTHON (of an environment with nvidia-pytriton)")
        return
    if find_spec("tritonclient") is None:
        print("Triton executor: skipped, tritonclient is not installed (latfit[triton])")
        return
    with tempfile.TemporaryDirectory() as folder:
        server = Server(given.triton, repository(Path(folder)))
        server.start()
        try:
            asyncio.run(ways(server.address, 50 if smoke else 1000))
            asyncio.run(killed(server, 1.0 if smoke else 5.0))
            if not smoke and given.seconds:
                policies(server, given.seconds)
        finally:
            server.stop()


if __name__ == "__main__":
    main("--smoke" in sys.argv[1:], [each for each in sys.argv[1:] if each != "--smoke"])
