"""Plans for a rate: published capacities and replicas, rules against the optimum, changes, promises and refusals."""

from functools import cache

import numpy as np
import pytest
from msgspec.structs import replace
from scipy.stats import norm

from latfit.hardware import HardwareProfile, nominal_path, parse_nominal
from latfit.model.step_noise import StepNoise, noise_of
from latfit.planning.load.capacity import confirm_end, is_surely_met, likely_cutoffs
from latfit.planning.load.strategies import Machine, Target, machine_of
from latfit.planning.plan import make_plan
from latfit.planning.request import PlanOptions
from latfit.planning.result import Capacity, Kind, Plan, Strategy
from latfit.planning.wording import capacity_line
from latfit.queueing import (
    USUAL,
    Effort,
    ResponseDistribution,
    ServiceTimes,
    linear_times,
    simulate_batches as batch_queue,
)
from tests.conftest import REFERENCE
from tests.unit.planning.test_plan import fit_with, line, machine

SIXTY_FOUR = {"B": [1, 64], "S": [1, 4096]}
GPU = machine(gpu=line(4, 0.1, domain=SIXTY_FOUR))


@cache
def two_a_ms() -> Plan:
    return make_plan(GPU, 15.0, request=PlanOptions(rate=2.0))


@cache
def falling() -> Plan:
    return make_plan(TestFallingTimes.profile, 60.0, request=PlanOptions(rate=3.0))


def capacity(plan: Plan) -> Capacity:
    assert isinstance(plan.capacity, Capacity)
    return plan.capacity


@pytest.mark.parametrize(("sla", "replicas"), [(13.0, 6), pytest.param(15.0, 5, marks=pytest.mark.nightly)])
def test_published_replicas(sla: float, replicas: int) -> None:
    """theory J: 20 per ms on T = 4 + 0.1 b, at most 64: p99 12.9579 on 6 and 14.5228 on 5 machines."""
    refused = make_plan(GPU, sla, request=PlanOptions(rate=20.0))
    assert not refused.feasible
    assert f"--replicas {replicas}" in refused.remedy
    plan = make_plan(GPU, sla, request=PlanOptions(rate=20.0, replicas=replicas))
    assert plan.feasible
    assert capacity(plan).replicas == replicas
    chosen = next(row for row in plan.strategies if row.chosen)
    assert chosen.percentile_ms == pytest.approx({6: 12.9579, 5: 14.5228}[replicas], rel=1e-3)


def test_published_rate_of_one_at_a_time() -> None:
    """theory J: M/M/1 with mu = 0.5 per ms keeps 20 ms up to 0.269741 per ms."""
    plan = make_plan(machine(amx=line(0, 2)), 20.0, request=PlanOptions(rate=0.1))
    row = next(row for row in plan.strategies if row.name == "amx, one at a time")
    assert row.sustainable_per_s == pytest.approx(269.741, rel=0.02)
    assert row.percentile_ms == pytest.approx(np.log(100) / 0.4, rel=0.01)


def test_the_sustainable_rate_keeps_the_sla_and_a_little_more_does_not() -> None:
    plan = two_a_ms()
    highest = capacity(plan).sustainable_per_s
    assert highest is not None
    times = linear_times(4, 0.1, 64)
    assert batch_queue(highest / 1e3, times).percentile(0.99) <= 15.0
    assert batch_queue(1.02 * highest / 1e3, times).percentile(0.99) > 15.0
    assert capacity(plan).headroom == pytest.approx(highest / 2000 - 1)


def test_steps_without_noise_last_their_mean_time() -> None:
    """Lognormal ratios of sigma 0.5 have the mean exp(1/8), of every batch."""
    fit = line(4, 0.1, domain=SIXTY_FOUR, intervals={"ratios": scattered(0.5, 2000).to_json()})
    times = machine_of(machine(gpu=fit), 1, PlanOptions(laws_only=True)).main.times
    assert times.mean_ms[[0, 7, 63]] == pytest.approx(np.exp(1 / 8) * np.array([4.1, 4.8, 10.4]), rel=5e-3)


def test_cutoffs_to_try_leave_time_for_the_batch_that_gathers() -> None:
    """2 per ms on T = 4 + 0.1 b within 14 ms: 9.9 ms of waiting gather 19.8 requests, at 2.5 sigma 30, and one."""
    largest = 14.0 - (4 + 0.1 * 31)
    expected = [largest, 0.97 * largest, 0.92 * largest, 1.4, 4.2]
    tried = likely_cutoffs(machine_of(GPU, 1, PlanOptions()), 2.0, Target(14.0, 0.99, 1))
    assert list(tried) == pytest.approx(expected)


def test_a_rate_is_lowered_to_what_long_runs_confirm() -> None:
    """Long runs are overloaded from 0.9 on; the range of the short ones ends at 1."""
    law = batch_queue(1.0, linear_times(4, 0.1, 64), effort=Effort(20, 2_000, 2_000))
    end_ms = law.percentile_interval(0.99)[1]
    assert is_surely_met(law, Target(end_ms, 0.99, 1))
    assert not is_surely_met(law, Target(0.9999 * end_ms, 0.99, 1))
    assert law.percentile_interval(0.99)[0] < 0.999 * end_ms

    class Stub(Machine):
        def simulate(self, strategy: Strategy, rate: float, effort: Effort = USUAL) -> ResponseDistribution | None:
            return law if rate < 0.9 else None

    greedy, target = Strategy(Kind.GREEDY, ("gpu",)), Target(15.0, 0.99, 1)
    rate, _ = confirm_end(Stub(None, None), greedy, target, (0.5, 1.0))
    assert 0.99 * 0.9 <= rate < 0.9
    assert confirm_end(Stub(None, None), greedy, target, (0.95, 1.0))[0] == 0.95


def test_unstable_load_says_what_it_takes() -> None:
    plan = make_plan(GPU, 13.0, request=PlanOptions(rate=100.0))
    assert not plan.feasible
    assert plan.promise == "misses"
    assert "unstable" in plan.strategies[0].verdict
    assert "--replicas" in plan.remedy


def test_price_follows_the_machines() -> None:
    priced = machine(gpu=line(4, 0.1, domain=SIXTY_FOUR))
    priced = priced.with_path(replace(priced.paths["gpu"], price_per_hour=3.0))
    found = capacity(make_plan(priced, 13.0, request=PlanOptions(rate=20.0, replicas=6)))
    assert found.price_per_hour == pytest.approx(18.0)
    assert found.price_per_million == pytest.approx(18.0 / (20_000 * 3600) * 1e6)


def draws(slope: float, spread: float) -> dict[str, object]:
    """Parameter vectors of T = tau + slope B: tau 4, the slope lognormal."""
    rng = np.random.default_rng(0)
    rows = [[4.0, slope * f] for f in np.exp(rng.normal(0, spread, 200))]
    return {"parameters": ["tau_0", "tau_B"], "values": rows}


def scattered(sigma: float, steps: int) -> StepNoise:
    """Quantiles of a lognormal law of median 1, as so many steps would show them."""
    shares = (np.arange(steps) + 0.5) / steps
    return noise_of(np.exp(sigma * norm.ppf(shares)), np.ones(steps))


class TestDoubt:
    def test_a_sure_fit_promises(self) -> None:
        known = {"ratios": scattered(0.001, 1000).to_json()}
        fit = line(4, 0.1, domain=SIXTY_FOUR, draws=draws(0.1, 0.01), intervals=known)
        plan = make_plan(machine(gpu=fit), 15.0, request=PlanOptions(rate=2.0))
        assert plan.promise == "meets"
        assert "steps that scatter as measured" in " ".join(plan.notes)
        assert "take their mean time" not in " ".join(plan.notes)
        low, high = plan.interval_ms or (None, None)
        assert low is not None
        assert high is not None
        chosen = next(row for row in plan.strategies if row.chosen)
        assert chosen.percentile_ms is not None
        assert low <= chosen.percentile_ms <= high <= 15.0

    def test_an_unsure_one_names_what_to_measure(self) -> None:
        plan = make_plan(
            machine(gpu=line(4, 0.1, domain=SIXTY_FOUR, draws=draws(0.1, 0.5))), 11.0, request=PlanOptions(rate=2.0)
        )
        assert plan.feasible
        assert plan.promise == "likely"
        (told,) = [text for text in plan.why_in_doubt if "the limit 11 ms" in text]
        assert "measure these points: B=" in told
        assert "Likely met" in plan.answer

    def test_a_fit_that_kept_no_ratios_promises_nothing(self) -> None:
        plan = make_plan(machine(gpu=line(4, 0.1, domain=SIXTY_FOUR)), 15.0, request=PlanOptions(rate=2.0))
        assert (plan.feasible, plan.promise) == (True, "likely")
        assert any("noise of steps on gpu is not known" in note for note in plan.why_in_doubt)
        assert "steps on gpu take their mean time" in " ".join(plan.notes)

    def test_a_tail_that_nobody_saw_is_not_promised(self) -> None:
        """60 independent steps tell a 95th percentile and no 99th."""
        few = {"ratios": scattered(0.05, 60).to_json()}
        profile = machine(gpu=line(4, 0.1, domain=SIXTY_FOUR, intervals=few))
        at_99, at_95 = (make_plan(profile, 30.0, percentile=p, request=PlanOptions(rate=1.0)) for p in (99.0, 95.0))
        assert (at_99.promise, at_95.promise) == ("likely", "meets")
        assert any("60 independent decode steps on gpu, 100 needed" in x for x in at_99.why_in_doubt)

    def test_a_tail_that_decides_is_told(self) -> None:
        stalls = np.where(np.arange(5_000) % 170 == 0, 50.0, 1.0)
        law = noise_of(stalls, np.ones(5_000))
        profile = machine(gpu=line(1.5, 0.5, domain=SIXTY_FOUR, intervals={"ratios": law.to_json()}))
        plan = make_plan(profile, 1000.0, request=PlanOptions(rate=0.3))
        assert any("slowest 1 % of the measured steps (50 of 5,000, up to 50 times" in w.message for w in plan.warnings)
        calm = machine(gpu=line(1.5, 0.5, domain=SIXTY_FOUR, intervals={"ratios": scattered(0.03, 5_000).to_json()}))
        assert not any(
            "slowest 1 %" in w.message for w in make_plan(calm, 1000.0, request=PlanOptions(rate=0.3)).warnings
        )

    def test_what_is_promised_of_a_load_keeps_the_slow_end(self) -> None:
        few = {"ratios": scattered(0.5, 400).to_json()}
        plan = make_plan(
            machine(gpu=line(4, 0.1, domain=SIXTY_FOUR, intervals=few)), 40.0, request=PlanOptions(rate=1.0)
        )
        found = capacity(plan)
        assert found.sustainable_per_s is not None
        assert found.promised_per_s is not None
        assert found.promised_per_s < found.sustainable_per_s
        again = make_plan(
            machine(gpu=line(4, 0.1, domain=SIXTY_FOUR, intervals=few)), 40.0,
            request=PlanOptions(rate=0.95 * found.promised_per_s / 1e3),
        )  # fmt: skip
        assert again.promise == "meets"


class TestFallingTimes:
    """Decode steps of a saturation model fall from 377 ms for one request to 8.5 ms for 32: more load, quicker
    steps."""

    profile = machine(gpu=fit_with(REFERENCE.tolist(), domain={"B": [1, 32], "S": [1, 32]}))

    def test_both_ends_of_the_rates_are_the_queues(self) -> None:
        plan = falling()
        row = next(row for row in plan.strategies if row.name == "gpu, greedy batches")
        fit = self.profile.paths["gpu"].fit
        b = np.arange(1.0, 33)
        times = ServiceTimes(fit.latency_ms(b, b))
        (low, high) = row.feasible_per_s[-1]
        assert low > 0
        for rate, meets in ((low * 0.9, False), (low * 1.1, True), (high * 0.99, True)):
            assert (batch_queue(rate / 1e3, times).percentile(0.99) <= 60.0) is meets
        assert "the SLA is missed below" in plan.binding

    def test_too_little_load_is_refused_as_well(self) -> None:
        plan = make_plan(self.profile, 60.0, request=PlanOptions(rate=0.05))
        assert not plan.feasible
        assert "fewer machines" in plan.remedy
        # spread over more machines the load of each is lower still
        assert isinstance(plan.capacity, Capacity)
        assert plan.capacity.replicas is None
        assert "No number of replicas" in capacity_line(plan.capacity)
        assert plan.sensitivity[0].replicas is None

    def test_an_sla_just_above_a_request_alone_leaves_no_room(self) -> None:
        """Thousands of replicas that idle would be needed."""
        profile = HardwareProfile({"gpu": nominal_path("gpu", parse_nominal("launch=8ms,slope=0.05ms"))})
        plan = make_plan(profile, 8.051, request=PlanOptions(rate=1.0))
        assert not plan.feasible
        assert plan.capacity is not None
        assert plan.capacity.replicas is None
        assert "leaves no room for other requests: one alone takes 8.05 ms" in plan.binding
        assert "replicas do not help" in plan.remedy
