"""What a front that learns makes of new times."""

import numpy as np

from latfit.live import BestForTail
from latfit.policies import PathTimes, Policy, Settings, named_policy
from latfit.simulation import Options, System, simulate, table_path
from latfit.workload import OpenLoad, Poisson


def p99_ms(policy: Policy, system: System, rate: float) -> float:
    """With arrivals of another seed than thresholds are chosen by."""
    options = Options(20_000, replications=1, seed=7)
    return float(simulate(policy, system, OpenLoad(Poisson(rate)), options).latency["p99"].value)


SYSTEM = System(table_path("gpu", np.array([20.0]), servers=8), table_path("cpu", np.array([25.0]), servers=8))
RATE = 0.36


def cutoff(t_cut_ms: float | None) -> Policy:
    times = PathTimes(np.array([20.0]), np.array([25.0]))
    return named_policy("cutoff", 1.0, times, Settings(t_cut_ms=t_cut_ms, B1=1))


def test_the_queueing_timeout_of_cutoff_is_that_of_the_least_p99() -> None:
    """Of 12 timeouts by brute force, to 20 %; T(1), which is the default, is a quarter worse."""
    least = min(p99_ms(cutoff(float(cut)), SYSTEM, RATE) for cut in np.geomspace(1, 120, 12))
    usual = cutoff(None)
    found = p99_ms(BestForTail()(usual, RATE, SYSTEM), SYSTEM, RATE)
    assert found <= 1.2 * least
    assert p99_ms(usual, SYSTEM, RATE) > 1.25 * found
