"""`python -m benchmarks.plan_edges [--smoke] [SEEDS]`: plans of serving engines at the edge of what they can do, held
against an event simulation of its own that shares no code with latfit.

Engines prefill in chunks beside decoding, plan a step when the one before has ended, and take turns. Their requests
come at random, with lengths of a heavy tail, of one class or of two of which the urgent one goes first. The limit of
p99 TTFT is what the event simulation finds at 0.97 of what so many engines carry, times a margin. A plan of every seed
then says how many engines keep it, up to which load those that it found do, and from which on they miss it. The event
simulation says, over a few hundred thousand requests, whether that is so. A miss is counted where the tail lies beyond
the limit on the wrong side by more than its own doubt, three standard errors of eight stretches. More than the engines
serve is missed, whatever the tail of a finite run.
"""

import math
import sys
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from latfit.planning.serving.evaluate import Evaluator, requests_for
from latfit.planning.serving.search import Search, SearchSpace
from latfit.planning.serving.targets import RequestTarget, Targets
from latfit.simulation import EngineSettings, Order, linear_costs
from latfit.workload import OpenLoad, Poisson, RequestClass, Resampled

TAU_0, TAU_B, TAU_S = 9.0, 0.1, 0.02
SEQUENCES, BUDGET = 32, 1024
STRETCHES, WARM = 8, 0.1
URGENT = 0.3
"""Share of the requests of the urgent class, where there are two."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@numba.njit(cache=True)
def event_simulation(arrival, prompt, output, urgent, first):  # type: ignore[no-untyped-def]
    """One engine: when the first token of each request (n,) comes. Urgent requests wait before others."""
    n = len(arrival)
    waiting = (np.empty(n, np.int64), np.empty(n, np.int64))
    heads, tails = [0, 0], [0, 0]
    who, left, more = np.zeros(64, np.int64), np.zeros(64, np.int64), np.zeros(64, np.int64)
    running, come, now = 0, 0, 0.0
    while True:
        while come < n and arrival[come] <= now:
            kind = 0 if urgent[come] else 1
            waiting[kind][tails[kind]] = come
            tails[kind] += 1
            come += 1
        budget, tokens, batch = BUDGET, 0, 0
        chunk = np.zeros(64, np.int64)
        for i in range(running):
            chunk[i] = min(left[i] if left[i] > 0 else 1, budget)
            budget -= chunk[i]
        while running < SEQUENCES and budget > 0 and (heads[0] < tails[0] or heads[1] < tails[1]):
            kind = 0 if heads[0] < tails[0] else 1
            r = waiting[kind][heads[kind]]
            heads[kind] += 1
            who[running], left[running], more[running] = r, prompt[r], output[r]
            chunk[running] = min(prompt[r], budget)
            budget -= chunk[running]
            running += 1
        for i in range(running):
            tokens += chunk[i]
            batch += chunk[i] > 0
        if batch == 0:
            if come == n:
                return
            now = arrival[come]
            continue
        now += TAU_0 + TAU_B * batch + TAU_S * tokens
        kept = 0
        for i in range(running):
            ends = False
            if chunk[i] > 0:
                if left[i] > 0:
                    left[i] -= chunk[i]
                if left[i] == 0:
                    if more[i] == output[who[i]]:
                        first[who[i]] = now
                    more[i] -= 1
                    ends = more[i] == 0
            if not ends:
                who[kept], left[kept], more[kept] = who[i], left[i], more[i]
                kept += 1
        running = kept


@dataclass(frozen=True)
class Traffic:
    """Lengths (k,) that requests are drawn from, and whether there are two classes."""

    prompt: Ints
    output: Ints
    classes: bool

    def tail_ms(self, rate: float, engines: int, percentile: float, count: int, seed: int) -> tuple[float, float]:
        """p99 TTFT of the requests that the limit is for, and its standard error; infinite where they pile up."""
        rng = np.random.default_rng([seed, 77])
        arrival = np.cumsum(rng.standard_exponential(count)) / rate
        drawn = rng.integers(0, len(self.prompt), count)
        urgent = rng.random(count) < URGENT if self.classes else np.zeros(count, dtype=bool)
        first = np.zeros(count)
        for k in range(engines):
            rows = np.arange(k, count, engines)
            own = np.zeros(len(rows))
            event_simulation(arrival[rows], self.prompt[drawn[rows]], self.output[drawn[rows]], urgent[rows], own)
            first[rows] = own
        ttft = (first - arrival)[int(WARM * count) :]
        counted = ttft[urgent[int(WARM * count) :]] if self.classes else ttft
        parts = [float(np.quantile(part, percentile / 100)) for part in np.array_split(counted, STRETCHES)]
        return float(np.quantile(counted, percentile / 100)), float(np.std(parts, ddof=1)) / math.sqrt(STRETCHES)

    def most_per_ms(self) -> float:
        """Requests that one engine serves that always has enough to do."""
        rng = np.random.default_rng(5)
        count = 400_000
        drawn = rng.integers(0, len(self.prompt), count)
        first = np.zeros(count)
        nobody = np.zeros(count, dtype=bool)
        event_simulation(np.zeros(count), self.prompt[drawn], self.output[drawn], nobody, first)
        return 0.8 * count / (float(first[int(0.9 * count)]) - float(first[int(0.1 * count)]))


def heavy(classes: bool) -> Traffic:
    """Lognormal lengths of cv 1.5 and 1.2."""
    rng = np.random.default_rng(3)
    prompt = np.clip(rng.lognormal(math.log(300) - 0.59, 1.08, 20_000), 1, 8_000).astype(np.int64)
    output = np.clip(rng.lognormal(math.log(60) - 0.45, 0.94, 20_000), 1, 1_500).astype(np.int64)
    return Traffic(prompt, output, classes)


def planned(traffic: Traffic, rate: float, limit_ms: float, seed: int) -> tuple[int, float, float]:
    """Replicas, and the loads that they keep the limit up to and miss it from, as ratios."""
    everything = frozenset(
        {"max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "batching", "order"}
    )
    order = "priority" if traffic.classes else "fcfs"
    settings = EngineSettings(
        max_num_seqs=SEQUENCES, max_num_batched_tokens=BUDGET, kv_blocks=1_000_000, asynchronous=False,
        padded_graphs=False, order=Order(order),
    )  # fmt: skip
    classes = (RequestClass(URGENT, name="urgent"), RequestClass(1 - URGENT, name="rest"))
    load = OpenLoad(
        Poisson(rate), Resampled(traffic.prompt, traffic.output), classes if traffic.classes else (RequestClass(),)
    )
    group = (0, "urgent") if traffic.classes else (None, "")
    targets = Targets((RequestTarget("ttft", limit_ms, 99.0, *group),))
    evaluator = Evaluator(load, linear_costs(TAU_0, TAU_B, TAU_S), targets, seed=seed)
    evaluator.alone_ms = evaluator.alone(settings).summary.latency["mean"].value
    evaluator.requests = requests_for(load, evaluator.alone_ms)
    found = Search(evaluator, settings, SearchSpace(everything)).run()
    assert found.best is not None
    return found.best.setup.replicas, *found.carries


def main(smoke: bool = False, plans: int = 5) -> None:
    """Print every plan beside the truth, and how many claims missed it."""
    seeds = range(1 if smoke else plans)
    count = 40_000 if smoke else 600_000
    claims: dict[str, int] = {}
    misses: dict[str, int] = {}
    for classes in (False, True):
        traffic = heavy(classes)
        for engines in (1, 4):
            most = traffic.most_per_ms()
            rate = 0.97 * engines * most
            edge, doubt = traffic.tail_ms(rate, engines, 99.0, count, 1)
            kind = "two classes" if classes else "one class"
            print(
                f"{kind}, {engines} engines at 0.97, {1e3 * rate:.1f}/s: p99 TTFT {edge:.0f} ± {doubt:.0f} ms",
                flush=True,
            )
            limit = 1.15 * edge
            for seed in seeds:
                replicas, low, high = planned(traffic, rate, limit, seed)
                said = {
                    "keeps": (replicas, 1.0, True), "one less misses": (replicas - 1, 1.0, False),
                    "holds up to": (replicas, low, True), "missed from": (replicas, high, False),
                }  # fmt: skip
                told = []
                for name, (number, scale, keeps) in said.items():
                    if number < 1:
                        continue
                    tail, error = traffic.tail_ms(scale * rate, number, 99.0, count, 2 + seed)
                    carried = scale * rate < number * most
                    wrong = (
                        (tail - 3 * error > limit or not carried) if keeps else (tail + 3 * error < limit and carried)
                    )
                    claims[name], misses[name] = claims.get(name, 0) + 1, misses.get(name, 0) + wrong
                    told.append(f"{name} {scale:.3f}: {tail:.0f} ± {error:.0f}{' MISSED' if wrong else ''}")
                print(f"  seed {seed}, limit {limit:.0f}: {replicas} replicas; {'; '.join(told)}", flush=True)
    for name, several in claims.items():
        print(f"{name}: {misses[name]} of {several} claims missed")


if __name__ == "__main__":
    numbers = [int(each) for each in sys.argv[1:] if each.isdigit()]
    main("--smoke" in sys.argv[1:], *numbers[:1])
