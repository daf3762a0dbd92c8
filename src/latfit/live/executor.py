"""What runs a batch for the router: a function in threads, or in processes of its own.

An `ExecutionPath` of a hardware profile estimates how long a batch takes; an executor takes that long. The event loop
never runs one: a thread or a process does, and large inputs are handed over as they are (threads) or written to the
process by a thread (processes), never on the loop.

Inputs are padded to the next of `buckets` with copies of the last one, since engines that compile a shape or capture a
graph are slow on others; what comes back for the copies is dropped.
"""

import asyncio
import multiprocessing
import os
import pickle
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol, runtime_checkable

from latfit.errors import LatfitError, WrongUsage, first_line

Run = Callable[[list[Any]], Sequence[Any]]
"""Outputs of a batch of inputs, one each; an output that is an exception fails its own request only."""


class Executor(Protocol):
    """name: what metrics call it.  largest: requests in a batch.  servers: batches at a time.  buckets: sizes that
    batches are padded to, rising, empty for none."""

    @property
    def name(self) -> str: ...

    @property
    def largest(self) -> int: ...

    @property
    def servers(self) -> int: ...

    @property
    def buckets(self) -> Sequence[int]: ...

    async def start(self) -> None:
        """Be ready for the first batch."""
        ...

    def execute(self, inputs: list[Any]) -> Awaitable[Sequence[Any]]:
        """Run one batch. Raises what the function raised; ExecutorLost where the worker died under it. A coroutine,
        or a future where a task would only wait for it."""
        ...

    async def recover(self) -> None:
        """After a batch that took too long, or a worker that died: come back when the next one can be run."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Probed(Protocol):
    """An executor that can be asked whether it is alive without running a batch."""

    async def answers(self) -> bool | None:
        """Whether it could run a batch; None where that cannot be found out. Bounded in time; raises nothing."""
        ...


class ExecutorFailed(LatfitError):
    """A batch could not be run; where: the path."""


class ExecutorTimedOut(ExecutorFailed):
    """A batch took longer than its path may; its result, should it come, is dropped."""


class ExecutorLost(ExecutorFailed):
    """The process that ran a batch died."""


class Abandoned(ExecutorFailed):
    """A batch ended for a reason that says nothing about the path, such as its sender leaving."""


def padded_size(count: int, buckets: Sequence[int]) -> int:
    """The next bucket, or the count where there is none."""
    return next((bucket for bucket in buckets if bucket >= count), count)


def padded(inputs: list[Any], buckets: Sequence[int]) -> list[Any]:
    """The inputs and copies of the last one, up to the next bucket."""
    size = padded_size(len(inputs), buckets)
    return inputs + inputs[-1:] * (size - len(inputs))


def check_sizes(name: str, largest: int, servers: int, buckets: Sequence[int]) -> None:
    if largest < 1 or servers < 1:
        raise WrongUsage(f"batches of {largest} on {servers} servers", where=name, remedy="Give at least one of each.")
    if buckets and (list(buckets) != sorted(set(buckets)) or buckets[0] < 1 or buckets[-1] < largest):
        raise WrongUsage(
            f"buckets {list(buckets)} for batches of up to {largest}",
            where=name,
            remedy="Give rising sizes, the last of which holds the largest batch.",
        )


class ThreadExecutor:
    """A function in threads of this process, one a server: for code that lets go of the interpreter's lock while it
    computes, as NumPy, OpenVINO and torch do.

    A thread cannot be stopped: after a batch that hangs, its server is back when the function returns. Where that may
    be never, take a ProcessExecutor.
    """

    def __init__(self, name: str, run: Run, largest: int, *, servers: int = 1, buckets: Sequence[int] = ()) -> None:
        check_sizes(name, largest, servers, buckets)
        self.name, self.largest, self.servers, self.buckets = name, largest, servers, tuple(buckets)
        self._run = run
        self._work: queue.SimpleQueue[_Answer | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._out: set[_Answer] = set()

    async def start(self) -> None:
        while len(self._threads) < self.servers:
            thread = threading.Thread(target=self._serve, name=f"latfit-{self.name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def execute(self, inputs: list[Any]) -> "asyncio.Future[Sequence[Any]]":
        answer = _Answer(inputs)
        self._out.add(answer)
        self._work.put(answer)
        return answer

    async def recover(self) -> None:
        hanging = [answer for answer in self._out if answer.cancelled() and answer.returned is None]
        if hanging:
            await asyncio.wait([answer.return_of_thread() for answer in hanging])

    async def close(self) -> None:
        for _ in self._threads:
            self._work.put(None)
        self._threads.clear()

    def _serve(self) -> None:
        while (answer := self._work.get()) is not None:
            outputs: list[Any] = []
            error = None
            try:
                outputs = list(self._run(padded(answer.inputs, self.buckets)))[: len(answer.inputs)]
            except BaseException as raised:  # noqa: BLE001 (what a user's function raises is the sender's to know)
                error = failure(raised, self.name)
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                answer.get_loop().call_soon_threadsafe(self._settle, answer, outputs, error)

    def _settle(self, answer: "_Answer", outputs: Sequence[Any], error: ExecutorFailed | None) -> None:
        self._out.discard(answer)
        if answer.returned is not None:
            answer.returned.set_result(None)
        elif not answer.done():
            answer.set_exception(error) if error is not None else answer.set_result(outputs)


class AsyncExecutor:
    """A coroutine function on the event loop, without a thread: for engines with an asyncio interface, and for
    functions that take less than the way to a thread and back, some 0.1 ms. What it computes holds up everybody else.

    run: takes a batch of inputs, gives an output, or an exception, for each.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[list[Any]], Awaitable[Sequence[Any]]],
        largest: int,
        *,
        servers: int = 1,
        buckets: Sequence[int] = (),
    ) -> None:
        check_sizes(name, largest, servers, buckets)
        self.name, self.largest, self.servers, self.buckets = name, largest, servers, tuple(buckets)
        self._run = run

    async def start(self) -> None: ...

    async def execute(self, inputs: list[Any]) -> Sequence[Any]:
        try:
            return list(await self._run(padded(inputs, self.buckets)))[: len(inputs)]
        except Exception as raised:
            raise failure(raised, self.name) from raised

    async def recover(self) -> None: ...

    async def close(self) -> None: ...


class _Answer(asyncio.Future[Sequence[Any]]):
    """What comes of a batch in a thread. returned: done when the thread is back, where somebody waits for that."""

    def __init__(self, inputs: list[Any]) -> None:
        super().__init__()
        self.inputs = inputs
        self.returned: asyncio.Future[None] | None = None

    def return_of_thread(self) -> "asyncio.Future[None]":
        self.returned = self.get_loop().create_future()
        return self.returned


def failure(raised: BaseException, name: str) -> ExecutorFailed:
    """What a sender is told of an error in a batch; the error itself is its cause."""
    if isinstance(raised, ExecutorFailed):
        return raised
    error = ExecutorFailed(
        f"{type(raised).__name__}: {first_line(raised)}",
        where=name,
        remedy="The batch was given up; send the request again if it may be served twice.",
    )
    error.__cause__ = raised
    return error


def seen(done: "asyncio.Future[Any]") -> None:
    """A result that nobody waits for is no error that nobody looked at."""
    if not done.cancelled():
        done.exception()


class ProcessExecutor:
    """A function in processes of its own, one a server, which are killed and made anew where a batch hangs or one dies.

    make: called in the process, returns the function; picklable, as are inputs and outputs.  cores: for each server,
    those that it may run on.
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
        check_sizes(name, largest, servers, buckets)
        self.name, self.largest, self.servers, self.buckets = name, largest, servers, tuple(buckets)
        self._make = make
        self._cores = [tuple(each) for each in cores]
        self._workers: list[_Worker] = []

    async def start(self) -> None:
        for server in range(len(self._workers), self.servers):
            cores = self._cores[server] if server < len(self._cores) else ()
            self._workers.append(_Worker(self.name, self._make, self.buckets, cores))
        await self.recover()

    async def execute(self, inputs: list[Any]) -> Sequence[Any]:
        worker = self._idle()
        if worker is None:  # one died while it had nothing to do
            await self.recover()
            worker = self._idle()
        if worker is None:
            raise ExecutorLost("no process is there to run it", where=self.name, remedy="Start the executor first.")
        outputs = await worker.run(inputs)
        return list(outputs)[: len(inputs)]

    async def recover(self) -> None:
        await asyncio.gather(*(worker.start() for worker in self._workers))

    async def close(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(worker.close) for worker in self._workers))
        self._workers.clear()

    def _idle(self) -> "_Worker | None":
        return next((each for each in self._workers if each.idle), None)

    @property
    def pids(self) -> list[int]:
        """Of the processes."""
        return [worker.pid for worker in self._workers if worker.alive]


class _Worker:
    """One process, its pipe, and a thread that writes and reads the pipe."""

    def __init__(self, name: str, make: Callable[[], Run], buckets: Sequence[int], cores: Sequence[int]) -> None:
        self._name, self._make, self._buckets, self._cores = name, make, tuple(buckets), tuple(cores)
        self._process: Any = None
        self._pipe: Connection | None = None
        self.busy = self.ready = False
        self._renewing = threading.Lock()
        self._thread = ThreadPoolExecutor(1, f"latfit-{name}")

    @property
    def alive(self) -> bool:
        return self._process is not None and bool(self._process.is_alive())

    @property
    def idle(self) -> bool:
        return self.ready and self.alive and not self.busy

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    async def start(self) -> None:
        """A process that has made its function, a new one where there is none. Raises ExecutorFailed with what it
        says."""
        await asyncio.to_thread(self._renew)

    async def run(self, inputs: list[Any]) -> Sequence[Any]:
        self.busy = True
        exchanged = asyncio.get_running_loop().run_in_executor(self._thread, self._exchange, inputs)
        try:
            outcome = await asyncio.shield(exchanged)
        except asyncio.CancelledError:
            self.ready = False
            exchanged.add_done_callback(seen)
            raise
        finally:
            self.busy = False
        kind, found = outcome
        if kind == "error":
            raise ExecutorFailed(found, where=self._name, remedy="See the log of the process.")
        return list(found)

    def _exchange(self, inputs: list[Any]) -> tuple[str, Any]:
        assert self._pipe is not None
        try:
            self._pipe.send(inputs)
            outcome: tuple[str, Any] = self._pipe.recv()
        except (EOFError, OSError) as error:
            self.ready = False
            raise ExecutorLost(
                "its process died", where=self._name, remedy="It is started again; send the request again."
            ) from error
        return outcome

    def _renew(self) -> None:
        with self._renewing:  # whoever asks while one is made waits for that
            if not (self.ready and self.alive):
                self._make_process()

    def _make_process(self) -> None:
        self.stop()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        given = (theirs, self._make, self._buckets, self._cores)
        self._process = context.Process(target=_serve, args=given, name=f"latfit-{self._name}", daemon=True)
        self._process.start()
        theirs.close()
        try:
            kind, found = self._pipe.recv()
        except EOFError:
            kind, found = "error", "its process ended before it was ready"
        if kind != "ready":
            raise ExecutorFailed(found, where=self._name, remedy="Mend what makes the function.")
        self.ready = True

    def close(self) -> None:
        self.stop()
        self._thread.shutdown(wait=False)

    def stop(self) -> None:
        self.ready = False
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None


def _serve(pipe: Connection, make: Callable[[], Run], buckets: Sequence[int], cores: Sequence[int]) -> None:
    """The life of a process: make the function, then batch after batch until the router is gone."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    try:
        run = make()
    except Exception as error:  # noqa: BLE001 (told to who waits for the process)
        pipe.send(("error", f"{type(error).__name__}: {first_line(error)}"))
        return
    pipe.send(("ready", None))
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            inputs = pipe.recv()
            try:
                outcome: tuple[str, Any] = ("done", list(run(padded(inputs, buckets)))[: len(inputs)])
            except Exception as error:  # noqa: BLE001 (told to who sent the batch)
                outcome = ("error", f"{type(error).__name__}: {first_line(error)}")
            try:
                pipe.send(outcome)
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                pipe.send(("error", f"its outputs cannot be sent: {first_line(error)}"))
