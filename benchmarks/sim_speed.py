"""`python -m benchmarks.sim_speed`: request-level simulation against SimPy on the same model, in one run.

The model: Poisson arrivals at 4/ms, a server that takes all that wait (up to 256), T(b) = 8 + 0.05 b ms; 40 requests a
batch. In the loop: arrivals are drawn beforehand, and only the simulation is timed. Whole job: arrivals drawn, served,
mean and percentiles computed, on our side also their intervals. Both sides must give the same response times. Both run
in one thread and are timed by its processor time, so that a busy neighbour does not count.
"""

import statistics
import sys
import time
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from latfit.policies import policy as policies
from latfit.policies.policy import Limits
from latfit.simulation.policies.replication import draw, run
from latfit.simulation.policies.run import Options, simulate
from latfit.simulation.policies.service import System, linear_path
from latfit.stats import FloatArray
from latfit.workload.arrivals import Poisson
from latfit.workload.load import OpenLoad, Streams

RATE, TAU, ALPHA, LARGEST = 4.0, 8.0, 0.05, 256
SYSTEM = System(linear_path("gpu", TAU, ALPHA, LARGEST))
GREEDY = policies.gpu_only(Limits(LARGEST))
LOAD = OpenLoad(Poisson(RATE))

SIMPY_SHARE = 10
"""SimPy simulates a tenth of the requests and is timed by the request: it takes the same time for each."""


def simpy_responses(arrive: FloatArray) -> FloatArray:
    """The model in SimPy's own terms: the queue is a Store, into which a source puts and from which a server gets."""
    import simpy

    env = simpy.Environment()
    queue = simpy.Store(env)
    times = arrive.tolist()
    response = np.empty(len(times))

    def source() -> Generator[Any, Any, None]:
        for i, moment in enumerate(times):
            yield env.timeout(moment - env.now)
            yield queue.put(i)

    def server() -> Generator[Any, Any, None]:
        while True:
            batch = [(yield queue.get())]
            while queue.items and len(batch) < LARGEST:
                batch.append((yield queue.get()))
            yield env.timeout(TAU + ALPHA * len(batch))
            for i in batch:
                response[i] = env.now - times[i]

    env.process(source())
    env.process(server())
    env.run()
    return response


def bare_simpy_responses(arrive: FloatArray) -> FloatArray:
    """The least that SimPy can be asked to do: lists for the queue, one event a request and one a batch."""
    import simpy

    env = simpy.Environment()
    times = arrive.tolist()
    response = np.empty(len(times))
    queue: list[int] = []
    idle: list[Any] = []

    def source() -> Generator[Any, Any, None]:
        for i, moment in enumerate(times):
            yield env.timeout(moment - env.now)
            queue.append(i)
            if idle:
                idle.pop().succeed()

    def server() -> Generator[Any, Any, None]:
        while True:
            if not queue:
                idle.append(env.event())
                yield idle[0]
            batch = queue[:LARGEST]
            del queue[:LARGEST]
            yield env.timeout(TAU + ALPHA * len(batch))
            for i in batch:
                response[i] = env.now - times[i]

    env.process(source())
    env.process(server())
    env.run()
    return response


SIMPY: dict[str, Callable[[FloatArray], FloatArray]] = {
    "SimPy": simpy_responses,
    "SimPy without its Store": bare_simpy_responses,
}


def simpy_job(n: int, responses: Callable[[FloatArray], FloatArray]) -> tuple[float, ...]:
    arrive = np.cumsum(np.random.default_rng(0).exponential(1 / RATE, n))
    response = responses(arrive)[n // 10 :]
    return (float(response.mean()), *np.quantile(response, [0.5, 0.9, 0.99]).tolist())


def agree(n: int) -> float:
    """The largest difference in ms between the sides' response times on the same arrivals."""
    streams = Streams(1)
    drawn = draw(LOAD, n, 0.1, SYSTEM, streams)
    ours = run(GREEDY, SYSTEM, drawn, streams).response_ms
    return max(float(np.max(np.abs(ours - responses(drawn.arrive)))) for responses in SIMPY.values())


def in_the_loop(n: int, pairs: int, responses: Callable[[FloatArray], FloatArray]) -> str:
    streams = Streams(0)
    ours, theirs = (draw(LOAD, size, 0.1, SYSTEM, streams) for size in (n, n // SIMPY_SHARE))
    return _times(lambda: run(GREEDY, SYSTEM, ours, streams), lambda: responses(theirs.arrive), n, pairs)


def whole_job(n: int, pairs: int, responses: Callable[[FloatArray], FloatArray]) -> str:
    options = Options(n, replications=1)
    theirs = n // SIMPY_SHARE
    return _times(lambda: simulate(GREEDY, SYSTEM, LOAD, options), lambda: simpy_job(theirs, responses), n, pairs)


def _times(ours: Callable[[], object], theirs: Callable[[], object], n: int, pairs: int) -> str:
    """The median ratio over pairs in turn, and both rates, by the processor time of this thread."""
    ours(), theirs()
    seconds = [(_cpu_s(ours), _cpu_s(theirs) * SIMPY_SHARE) for _ in range(pairs)]
    ratios = sorted(b / a for a, b in seconds)
    a, b = (n / statistics.median(column) for column in zip(*seconds, strict=True))
    span = f"{ratios[0]:,.0f} to {ratios[-1]:,.0f}"
    return f"{statistics.median(ratios):,.0f} times ({span}): {a / 1e6:,.1f} million requests/s against {b:,.0f}"


def _cpu_s(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def main(smoke: bool = False) -> None:
    n, pairs = (20_000, 1) if smoke else (2_000_000, 7)
    print(f"same response times on both sides: within {agree(20_000):.1e} ms")
    for name, responses in SIMPY.items():
        print(f"against {name}, in the loop: {in_the_loop(n, pairs, responses)}")
        print(f"against {name}, whole job: {whole_job(n, pairs, responses)}")


if __name__ == "__main__":
    main("--smoke" in sys.argv[1:])
