"""Closed forms against published values, a birth-death chain, and another derivation; refusals."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.queueing.customary import (
    customary_service_rate,
    customary_slo_share,
    literal_three_stage_gpu_share,
    service_rate_from_median,
)
from latfit.queueing.service import decode_floor_ms, exponential_batch_share, static_batch_share
from latfit.queueing.single_server import erlang_c, kingman_bound, md1, md1_wait, mg1, mm1, mmc


class TestPublished:
    def test_mm1(self) -> None:
        law = mm1(0.3, 0.5)
        assert law.mean_ms == pytest.approx(5)
        assert law.percentile(0.5) == pytest.approx(3.46574, rel=1e-5)
        assert law.percentile(0.99) == pytest.approx(23.0259, rel=1e-5)

    def test_mmc(self) -> None:
        law = mmc(4, 0.5, 10)
        assert erlang_c(10, 8) == pytest.approx(0.409180, rel=1e-5)
        assert law.mean_ms == pytest.approx(2.40918, rel=1e-5)
        assert law.percentile(0.99) == pytest.approx(9.89222, rel=1e-5)

    def test_mg1_by_the_spread_of_its_service(self) -> None:
        waits = [mg1(0.8, 1, 1 + spread).wait_ms for spread in (0, 1, 4)]
        assert waits == pytest.approx([2, 4, 10])

    def test_md1(self) -> None:
        assert md1_wait(0.8, 1).percentile(0.99) == pytest.approx(10.3559, rel=1e-5)
        assert md1(0.8, 1).percentile(0.99) == pytest.approx(11.3559, rel=1e-5)
        bound = kingman_bound(0.8, 1, math.expm1)
        assert bound.decay == pytest.approx(0.430842, rel=1e-5)
        assert bound.percentile(0.99) == pytest.approx(10.6888, rel=1e-5)

    def test_a_median_is_not_a_mean(self) -> None:
        assert service_rate_from_median(2) == pytest.approx(0.346574, rel=1e-5)
        assert 1 / service_rate_from_median(2) == pytest.approx(2.88539, rel=1e-5)
        assert customary_service_rate(2) == 0.5
        assert mm1(0.1, service_rate_from_median(2, rate=0.1)).percentile(0.5) == pytest.approx(2)

    @pytest.mark.parametrize(("rho", "x", "truth", "claim"), [(0.8, 5, 0.632121, 0.672320), (0.3, 2, 0.753403, 0.91)])
    def test_the_customary_share_in_time_is_no_lower_bound(
        self, rho: float, x: float, truth: float, claim: float
    ) -> None:
        assert 1 - mm1(rho, 1).tail(x) == pytest.approx(truth, rel=1e-5)
        assert customary_slo_share(rho, x, 1) == pytest.approx(claim, rel=1e-5)

    def test_serving_bounds(self) -> None:
        assert static_batch_share([100, 500, 50]) == pytest.approx(0.433333, rel=1e-5)
        assert 1 / static_batch_share([100, 500, 50]) == pytest.approx(2.30769, rel=1e-5)
        assert exponential_batch_share(8) == pytest.approx(0.367937, rel=1e-5)
        floor = decode_floor_ms(64, 1, 1e12, 16.06e9 + 64 * 2000 * 131072, 3.35e9)
        assert floor == pytest.approx(9.80215, rel=1e-5)
        assert 64 / floor * 1e3 == pytest.approx(6529.18, rel=1e-5)

    def test_the_literal_three_stage_rule_hardly_uses_the_gpu(self) -> None:
        assert literal_three_stage_gpu_share(1, 1, 5) == pytest.approx(0.00365985, rel=1e-5)


class TestSecondMethod:
    def test_mmc_is_its_birth_death_chain(self) -> None:
        rate, mu, servers = 4.0, 0.5, 10
        n = np.arange(600)
        log_p = np.cumsum(np.log(np.concatenate([[1.0], rate / (mu * np.minimum(n[1:], servers))])))
        p = np.exp(log_p - log_p.max())
        p /= p.sum()
        assert erlang_c(servers, rate / mu) == pytest.approx(p[servers:].sum(), rel=1e-9)
        assert rate * mmc(rate, mu, servers).mean_ms == pytest.approx(n @ p, rel=1e-9)  # Little

    def test_mmc_where_spare_equals_the_service_rate(self) -> None:
        """d = mu is a removable singularity of the usual form."""
        at, near = mmc(0.5, 0.5, 2), mmc(0.5 + 1e-7, 0.5, 2)
        assert at.tail(3) == pytest.approx(near.tail(3), rel=1e-5)
        waits = erlang_c(2, 1)
        assert at.tail(3) == pytest.approx(math.exp(-1.5) * (1 + waits * 1.5), rel=1e-12)

    def test_one_server_is_mm1(self) -> None:
        assert mmc(0.3, 0.5, 1).percentile(0.99) == pytest.approx(mm1(0.3, 0.5).percentile(0.99), rel=1e-9)

    def test_crommelins_sum_where_it_can_be_trusted(self) -> None:
        rate, D, law = 0.8, 1.0, md1_wait(0.8, 1)
        for t in (0.0, 0.3, 1.0, 2.7, 6.5):
            terms = [
                (rate * (k * D - t)) ** k / math.factorial(k) * math.exp(-rate * (k * D - t)) for k in range(int(t) + 1)
            ]
            assert 1 - law.tail(t) == pytest.approx((1 - rate) * sum(terms), rel=1e-9)

    @settings(max_examples=25, deadline=None)
    @given(st.floats(0.02, 0.995))
    def test_md1_tail_integrates_to_its_mean_below_kingman(self, rho: float) -> None:
        law, bound = md1_wait(rho, 1), kingman_bound(rho, 1, math.expm1)
        t = np.linspace(0, 40 / bound.decay, 6001)
        tail = np.array([law.tail(x) for x in t])
        assert np.trapezoid(tail, t) == pytest.approx(law.mean_ms, rel=2e-3)
        assert np.all(tail <= np.exp(-bound.decay * t) + 1e-12)
        assert np.all(np.diff(tail) <= 1e-12)

    def test_kingman_is_exact_in_rate_for_exponential_service(self) -> None:
        bound = kingman_bound(0.3, 2, lambda theta: theta / (0.5 - theta) if theta < 0.5 else math.inf)
        assert bound.decay == pytest.approx(0.2, rel=1e-6)

    def test_mmc_against_ciw(self) -> None:
        ciw = pytest.importorskip("ciw", reason="Ciw, the peer simulator, is not installed")
        network = ciw.create_network(
            arrival_distributions=[ciw.dists.Exponential(4.0)],
            service_distributions=[ciw.dists.Exponential(0.5)],
            number_of_servers=[10],
        )
        means = []
        for seed in range(6):
            ciw.seed(seed)
            simulation = ciw.Simulation(network)
            simulation.simulate_until_max_time(1500)
            rows = [row for row in simulation.get_all_records() if row.arrival_date > 150]
            means.append(np.mean([row.exit_date - row.arrival_date for row in rows]))
        error = np.std(means, ddof=1) / math.sqrt(len(means))
        assert abs(np.mean(means) - mmc(4, 0.5, 10).mean_ms) < 5 * error


class TestRefusals:
    def test_unstable_load_names_its_limit(self) -> None:
        with pytest.raises(SlaOutOfReach, match=r"from 500/s on"):
            mm1(0.5, 0.5)
        with pytest.raises(SlaOutOfReach, match=r"below 5,000/s"):
            mmc(6, 0.5, 10)
        with pytest.raises(SlaOutOfReach):
            md1(1, 1)
        with pytest.raises(SlaOutOfReach, match="too near 1"):
            md1(1 - 1e-9, 1)

    @pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
    def test_a_rate_is_a_finite_number_above_zero(self, rate: float) -> None:
        for law in (lambda: mm1(rate, 1), lambda: md1(rate, 1), lambda: mg1(rate, 1, 2), lambda: mmc(rate, 1, 2)):
            with pytest.raises(WrongUsage, match="rate"):
                law()

    def test_moments_and_percentiles_that_cannot_be(self) -> None:
        with pytest.raises(WrongUsage, match="below"):
            mg1(0.1, 2, 3)
        with pytest.raises(WrongUsage, match="percentile"):
            mm1(0.1, 1).percentile(99)

    def test_heavy_tails_have_no_exponential_bound(self) -> None:
        with pytest.raises(SlaOutOfReach, match="no exponential moment"):
            kingman_bound(0.5, 1, lambda theta: math.inf)
