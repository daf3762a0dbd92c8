"""The numbers behind the pictures are those of the plan and of the queues."""

import numpy as np
import pytest

from latfit.planning.load.curves import cutoff_lines, latency_lines, rate_lines
from latfit.planning.load.strategies import Target
from latfit.planning.request import PlanRequest
from latfit.queueing import linear_times, simulate_batches
from tests.unit.planning.test_plan import line, machine

SMALL = {"B": [1, 64], "S": [1, 64]}
BOTH = machine(amx=line(0, 2, domain=SMALL), gpu=line(12, 0.05, domain=SMALL))
TARGET = Target(20.0, 0.99, 1)


def test_latency_is_the_fit() -> None:
    slow, fast = latency_lines(BOTH, 1)
    assert slow.y == pytest.approx(2 * slow.x)
    assert fast.y == pytest.approx(12 + 0.05 * fast.x)
    assert (fast.x[0], fast.x[-1]) == (1, 64)


def test_lines_over_the_cutoff() -> None:
    """Where the proved bound holds it lies above the simulation."""
    lines = {row.label: row for row in cutoff_lines(BOTH, TARGET, PlanRequest(rate=0.1))}
    proved = np.isfinite(lines["rigorous"].y)
    assert proved.any()
    assert np.all(lines["simulated"].y[proved] <= lines["rigorous"].y[proved] * 1.01)


def test_the_percentile_over_the_rate_is_that_of_the_queue() -> None:
    line_of = {row.label: row for row in rate_lines(BOTH, TARGET, PlanRequest(rate=0.1))}
    greedy = line_of["gpu, greedy batches"]
    law = simulate_batches(float(greedy.x[3]) / 1e3, linear_times(12, 0.05, 64))
    assert greedy.y[3] == pytest.approx(law.percentile(0.99), rel=0.01)
    one = line_of["amx, one at a time"]
    assert one.y[:12] == pytest.approx(np.log(100) / (0.5 - one.x[:12] / 1e3), rel=0.03)


def test_one_path_has_no_cutoff_to_draw() -> None:
    assert cutoff_lines(machine(gpu=line(4, 0.1)), TARGET, PlanRequest(rate=0.1)) == []
