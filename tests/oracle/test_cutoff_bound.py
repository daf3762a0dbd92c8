"""The proved bound lies above what the policy `cutoff` makes of machines drawn at random; published values."""

import math

import numpy as np
import pytest

from latfit.policies.policy import Limits, cutoff
from latfit.queueing import linear_times
from latfit.simulation.policies.run import Options
from latfit.simulation.policies.service import System, linear_path, table_path
from tests.oracle.checked import check
from tests.oracle.cutoff_bound import cutoff_bound

LARGEST = 256
SURE = 2.5  # half widths of the 95 % interval; among so many machines one is expected beyond a single one


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_stays_above_the_simulation(seed: int) -> None:
    """GPU of 1 to 20 ms, T_cut up to its fastest step, CPU of 0.2 to 5 ms, loads that leave the CPU stable."""
    draw = np.random.default_rng([seed, 17])
    tau, slope = draw.uniform(1, 20), draw.uniform(0.01, 0.3)
    mean_cpu, share = math.exp(draw.uniform(math.log(0.2), math.log(5))), draw.uniform(0.1, 1.0)
    t_cut, q, times = share * (tau + slope), draw.choice([0.9, 0.99]), linear_times(tau, slope, LARGEST)
    rate, bound = draw.uniform(0.1, 1.5) / mean_cpu, None
    while bound is None or rate * bound.overflow_share * mean_cpu > 0.95:
        rate *= 0.8
        bound = cutoff_bound(rate, t_cut, times, 1 / mean_cpu)
    paths = System(linear_path("gpu", tau, slope, LARGEST), table_path("cpu", [mean_cpu], exponential=True))
    found = check(cutoff(t_cut, Limits(LARGEST, 1)), paths, rate, 100 * q, None, Options()).percentile
    assert bound.percentile(q) >= found.value - SURE * (found.high - found.low) / 2


def test_published_cutoff() -> None:
    """0.1 per ms on 12 + 0.05 b and a CPU of 0.5 per ms, 20 ms: proved up to 7.93732 ms."""
    times = linear_times(12, 0.05, LARGEST)
    bound = cutoff_bound(0.1, 7.93732, times, 0.5)
    assert bound is not None
    assert bound.percentile(0.99) == pytest.approx(20.0, rel=1e-5)


def test_no_bound_where_its_conditions_do_not_hold() -> None:
    times = linear_times(12, 0.05, LARGEST)
    assert cutoff_bound(0.1, 13.0, times, 0.5) is None  # T_cut above the fastest step
    assert cutoff_bound(2.0, 1.0, times, 0.5) is None  # the CPU would be overloaded
    assert cutoff_bound(0.4, 10.0, linear_times(12, 0.05, 4), 0.5) is None  # the largest batch binds
