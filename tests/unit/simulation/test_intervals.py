"""Intervals of simulations hold what they should near saturation, too: against processes and queues whose law is known.

The whole table of loads and queues is `python -m benchmarks.simulated_intervals`.
"""

import math

import numpy as np
import pytest
from msgspec import structs

from latfit.policies import policy as policies
from latfit.policies.policy import Limits
from latfit.queueing.sampled import Effort, simulate_batches
from latfit.queueing.service import linear_times
from latfit.simulation.policies.estimate import (
    LONGEST,
    MANY,
    BatchErrors,
    Length,
    Summary,
    divided,
    grows,
    interval,
    longer,
    paired,
    reach_in,
    wanted,
)
from latfit.simulation.policies.run import Options, compared, one_replication, simulate
from latfit.simulation.policies.service import System, linear_path, table_path
from latfit.stats import FloatArray
from latfit.workload.arrivals import Piecewise, Poisson, bursts
from latfit.workload.load import OpenLoad, RecordedLoad
from latfit.workload.requests import make_requests
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

    def test_independent_requests_have_no_reach(self) -> None:
        rng = np.random.default_rng(3)
        assert [reach_in(rng.exponential(1.0, 40_000)) for _ in range(5)] == [0.0] * 5

    @pytest.mark.parametrize(("phi", "n"), [(0.0, 5000), (0.9, 100_000), (0.98, 400_000)])
    def test_standard_error(self, phi: float, n: int) -> None:
        """The mean of n has variance (1 + phi)/(1 - phi)/n for n much longer than the correlation."""
        found = [errors_of(autoregressive(phi, n, seed)) for seed in range(10)]
        truth = math.sqrt((1 + phi) / (1 - phi) / n)
        # Each from 20 batches or more: 16 % of it, of ten together 5 %.
        assert np.mean([each.standard_error()[0] for each in found]) == pytest.approx(truth, rel=0.17)
        assert all(each.standard_error()[1] >= 20 and each.needed <= n for each in found)

    def test_too_short_for_the_correlation(self) -> None:
        assert 20_000 < errors_of(autoregressive(0.99, 20_000, 0)).needed < 1_000_000

    def test_too_few_beyond_a_percentile(self) -> None:
        """100 in each of 20 batches at least."""
        found = errors_of(autoregressive(0.0, 10_000, 0))
        assert structs.replace(found, beyond=1999.0).standard_error()[1] == 0
        assert structs.replace(found, beyond=2000.0).standard_error()[1] == 20
        assert structs.replace(found, beyond=1000.0).needed == 20_000

    def test_equal_batches_are_paired(self) -> None:
        """A constant factor of 1.1 between the two: their difference is a tenth of the series."""
        series = autoregressive(0.5, 50_000, 0)
        one, other = ((float(each.mean()), errors_of(each)) for each in (series, 1.1 * series))
        gap = paired(one, other)
        assert gap.high - gap.value == pytest.approx(0.1 * (paired((0.0, errors_of(0 * series)), one).high - one[0]))
        apart = paired(one, (other[0], structs.replace(other[1], length=(1, 0, 1))))
        assert apart.high - apart.low > 5 * (gap.high - gap.low)
        again = BatchErrors.from_json(one[1].to_json())
        assert (again.errors, again.length) == (one[1].errors, one[1].length)
        assert math.isnan(again.beyond)


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
                assert each.trusted
                held[name] += each.low <= truth[name] <= each.high
        assert min(held.values()) >= least
        # 2.5 % of them may be confirmed; three of 24 are not that.
        assert denied >= seeds - 2
        assert abs(np.mean(ratios) - 1) < 4 * np.std(ratios, ddof=1) / math.sqrt(seeds)

    def test_batches_near_saturation(self) -> None:
        """Greedy batches of up to 64 at .95 of what they can carry, T = 8 + .05 b, by the exact law."""
        rate = 0.95 * 64 / (8 + 0.05 * 64)
        law = simulate_batches(rate, linear_times(8, 0.05, 64), effort=Effort(20, 400_000, 400_000))
        truth, held, confirmed = {"mean": law.mean_ms, "p99": law.percentile(0.99)}, {"mean": 0, "p99": 0}, 0
        system, policy = System(linear_path("gpu", 8, 0.05, 64)), policies.gpu_only(Limits(64))
        for seed in range(12):
            found = check(policy, system, rate, 99.0, 0.95 * truth["p99"], Options(seed=seed))
            confirmed += found.holds is True
            for name in truth:
                each = found.result.latency[name]
                held[name] += each.low <= truth[name] <= each.high
        assert min(held.values()) >= 8
        assert confirmed <= 2

    def test_percentiles_are_not_averages_of_percentiles(self) -> None:
        """M/M/1 at .95, 5 runs of 50,000: averaged over runs p99 is 7.6 % too low, together it is not."""
        truth = math.log(100) / 0.05
        together: list[float] = []
        apart: list[float] = []
        for seed in range(30):
            result = simulate(ONE, MM1, OpenLoad(Poisson(0.95)), Options(50_000, seed=seed))
            together.append(result.latency["p99"].value / truth - 1)
            apart.append(float(np.mean([each.whole[3] for each in result.summaries])) / truth - 1)
        mean, error = float(np.mean(together)), float(np.std(together, ddof=1)) / math.sqrt(30)
        assert abs(mean) < 4 * error
        assert np.mean(apart) < min(-0.03, mean - 2 * error)


class TestLength:
    def test_it_follows_percentiles_and_correlation(self) -> None:
        assert wanted((0.999,), 0.0) == pytest.approx(2_200_000)
        assert wanted((0.001,), 0.0) == pytest.approx(2_200_000)
        assert wanted((0.5,), 1000.0) == 9_600_000

    def test_division(self) -> None:
        easy = divided(400_000, 5, 0.0)
        assert (easy.requests, easy.warm, easy.replications) == (100_000, 0, 5)
        hard = divided(50_000_000, 5, None)
        assert hard.requests - hard.warm <= LONGEST + 1
        assert hard.in_all - hard.warm * hard.replications == pytest.approx(64_000_000, rel=1e-4)
        assert divided(500_000, 5, 0.5) == Length(200_000, 100_000, 5)

    @pytest.mark.parametrize("load", [0.5, 0.9])
    def test_a_harder_load_runs_longer(self, load: float) -> None:
        """M/M/1 forgets in about (1 + rho)/(1 - rho)^2 services."""
        result = simulate(ONE, MM1, OpenLoad(Poisson(load)), Options(seed=3))
        time = (1 + load) / (1 - load) ** 2
        assert result.requests >= max(MANY, 2000 * time)
        assert result.summaries[0].length.warm >= 5 * time
        assert result.notes == []

    def test_bursts_run_longer(self) -> None:
        """At load .25, with bursts of 500 services in which the queue grows."""
        calm = simulate(ONE, MM1, OpenLoad(Poisson(0.25)), Options())
        rough = simulate(ONE, MM1, OpenLoad(bursts(0.25, 5.0, 0.1, 500.0)), Options())
        assert calm.requests < 600_000
        assert rough.requests > 4 * calm.requests
        assert rough.latency["p99"].trusted

    def test_runs_that_were_too_short_are_made_longer(self) -> None:
        at = Length(20_000, 400, 5)
        summaries = [one_replication(ONE, MM1, OpenLoad(Poisson(0.95)), Options(), at, r) for r in range(5)]
        more = longer(summaries, at, None)
        assert more is not None
        assert more.in_all - 5 * more.warm >= 8 * (100_000 - 5 * 400)
        assert more.warm > 1000

    def test_the_same_whatever_the_threads(self) -> None:
        load, options = OpenLoad(Poisson(0.8)), Options(seed=2, precision=0.03)
        one, many = (simulate(ONE, MM1, load, options, threads=threads) for threads in (1, 4))
        assert one.latency == many.latency
        assert one.to_json() == many.to_json()

    def test_progress_reaches_its_end(self) -> None:
        seen: list[float] = []
        simulate(ONE, MM1, OpenLoad(Poisson(0.5)), Options(), threads=2, progress=seen.append)
        assert seen == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


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
    def test_a_rare_percentile_of_a_short_run(self) -> None:
        """p99.9 takes 20 batches with 100 beyond it: 2,000,000 requests."""
        options = Options(50_000, percentiles=(0.5, 0.99, 0.999), statistic="p99.9")
        result = simulate(ONE, MM1, OpenLoad(Poisson(0.3)), options)
        rare = result.latency["p99.9"]
        assert math.isnan(rare.low)
        assert math.isnan(rare.high)
        assert rare.value == pytest.approx(math.log(1000) / 0.7, rel=0.2)
        assert any("p99.9: no confidence interval" in note and "2,000,000 needed" in note for note in result.notes)
        assert result.latency["p99"].trusted

    def test_a_check_is_not_confirmed_by_it(self) -> None:
        found = check(ONE, MM1, 0.3, 99.9, 1000.0, Options(50_000))
        assert found.holds is None
        assert check(ONE, MM1, 0.3, 99.9, 1000.0, Options()).holds is True
        assert check(ONE, MM1, 0.3, 99.9, 1.0, Options()).holds is False

    def test_runs_too_short_for_the_load(self) -> None:
        result = simulate(ONE, MM1, OpenLoad(Poisson(0.97)), Options(100_000))
        found = result.latency["p99"]
        assert not found.trusted
        assert found.needed > result.requests
        assert any("Leave out --requests" in note for note in result.notes)
        assert check(ONE, MM1, 0.97, 99.0, 10_000.0, Options(100_000)).holds is None
        document = result.to_json()
        assert document["trusted"]["p99"] is False
        assert set(document["batches"]) == set(document["trusted"]) == {"mean", "p50", "p90", "p99"}

    def test_without_a_warm_up_long_runs_forget_their_start(self) -> None:
        long = simulate(ONE, MM1, OpenLoad(Poisson(0.5)), Options(200_000, warmup=0.0))
        assert long.latency["mean"].trusted
        assert long.to_json()["warmup_requests"] == 0
        many = simulate(ONE, MM1, OpenLoad(Poisson(0.9)), Options(10_000, warmup=0.0, replications=150))
        assert not many.latency["mean"].trusted
        assert any("warm-up takes too much" in note for note in many.notes)

    def test_a_load_that_varies_takes_replications(self) -> None:
        """The mean of a day is one number a replication; five of them are few."""
        day = OpenLoad(Piecewise([0.0, 5000.0, 10_000.0], [0.2, 0.8, 0.2], repeats=True))
        few = simulate(ONE, MM1, day, Options(20_000))
        assert any("20 --replications" in note for note in few.notes)
        enough = simulate(ONE, MM1, day, Options())
        assert (enough.replications, enough.latency["mean"].batches, enough.notes) == (20, 20, [])

    def test_replications_of_a_log_share_its_arrivals(self) -> None:
        """More replications of one log tell more of its services, nothing of other arrivals."""
        load = RecordedLoad(make_requests(np.cumsum(np.random.default_rng(1).exponential(2.0, 60_000))))
        few, many = (simulate(ONE, MM1, load, Options(replications=r)).latency["mean"] for r in (2, 20))
        assert many.high - many.low > 0.5 * (few.high - few.low)

    def test_a_difference_of_runs_of_other_lengths(self) -> None:
        """M/M/1 at .9 and a service 2 % faster: 10 - 1/(1/.98 - .9), on the same arrivals as far as both go."""
        faster = System(table_path("cpu", [0.98], exponential=True))
        load, truth = OpenLoad(Poisson(0.9)), 1 / (1 / 0.98 - 0.9) - 10
        runs = [
            simulate(ONE, MM1, load, Options(200_000, seed=1)),
            simulate(ONE, faster, load, Options(120_000, seed=1)),
        ]
        gap = compared(*runs)["mean"]
        assert gap.low <= truth <= gap.high
        both = [simulate(ONE, system, load, Options(200_000, seed=1)) for system in (MM1, faster)]
        together, alone = compared(*both)["p99"], interval(both[0].summaries, "p99")
        assert together.low <= math.log(100) * truth <= together.high
        assert together.high - together.low < 0.5 * (alone.high - alone.low)
