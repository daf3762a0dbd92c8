"""`python -m benchmarks.simulated_intervals`: whether the intervals of a simulation hold what they should.

Queues whose law is known, at loads of .5 to .97 of their capacity, simulated from many seeds as `latfit simulate` does
without --requests. Of the mean and of p99: the mean error, the share of 95 % intervals that hold the truth (aim 93 to
97 %), and how many lie above and below it; the share of seeds that confirm an SLA 5 % below the true p99 (aim 2.5 % at
the most), and how many confirm one 25 % above it.

M/M/1 is a closed form. M/D/1 is Erlang's: with services of 1 and arrivals at rho, P(W <= t) = (1 - rho) sum over k = 0
to floor(t) of exp(-u) u^k/k! at u = rho (k - t), whose terms alternate and grow, so that it is summed in decimals of
hundreds of digits. The batch queue (greedy, T(b) = 8 + 0.05 b ms, up to 64) is a long run
of `latfit.queueing.simulate_batches`, a loop of its own.
"""

import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal, getcontext

import numpy as np

from latfit.policies import policy as policies
from latfit.policies.policy import Limits, Policy
from latfit.queueing import Effort, ServiceTimes, simulate_batches
from latfit.simulation.policies.run import Options, simulate
from latfit.simulation.policies.service import System, linear_path, table_path
from latfit.workload import OpenLoad, Poisson

LOADS = {0.5: 2000, 0.9: 1000, 0.95: 500, 0.97: 400}
"""Seeds by load."""

SMOKE = {0.5: 8, 0.9: 8}
BELOW, ABOVE = 0.95, 1.25
"""SLA over the true p99: one to be denied, one to be confirmed."""

TAU, ALPHA, LARGEST = 8.0, 0.05, 64
DIGITS = 400


@dataclass(frozen=True)
class Queue:
    """A queue with its law: mean and p99 in ms; rate per ms."""

    name: str
    policy: Policy
    system: System
    rate: float
    mean: float
    p99: float


def queues(load: float) -> list[Queue]:
    one = policies.gpu_only(Limits(1))
    markov, constant = table_path("cpu", [1.0], exponential=True), table_path("cpu", [1.0])
    gpu, capacity = linear_path("gpu", TAU, ALPHA, LARGEST), LARGEST / (TAU + ALPHA * LARGEST)
    law = simulate_batches(
        load * capacity,
        ServiceTimes(TAU + ALPHA * np.arange(1.0, LARGEST + 1)),
        effort=Effort(20, 2_000_000, 2_000_000),
    )
    return [
        Queue("M/M/1", one, System(markov), load, 1 / (1 - load), math.log(100) / (1 - load)),
        Queue("M/D/1", one, System(constant), load, 1 + load / (2 * (1 - load)), 1 + waiting(load, 0.99)),
        Queue(
            "batches",
            policies.gpu_only(Limits(LARGEST)),
            System(gpu),
            load * capacity,
            law.mean_ms,
            law.percentile(0.99),
        ),
    ]


def waiting(load: float, share: float) -> float:
    """The wait in M/D/1, in services, that a share of the requests does not exceed."""
    low, high = 0.0, 20 / (1 - load)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if waits_at_most(load, middle) < share else (low, middle)
    return high


def waits_at_most(load: float, t: float) -> float:
    """P(W <= t) in M/D/1, t in services."""
    getcontext().prec = DIGITS
    rho, total = Decimal(load), Decimal(0)
    for k in range(math.floor(t) + 1):
        u = rho * (k - Decimal(t))
        total += (-u).exp() * u**k / math.factorial(k)
    return float((1 - rho) * total)


@dataclass(frozen=True)
class Seen:
    """What one seed gave of a statistic: its value over the truth, where its interval lies (-1 below the truth, 0
    around it, 1 above), whether it is called trusted."""

    ratio: float
    side: int
    trusted: bool


def seed_of(queue: Queue, seed: int) -> tuple[dict[str, Seen], tuple[bool, bool], int]:
    """(what it gave of the mean and p99, whether it confirms the SLA below and the one above, requests)."""
    result = simulate(queue.policy, queue.system, OpenLoad(Poisson(queue.rate)), Options(seed=seed))
    seen = {}
    for name, truth in (("mean", queue.mean), ("p99", queue.p99)):
        each = result.latency[name]
        side = 1 if truth < each.low else -1 if truth > each.high else 0
        seen[name] = Seen(each.value / truth, side, result.trusted[name])
    p99 = result.latency["p99"]
    sure = result.trusted["p99"] and result.stable
    return seen, (sure and p99.high <= BELOW * queue.p99, sure and p99.high <= ABOVE * queue.p99), result.requests


def told(queue: Queue, load: float, seeds: int, workers: int) -> str:
    start = time.process_time()
    with ThreadPoolExecutor(workers) as pool:
        # Other seeds at every load: the same random numbers would make the same luck at all of them.
        first = round(1e6 * load)
        found = list(pool.map(lambda seed: seed_of(queue, seed), range(first, first + seeds)))
    spent = (time.process_time() - start) / seeds
    parts = []
    for name in ("mean", "p99"):
        seen = [each[0][name] for each in found]
        inside = sum(each.side == 0 for each in seen) / seeds
        low, high = (sum(each.side == side for each in seen) / seeds for side in (-1, 1))
        error = sum(each.ratio for each in seen) / seeds - 1
        untrusted = sum(not each.trusted for each in seen)
        parts.append(
            f"{name} {error:+.2%}, held {inside:.1%} (below {low:.1%}, above {high:.1%})"
            + (f", {untrusted} not trusted" if untrusted else "")
        )
    false, true = (sum(each[1][i] for each in found) / seeds for i in range(2))
    requests = sum(each[2] for each in found) / seeds
    return (
        f"{queue.name:8s} load {load:4g}, {seeds} seeds: {'; '.join(parts)}; SLA of {BELOW:g} p99 confirmed"
        f" {false:.1%}, of {ABOVE:g} p99 {true:.1%}; {requests / 1e6:.2f} million requests, {spent:.2f} s"
    )


def main(smoke: bool = False) -> None:
    workers = os.cpu_count() or 1
    print("intervals of simulations at 95 %")
    for load, seeds in (SMOKE if smoke else LOADS).items():
        for queue in queues(load):
            print(told(queue, load, seeds, workers), flush=True)


if __name__ == "__main__":
    main("--smoke" in sys.argv[1:])
