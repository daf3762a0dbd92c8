"""How fast the engine simulator is: requests and steps per processor second of its loop.

`python -m benchmarks.engine_speed [azure2023_conv.csv]`, without recorded arrivals on drawn ones. Vidur on the same
arrivals: `peer_simulators`. Aims: repeated steps in one go (to the same bit) twice as fast as step by step, and 100,000
requests a second where the cache is too small and requests are preempted.
"""

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from latfit.simulation.engine.loop import advance
from latfit.simulation.engine.run import load_of
from latfit.simulation.engine.settings import EngineSettings
from latfit.simulation.engine.state import PREEMPTIONS, PUSHED, STEPS, engines_of, new_states
from latfit.simulation.engine.step_cost import StepCosts, linear_costs
from latfit.workload.recordings import read_requests
from latfit.workload.requests import Requests, make_requests

FEWEST = 5
COSTS = linear_costs(8.0, 0.02, 0.05)
SAME = EngineSettings(kv_blocks=40_000, null_blocks=0, asynchronous=False, padded_graphs=False, reuse_freed=False)
CROWDED = replace(SAME, kv_blocks=2_000, reuse_freed=True)


LASTING_S = 1.0
"""For so long a loop of milliseconds is repeated: a processor that just woke up is slower than one that has worked."""


def loop_s(requests: Requests, settings: EngineSettings, costs: StepCosts = COSTS) -> tuple[float, int, int]:
    """Median processor seconds of the loop, steps, preemptions."""
    limits, load = settings.limits(0), load_of(requests, settings, 0)
    spent: list[float] = []
    state = None
    while len(spent) < FEWEST or sum(spent) < LASTING_S:
        (state,) = engines_of(new_states(limits, load, range(1)))
        state.inbox[:], state.i[PUSHED] = state.source, len(requests)
        began = time.thread_time()
        advance(limits, load, costs, state, np.inf)
        spent.append(time.thread_time() - began)
    assert state is not None
    return statistics.median(spent), int(state.i[STEPS]), int(state.i[PREEMPTIONS])


def drawn(count: int) -> Requests:
    """A made-up load, where no recorded one is given."""
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(180.0, count))
    return make_requests(arrivals, rng.integers(1, 2300, count), rng.integers(1, 420, count))


def main(smoke: bool = False, arrivals: Path | None = None) -> None:
    requests = drawn(500 if smoke else 19_366) if arrivals is None else read_requests(arrivals).requests
    print(f"engine speed: {len(requests):,} requests, {'drawn' if arrivals is None else 'recorded'}")
    for label, settings in (
        ("step by step", replace(SAME, fast=False)),
        ("repeated steps in one go", SAME),
        ("a small cache", CROWDED),
    ):
        seconds, steps, preempted = loop_s(requests, settings)
        print(
            f"  {label}: {len(requests) / seconds:,.0f} requests/s, {steps / seconds:,.0f} steps/s"
            f" ({steps:,} steps, {preempted:,} preemptions)"
        )


if __name__ == "__main__":
    main("--smoke" in sys.argv[1:], next((Path(each) for each in sys.argv[1:] if each != "--smoke"), None))
