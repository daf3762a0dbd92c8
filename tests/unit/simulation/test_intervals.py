"""Intervals of simulations hold what they should near saturation, too: against processes and queues whose law is known.

The whole table of loads and queues is `python -m benchmarks.simulated_intervals`.
"""

import math

import numpy as np
import pytest

from latfit.policies import policy as policies
from latfit.policies.policy import Limits
from latfit.simulation import p99_difference
from latfit.simulation.policies.estimate import BatchErrors, Length, Summary, grows, reach_in
from latfit.simulation.policies.run import Options, one_replication, simulate
from latfit.simulation.policies.service import System, table_path
from latfit.stats import FloatArray, student_quantile
from latfit.workload.arrivals import Piecewise, Poisson
from latfit.workload.load import OpenLoad
from tests.oracle.checked import check

MM1 = System(table_path("cpu", [1.0], exponential=True))
ONE = policies.gpu_only(Limits(1))


def autoregressive(phi: float, n: int, seed: int) -> FloatArray:
    """x_i = phi x_(i-1) + noise, stationary, of variance 1."""
    from scipy.signal import lfilter

    noise = np.random.default_rng(seed).normal(0, math.sqrt(1 - phi**2), n)
    noise[0] /= math.sqrt(1 - phi**2)
    return np.asarray(lfilter([1.0], [1.0, -phi], noise))


def errors_of(series: FloatArray, batches: int = 60) -> BatchErrors:
    """What batches add to the error of the series' mean."""
    deviations = np.array_split((series - series.mean()) / len(series), batches)
    return BatchErrors(
        [float(each.sum()) for each in deviations], len(series), math.nan, (len(series), 0, 1), reach_in(series)
    )


class TestStandardError:
    @pytest.mark.parametrize("phi", [0.9, 0.99])
    def test_reach_of_correlation(self, phi: float) -> None:
        """C = sum k phi^k/(1 + 2 sum phi^k) = phi/(1 - phi^2)."""
        found = [reach_in(autoregressive(phi, 200_000, seed)) for seed in range(12)]
        assert np.mean(found) == pytest.approx(phi / (1 - phi**2), rel=0.35)
        assert max(found) < 2.5 * min(found)

    @pytest.mark.parametrize(("phi", "n"), [(0.0, 5000), (0.9, 100_000), (0.98, 400_000)])
    def test_standard_error(self, phi: float, n: int) -> None:
        """The mean of n has variance (1 + phi)/(1 - phi)/n for n much longer than the correlation."""
        found = [errors_of(autoregressive(phi, n, seed)) for seed in range(10)]
        truth = math.sqrt((1 + phi) / (1 - phi) / n)
        # Each from 20 batches or more: 16 % of it, of ten together 5 %.
        halves = [each.half_width() for each in found]
        errors = [half / student_quantile(batches - 1, 0.975) for half, batches in halves]
        assert np.mean(errors) == pytest.approx(truth, rel=0.17)
        assert all(batches >= 20 for _, batches in halves)
        assert all(each.needed <= n for each in found)


class TestCoverage:
    """Of n intervals at 95 % fewer than the bound hold the truth once in 1,000 times (binomial)."""

    @pytest.mark.parametrize(("load", "seeds", "least"), [(0.8, 24, 19), (0.9, 8, 5)])
    def test_one_at_a_time(self, load: float, seeds: int, least: int) -> None:
        truth = {"mean": 1 / (1 - load), "p90": math.log(10) / (1 - load), "p99": math.log(100) / (1 - load)}
        held, denied = dict.fromkeys(truth, 0), 0
        ratios: list[float] = []
        for seed in range(seeds):
            found = check(ONE, MM1, load, 99.0, 0.95 * truth["p99"], Options(seed=seed))
            denied += found.holds is not True
            ratios.append(found.percentile.value / truth["p99"])
            for name in truth:
                each = found.result.latency[name]
                assert found.result.trusted[name]
                held[name] += each.low <= truth[name] <= each.high
        assert min(held.values()) >= least
        # 2.5 % of them may be confirmed; three of 24 are not that.
        assert denied >= seeds - 2
        assert abs(np.mean(ratios) - 1) < 4 * np.std(ratios, ddof=1) / math.sqrt(seeds)


class TestLength:
    @pytest.mark.parametrize("load", [0.5, 0.9])
    def test_a_harder_load_runs_longer(self, load: float) -> None:
        """M/M/1 forgets in about (1 + rho)/(1 - rho)^2 services."""
        result = simulate(ONE, MM1, OpenLoad(Poisson(load)), Options(seed=3))
        time = (1 + load) / (1 - load) ** 2
        assert result.requests >= max(500_000, 2000 * time)
        assert result.summaries[0].length.warm >= 5 * time
        assert result.notes == []

    def test_the_same_whatever_the_threads(self) -> None:
        load, options = OpenLoad(Poisson(0.8)), Options(seed=2, precision=0.03)
        one, many = (simulate(ONE, MM1, load, options, threads=threads) for threads in (1, 4))
        assert one.latency == many.latency
        assert one.to_json() == many.to_json()


class TestStability:
    def at(self, load: float, requests: int, seed: int) -> list[Summary]:
        length = Length(requests, requests // 50, 5)
        return [one_replication(ONE, MM1, OpenLoad(Poisson(load)), Options(seed=seed), length, r) for r in range(5)]

    @pytest.mark.parametrize("requests", [20_000, 100_000])
    def test_a_stable_queue_does_not_grow(self, requests: int) -> None:
        """At .97 a run of 20,000 is ten relaxation times."""
        assert not any(grows(self.at(0.97, requests, seed)) for seed in range(8))

    def test_an_unstable_one_does(self) -> None:
        assert all(grows(self.at(1.02, 100_000, seed)) for seed in range(8))
        assert all(grows(self.at(1.1, 20_000, seed)) for seed in range(8))


class TestWhatIsNotSure:
    def test_a_rare_percentile_is_not_confirmed_by_a_short_run(self) -> None:
        assert check(ONE, MM1, 0.3, 99.9, 1000.0, Options(50_000)).holds is None
        assert check(ONE, MM1, 0.3, 99.0, 1000.0, Options()).holds is True
        assert check(ONE, MM1, 0.3, 99.0, 1.0, Options()).holds is False

    def test_runs_too_short_for_the_load(self) -> None:
        result = simulate(ONE, MM1, OpenLoad(Poisson(0.97)), Options(100_000))
        assert not result.trusted["p99"]
        assert any("Leave out --requests" in note for note in result.notes)
        assert check(ONE, MM1, 0.97, 99.0, 10_000.0, Options(100_000)).holds is None
        document = result.to_json()
        assert document["trusted"]["p99"] is False
        assert set(document["batches"]) == set(document["trusted"]) == {"mean", "p50", "p90", "p99"}

    def test_a_load_that_varies_takes_replications(self) -> None:
        """The mean of a day is one number a replication; five of them are few."""
        day = OpenLoad(Piecewise([0.0, 5000.0, 10_000.0], [0.2, 0.8, 0.2], repeats=True))
        few = simulate(ONE, MM1, day, Options(20_000))
        assert any("20 --replications" in note for note in few.notes)
        enough = simulate(ONE, MM1, day, Options())
        assert (enough.replications, enough.batches["mean"], enough.notes) == (20, 20, [])

    def test_a_difference_of_runs_of_other_lengths(self) -> None:
        """M/M/1 at .9 and a service 2 % faster: 10 - 1/(1/.98 - .9), on the same arrivals as far as both go."""
        faster = System(table_path("cpu", [0.98], exponential=True))
        load, truth = OpenLoad(Poisson(0.9)), 1 / (1 / 0.98 - 0.9) - 10
        runs = [
            simulate(ONE, MM1, load, Options(200_000, seed=1)),
            simulate(ONE, faster, load, Options(120_000, seed=1)),
        ]
        gap = p99_difference(*runs)
        assert gap is not None
        assert gap.low <= math.log(100) * truth <= gap.high
        together = p99_difference(*(simulate(ONE, each, load, Options(200_000, seed=1)) for each in (MM1, faster)))
        assert together is not None
        assert together.low <= math.log(100) * truth <= together.high
        alone = runs[0].latency["p99"]
        assert together.high - together.low < 0.5 * (alone.high - alone.low)
