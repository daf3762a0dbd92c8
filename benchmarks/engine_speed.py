"""How fast the engine simulator is beside Vidur's: the same recorded arrivals, the same cost, the same number of steps.

`python -m benchmarks.engine_speed --arrivals azure2023_conv.csv --vidur FOLDER --vidur-python PYTHON`: FOLDER holds
Vidur's source, PYTHON has its requirements. Without them, or without recorded arrivals, that part is skipped and says
so. Both sides count the processor seconds of their own event loop, in turn, so that neighbours favour neither.

Aims: 600 times Vidur step by step, 2,000 times with repeated steps in one go (to the same bit), and 100,000 requests a
second where the cache is too small and requests are preempted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from latfit.simulation.engine.loop import advance
from latfit.simulation.engine.run import idle_engines, load_of
from latfit.simulation.engine.settings import EngineSettings
from latfit.simulation.engine.state import PREEMPTIONS, PUSHED, STEPS, engines_of
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
        (state,) = engines_of(idle_engines(limits, load, range(1)))
        state.inbox[:], state.i[PUSHED] = state.source, len(requests)
        began = time.thread_time()
        advance(limits, load, costs, state, np.inf)
        spent.append(time.thread_time() - began)
    assert state is not None
    return statistics.median(spent), int(state.i[STEPS]), int(state.i[PREEMPTIONS])


def vidur(folder: str, python: str, arrivals: Path, count: int) -> dict[str, float]:
    """What `vidur_peer` prints."""
    peer = Path(__file__).with_name("vidur_peer.py")
    done = subprocess.run(
        [python, str(peer), str(arrivals), str(count)],
        env={**os.environ, "PYTHONPATH": folder},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def beside_vidur(requests: Requests, arrivals: Path, asked: argparse.Namespace) -> None:
    rows = []
    for _ in range(asked.pairs):
        theirs = vidur(asked.vidur, asked.vidur_python, arrivals, len(requests))
        ours = [loop_s(requests, replace(SAME, fast=fast)) for fast in (False, True)]
        if any(steps != theirs["steps"] for _, steps, _ in ours):
            sys.exit(f"engine speed: {ours} steps against {theirs['steps']}")
        rows.append([theirs["loop_cpu_s"] / seconds for seconds, _, _ in ours] + [theirs["loop_cpu_s"]])
    stepping, fast, seconds = (statistics.median(column) for column in zip(*rows, strict=True))
    print(
        f"engine speed: Vidur {len(requests) / seconds:,.0f} requests/s, {int(theirs['steps']):,} steps as here; "
        f"{stepping:,.0f} times as fast step by step, {fast:,.0f} times with repeated steps in one go "
        f"(medians of {asked.pairs} pairs)"
    )


def drawn(count: int) -> Requests:
    """A made-up load, where no recorded one is given."""
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(180.0, count))
    return make_requests(arrivals, rng.integers(1, 2300, count), rng.integers(1, 420, count))


def main(smoke: bool = False, arguments: list[str] | None = None) -> None:
    """Print what was measured, and what was left out and why."""
    parser = argparse.ArgumentParser(prog="benchmarks.engine_speed")
    parser.add_argument("--arrivals", type=Path)
    parser.add_argument("--vidur")
    parser.add_argument("--vidur-python")
    parser.add_argument("--requests", type=int, default=2000, help="of the comparison with Vidur")
    parser.add_argument("--pairs", type=int, default=3)
    asked = parser.parse_args(arguments if arguments is not None else [])
    count = 500 if smoke else 19_366
    recorded = asked.arrivals is not None
    requests = read_requests(asked.arrivals).requests if recorded else drawn(count)
    print(f"engine speed: {len(requests):,} requests, {'recorded' if recorded else 'drawn'}")
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
    if not (recorded and asked.vidur and asked.vidur_python):
        print("engine speed: beside Vidur: skipped, give --arrivals, --vidur and --vidur-python")
        return
    beside_vidur(requests.select(slice(0, asked.requests)), asked.arrivals, asked)


if __name__ == "__main__":
    main("--smoke" in sys.argv[1:], [each for each in sys.argv[1:] if each != "--smoke"])
