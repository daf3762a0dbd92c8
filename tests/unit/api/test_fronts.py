"""What a front that learns makes of new times."""

import numpy as np
import pytest

from latfit.api.running.fronts import _policy, _thresholds
from latfit.policies import Policy, Settings
from latfit.simulation import Options, System, simulate, table_path
from latfit.workload import OpenLoad, Poisson


def p99_ms(policy: Policy, system: System, rate: float) -> float:
    """With arrivals of another seed than thresholds are chosen by."""
    options = Options(20_000, replications=1, seed=7)
    return float(simulate(policy, system, OpenLoad(Poisson(rate)), options).latency["p99"].value)


SYSTEM = System(table_path("gpu", np.array([20.0]), servers=8), table_path("cpu", np.array([25.0]), servers=8))
TIMES, RATE = {"gpu": 20.0, "cpu": 25.0}, 0.36


def of(name: str, t_cut_ms: float | None) -> tuple[Policy, Settings]:
    settings = Settings(t_cut_ms=t_cut_ms, B1=1)
    return _policy(name, ["gpu", "cpu"], TIMES, settings), settings


def test_the_queueing_timeout_of_cutoff_is_that_of_the_least_p99() -> None:
    """Of 12 timeouts by brute force, to 20 %; T(1), which is the default, is a quarter worse."""
    least = min(p99_ms(of("cutoff", float(cut))[0], SYSTEM, RATE) for cut in np.geomspace(1, 120, 12))
    usual, unset = of("cutoff", None)
    found = p99_ms(_thresholds(unset)(usual, RATE, SYSTEM), SYSTEM, RATE)
    assert found <= 1.2 * least
    assert p99_ms(usual, SYSTEM, RATE) > 1.25 * found


@pytest.mark.parametrize(("name", "given", "cut"), [("cutoff", 5.0, 5.0), ("three-stage", None, 20.0)])
def test_a_queueing_timeout_that_is_given_or_hardly_matters_is_not_searched(
    name: str, given: float | None, cut: float
) -> None:
    policy, settings = of(name, given)
    assert _thresholds(settings)(policy, RATE, SYSTEM).settings["t_cut_ms"] == cut
