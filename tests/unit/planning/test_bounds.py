"""The proved bounds and the exact law of an overflow that stays on the AMX lie above what the policy makes of machines
drawn at random: it keeps on the GPU what would end sooner there."""

import math

import numpy as np
import pytest

from latfit.errors import SlaOutOfReach
from latfit.policies.policy import Limits, cutoff
from latfit.queueing.overflow import cutoff_queue, exact_distribution
from latfit.queueing.service import linear_times
from latfit.simulation.policies.run import Options, check
from latfit.simulation.policies.service import System, linear_path, table_path
from tests.unit.queueing.textbook import any_batch_percentile

MACHINES = 24
LARGEST = 256
OPTIONS = Options()
SURE = 2.5
"""Half widths of the 95 % interval; among so many machines one is expected beyond a single one."""


@pytest.mark.parametrize("seed", range(MACHINES))
def test_bounds_stay_above_the_simulation(seed: int) -> None:
    """GPU of 1 to 20 ms, T_cut up to one and a half times that, AMX of 0.2 to 5 ms, loads up to 95 % of the AMX."""
    draw = np.random.default_rng([seed, 17])
    tau, slope = draw.uniform(1, 20), draw.uniform(0.01, 0.3)
    mean_amx, share = math.exp(draw.uniform(math.log(0.2), math.log(5))), draw.uniform(0.1, 1.5)
    t_cut, q = share * (tau + slope), draw.choice([0.9, 0.99])
    times = linear_times(tau, slope, LARGEST)
    rate = draw.uniform(0.1, 1.5) / mean_amx
    for _ in range(20):
        try:
            queue = cutoff_queue(rate, t_cut, times, 1 / mean_amx)
        except SlaOutOfReach:
            rate *= 0.8
            continue
        if queue.overflow_rate * mean_amx < 0.95:
            break
        rate *= 0.8
    paths = System(linear_path("gpu", tau, slope, LARGEST), table_path("amx", [mean_amx], exponential=True))
    found = check(cutoff(t_cut, Limits(LARGEST, 1)), paths, rate, 100 * q, None, OPTIONS).percentile
    least = found.value - SURE * (found.high - found.low) / 2
    assert queue.proved_percentile(q) >= least
    assert any_batch_percentile(rate, t_cut, times, 1 / mean_amx, q) >= least
    if queue.independent_batches:
        exact = exact_distribution(queue).percentile(q)
        assert exact >= least
        assert queue.proved_percentile(q) >= exact * (1 - 1e-9)
