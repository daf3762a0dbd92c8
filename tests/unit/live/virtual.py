"""An event loop whose time passes only while nothing else can happen, and executors that take exactly their time."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from latfit.live import Executor
from latfit.stats import FloatArray

Result = TypeVar("Result")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Where the loop would sleep, its clock jumps to the next moment instead. now_s: the clock, seconds."""

    def __init__(self) -> None:
        loop = self

        class Selector(selectors.SelectSelector):
            def select(self, timeout: float | None = None) -> Any:
                found = super().select(0)
                if not found and timeout:
                    loop.now_s += timeout
                return found

        self.now_s = 0.0
        super().__init__(Selector())
        self._clock_resolution = 1e-12

    def time(self) -> float:
        return self.now_s

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Result], *args: Any
    ) -> asyncio.Future[Result]:
        """At once: no virtual time passes while it runs."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 (whoever awaits it is told)
            done.set_exception(error)
        return done


def on_virtual_time(coroutine: Coroutine[Any, Any, Result]) -> Result:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


def clock_s() -> float:
    return asyncio.get_running_loop().time()


class ExactExecutor(Executor):
    """Takes T(b) ms for a batch of b and gives its inputs back. batches: what it ran."""

    def __init__(self, name: str, times_ms: Sequence[float] | FloatArray, servers: int = 1) -> None:
        super().__init__(name, len(times_ms), servers)
        self.times_ms = times_ms
        self.batches: list[list[Any]] = []

    async def execute(self, inputs: list[Any]) -> Sequence[Any]:
        self.batches.append(inputs)
        await asyncio.sleep(float(self.times_ms[len(inputs) - 1]) / 1000)
        return inputs
