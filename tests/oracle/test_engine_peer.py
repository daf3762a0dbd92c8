"""The engine against Vidur's simulator on the recorded conversations: the same steps, the same end.

The numbers are Vidur's own (its Sarathi policy, chunk 2048, at most 256 requests, 40,000 blocks of 16, a step of
8 + 0.05 tokens + 0.02 B ms), as `benchmarks/vidur_peer.py` prints them.
"""

from pathlib import Path

import pytest

from latfit.simulation.engine.run import serve
from latfit.simulation.engine.settings import EngineSettings
from latfit.simulation.engine.step_cost import linear_costs
from latfit.workload.recordings import read_requests

VIDUR = EngineSettings(
    kv_blocks=40_000, null_blocks=0, asynchronous=False, padded_graphs=False, reuse_freed=False, fast=False
)


@pytest.mark.parametrize(("count", "steps", "makespan_s"), [(2000, 33_952, 426.976988), (19_366, 261_650, 3504.6)])
def test_the_steps_are_those_of_vidur(measured_steps: Path, count: int, steps: int, makespan_s: float) -> None:
    arrivals = measured_steps.parent / "arrivals" / "azure2023_conv.csv"
    requests = read_requests(arrivals).requests.select(slice(0, count))
    run = serve(requests, linear_costs(8.0, 0.02, 0.05), VIDUR)
    assert run.counters.steps == steps
    assert run.last_ms.max() / 1e3 == pytest.approx(makespan_s, abs=0.05 if count > 2000 else 1e-6)
