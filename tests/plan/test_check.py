"""A plan against the simulator: closed forms, the exact law with a cut-off, steps that vary, a plan that is denied."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from latfit.errors import WrongUsage
from latfit.hardware.profile import HardwareProfile, quoted_path
from latfit.hardware.quote import parse_quote
from latfit.plan.check import confirmed
from latfit.plan.decide import make_plan
from latfit.plan.result import Capacity, Cutoff, Plan
from latfit.plan.wishes import Wishes
from latfit.queueing.cutoff_search import feasible_cutoffs
from latfit.queueing.service import measured_times
from latfit.scheduling.policy import Limits, cutoff, gpu_only
from latfit.sim.check import check
from latfit.sim.machine import System, linear_path, residual_factors, table_path
from latfit.sim.simulate import Options
from latfit.stats import FloatArray
from tests.plan.test_plan import line, machine

SMALL = {"B": [1, 64], "S": [1, 64]}
QUOTED = HardwareProfile(
    {
        "amx": quoted_path("amx", parse_quote("p50=1.3862944ms,max_batch=64")),
        "gpu": quoted_path("gpu", parse_quote("launch=12ms,slope=0.05ms,max_batch=64")),
    }
)


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
    exact, simulated = plan.T_cut.bounds_ms["exact"], plan.T_cut.bounds_ms["simulated"]
    low, high = told(plan)
    assert simulated is not None
    assert exact == pytest.approx(simulated, abs=2 * (high - low))
    assert "simulated" in plan.T_cut.holds


def test_steps_that_vary_lie_between_the_mean_and_the_slow_ones() -> None:
    known = {
        "lower_quantiles": {"0.9": 0.8},
        "ratio_quantiles": {"0.5": 1.0, "0.9": 1.2, "0.99": 1.4},
    }
    varied = machine(gpu=line(4, 0.1, domain=SMALL, intervals=known))
    plan = checked(varied, 30.0, 1.0)
    low, high = told(plan)
    chosen = next(row for row in plan.alternatives if row.chosen)
    assert chosen.percentile_ms is not None
    assert plan.slow_steps_ms is not None
    assert chosen.percentile_ms < low <= high < plan.slow_steps_ms


def test_a_plan_that_the_simulation_denies_is_not_feasible() -> None:
    known = {"ratio_quantiles": {"0.5": 1.0, "0.9": 1.3, "0.99": 2.0}}
    varied = machine(gpu=line(4, 0.1, domain=SMALL, intervals=known))
    formula = make_plan(varied, 30.0, wishes=Wishes(rate=1.0))
    chosen = next(row for row in formula.alternatives if row.chosen)
    assert chosen.percentile_ms is not None
    plan = checked(varied, 1.01 * chosen.percentile_ms, 1.0)
    assert (plan.promise, plan.feasible) == ("no", False)
    assert plan.binding.startswith("simulated")
    assert plan.answer.startswith("1,000/s cannot be served")
    assert isinstance(plan.capacity, Capacity)
    carried = plan.capacity.sustainable_per_s
    assert carried is not None
    assert carried < 1000
    assert plan.capacity.replicas == math.ceil(1000 / carried)
    assert f"--replicas {plan.capacity.replicas}" in plan.remedy
    assert not plan.sensitivity
    assert "--check" not in " ".join(plan.notes)
    assert next(row for row in plan.alternatives if row.chosen).sustainable_per_s == carried
    # A second look with other random numbers: the rate that is named keeps the SLA, the one asked for does not.
    times = np.array([4 + 0.1 * b for b in range(1, 65)])
    system = System(table_path("gpu", times, factors=_normalised(varied)))
    for rate, holds in ((0.97 * carried / 1e3, True), (1.0, False)):
        assert check(gpu_only(Limits(64)), system, rate, 99.0, plan.sla_ms, Options(seed=7)).holds is holds


def _normalised(profile: HardwareProfile) -> FloatArray:
    """Residual factors of the GPU's fit, of mean one."""
    factors = residual_factors(profile.paths["gpu"].fit, "decode")
    return np.asarray(factors / np.mean((factors[1:] + factors[:-1]) / 2))


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


STEADY = {
    "lower_quantiles": {"0.9": 0.98},
    "ratio_quantiles": {"0.5": 1.0, "0.9": 1.02, "0.99": 1.03},
}


def test_the_next_way_is_taken_where_the_first_is_denied() -> None:
    """The GPU's steps scatter so that its 99th percentile misses the SLA which its formula meets; the CPU's, a little
    slower on average, always take the same."""
    wild = {"lower_quantiles": {"0.9": 0.4}, "ratio_quantiles": {"0.5": 1.0, "0.9": 1.6, "0.99": 3.0}}
    profile = machine(
        gpu=line(4.0, 0.1, domain=SMALL, intervals=wild), cpu=line(4.5, 0.2, domain=SMALL, intervals=STEADY)
    )
    formula = make_plan(profile, 12.0, wishes=Wishes(rate=0.1))
    assert next(row for row in formula.alternatives if row.chosen).name.startswith("gpu")
    plan = checked(profile, 12.0, 0.1)
    taken = next(row for row in plan.alternatives if row.chosen)
    assert taken.name.startswith("cpu")
    assert (plan.feasible, plan.promise) == (True, "yes")
    assert plan.checked is not None
    assert plan.checked["way"] == taken.name
    assert isinstance(plan.capacity, Capacity)
    assert plan.capacity.system == taken.name
    assert any("in the simulation" in note for note in plan.notes)


class TestSteadyService:
    """A CPU that takes 2 ms every time queues less than an exponential one of that mean, which the law takes it for."""

    profile = HardwareProfile(
        {
            **machine(cpu=line(0.01, 1.99, domain=SMALL, intervals=STEADY)).paths,
            "gpu": quoted_path("gpu", parse_quote("launch=12ms,slope=0.05ms,max_batch=64")),
        }
    )
    system = System(linear_path("gpu", 12, 0.05, 64), table_path("cpu", [2.0]))

    def late(self, rate: float, cutoff_ms: float) -> tuple[float, float]:
        """95 % interval of the 99th percentile of a service of exactly 2 ms, with other random numbers."""
        found = check(cutoff(cutoff_ms, Limits(64, 1)), self.system, rate, 99.0, 20.0, Options(seed=5, replications=8))
        return found.percentile.low, found.percentile.high

    def test_a_cutoff_that_the_law_denies(self) -> None:
        formula = make_plan(self.profile, 20.0, wishes=Wishes(rate=0.48))
        assert not formula.feasible
        plan = checked(self.profile, 20.0, 0.48)
        assert isinstance(plan.T_cut, Cutoff)
        assert (plan.feasible, plan.T_cut.bound) == (True, "simulated")
        assert plan.T_cut.value is not None
        assert plan.T_cut.ranges["exact"] == []
        assert plan.T_cut.ranges["simulated"][-1][1] == plan.T_cut.value
        assert self.late(0.48, plan.T_cut.value)[0] <= 20.0
        assert self.late(0.48, 1.1 * plan.T_cut.value)[0] > 20.0

    def test_a_cutoff_that_the_law_grants_stays(self) -> None:
        formula, plan = make_plan(self.profile, 20.0, wishes=Wishes(rate=0.3)), checked(self.profile, 20.0, 0.3)
        assert isinstance(formula.T_cut, Cutoff)
        assert isinstance(plan.T_cut, Cutoff)
        assert plan.T_cut.value == formula.T_cut.value
        assert plan.T_cut.bounds_ms["simulated"] == pytest.approx(self.late(0.3, plan.T_cut.shown_ms)[1], rel=0.03)
        granted = [end for span in plan.T_cut.ranges["simulated"] for end in span]
        by_law = [end for span in plan.T_cut.ranges["exact"] for end in span]
        assert min(granted) <= min(by_law) + 20.0 / 8  # where its grid begins
        assert max(granted) >= 0.97 * max(by_law)
