"""What a simulation promises of its numbers: intervals that cover, random numbers in common, laws that hold, and loads
that no policy can carry told as such."""

import math
import tracemalloc

import numpy as np
import pytest

from latfit.errors import WrongUsage
from latfit.files import dumps
from latfit.policies import policy as policies
from latfit.policies.policy import Limits, Policy
from latfit.simulation.policies.replication import draw
from latfit.simulation.policies.result import p99_difference
from latfit.simulation.policies.run import Options, simulate
from latfit.simulation.policies.service import System, linear_path, table_path
from latfit.workload.arrivals import Piecewise, Poisson
from latfit.workload.load import ClosedLoad, OpenLoad, RecordedLoad, Streams
from latfit.workload.requests import make_requests

MM1 = System(table_path("cpu", [2.0], exponential=True))
GREEDY = policies.gpu_only(Limits(1))
LOAD = OpenLoad(Poisson(0.3))
GPU = linear_path("gpu", 8, 0.05, 64)
AMX = table_path("amx", [2.0], exponential=True)


class TestIntervals:
    def test_stop_when_precise(self) -> None:
        options = Options(20_000, replications=2, precision=0.02, most_replications=300)
        result = simulate(GREEDY, MM1, LOAD, options)
        assert result.latency["p99"].relative_half_width <= 0.02
        assert 2 < result.replications < 300
        coarse = simulate(GREEDY, MM1, LOAD, Options(20_000, replications=2, precision=0.2))
        assert coarse.replications < result.replications

    def test_the_same_again(self) -> None:
        first, again = (dumps(simulate(GREEDY, MM1, LOAD, Options(5000)).to_json()) for _ in range(2))
        assert first == again

    def test_a_log_on_certain_times_is_run_once(self) -> None:
        load = RecordedLoad(make_requests(np.cumsum(np.random.default_rng(1).exponential(4.0, 20_000))))
        result = simulate(GREEDY, System(table_path("cpu", [2.0])), load, Options(20_000))
        assert (result.replications, result.requests) == (1, 20_000)
        # M/D/1 at load .5: 2 + .5 x 2/(2 x .5)
        assert result.latency["mean"].low <= 3.0 <= result.latency["mean"].high


class TestCommonRandomNumbers:
    def test_the_same_arrivals_for_every_policy(self) -> None:
        one, two = System(GPU), System(GPU, AMX)
        drawn = [draw(LOAD, 100, 0.1, system, Streams(3, 1)).arrive for system in (one, two)]
        assert np.array_equal(*drawn)

    def test_the_common_noise_cancels(self) -> None:
        """M/M/1 with a service 1 % slower: p99 rises from 5 ln 100 by (1/(1/2.02 - .3) - 5) ln 100."""
        slower = System(table_path("cpu", [2.02], exponential=True))
        found = [simulate(GREEDY, system, LOAD, Options(200_000)) for system in (MM1, slower)]
        gap, p99 = p99_difference(*found), found[0].latency["p99"]
        assert gap is not None
        assert gap.low <= math.log(100) * (1 / (1 / 2.02 - 0.3) - 5) <= gap.high
        assert gap.high - gap.low < 0.4 * (p99.high - p99.low)


class TestInvariants:
    def test_little(self) -> None:
        """The mean number in system is arrivals per ms times mean response: M/M/1 has rho/(1 - rho) in it."""
        result = simulate(GREEDY, MM1, LOAD, Options(200_000))
        assert result.in_system.mean == pytest.approx(0.3 * result.latency["mean"].value, rel=0.02)
        assert result.in_system.mean == pytest.approx(1.5, rel=0.05)

    def test_memory_is_flat(self) -> None:
        """Ten million requests are to fit into a GiB, so 100 bytes a request; replications do not add up."""
        simulate(GREEDY, MM1, LOAD, Options(1000))
        tracemalloc.start()
        simulate(GREEDY, MM1, LOAD, Options(300_000, replications=4))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 100 * 300_000

    def test_utilisation_and_throughput(self) -> None:
        result = simulate(GREEDY, MM1, LOAD, Options(200_000))
        assert result.utilisation["cpu"] == pytest.approx(0.6, rel=0.02)
        assert result.throughput_per_s == pytest.approx(300, rel=0.02)
        assert result.share == {"cpu": 1.0}
        assert result.batch_size == {"p50": 1, "p90": 1, "p99": 1}

    def test_attainment(self) -> None:
        result = simulate(GREEDY, MM1, LOAD, Options(200_000, sla_ms=10.0))
        assert result.slo_attainment == pytest.approx(1 - math.exp(-2), abs=0.01)
        assert simulate(GREEDY, MM1, LOAD, Options(1000)).slo_attainment is None


class TestOverload:
    @pytest.mark.parametrize("policy", [policies.gpu_only(Limits(4)), policies.fixed(4, Limits(4))])
    def test_above_capacity(self, policy: Policy) -> None:
        system = System(linear_path("gpu", 8, 0.5, 4))
        result = simulate(policy, system, OpenLoad(Poisson(0.5)), Options(20_000))
        assert not result.stable
        assert result.capacity_per_s == pytest.approx(400)
        assert "Unstable (ρ ≥ 1)" in result.notes[0]
        # It serves what it can.
        assert result.throughput_per_s == pytest.approx(400, rel=0.02)

    def test_overflow_that_the_side_path_cannot_carry_stays_on_the_main_path(self) -> None:
        """Half of the requests wait longer than T_cut, and the AMX takes 10 ms for each."""
        system, load = System(linear_path("gpu", 8, 0.05, 256), table_path("amx", [10.0])), OpenLoad(Poisson(0.5))
        both = simulate(policies.cutoff(1.0, Limits(256, 1)), system, load, Options(100_000))
        alone = simulate(policies.gpu_only(Limits(256)), system, load, Options(100_000))
        assert both.stable
        for statistic in ("mean", "p99"):
            assert both.latency[statistic].low <= alone.latency[statistic].high

    def test_a_rush_at_the_end_is_not_called_unstable(self) -> None:
        """A load that rises has rising response times; they say nothing of a queue without end."""
        law = Piecewise([0.0, 20_000.0, 20_001.0, 30_000.0], [0.1, 0.1, 0.45, 0.45])
        assert simulate(GREEDY, MM1, OpenLoad(law), Options(20_000)).stable
        arrivals = np.concatenate([np.arange(0.0, 20_000, 10), np.arange(20_000.0, 30_000, 2.1)])
        assert simulate(GREEDY, MM1, RecordedLoad(make_requests(arrivals)), Options(20_000)).stable

    def test_a_closed_loop_is_always_stable(self) -> None:
        assert simulate(GREEDY, MM1, ClosedLoad(50, 1.0), Options(20_000)).stable


class TestBadInput:
    def test_policies_without_the_path_they_need(self) -> None:
        for policy in (
            policies.cutoff(1, Limits(4, 1)),
            policies.three_stage(2, 1, Limits(4, 1)),
            policies.split(Limits(4, 1)),
        ):
            with pytest.raises(WrongUsage, match="two execution paths"):
                simulate(policy, System(GPU), LOAD)

    def test_batches_larger_than_the_path(self) -> None:
        with pytest.raises(WrongUsage, match="batches of up to 65"):
            simulate(policies.gpu_only(Limits(65)), System(GPU), LOAD)

    @pytest.mark.parametrize("times", [[], [1.0, 0.0], [1.0, math.nan]])
    def test_times_that_are_none(self, times: list[float]) -> None:
        with pytest.raises(WrongUsage):
            table_path("gpu", times)

    @pytest.mark.parametrize(
        "options",
        [
            {"requests": 3},
            {"replications": 0},
            {"warmup": 1.0},
            {"precision": 2.0},
        ],
    )
    def test_options(self, options: dict[str, object]) -> None:
        with pytest.raises(WrongUsage):
            Options(**options)  # type: ignore[arg-type]
