"""A plan against the event simulator: closed forms, the exact law with a cut-off, steps that vary, a refuted plan."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from latfit.hardware.nominal import parse_nominal
from latfit.hardware.profile import HardwareProfile, nominal_path
from latfit.model.noise.step_noise import noise_of
from latfit.planning.load import evaluate
from latfit.planning.load.strategies import Machine
from latfit.planning.load.varying import load_from_arrivals
from latfit.planning.load.verify import simulated
from latfit.planning.plan import make_plan
from latfit.planning.request import PlanRequest
from latfit.planning.result import Cutoff, Plan
from latfit.policies.policy import Limits, cutoff
from latfit.queueing import sampled
from latfit.queueing.batch import batch_queue
from latfit.queueing.overflow import feasible_cutoffs
from latfit.queueing.service import linear_times, measured_times
from latfit.simulation.policies.run import Checked, Options, check
from latfit.simulation.policies.service import System, linear_path, table_path
from tests.unit.planning.test_plan import line, machine

SMALL = {"B": [1, 64], "S": [1, 64]}
NOMINAL = HardwareProfile(
    {
        "amx": nominal_path("amx", parse_nominal("p50=1.3862944ms,max_batch=64")),
        "gpu": nominal_path("gpu", parse_nominal("launch=12ms,slope=0.05ms,max_batch=64")),
    }
)


SCATTERED = {"ratios": noise_of(np.exp(0.8 * norm.ppf((np.arange(2000) + 0.5) / 2000)), np.ones(2000)).to_json()}


WIDE = {"ratios": noise_of(np.linspace(0.5, 1.5, 2000), np.ones(2000)).to_json()}
STEADY = {"ratios": noise_of(np.linspace(0.97, 1.03, 2000), np.ones(2000)).to_json()}


def checked(profile: HardwareProfile, sla: float, rate: float) -> Plan:
    return make_plan(profile, sla, request=PlanRequest(rate=rate))


def told(plan: Plan) -> tuple[float, float]:
    found = plan.checked
    assert found is not None
    low, high = found["ci"]
    return low, high


def test_one_at_a_time_is_the_closed_form() -> None:
    """M/M/1 with mu 0.5 at 0.1 per ms: p99 = ln 100/0.4 = 11.513."""
    plan = checked(NOMINAL, 20.0, 0.1)
    low, high = told(plan)
    found = plan.checked
    assert found is not None
    assert found["percentile_ms"] == pytest.approx(np.log(100) / 0.4, abs=2 * (high - low))
    assert (plan.promise, plan.feasible) == ("yes", True)
    assert "(exact)" in plan.answer
    assert found["holds"] is True


def test_the_cutoff_is_the_exact_law() -> None:
    plan = checked(NOMINAL, 20.5, 0.4)
    assert isinstance(plan.T_cut, Cutoff)
    exact, simulated = plan.T_cut.bounds_ms["exact"], plan.T_cut.bounds_ms["event_simulation"]
    low, high = told(plan)
    assert simulated is not None
    assert exact == pytest.approx(simulated, abs=2 * (high - low))


def test_steps_that_scatter_are_in_the_plan_and_in_the_simulation() -> None:
    """Two programs that share no code that serves: the percentile of the one lies in the interval of the other."""
    plan = checked(machine(gpu=line(4, 0.1, domain=SMALL, intervals=SCATTERED)), 100.0, 1.0)
    chosen = next(row for row in plan.strategies if row.chosen)
    assert chosen.percentile_ms is not None
    low, high = told(plan)
    assert low * 0.99 <= chosen.percentile_ms <= high * 1.01
    assert plan.promise == "yes"
    without = make_plan(machine(gpu=line(4, 0.1, domain=SMALL)), 60.0, request=PlanRequest(rate=1.0))
    steady = next(row for row in without.strategies if row.chosen).percentile_ms
    assert steady is not None
    assert steady < 0.8 * low


def test_a_plan_that_the_simulation_refutes_is_not_feasible(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event simulation serves the same load with steps that take a tenth longer."""
    profile = machine(gpu=line(4, 0.1, domain=SMALL, intervals=SCATTERED))
    plan = make_plan(profile, 60.0, request=PlanRequest(rate=1.0))
    just = 1.03 * told(plan)[1]
    assert make_plan(profile, just, request=PlanRequest(rate=1.0)).feasible

    def slower(each: Machine, *asked: Any) -> Checked | None:
        assert each.gpu is not None
        return simulated(replace(each, gpu=each.gpu.scaled(1.1)), *asked)

    monkeypatch.setattr(evaluate, "simulated", slower)
    refuted = make_plan(profile, just, request=PlanRequest(rate=1.0))
    assert (refuted.promise, refuted.feasible) == ("no", False)
    assert refuted.binding.startswith("the event simulation refutes it")
    assert refuted.answer.startswith("1,000 req/s of 1 token each cannot be served")
    assert "--sla" in refuted.remedy
    assert not any(row.chosen for row in refuted.strategies)


def test_laws_only_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """T = 4 + 0.1 b without its scatter is the batch queue's exact law."""

    def never(*asked: Any) -> None:
        raise AssertionError

    for name in ("sampled_queue", "sampled_cutoff"):
        monkeypatch.setattr(sampled, name, never)
    monkeypatch.setattr(evaluate, "simulated", never)
    profile = machine(gpu=line(4, 0.1, domain=SMALL, intervals=WIDE), cpu=line(0.01, 1.99, intervals=STEADY))
    plan = make_plan(profile, 20.0, request=PlanRequest(rate=1.0, laws_only=True))
    row = next(row for row in plan.strategies if row.name == "gpu, greedy batches")
    assert row.percentile_ms == pytest.approx(batch_queue(1.0, linear_times(4, 0.1, 64)).percentile(0.99))
    assert {row.source for row in plan.strategies} <= {"exact", None}
    assert plan.checked is None
    assert plan.promise == "in doubt"
    assert "closed form only" in plan.answer


def test_bursts_are_simulated_as_they_were_recorded() -> None:
    """Twenty at once, then a pause: what the plan says of it is what the event simulation says, and no Poisson load."""
    gaps = np.tile(np.r_[np.full(19, 0.01), 20.0], 400)
    load = load_from_arrivals(np.cumsum(gaps), "bursts", float(gaps.sum() / 2))
    profile = machine(gpu=line(2, 0.1, domain=SMALL, intervals=STEADY))
    bursts = make_plan(profile, 30.0, request=PlanRequest(load=load))
    low, high = told(bursts)
    late = bursts.strategies[0].percentile_ms
    assert late is not None
    assert low * 0.98 <= late <= high * 1.02
    poisson = make_plan(profile, 30.0, request=PlanRequest(rate=load.peak)).strategies[0].percentile_ms
    assert poisson is not None
    assert abs(late / poisson - 1) > 0.1


def test_what_the_cutoff_carries_is_its_own() -> None:
    """At the rate that GPU and CPU are said to carry some T_cut meets the SLA by the exact law, a tenth above it none;
    another way of running the load lends it nothing."""
    profile = HardwareProfile(
        {
            "amx": nominal_path("amx", parse_nominal("p50=1.3862944ms,max_batch=64")),
            "gpu": nominal_path("gpu", parse_nominal("launch=12ms,slope=0.05ms,max_batch=64")),
        }
    )
    plan = make_plan(profile, 20.0, request=PlanRequest(rate=0.9))
    row = next(each for each in plan.strategies if "T_cut" in each.name)
    assert row.sustainable_per_s is not None
    times = measured_times(12 + 0.05 * np.arange(1.0, 65))
    for factor, found in ((0.99, True), (1.1, False)):
        ranges = feasible_cutoffs(factor * row.sustainable_per_s / 1e3, times, 0.5, 20.0)
        assert bool(ranges.ranges) is found


@pytest.mark.parametrize(("rate", "feasible"), [(50.0, False), (1e-12, True)])
def test_nothing_is_simulated_without_a_strategy_or_where_requests_never_meet(rate: float, feasible: bool) -> None:
    plan = make_plan(NOMINAL, 20.0, request=PlanRequest(rate=rate))
    assert plan.checked is None
    assert plan.feasible is feasible


def test_a_plan_at_the_edge_says_how_to_leave_it() -> None:
    """T_cut is the largest that meets 20 ms, so no simulation can tell; the one that it names is sure."""
    plan = checked(NOMINAL, 20.0, 0.4)
    assert plan.promise == "in doubt"
    way_out = next(reason for reason in plan.why_in_doubt if "at the edge" in reason)
    found = re.search(r"T_cut ([\d.]+) ms keeps 2 %.* --sla 19\.6ms", way_out)
    assert found is not None
    amx, gpu = table_path("amx", [2.0], exponential=True), linear_path("gpu", 12, 0.05, 64)
    surer = check(cutoff(float(found[1]), Limits(64, 1)), System(gpu, amx), 0.4, 99.0, 20.0)
    assert surer.holds is True
    assert make_plan(NOMINAL, 19.6, request=PlanRequest(rate=0.4)).feasible


class TestSteadyService:
    """A CPU that takes 2 ms every time queues less than an exponential one of that mean."""

    gpu = nominal_path("gpu", parse_nominal("launch=12ms,slope=0.05ms,max_batch=64"))
    profile = HardwareProfile({**machine(cpu=line(0.01, 1.99, domain=SMALL, intervals=STEADY)).paths, "gpu": gpu})
    system = System(linear_path("gpu", 12, 0.05, 64), table_path("cpu", [2.0]))

    def late(self, rate: float, cutoff_ms: float) -> tuple[float, float]:
        """95 % interval of the 99th percentile of a service of exactly 2 ms, event by event."""
        found = check(cutoff(cutoff_ms, Limits(64, 1)), self.system, rate, 99.0, 20.0, Options(seed=5, replications=8))
        return found.percentile.low, found.percentile.high

    def test_a_cutoff_that_the_exponential_law_denies(self) -> None:
        assert not feasible_cutoffs(0.48, measured_times(12 + 0.05 * np.arange(1.0, 65)), 0.5, 20.0).ranges
        plan = make_plan(self.profile, 20.0, request=PlanRequest(rate=0.48))
        assert isinstance(plan.T_cut, Cutoff)
        assert (plan.feasible, plan.T_cut.bound) == (True, "simulated")
        assert plan.T_cut.value is not None
        assert plan.T_cut.ranges["simulated"][-1][1] == plan.T_cut.value
        assert self.late(0.48, plan.T_cut.value)[0] <= 20.0
        assert self.late(0.48, 1.1 * plan.T_cut.value)[0] > 20.0

    def test_nothing_is_called_proved_of_a_measured_cpu(self) -> None:
        plan = make_plan(self.profile, 20.0, request=PlanRequest(rate=0.3))
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
        wild = noise_of(np.repeat([0.5, 5.5], [1800, 200]), np.ones(2000))
        cpu = line(0.01, 1.99, domain=SMALL, intervals={"ratios": wild.to_json()})
        profile = HardwareProfile({**machine(cpu=cpu).paths, "gpu": self.gpu})
        plan = make_plan(profile, 30.0, request=PlanRequest(rate=0.2))
        assert isinstance(plan.T_cut, Cutoff)
        assert plan.T_cut.bound == "simulated"
        assert plan.T_cut.service["cv"] == pytest.approx(1.5, abs=0.01)
        assert plan.T_cut.value is not None
        system = System(linear_path("gpu", 12, 0.05, 64), table_path("cpu", [2.0], noise=wild))
        found = check(cutoff(plan.T_cut.value, Limits(64, 1)), system, 0.2, 99.0, 30.0, Options(seed=3, replications=8))
        assert found.percentile.low <= 30.0
