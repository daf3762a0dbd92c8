"""A plan against the simulator: closed forms, the exact law with a cut-off, steps that vary, a plan that is denied."""

import re
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm

from latfit.errors import WrongUsage
from latfit.hardware.nominal import parse_quote
from latfit.hardware.profile import HardwareProfile, quoted_path
from latfit.model.step_ratios import ratios_of
from latfit.planning.load.verify import confirmed
from latfit.planning.plan import make_plan
from latfit.planning.request import Wishes
from latfit.planning.result import Cutoff, Plan
from latfit.policies.policy import Limits, cutoff
from latfit.queueing.overflow import feasible_cutoffs
from latfit.queueing.service import measured_times
from latfit.simulation.policies.run import Options, check
from latfit.simulation.policies.service import System, linear_path, table_path
from tests.unit.planning.test_plan import line, machine

SMALL = {"B": [1, 64], "S": [1, 64]}
QUOTED = HardwareProfile(
    {
        "amx": quoted_path("amx", parse_quote("p50=1.3862944ms,max_batch=64")),
        "gpu": quoted_path("gpu", parse_quote("launch=12ms,slope=0.05ms,max_batch=64")),
    }
)


SCATTERED = {"ratios": ratios_of(np.exp(0.8 * norm.ppf((np.arange(2000) + 0.5) / 2000)), np.ones(2000)).to_json()}


def checked(profile: HardwareProfile, sla: float, rate: float) -> Plan:
    wishes = Wishes(rate=rate)
    return confirmed(make_plan(profile, sla, wishes=wishes), profile, wishes)


def told(plan: Plan) -> tuple[float, float]:
    assert plan.checked is not None
    low, high = plan.checked["ci"]
    return low, high


def test_one_at_a_time_is_the_closed_form() -> None:
    """M/M/1 with mu 0.5 at 0.1 per ms: p99 = ln 100/0.4 = 11.513."""
    plan = checked(QUOTED, 20.0, 0.1)
    low, high = told(plan)
    assert plan.checked is not None
    assert plan.checked["percentile_ms"] == pytest.approx(np.log(100) / 0.4, abs=2 * (high - low))
    assert (plan.promise, plan.feasible) == ("yes", True)
    assert "Simulated: 11." in plan.answer


def test_the_cutoff_is_the_exact_law() -> None:
    plan = checked(QUOTED, 20.5, 0.4)
    assert isinstance(plan.T_cut, Cutoff)
    exact, simulated = plan.T_cut.bounds_ms["exact"], plan.T_cut.bounds_ms["checked"]
    low, high = told(plan)
    assert simulated is not None
    assert exact == pytest.approx(simulated, abs=2 * (high - low))


def test_steps_that_scatter_are_in_the_plan_and_in_the_simulation() -> None:
    """Two programs that share no code that serves: the percentile of the one lies in the interval of the other."""
    plan = checked(machine(gpu=line(4, 0.1, domain=SMALL, intervals=SCATTERED)), 100.0, 1.0)
    chosen = next(row for row in plan.alternatives if row.chosen)
    assert chosen.percentile_ms is not None
    low, high = told(plan)
    assert low * 0.99 <= chosen.percentile_ms <= high * 1.01
    assert plan.promise == "yes"
    without = make_plan(machine(gpu=line(4, 0.1, domain=SMALL)), 60.0, wishes=Wishes(rate=1.0))
    steady = next(row for row in without.alternatives if row.chosen).percentile_ms
    assert steady is not None
    assert steady < 0.8 * low


def test_a_plan_that_the_simulation_denies_is_not_feasible() -> None:
    """The same plan against an SLA just below what the simulation finds."""
    profile = machine(gpu=line(4, 0.1, domain=SMALL, intervals=SCATTERED))
    wishes = Wishes(rate=1.0)
    plan = make_plan(profile, 60.0, wishes=wishes)
    found = confirmed(plan, profile, wishes)
    denied = confirmed(replace(plan, sla_ms=0.97 * told(found)[0]), profile, wishes)
    assert (denied.promise, denied.feasible) == ("no", False)
    assert denied.binding.startswith("simulated")
    assert denied.answer.startswith("1,000/s cannot be served")
    assert "--sla" in denied.remedy


def test_what_the_cutoff_carries_is_its_own() -> None:
    """At the rate that GPU and CPU are said to carry some T_cut meets the SLA by the exact law, a tenth above it none;
    another way of running the load lends it nothing."""
    profile = HardwareProfile(
        {
            "amx": quoted_path("amx", parse_quote("p50=1.3862944ms,max_batch=64")),
            "gpu": quoted_path("gpu", parse_quote("launch=12ms,slope=0.05ms,max_batch=64")),
        }
    )
    plan = make_plan(profile, 20.0, wishes=Wishes(rate=0.9))
    row = next(each for each in plan.alternatives if "T_cut" in each.name)
    assert row.sustainable_per_s is not None
    times = measured_times(12 + 0.05 * np.arange(1.0, 65))
    for factor, found in ((0.99, True), (1.1, False)):
        ranges = feasible_cutoffs(factor * row.sustainable_per_s / 1e3, times, 0.5, 20.0)
        assert bool(ranges.ranges) is found


def test_without_a_load_there_is_nothing_to_simulate() -> None:
    with pytest.raises(WrongUsage, match="no load"):
        confirmed(make_plan(QUOTED, 20.0), QUOTED, Wishes())


def test_a_plan_without_a_way_stays_as_it_is() -> None:
    wishes = Wishes(rate=50.0)
    plan = make_plan(QUOTED, 20.0, wishes=wishes)
    assert confirmed(plan, QUOTED, wishes) == replace(plan)


def test_a_plan_at_the_edge_says_how_to_leave_it() -> None:
    """T_cut is the largest that meets 20 ms, so no simulation can tell; the one that it names is sure."""
    plan = checked(QUOTED, 20.0, 0.4)
    assert plan.promise == "in doubt"
    way_out = next(note for note in plan.notes if "at the edge" in note)
    found = re.search(r"T_cut ([\d.]+) ms keeps 2%.* --sla 19\.6ms", way_out)
    assert found is not None
    amx, gpu = table_path("amx", [2.0], exponential=True), linear_path("gpu", 12, 0.05, 64)
    surer = check(cutoff(float(found[1]), Limits(64, 1)), System(gpu, amx), 0.4, 99.0, 20.0)
    assert surer.holds is True
    assert make_plan(QUOTED, 19.6, wishes=Wishes(rate=0.4)).feasible


STEADY = {"ratios": ratios_of(np.linspace(0.97, 1.03, 2000), np.ones(2000)).to_json()}


class TestSteadyService:
    """A CPU that takes 2 ms every time queues less than an exponential one of that mean."""

    gpu = quoted_path("gpu", parse_quote("launch=12ms,slope=0.05ms,max_batch=64"))
    profile = HardwareProfile({**machine(cpu=line(0.01, 1.99, domain=SMALL, intervals=STEADY)).paths, "gpu": gpu})
    system = System(linear_path("gpu", 12, 0.05, 64), table_path("cpu", [2.0]))

    def late(self, rate: float, cutoff_ms: float) -> tuple[float, float]:
        """95 % interval of the 99th percentile of a service of exactly 2 ms, event by event."""
        found = check(cutoff(cutoff_ms, Limits(64, 1)), self.system, rate, 99.0, 20.0, Options(seed=5, replications=8))
        return found.percentile.low, found.percentile.high

    def test_a_cutoff_that_the_exponential_law_denies(self) -> None:
        assert not feasible_cutoffs(0.48, measured_times(12 + 0.05 * np.arange(1.0, 65)), 0.5, 20.0).ranges
        plan = make_plan(self.profile, 20.0, wishes=Wishes(rate=0.48))
        assert isinstance(plan.T_cut, Cutoff)
        assert (plan.feasible, plan.T_cut.bound) == (True, "simulated")
        assert plan.T_cut.value is not None
        assert plan.T_cut.ranges["simulated"][-1][1] == plan.T_cut.value
        assert self.late(0.48, plan.T_cut.value)[0] <= 20.0
        assert self.late(0.48, 1.1 * plan.T_cut.value)[0] > 20.0

    def test_nothing_is_called_proved_of_a_measured_cpu(self) -> None:
        plan = make_plan(self.profile, 20.0, wishes=Wishes(rate=0.3))
        assert isinstance(plan.T_cut, Cutoff)
        assert set(plan.T_cut.ranges) == {"poisson", "simulated"}
        assert "rigorous" not in plan.T_cut.bounds_ms
        simulated = plan.T_cut.bounds_ms["simulated"]
        assert simulated is not None
        low, high = self.late(0.3, plan.T_cut.shown_ms)
        assert low * 0.99 <= simulated <= high * 1.01

    def test_a_cpu_more_variable_than_exponential_gets_no_bound_of_one(self) -> None:
        """cv 1.5: the exponential bound at its largest T_cut is broken by an own run; the plan's T_cut keeps the
        SLA."""
        wild = ratios_of(np.repeat([0.5, 5.5], [1800, 200]), np.ones(2000))
        cpu = line(0.01, 1.99, domain=SMALL, intervals={"ratios": wild.to_json()})
        profile = HardwareProfile({**machine(cpu=cpu).paths, "gpu": self.gpu})
        plan = make_plan(profile, 30.0, wishes=Wishes(rate=0.2))
        assert isinstance(plan.T_cut, Cutoff)
        assert plan.T_cut.bound == "simulated"
        assert plan.T_cut.service["cv"] == pytest.approx(1.5, abs=0.01)
        assert plan.T_cut.value is not None
        system = System(linear_path("gpu", 12, 0.05, 64), table_path("cpu", [2.0], scatter=wild))
        found = check(cutoff(plan.T_cut.value, Limits(64, 1)), system, 0.2, 99.0, 30.0, Options(seed=3, replications=8))
        assert found.percentile.low <= 30.0
