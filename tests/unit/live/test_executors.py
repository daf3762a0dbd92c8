"""Executors that really run: threads and processes, on wall-clock time."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latfit.errors import WrongUsage
from latfit.live import (
    AsyncExecutor,
    Closed,
    ExecutorFailed,
    ExecutorLost,
    ExecutorTimedOut,
    ProcessExecutor,
    Router,
    RouterOptions,
    ThreadExecutor,
)
from latfit.live.executor import Run, padded
from latfit.policies import Limits
from latfit.policies.policy import gpu_only, three_stage

TIMES = [1.0] * 8


def squares(inputs: list[float]) -> Sequence[float]:
    found: list[float] = (np.array(inputs) ** 2).tolist()
    return found


def make_worker() -> Run:
    """What a process runs: numbers are squared; words tell it what to do, and a path to hang once it is made."""

    def run(inputs: list[Any]) -> list[Any]:
        if "die" in inputs:
            os._exit(1)
        if isinstance(inputs[0], Path):
            inputs[0].touch()
            time.sleep(600)
        if "fail" in inputs:
            raise ValueError("as it was told")
        return [os.getpid() if each == "pid" else each**2 for each in inputs]

    return run


def make_nothing() -> Run:
    raise RuntimeError("no weights here")


async def test_a_coroutine_function_runs_on_the_event_loop() -> None:
    """Its outputs come to their senders, padded batches included, and what it raises is told as by a thread."""
    threads, sizes = set(), []

    async def run(inputs: list[Any]) -> list[Any]:
        await asyncio.sleep(0)
        threads.add(threading.current_thread())
        sizes.append(len(inputs))
        if "fail" in inputs:
            raise ValueError("as it was told")
        return [each**2 for each in inputs]

    executor = AsyncExecutor("cpu", run, 8, buckets=(4, 8))
    async with Router([executor], [TIMES], gpu_only(Limits(8))) as router:
        assert await asyncio.gather(*(router.submit(k) for k in range(20))) == [k**2 for k in range(20)]
        with pytest.raises(ExecutorFailed, match="ValueError: as it was told"):
            await router.submit("fail")
        assert await router.submit(3) == 9
    assert threads == {threading.main_thread()}
    assert set(sizes) <= {4, 8}


def test_padding_goes_to_the_next_bucket() -> None:
    assert padded([1], (2, 8)) == [1, 1]
    assert padded([1, 2, 3], (2, 8)) == [1, 2, 3, 3, 3, 3, 3, 3]
    assert padded([1, 2, 3], ()) == [1, 2, 3]


def test_threads_serve_everybody_and_the_loop_goes_on() -> None:
    sizes: list[int] = []
    threads: set[str] = set()

    def slow_squares(inputs: list[float]) -> Sequence[float]:
        sizes.append(len(inputs))
        threads.add(threading.current_thread().name)
        time.sleep(0.002)
        return squares(inputs)

    async def main() -> list[float]:
        executor = ThreadExecutor("cpu", slow_squares, 8, servers=2, buckets=(1, 4, 8))
        async with Router([executor], [TIMES], gpu_only(Limits(8)), RouterOptions(example=1.0)) as router:
            return list(await asyncio.gather(*(router.submit(float(i)) for i in range(200))))

    assert asyncio.run(main()) == [float(i) ** 2 for i in range(200)]
    assert set(sizes) <= {1, 4, 8}
    assert threading.current_thread().name not in threads


async def test_a_warm_up_that_fails_ends_the_others() -> None:
    """The CPU fails in its first batch, while the GPU is in the first of four."""
    sizes: list[int] = []

    async def slow(inputs: list[Any]) -> Sequence[Any]:
        sizes.append(len(inputs))
        await asyncio.sleep(0.05)
        return inputs

    async def fails(inputs: list[Any]) -> Sequence[Any]:
        raise ValueError("no kernel")

    rule = three_stage(2, 10.0, Limits(8, 8))
    executors = [AsyncExecutor("gpu", slow, 8), AsyncExecutor("cpu", fails, 8)]
    with pytest.raises(ExecutorFailed, match="no kernel"):
        await Router(executors, [TIMES, TIMES], rule, RouterOptions(example=1.0)).start()
    await asyncio.sleep(0.2)
    assert sizes == [1]


async def test_what_a_function_raises_reaches_who_sent_it() -> None:
    def stops(inputs: list[Any]) -> Sequence[Any]:
        raise SystemExit("enough")

    async with Router([ThreadExecutor("cpu", stops, 8)], [TIMES], gpu_only(Limits(8))) as router:
        with pytest.raises(ExecutorFailed, match="SystemExit: enough"):
            await router.submit(1)


async def test_a_thread_that_hangs_gives_its_server_back_when_it_returns() -> None:
    released = threading.Event()

    def waits(inputs: list[Any]) -> Sequence[Any]:
        if inputs == ["hang"]:
            released.wait(30)
        return inputs

    options = RouterOptions(timeout_ms=50.0)
    async with Router([ThreadExecutor("cpu", waits, 8)], [TIMES], gpu_only(Limits(8)), options) as router:
        with pytest.raises(ExecutorTimedOut):
            await router.submit("hang")
        later = asyncio.ensure_future(router.submit("later"))
        await asyncio.sleep(0.05)
        assert not later.done()
        released.set()
        assert await asyncio.wait_for(later, 30) == "later"


async def test_a_router_serves_again_after_a_drain_that_a_hanging_thread_cut_short() -> None:
    released, returns = threading.Event(), threading.Event()

    def waits(inputs: list[Any]) -> Sequence[Any]:
        if inputs == ["hang"]:
            released.wait(30)
        if inputs == ["late"]:
            returns.wait(30)
        return inputs

    router = Router([ThreadExecutor("cpu", waits, 8)], [TIMES], gpu_only(Limits(8)))
    await router.start()
    hangs = asyncio.ensure_future(router.submit("hang"))
    await asyncio.sleep(0.05)
    await router.close(within_s=0.0)
    with pytest.raises(Closed):
        await hangs
    async with router:
        assert await asyncio.wait_for(router.submit("after"), 5) == "after"
        with pytest.raises(ExecutorTimedOut):
            await router.submit("late")
        returns.set()
        for _ in range(500):
            if router.up()["cpu"]:
                break
            await asyncio.sleep(0.01)
        assert await asyncio.wait_for(router.submit("last"), 5) == "last"
    released.set()


@pytest.mark.timeout(120)
async def test_a_process_that_fails_dies_or_hangs(tmp_path: Path) -> None:
    executor = ProcessExecutor("cpu", make_worker, 8, cores=[sorted(os.sched_getaffinity(0))[:1]])
    options = RouterOptions(timeout_ms=60_000.0, patience_ms=60_000.0)
    async with Router([executor], [TIMES], gpu_only(Limits(8)), options) as router:
        first = await router.submit("pid")
        assert first in executor.pids
        with pytest.raises(ExecutorFailed, match="ValueError: as it was told"):
            await router.submit("fail")
        assert await router.submit("pid") == first
        with pytest.raises(ExecutorLost):
            await router.submit("die")
        second = await router.submit("pid")
        assert second != first
        hangs = asyncio.ensure_future(executor.execute([tmp_path / "there"]))
        while not (tmp_path / "there").exists():
            await asyncio.sleep(0.01)
        hangs.cancel()  # as the router does after timeout_ms
        await executor.recover()
        third = await router.submit("pid")
        assert third not in (first, second)
        with pytest.raises(ExecutorFailed, match=r"cannot be sent|pickle|local object"):
            await router.submit(lambda: 1)


@pytest.mark.timeout(120)
async def test_a_process_killed_while_it_has_nothing_to_do_is_replaced() -> None:
    executor = ProcessExecutor("cpu", make_worker, 8)
    options = RouterOptions(timeout_ms=60_000.0, patience_ms=60_000.0)
    async with Router([executor], [TIMES], gpu_only(Limits(8)), options) as router:
        os.kill(await router.submit("pid"), signal.SIGKILL)
        outcomes = await asyncio.gather(*(router.submit(i) for i in range(40)), return_exceptions=True)
        assert all(each == i**2 or isinstance(each, ExecutorLost) for i, each in enumerate(outcomes))
        assert await router.submit(7) == 49
        pids = executor.pids
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_process_that_cannot_start_says_why() -> None:
    router = Router([ProcessExecutor("cpu", make_nothing, 8)], [TIMES], gpu_only(Limits(8)))
    with pytest.raises(ExecutorFailed, match="RuntimeError: no weights here"):
        await router.start()
    await router.close()


@pytest.mark.parametrize("given", [{"largest": 0}, {"servers": 0}, {"buckets": (4, 2)}, {"buckets": (1, 4)}])
def test_sizes_that_cannot_be(given: dict[str, Any]) -> None:
    with pytest.raises(WrongUsage):
        ThreadExecutor("cpu", squares, **{"largest": 8, **given})
