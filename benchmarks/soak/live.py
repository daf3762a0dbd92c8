"""A live router under faults of every kind: each request ends once, its own output or an error, and nothing grows.

`python -m benchmarks.soak.live --n 1000000 [--seed 0]`. On virtual time, so that hours of faults pass in minutes: two
paths, a policy drawn for each stretch of requests, and batches that succeed, fail, hang, slow tenfold, die or come back
after their time; senders that give up; floods of ten times the rate; a clock that jumps. Prints the count of each
outcome, and ends with an error where a request was lost, served twice or given another one's output, where memory
grew, where a learner took the faults for a change of speed, or where the tail of the quiet time after the faults is not
that of the quiet time before them.
"""

import argparse
import asyncio
import random
import resource
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from tests.unit.live.virtual import ExactExecutor, clock_s, on_virtual_time

from latfit.errors import LatfitError
from latfit.live import ExecutorLost, Learner, Promise, Router, RouterOptions
from latfit.policies import POLICIES, Settings, named_policy
from latfit.queueing import ServiceTimes, optimal_rule
from latfit.simulation import System, linear_path, path_times

MAIN, SIDE = linear_path("gpu", 6.0, 0.25, 32), linear_path("amx", 0.9, 1.7, 8)
LOAD = 0.5
STRETCH = 20_000
"""Requests under one policy."""

FAULTY = (0.3, 0.7)
"""The part of a stretch in which faults come."""

GROWTH_MIB = 200.0
LOOSER = 1.3


class FaultyExecutor(ExactExecutor):
    """Its batches go wrong with a probability. served: how often each input was handed back."""

    def __init__(self, name: str, times_ms: Any, dice: random.Random, served: Counter[int]) -> None:
        super().__init__(name, times_ms)
        self.dice, self.served, self.faults, self.wrong = dice, served, Counter[str](), 0.0

    async def execute(self, inputs: list[Any]) -> Sequence[Any]:
        lasts = float(self.times_ms[len(inputs) - 1]) / 1000
        kind = self.dice.choice(("fails", "hangs", "slow", "dies", "late", "half")) if self.hit() else "well"
        self.faults[kind] += 1
        if kind == "dies":
            raise ExecutorLost("its process died", where=self.name, remedy="Send it again.")
        if kind == "fails":
            raise ValueError("as the dice would have it")
        await asyncio.sleep({"hangs": 1e5, "slow": 10 * lasts, "late": 1.2}.get(kind, lasts))
        self.served.update(inputs)
        return [ValueError("half") if kind == "half" and k % 2 else each for k, each in enumerate(inputs)]

    def hit(self) -> bool:
        return self.dice.random() < self.wrong

    async def recover(self) -> None:
        await asyncio.sleep(0.5)


async def stretch(number: int, count: int, dice: random.Random) -> tuple[Counter[str], list[str]]:
    """So many requests under one policy, with faults in the middle: outcomes, and what is wrong."""
    name = list(POLICIES)[number % len(POLICIES)]
    system = System(MAIN, SIDE)
    rate = LOAD * MAIN.rate_limit(MAIN.largest)
    solve = lambda asked, T: optimal_rule(asked, ServiceTimes(T)).table  # noqa: E731
    rule = named_policy(name, rate, path_times(system), Settings(longest_ms=20.0), solve)
    served: Counter[int] = Counter()
    executors = [FaultyExecutor(path.name, path.typical_ms[1:], dice, served) for path in system.paths]
    offset = 0.0
    options = RouterOptions(most_waiting=500, timeout_ms=1000.0, patience_ms=2000.0)
    router = Router(
        executors, [path.typical_ms[1:] for path in system.paths], rule, options, lambda: clock_s() + offset
    )
    learner = Learner(router, Promise(500.0))
    responses: list[tuple[int, float]] = []
    router.listeners.append(lambda each: responses.append((each.input, each.ended_ms - each.arrived_ms)))
    outcomes, wrong = Counter[str](), []

    async def send(i: int) -> None:
        try:
            if await router.submit(i) != i:
                wrong.append(f"request {i} was given another one's output")
            outcomes["served"] += 1
        except ValueError:
            outcomes["its own error"] += 1
        except LatfitError as error:
            outcomes[type(error).__name__] += 1
        except asyncio.CancelledError:
            outcomes["given up"] += 1

    async with router:
        sent = []
        for i in range(count):
            trouble = FAULTY[0] <= i / count < FAULTY[1]
            for executor in executors:
                executor.wrong = 0.03 if trouble else 0.0
            flood = trouble and (i // 500) % 7 == 0
            await asyncio.sleep(dice.expovariate(rate * (10 if flood else 1)) / 1000)
            if trouble and dice.random() < 1e-4:
                offset += dice.choice((-0.05, 3.0))  # s; back by a stale reading at most, 50 ms
            task = asyncio.ensure_future(send(i))
            sent.append(task)
            if trouble and dice.random() < 0.02:
                asyncio.get_running_loop().call_later(dice.random() / 20, task.cancel)
        await asyncio.sleep(0)
        await router.drain()  # a fixed batch may never be full
        await asyncio.gather(*sent, return_exceptions=True)
    for executor in executors:
        outcomes.update({f"batch {kind}": n for kind, n in executor.faults.items()})
    ended = sum(n for kind, n in outcomes.items() if not kind.startswith("batch"))
    unstarted = sum(task.cancelled() for task in sent)  # given up before they were submitted
    outcomes["given up"] += unstarted
    if learner.switched:
        wrong.append(f"{name}: faults were taken for a change of speed: {list(learner.switches)}")
    if ended + unstarted != count:
        wrong.append(f"{count} requests sent, {ended + unstarted} ended")
    if max(served.values(), default=0) > 1:
        wrong.append(f"{sum(n > 1 for n in served.values())} requests served twice")
    if router.waiting or router.running:
        wrong.append(f"{router.waiting} wait and {router.running} run after the end")
    before = [took for i, took in responses if i < FAULTY[0] * count]
    after = [took for i, took in responses if i > (FAULTY[1] + 0.15) * count]
    quiet, later = np.quantile(before, 0.99), np.quantile(after, 0.99)
    if later > LOOSER * quiet:
        wrong.append(f"{name}: p99 {later:.1f} ms after the faults, {quiet:.1f} ms before them")
    return outcomes, wrong


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.soak.live")
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    dice, outcomes, wrong = random.Random(asked.seed), Counter[str](), []
    first_mib = 0.0
    for number in range(max(1, asked.n // STRETCH)):
        found, problems = on_virtual_time(stretch(number, min(asked.n, STRETCH), dice))
        outcomes.update(found)
        wrong += [f"stretch {number}: {each}" for each in problems]
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        first_mib = first_mib or used
    for kind, count in sorted(outcomes.items()):
        print(f"  {kind}: {count:,}")
    print(f"live: {max(1, asked.n // STRETCH) * min(asked.n, STRETCH):,} requests, memory {first_mib:.0f} MiB after the"
          f" first stretch, {used:.0f} at the end")  # fmt: skip
    if used > first_mib + GROWTH_MIB:
        wrong.append("memory grew")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
