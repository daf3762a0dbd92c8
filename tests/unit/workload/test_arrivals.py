"""Arrival laws: gaps against their distributions, counts against the integral of the rate, streams apart."""

import numpy as np
import pytest
from scipy import stats

from latfit.errors import WrongUsage
from latfit.stats import FloatArray
from latfit.workload.arrivals import ArrivalProcess, Gamma, Modulated, Piecewise, Poisson
from latfit.workload.load import ARRIVALS, LENGTHS, Streams

LAWS = [
    Poisson(0.5),
    Gamma(0.5, 2.0),
    Gamma(0.5, 0.3),
    Piecewise([0, 100, 400], [0.1, 1.0, 0.2], repeats=True),
    Modulated([0.1, 2.0], [300.0, 60.0]),
]


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


class TestEveryLaw:
    @pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
    def test_sorted_and_counted(self, law: ArrivalProcess) -> None:
        times = law.times_ms(5000, rng())
        assert len(times) == 5000
        assert np.all(np.diff(times) >= 0)
        assert times[0] >= 0

    @pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
    @pytest.mark.parametrize("rate", [None, 3.0])
    def test_mean_rate(self, law: ArrivalProcess, rate: float | None) -> None:
        """Over independent replications, so that bursts count in the standard error."""
        scaled = law if rate is None else law.at_rate(rate)
        assert scaled.rate == pytest.approx(rate or law.rate)
        ends = np.array([scaled.times_ms(4000, rng(seed))[-1] for seed in range(40)])
        assert abs(ends.mean() - 4000 / scaled.rate) < 4 * ends.std(ddof=1) / np.sqrt(40) + 300 / scaled.rate


class TestGaps:
    def test_poisson(self) -> None:
        assert stats.kstest(np.diff(Poisson(0.5).times_ms(20_000, rng())), "expon", args=(0, 2)).pvalue > 1e-3

    @pytest.mark.parametrize("cv", [0.3, 1.0, 2.0])
    def test_gamma(self, cv: float) -> None:
        gaps = np.diff(Gamma(0.5, cv).times_ms(20_000, rng()))
        assert stats.kstest(gaps, "gamma", args=(1 / cv**2, 0, 2 * cv**2)).pvalue > 1e-3

    def test_modulated_counts_vary_more(self) -> None:
        """Index of dispersion of a two-level process over long windows: 1 + 2 (a - b)^2 p q tau / mean rate, where
        tau = 1/(1/sojourn_a + 1/sojourn_b), times the share of a long window (Fischer and Meier-Hellstern 1993)."""
        law = Modulated([0.1, 2.0], [300.0, 60.0])
        p, tau, window = 300 / 360, 300 * 60 / 360, 5000.0
        excess = 2 * 1.9**2 * p * (1 - p) * tau / law.rate
        expected = 1 + excess * (1 - tau / window * (1 - np.exp(-window / tau)))
        counts = []
        for seed in range(60):
            times = law.times_ms(25_000, rng(seed))
            counts.append(np.histogram(times, np.arange(0, times[-1], window))[0][:-1])
        found = np.array([c.var(ddof=1) / c.mean() for c in counts])
        assert abs(found.mean() - expected) < 4.5 * found.std(ddof=1) / np.sqrt(60) + 0.02 * expected


class TestVaryingRate:
    def test_published_overload(self) -> None:
        """lambda(t) = 6 + 4 sin(2 pi t/1000), capacity 8: the fluid backlog peaks at 435.991, at t = 416.667."""
        grid = np.linspace(0, 1000, 1001)
        law = Piecewise(grid.tolist(), (6 + 4 * np.sin(2 * np.pi * grid / 1000)).tolist())
        peaks = []
        for seed in range(200):
            times = law.times_ms(10**6, rng(seed))
            assert times[-1] <= 1000
            inside = times[(times >= 83.3333) & (times <= 416.667)]
            peaks.append(len(inside) - 8 * (416.667 - 83.3333))
        found = np.array(peaks)
        assert abs(found.mean() - 435.991) < 4 * found.std(ddof=1) / np.sqrt(200)
        # Counts of a Poisson process vary as their mean.
        assert found.var(ddof=1) == pytest.approx(435.991 + 8 * 333.33, rel=0.45)

    def test_arrivals_follow_the_rate(self) -> None:
        law = Piecewise([0, 100, 400], [0.1, 1.0, 0.2], repeats=True)
        phase = law.times_ms(40_000, rng()) % 400

        def share(t: FloatArray) -> FloatArray:
            early, late = np.minimum(t, 100), np.maximum(t - 100, 0)
            return np.asarray((0.1 * early + 0.0045 * early**2 + late - 0.8 / 600 * late**2) / 235)

        assert stats.kstest(phase, share).pvalue > 1e-3


class TestStreams:
    def test_uses_and_replications_are_apart(self) -> None:
        drawn = [
            Streams(seed, replication).generator(*use).random(3).tolist()
            for seed in (0, 1)
            for replication in (0, 1)
            for use in ((ARRIVALS,), (LENGTHS,), (4, 0), (4, 1))
        ]
        assert len({tuple(row) for row in drawn}) == 16


class TestRefused:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: Poisson(0),
            lambda: Poisson(float("nan")),
            lambda: Gamma(1, 0),
            lambda: Piecewise([1, 2], [1, 1]),
            lambda: Piecewise([0, 2], [0, 0]),
            lambda: Piecewise([0, 2], [1, -1]),
            lambda: Piecewise([0, 5e-324], [1, 0]),
            lambda: Piecewise([0, 2], [1, 1e300]),
        ],
    )
    def test_refused(self, make: object) -> None:
        with pytest.raises(WrongUsage):
            make()  # type: ignore[operator]
