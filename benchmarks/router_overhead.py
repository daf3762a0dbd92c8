"""What the live router costs: a decision, and the hop of a request from its sender to a thread and back, beside the
plainest batcher there is: an `asyncio.Queue`, emptied by one task into `run_in_executor`.

`python -m benchmarks.router_overhead [--smoke]`. Senders in turn: one request at a time, on both sides, so that nothing
is batched and the hop alone is seen; then 64 at a time, requests a second. The function gives its inputs back.
Aims: a decision within 5 µs; a hop within 100 µs at p99 while cores are idle.
"""

import asyncio
import math
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from latfit.live import Router, ThreadExecutor
from latfit.live.waiting import Request
from latfit.policies import Limits, Policy, policy

LARGEST, SIDE_LARGEST = 32, 8
TIMES = [5.0 + 0.2 * b for b in range(1, LARGEST + 1)]
SIDE_TIMES = [1.0 * b for b in range(1, SIDE_LARGEST + 1)]
Submit = Callable[[Any], Awaitable[Any]]


def same(inputs: list[Any]) -> list[Any]:
    return inputs


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


async def hops_us(submit: Submit, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One request at a time, with a pause between them, as they come where cores are idle."""
    found = np.empty(count)
    for k in range(count):
        began = time.perf_counter()
        await submit(k)
        found[k] = (time.perf_counter() - began) * 1e6
        await asyncio.sleep(0.0005)
    return found


async def crowd_per_s(submit: Submit, count: int) -> float:
    """64 senders, each with the next request when it has its answer."""

    async def sender() -> None:
        for k in range(count // 64):
            await submit(k)

    began = time.perf_counter()
    await asyncio.gather(*(sender() for _ in range(64)))
    return count // 64 * 64 / (time.perf_counter() - began)


async def decision_us(rule: Policy, sides: int, count: int) -> float:
    """Of a policy that looks at a queue of two behind a busy path."""
    executors = [ThreadExecutor("gpu", same, LARGEST), ThreadExecutor("cpu", same, SIDE_LARGEST)][:sides]
    router = Router(executors, [TIMES, SIDE_TIMES][:sides], rule)
    now, loop = router._now(), asyncio.get_running_loop()
    for _ in range(2):
        router._room.add(Request(None, 0, now, loop.create_future()))
    router.main.occupy(now, 4)
    usable = (True,) * sides
    router._decide(now, usable)
    best = math.inf
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(count):
            router._decide(now, usable)
        best = min(best, (time.perf_counter() - began) / count * 1e6)
    return best


async def measure(count: int) -> None:
    limits = Limits(LARGEST, SIDE_LARGEST)
    for rule, sides in ((policy.gpu_only(Limits(LARGEST)), 1), (policy.three_stage(4, 10.0, limits), 2)):
        print(f"router: a decision of {rule.name}: {await decision_us(rule, sides, count):.1f} µs (aim 5)")
    async with Router([ThreadExecutor("cpu", same, LARGEST)], [TIMES], policy.gpu_only(Limits(LARGEST))) as router:
        plain = PlainBatcher()
        for name, submit in (("router", router.submit), ("asyncio.Queue", plain.submit)):
            await hops_us(submit, 50)
            found = await hops_us(submit, count)
            p50, p99 = np.quantile(found, [0.5, 0.99])
            rate = await crowd_per_s(submit, 4 * count)
            print(f"  {name}: a hop p50 {p50:.0f}, p99 {p99:.0f} µs; 64 senders {rate:,.0f} requests/s")
        plain.task.cancel()


def main(smoke: bool = False) -> None:
    asyncio.run(measure(200 if smoke else 5000))


if __name__ == "__main__":
    main("--smoke" in sys.argv[1:])
