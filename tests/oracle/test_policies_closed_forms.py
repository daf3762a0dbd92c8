"""Simulated queues against closed forms and published values, within their own standard errors."""

import math

import numpy as np
import pytest

from latfit.model.step_noise import noise_of
from latfit.policies import policy as policies
from latfit.policies.policy import Limits, Policy
from latfit.simulation.policies.replication import draw, run
from latfit.simulation.policies.run import Options, simulate
from latfit.simulation.policies.service import System, linear_path, table_path
from latfit.workload.arrivals import Piecewise, Poisson
from latfit.workload.load import ClosedLoad, Load, OpenLoad, Streams

OPTIONS = Options(requests=30_000, replications=30)
ONE = Limits(1)


def check(policy: Policy, system: System, load: Load, expected: dict[str, float], options: Options = OPTIONS) -> None:
    """With 30 replications half a 99.99 % interval is 4.5 standard errors."""
    result = simulate(policy, system, load, options)
    for name, value in expected.items():
        found = result.latency[name]
        error = (found.high - found.low) / 2 / 2.045
        assert abs(found.value - value) <= 4.5 * error + 1e-9, (name, found, value)


class TestOneAtATime:
    def test_mm1(self) -> None:
        """lambda .3, mu .5: mean 1/(mu - lambda), percentiles -ln(1 - p)/(mu - lambda)."""
        system = System(table_path("cpu", [2.0], exponential=True))
        expected = {"mean": 5.0, "p50": 3.46574, "p90": math.log(10) / 0.2, "p99": 23.0259}
        check(policies.gpu_only(ONE), system, OpenLoad(Poisson(0.3)), expected)

    def test_mmc(self) -> None:
        """Ten servers of mu .5 at lambda 4: mean 2.40918, p99 9.89222."""
        system = System(table_path("cpu", [2.0], exponential=True, servers=10))
        check(policies.gpu_only(ONE), system, OpenLoad(Poisson(4.0)), {"mean": 2.40918, "p99": 9.89222})

    def test_md1(self) -> None:
        """rho .8, D 1: wait 2 on average and 10.3559 at the 99th percentile."""
        check(
            policies.gpu_only(ONE),
            System(table_path("cpu", [1.0])),
            OpenLoad(Poisson(0.8)),
            {"mean": 3, "p99": 11.3559},
        )

    def test_mg1_of_measured_ratios(self) -> None:
        """Pollaczek and Khinchine, for one service in ten that takes ten times as long: E S = 1, E S^2 = 10.9/3.61."""
        ratios = noise_of(np.array([1.0, 10.0]) / 1.9, np.array([9.0, 1.0]))
        system = System(table_path("cpu", [1.0], noise=ratios))
        wait = 0.7 * (0.9 + 10) / 1.9**2 / (2 * (1 - 0.7))
        check(policies.gpu_only(ONE), system, OpenLoad(Poisson(0.7)), {"mean": 1 + wait})

    def test_closed_loop(self) -> None:
        """Machine repair: N users with exponential thinking and one exponential server, by mean value analysis."""
        think, service, users = 10.0, 2.0, 8
        queue = 0.0
        for n in range(1, users + 1):
            response = service * (1 + queue)
            queue = n / (think + response) * response
        system = System(table_path("cpu", [service], exponential=True))
        check(policies.gpu_only(ONE), system, ClosedLoad(users, think), {"mean": response})
        found = simulate(policies.gpu_only(ONE), system, ClosedLoad(users, think), Options(100_000, replications=1))
        assert found.throughput_per_s == pytest.approx(1000 * users / (think + response), rel=0.01)


class TestBatchService:
    @pytest.mark.parametrize(
        ("rate", "mean", "p50", "p99"),
        [(0.1, 4.90124, 4.1, 8.14107), (0.5, 6.29874, 6.30152, 8.63003), (2, 7.61457, 7.59999, 10.5834)],
    )
    def test_greedy_without_a_limit(self, rate: float, mean: float, p50: float, p99: float) -> None:
        system = System(linear_path("gpu", 4, 0.1, 400))
        expected = {"mean": mean, "p50": p50, "p99": p99}
        check(policies.gpu_only(Limits(400)), system, OpenLoad(Poisson(rate)), expected)

    @pytest.mark.parametrize(
        ("rate", "largest", "mean", "p50", "p99"),
        [(2, 16, 7.64882, 7.63136, 10.7977), (4, 32, 10.4265, 10.3582, 16.0343)],
    )
    def test_greedy_with_a_limit(self, rate: float, largest: int, mean: float, p50: float, p99: float) -> None:
        system = System(linear_path("gpu", 4, 0.1, largest))
        expected = {"mean": mean, "p50": p50, "p99": p99}
        check(policies.gpu_only(Limits(largest)), system, OpenLoad(Poisson(rate)), expected)

    def test_fixed_batches_are_slow_at_low_load(self) -> None:
        system = System(linear_path("gpu", 8, 0.05, 32))
        check(policies.fixed(32, Limits(32)), system, OpenLoad(Poisson(0.1)), {"mean": 164.6})

    @pytest.mark.parametrize(("rule", "mean"), [("literal", 1.00339), ("amortised", 1.0), ("total delay", 1.01514)])
    def test_marginal_cost_rules(self, rule: str, mean: float) -> None:
        """Excess over the optimum 12.2998 at lambda .5, T = 8 + .05 b."""
        system = System(linear_path("gpu", 8, 0.05, 64))
        policy = policies.marginal_cost(0.5, Limits(64), rule)
        check(policy, system, OpenLoad(Poisson(0.5)), {"mean": 12.2998 * mean})


class TestTwoPaths:
    """Published rows of the exact law of a queue whose overflow stays on the side path (matrix method), for T = 8 +
    .05 b up to 256."""

    @staticmethod
    def of(rate: float, service_rate: float, cutoff: float) -> tuple[Policy, System, OpenLoad]:
        amx = table_path("amx", [1 / service_rate], exponential=True)
        policy = policies.cutoff(cutoff, Limits(256, 1))
        return policy, System(linear_path("gpu", 8, 0.05, 256), amx), OpenLoad(Poisson(rate))

    @pytest.mark.parametrize(
        ("rate", "service_rate", "cutoff", "overflow", "p99"),
        [(0.5, 2, 2, 0.689265, 10.0120), (2, 2, 3, 0.638464, 11.3286)],
    )
    def test_a_side_path_that_keeps_up(
        self, rate: float, service_rate: float, cutoff: float, overflow: float, p99: float
    ) -> None:
        """The AMX ends next to all overflow sooner than the GPU would, so next to nothing stays on the GPU."""
        policy, system, load = self.of(rate, service_rate, cutoff)
        check(policy, system, load, {"p99": p99})
        shares = [
            simulate(policy, system, load, Options(30_000, replications=1, seed=seed)).share["amx"]
            for seed in range(12)
        ]
        assert abs(np.mean(shares) - overflow) <= 4.4 * np.std(shares, ddof=1) / math.sqrt(12)

    @pytest.mark.parametrize(
        ("rate", "cutoff", "p99"),
        [(0.2, 2, 12.9053), (0.4, 2, 20.8056), (0.4, 5, 15.9662), (0.6, 5, 19.3290), (1, 5, 40.3401), (1, 7, 16.3435)],
    )
    def test_a_side_path_that_falls_behind(self, rate: float, cutoff: float, p99: float) -> None:
        """Requests that would end sooner on the GPU stay there: the law is an upper bound."""
        found = simulate(*self.of(rate, 0.5, cutoff), OPTIONS).latency["p99"]
        assert found.high <= p99


def test_overload_that_passes() -> None:
    """lambda(t) = 6 + 4 sin(2 pi t/1000) against a server of 8/ms: the fluid backlog peaks at 435.991 at t = 416.667:
    who arrives there waits 54.4989 ms. A time scale twenty times as long makes the noise of arrivals small."""
    grid = np.linspace(0, 1000, 2001)
    scale = 20.0
    law = Piecewise((grid * scale).tolist(), (6 + 4 * np.sin(2 * np.pi * grid / 1000)).tolist())
    system = System(table_path("gpu", [1 / 8]))
    peaks = []
    for seed in range(16):
        streams = Streams(seed)
        served = run(policies.gpu_only(ONE), system, draw(OpenLoad(law), 200_000, 0.0, system, streams), streams)
        near = np.abs(served.arrive_ms - 416.667 * scale) < 20
        peaks.append(float(served.response_ms[near].mean()) / scale)
    found = np.array(peaks)
    assert abs(found.mean() - 54.4989) <= 4.5 * found.std(ddof=1) / 4 + 0.1
