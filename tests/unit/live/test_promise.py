"""The promise monitor in planted worlds: its evidence is a fair game, its false alarms as rare as stated at every time,
and it sees a breach about as soon as any test of that rate could."""

import asyncio
import math

import numpy as np
import pytest

from latfit.errors import WrongUsage
from latfit.live import Promise, PromiseMonitor, Request
from latfit.stats import FloatArray

SHARE = 0.99


def alarmed_at(late: FloatArray, promise: Promise) -> int | None:
    """After how many requests the alarm came first."""
    monitor = PromiseMonitor(promise)
    for i, each in enumerate((late < 0.5).tolist()):
        if monitor.add(each):
            return i + 1
    return None


@pytest.mark.parametrize(("block", "requests", "seeds"), [(1000, 50_000, 30), (1, 2000, 40)])
def test_false_alarms_at_exactly_the_promised_rate(block: int, requests: int, seeds: int) -> None:
    """At any time; the count of such seeds is binomial, with a chance of the stated rate at the most."""
    stated = 0.1
    false = 0
    for seed in range(seeds):
        late = np.random.default_rng(seed).random(requests) >= SHARE
        false += alarmed_at(late.astype(np.float64), Promise(1.0, SHARE, stated, block)) is not None
    assert false <= stated * seeds + 3 * math.sqrt(seeds * stated * (1 - stated))


def test_an_alarm_ends_once_the_promise_is_kept_again_and_the_next_needs_more() -> None:
    monitor = PromiseMonitor(Promise(1.0, 0.9, 0.05, 10))
    assert monitor.needed == pytest.approx(2 / 0.05)
    while not monitor.add(False):
        pass
    states = [monitor.alarm]
    assert monitor.evidence >= monitor.needed  # of the period in which the alarm came
    broken = monitor.broken
    turns = [i for i in range(1000) if monitor.add(True)]
    assert turns == [199]  # 20 blocks of 10
    assert [*states, monitor.alarm] == [True, False]
    assert (monitor.kept, monitor.broken, monitor.alarms) == (1000, broken, 1)
    assert monitor.needed == pytest.approx(6 / 0.05)
    while not monitor.add(False):
        pass
    assert monitor.alarms == 2


def test_late_requests_and_errors_break_a_promise() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        promise = Promise([10.0, 20.0])
        for class_id, took, served, kept in ((0, 10, True, True), (0, 11, True, False), (1, 11, True, True),
                                             (2, 20, True, True), (1, 1, False, False)):  # fmt: skip
            request = Request(None, class_id, 5.0, loop.create_future())
            request.ended_ms, request.served = 5.0 + took, served
            assert promise.kept(request) is kept

    asyncio.run(story())


@pytest.mark.parametrize("wrong", [{"within_ms": 0.0}, {"within_ms": []}, {"share": 1.0}, {"block": 0}])
def test_promises_that_cannot_be_watched_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(WrongUsage):
        Promise(**{"within_ms": 50.0, **wrong})  # type: ignore[arg-type]
