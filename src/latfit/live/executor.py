"""Executors run a batch for the router: in threads, on the event loop, or in worker processes.

Inputs are padded to the next of `buckets` with copies of the last one, since engines that compile a shape or capture a
graph are slow on others.
"""

import asyncio
import multiprocessing
import os
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from latfit.errors import LatfitError, first_line, refuse

Run = Callable[[list[Any]], Sequence[Any]]
"""Return one output for each input of a batch; an output that is an exception fails its own request only."""

Batches = queue.SimpleQueue[tuple[list[Any], "asyncio.Future[Sequence[Any]]"] | None]
"""Inputs and where the outputs go; None ends a thread."""


class ExecutorFailed(LatfitError):
    """A batch could not be run."""


class ExecutorTimedOut(ExecutorFailed):
    """A batch took longer than its limit; its result is dropped."""


class ExecutorLost(ExecutorFailed):
    """The process or server that ran a batch died."""


class Abandoned(ExecutorFailed):
    """A batch ended for a reason that is not the path's, such as its sender leaving."""


def padded(inputs: list[Any], buckets: Sequence[int]) -> list[Any]:
    size = next((bucket for bucket in buckets if bucket >= len(inputs)), len(inputs))
    return inputs + inputs[-1:] * (size - len(inputs))


class Executor:
    """Base of executors.

    servers: batches at a time.  buckets: ascending sizes that batches are padded to; empty for none.
    """

    is_probed = False  # `answers` shows whether it is alive without running a batch

    def __init__(self, name: str, largest: int, servers: int = 1, buckets: Sequence[int] = ()) -> None:
        none = largest < 1 or servers < 1
        refuse(none, f"batches of {largest} on {servers} servers", name, "Give at least one of each.")
        wrong = buckets and (list(buckets) != sorted(set(buckets)) or buckets[0] < 1 or buckets[-1] < largest)
        remedy = "Give ascending sizes, the last at least the largest batch."
        refuse(bool(wrong), f"buckets {list(buckets)} for batches of up to {largest}", name, remedy)
        self.name, self.largest, self.servers, self.buckets = name, largest, servers, tuple(buckets)

    async def start(self) -> None: ...

    def execute(self, inputs: list[Any]) -> Awaitable[Sequence[Any]]:
        """Raises what the function raises, or ExecutorLost."""
        raise NotImplementedError

    async def recover(self) -> None:
        """Return when the next batch can run, after one that timed out or was lost."""

    async def answers(self) -> bool:
        """Return whether it could run a batch; takes bounded time, raises nothing."""
        return True

    async def close(self) -> None: ...


class ThreadExecutor(Executor):
    """Run a function that releases the interpreter's lock (NumPy, OpenVINO, torch) in threads, one a server.

    A thread cannot be stopped: after a batch that hangs, its server is back when the function returns. If that may be
    never, use a ProcessExecutor.
    """

    def __init__(self, name: str, run: Run, largest: int, *, servers: int = 1, buckets: Sequence[int] = ()) -> None:
        super().__init__(name, largest, servers, buckets)
        self._runs = [run] * servers
        self._serving: list[asyncio.Future[Sequence[Any]] | None] = [None] * servers  # the last batch of each server
        self._work: Batches = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._returns: dict[asyncio.Future[Sequence[Any]], asyncio.Future[None]] = {}  # of the batches that run

    async def start(self) -> None:
        for server in range(len(self._threads), self.servers):
            arguments = (server, self._work)
            thread = threading.Thread(target=self._serve, args=arguments, name=f"latfit-{self.name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def execute(self, inputs: list[Any]) -> "asyncio.Future[Sequence[Any]]":
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Sequence[Any]] = loop.create_future()
        self._returns[answer] = loop.create_future()
        self._work.put((inputs, answer))
        return answer

    async def recover(self) -> None:
        hanging = [returned for answer, returned in self._returns.items() if answer.cancelled()]
        if hanging:
            await asyncio.wait(hanging)

    async def close(self) -> None:
        for _ in self._threads:
            self._work.put(None)
        self._threads.clear()
        self._work, self._returns = queue.SimpleQueue(), {}  # threads that hang keep the old ones

    def _serve(self, server: int, batches: Batches) -> None:
        while (work := batches.get()) is not None:
            inputs, answer = work
            self._serving[server] = answer
            outputs: list[Any] = []
            error = None
            try:
                if not answer.cancelled():  # cancelled while it waited for a server
                    outputs = list(self._runs[server](padded(inputs, self.buckets)))[: len(inputs)]
            except BaseException as raised:  # noqa: BLE001 (sent on to the request, whatever a function raises)
                error = failure(raised, self.name)
            with suppress(RuntimeError):  # the loop is closed
                answer.get_loop().call_soon_threadsafe(self._settle, answer, outputs, error)

    def _settle(
        self, answer: "asyncio.Future[Sequence[Any]]", outputs: Sequence[Any], error: ExecutorFailed | None
    ) -> None:
        if (returned := self._returns.pop(answer, None)) is not None:
            returned.set_result(None)
        if not answer.done():
            answer.set_exception(error) if error is not None else answer.set_result(outputs)


class AsyncExecutor(Executor):
    """Run a coroutine function on the event loop. Its own computing blocks every other request."""

    def __init__(
        self,
        name: str,
        run: Callable[[list[Any]], Awaitable[Sequence[Any]]],
        largest: int,
        *,
        servers: int = 1,
        buckets: Sequence[int] = (),
    ) -> None:
        super().__init__(name, largest, servers, buckets)
        self._run = run

    async def execute(self, inputs: list[Any]) -> Sequence[Any]:
        try:
            return list(await self._run(padded(inputs, self.buckets)))[: len(inputs)]
        except Exception as raised:
            raise failure(raised, self.name) from raised


def failure(raised: BaseException, name: str) -> ExecutorFailed:
    if isinstance(raised, ExecutorFailed):
        return raised
    remedy = "The batch was given up; send the request again if it may be served twice."
    error = ExecutorFailed(f"{type(raised).__name__}: {first_line(raised)}", where=name, remedy=remedy)
    error.__cause__ = raised
    return error


class ProcessExecutor(ThreadExecutor):
    """Run a function in worker processes, one a server; a process that hangs or dies is replaced.

    make: returns the function, in the process; picklable, as are inputs and outputs.  cores: of each server.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Run],
        largest: int,
        *,
        servers: int = 1,
        buckets: Sequence[int] = (),
        cores: Sequence[Sequence[int]] = (),
    ) -> None:
        super().__init__(name, list, largest, servers=servers, buckets=buckets)
        pinned = [*cores[:servers], *[()] * (servers - len(cores))]
        self._workers = [_Worker(name, make, tuple(each)) for each in pinned]
        self._runs = [worker.run for worker in self._workers]

    async def start(self) -> None:
        await self.recover()
        await super().start()

    async def recover(self) -> None:
        hangs = [answer in self._returns and answer is not None and answer.cancelled() for answer in self._serving]
        pairs = zip(self._workers, hangs, strict=True)
        await asyncio.gather(*(asyncio.to_thread(worker.renew, hang) for worker, hang in pairs))

    async def close(self) -> None:
        await super().close()
        await asyncio.gather(*(asyncio.to_thread(worker.stop) for worker in self._workers))

    @property
    def pids(self) -> list[int]:
        return [int(worker.process.pid) for worker in self._workers if worker.is_alive]


class _Worker:
    def __init__(self, name: str, make: Callable[[], Run], cores: Sequence[int]) -> None:
        self._name, self._given = name, (make, cores)
        self.process: Any = None
        self._pipe: Any = None
        self._changing = threading.RLock()  # held while the process is started or stopped

    @property
    def is_alive(self) -> bool:
        return self.process is not None and bool(self.process.is_alive())

    def run(self, inputs: list[Any]) -> Sequence[Any]:
        """Run a batch in the process, in a new one if it died while idle."""
        self.renew()
        try:
            self._pipe.send(inputs)
            kind, found = self._pipe.recv()
        except (EOFError, OSError) as error:
            remedy = "It restarts by itself; send the request again."
            raise ExecutorLost("its process died", where=self._name, remedy=remedy) from error
        if kind == "error":
            raise ExecutorFailed(found, where=self._name, remedy="See the log of the process.")
        outputs: Sequence[Any] = found
        return outputs

    def renew(self, hangs: bool = False) -> None:
        """Start a process unless one works. Raises ExecutorFailed."""
        with self._changing:  # a second caller waits for the same process
            if self.is_alive and not hangs:
                return
            self.stop()
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            arguments = (theirs, *self._given)
            self.process = context.Process(target=_serve, args=arguments, name=f"latfit-{self._name}", daemon=True)
            self.process.start()
            theirs.close()
            try:
                kind, found = self._pipe.recv()
            except EOFError:
                kind, found = "error", "its process ended before it was ready"
            if kind != "ready":
                self.stop()
                raise ExecutorFailed(found, where=self._name, remedy="Fix `make`, which returns the function.")

    def stop(self) -> None:
        with self._changing:
            if self.process is not None:
                self.process.kill()
                self.process.join()
                self._pipe.close()
                self.process = None


def _serve(pipe: Connection, make: Callable[[], Run], cores: Sequence[int]) -> None:
    """Run batches until the router is gone; the main function of a process."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    try:
        run = make()
    except Exception as error:  # noqa: BLE001 (sent to the router)
        pipe.send(("error", f"{type(error).__name__}: {first_line(error)}"))
        return
    pipe.send(("ready", None))
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            inputs = pipe.recv()
            try:
                pipe.send(("done", list(run(inputs))))
            except Exception as error:  # noqa: BLE001 (sent to the router, also if the outputs cannot be pickled)
                pipe.send(("error", f"{type(error).__name__}: {first_line(error)}"))
