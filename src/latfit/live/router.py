"""The router: a policy forms batches of requests, one or two executors run them.

Every decision is that of `latfit.policies.decide`, the compiled function that the simulator calls. A policy that waits
gives the moment, and the number of waiting requests, that end the wait. If a path is down (`LivePath`), the other one
serves.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from latfit.errors import LatfitError, WrongUsage, refuse
from latfit.live.executor import Abandoned, Executor, ExecutorFailed, ExecutorLost, ExecutorTimedOut, failure
from latfit.live.path import LivePath, Server, times_table
from latfit.live.waiting import Request, RequestQueue, State
from latfit.policies import Policy, codes, decide
from latfit.stats import FloatArray


class QueueFull(LatfitError):
    """As many requests wait as may."""


class NoPath(LatfitError):
    """Every path has been down for longer than `patience_ms`."""


class Closed(LatfitError):
    """The router takes no more requests."""


@dataclass(frozen=True)
class RouterOptions:
    most_waiting: int = 10_000  # requests; more are refused
    deadlines_ms: Sequence[float] = (math.inf,)  # of each class, the most urgent first
    timeout_ms: float | None = None  # for a batch; by default 20 T(b), at least 1 s
    patience_ms: float = 5000.0  # how long requests wait while every path is down
    example: Any = None  # input with which every bucket is run before the first request; None for no warm-up
    probe_ms: float = 2000.0  # between probes of an executor that can be probed


@dataclass(slots=True, eq=False)
class _Batch:
    """A running batch. work: its outcome, or its executor's recovery.  limit: calls at its time limit."""

    path: LivePath
    server: Server
    requests: list[Request]
    began_ms: float
    work: Any = None
    limit: asyncio.TimerHandle | None = None


class Router:
    """Route requests to one or two executors by a policy: `async with Router(...)`, then `await router.submit(input)`.

    Parameters
    ----------
    executors
        The main path, and the side path if there is one.
    times_ms
        Typical T(1), T(2), ... of each path up to its largest batch, ms.
    clock
        Monotonic seconds.

    Raises
    ------
    WrongUsage
        If executors, times, policy and options do not fit each other.
    """

    def __init__(
        self,
        executors: Sequence[Executor],
        times_ms: Sequence[Sequence[float] | FloatArray],
        policy: Policy,
        options: RouterOptions = RouterOptions(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check(executors, times_ms, policy, options)
        self.options = options
        self.paths = [LivePath(each, np.empty(0), options.timeout_ms) for each in executors]
        # Requests so far; submitted = done + failed + cancelled + waiting + running.
        self.submitted = self.refused = self.done = self.failed = self.cancelled = 0
        self.listeners: list[Callable[[Request], None]] = []  # of requests that ended with an output or an error
        self.arrival_listeners: list[Callable[[Request], None]] = []  # of requests taken, in their senders' contexts
        # Of batches that ended: path, size, begin and end (ms, router's clock), whether it ran to its end.
        self.batch_listeners: list[Callable[[LivePath, int, float, float, bool], None]] = []
        self._queue = RequestQueue(options.deadlines_ms, policy.ageing_ms)
        self._places = max(executor.servers for executor in executors)
        self._view = np.full(codes.VIEW + 2 * self._places, math.inf)
        self._use(times_ms, policy)
        self._clock = clock
        self._is_open = self._is_draining = False
        self._ask_at = 1  # number of waiting requests from which the policy is asked
        self._wake: asyncio.TimerHandle | None = None  # asks the policy again
        self._running: set[_Batch] = set()
        self._idle = asyncio.Event()
        self._failing_since = math.inf
        self._probes: list[asyncio.Task[None]] = []

    def _now_ms(self) -> float:
        return self._clock() * 1000

    @property
    def main(self) -> LivePath:
        return self.paths[codes.MAIN]

    @property
    def waiting(self) -> int:
        return self._queue.waiting

    @property
    def running(self) -> int:
        return len(self._running)

    def up(self) -> dict[str, bool]:
        """Return whether batches may go to each path, by name."""
        now = self._now_ms()
        return {path.name: path.up(now) for path in self.paths}

    async def __aenter__(self) -> "Router":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the executors and run each bucket once with the example. Raises what an executor raises."""
        try:
            started = await asyncio.gather(*(path.executor.start() for path in self.paths), return_exceptions=True)
            for error in filter(None, started):
                raise error
            if self.options.example is not None:
                await _gather(self._warm_up(path.executor) for path in self.paths)
            decide(self.policy.code, self.policy.parameters, self._times, np.zeros(codes.VIEW))  # compiles
            if not self._probes:
                probed = [path for path in self.paths if path.executor.is_probed]
                await asyncio.gather(*map(self._probe, probed))
                self._probes = [asyncio.create_task(self._keep_probing(path)) for path in probed]
        except BaseException:
            await self.close()
            raise
        self._is_open, self._is_draining = True, False

    async def submit(
        self,
        input: Any,
        class_id: int = 0,
        *,
        arrived_s: float | None = None,
        retry: Callable[[BaseException], bool] | None = None,
    ) -> Any:
        """Return the output for an input of a class, 0 the most urgent. arrived_s: on the router's clock.

        If cancelled, the request leaves the queue; a running batch goes on. If `retry` returns True for the error of
        its batch, the request goes back to the head of its class. Raises QueueFull, NoPath, Closed or ExecutorFailed.
        """
        if not self._is_open:
            raise Closed("the router takes no requests now", remedy="Start it, or send to another one.")
        classes = len(self.options.deadlines_ms)
        if not 0 <= class_id < classes:
            raise WrongUsage(f"class {class_id} of {classes}", where="class_id", remedy="Classes count from 0.")
        if self.waiting >= self.options.most_waiting:
            self.refused += 1
            raise QueueFull(f"{self.waiting:,} requests wait already", remedy="Send it later, or elsewhere.")
        now = self._now_ms()
        if self._is_down(now):
            self.refused += 1
            raise _no_path()
        came = now if arrived_s is None else min(arrived_s * 1000, now)
        request = Request(input, class_id, came, asyncio.get_running_loop().create_future(), retry)
        self.submitted += 1
        _call(self.arrival_listeners, request)
        self._idle.clear()
        self._queue.add(request)
        if self.waiting >= self._ask_at:
            self._dispatch(now)
        try:
            return await request.future
        except asyncio.CancelledError:
            if request.state is not State.ENDED:
                self.cancelled += 1
                self._queue.give_up(request)
                self._dispatch()  # the policy was asked of a longer queue
            raise

    def adopt(self, times_ms: Sequence[Sequence[float] | FloatArray], policy: Policy) -> None:
        """Use these times and this policy from now on. Raises WrongUsage."""
        _check([path.executor for path in self.paths], times_ms, policy, self.options)
        self._use(times_ms, policy)
        self._dispatch()

    def _use(self, times_ms: Sequence[Sequence[float] | FloatArray], policy: Policy) -> None:
        for path, times in zip(self.paths, times_ms, strict=True):
            path.times_ms = np.concatenate([[0.0], np.asarray(times, dtype=np.float64)])
        self.policy, self._times = policy, times_table(self.paths)
        self._cutoff_ms = float(policy.parameters[codes.T_CUT])
        self._queue.ageing_ms = policy.ageing_ms

    async def drain(self, within_s: float = math.inf) -> bool:
        """Take no more requests; return whether those that wait were all served in time, else end them."""
        self._is_open, self._is_draining = False, True
        self._dispatch()
        try:
            async with asyncio.timeout(within_s if math.isfinite(within_s) else None):
                if self.waiting or self._running:
                    await self._idle.wait()
        except TimeoutError:
            self.drop_all()
            return False
        return True

    async def close(self, within_s: float = 30.0) -> None:
        await self.drain(within_s)
        self._wake_in(math.inf)
        for probe in self._probes:
            probe.cancel()
        self._probes = []
        await asyncio.gather(*(path.executor.close() for path in self.paths))

    def drop_all(self) -> None:
        """End every request that waits or runs; whatever still computes has lost its server."""
        self._drop_waiting(_closed())
        running, self._running = self._running, set()
        for batch in running:
            work, batch.work = batch.work, None
            work.cancel()
            _cancel(batch.limit)
            for request in batch.requests:
                self._end(request, _closed(), self._now_ms())
        for path in self.paths:
            path.free_servers()
        self._dispatch()

    def _drop_waiting(self, error: LatfitError) -> None:
        now = self._now_ms()
        for request in self._queue.take(self.waiting, now):
            self._end(request, error, now)

    async def _warm_up(self, executor: Executor) -> None:
        powers = {2**k for k in range(executor.largest.bit_length())}
        for size in executor.buckets or sorted({executor.largest, *powers}):
            inputs = [self.options.example] * min(size, executor.largest)
            await _gather(executor.execute(inputs) for _ in range(executor.servers))

    async def _keep_probing(self, path: LivePath) -> None:
        while True:
            cool_down = path.open_until_ms - self._now_ms()
            await asyncio.sleep(min(self.options.probe_ms, cool_down if cool_down > 0 else math.inf) / 1000)
            await self._probe(path)

    async def _probe(self, path: LivePath) -> None:
        path.record_probe(await path.executor.answers())
        now = self._now_ms()
        if not any(each.up(now) for each in self.paths):
            self._failing_since = min(self._failing_since, now)
        elif path.up(now) and math.isinf(path.open_until_ms):  # no batch failed since the last success
            self._failing_since = math.inf
        self._dispatch(now)

    def _dispatch(self, now: float | None = None) -> None:
        """Ask the policy and carry out its decisions until it waits."""
        now = self._now_ms() if now is None else now
        while self.waiting:
            action, take, until, skip = self._decide(now)
            if action == codes.WAIT:
                break
            path = self.paths[codes.MAIN if action == codes.SERVE_MAIN else codes.SIDE]
            self._begin(path, self._queue.take(take, now, skip), now)
        else:
            until, skip = math.inf, 1
        self._ask_at = skip
        self._wake_in(until - now)
        if not (self.waiting or self._running):
            self._idle.set()

    def _wake_in(self, wait_ms: float) -> None:
        """Ask the policy again after so long, in place of any earlier moment."""
        _cancel(self._wake)
        self._wake = None
        if wait_ms < math.inf:
            self._wake = asyncio.get_running_loop().call_later(max(wait_ms, 0.0) / 1000, self._dispatch)

    def _decide(self, now: float) -> tuple[int, int, float, int]:
        """Return action, batch size, moment to ask again, and requests to skip (if waiting: the number to ask at).

        If a path is down or the router drains, an idle path takes what it can.
        """
        is_up = [path.up(now) for path in self.paths]
        if is_up[codes.MAIN] and (is_up[-1] or not self.policy.needs_side) and not self._is_draining:
            return self._ask_policy(now)
        for path, usable, action in zip(self.paths, is_up, (codes.SERVE_MAIN, codes.SERVE_SIDE), strict=False):
            if usable and path.idle:
                return action, min(self.waiting, path.executor.largest), 0.0, 0
        if self._is_down(now):
            self._drop_waiting(_no_path())
            return codes.WAIT, 0, math.inf, 1
        moments = [self._failing_since + self.options.patience_ms, *(path.open_until_ms for path in self.paths)]
        return codes.WAIT, 0, min((each for each in moments if each > now), default=math.inf), codes.ANY

    def _is_down(self, now: float) -> bool:
        late = now >= self._failing_since + self.options.patience_ms
        return late and not any(path.up(now) for path in self.paths)

    def _ask_policy(self, now: float) -> tuple[int, int, float, int]:
        view, queue, policy = self._view, self._queue, self.policy
        view[codes.NOW], view[codes.WAITING] = now, queue.waiting
        view[codes.OLDEST], view[codes.DUE] = oldest, _ = queue.oldest_and_due_ms()
        is_aged = oldest + self._cutoff_ms <= now
        view[codes.AGED] = queue.count_aged(now, self._cutoff_ms, codes.MOST_AGED) if is_aged else 0.0
        for number, path in enumerate(self.paths):
            path.write_free_ms(view, codes.VIEW + number * self._places, now)
        found: tuple[int, int, float, int] = decide(policy.code, policy.parameters, self._times, view)
        return found

    def _begin(self, path: LivePath, requests: list[Request], now: float) -> None:
        for request in requests:
            request.state, request.started_ms = State.RUNNING, now
            request.path, request.batch = path.name, len(requests)
        batch, loop = _Batch(path, path.occupy(now, len(requests)), requests, now), asyncio.get_running_loop()
        self._running.add(batch)
        try:
            batch.work = asyncio.ensure_future(path.executor.execute([request.input for request in requests]))
        except Exception as raised:  # noqa: BLE001 (sent on to the requests, whatever an executor raises)
            batch.work = loop.create_future()
            batch.work.set_exception(raised)
        batch.work.add_done_callback(partial(self._returned, batch))
        if (timeout_ms := path.timeout_ms(len(requests))) < math.inf:
            batch.limit = loop.call_later(timeout_ms / 1000, self._end_late, batch, timeout_ms)

    def _end_late(self, batch: _Batch, timeout_ms: float) -> None:
        if not batch.work.done():
            batch.work.cancel()
            found = f"a batch of {len(batch.requests)} took longer than {timeout_ms:,.0f} ms"
            remedy = "Its result is dropped; raise timeout_ms if a batch may take that long."
            self._finish(batch, (), ExecutorTimedOut(found, where=batch.path.name, remedy=remedy))

    def _returned(self, batch: _Batch, work: "asyncio.Future[Sequence[Any]]") -> None:
        """Take the outcome of a batch; one that comes too late is dropped."""
        if batch.work is not work:
            _ = work.cancelled() or work.exception()  # retrieved, so that asyncio does not report it
            return
        path, outputs, error = batch.path, [], None
        try:
            outputs = list(work.result())
            if len(outputs) != len(batch.requests):
                found = f"{len(outputs)} outputs for {len(batch.requests)} inputs"
                raise ExecutorFailed(found, where=path.name, remedy="Give one output for each input.")
        except BaseException as raised:  # noqa: BLE001 (sent on to the requests, whatever an executor raises)
            error = failure(raised, path.name)
        self._finish(batch, outputs, error)

    def _finish(self, batch: _Batch, outputs: Sequence[Any], error: ExecutorFailed | None) -> None:
        """End the requests of a batch, record its outcome, and free or recover its server."""
        path, now = batch.path, self._now_ms()
        _cancel(batch.limit)
        path.busy_ms += now - batch.began_ms
        again = [] if error is None else [each for each in batch.requests if _is_retried(each, error)]
        if batch not in self._running:  # `retry` dropped all
            return
        for request in reversed(again):
            self._queue.put_back(request)
        for place, request in enumerate(batch.requests):
            if request not in again:
                self._end(request, error if error is not None else outputs[place], now)
        is_lost = isinstance(error, ExecutorTimedOut | ExecutorLost)
        if error is None:
            path.record_success()
            self._failing_since = math.inf
        elif isinstance(error, Abandoned):
            path.record_abandoned()
        else:
            path.record_failure(now, is_lost=is_lost)
            self._failing_since = min(self._failing_since, now)
        _call(self.batch_listeners, path, len(batch.requests), batch.began_ms, now, error is None)
        if is_lost and batch in self._running:  # not dropped by a listener
            batch.server.free_ms = math.inf  # until its executor has recovered
            batch.work = asyncio.ensure_future(self._recover(batch, batch.work))
            self._dispatch(now)  # the other path serves meanwhile
        else:
            self._release(batch, now)

    async def _recover(self, batch: _Batch, given_up: "asyncio.Future[Any]") -> None:
        """Wait until the executor can run a batch again; if it cannot be started, the breaker tries it later."""
        await asyncio.wait([given_up])
        try:
            await batch.path.executor.recover()
        except Exception:  # noqa: BLE001 (an executor that cannot be started is tried again)
            batch.path.rest(self._now_ms())
        self._release(batch, self._now_ms())

    def _release(self, batch: _Batch, now: float) -> None:
        batch.path.release(batch.server, now)
        self._running.discard(batch)
        self._dispatch(now)

    def _end(self, request: Request, outcome: Any, now: float) -> None:
        if request.state is State.ENDED:
            return
        is_error = isinstance(outcome, BaseException)
        request.state, request.ended_ms, request.served = State.ENDED, now, not is_error
        self.failed += is_error
        self.done += not is_error
        if not request.future.done():
            request.future.set_exception(outcome) if is_error else request.future.set_result(outcome)
        _call(self.listeners, request)


async def _gather(work: Iterable[Awaitable[Any]]) -> None:
    """Wait for all; if one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _call(functions: Sequence[Callable[..., Any]], *arguments: Any) -> list[Any]:
    """Call functions that are anybody's code; return what those that do not fail return."""
    found = []
    for function in functions:
        try:
            found.append(function(*arguments))
        except Exception as error:  # noqa: BLE001
            context = {"message": "a function that the router calls failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)
    return found


def _is_retried(request: Request, error: ExecutorFailed) -> bool:
    return request.state is not State.ENDED and request.retry is not None and any(_call([request.retry], error))


def _no_path() -> NoPath:
    return NoPath("every path is down", remedy="Send it again later; the paths are tried again.")


def _closed() -> Closed:
    return Closed("the router was closed before the request was served", remedy="Send it to another one.")


def _check(executors: Sequence[Executor], times_ms: Sequence[Any], policy: Policy, options: RouterOptions) -> None:
    names = [each.name for each in executors]
    wrong = not 1 <= len(executors) <= 2 or len(times_ms) != len(executors) or len(set(names)) < len(names)
    found = f"{len(executors)} executors ({', '.join(names)}) with {len(times_ms)} tables of times"
    remedy = "Give one or two executors of different names, the main path first, and T(1), T(2), ... of each."
    refuse(wrong, found, "executors", remedy)
    lacks, remedy = policy.needs_side and len(executors) < 2, "Give a second executor, or take another."
    refuse(lacks, f"policy {policy.name} needs two paths", "policy", remedy)
    for executor, times, largest in zip(executors, times_ms, (policy.main_largest, policy.side_largest), strict=False):
        table = np.asarray(times, dtype=np.float64)
        wrong = len(table) < executor.largest or not np.all(np.isfinite(table) & (table > 0))
        found = f"{len(table)} times for batches of up to {executor.largest}, or one is not above zero"
        refuse(wrong, found, executor.name, "Give T(b) in ms for b = 1 up to the largest batch.")
        found = f"policy {policy.name} makes batches of {largest}, {executor.name} takes {executor.largest}"
        refuse(largest > executor.largest, found, "policy", "Make the policy for the executor's largest batch.")
    found = f"{options.most_waiting} may wait, in {len(options.deadlines_ms)} classes"
    none = options.most_waiting < 1 or not options.deadlines_ms
    refuse(none, found, "options", "Give at least one of each.")
