"""Every request ends once, with a result or an error that says why, whatever the executors and the senders do."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from latfit.errors import WrongUsage
from latfit.live import (
    Abandoned,
    Closed,
    Executor,
    ExecutorFailed,
    ExecutorLost,
    ExecutorTimedOut,
    NoPath,
    QueueFull,
    Request,
    Router,
    RouterOptions,
)
from latfit.policies import Limits, Policy, cutoff
from latfit.policies.policy import fixed, gpu_only
from latfit.stats import FloatArray
from tests.unit.live.virtual import ExactExecutor, clock_s

TIMES: FloatArray = 5.0 + 0.5 * np.arange(1.0, 9.0)
VIRTUAL_TIME = True
SIDE_TIMES: FloatArray = 4.0 * np.arange(1.0, 5.0)


class FaultyExecutor(ExactExecutor):
    """fault(k) of batch k = 0, 1, ...: None, an exception to raise, or ms that it takes instead."""

    def __init__(self, fault: Callable[[int], Exception | float | None], name: str = "gpu") -> None:
        super().__init__(name, TIMES)
        self.fault = fault
        self.recoveries = 0

    async def execute(self, inputs: list[Any]) -> Sequence[Any]:
        fault = self.fault(len(self.batches))
        self.batches.append(inputs)
        if isinstance(fault, Exception):
            raise fault
        lasts = float(self.times_ms[len(inputs) - 1]) if fault is None else fault
        await asyncio.sleep(lasts / 1000)
        return inputs

    async def recover(self) -> None:
        self.recoveries += 1


def greedy() -> Policy:
    return gpu_only(Limits(8))


def both(t_cut_ms: float = 10.0) -> Policy:
    return cutoff(t_cut_ms, Limits(8, 4))


@asynccontextmanager
async def told(
    executors: Sequence[Executor], policy: Policy, **options: Any
) -> AsyncIterator[tuple[Router, list[Request]]]:
    """A router, and the requests that ended; every request ends once."""
    ended: list[Request] = []
    times = [TIMES, SIDE_TIMES][: len(executors)]
    router = Router(executors, times, policy, RouterOptions(**options), clock_s)
    router.listeners.append(ended.append)
    async with router:
        yield router, ended
    assert router.submitted == router.done + router.failed + router.cancelled
    assert len({id(each) for each in ended}) == len(ended)


async def poisson(router: Router, count: int, rate: float, seed: int = 0) -> list[Any]:
    """Outcomes of so many requests at a rate per ms: inputs that came back, or exceptions."""
    rng = np.random.default_rng(seed)
    tasks = []
    for i, gap in enumerate(rng.exponential(1 / rate, count)):
        await asyncio.sleep(gap / 1000)
        tasks.append(asyncio.ensure_future(router.submit(i)))
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_error_ends_its_batch_alone_and_says_what_it_was() -> None:
    executor = FaultyExecutor(lambda k: ValueError("no such shape") if k == 3 else None)
    async with told([executor], greedy()) as (router, _):
        outcomes = await poisson(router, 200, 0.3)
        wrong = [each for each in outcomes if isinstance(each, Exception)]
        assert len(wrong) == len(executor.batches[3])
        assert all(isinstance(each, ExecutorFailed) and "no such shape" in str(each) for each in wrong)
        assert [each for each in outcomes if not isinstance(each, Exception)] == [
            i for i in range(200) if i not in executor.batches[3]
        ]


async def test_an_output_that_is_an_error_fails_its_request_only() -> None:
    class Odd(ExactExecutor):
        async def execute(self, inputs: list[Any]) -> Sequence[Any]:
            await super().execute(inputs)
            return [ValueError(str(each)) if each % 7 == 0 else each for each in inputs]

    async with told([Odd("gpu", TIMES)], greedy()) as (router, _):
        outcomes = await poisson(router, 100, 0.5)
        assert [isinstance(each, ValueError) for each in outcomes] == [i % 7 == 0 for i in range(100)]
    assert router.main.failed_batches == 0


async def gives_up(inputs: list[Any]) -> Sequence[Any]:
    raise asyncio.CancelledError


def refuses(inputs: list[Any]) -> Any:
    raise ValueError("no such shape")


async def answers(outputs: Any) -> Any:
    return outputs


@pytest.mark.parametrize(
    ("execute", "says"),
    [
        (lambda inputs: answers(inputs[:-1]), "0 outputs for 1 inputs"),
        (lambda inputs: answers(None), "not iterable"),
        (lambda inputs: None, "awaitable"),
        (refuses, "no such shape"),
        (gives_up, "CancelledError"),
    ],
)
async def test_no_answer_of_an_executor_takes_its_server(execute: Any, says: str) -> None:
    executor = ExactExecutor("gpu", TIMES)
    runs, executor.execute = executor.execute, execute  # type: ignore[method-assign]
    async with told([executor], greedy()) as (router, _):
        with pytest.raises(ExecutorFailed, match=says):
            await router.submit("x")
        executor.execute = runs  # type: ignore[method-assign]
        assert await asyncio.wait_for(router.submit("y"), 1.0) == "y"


async def test_a_listener_that_fails_leaves_nobody_behind() -> None:
    reported: list[str] = []

    def fails(*_: object) -> None:
        raise ValueError("no room in the log")

    async with told([ExactExecutor("gpu", TIMES)], greedy()) as (router, ended):
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(str(context["exception"])))
        router.listeners.append(fails)
        router.arrival_listeners.append(fails)
        router.batch_listeners.append(fails)
        assert await poisson(router, 50, 0.5) == list(range(50))
    assert len(ended) == 50
    assert reported == ["no room in the log"] * (50 + 50 + router.main.batches)


async def test_a_path_that_hangs_blocks_nobody() -> None:
    hanging = FaultyExecutor(lambda k: 1e7 if k == 5 else None)
    side = ExactExecutor("amx", SIDE_TIMES)
    async with told([hanging, side], both(), timeout_ms=200.0) as (router, ended):
        outcomes = await poisson(router, 600, 0.2)
        wrong = [each for each in outcomes if isinstance(each, Exception)]
        assert len(wrong) == len(hanging.batches[5])
        assert all(isinstance(each, ExecutorTimedOut) for each in wrong)
    assert hanging.recoveries == 1
    assert len(hanging.batches) > 10  # it is used again
    served = [each.ended_ms - each.arrived_ms for each in ended if each.path == "amx"]
    assert max(served) < 250.0
    assert len(served) > 20


async def test_the_breaker_closes_when_the_path_is_back() -> None:
    back_at = 30
    broken = FaultyExecutor(lambda k: ConnectionError("refused") if k < back_at else None)
    broken.fault = lambda k: ConnectionError("refused") if clock_s() < 3.0 else None
    side = ExactExecutor("amx", SIDE_TIMES)
    async with told([broken, side], both()) as (router, ended):
        await poisson(router, 2000, 0.2)  # 10 s
    late = [each for each in ended if each.arrived_ms > 5000.0]
    assert router.failed < 40
    assert all(not each.future.exception() for each in late)
    assert sum(each.path == "gpu" for each in late) > len(late) / 2


async def test_a_flood_is_refused_at_once_and_the_tail_recovers() -> None:
    executor = ExactExecutor("gpu", TIMES)
    normal = 0.4 * 8 / TIMES[-1]
    async with told([executor], greedy(), most_waiting=64) as (router, ended):
        await poisson(router, 500, normal, seed=1)
        flood = await poisson(router, 3000, 10 * 8 / TIMES[-1], seed=2)
        refused = [each for each in flood if isinstance(each, Exception)]
        assert {type(each) for each in refused} == {QueueFull}
        await poisson(router, 500, normal, seed=3)
    assert router.refused > 2000
    response = np.array([each.ended_ms - each.arrived_ms for each in ended])
    assert response.max() <= (64 / 8 + 2) * TIMES[-1]
    before, after = response[:500], response[-500:]
    assert np.quantile(after, 0.99) < 1.3 * np.quantile(before, 0.99)


async def test_who_gives_up_leaves_the_queue() -> None:
    executor = ExactExecutor("gpu", TIMES)
    async with told([executor], greedy()) as (router, _):
        first = asyncio.ensure_future(router.submit("runs"))
        await asyncio.sleep(0.001)
        tasks = [asyncio.ensure_future(router.submit(i)) for i in range(20)]
        await asyncio.sleep(0)
        assert router.waiting == 20
        for task in tasks[::2]:
            task.cancel()
        first.cancel()
        await asyncio.gather(*tasks, first, return_exceptions=True)
        assert router.waiting == 0
    assert router.cancelled == 11
    assert [each for batch in executor.batches[1:] for each in batch] == list(range(1, 20, 2))


async def test_draining_serves_who_waits_and_takes_no_more() -> None:
    executor = ExactExecutor("gpu", TIMES)
    async with told([executor], fixed(4, Limits(8))) as (router, _):
        tasks = [asyncio.ensure_future(router.submit(i)) for i in range(5)]
        await asyncio.sleep(0.1)
        assert router.waiting == 1  # the policy waits for a fourth beside it
        assert await router.drain()
        assert await asyncio.gather(*tasks) == list(range(5))
        with pytest.raises(Closed):
            await router.submit("late")


async def test_draining_that_takes_too_long_tells_everybody() -> None:
    executor = FaultyExecutor(lambda k: 1e9)
    async with told([executor], greedy(), timeout_ms=100000000.0) as (router, _):
        tasks = [asyncio.ensure_future(router.submit(i)) for i in range(12)]
        await asyncio.sleep(0.01)
        assert not await router.drain(within_s=1.0)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in outcomes] == [Closed] * 12
        await router.start()
        executor.fault = lambda k: None
        assert await asyncio.wait_for(router.submit("after"), 1.0) == "after"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Router([], [], greedy()), "0 executors"),
        (lambda: Router([ExactExecutor("gpu", TIMES)], [TIMES[:4]], greedy()), "4 times for batches of up to 8"),
        (lambda: Router([ExactExecutor("gpu", TIMES)], [TIMES], both()), "needs two paths"),
        (lambda: Router([ExactExecutor("gpu", TIMES)] * 2, [TIMES] * 2, both()), "2 executors .gpu, gpu."),
        (lambda: Router([ExactExecutor("gpu", TIMES[:4])], [TIMES], greedy()), "takes 4"),
        (lambda: Router([ExactExecutor("gpu", TIMES)], [0 * TIMES], greedy()), "not above zero"),
        (lambda: Router([ExactExecutor("gpu", TIMES)], [TIMES], greedy(), RouterOptions(0)), "0 may wait"),
    ],
)
def test_what_cannot_work_is_refused(make: Callable[[], Router], says: str) -> None:
    with pytest.raises(WrongUsage, match=says):
        make()


async def test_a_sender_that_left_says_nothing_of_the_path() -> None:
    """Neither does it open the breaker, nor is the batch that tried the path forgotten."""

    def fault(k: int) -> Exception | None:
        return Abandoned("left", remedy="") if k < 5 or k == 8 else ValueError("no") if k < 8 else None

    async with told([FaultyExecutor(fault)], greedy()) as (router, _):
        for _ in range(5):
            with pytest.raises(Abandoned):
                await router.submit(0)
        assert router.up() == {"gpu": True}
        for _ in range(3):
            with pytest.raises(ExecutorFailed):
                await router.submit(0)
        assert router.up() == {"gpu": False}
        with pytest.raises(Abandoned):  # which was to try the path
            await router.submit(0)
        assert await router.submit(1) == 1


async def test_a_batch_that_is_retried_keeps_its_order() -> None:
    executor = FaultyExecutor(lambda k: ExecutorLost("gone", where="gpu", remedy="") if k == 1 else None)
    async with told([executor], greedy()) as (router, _):
        retrying = [asyncio.ensure_future(router.submit(i, retry=lambda _: True)) for i in range(5)]
        assert await asyncio.gather(*retrying) == list(range(5))
    assert executor.batches == [[0], [1, 2, 3, 4], [1, 2, 3, 4]]


async def test_a_retry_that_fails_is_none() -> None:
    def breaks(_: BaseException) -> bool:
        raise ZeroDivisionError

    reported: list[Any] = []
    async with told([FaultyExecutor(lambda k: ValueError("no") if k == 0 else None)], greedy()) as (router, _):
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
        with pytest.raises(ExecutorFailed, match="no"):
            await asyncio.wait_for(router.submit(0, retry=breaks), 1.0)
        assert await asyncio.wait_for(router.submit(1), 1.0) == 1
    assert [type(each) for each in reported] == [ZeroDivisionError]


async def test_draining_ends_though_every_path_is_down() -> None:
    executor = FaultyExecutor(lambda k: ValueError("no"))
    executor.largest = 1
    async with told([executor], gpu_only(Limits(1)), patience_ms=1000.0) as (router, _):
        tasks = [asyncio.ensure_future(router.submit(i)) for i in range(10)]
        await asyncio.sleep(0)
        await asyncio.wait_for(router.drain(), 60.0)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(each) for each in outcomes} == {ExecutorFailed, NoPath}


async def test_a_path_is_tried_again_though_a_recovery_failed_during_the_last_trial() -> None:
    """One of two servers is lost and cannot be started; meanwhile a batch on the other one fails as a trial."""

    class Troubled(ExactExecutor):
        async def execute(self, inputs: list[Any]) -> Sequence[Any]:
            if inputs == ["is lost"]:
                raise ExecutorLost("gone", where="gpu", remedy="")
            await super().execute(inputs)
            if inputs == ["fails"]:
                await asyncio.sleep(0.1)
                raise ValueError("no")
            return inputs

        async def recover(self) -> None:
            await asyncio.sleep(0.6)
            raise OSError("no memory")

    async with told([Troubled("gpu", TIMES, servers=2)], greedy()) as (router, _):
        with pytest.raises(ExecutorLost):
            await router.submit("is lost")
        await asyncio.sleep(0.55)
        with pytest.raises(ExecutorFailed, match="no"):
            await router.submit("fails")
        assert clock_s() > 0.6
        assert await asyncio.wait_for(router.submit("runs"), 4.0) == "runs"


async def test_nothing_is_left_running_where_a_path_does_not_start() -> None:
    class Starting(ExactExecutor):
        started = False

        async def start(self) -> None:
            await asyncio.sleep(1.0)
            self.started = True

        async def close(self) -> None:
            self.started = False

    class Broken(ExactExecutor):
        async def start(self) -> None:
            raise ExecutorFailed("no weights", where="cpu", remedy="")

    other = Starting("gpu", TIMES)
    with pytest.raises(ExecutorFailed, match="no weights"):
        async with told([other, Broken("cpu", SIDE_TIMES)], both()):
            pass
    await asyncio.sleep(2.0)
    assert not other.started


async def test_a_path_is_tried_again_after_a_drain_that_dropped_its_trial() -> None:
    executor = FaultyExecutor(lambda k: ExecutorLost("gone", where="gpu", remedy="") if k == 0 else 5_000.0)
    async with told([executor], greedy()) as (router, _):
        with pytest.raises(ExecutorLost):
            await router.submit(0)
        await asyncio.sleep(2.0)
        trial = asyncio.ensure_future(router.submit(1))
        await asyncio.sleep(0)
        assert not await router.drain(within_s=0.1)
        with pytest.raises(Closed):
            await trial
        assert len(executor.batches) == 2
        executor.fault = lambda k: None
        await router.start()
        assert await asyncio.wait_for(router.submit("after"), 1.0) == "after"


@pytest.mark.parametrize("lost", [ExecutorLost, ExecutorFailed])
@pytest.mark.parametrize("by", ["retry", "listener"])
async def test_a_function_that_drops_everything_leaves_the_router_usable(by: str, lost: type[ExecutorFailed]) -> None:
    executor = FaultyExecutor(lambda k: lost("gone", where="gpu", remedy="") if k == 0 else None)

    def drop(_: Any) -> bool:
        router.drop_all()
        return True

    async with told([executor], greedy()) as (router, _):
        if by == "listener":
            router.listeners.append(lambda request: None if request.input else router.drop_all())
        sent = [router.submit(i, retry=drop if by == "retry" else None) for i in range(12)]
        outcomes = await asyncio.wait_for(asyncio.gather(*sent, return_exceptions=True), 5.0)
        assert {type(each) for each in outcomes} <= {Closed, lost}
        await asyncio.sleep(5.0)  # the breaker closes
        assert await asyncio.wait_for(router.submit("after"), 5.0) == "after"
        assert (router.waiting, router.running) == (0, 0)


@pytest.mark.parametrize("ending", ["served", "router drains", "sender leaves"])
async def test_a_request_that_is_retried_counts_once(ending: str) -> None:
    executor = FaultyExecutor(lambda k: ExecutorLost("gone", where="gpu", remedy="") if k == 0 else None)
    draining: list[asyncio.Future[bool]] = []

    def retry(_: BaseException) -> bool:
        if ending == "sender leaves":
            sent.cancel()
        if ending == "router drains":
            draining.append(asyncio.ensure_future(router.drain()))
        return True

    async with told([executor, ExactExecutor("cpu", SIDE_TIMES)], both()) as (router, ended):
        sent = asyncio.ensure_future(router.submit(0, retry=retry))
        with contextlib.suppress(asyncio.CancelledError):
            assert await sent == 0
        await asyncio.gather(*draining)
    left = ending == "sender leaves"
    assert (router.submitted, router.done, router.failed, router.cancelled) == (1, not left, 0, left)
    assert [each.path for each in ended] == ([] if left else ["cpu"])
