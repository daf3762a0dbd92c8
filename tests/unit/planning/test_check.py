"""Plans against the event simulator of `latfit simulate`, closed forms, and steps that vary."""

import numpy as np
import pytest

from latfit.hardware.nominal import parse_nominal
from latfit.hardware.profile import HardwareProfile, nominal_path
from latfit.model.step_noise import noise_of
from latfit.planning.load.varying import load_from_arrivals
from latfit.planning.plan import make_plan
from latfit.planning.request import PlanOptions
from latfit.planning.result import Cutoff, Plan
from latfit.policies.policy import Limits, cutoff
from latfit.queueing import linear_times, simulate_batches
from latfit.simulation.policies.run import Options
from latfit.simulation.policies.service import System, linear_path, table_path
from tests.oracle.checked import check
from tests.unit.planning.test_plan import line, machine

SMALL = {"B": [1, 64], "S": [1, 64]}
NOMINAL = HardwareProfile(
    {
        "amx": nominal_path("amx", parse_nominal("p50=1.3862944ms,max_batch=64")),
        "gpu": nominal_path("gpu", parse_nominal("launch=12ms,slope=0.05ms,max_batch=64")),
    }
)

WIDE = {"ratios": noise_of(np.linspace(0.5, 1.5, 2000), np.ones(2000)).to_json()}
STEADY = {"ratios": noise_of(np.linspace(0.97, 1.03, 2000), np.ones(2000)).to_json()}


def planned(profile: HardwareProfile, sla: float, rate: float) -> Plan:
    return make_plan(profile, sla, request=PlanOptions(rate=rate))


def told(plan: Plan) -> tuple[float, float]:
    low, high = plan.interval_ms or (None, None)
    assert low is not None
    assert high is not None
    return low, high


def test_one_at_a_time_is_the_closed_form() -> None:
    """M/M/1 with mu 0.5 at 0.1 per ms: p99 = ln 100/0.4 = 11.513."""
    plan = planned(NOMINAL, 20.0, 0.1)
    low, high = told(plan)
    assert low * 0.998 <= np.log(100) / 0.4 <= high * 1.002
    assert (plan.promise, plan.feasible) == ("meets", True)


def test_laws_only_leaves_out_noise() -> None:
    """T = 4 + 0.1 b without its noise."""
    profile = machine(gpu=line(4, 0.1, domain=SMALL, intervals=WIDE), cpu=line(0.01, 1.99, intervals=STEADY))
    plan = make_plan(profile, 20.0, request=PlanOptions(rate=1.0, laws_only=True))
    row = next(row for row in plan.strategies if row.name == "gpu, greedy batches")
    assert row.percentile_ms == pytest.approx(
        simulate_batches(1.0, linear_times(4, 0.1, 64)).percentile(0.99), rel=0.01
    )
    assert plan.promise == "likely"


def test_bursts_are_simulated_as_they_were_recorded() -> None:
    """Twenty at once, then a pause of 20 ms: the last of them waits for 20 others, and T(20) = 4 ms."""
    gaps = np.tile(np.r_[np.full(19, 0.01), 20.0], 400)
    load = load_from_arrivals(np.cumsum(gaps), "bursts", float(gaps.sum() / 2))
    profile = machine(gpu=line(2, 0.1, domain=SMALL, intervals=STEADY))
    late = make_plan(profile, 30.0, request=PlanOptions(load=load)).strategies[0].percentile_ms
    assert late is not None
    # The first is served alone for 2.1 ms, the other nineteen wait for its end and take 3.9 ms.
    assert late == pytest.approx(2.1 + 3.9, rel=0.05)


@pytest.mark.parametrize(("rate", "feasible"), [(50.0, False), (1e-12, True)])
def test_too_many_requests_and_next_to_none(rate: float, feasible: bool) -> None:
    assert planned(NOMINAL, 20.0, rate).feasible is feasible


class TestSteadyService:
    """A CPU that takes 2 ms every time."""

    gpu = nominal_path("gpu", parse_nominal("launch=12ms,slope=0.05ms,max_batch=64"))
    profile = HardwareProfile({**machine(cpu=line(0.01, 1.99, domain=SMALL, intervals=STEADY)).paths, "gpu": gpu})
    system = System(linear_path("gpu", 12, 0.05, 64), table_path("cpu", [2.0]))

    def late(self, rate: float, cutoff_ms: float) -> tuple[float, float]:
        """95 % interval of the 99th percentile of a service of exactly 2 ms, event by event."""
        found = check(cutoff(cutoff_ms, Limits(64, 1)), self.system, rate, 99.0, 20.0, Options(seed=5, replications=8))
        return found.percentile.low, found.percentile.high

    def test_a_cutoff_is_the_largest_that_meets_the_sla(self) -> None:
        plan = make_plan(self.profile, 20.0, request=PlanOptions(rate=0.48))
        assert isinstance(plan.T_cut, Cutoff)
        assert (plan.feasible, plan.T_cut.bound) == (True, "simulated")
        assert plan.T_cut.value is not None
        assert plan.T_cut.ranges["simulated"][-1][1] == plan.T_cut.value
        low, high = self.late(0.48, plan.T_cut.value)
        assert low <= 20.0
        assert self.late(0.48, 1.1 * plan.T_cut.value)[0] > 20.0
        simulated = plan.T_cut.bounds_ms["simulated"]
        assert simulated is not None
        assert low * 0.99 <= simulated <= high * 1.01
