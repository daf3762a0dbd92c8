"""What the live router costs: a decision, and the hop of a request from its sender to its batch and back.

`python -m benchmarks.router_overhead [--smoke]`. Hops are timed one at a time with pauses, without pauses, and with 64
senders at once, in turn with the plainest batcher there is (an `asyncio.Queue`, emptied into `run_in_executor`) and a
bare thread. Aims: a decision within 5 µs; a hop within 100 µs at p99 while cores are idle.
"""

import asyncio
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from latfit.live import Executor, ProcessExecutor, Router, ThreadExecutor
from latfit.live.executor import Run
from latfit.live.waiting import Request
from latfit.policies import Limits, Policy, policy

LARGEST, SIDE_LARGEST = 32, 8
TIMES = [5.0 + 0.2 * b for b in range(1, LARGEST + 1)]
SIDE_TIMES = [1.0 * b for b in range(1, SIDE_LARGEST + 1)]
ROUNDS, SENDERS, PAUSE_S = 5, 64, 0.0005


Submit = Callable[[Any], Awaitable[Any]]
Measured = tuple[list[float], list[float], float]
"""µs of hops with pauses and without, requests/s."""


def same(inputs: list[Any]) -> list[Any]:
    return inputs


def make_same() -> Run:
    return same


class PlainBatcher:
    """Whoever waits when the thread is free is its next batch."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[tuple[Any, asyncio.Future[Any]]] = asyncio.Queue()
        self.task = asyncio.ensure_future(self.serve())

    async def submit(self, item: Any) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.queue.put_nowait((item, answer))
        return await answer

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self.queue.get()]
            while not self.queue.empty() and len(batch) < LARGEST:
                batch.append(self.queue.get_nowait())
            outputs = await loop.run_in_executor(None, same, [item for item, _ in batch])
            for (_, answer), output in zip(batch, outputs, strict=True):
                answer.set_result(output)


async def measure(submit: Submit, count: int) -> Measured:
    """µs of each hop, one request at a time with a pause after it, as they come where cores are idle; the same without
    pauses; then requests/s of 64 senders, each with the next request when it has its answer."""
    await hops_us(submit, count // 10, PAUSE_S)
    paused, at_once = await hops_us(submit, count, PAUSE_S), await hops_us(submit, count, 0.0)
    each = 4 * count // SENDERS

    async def sender() -> None:
        for k in range(each):
            await submit(k)

    began = time.perf_counter()
    await asyncio.gather(*(sender() for _ in range(SENDERS)))
    return paused, at_once, each * SENDERS / (time.perf_counter() - began)


async def hops_us(submit: Submit, count: int, pause_s: float) -> list[float]:
    found = []
    for k in range(count):
        began = time.perf_counter()
        await submit(k)
        found.append((time.perf_counter() - began) * 1e6)
        await asyncio.sleep(pause_s)
    return found


def by_router(executor: Executor, count: int) -> Measured:
    async def main() -> Measured:
        async with Router([executor], [TIMES], policy.gpu_only(Limits(LARGEST))) as router:
            return await measure(router.submit, count)

    return asyncio.run(main())


def by_queue(count: int) -> Measured:
    async def main() -> Measured:
        plain = PlainBatcher()
        found = await measure(plain.submit, count)
        plain.task.cancel()
        return found

    return asyncio.run(main())


def by_thread(count: int) -> Measured:
    """No batches and no queue but the thread's: the least that a way to a thread and back takes."""
    work: queue.SimpleQueue[asyncio.Future[Any] | None] = queue.SimpleQueue()

    def serve() -> None:
        while (answer := work.get()) is not None:
            answer.get_loop().call_soon_threadsafe(answer.set_result, None)

    async def submit(_: Any) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        work.put(answer)
        return await answer

    thread = threading.Thread(target=serve)
    thread.start()
    found = asyncio.run(measure(submit, count))
    work.put(None)
    thread.join()
    return found


async def decision_us(rule: Policy, sides: int, count: int) -> float:
    """Of a policy that looks at a queue of two behind a busy path."""
    executors = [ThreadExecutor("gpu", same, LARGEST), ThreadExecutor("cpu", same, SIDE_LARGEST)][:sides]
    router = Router(executors, [TIMES, SIDE_TIMES][:sides], rule)
    now, loop = router._now_ms(), asyncio.get_running_loop()
    for _ in range(2):
        router._queue.add(Request(None, 0, now, loop.create_future()))
    router.main.occupy(now, 4)
    router._decide(now)
    best = math.inf
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(count):
            router._decide(now)
        best = min(best, (time.perf_counter() - began) / count * 1e6)
    return best


async def decisions(count: int) -> None:
    limits = Limits(LARGEST, SIDE_LARGEST)
    for rule, sides in ((policy.gpu_only(Limits(LARGEST)), 1), (policy.three_stage(4, 10.0, limits), 2)):
        print(f"router: a decision of {rule.name}: {await decision_us(rule, sides, count):.1f} µs (aim 5)")


def compare(where: str, contestants: Mapping[str, Callable[[int], Measured]], count: int) -> None:
    """In turn, so that what else the machine does meets all alike; the first is what others are compared with."""
    rounds: dict[str, list[Measured]] = {name: [] for name in contestants}
    for _ in range(ROUNDS):
        for name, measured in contestants.items():
            rounds[name].append(measured(max(count // ROUNDS, 20)))
    print(f"{where}, {ROUNDS} rounds in turn, load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores:")
    own = numbers(rounds["router"])
    for name in contestants:
        found = zip(numbers(rounds[name]), own, strict=True)
        p50, p99, at_once, rate = (f"{value:,.0f} ({value / mine:.2f})" for value, mine in found)
        print(f"  {name}: p50 {p50}, p99 {p99}, without pauses p50 {at_once} µs; {SENDERS} senders {rate} requests/s")


def numbers(rounds: list[Measured]) -> tuple[float, ...]:
    """p50 and p99 of a hop with pauses, p50 without, requests/s."""
    paused, at_once = (np.concatenate([each[k] for each in rounds]) for k in (0, 1))
    rate = float(np.median([each[2] for each in rounds]))
    return *np.quantile(paused, [0.5, 0.99]).tolist(), float(np.median(at_once)), rate


def main(smoke: bool = False) -> None:
    count = 100 if smoke else 5000
    asyncio.run(decisions(count))
    thread, process = ThreadExecutor("cpu", same, LARGEST), ProcessExecutor("cpu", make_same, LARGEST)
    in_thread: dict[str, Callable[[int], Measured]] = {
        "router": lambda count: by_router(thread, count),
        "asyncio.Queue": by_queue,
        "a bare thread, without batches": by_thread,
    }
    compare("in a thread", in_thread, count)
    compare("in a worker process", {"router": lambda count: by_router(process, count)}, count)


if __name__ == "__main__":
    main("--smoke" in sys.argv[1:])
