"""`python -m benchmarks.plan_search [--smoke]`: how long the search for replicas and settings takes, on 20,000 recorded
requests with two targets, beside one simulation of the same requests, which is what each candidate costs at least.

The requests are drawn: lognormal lengths with means of 1,150 and 210 tokens, in bursts, as production logs have them.
"""

import os
import sys
import time

import numpy as np

from latfit.planning.serving.evaluate import Evaluator, Setup
from latfit.planning.serving.plan import ServingRequest, plan_serving
from latfit.planning.serving.targets import RequestTarget, Targets
from latfit.simulation import EngineSettings, linear_costs
from latfit.workload import RecordedLoad, make_requests, parse_arrival_process, parse_lengths

COSTS = linear_costs(9.0, 0.15, 0.02)
TARGETS = Targets((RequestTarget("ttft", 1000.0), RequestTarget("tpot", 50.0)))


def recorded(count: int) -> RecordedLoad:
    """Requests as a log would have them."""
    rng = np.random.default_rng(0)
    prompt, output = parse_lengths("1150:210:0.9").lengths(count, rng)
    arrivals = parse_arrival_process("gamma:1.5", 0.02).times_ms(count, rng)
    return RecordedLoad(make_requests(arrivals, np.minimum(prompt, 16_000), np.minimum(output, 4_000)))


def main(smoke: bool = False) -> None:
    load = recorded(1_000 if smoke else 20_000)
    request = ServingRequest(TARGETS, EngineSettings(kv_blocks=20_000), kv="given")
    evaluator = Evaluator(load, COSTS, TARGETS)
    evaluator.measure(Setup(request.start, 4))  # compiles
    steps, begun, own = evaluator.work["steps"], time.perf_counter(), time.thread_time()
    evaluator.measure(Setup(request.start, 5))
    once_s, own_s, steps = time.perf_counter() - begun, time.thread_time() - own, evaluator.work["steps"] - steps
    begun, cpu = time.perf_counter(), time.process_time()
    found = plan_serving(load, COSTS, {}, request)
    evaluated = found.simulated
    assert evaluated is not None
    wall_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
    print(
        f"{len(load.requests):,} recorded requests, two targets: {found.replicas.value} replicas found in"
        f" {wall_s:.1f} s ({cpu_s:.1f} s of processor time on {os.cpu_count()} cores), {evaluated.setups} setups,"
        f" {evaluated.steps / cpu_s / 1e6:.2f} million engine steps a second of processor time;"
        f" one simulation takes {once_s:.2f} s, {steps / own_s / 1e6:.2f} million steps a second of processor time with"
        f" its figures, the search {wall_s / once_s:.0f} times that"
    )


if __name__ == "__main__":
    main("--smoke" in sys.argv[1:])
