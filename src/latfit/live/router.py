"""The router: requests come in one by one, a policy forms batches of them, and one or two executors run these.

Every decision is that of `latfit.policies.decide`, the compiled function that the simulator asks, of a view that is
filled in the same order: services end first, then requests arrive, then the policy is asked until it waits. A policy
that waits says until when, and at how many waiting it wants to be asked again; in between, a request costs an append.

Where the simulator knows when a server is next free, the router takes the typical time of the batch that runs there;
one that is late is expected to take as long again as it is late. Where a path is not up (`LivePath`), requests go by
the other: the policy's main path, served greedily, or the side path alone. Every request ends once: with its output,
with an error that says why, or cancelled by its sender.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from latfit.errors import LatfitError, WrongUsage
from latfit.live.executor import (
    Abandoned,
    Executor,
    ExecutorFailed,
    ExecutorLost,
    ExecutorTimedOut,
    Probed,
    failure,
    seen,
)
from latfit.live.path import LivePath, times_table
from latfit.live.waiting import Request, State, WaitingRoom
from latfit.policies import (
    AGED,
    ANY,
    DUE,
    MAIN,
    MOST_AGED,
    NOW,
    OLDEST,
    SERVE_MAIN,
    SERVE_SIDE,
    SIDE,
    T_CUT,
    VIEW,
    WAIT,
    WAITING,
    Policy,
    decide,
)
from latfit.stats import FloatArray


class QueueFull(LatfitError):
    """As many wait as may; the sender is told at once."""


class NoPath(LatfitError):
    """No path has served anything for a while, and none may be tried now."""


class Closed(LatfitError):
    """The router takes no more requests."""


@dataclass(frozen=True)
class RouterOptions:
    """most_waiting: requests that may wait, others are refused.  deadlines_ms: of each class, counted from the most
    urgent; one class without a deadline where not given.  timeout_ms: of a batch; None for 20 times its typical time, a
    second at least.  patience_ms: for so long requests wait while every path is down.  example: an input with which
    every bucket is run before the first request; None for no warm-up.  probe_ms: from one probe of an executor to the
    next, where it can be probed."""

    most_waiting: int = 10_000
    deadlines_ms: Sequence[float] = (math.inf,)
    timeout_ms: float | None = None
    patience_ms: float = 5000.0
    example: Any = None
    probe_ms: float = 2000.0


class Router:
    """executors: the main path, and the side path if there is one.  times_ms: typical T(1), T(2), ... of each, up to
    its largest batch.  clock: monotonic seconds.  listeners: called with each request that ended with
    an output or an error.  batch_listeners: called with each batch that ended: its path, how many requests it held,
    when it began and ended (ms on the router's clock), and whether its path ran it to its end.  arrival_listeners:
    called with each request that is taken, in its sender's context.

    Use it as `async with Router(...) as router:`, in which `await router.submit(input)` gives the output.
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
        self.paths = [
            LivePath(each, np.concatenate([[0.0], np.asarray(times, dtype=np.float64)]), options.timeout_ms)
            for each, times in zip(executors, times_ms, strict=True)
        ]
        self.policy, self.options = policy, options
        self._cutoff_ms = float(policy.parameters[T_CUT])
        self.submitted = self.refused = self.done = self.failed = self.cancelled = 0
        self._room = WaitingRoom(options.deadlines_ms, policy.order.ageing_ms)
        self._places = max(path.executor.servers for path in self.paths)
        self._view, self._times = np.full(VIEW + 2 * self._places, math.inf), times_table(self.paths)
        self.listeners: list[Callable[[Request], None]] = []
        self.arrival_listeners: list[Callable[[Request], None]] = []
        self.batch_listeners: list[Callable[[LivePath, int, float, float, bool], None]] = []
        self._clock = clock
        self._last, self._set_back = -math.inf, 0.0
        self._failing_since = math.inf
        self._ask_at = 1
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._running: set[_Batch] = set()
        self._probes: list[asyncio.Task[None]] = []
        self._open = self._draining = False
        self._idle = asyncio.Event()

    @property
    def main(self) -> LivePath:
        return self.paths[MAIN]

    @property
    def side(self) -> LivePath | None:
        return self.paths[SIDE] if len(self.paths) > 1 else None

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return self._room.waiting

    def up(self) -> dict[str, bool]:
        """By path, whether it is given batches now."""
        now = self._now()
        return {path.name: path.up(now) for path in self.paths}

    @property
    def running(self) -> int:
        """Batches that run."""
        return len(self._running)

    async def __aenter__(self) -> "Router":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the executors and run each bucket once with the example. Raises what an executor raises."""
        await asyncio.gather(*(path.executor.start() for path in self.paths))
        if self.options.example is not None:
            await asyncio.gather(*(self._warm_up(path.executor) for path in self.paths))
        decide(self.policy.code, self.policy.parameters, self._times, np.zeros(VIEW))  # compiled before traffic
        if not self._probes:
            probed = [(path, path.executor) for path in self.paths if isinstance(path.executor, Probed)]
            await asyncio.gather(*(self._probe(*each) for each in probed))
            self._probes = [asyncio.create_task(self._keep_probing(*each)) for each in probed]
        self._open = True

    async def submit(
        self,
        input: Any,
        class_id: int = 0,
        *,
        arrived_s: float | None = None,
        is_resent: Callable[[BaseException], bool] | None = None,
        again: bool = False,
    ) -> Any:
        """The output for an input. arrived_s: when it came, on the router's clock, where that was before now.
        is_resent: whether the sender sends it again after an error, which then is no failure of the request; again:
        whether it is sent again, so that it is one request with the first.

        Raises QueueFull, NoPath, Closed, ExecutorFailed (ExecutorTimedOut, ExecutorLost). Cancelled, it leaves the
        queue; a batch that runs already is run to its end.
        """
        if not self._open:
            self.failed += again  # it was counted when it was first sent
            raise Closed("the router takes no requests now", remedy="Start it, or send to another one.")
        if not 0 <= class_id < len(self.options.deadlines_ms):
            known = len(self.options.deadlines_ms)
            raise WrongUsage(f"class {class_id} of {known}", where="class_id", remedy="Classes count from 0.")
        if self.waiting >= self.options.most_waiting:
            self._count_refusal(again)
            raise QueueFull(f"{self.waiting:,} requests wait already", remedy="Send it later, or elsewhere.")
        now = self._now()
        if self._down(now):
            self._count_refusal(again)
            raise _no_path()
        came = now if arrived_s is None else min(arrived_s * 1000 + self._set_back, now)
        request = Request(input, class_id, came, asyncio.get_running_loop().create_future())
        request.is_resent = is_resent
        self.submitted += not again
        _tell(self.arrival_listeners, request)
        self._idle.clear()
        self._room.add(request)
        if self._room.waiting >= self._ask_at:
            self._dispatch(now)
        try:
            return await request.future
        except asyncio.CancelledError:
            self._give_up(request)
            raise

    def _count_refusal(self, again: bool) -> None:
        """Count a request that is not accepted; one that is sent again was accepted before, and fails."""
        self.failed += again
        self.refused += not again

    def adopt(self, times_ms: Sequence[Sequence[float] | FloatArray], policy: Policy) -> None:
        """Decide by these times and this policy from now on; who waits keeps the place. Raises WrongUsage."""
        _check([path.executor for path in self.paths], times_ms, policy, self.options)
        for path, times in zip(self.paths, times_ms, strict=True):
            path.times_ms = np.concatenate([[0.0], np.asarray(times, dtype=np.float64)])
        self.policy, self._times = policy, times_table(self.paths)
        self._cutoff_ms = float(policy.parameters[T_CUT])
        self._room.ageing_ms = policy.order.ageing_ms
        self._dispatch(self._now())

    async def drain(self, within_s: float = math.inf) -> bool:
        """Take no more requests and serve all that wait, without waiting for fuller batches. What has not ended in time
        ends with Closed. Returns whether there was none of that."""
        self._open, self._draining = False, True
        self._dispatch(self._now())
        try:
            async with asyncio.timeout(within_s if math.isfinite(within_s) else None):
                if self.waiting or self._running:
                    await self._idle.wait()
        except TimeoutError:
            self._drop()
            return False
        return True

    async def close(self, within_s: float = 30.0) -> None:
        """Drain, then close the executors."""
        await self.drain(within_s)
        for timer in (self._timer, self._watch):
            if timer:
                timer.cancel()
        self._timer = self._watch = None
        for probe in self._probes:
            probe.cancel()
        self._probes = []
        await asyncio.gather(*(path.executor.close() for path in self.paths))

    def _drop(self) -> None:
        """End all that wait or run."""
        self._drop_waiting(_closed)
        now, running = self._now(), list(self._running)
        self._running.clear()
        for batch in running:
            work, batch.work = batch.work, None
            work.cancel()
            for request in batch.requests:
                self._end(request, _closed(), now)

    def _drop_waiting(self, why: Callable[[], LatfitError]) -> None:
        room, now = self._room, self._now()
        for request in room.take(room.waiting, now):
            self._end(request, why(), now)

    async def _warm_up(self, executor: Executor) -> None:
        """Every bucket on every server; without buckets the powers of two and the largest batch."""
        powers = {2**k for k in range(executor.largest.bit_length())}
        for size in executor.buckets or sorted({executor.largest, *powers}):
            inputs = [self.options.example] * min(size, executor.largest)
            await asyncio.gather(*(executor.execute(inputs) for _ in range(executor.servers)))

    async def _keep_probing(self, path: LivePath, executor: Probed) -> None:
        """Probe until the router is closed, and as soon as a cool-down ends."""
        while True:
            cool_down = path.opens_again_ms() - self._now()
            await asyncio.sleep(min(self.options.probe_ms, cool_down if cool_down > 0 else math.inf) / 1000)
            await self._probe(path, executor)

    async def _probe(self, path: LivePath, executor: Probed) -> None:
        answered = await executor.answers()
        if answered is None:
            return
        path.probed(answered)
        now = self._now()
        if not any(each.up(now) for each in self.paths):
            self._failing_since = min(self._failing_since, now)
        elif path.up(now) and math.isinf(path.opens_again_ms()):  # it has failed no batch since it served one
            self._failing_since = math.inf
        self._dispatch(now)

    def _now(self) -> float:
        """ms; where the clock was set back, time goes on from where it was."""
        told = self._clock() * 1000
        if told + self._set_back < self._last:
            self._set_back = self._last - told
        self._last = max(self._last, told + self._set_back)  # but for rounding the second one
        return self._last

    def _dispatch(self, now: float) -> None:
        """Ask the policy, and do what it says, until it waits."""
        room = self._room
        while room.waiting:
            action, take, until, at = self._decide(now, [path.up(now) for path in self.paths])
            if action == WAIT:
                self._ask_at = at
                self._arm(until, now)
                return
            self._begin(self.paths[MAIN if action == SERVE_MAIN else SIDE], room.take(take, now, at), now)
        self._ask_at = 1
        self._arm(math.inf, now)
        if not self.waiting and not self._running:
            self._idle.set()

    def _decide(self, now: float, usable: Sequence[bool]) -> tuple[int, int, float, int]:
        """What the policy says; where a path is not up or all must go, whatever an idle path can take."""
        if usable[MAIN] and (usable[-1] or not self.policy.needs_side) and not self._draining:
            return self._asked(now)
        waiting = self._room.waiting
        for path, up, action in zip(self.paths, usable, (SERVE_MAIN, SERVE_SIDE), strict=False):
            if up and path.idle:
                return action, min(waiting, path.executor.largest), 0.0, 0
        if self._down(now):
            self._drop_waiting(_no_path)
            return WAIT, 0, math.inf, 1
        moments = [self._failing_since + self.options.patience_ms, *(path.opens_again_ms() for path in self.paths)]
        return WAIT, 0, min((each for each in moments if each > now), default=math.inf), ANY

    def _down(self, now: float) -> bool:
        """Whether no path is up and none has been for too long."""
        late = now >= self._failing_since + self.options.patience_ms
        return late and not any(path.up(now) for path in self.paths)

    def _asked(self, now: float) -> tuple[int, int, float, int]:
        view, room, policy = self._view, self._room, self.policy
        view[NOW], view[WAITING] = now, room.waiting
        view[OLDEST], view[DUE] = oldest, _ = room.oldest_and_due_ms()
        view[AGED] = room.aged(now, self._cutoff_ms, MOST_AGED) if oldest + self._cutoff_ms <= now else 0.0
        place = VIEW
        for path in self.paths:
            path.write_free_ms(view, place, now)
            place += self._places
        found: tuple[int, int, float, int] = decide(policy.code, policy.parameters, self._times, view)
        return found

    def _arm(self, until: float, now: float) -> None:
        """Ask again at a moment; a clock that is not there yet then arms it anew."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if math.isfinite(until):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(until - now, 0.0) / 1000, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._dispatch(self._now())

    def _begin(self, path: LivePath, requests: list[Request], now: float) -> None:
        server = path.occupy(now, len(requests))
        for request in requests:
            request.state, request.started_ms = State.RUNNING, now
            request.path, request.batch = path.name, len(requests)
        batch, loop = _Batch(path, server, requests, now), asyncio.get_running_loop()
        self._running.add(batch)
        try:
            batch.work = asyncio.ensure_future(path.executor.execute([request.input for request in requests]))
        except Exception as raised:  # noqa: BLE001 (whatever an executor raises is the senders' to know)
            batch.work = loop.create_future()
            batch.work.set_exception(raised)
        batch.work.add_done_callback(partial(self._returned, batch))
        batch.late_s = loop.time() + path.timeout_ms(len(requests)) / 1000
        if self._watch is None or batch.late_s < self._watch.when():
            self._watch_until(batch.late_s)

    def _watch_until(self, moment_s: float) -> None:
        """One timer looks after all batches: one each would cost more than it takes to hand a batch over."""
        if self._watch:
            self._watch.cancel()
        self._watch = asyncio.get_running_loop().call_at(moment_s, self._find_late, moment_s)

    def _find_late(self, moment_s: float) -> None:
        self._watch = None
        for batch in [each for each in self._running if each.late_s <= moment_s]:
            self._late(batch)
        soonest = min((each.late_s for each in self._running), default=math.inf)
        if math.isfinite(soonest):
            self._watch_until(soonest)

    def _returned(self, batch: "_Batch", work: "asyncio.Future[Sequence[Any]]") -> None:
        """An executor is done with a batch, or says why it is not; a result that comes too late is dropped."""
        if batch.work is not work:
            seen(work)
            return
        path, outputs, error = batch.path, [], None
        try:
            outputs = list(work.result())
            if len(outputs) != len(batch.requests):
                found = f"{len(outputs)} outputs for {len(batch.requests)} inputs"
                raise ExecutorFailed(found, where=path.name, remedy="Give one output for each input.")
        except BaseException as raised:  # noqa: BLE001 (whatever an executor raises is the senders' to know)
            error = failure(raised, path.name)
        self._finish(batch, outputs, error)

    def _late(self, batch: "_Batch") -> None:
        """Its executor may come back, or recover, before the next batch; its senders are told now."""
        if batch.work.done():  # it came in time
            return
        count, path = len(batch.requests), batch.path
        error = ExecutorTimedOut(
            f"a batch of {count} took longer than {path.timeout_ms(count):,.0f} ms",
            where=path.name,
            remedy="What it was doing is dropped; raise timeout_ms if it may take that long.",
        )
        batch.work.cancel()
        self._finish(batch, (), error)

    def _finish(self, batch: "_Batch", outputs: Sequence[Any], error: ExecutorFailed | None) -> None:
        """Give the requests of a batch their outcome, and its server the next one."""
        path, now = batch.path, self._now()
        path.busy_ms += now - batch.began_ms
        for place, request in enumerate(batch.requests):
            self._end(request, error if error is not None else outputs[place], now)
        at_once = isinstance(error, ExecutorTimedOut | ExecutorLost)
        if error is None:
            path.succeeded()
            self._failing_since = math.inf
        elif isinstance(error, Abandoned):
            path.told_nothing()
        else:
            path.failed(now, at_once=at_once)
            self._failing_since = min(self._failing_since, now)
        _tell(self.batch_listeners, path, len(batch.requests), batch.began_ms, now, error is None)
        if at_once:
            batch.late_s = math.inf  # a recovery may take as long as it takes
            path.lose(batch.server)
            batch.work = asyncio.ensure_future(self._recovered(batch, batch.work))
        else:
            path.release(batch.server, now)
            self._running.discard(batch)
        self._dispatch(now)  # where a server is lost, the other path goes on meanwhile

    async def _recovered(self, batch: "_Batch", given_up: "asyncio.Future[Any]") -> None:
        """Until the executor can run a batch again; where it cannot be started, the breaker asks again later."""
        path = batch.path
        await asyncio.wait([given_up])
        try:
            await path.executor.recover()
        except Exception:  # noqa: BLE001 (an executor that cannot be started is tried again)
            path.rest(self._now())
        now = self._now()
        path.release(batch.server, now)
        self._running.discard(batch)
        self._dispatch(now)

    def _end(self, request: Request, outcome: Any, now: float) -> None:
        """The one end of a request."""
        if request.state is State.ENDED:
            return
        request.state, request.ended_ms = State.ENDED, now
        if isinstance(outcome, BaseException):
            request.is_uncounted = request.is_resent is not None and request.is_resent(outcome)
            self.failed += not request.is_uncounted
            if not request.future.done():
                request.future.set_exception(outcome)
        else:
            self.done += 1
            request.served = True
            if not request.future.done():
                request.future.set_result(outcome)
        _tell(self.listeners, request)

    def _give_up(self, request: Request) -> None:
        """Its sender does not want it any more."""
        if request.state is State.ENDED:
            self.cancelled += request.is_uncounted  # it failed, and its sender left before sending it again
            return
        self.cancelled += 1
        self._room.give_up(request)
        self._dispatch(self._now())  # the policy was asked of a longer queue


class _Batch:
    """A batch that runs. work: the executor's answer to come, or its recovery; None where nobody waits for either.
    late_s: when it has taken too long, on the event loop's clock."""

    __slots__ = ("began_ms", "late_s", "path", "requests", "server", "work")

    def __init__(self, path: LivePath, server: int, requests: list[Request], began_ms: float) -> None:
        self.path, self.server, self.requests, self.began_ms = path, server, requests, began_ms
        self.late_s = math.inf
        self.work: Any = None


def _tell(listeners: Sequence[Callable[..., None]], *told: Any) -> None:
    """What a listener raises is the event loop's to report; no request and no server may be left behind by it."""
    for listener in listeners:
        try:
            listener(*told)
        except Exception as error:  # noqa: BLE001 (a listener is anybody's code)
            context = {"message": "a listener of the router failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)


def _no_path() -> NoPath:
    return NoPath("every path is down", remedy="Send it to another router, or later; the paths are tried again.")


def _closed() -> Closed:
    return Closed("the router was closed before the request was served", remedy="Send it to another one.")


def _check(executors: Sequence[Executor], times_ms: Sequence[Any], policy: Policy, options: RouterOptions) -> None:
    if not 1 <= len(executors) <= 2 or len(times_ms) != len(executors):
        raise WrongUsage(
            f"{len(executors)} executors with {len(times_ms)} tables of times",
            where="executors",
            remedy="Give one or two executors, the main path first, and T(1), T(2), ... of each.",
        )
    if len({each.name for each in executors}) < len(executors):
        raise WrongUsage(
            f"two executors called {executors[0].name}", where="executors", remedy="Give each a name of its own."
        )
    if policy.needs_side and len(executors) < 2:
        raise WrongUsage(
            f"policy {policy.name} needs two paths", where="policy", remedy="Give a second executor, or take another."
        )
    for executor, times, largest in zip(executors, times_ms, (policy.main_largest, policy.side_largest), strict=False):
        known = np.asarray(times, dtype=np.float64)
        if len(known) < executor.largest or not np.all(np.isfinite(known) & (known > 0)):
            raise WrongUsage(
                f"{len(known)} times for batches of up to {executor.largest}, or one is not above zero",
                where=executor.name,
                remedy="Give T(b) in ms for b = 1 up to the largest batch.",
            )
        if largest > executor.largest:
            raise WrongUsage(
                f"policy {policy.name} makes batches of {largest}, {executor.name} takes {executor.largest}",
                where="policy",
                remedy="Make the policy for the executor's largest batch.",
            )
    if options.most_waiting < 1 or not options.deadlines_ms:
        raise WrongUsage(
            f"{options.most_waiting} may wait, in {len(options.deadlines_ms)} classes",
            where="options",
            remedy="Give at least one of each.",
        )
